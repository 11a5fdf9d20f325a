"""Conversations as data: the columns that hold them, and one text of what their messages say.

The text of a conversation is its messages' contents, a line break between two of them. All models
share it, wherever each one's template puts the contents.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# The columns are the fields of a conversation, and the reason why a row is not one.
_EMPTY_FIELDS: dict[str, Any] = {
    "text": None,
    "roles": [],
    "ends": [],
    "untrained": [],
    "extras": None,
}
COLUMNS = tuple(_EMPTY_FIELDS) + ("fault",)
_SEPARATOR = "\n"
_ANSWERING = "assistant"
_BAD_OPTIONS = "has tools that are not a list in JSON, or chat_template_kwargs that are not options"
# These columns, as TRL names them, hold what a template is given in addition to messages.
_OPTION_COLUMNS = ("tools", "chat_template_kwargs")
# ShareGPT's files have these names of speakers, and templates have those on the right.
_SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "assistant": "assistant",
    "system": "system",
}
# Messages list these columns where a data set has others.
KNOWN = (
    "text (documents), messages, prompt and completion, conversations (ShareGPT), or instruction "
    "and output (Alpaca)"
)
# Templates show these fields of a message, and they are not its content.
_UNTRAINED_FIELDS = ("tool_calls", "reasoning_content", "thinking", "reasoning")
_SURROGATE = re.compile("[\ud800-\udfff]")
# These are arguments of the function of transformers that renders, so that no row may set them.
_RENDERER_ARGUMENTS = {"chat_template", "conversations", "messages"}


@dataclass(frozen=True)
class Conversation:
    r"""Messages as one text, in which that of `roles[i]` ends at the character `ends[i]`.

    Answers of weight 0 are `untrained`, by index. What else a template reads, such as names of
    speakers and tools, is in `extras`: JSON of `messages` and `options`.

    >>> turns = conversation([{"role": "user", "content": "1 + 1?"},
    ...                       {"role": "assistant", "content": "2"}])
    >>> turns.text, turns.roles, turns.ends
    ('1 + 1?\n2', ('user', 'assistant'), (6, 8))
    >>> turns.places, turns.messages[1]
    ([(0, 6), (7, 8)], {'role': 'assistant', 'content': '2'})
    """

    text: str
    roles: tuple[str, ...]
    ends: tuple[int, ...]
    untrained: tuple[int, ...] = ()
    extras: str = ""

    @property
    def places(self) -> list[tuple[int, int]]:
        """The characters of every content, half-open."""
        places = []
        start = 0
        for end in self.ends:
            places.append((start, end))
            start = end + len(_SEPARATOR)
        return places

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages, as templates take them."""
        return self.with_contents([self.text[start:end] for start, end in self.places])

    def with_contents(self, contents: Sequence[str]) -> list[dict[str, Any]]:
        """Return the messages with other contents."""
        # The JSON is read anew each time, so that a caller may change what it gets.
        messages = json.loads(self.extras)["messages"] if self.extras else [{} for _ in self.roles]
        for message, role, content in zip(messages, self.roles, contents, strict=True):
            message["role"] = role
            message["content"] = content
        return messages

    @property
    def options(self) -> dict[str, Any]:
        """What a template is given in addition to messages."""
        return dict(json.loads(self.extras)["options"]) if self.extras else {}

    @property
    def answers(self) -> list[int]:
        """The indices of the assistant's messages that are trained on."""
        answers = []
        for index, role in enumerate(self.roles):
            if role == _ANSWERING and index not in self.untrained:
                answers.append(index)
        return answers


