"""Conversations as data: the columns that hold them, and one text of what their messages say.

The text of a conversation is its messages' contents, a line break between two of them. All models
share it, wherever each one's template puts the contents.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

# The columns: the fields of a conversation, and a reason why the row is none.
_NO_FIELDS: dict[str, Any] = {"text": None, "roles": [], "ends": [], "untrained": [], "given": None}
COLUMNS = (*_NO_FIELDS, "fault")
_SEPARATOR, _ANSWERING = "\n", "assistant"
_NO_JSON = "has tools that are no list of JSON, or chat_template_kwargs that are no options"
# What a template is given beside messages, in columns as TRL names them.
_OPTIONS = ("tools", "chat_template_kwargs")
# Who speaks in ShareGPT's files, as templates name him.
_SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bot", "assistant"), "assistant"),
    "system": "system",
}
# The columns that documents and conversations have, for whoever has others.
KNOWN = (
    "text (documents), messages, prompt and completion, conversations (ShareGPT), or instruction "
    "and output (Alpaca)"
)
# Templates show them, and they are no content.
_BEYOND = ("tool_calls", "reasoning_content", "thinking", "reasoning")
_SURROGATE = re.compile("[\ud800-\udfff]")
# What transformers is given to render, beside the options of a row.
_RENDERED = {"chat_template", "conversations", "messages"}


@dataclass(frozen=True)
class Conversation:
    r"""Messages as one text, in which that of `roles[i]` ends at the character `ends[i]`.

    Answers of weight 0 are `untrained`, by index. What else templates are given, such as
    names of speakers and tools, is JSON of `messages` and `options`.

    >>> found = conversation([{"role": "user", "content": "1 + 1?"},
    ...                       {"role": "assistant", "content": "2"}])
    >>> found
    Conversation(text='1 + 1?\n2', roles=('user', 'assistant'), ends=(6, 8), untrained=(), given='')
    >>> found.places, found.messages[1]
    ([(0, 6), (7, 8)], {'role': 'assistant', 'content': '2'})
    """

    text: str
    roles: tuple[str, ...]
    ends: tuple[int, ...]
    untrained: tuple[int, ...] = ()
    given: str = ""

    @property
    def places(self) -> list[tuple[int, int]]:
        """The characters of every content, half-open."""
        width = len(_SEPARATOR)
        return [(before + width, end) for before, end in pairwise((-width, *self.ends))]

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages, as templates take them."""
        return self.with_contents([self.text[a:b] for a, b in self.places])

    def with_contents(self, contents: Sequence[str]) -> list[dict[str, Any]]:
        """Return the messages with other contents."""
        rest = json.loads(self.given)["messages"] if self.given else [{}] * len(self.roles)
        both = zip(rest, self.roles, contents, strict=True)
        return [{**other, "role": role, "content": content} for other, role, content in both]

    @property
    def options(self) -> dict[str, Any]:
        """What a template is given beside messages."""
        return dict(json.loads(self.given)["options"]) if self.given else {}

    @property
    def answers(self) -> list[int]:
        """The indices of the assistant's messages that are trained on."""
        answers = [index for index, role in enumerate(self.roles) if role == _ANSWERING]
        return [index for index in answers if index not in self.untrained]


def conversation(messages: object, options: Mapping[str, object] = {}) -> Conversation | str:
    """Join messages, or return the reason why they are no conversation."""
    if not isinstance(messages, list) or not messages:
        return f"expected a list of messages, found {_shown(messages)}"
    contents, roles, untrained, others = [], [], [], []
    for index, message in enumerate(map(_as_message, messages)):
        if reason := _fault(message):
            return f"message {index} {reason}"
        contents.append(message["content"])
        roles.append(message["role"])
        if message["role"] == _ANSWERING and message.get("weight") == 0:
            untrained.append(index)
        # Arrow gives every message all keys that one of them has.
        kept = _without_none(message)
        others.append({key: kept[key] for key in {*kept} - {"role", "content", "weight"}})
    width = len(_SEPARATOR)
    ends = [end - width for end in accumulate(len(content) + width for content in contents)]
    rest = {"messages": others, "options": options}
    given = json.dumps(rest, sort_keys=True, default=str, ensure_ascii=False)
    given = given if any(others) or options else ""
    if _SURROGATE.search(given):
        return "has a lone surrogate beside its contents, which is not valid Unicode"
    return Conversation(
        _SEPARATOR.join(contents), tuple(roles), tuple(ends), tuple(untrained), given
    )


def is_unicode(text: str) -> bool:
    """Test whether a text is valid Unicode, which JSON may not be."""
    return text.isascii() or not _SURROGATE.search(text)


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(one) for key, one in value.items() if one is not None}
    return [*map(_without_none, value)] if isinstance(value, list) else value


