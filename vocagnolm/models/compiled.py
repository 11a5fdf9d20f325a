"""Models whose layers and losses are compiled."""

from typing import Any

import torch
from torch import Tensor, nn

from vocagnolm.models.cost import decoder_layers
from vocagnolm.token_loss import inner_model


def compile_model(model: nn.Module, backend: str | None = None, mode: str | None = None) -> None:
    """Compile each repeated layer of a model in place, which leaves the names of its weights.

    Layers of one kind share what is compiled. What makes losses of logits is compiled, too. The
    embeddings, the product with the head and the alignment stay as they are. DDP and FSDP2 may wrap
    the model before or after. The options are those of `torch.compile`. Packed rows have any width,
    so all sizes of a batch are dynamic from the beginning.
    """
    inner: Any = inner_model(model)
    backend = backend or "inductor"
    for layer in decoder_layers(inner):
        layer.compile(backend=backend, mode=mode, dynamic=True)
    # Inductor's kernels of losses have crashed on a CPU (PyTorch 2.13, "double free").
    if inner.device.type != "cpu" or backend != "inductor":
        inner.compiled_losses = torch.compile(losses_of, backend=backend, dynamic=True)


def losses_of(logits_KV: Tensor, target_K1: Tensor) -> Tensor:
    """Return the losses [K] of targets, and leave the logits as they are."""
    # On a GPU, Inductor computes maximum and sum in one read where it knows of 8 words or more.
    torch._check(logits_KV.shape[1] >= 8)  # type: ignore[no-untyped-call]
    return -torch.log_softmax(logits_KV, -1).gather(-1, target_K1)[:, 0]