def conversation(messages: object, options: Mapping[str, object] = {}) -> Conversation | str:
    """Join messages, or return the reason why they are not a conversation."""
    if not isinstance(messages, list) or not messages:
        return f"expected a list of messages, found {_kind_of(messages)}"
    contents = []
    roles = []
    untrained = []
    other_fields = []
    for index, message in enumerate(map(_as_message, messages)):
        reason = _fault(message)
        if reason:
            return f"message {index} {reason}"
        contents.append(message["content"])
        roles.append(message["role"])
        if message["role"] == _ANSWERING and message.get("weight") == 0:
            untrained.append(index)
        # Arrow gives every message all keys that one of them has.
        extra_fields = _without_none(message)
        for name in ("role", "content", "weight"):
            extra_fields.pop(name, None)
        other_fields.append(extra_fields)
    # The line break between two contents belongs to neither, so that an end is that of the
    # content.
    ends = []
    length = 0
    for content in contents:
        length += len(content)
        ends.append(length)
        length += len(_SEPARATOR)
    extras = ""
    if any(other_fields) or options:
        # Equal fields make equal texts, which the cache of rendered pieces goes by. A value that
        # JSON does not have, such as a date, is written as text.
        fields = {"messages": other_fields, "options": options}
        extras = json.dumps(fields, sort_keys=True, default=str, ensure_ascii=False)
    if _SURROGATE.search(extras):
        return "has a lone surrogate outside its contents, which is not valid Unicode"
    text = _SEPARATOR.join(contents)
    return Conversation(text, tuple(roles), tuple(ends), tuple(untrained), extras)


def is_unicode(text: str) -> bool:
    """Test whether a text is valid Unicode, which JSON may not be."""
    return text.isascii() or not _SURROGATE.search(text)


def _without_none(value: Any) -> Any:
    """Drop the keys of dictionaries that have no value, at any depth."""
    if isinstance(value, dict):
        present = {}
        for key, item in value.items():
            if item is not None:
                present[key] = _without_none(item)
        return present
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value


def _as_message(message: Any) -> Any:
    """Name the fields of a message as templates do, and join the parts of a content."""
    if not isinstance(message, dict):
        return message
    # The caller's own message stays as it is.
    message = dict(message)
    # A message of ShareGPT has `from` and `value`. For an unknown speaker a text is returned
    # instead of a message, and `_fault` makes a reason of it.
    if message.get("role") is None and message.get("from") is not None:
        speaker = message.pop("from")
        # A user's file may have a speaker of any type, and a list cannot be looked up.
        role = _SPEAKERS.get(speaker) if isinstance(speaker, str) else None
        if role is None:
            return f"from {speaker!r}"
        message["role"] = role
        message["content"] = message.pop("value", None)
    # Arrow gives every message the keys of all, so that one with a role has these, too.
    message.pop("from", None)
    message.pop("value", None)
    parts = message.get("content")
    if isinstance(parts, list) and parts:
        texts = [_text_of_part(part) for part in parts]
        # A content with a part that is not text stays a list, which `_fault` reports.
        if None not in texts:
            message["content"] = "".join(texts)  # type: ignore[arg-type]
    return message


def _text_of_part(part: object) -> str | None:
    """Return the text of a part of a content; None where it is of another type."""
    if isinstance(part, dict):
        if part.get("type") not in ("text", None):
            return None
        part = part.get("text")
    return part if isinstance(part, str) else None


def _fault(message: object) -> str:
    """Return what is wrong with a message of `_as_message`; "" if nothing is."""
    if isinstance(message, str) and message.startswith("from "):
        return f"is {message}, who is none of {', '.join(_SPEAKERS)}"
    if not isinstance(message, dict):
        return f"is not a message with a role and a content, but {_kind_of(message)}"
    for name in _UNTRAINED_FIELDS:
        if message.get(name):
            return f"has {name}, which is not trained on"
    if message.get("weight") not in (None, 0, 1):
        return f"has a weight of {message['weight']}, where 0 and 1 are known"
    for name in ("role", "content"):
        value = message.get(name)
        # A list that could not be joined has a part that is not text.
        if name == "content" and isinstance(value, list) and value:
            return f"has {_non_text_part(value)}, which is not text"
        if not isinstance(value, str):
            return f"has a {name} that is not text but {_kind_of(value)}"
        if _SURROGATE.search(value):
            return f"has a lone surrogate in its {name}, which is not valid Unicode"
    return ""


def _kind_of(value: object) -> str:
    """Name the type of a value, as reasons do."""
    if value is None:
        return "nothing"
    if value == []:
        return "an empty list"
    return type(value).__name__


