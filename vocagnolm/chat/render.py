"""Render a conversation with a chat template, and find each content in the rendered text.

Contents are not searched for, because a content may look like any text. Instead, the template
renders marks in their place once. What stands between the marks is the template's own text:

    marks       <|user|> MARK0 </s> <|assistant|> MARK1 </s>
    pieces      "<|user|> ", " </s> <|assistant|> ", " </s>"
    contents    <|user|> 1 + 1? </s> <|assistant|> 2 </s>      must be piece, content, piece, ...

If a template strips white space from a content, the white space around the marks shows it. If it
changes a content in any other way, the conversation cannot be read.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt

from vocagnolm.chat.formats import Conversation

# A mark is a number between private-use characters. The white space around it is of a kind that
# templates strip but never write.
_MARK = "\ue000{}\ue001"
_LEFT = "\u2003\u2002"
_RIGHT = "\u2002\u2003"
_MARK_PATTERN = re.compile("\ue000(\\d+)\ue001")
_END_OF_THINKING = "</think>"
# Llama's templates write today's date if they get none. This is the date in the template itself.
DATE = "26 Jul 2024"


@dataclass(frozen=True)
class Rendered:
    """A conversation rendered by a template.

    Content i is [places[i, 0], places[i, 1]) of the text, without `trimmed` characters. Its first
    character there is character `origins[i]` of the conversation's text.
    """

    text: str
    places: npt.NDArray[np.int64]
    origins: npt.NDArray[np.int64]
    trimmed: int


def check_date(source: str, option: str) -> None:
    """Reject a template that renders a text differently on another day."""
    if "strftime_now" in source and "date_string" not in source:
        raise ValueError(
            "the chat template writes today's date, so texts would change every day: give a "
            f"template with a fixed date as {option}"
        )


@dataclass(frozen=True)
class Template:
    """The chat template of a student or teacher, with the special tokens that it may use."""

    source: str
    tokens: tuple[tuple[str, str], ...]
    role: str

    def as_json(self) -> dict[str, object]:
        """Return text for `Template.of_json`."""
        return {"chat_template": self.source, "template_tokens": dict(self.tokens)}

    @classmethod
    def of_json(cls, content: Mapping[str, Any]) -> "Template":
        """Read a teacher's template from the text of `as_json`, which its store keeps."""
        return cls(content["chat_template"], tuple(content["template_tokens"].items()), "teacher")

    def render(self, conversation: Conversation) -> Rendered | str:
        """Render a conversation, or return the reason why its contents cannot be found."""
        # Render the real messages first. If the template refuses them, it gives its own reason.
        try:
            text = self._apply(conversation.messages, conversation.options)
            pieces, trims = _pieces(self, tuple(conversation.roles), conversation.extras)
        except ValueError as error:
            return self._fault(str(error))
        contents = []
        origins = []
        given_length = 0
        for (start, end), trim in zip(conversation.places, trims, strict=True):
            trims_left, trims_right = trim
            content = conversation.text[start:end]
            given_length += len(content)
            if trims_left:
                content = content.lstrip()
            # The rest ends where the message ends, which gives the place of its first character.
            # The other end is stripped afterwards, because that would move this place.
            origins.append(end - len(content))
            if trims_right:
                content = content.rstrip()
            contents.append(content)
        # The template's own text stands before each content and after the last one.
        parts = []
        for piece, content in zip_longest(pieces, contents, fillvalue=""):
            parts += [piece, content]
        # The text must be pieces and contents in turn, to the last character. This finds anything
        # else that a template does to a content.
        if "".join(parts) != text:
            reason = "changes a message, or its own text"
            if _END_OF_THINKING in conversation.text:
                reason += ", as it leaves out the thinking of earlier answers"
            return self._fault(reason)
        # Part 2 i is a piece, and part 2 i + 1 is the content after it. Edge 2 i, where the piece
        # ends, is where the content begins. The empty content after the last piece is dropped.
        edges = np.cumsum([len(part) for part in parts], dtype=np.int64)
        places = np.stack([edges[0:-1:2], edges[1::2]], axis=1)[: len(contents)]
        trimmed = given_length - sum(map(len, contents))
        return Rendered(text, places, np.array(origins, np.int64), trimmed)

    def _apply(self, messages: list[dict[str, Any]], options: Mapping[str, Any]) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        variables: dict[str, Any] = {"date_string": DATE}
        variables |= dict(self.tokens)
        variables |= options
        try:
            rendered = render_jinja_template([messages], chat_template=self.source, **variables)
        # A template can raise anything, usually about the order of roles.
        except Exception as error:
            raise ValueError(f"refuses it: {' '.join(str(error).split())}") from error
        return str(rendered[0][0])

    def _fault(self, reason: str) -> str:
        """Say whose template does not work for a conversation, and what helps."""
        return (
            f"the {self.role}'s chat template {reason}: give another one as "
            f"{self.role}_chat_template, or leave it out of the data"
        )


# Conversations with the same roles and extras have the same pieces, so a corpus renders its marks
# only a few times.
@lru_cache(maxsize=4096)
def _pieces(
    template: Template, roles: tuple[str, ...], extras: str
) -> tuple[list[str], list[tuple[bool, bool]]]:
    """Render marks in place of contents. A usable template writes the same text around both.

    Returns its text before, between and after contents, and whether it strips each of them on the
    left and on the right. Raises a ValueError if it does not show every content once and in order.
    """
    marks = [_LEFT + _MARK.format(index) + _RIGHT for index in range(len(roles))]
    conversation = Conversation("", roles, (), extras=extras)
    text = template._apply(conversation.with_contents(marks), conversation.options)
    # Splitting by a pattern with a group returns texts and numbers in turn, and one more text.
    texts = _MARK_PATTERN.split(text)[::2]
    order = [int(mark) for mark in _MARK_PATTERN.findall(text)]
    if order != list(range(len(roles))):
        raise ValueError("does not show every message once, in order")
    # A content is stripped on a side if the white space there is gone. White space that is left
    # belongs to the marks, and is removed from the pieces.
    trims = []
    for text_before, text_after in pairwise(texts):
        trims.append((not text_before.endswith(_LEFT), not text_after.startswith(_RIGHT)))
    pieces = [piece.removeprefix(_RIGHT).removesuffix(_LEFT) for piece in texts]
    return pieces, trims
