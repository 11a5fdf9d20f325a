"""Count the kernels of a micro-batch that are neither matrix products nor attention, without a GPU.

    python -m benchmarks.elementwise                # the paper's models, in two minutes on one core
    python -m benchmarks.elementwise --scale tiny   # does it run?

In eager mode, the trainer runs on the device of `tests/cuda/fake_cuda.py`, which sees every kernel.
For one layer of each model, its tiles of losses and the same inputs, Inductor then plans the
compiled kernels, as for an H100, and stops before it writes any, so Triton is not needed. All
layers of a model are alike.

The bytes of a kernel are those of the tensors that it reads and writes, each counted once, but a
softmax reads three times (maxima, sums, its result), and a gather only what it returns. Liger's
kernels are Triton's, which no part of PyTorch plans, so they cannot be counted here.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from functorch.compile import make_boxed_func
from torch._inductor import compile_fx, config, scheduler

from vocagnolm.models.compiled import losses_of
from vocagnolm.models.cost import decoder_layers
from vocagnolm.output_head import log_softmax_
from vocagnolm.shell.io import markdown_table
from vocagnolm.token_loss import inner_model

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "cuda"))
import fake_cuda
import fake_run  # before the device is there, as TorchDynamo lists the functions of torch.cuda

STUDENT, TEACHER = "student, forward and backward", "teacher, forward"
_MICRO_BATCH = {"tiny": 2, "full": 4}
_PRODUCTS = ("mm", "addmm", "bmm")
_WITHOUT_KERNEL = ("empty", "new_empty", "detach", "alias", "_unsafe_view")
_H100 = {"name": "NVIDIA H100", "major": 9, "minor": 0, "multi_processor_count": 132}
_H100 |= {"warp_size": 32, "max_threads_per_multi_processor": 2048, "max_threads_per_block": 1024}
_H100 |= {"regs_per_multiprocessor": 65536, "total_memory": 80 * 2**30, "gcnArchName": ""}
_GIB = 2**30


class Cost(NamedTuple):
    """A number of kernels, and the bytes that they read and write."""

    kernels: int = 0
    bytes: int = 0

    def plus(self, other: Cost, times: int = 1) -> Cost:
        """Add another cost several times; -1 takes it away."""
        return Cost(self.kernels + times * other.kernels, self.bytes + times * other.bytes)


class Part(NamedTuple):
    """A part of a micro-batch in eager mode; a layer and the losses in eager mode and compiled."""

    eager: Cost
    layers: int
    eager_layer: Cost
    compiled_layer: Cost
    eager_losses: Cost
    compiled_losses: Cost

    @property
    def compiled(self) -> Cost:
        """The part with compiled layers and losses; all else stays in eager mode."""
        rest = self.eager.plus(self.eager_layer, -self.layers).plus(self.eager_losses, -1)
        return rest.plus(self.compiled_layer, self.layers).plus(self.compiled_losses)


class Counting(fake_cuda.Watch):
    """Counts kernels in each phase of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.costs: dict[str, Cost] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_dispatch__(func, types, args, kwargs)
        name = fake_cuda.name_of(func)
        out = [tensor for tensor in fake_cuda.tensors_of((made,)) if tensor.is_cuda]
        if not out or func.is_view or name.startswith(_WITHOUT_KERNEL):
            return made
        if name in _PRODUCTS or "attn" in name or "attention" in name:
            return made
        sizes = {}
        for tensor in (*out, *fake_cuda.tensors_of((args, list((kwargs or {}).values())))):
            # An expanded tensor has more elements than its storage.
            storage = tensor.untyped_storage()
            sizes[storage._cdata] = min(tensor.nbytes, storage.nbytes())
        if name == "gather":
            sizes[args[0].untyped_storage()._cdata] = out[0].nbytes
        if name in ("log_softmax", "softmax"):
            sizes |= dict.fromkeys(range(3), out[0].nbytes)
        before = self.costs.get(self.phase, Cost())
        self.costs[self.phase] = before.plus(Cost(1, sum(sizes.values())))
        return made


def count(scale: str, layers: int | None = None) -> dict[str, Part]:
    """Count a micro-batch of 4 packed sequences; other models than the paper's have `layers`."""
    fake_cuda.start()
    if layers:
        fake_run.SCALES[scale][1]["num_hidden_layers"] = layers
    kept: dict[str, Any] = {}
    with Counting() as watch:
        trainer = fake_run.make_run(scale=scale, rows=_MICRO_BATCH[scale], micro_batches=1)
        teacher = trainer.online_teachers[0]
        numbers, hooks = {}, []
        tiles: dict[str, list[Any]] = {STUDENT: [], TEACHER: []}
        for role, model in ((STUDENT, trainer.model), (TEACHER, teacher)):
            first, *others = decoder_layers(inner_model(model))
            numbers[role] = 1 + len(others)
            keep = _keeper(kept, role)
            hooks.append(first.register_forward_pre_hook(keep, with_kwargs=True))
            losses = watch.during(f"losses of {role}")(_eager_losses(tiles[role]))
            inner_model(model).compiled_losses = losses
        teacher.forward = watch.during(TEACHER)(teacher.forward)
        fake_run.one_step(watch, trainer)
        for hook in hooks:
            hook.remove()
        for role, (layer, given, named) in kept.items():
            _run(layer, role == STUDENT, given, named, watch.during(f"layer of {role}"))
    _prepare_inductor()
    parts = {}
    for role, (layer, given, named) in kept.items():
        planned: list[Cost] = []
        with watch.fake:
            compiled = torch.compile(layer, backend=_planner(planned))
            _run(compiled, role == STUDENT, given, named, nullcontext())
            compiled_losses = _plan_losses(tiles[role])
        losses = watch.costs[f"losses of {role}"]
        eager = watch.costs["micro-batch" if role == STUDENT else TEACHER].plus(losses)
        eager_layer = watch.costs[f"layer of {role}"]
        parts[role] = Part(
            eager, numbers[role], eager_layer, _sum(planned), losses, compiled_losses
        )
    return parts