def _as_message(message: Any) -> Any:
    """Name the fields of a message as templates do, and join the parts of a content."""
    if not isinstance(message, dict):
        return message
    message = dict(message)
    if message.get("role") is None and message.get("from") is not None:
        speaker = message.pop("from")
        message["role"] = _SPEAKERS.get(speaker) if isinstance(speaker, str) else None
        message["content"] = message.pop("value", None)
        if message["role"] is None:
            return f"from {speaker!r}"
    # Arrow gives every message the keys of all.
    message = {key: value for key, value in message.items() if key not in ("from", "value")}
    parts = message.get("content")
    if isinstance(parts, list) and parts:
        texts: list[Any] = [part.get("text") if isinstance(part, dict) else part for part in parts]
        kinds = [part.get("type") if isinstance(part, dict) else None for part in parts]
        if all(isinstance(text, str) for text in texts) and {*kinds} <= {"text", None}:
            message["content"] = "".join(texts)
    return message


def _fault(message: object) -> str:
    if isinstance(message, str) and message.startswith("from "):
        return f"is {message}, who is none of {', '.join(_SPEAKERS)}"
    if not isinstance(message, dict):
        return f"is no message with a role and a content, but {_shown(message)}"
    if given := [name for name in _BEYOND if message.get(name)]:
        return f"has {given[0]}, which is not trained on"
    if message.get("weight") not in (None, 0, 1):
        return f"has a weight of {message['weight']}, where 0 and 1 are known"
    for name in ("role", "content"):
        value = message.get(name)
        if name == "content" and isinstance(value, list) and value:
            return f"has {_beyond_text(value)}, which is not text"
        if not isinstance(value, str):
            return f"has a {name} that is not text but {_shown(value)}"
        if _SURROGATE.search(value):
            return f"has a lone surrogate in its {name}, which is not valid Unicode"
    return ""


def _shown(value: object) -> str:
    return "an empty list" if value == [] else "nothing" if value is None else type(value).__name__


def _beyond_text(parts: Sequence[object]) -> str:
    """Name the first part of a content that is not text."""
    for part in parts:
        if isinstance(part, dict) and part.get("type") not in ("text", None):
            return f"a part of type {part['type']}"
        if not isinstance(part, str) and not (
            isinstance(part, dict) and isinstance(part.get("text"), str)
        ):
            return "a part without text"
    return "a part"


def conversation_columns(columns: Sequence[str]) -> tuple[str, ...]:
    """Return the columns that hold conversations, of all that there are; none for documents.

    >>> conversation_columns(["id", "prompt", "completion", "text"])
    ('prompt', 'completion', 'tools', 'chat_template_kwargs')
    >>> conversation_columns(["instruction", "output", "text"])
    ()
    """
    if "messages" in columns:
        return ("messages", *_OPTIONS)
    if {"prompt", "completion"} <= {*columns}:
        return ("prompt", "completion", *_OPTIONS)
    if "text" in columns:
        return ()
    if "conversations" in columns:
        return ("conversations", "system", *_OPTIONS)
    if {"instruction", "output"} <= {*columns}:
        return ("instruction", "input", "output", "system", "history")
    return ()


def read_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Make the columns of a conversation; a row that is none has its fault instead of a text.

    The row has the columns of one format of `conversation_columns`.
    """
    options, messages = _options(row), row.get("messages")
    if "messages" not in row:
        messages = _other_messages(row)
    found = _NO_JSON if options is None else conversation(messages, options)
    if isinstance(found, str):
        return no_conversation(found)
    return {**vars(found), "fault": None}


def no_conversation(fault: str) -> dict[str, Any]:
    """Make the columns of a row that is no conversation, for a reason."""
    return {**_NO_FIELDS, "fault": fault}


def _other_messages(row: Mapping[str, Any]) -> Any:
    """Make messages of the columns of other formats."""
    opening = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    if "conversations" in row:
        messages = row["conversations"]
        return [*opening, *messages] if isinstance(messages, list) and messages else messages
    if "instruction" in row:
        for turn in row.get("history") or []:
            # A question and its answer; of anything else conversation() says what it is.
            is_pair = isinstance(turn, list) and len(turn) == 2
            roles = zip(("user", "assistant"), turn, strict=True) if is_pair else ()
            opening += [_said(role, content) for role, content in roles] or [turn]
        question = row["instruction"]
        if isinstance(question, str) and row.get("input"):
            question = f"{question}\n\n{row['input']}"
        return [*opening, _said("user", question), _said("assistant", row.get("output"))]
    messages = []
    # Two strings are a question and its answer.
    for name, role in (("prompt", "user"), ("completion", "assistant")):
        turns = row.get(name)
        is_list = isinstance(turns, list | None)
        messages += (turns or [None]) if is_list else [_said(role, turns)]
    return messages


def _said(role: str, content: object) -> dict[str, object]:
    return {"role": role, "content": content}


def _options(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Read what a row gives its template, in TRL's columns; None where that is not understood."""
    tools, options = row.get("tools") or [], _without_none(row.get("chat_template_kwargs") or {})
    try:
        # As JSON, since Arrow gives every tool the keys of all: a null there is one that was meant.
        tools = json.loads(tools) if isinstance(tools, str) else _without_none(tools)
    except ValueError:
        return None
    if not (isinstance(tools, list) and isinstance(options, dict)):
        return None
    # A template and messages of its own would be rendered instead.
    if not _RENDERED.isdisjoint(options):
        return None
    return {**options, **({"tools": tools} if tools else {})}
