"""How a model reads a text or a conversation: its tokens and the special ones around them.

The input is texts or conversations. The output is the `Tokens` of each model, or of a store.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from vocagnolm.chat.formats import Conversation
from vocagnolm.chat.reading import TrainOn, TurnTokens, read_tokens, special_ids
from vocagnolm.chat.render import Template, check_date
from vocagnolm.fields import OptionError, named
from vocagnolm.spans import Encoding, Tokens, encode_rendered, encode_texts, tokenizer_name
from vocagnolm.tokenizer import Role, serialised, start_id

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

# The documents that have no teacher, by index: the reason to skip each, or None to train on it
# without one.
WithoutTeacher = Mapping[int, str | None]
Item = TypeVar("Item")
Result = TypeVar("Result")

# For models without a chat template.
_BUILT_IN = {
    "plain": (
        "{{ bos_token }}{% for message in messages %}{{ message['role'] | capitalize }}: "
        "{{ message['content'] }}{{ eos_token if message['role'] == 'assistant' else '\n\n' }}"
        "{% endfor %}{{ 'Assistant:' if add_generation_prompt }}"
    ),
    "chatml": (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
        "<|im_end|>{{ '\n' }}{% endfor %}{{ '<|im_start|>assistant\n' if add_generation_prompt }}"
    ),
}


def each_alone(
    read: Callable[[list[Item]], Sequence[Result]],
    items: list[Item],
    failed: Callable[[Item, ValueError], Result],
) -> list[Result]:
    """Read items together, or each alone if one of them fails.

    A tokenizer fails on a whole batch because of one text. So only the item that fails by itself
    gets the result of `failed`.
    """
    try:
        return list(read(items))
    except ValueError as error:
        if len(items) == 1:
            return [failed(items[0], error)]
    results: list[Result] = []
    for item in items:
        results += each_alone(read, [item], failed)
    return results


@dataclass(frozen=True)
class Reader:
    """How a model reads a segment: the tokens around the text, and their limit.

    start   t e x t   end         at most `limit` tokens, `end` only after the last segment
    """

    tokenizer: PreTrainedTokenizerBase
    start: int
    end: int | None
    limit: int
    # How conversations are read.
    template: Template | None = None
    # What errors call the model.
    role: Role = "teacher"

    @property
    def text_limit(self) -> int:
        """The most text tokens of a segment."""
        # Subtract the start token, and the end token if the reader adds one. Only a document's last
        # segment has it, but which one that is is known only after cutting.
        return self.limit - 1 - (self.end is not None)

    def read(self, texts: Sequence[str]) -> Tokens:
        """Encode texts."""
        return replace(encode_texts(self.tokenizer, texts), start=self.start, end=self.end)

    def read_turns(
        self, conversations: Sequence[Conversation], train_on: TrainOn
    ) -> list[TurnTokens | str]:
        """Read conversations in the chat template, or return why one cannot be read.

        Only for a student do the ends of answers have labels, because they are not content.
        """
        assert self.template is not None, "templates are checked before"
        special = None if self.end is None else special_ids(self.tokenizer)
        # A string is the reason why the conversation cannot be rendered.
        rendered = [self.template.render(conversation) for conversation in conversations]
        texts = [rendering.text for rendering in rendered if not isinstance(rendering, str)]
        encode = partial(encode_rendered, self.tokenizer)
        readings: list[Encoding | str] = each_alone(encode, texts, lambda _, error: str(error))
        encodings = iter(readings)
        turns: list[TurnTokens | str] = []
        for conversation, rendering in zip(conversations, rendered, strict=True):
            if isinstance(rendering, str):
                turns.append(rendering)
                continue
            # There is an encoding for each text, but none for a reason.
            encoding = next(encodings)
            if isinstance(encoding, str):
                turns.append(encoding)
                continue
            is_special = None if special is None else np.isin(encoding.ids, special)
            tokens = read_tokens(
                conversation, rendering, encoding.ids, encoding.spans, is_special, train_on
            )
            turns.append(tokens)
        return turns

    def check_template(self) -> None:
        """Check what the template writes, and warn if its answers have no end."""
        assert self.template is not None
        check_date(self.template.source, named(f"{self.role}_chat_template"))
        if self.end is None:
            return
        # The probe is a question and an answer of one character each. The answer must end with a
        # special token, or its end has no label.
        probe = Conversation("?\n!", ("user", "assistant"), (1, 3))
        turns = self.read_turns([probe], "completions")[0]
        special = special_ids(self.tokenizer)
        if not isinstance(turns, str) and turns.values[turns.stops[1] - 1] not in special:
            logger.warning(
                "the student's chat template puts no special token after an answer, so its end has "
                "no label, and the student does not learn to stop"
            )

    def fingerprint(self) -> str:
        """Return everything that determines how this reader cuts and encodes a text."""
        # Leave out the template, so that a corpus of texts is not aligned again for another one.
        return f"{serialised(self.tokenizer)}|{self.start}|{self.end}|{self.limit}"


def student_reader(
    tokenizer: PreTrainedTokenizerBase, max_length: int, template: str | None = None
) -> Reader:
    """Read documents as `<s> text </s>` in at most `max_length` tokens.

    Conversations are read in a built-in template, in that of a file, or in the tokenizer's own. The
    tokenizer gets that template.
    """
    if tokenizer.eos_token_id is None:
        name = f"student tokenizer {tokenizer.name_or_path}"
        raise ValueError(f"{name} has no EOS token: set eos_token in its tokenizer_config.json")
    chat_template = template_of(tokenizer, "student", template)
    # The tokenizer is saved with the student, which should be used with the template of its
    # training.
    if template and chat_template:
        tokenizer.chat_template = chat_template.source
    start = start_id(tokenizer, "student")
    end = tokenizer.eos_token_id
    return Reader(tokenizer, start, end, max_length, chat_template, "student")


def teacher_reader(
    tokenizer: PreTrainedTokenizerBase,
    context: int,
    template: str | None = None,
    role: Role = "teacher",
) -> Reader:
    """Read documents as `<start> text` in at most `context` tokens."""
    chat_template = template_of(tokenizer, role, template)
    return Reader(tokenizer, start_id(tokenizer, role), None, context, chat_template, role)


def template_of(
    tokenizer: PreTrainedTokenizerBase, role: str, name: str | None = None
) -> Template | None:
    """Return the template of a built-in name or a file, or else the tokenizer's, if it has one."""
    special_tokens = []
    for token_name, token in tokenizer.special_tokens_map.items():
        special_tokens.append((token_name, str(token)))
    if name is None and not tokenizer.chat_template:
        return None
    if name is None:
        # Some tokenizers have several, by name.
        source = tokenizer.get_chat_template()
    elif name in _BUILT_IN:
        source = _BUILT_IN[name]
    elif Path(name).is_file():
        source = Path(name).read_text(encoding="utf-8")
    else:
        choices = " or ".join(_BUILT_IN)
        raise OptionError(
            f"{role}_chat_template", f"{name}: expected {choices}, or the file of a Jinja template"
        )
    return Template(source, tuple(special_tokens), role)