def _eager_losses(tiles: list[Any]) -> Callable[..., Any]:
    """Return a function that computes losses of a tile as without compilation, and keeps it."""

    def losses(logits_KV: Any, target_K1: Any) -> Any:
        tiles.append((logits_KV, target_K1))
        return -log_softmax_(logits_KV).gather(-1, target_K1)[:, 0]

    return losses


def _plan_losses(tiles: list[Any]) -> Cost:
    costs: dict[int, Cost] = {}
    for tile in tiles:
        rows = len(tile[0])
        if rows not in costs:
            planned: list[Cost] = []
            torch._dynamo.reset()
            with torch.no_grad():
                torch.compile(losses_of, backend=_planner(planned), dynamic=True)(*tile)
            costs[rows] = _sum(planned)
    return _sum([costs[len(tile[0])] for tile in tiles])


def _sum(costs: list[Cost]) -> Cost:
    total = Cost()
    for cost in costs:
        total = total.plus(cost)
    return total


def _keeper(kept: dict[str, Any], role: str) -> Callable[..., None]:
    def keep(layer: Any, given: Any, named: Any) -> None:
        kept[role] = (layer, [tensor.detach() for tensor in given], named)

    return keep


def _run(layer: Any, trains: bool, given: Any, named: Any, phase: Any) -> None:
    """Run one layer as a micro-batch does, with its backward pass if it trains."""
    hidden_BTD = given[0].requires_grad_(trains)
    weights = list(layer.parameters())
    gradient_BTD = torch.ones_like(hidden_BTD)
    with phase, torch.set_grad_enabled(trains):
        with torch.autocast("cuda", torch.bfloat16, enabled=trains):
            out = layer(hidden_BTD, **named)
        if trains:
            torch.autograd.grad(out, [hidden_BTD, *weights], gradient_BTD.to(out.dtype))


# -- Inductor ------------------------------------------------------------------------------------


class _Planned(Exception):  # noqa: N818
    """Ends a compilation before kernels are written."""


def _prepare_inductor() -> None:
    """Give Inductor the answers that it asks of a device, and of Triton."""
    cuda: Any = torch.cuda
    state = torch.zeros(8, dtype=torch.uint8)
    cuda._get_device_properties = lambda _: SimpleNamespace(**_H100)
    cuda.get_rng_state = lambda *_: state
    cuda.set_rng_state = lambda *_: None
    # TorchDynamo tells them apart, so they are two functions.
    cuda._exchange_device = lambda _: 0
    cuda._maybe_exchange_device = lambda _: 0
    module: Any = scheduler
    module.has_triton = lambda: True
    config.joint_graph_constant_folding = False  # it would compute constants on the device


def _planner(planned: list[Cost]) -> Callable[..., Any]:
    """Return a backend of torch.compile that plans kernels, and runs the graph without them."""

    def plan(kernels: Any) -> None:
        for node in kernels.nodes:
            # Products and attention are calls of others' kernels.
            if not isinstance(node, scheduler.ExternKernelSchedulerNode):
                planned.append(Cost(1, node.get_read_write_buffers_sizes()))
        raise _Planned

    def compile_inner(graph: Any, inputs: Any, **options: Any) -> Any:
        unchanged = copy.deepcopy(graph)
        count = len(planned)
        try:
            compile_fx.compile_fx_inner(graph, inputs, **options)
        except Exception:
            # Inductor wraps the exception that ends its work.
            if len(planned) == count:
                raise
        return make_boxed_func(unchanged.forward)

    scheduler.Scheduler.codegen = plan  # type: ignore[method-assign]
    return lambda graph, inputs: compile_fx.compile_fx(graph, inputs, inner_compile=compile_inner)


def main() -> None:
    """Print the counts of a micro-batch."""
    parser = argparse.ArgumentParser("python -m benchmarks.elementwise", description=__doc__)
    parser.add_argument("--scale", choices=list(_MICRO_BATCH), default="full")
    parts = count(parser.parse_args().scale)
    rows = [["", "eager", "compiled", "share", "eager, GiB", "compiled, GiB", "share"]]
    for name, part in parts.items():
        for what, eager, compiled in (
            (name, part.eager, part.compiled),
            ("one layer of it", part.eager_layer, part.compiled_layer),
            ("its losses of logits", part.eager_losses, part.compiled_losses),
        ):
            row = [what, f"{eager.kernels:,}", f"{compiled.kernels:,}"]
            row.append(f"{compiled.kernels / eager.kernels:.0%}")
            row += [f"{cost.bytes / _GIB:.3g}" for cost in (eager, compiled)]
            rows.append([*row, f"{compiled.bytes / eager.bytes:.0%}"])
    sys.stdout.write(markdown_table(rows) + "\n")


if __name__ == "__main__":
    main()
