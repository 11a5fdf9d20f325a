"""Readers, which open and close a text with a token and know its limit; and what guides a student.

Input: texts or conversations. Output: `Tokens` of each model, or of a store.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from vocagnolm.chat.formats import Conversation
from vocagnolm.chat.reading import TrainOn, TurnTokens
from vocagnolm.chat.render import Template, template_of
from vocagnolm.chat.turns import check_turns, read_turns, special_ids
from vocagnolm.spans import encode_rendered, encode_texts
from vocagnolm.texts.offsets import tokenizer_name
from vocagnolm.texts.tokenizers import Role
from vocagnolm.texts.tokens import Encoding, Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DOCUMENT_SEPARATOR = "<|endoftext|>"


def start_id(tokenizer: PreTrainedTokenizerBase, role: Role) -> int:
    """Return the id to put before a text, so that its first token has a loss (decision 7).

    The BOS token where there is one; else `<|endoftext|>`, which separates documents in pretraining
    (the EOS token of a chat model ends a turn); else EOS.
    """
    separator = tokenizer.get_vocab().get(DOCUMENT_SEPARATOR)
    for candidate in (tokenizer.bos_token_id, separator, tokenizer.eos_token_id):
        if candidate is not None:
            return int(candidate)
    raise ValueError(
        f"{tokenizer_name(tokenizer, role)} has no BOS token, no {DOCUMENT_SEPARATOR} and no EOS"
        " token: set bos_token in its tokenizer_config.json"
    )


@dataclass(frozen=True)
class Reader:
    """A model's way to read a segment: the tokens around the text, and their limit.

    start   t e x t   end         at most `limit` tokens, `end` only behind the last segment
    """

    tokenizer: PreTrainedTokenizerBase
    start: int
    end: int | None
    limit: int
    # How it reads conversations.
    template: Template | None = None

    @property
    def role(self) -> Role:
        """Whose it is: documents end for a student."""
        return "teacher" if self.end is None else "student"

    @property
    def text_limit(self) -> int:
        """The most text tokens of a segment."""
        return self.limit - 1 - (self.end is not None)

    def read(self, texts: Sequence[str]) -> Tokens:
        """Encode texts."""
        return replace(encode_texts(self.tokenizer, texts), start=self.start, end=self.end)

    def read_turns(
        self, conversations: Sequence[Conversation], train_on: TrainOn
    ) -> list[TurnTokens | str]:
        """Read conversations in the chat template, or return why one cannot be read.

        The ends of answers have labels for a student only, as they are no content.
        """
        assert self.template is not None, "templates are checked before"
        special = special_ids(self.tokenizer) if self.role == "student" else None
        return read_turns(conversations, self.template, self._encode_rendered, special, train_on)

    def check_template(self) -> None:
        """Raise a ValueError where conversations cannot be read."""
        check_turns(self.template, self.tokenizer, self.role, self._encode_rendered)

    def _encode_rendered(self, texts: Sequence[str]) -> Sequence[Encoding]:
        return encode_rendered(self.tokenizer, texts)

    def fingerprint(self) -> str:
        """Return all that decides how this reader cuts and encodes a text."""
        return f"{self.tokenizer.backend_tokenizer.to_str()}|{self.start}|{self.end}|{self.limit}"


def student_reader(
    tokenizer: PreTrainedTokenizerBase, max_length: int, template: str | None = None
) -> Reader:
    """Read documents as `<s> text </s>` in at most `max_length` tokens.

    Conversations are read in a built-in template or that of a file, else in the tokenizer's own,
    and the tokenizer gets it.
    """
    if tokenizer.eos_token_id is None:
        name = f"student tokenizer {tokenizer.name_or_path}"
        raise ValueError(f"{name} has no EOS token: set eos_token in its tokenizer_config.json")
    found = template_of(tokenizer, "student", template)
    if template and found:
        tokenizer.chat_template = found.source
    start = start_id(tokenizer, "student")
    return Reader(tokenizer, start, tokenizer.eos_token_id, max_length, found)


def teacher_reader(
    tokenizer: PreTrainedTokenizerBase, context: int, template: str | None = None
) -> Reader:
    """Read documents as `<start> text` in at most `context` tokens."""
    found = template_of(tokenizer, "teacher", template)
    return Reader(tokenizer, start_id(tokenizer, "teacher"), None, context, found)


@dataclass(frozen=True)
class TeacherTokens:
    """The tokens of every teacher in some documents.

    `cuts` has the places where a document must be cut, None for one that is not known; without
    `cuts` all are known, and read as a whole.
    """

    teachers: Sequence[Tokens]
    cuts: Mapping[int, Sequence[int] | None] = field(default_factory=dict)


class Guide:
    """The teachers' side of the alignment: here without any; `Teachers`, or a store's reader."""

    # Of the online teachers; none with a store, which has losses only.
    readers: tuple[Reader, ...] = ()
    # Map tokens by index instead of by characters (`vocagnolm.alignment.align_positions`).
    by_position: bool = False

    def limits(self) -> list[int]:
        """Return the most tokens of a segment that each teacher reads, its start token counted."""
        return [reader.limit for reader in self.readers]

    def fingerprint(self) -> str:
        """Return all that decides what is read and mapped."""
        readers = "|".join(reader.fingerprint() for reader in self.readers)
        return f"{readers}|by position" if self.by_position else readers

    def describe(self) -> list[str]:
        """Name each teacher that is not loaded as a model, and the source of its losses."""
        return []

    def read(self, texts: Sequence[str]) -> TeacherTokens:
        """Return the tokens of every teacher in every document."""
        return TeacherTokens([reader.read(texts) for reader in self.readers])

    def check_templates(self) -> None:
        """Raise a ValueError where a teacher cannot read conversations."""
        for reader in self.readers:
            reader.check_template()

    def read_turns(
        self, conversations: Sequence[Conversation], train_on: TrainOn
    ) -> list[list[TurnTokens | str]]:
        """Return every teacher's tokens of conversations, or why one cannot be read."""
        return [reader.read_turns(conversations, train_on) for reader in self.readers]


@dataclass(frozen=True)
class Teachers(Guide):
    """Online teachers."""

    readers: tuple[Reader, ...]
    by_position: bool = False