class TeacherReaders:
    """The teachers' side of the alignment, for any number of them. A store has a subclass.

    `readers` are those of online teachers. With `by_position`, tokens are mapped by index instead
    of by characters (`vocagnolm.alignment.align_positions`).
    """

    def __init__(self, readers: Sequence[Reader] = (), by_position: bool = False):
        self.readers = tuple(readers)
        self.by_position = by_position

    def limits(self) -> list[int]:
        """Return each teacher's limit for the tokens of a segment, including its start token."""
        return [reader.limit for reader in self.readers]

    def fingerprint(self) -> str:
        """Return everything that determines what is read and mapped."""
        readers = "|".join(reader.fingerprint() for reader in self.readers)
        return f"{readers}|by position" if self.by_position else readers

    def describe(self) -> list[str]:
        """Name each teacher that is not loaded as a model, and the source of its losses."""
        return []

    def read(self, texts: Sequence[str]) -> tuple[list[Tokens], WithoutTeacher]:
        """Return every teacher's tokens of documents, and the documents that teachers lack."""
        return [reader.read(texts) for reader in self.readers], {}

    def check_templates(self, *more_readers: Reader) -> None:
        """Reject the first of these readers, and of more, that has no usable template."""
        for reader in more_readers + self.readers:
            if reader.template is None:
                name = tokenizer_name(reader.tokenizer, reader.role)
                raise OptionError(
                    f"{reader.role}_chat_template",
                    f"is needed for conversations, because {name} has no template: give plain, "
                    "chatml or a file",
                )
            reader.check_template()

    def read_turns(
        self, conversations: Sequence[Conversation], train_on: TrainOn
    ) -> list[list[TurnTokens | str]]:
        """Return every teacher's tokens of conversations, or why one cannot be read."""
        return [reader.read_turns(conversations, train_on) for reader in self.readers]
