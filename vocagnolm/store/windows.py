"""Losses of a document's tokens by a model whose context may be shorter than the document.

A document is encoded as a whole. If it exceeds the context, the model reads it in windows, each
after a start token. A window begins with tokens that the window before has scored, so that every
token is scored with enough context.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from vocagnolm.attention import segments_of, takes_segments
from vocagnolm.conventions import IGNORED_LABEL
from vocagnolm.models.compiled import compile_model
from vocagnolm.store.format import LossArray
from vocagnolm.token_loss import add_token_losses


@dataclass(frozen=True)
class Window:
    """Tokens of a document that a model reads at once, after a start token.

    The last `scored` tokens get losses. The others are context.
    """

    document: int
    ids: list[int]
    scored: int


def windows(document: int, ids: Sequence[int], context: int, min_context: int) -> Iterator[Window]:
    """Cut a document into windows. Each scores the tokens that those before it did not.

    The first of `ids` is the start token, with which every window begins. A window has at most
    `context` tokens. A further window has `min_context` tokens, less than `context` - 1, before
    those that it scores.

    >>> [(w.ids, w.scored) for w in windows(0, [9, 1, 2, 3, 4, 5], context=4, min_context=1)]
    [([9, 1, 2, 3], 3), ([9, 3, 4, 5], 2)]
    """
    # With a context of 6 and at least 2 tokens of it before what is scored (in capitals):
    #
    #     tokens      a b c d e f g h i j k
    #     window 0  s A B C D E
    #     window 1        s d e F G H
    #     window 2              s g h I J K
    # A window has a start token and `min_context` tokens, and must have room for one more: else it
    # would score nothing, and the loop would never end.
    assert min_context < context - 1, f"no room after {min_context} tokens in {context}"
    if not ids:
        return
    start, ids = ids[0], ids[1:]
    # The tokens before `at` are already scored.
    at = 0
    while at < len(ids):
        first = max(0, at - min_context) if at else 0
        last = min(len(ids), first + context - 1)
        # The tokens from `first` to `at` are read again as context, and get no loss here.
        yield Window(document, [start, *ids[first:last]], last - at)
        at = last


# Gets the number of tokens that were scored since the last call.
Report = Callable[[int], object]


class HFScorer:
    """Scores windows with a causal LM of `transformers`, which is frozen, on the model's device.

    A batch has at most `batch_tokens` positions, including padding, unless a single window is
    longer. If the model's attention takes segments, windows are packed, without padding. A backend
    of `torch.compile` compiles the model's layers.
    """

    def __init__(self, model: PreTrainedModel, batch_tokens: int, backend: str | None = None):
        self._model = add_token_losses(model.train(False).requires_grad_(False))
        if backend:
            compile_model(model, backend)
        self._batch_tokens = batch_tokens
        self._packs = takes_segments(model)

    def losses(self, windows: Sequence[Window], report: Report | None = None) -> list[LossArray]:
        """Return the losses of the scored tokens of each window, in nats.

        `report` is called with the number of tokens after every batch. On a GPU, that is when the
        batch is in the queue.
        """
        losses: list[LossArray] = [np.empty(0, np.float32)] * len(windows)
        # Windows of similar length share a batch, which needs little padding. The longest come
        # first, so running out of memory shows at once.
        order = sorted(range(len(windows)), key=lambda number: -len(windows[number].ids))
        batches = []
        while order:
            count = self._fitting([len(windows[number].ids) for number in order])
            batch, order = order[:count], order[count:]
            parts, loss_N = self._batch_losses([windows[number] for number in batch])
            batches.append((batch, parts, loss_N))
            if report:
                report(sum(windows[number].scored for number in batch))
        # A GPU has finished here, and not before: a batch that was read at once would leave it idle
        # until the next one is made.
        for batch, parts, loss_N in batches:
            row_N = loss_N.cpu().numpy()
            # Put the losses back in the order of the windows, whatever the order of the batches.
            for number, part in zip(batch, parts, strict=True):
                losses[number] = row_N[part]
        return losses

    def _fitting(self, lengths: Sequence[int]) -> int:
        """Return how many windows fit into a batch, of these lengths, the longest first."""
        # The first window is the longest of its batch, so all are padded to its length.
        fitting = self._batch_tokens // lengths[0]
        if self._packs:
            fitting = int(np.searchsorted(np.cumsum(lengths), self._batch_tokens, side="right"))
        return max(1, fitting)

    @torch.no_grad()
    def _batch_losses(self, windows: Sequence[Window]) -> tuple[list[slice], Tensor]:
        """Score a batch. Returns all losses [N], on the device, and the slice of each window's."""
        lengths = [len(window.ids) for window in windows]
        ids: list[int] = []
        positions: list[int] = []
        labels: list[int] = []
        parts = []
        for window, length in zip(windows, lengths, strict=True):
            part = slice(len(ids) + length - window.scored, len(ids) + length)
            # Padding follows the tokens, which do not see it.
            padding = 0 if self._packs else lengths[0] - length
            ids += window.ids + [0] * padding
            positions += range(length + padding)
            # Only the scored tokens have labels. A label is at the index of its own token. The
            # model shifts by one, and returns the loss at that index, too.
            labels += [IGNORED_LABEL] * (part.start - len(labels))
            labels += window.ids[length - window.scored :] + [IGNORED_LABEL] * padding
            parts.append(part)
        # Packed windows are one row, and padded windows are one each.
        length = len(ids) if self._packs else lengths[0]
        rows = torch.tensor([ids, positions, labels]).view(3, -1, length)
        ids_BT, positions_BT, labels_BT = self._to_device(rows)
        segments = segments_of(lengths if self._packs else [length] * len(lengths))
        loss_BT = self._model(
            input_ids=ids_BT,
            position_ids=positions_BT,
            labels=labels_BT,
            # Fewer rows of the head may round otherwise, and a store on a CPU keeps its bits.
            label_tokens=sum(window.scored for window in windows) if self._packs else None,
            segments=segments._replace(edges=self._to_device(segments.edges)),
            token_losses=True,
        )
        return parts, loss_BT.flatten()

    def _to_device(self, tensor: Tensor) -> Tensor:
        """Copy a tensor without waiting for what a GPU computes."""
        is_gpu = self._model.device.type == "cuda"
        pinned = tensor.pin_memory() if is_gpu else tensor
        return pinned.to(self._model.device, non_blocking=is_gpu)
