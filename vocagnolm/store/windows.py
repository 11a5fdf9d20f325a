"""Losses of a document's tokens by a model whose context may be shorter than the document.

A document is encoded as a whole. If it exceeds the context, the model reads it in windows, each
after a start token. A window begins with tokens that the window before has scored, so that every
token is scored with enough context.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from vocagnolm.attention import segments_of
from vocagnolm.conventions import IGNORED_LABEL
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
    longer.
    """

    def __init__(self, model: PreTrainedModel, batch_tokens: int):
        self._model = add_token_losses(model.train(False).requires_grad_(False))
        self._batch_tokens = batch_tokens

    def losses(self, windows: Sequence[Window], report: Report | None = None) -> list[LossArray]:
        """Return the losses of the scored tokens of each window, in nats.

        `report` is called with the number of tokens after every batch.
        """
        losses: list[LossArray] = [np.empty(0, np.float32)] * len(windows)
        # Windows of similar length share a batch, which needs little padding. The longest come
        # first, so running out of memory shows at once.
        order = sorted(range(len(windows)), key=lambda number: -len(windows[number].ids))
        while order:
            # The first window is the longest of its batch, so all are padded to its length.
            rows = max(1, self._batch_tokens // len(windows[order[0]].ids))
            batch, order = order[:rows], order[rows:]
            scored = self._batch_losses([windows[number] for number in batch])
            # Put the losses back in the order of the windows, whatever the order of the batches.
            for number, row in zip(batch, scored, strict=True):
                losses[number] = row
            if report:
                report(sum(len(row) for row in scored))
        return losses

    @torch.no_grad()
    def _batch_losses(self, windows: Sequence[Window]) -> list[LossArray]:
        """Score a batch. Padding follows the tokens, which do not see it."""
        scored = [slice(len(window.ids) - window.scored, len(window.ids)) for window in windows]
        # Only the scored tokens have labels. A label is at the index of its own token. The model
        # shifts by one, and returns the loss at that index, too.
        length = max(part.stop for part in scored)
        ids_BT = torch.zeros((len(windows), length), dtype=torch.long)
        labels_BT = torch.full_like(ids_BT, IGNORED_LABEL)
        for row, (window, part) in enumerate(zip(windows, scored, strict=True)):
            ids_BT[row, : part.stop] = torch.tensor(window.ids)
            labels_BT[row, part] = ids_BT[row, part]
        loss_BT = self._model(
            input_ids=ids_BT.to(self._model.device),
            position_ids=torch.arange(length, device=self._model.device).expand(len(windows), -1),
            labels=labels_BT.to(self._model.device),
            segments=segments_of([length] * len(windows)),
            token_losses=True,
        )
        rows = loss_BT.float().cpu().numpy()
        return [row[part] for row, part in zip(rows, scored, strict=True)]
