"""Tests on a few tokens whether a model keeps packed documents apart."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from vocagnolm.attention import segments_of
from vocagnolm.conventions import IGNORED_LABEL
from vocagnolm.fields import named
from vocagnolm.token_loss import (
    add_token_losses,
    inner_model,
    probe_ids,
    probing,
    require_finite,
    rounds_by_dtype,
)


def check_packing(
    model: nn.Module, device: torch.device | None = None, *, longest: int = 0
) -> None:
    """Check that documents packed into one row have the same losses as alone.

    Position ids restart with every document, and attention must not cross documents. Not every
    attention implementation separates them (flash attention does not in batches of several rows),
    and not every model can (recurrent ones carry their state on). Attention that needs segments is
    told that they have `longest` tokens, which attention with a shorter window rejects. Calls
    `add_token_losses` first. `device` is where the model will run, if it is not there yet, in its
    final dtype and attention.
    """
    call: Callable[..., Tensor] = add_token_losses(model, device)

    def losses(ids: Tensor, position_ids: Tensor, labels: Tensor, lengths: Iterable[int]) -> Tensor:
        """Take the same path as training."""
        segments = segments_of(lengths)
        segments = segments._replace(longest=max(longest, segments.longest))
        rows = {"input_ids": ids, "position_ids": position_ids, "labels": labels}
        return call(**rows, segments=segments, token_losses=True)

    # Rows are cut into documents of this many tokens. The second row has other boundaries, because
    # masks may differ between rows.
    documents = ((5, 11), (9, 7))
    with probing(model, device):
        ids = probe_ids(model, (2, 16))
        # plain        0 1 2 3 4 5 6 7 ...
        # restarting   0 1 2 3 4 0 1 2 ...
        plain_positions = torch.arange(16, device=ids.device).expand(2, -1)
        restarting_positions = plain_positions.clone()
        for row, (first, _) in enumerate(documents):
            restarting_positions[row, first:] -= first
        # Nothing of its own document predicts the first token, so it has no label.
        labels = ids.masked_fill(restarting_positions == 0, IGNORED_LABEL)
        # Plain positions make each row one document, as if all of its documents leaked.
        crossing_losses = losses(ids, plain_positions, labels, [16, 16])
        packed_losses = losses(ids, restarting_positions, labels, sum(documents, ()))
        document_losses = []
        # Each document also runs alone, where nothing can leak.
        for row, lengths in zip(ids, documents, strict=True):
            for document in row[None].split_with_sizes(lengths, 1):
                length = document.shape[1]
                document_losses.append(
                    losses(document, plain_positions[:1, :length], document, [length])
                )
    separate_losses = torch.cat(document_losses, dim=1).view_as(packed_losses)
    require_finite(model, packed_losses, crossing_losses, separate_losses)
    error = float((packed_losses - separate_losses).abs().max())
    scale = float((crossing_losses - separate_losses).abs().max())
    # Rounding differs between shapes, so small errors prove nothing. Below this floor, even
    # crossing attention looks separate, as in some untrained models. A small share of the scale
    # still shows the leak of one layer among many.
    inner = inner_model(model)
    exact = rounds_by_dtype(model, inner.dtype) and not torch.is_autocast_enabled(ids.device.type)
    floor, share = (1e-4, 0.01) if exact else (5e-2, 0.2)
    if error > floor + share * scale:
        raise ValueError(
            f"{type(model).__name__} with {named('attn_implementation')} "
            f"{inner.config._attn_implementation} lets packed documents see each other, so losses "
            f"differ by up to {error:.2g} nats from those of the same documents alone (by "
            f"{scale:.2g} when attention crosses on purpose): use sdpa or eager, which separate "
            f"them if a model can, or accept it with {named('attend_across_documents')}"
        )
