"""One micro-batch of every method, on the device: its losses, selected tokens and gradients.

The reference is the CPU in float32 with sdpa. In float32 the device is at most `FLOAT32` off: sums
in another order, which changes from run to run on a GPU, are 1e-6 off. TensorFloat-32 is 1e-3 off,
so it is disabled. In bfloat16 the device is at most twice as far off as the CPU in bfloat16.

A selection is discrete, so it is compared in two parts: the losses that it reads are near those
expected, and from these very losses the CPU selects the same tokens. Gradients are compared for the
tokens that are selected in float32.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from methods_world import METHODS, VARIANTS
from torch import Tensor
from torch.utils._pytree import tree_map_only

from benchmarks.models import backward
from vocagnolm import output_head
from vocagnolm.objective import Objective

pytestmark = pytest.mark.gpu

# For losses, the root mean square in nats; for the gradient, the norm relative to its own.
FLOAT32 = 1e-4
# ULD's gradient has the sign of the difference of two probabilities, and the smallest differences
# change sign between devices. A GPU was 3e-4 off.
ULD_GRADIENT = 1e-3
CPU = torch.device("cpu")
EVERY = ("cpt", "random", *VARIANTS, *METHODS, "turns", "stored turns")
# Without a GPU this tests the comparison itself.
TRIED = EVERY if torch.cuda.is_available() else ("uld", "rho1 entropy", "several mean", "turns")
WAYS = [("eager", "float32"), *((how, "bf16") for how in ("sdpa", "eager", "torch_varlen"))]
if not torch.cuda.is_available():
    WAYS.append(("torch_varlen", "float32"))  # on a GPU it computes in 16 bits only
else:
    WAYS.append(("sdpa", "float32"))  # on a CPU it is the reference
    if importlib.util.find_spec("flash_attn"):
        WAYS.append(("flash_attention_2", "bf16"))
Step = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module", autouse=True)
def exact() -> Iterator[None]:
    """Multiply in full float32, whatever the environment says; use several tiles of logits."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("TILE_LOGITS", "TILE_LOGITS_CUDA"):
            patch.setattr(output_head, name, 2**15)
        yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture(scope="module")
def step(make: Callable[..., Any]) -> Iterator[Step]:
    """`step(method, device, bf16, attention, chosen)`: its results, on the CPU in float32."""
    own, seen, forced = Objective.select, {}, []

    def select(objective: Objective, loss_BS: Tensor, batch: Any, teacher: Any = None) -> Any:
        found = own(objective, loss_BS, batch, teacher)
        on_cpu = tree_map_only(Tensor, Tensor.cpu, (loss_BS, dict(batch), teacher))
        again = own(objective, *on_cpu).weight_BS
        torch.testing.assert_close(found.weight_BS.cpu(), again, rtol=0, atol=1e-5)
        seen.update(student=loss_BS, weight=found.weight_BS)
        if teacher is not None:
            entropy_BT = teacher.loss_BT if teacher.entropy_BT is None else teacher.entropy_BT
            seen.update(teacher=torch.stack([teacher.loss_BT, entropy_BT]))
        return found._replace(weight_BS=forced[0].to(loss_BS)) if forced else found

    def run(
        method: str,
        device: torch.device,
        bf16: bool,
        attention: str = "sdpa",
        chosen: Tensor | None = None,
    ) -> dict[str, Any]:
        seen.clear()
        forced[:] = [] if chosen is None else [chosen]
        trainer, batch = make(method, device, bf16, attention)
        loss = backward(trainer, [batch])
        gradients = [p.grad.flatten() for p in trainer.model.parameters()]
        return {
            "loss": float(loss),
            "gradient": torch.cat(gradients).cpu(),
            **{name: tensor.detach().float().cpu() for name, tensor in seen.items()},
        }

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Objective, "select", select)
        yield run


@pytest.fixture(scope="module")
def expected(step: Step) -> Callable[[str], tuple[dict[str, Any], dict[str, float]]]:
    """`expected(method)`: what the CPU computes in float32, and how far bfloat16 is off there."""

    def compute(method: str) -> tuple[dict[str, Any], dict[str, float]]:
        exact = step(method, CPU, bf16=False)
        rounded = step(method, CPU, bf16=True, chosen=exact.get("weight"))
        return exact, differences(rounded, exact)

    return cache(compute)


def differences(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    gaps = {}
    for name in {"student", "teacher", "gradient"} & expected.keys():
        assert found[name].isfinite().all()
        gap, size = found[name] - expected[name], expected[name]
        gaps[name] = float(
            gap.norm() / (size.norm() if name == "gradient" else size.numel() ** 0.5)
        )
    return gaps


@pytest.mark.parametrize(("attention", "dtype"), WAYS)
@pytest.mark.parametrize("method", TRIED)
def test_step_is_that_of_the_cpu(
    method: str, attention: str, dtype: str, device: torch.device, step: Step, expected: Any
) -> None:
    bf16 = dtype == "bf16"
    exact, of_bf16 = expected(method)
    found = step(method, device, bf16, attention, exact.get("weight"))
    assert found["loss"] == pytest.approx(exact["loss"], rel=1e-2 if bf16 else FLOAT32)
    assert exact["gradient"].norm() > 0
    for name, gap in differences(found, exact).items():
        limit = ULD_GRADIENT if method.startswith("uld") and name == "gradient" else FLOAT32
        assert gap <= (limit + 2 * of_bf16[name] if bf16 else limit), name
