"""Render a conversation by a chat template, and find each content in the rendered text.

Contents are not searched for, as a content may look like any text. The template renders marks in
their place once, which leaves its own pieces:

    marks       <|user|> MARK0 </s> <|assistant|> MARK1 </s>
    pieces      "<|user|> ", " </s> <|assistant|> ", " </s>"
    contents    <|user|> 1 + 1? </s> <|assistant|> 2 </s>      must be piece, content, piece, ...

White space that a template trims off a content is known by that around the marks. Whatever else a
template does to a content cannot be followed: such a conversation is not read.
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

# A mark is a number between private characters. The white space around it is of a kind that
# templates trim but never write.
_MARK = "\ue000{}\ue001"
_LEFT = "\u2003\u2002"
_RIGHT = "\u2002\u2003"
_MARK_PATTERN = re.compile("\ue000(\\d+)\ue001")
# Reasons name a template so, until a reader says whose it is (`readers.whose_template`).
ITS = "its chat template"
_END_OF_THINKING = "</think>"
# Templates of the Llama family write today's date, unless they are given one: this is their own.
DATE = "26 Jul 2024"


@dataclass(frozen=True)
class Rendered:
    """A conversation in a template.

    Content i lies in [places[i, 0], places[i, 1]) of the text, without `trimmed` characters; its
    first character there is `origins[i]` of the conversation's text.
    """

    text: str
    places: npt.NDArray[np.int64]
    origins: npt.NDArray[np.int64]
    trimmed: int


def check_date(source: str, option: str) -> None:
    """Reject a template that renders a text in another way on another day."""
    if "strftime_now" in source and "date_string" not in source:
        raise ValueError(
            "the chat template writes today's date, so texts would change every day: give a "
            f"template with a fixed date as {option}"
        )


@dataclass(frozen=True)
class Template:
    """A chat template, and the special tokens that it may name."""

    source: str
    tokens: tuple[tuple[str, str], ...]

    def as_json(self) -> dict[str, object]:
        """Return what `Template.of_json` reads."""
        return {"chat_template": self.source, "template_tokens": dict(self.tokens)}

    @classmethod
    def of_json(cls, content: Mapping[str, Any]) -> "Template":
        """Read a template from what describes it, such as a manifest."""
        return cls(content["chat_template"], tuple(content["template_tokens"].items()))

    def render(self, conversation: Conversation) -> Rendered | str:
        """Render a conversation, or return the reason why it cannot be followed."""
        # The real messages come first: a template that refuses them gives its own reason.
        try:
            text = self._apply(conversation.messages, conversation.options)
        except ValueError as error:
            place = self._refused_message(conversation, str(error))
            return f"{ITS} refuses {place}: {error}"
        try:
            pieces, trims = _pieces(self, conversation.roles, conversation.extras)
        except ValueError as error:
            return str(error)
        contents = []
        origins = []
        given_length = 0
        for (start, end), trim in zip(conversation.places, trims, strict=True):
            trims_left, trims_right = trim
            content = conversation.text[start:end]
            given_length += len(content)
            if trims_left:
                content = content.lstrip()
            # What is left now ends where the message does, which gives the place of its first
            # character. The other end is trimmed afterwards, as it would move that place.
            origins.append(end - len(content))
            if trims_right:
                content = content.rstrip()
            contents.append(content)
        # The template's own text stands before each content, and after the last one.
        parts = []
        for piece, content in zip_longest(pieces, contents, fillvalue=""):
            parts += [piece, content]
        # The text has to be pieces and contents in turn, to the last character: whatever else a
        # template does to a content shows here.
        if "".join(parts) != text:
            return _what_changed(conversation, parts, text)
        # Part 2 i is a piece and part 2 i + 1 the content after it, so that edge 2 i, the end of
        # the piece, is where the content begins. The empty content after the last piece is left
        # out.
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
        # A template can raise anything, most often about the order of roles.
        except Exception as error:
            raise ValueError(" ".join(str(error).split())) from error
        return str(rendered[0][0])

    def _refused_message(self, conversation: Conversation, reason: str) -> str:
        """Name the message at which the template gives up for this reason."""
        # Ever longer beginnings are tried. A beginning may be refused for its own reason, such as
        # a missing answer, and does not count then.
        for count, role in enumerate(conversation.roles, 1):
            if self._refusal(conversation, count) == reason:
                return f"message {count - 1} ({role})"
        return "the messages"

    def _refusal(self, conversation: Conversation, count: int) -> str | None:
        """Return the reason why the template does not render the first `count` messages."""
        try:
            self._apply(conversation.messages[:count], conversation.options)
        except ValueError as error:
            return str(error)
        return None


def _what_changed(conversation: Conversation, parts: list[str], text: str) -> str:
    """Name the first message that a template rewrites, from its own text and all contents."""
    # The walk goes from part to part as long as the text continues with the next one, and ends at
    # the first that was changed. Parts 2 i and 2 i + 1 belong to message i.
    index = 0
    place = 0
    while index < len(parts) - 1 and text.startswith(parts[index], place):
        place += len(parts[index])
        index += 1
    message = min(index // 2, len(conversation.roles) - 1)
    start, end = conversation.places[message]
    reason = f"{ITS} changes message {message} ({conversation.roles[message]}), or its own text"
    if _END_OF_THINKING in conversation.text[start:end]:
        reason += ", as it leaves out the thinking of earlier answers"
    return reason


# Conversations of the same roles and extras have the same pieces, so that a corpus renders its
# marks a few times only.
@lru_cache(maxsize=4096)
def _pieces(
    template: Template, roles: tuple[str, ...], extras: str
) -> tuple[list[str], list[tuple[bool, bool]]]:
    """Render marks instead of contents: a well-behaved template's own text is the same with both.

    Returns its text before, between and after contents, and whether it trims each of them on the
    left and on the right. A ValueError where not every content is shown once, and in order.
    """
    marks = [_LEFT + _MARK.format(index) + _RIGHT for index in range(len(roles))]
    conversation = Conversation("", roles, (), extras=extras)
    try:
        text = template._apply(conversation.with_contents(marks), conversation.options)
    except ValueError as error:
        raise ValueError(f"{ITS} says: {error}") from error
    # To split by a pattern with a group gives texts and numbers in turn; the texts are one more.
    texts = _MARK_PATTERN.split(text)[::2]
    order = [int(mark) for mark in _MARK_PATTERN.findall(text)]
    for index, role in enumerate(roles):
        count = order.count(index)
        if count != 1:
            fault = "leaves out" if count == 0 else f"repeats {count} times"
            raise ValueError(f"{ITS} {fault} message {index} ({role})")
    if order != sorted(order):
        raise ValueError(f"{ITS} changes the order of the messages")
    # A side of a content is trimmed if the white space that was put there is gone. What is left of
    # that white space belongs to the marks, and is taken off the pieces.
    trims = []
    for text_before, text_after in pairwise(texts):
        trims.append((not text_before.endswith(_LEFT), not text_after.startswith(_RIGHT)))
    pieces = [piece.removeprefix(_RIGHT).removesuffix(_LEFT) for piece in texts]
    return pieces, trims
