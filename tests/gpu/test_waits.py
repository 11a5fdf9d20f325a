"""A micro-batch whose tensors are on the GPU waits for nothing: here a wait is an error.

`torch.cuda.set_sync_debug_mode` finds copies to the host, and results whose size it must know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from methods_world import METHODS
from transformers import masking_utils

pytestmark = pytest.mark.gpu


@pytest.fixture
def waits_are_errors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Except that of transformers with sdpa, which asks once per forward pass for packed rows."""
    asks = masking_utils.find_packed_sequence_indices

    def known(position_ids: torch.Tensor) -> torch.Tensor | None:
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")
        found: torch.Tensor | None = asks(position_ids)
        torch.cuda.set_sync_debug_mode(mode)
        return found

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", known)
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("attention", ["sdpa", "torch_varlen"])
@pytest.mark.parametrize("method", ["cpt", "random", "vocagnolm", *METHODS, "stored turns"])
def test_micro_batch_waits_for_nothing(
    method: str,
    attention: str,
    make: Callable[..., Any],
    device: torch.device,
    waits_are_errors: None,
) -> None:
    trainer, batch = make(method, device, attention=attention)
    batch, count = trainer._prepare_inputs(batch), torch.full((), 100, device=device)
    for mode in ("default", "error"):  # what is made once may wait
        torch.cuda.set_sync_debug_mode(mode)
        trainer.training_step(trainer.model_wrapped, batch, count)


def test_waits_are_found(device: torch.device, waits_are_errors: None) -> None:
    values = torch.rand(5, device=device)
    torch.cuda.set_sync_debug_mode("error")
    for wait in (values.tolist, values.nonzero, values.sum().item, lambda: values[values > 0.5]):
        with pytest.raises(RuntimeError, match="synchronizing"):
            wait()
