"""Probes of a loaded model: attention keeps packed documents apart, and can hold the longest one.

A few random tokens, in the model's own dtype and attention, through the path of training.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from vocagnolm.conventions import IGNORED_LABEL
from vocagnolm.row_segments import segments_of, takes_segments
from vocagnolm.token_loss import (
    add_token_losses,
    inner_model,
    is_exact,
    probe_ids,
    probing,
    require_finite,
)


def check_longest(
    model: PreTrainedModel, device: torch.device | None = None, *, longest: int
) -> None:
    """Reject attention that needs segments and cannot serve one of so many tokens.

    Such as one with a sliding window. A few tokens are read, under the claim that they are so many.
    Calls `add_token_losses` first. `device` is where the model will run, if it is not there yet.
    """
    call: Callable[..., Tensor] = add_token_losses(model, device)
    if not takes_segments(inner_model(model)):
        return
    with probing(model, device):
        ids = probe_ids(model, (1, 4))
        positions = torch.arange(4, device=ids.device)[None]
        segments = segments_of([4])._replace(longest=longest)
        rows = {"input_ids": ids, "position_ids": positions, "labels": ids}
        call(**rows, segments=segments, token_losses=True)


def check_packing(model: PreTrainedModel, device: torch.device | None = None) -> None:
    """Verify that documents packed into one row have the losses they have alone.

    Position ids restart with every document, and attention must not cross documents. Not every
    attention implementation isolates them (flash attention does not in batches of several rows),
    and not every model can (recurrent ones carry their state on). Calls `add_token_losses` first.
    `device` is where the model will run, if it is not there yet, in its final dtype and attention.
    """
    call: Callable[..., Tensor] = add_token_losses(model, device)

    def losses(ids: Tensor, position_ids: Tensor, labels: Tensor, lengths: Iterable[int]) -> Tensor:
        """Take the same path as training."""
        rows = {"input_ids": ids, "position_ids": position_ids, "labels": labels}
        return call(**rows, segments=segments_of(lengths), token_losses=True)

    # Tokens by row; other borders in the second row, since masks may differ by row.
    documents = ((5, 11), (9, 7))
    with probing(model, device):
        ids = probe_ids(model, (2, 16))
        # plain        0 1 2 3 4 5 6 7 ...
        # restarting   0 1 2 3 4 0 1 2 ...
        plain = torch.arange(16, device=ids.device).expand(2, -1)
        restarting = torch.stack([torch.cat([plain[0, :n] for n in row]) for row in documents])
        labels = ids.masked_fill(restarting == 0, IGNORED_LABEL)
        packed = losses(ids, restarting, labels, sum(documents, ()))
        crossing = losses(ids, plain, labels, [16, 16])
        alone = [
            losses(one, plain[:1, :n], one, [n])
            for row, lengths in zip(ids, documents, strict=True)
            for n, one in zip(lengths, row[None].split_with_sizes(lengths, 1), strict=True)
        ]
    separate = torch.cat(alone, dim=1).view_as(packed)
    require_finite(model, packed, crossing, separate)
    error, scale = (float((losses - separate).abs().max()) for losses in (packed, crossing))
    # Rounding differs between shapes. Below the floor even crossing looks like isolation, as in
    # some untrained models; a small share of the scale still shows the leak of one layer in many.
    exact = is_exact(model, model.dtype) and not torch.is_autocast_enabled(ids.device.type)
    floor, share = (1e-4, 0.01) if exact else (5e-2, 0.2)
    if error > floor + share * scale:
        attention = inner_model(model).config._attn_implementation
        raise ValueError(
            f"{type(model).__name__} with attention implementation {attention} lets "
            f"packed documents see each other: losses differ by up to {error:.2g} nats from those "
            f"of the same documents alone (by {scale:.2g} when attention crosses on purpose). Use "
            "--attn_implementation sdpa or eager, or accept it with --attend_across_documents"
        )