def _non_text_part(parts: Sequence[object]) -> str:
    """Name the first part of a content that is not text."""
    for part in parts:
        if isinstance(part, dict) and part.get("type") not in ("text", None):
            return f"a part of type {part['type']}"
        if _text_of_part(part) is None:
            return "a part without text"
    return "a part"


def conversation_columns(columns: Sequence[str]) -> tuple[str, ...]:
    """Return the columns that hold conversations, of all that there are; none for documents.

    >>> conversation_columns(["id", "prompt", "completion", "text"])
    ('prompt', 'completion', 'tools', 'chat_template_kwargs')
    >>> conversation_columns(["instruction", "output", "text"])
    ()
    """
    # The order decides where a data set has several formats. Messages, and prompts with
    # completions, come before a text, which may be the same conversation rendered. A text comes
    # before the rest.
    if "messages" in columns:
        return ("messages",) + _OPTION_COLUMNS
    if "prompt" in columns and "completion" in columns:
        return ("prompt", "completion") + _OPTION_COLUMNS
    if "text" in columns:
        return ()
    if "conversations" in columns:
        return ("conversations", "system") + _OPTION_COLUMNS
    if "instruction" in columns and "output" in columns:
        return ("instruction", "input", "output", "system", "history")
    return ()


def read_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Make the columns of a conversation; a row that is not one has its fault instead of a text.

    The row has the columns of one format of `conversation_columns`.
    """
    options = _options(row)
    if options is None:
        return no_conversation(_BAD_OPTIONS)
    messages = row["messages"] if "messages" in row else _other_messages(row)
    turns = conversation(messages, options)
    if isinstance(turns, str):
        return no_conversation(turns)
    return vars(turns) | {"fault": None}


def no_conversation(fault: str) -> dict[str, Any]:
    """Make the columns of a row that is not a conversation, for a reason."""
    return _EMPTY_FIELDS | {"fault": fault}


def _other_messages(row: Mapping[str, Any]) -> Any:
    """Make messages of the columns of other formats."""
    messages: list[Any] = []
    if row.get("system"):
        messages.append(_make_message("system", row["system"]))
    if "conversations" in row:
        turns = row["conversations"]
        # A system message must not hide that there are no turns: `conversation` says what the
        # column has instead.
        if not isinstance(turns, list) or not turns:
            return turns
        return messages + turns
    # Alpaca's earlier turns are pairs of a question and an answer. Anything else is passed on as
    # it is, so that it is reported as a message that cannot be read.
    if "instruction" in row:
        for turn in row.get("history") or []:
            if isinstance(turn, list) and len(turn) == 2:
                question, answer = turn
                messages.append(_make_message("user", question))
                messages.append(_make_message("assistant", answer))
            else:
                messages.append(turn)
        question = row["instruction"]
        if isinstance(question, str) and row.get("input"):
            question = f"{question}\n\n{row['input']}"
        messages.append(_make_message("user", question))
        messages.append(_make_message("assistant", row.get("output")))
        return messages
    # A column is a list of messages, or one string, and then it is a question or its answer. Where
    # there is neither, None takes the place of a message, and is reported.
    messages = []
    for name, role in (("prompt", "user"), ("completion", "assistant")):
        turns = row.get(name)
        if isinstance(turns, list | None):
            messages += turns or [None]
        else:
            messages.append(_make_message(role, turns))
    return messages


def _make_message(role: str, content: object) -> dict[str, object]:
    return {"role": role, "content": content}


def _options(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Read what a row gives its template, in TRL's columns; None where that is not understood."""
    tools = row.get("tools") or []
    options = _without_none(row.get("chat_template_kwargs") or {})
    try:
        # Tools may come as JSON, since Arrow gives every tool the keys of all: a null in JSON was
        # meant.
        tools = json.loads(tools) if isinstance(tools, str) else _without_none(tools)
    except ValueError:
        return None
    if not (isinstance(tools, list) and isinstance(options, dict)):
        return None
    # A template and messages of its own would be rendered instead.
    if not _RENDERER_ARGUMENTS.isdisjoint(options):
        return None
    if tools:
        options["tools"] = tools
    return options
