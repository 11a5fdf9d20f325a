"""The same numbers on a GPU as on the CPU, and nothing that waits for it."""

from __future__ import annotations

import copy
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import masking_utils

from benchmarks.generated import make_batches
from benchmarks.gpu_first.report import Report
from benchmarks.models import (
    backward,
    has_cuda,
    make_config,
    make_model,
    make_trainer,
    prepare,
    some_blocks,
)
from vocagnolm import Method
from vocagnolm.objective import StoredTeacher

METHODS = {
    **{f"vocagnolm {how}": Method(aggregation=how) for how in ("max", "mean", "sum")},
    **{name: Method(name) for name in ("cpt", "random", "kld", "uld")},
    "vocagnolm unmapped=mean": Method(unmapped="mean"),
    "rho1 with entropy": Method("rho1", top_k=0.7, rho1_score="loss_and_entropy"),
}
# Largest differences that rounding of float32 explains; of the gradient, in its norm.
_FLOAT32 = {"loss": 1e-4, "gradient": 1e-3, "chosen_otherwise": 0.0}
CPU = torch.device("cpu")
Found = dict[str, Any]


def compare_numbers(report: Report) -> None:
    """Compare losses, chosen tokens and gradients of every method with those of the CPU.

    The CPU's own difference between bfloat16 and float32 is the yardstick of the GPU's.
    """
    scale, length = ("tiny", 64) if report.is_tiny else ("small", 512)
    torch.manual_seed(0)
    # Else all losses are log(vocabulary).
    wide = {"initializer_range": 0.08}
    student, same_words = (make_model(make_config("student", scale, **wide), CPU) for _ in range(2))
    other = make_model(make_config("teacher", scale, **wide), CPU)
    batches = make_batches(some_blocks(scale, length, 4, 0.1), length, 2, stored=False)
    for name, method in METHODS.items():
        teachers = {"kld": same_words, "cpt": None, "random": None}
        models = student, teachers.get(method.method, other)
        with report.trial(name):
            found = {
                (device.type, bf16): _step(report, models, batches, length, device, bf16, method)
                for device in dict.fromkeys((CPU, report.device))
                for bf16 in (False, True)
            }
            expected = found["cpu", False]
            yardstick = differences(found["cpu", True], expected)
            report.say(f"{name}, cpu bf16 to cpu float32", "yardstick", **yardstick)
            for bf16 in (False, True) if has_cuda() else ():
                gap = differences(found["cuda", bf16], expected)
                bf16_limits = {key: 2 * float(yardstick[key]) + 1e-3 for key in _FLOAT32}
                limits = bf16_limits if bf16 else _FLOAT32
                is_close = all(float(gap[key]) <= limit for key, limit in limits.items())
                dtype = "bf16" if bf16 else "float32"
                verdict = "ok" if is_close else "LOOK"
                report.say(f"{name}, cuda {dtype} to cpu float32", verdict, **gap)
    if not has_cuda():
        report.say("skipped", "no CUDA: only the CPU's bf16 was compared with its float32")


def _step(
    report: Report,
    models: tuple[Any, Any],
    batches: list[dict[str, Any]],
    length: int,
    device: torch.device,
    bf16: bool,
    method: Method,
) -> Found:
    """Return what a trainer makes of the batches of one step, on the CPU in float32."""
    student, teacher = (model and copy.deepcopy(model).to(device) for model in models)
    if teacher is not None and bf16:
        teacher.to(torch.bfloat16)
    on_cpu = device.type == "cpu"
    trainer = prepare(
        make_trainer(
            student, teacher, length, report.scratch(), on_cpu=on_cpu, method=method, bf16=bf16
        )
    )
    found: Found = {}
    if method.choice == "guided":
        guidance = [trainer.token_guidance(batch) for batch in batches]
        for key in ("student_loss", "teacher_loss", "weight"):
            rows = [getattr(one, f"{key}_BS").float().cpu() for one in guidance]
            found[key] = torch.cat([row.flatten() for row in rows])
    found["loss"] = float(backward(trainer, batches))
    found["gradients"] = {n: p.grad.float().cpu() for n, p in student.named_parameters()}
    return found


