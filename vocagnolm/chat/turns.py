"""Conversations read by a tokenizer in a chat template, and what both must do for that."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from vocagnolm.chat.formats import Conversation
from vocagnolm.chat.reading import TrainOn, TurnTokens, read_tokens
from vocagnolm.chat.render import Template
from vocagnolm.texts.offsets import tokenizer_name
from vocagnolm.texts.tokens import Encoding

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Encode = Callable[[Sequence[str]], Sequence[Encoding]]


def special_ids(tokenizer: PreTrainedTokenizerBase) -> npt.NDArray[np.int64]:
    """Return the ids of the special tokens, of which the named ones are a part."""
    added = tokenizer.added_tokens_decoder.items()
    marked = {index for index, token in added if token.special}
    return np.array(sorted(marked | {*tokenizer.all_special_ids}), np.int64)


def read_turns(
    conversations: Sequence[Conversation],
    template: Template,
    encode: Encode,
    special: npt.NDArray[np.int64] | None,
    train_on: TrainOn,
) -> list[TurnTokens | str]:
    """Read conversations in a template, or return why one cannot be read.

    With the ids of special tokens, the ends of answers have labels, though they are no content.
    """
    rendered = [template.render(one) for one in conversations]
    try:
        encodings = iter(encode([one.text for one in rendered if not isinstance(one, str)]))
    except ValueError as error:
        # One of many is at fault: read alone, it alone cannot be.
        if len(conversations) == 1:
            return [str(error)]
        rest = (template, encode, special, train_on)
        return [read_turns([one], *rest)[0] for one in conversations]
    found: list[TurnTokens | str] = []
    for one, shown in zip(conversations, rendered, strict=True):
        if isinstance(shown, str):
            found.append(shown)
            continue
        encoding = next(encodings)
        is_special = None if special is None else np.isin(encoding.ids, special)
        found.append(read_tokens(one, shown, encoding.ids, encoding.spans, is_special, train_on))
    return found


def check_turns(
    template: Template | None, tokenizer: PreTrainedTokenizerBase, role: str, encode: Encode
) -> None:
    """Raise a ValueError where conversations cannot be read; warn where answers have no end."""
    if template is None:
        raise ValueError(
            f"{tokenizer_name(tokenizer, role)} has no chat template, in which to read "
            f"conversations: name one with --{role}_chat_template (plain, chatml or a file)"
        )
    template.check()
    if role != "student":
        return
    special, probe = special_ids(tokenizer), Conversation("?\n!", ("user", "assistant"), (1, 3))
    (found,) = read_turns([probe], template, encode, special, "completions")
    if not isinstance(found, str) and found.values[found.stops[1] - 1] not in special:
        logger.warning(
            "the student's chat template puts no special token behind an answer: its end has "
            "no label, and the student is not taught to stop"
        )