def differences(found: Found, expected: Found) -> dict[str, float | str]:
    """Compute how far two results are apart; gradients relative to their norm, and the worst."""
    gaps: dict[str, float | str] = {"loss": abs(found["loss"] - expected["loss"])}
    for key in ("student_loss", "teacher_loss"):
        if key in expected:
            gaps[key] = float((found[key] - expected[key]).abs().max())
    gaps["chosen_otherwise"] = 0.0
    if "weight" in expected:
        chosen = expected["weight"].count_nonzero()
        gaps["chosen_otherwise"] = float((found["weight"] != expected["weight"]).sum() / chosen)
    apart = {n: (g - expected["gradients"][n]).norm() for n, g in found["gradients"].items()}
    norms = {name: gradient.norm() for name, gradient in expected["gradients"].items()}
    total, size = (torch.stack(list(each.values())).norm() for each in (apart, norms))
    worst = max(apart, key=lambda name: float(apart[name] / norms[name]))
    one = float(apart[worst] / norms[worst])
    return gaps | {"gradient": float(total / size), "gradient_of_one": one, "worst": worst}


# -- Waits -----------------------------------------------------------------------------------


def look_for_waits(report: Report) -> None:
    """Run a micro-batch, whose tensors are on the device, where waiting for it is an error."""
    scale, length = ("tiny", 64) if report.is_tiny else ("small", 1024)
    blocks = some_blocks(scale, length, 4)
    ways = {name: method for name, method in METHODS.items() if method.aggregation == "max"}
    for name, method in {**ways, "stored": Method()}.items():
        with report.trial(name):
            role = "student" if method.method == "kld" else "teacher"
            teacher: Any = StoredTeacher()
            if name in ("cpt", "random"):
                teacher = None
            elif name != "stored":
                teacher = make_model(make_config(role, scale), report.device, torch.bfloat16)
            student = make_model(make_config("student", scale), report.device)
            trainer = prepare(
                make_trainer(
                    student,
                    teacher,
                    length,
                    report.scratch(),
                    on_cpu=report.device.type == "cpu",
                    method=method,
                )
            )
            (made,) = make_batches(blocks, length, 4, stored=name == "stored")
            batch = trainer._prepare_inputs(made)
            tokens = torch.tensor(float(length), device=report.device)

            def run(trainer: Any = trainer, batch: Any = batch, tokens: Any = tokens) -> None:
                trainer.training_step(trainer.model_wrapped, batch, tokens)

            # What is made once waits; then an error, and then all of them.
            run()
            try:
                with _where_waits_are("error"):
                    run()
                report.say(f"{name}: waits per micro-batch", 0)
            except RuntimeError as error:
                found = _waiting_lines(run)
                report.say(f"{name}: waits per micro-batch", found.total(), error=str(error)[:200])
                for line, times in found.most_common():
                    report.say(f"{name}: waits at", line, times=times)
    if not has_cuda():
        report.say("skipped", "no CUDA: nothing could wait")


@contextmanager
def _where_waits_are(mode: str) -> Iterator[None]:
    """Set CUDA's mode for operations that wait, except for the one known in transformers.

    With sdpa and eager it asks once per forward pass whether rows are packed (docs/running.md).
    """
    asks = masking_utils.find_packed_sequence_indices

    def set_mode(mode: str) -> None:
        if has_cuda():
            torch.cuda.set_sync_debug_mode(mode)

    def known(position_ids: torch.Tensor) -> torch.Tensor | None:
        set_mode("default")
        found = asks(position_ids)
        set_mode(mode)
        return found

    masking_utils.find_packed_sequence_indices = known
    set_mode(mode)
    try:
        yield
    finally:
        set_mode("default")
        masking_utils.find_packed_sequence_indices = asks


def _waiting_lines(run: Callable[[], None]) -> Counter[str]:
    """Count the waits by the last lines outside torch; in backward that is its call."""
    found: Counter[str] = Counter()

    def show(message: object, *_: object, **__: object) -> None:
        if "synchronizing" in str(message):
            stack = [x for x in traceback.extract_stack()[:-1] if "/torch/" not in x.filename]
            stack = [x for x in stack if not x.filename.endswith("warnings.py")]
            lines = ["/".join(Path(x.filename).parts[-2:]) + f":{x.lineno}" for x in stack]
            found[" < ".join(lines[:-5:-1])] += 1

    with warnings.catch_warnings(), _where_waits_are("warn"):
        warnings.simplefilter("always")
        warnings.showwarning = show
        run()
    return found
