"""Conversations as data: the columns that hold them, and one text of all their contents.

The text of a conversation is the contents of its messages, joined by line breaks. All models share
it, wherever their templates put the contents.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

# The column that says why a row was skipped.
SKIPPED = "skipped"
# The column of a row's weight, and the field of a message's.
WEIGHT = "weight"
_SEPARATOR = "\n"
_ANSWERING = "assistant"
_BAD_OPTIONS = "has tools that are not a list in JSON, or chat_template_kwargs that are not options"
_TOKEN_WEIGHTS = (
    "has a list of weights, as `vocagnolm weights` writes it: rename or drop the column"
)
# TRL's names for what a template gets in addition to messages.
_OPTION_COLUMNS = ("tools", "chat_template_kwargs")
# The columns that each format needs, and those that it may have. If a dataset has several formats,
# the first of them is read. Messages, and prompts with completions, come before a text, because the
# text may be the same conversation, rendered. A text comes before all other formats.
FORMATS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("messages",), _OPTION_COLUMNS),
    (("prompt", "completion"), _OPTION_COLUMNS),
    (("text",), ()),
    (("conversations",), ("system",) + _OPTION_COLUMNS),
    (("instruction", "output"), ("input", "system", "history")),
)
# Speakers' names in ShareGPT's files, and the roles that templates know.
_SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "assistant": "assistant",
    "system": "system",
}
# Templates read these fields of a message, in addition to its content.
_UNTRAINED_FIELDS = ("tool_calls", "reasoning_content", "thinking", "reasoning")
# JSON may contain texts that are not valid Unicode.
SURROGATE = re.compile("[\ud800-\udfff]")
# Arguments of the function of transformers that renders. No row may set them.
_RENDERER_ARGUMENTS = {"chat_template", "conversations", "messages"}


@dataclass(frozen=True)
class Conversation:
    r"""Messages as one text: content i has the role `roles[i]` and ends at character `ends[i]`.

    `untrained` has the indices of answers with weight 0. The first `prompt_messages` messages are a
    prompt, whose answers are context. `extras` has everything else that a template reads, such as
    names of speakers and tools: JSON of `messages` and `options`. `weights` has the weight of the
    row, and then one for each message; it is empty if they are 1, or 0 for `untrained` answers.

    >>> turns = conversation([{"role": "user", "content": "1 + 1?"},
    ...                       {"role": "assistant", "content": "2"}])
    >>> turns.text, turns.roles, turns.ends
    ('1 + 1?\n2', ('user', 'assistant'), (6, 8))
    >>> turns.places, turns.messages[1]
    ([(0, 6), (7, 8)], {'role': 'assistant', 'content': '2'})
    """

    text: str
    roles: Sequence[str]
    ends: Sequence[int]
    untrained: Sequence[int] = ()
    prompt_messages: int = 0
    extras: str = ""
    weights: Sequence[float] = ()

    @property
    def places(self) -> list[tuple[int, int]]:
        """The half-open range of characters of every content."""
        places = []
        start = 0
        for end in self.ends:
            places.append((start, end))
            start = end + len(_SEPARATOR)
        return places

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages in the form that templates take."""
        return self.with_contents([self.text[start:end] for start, end in self.places])

    def with_contents(self, contents: Sequence[str]) -> list[dict[str, Any]]:
        """Return the messages with other contents in place of their own."""
        # Parse the JSON every time, so that callers may change the result.
        messages = json.loads(self.extras)["messages"] if self.extras else [{} for _ in self.roles]
        for message, role, content in zip(messages, self.roles, contents, strict=True):
            message["role"] = role
            message["content"] = content
        return messages

    @property
    def options(self) -> dict[str, Any]:
        """What a template gets in addition to messages."""
        return dict(json.loads(self.extras)["options"]) if self.extras else {}

    @property
    def answers(self) -> list[int]:
        """The indices of the assistant messages that `--train_on completions` trains on."""
        answers = []
        for index in range(self.prompt_messages, len(self.roles)):
            if self.roles[index] == _ANSWERING and index not in self.untrained:
                answers.append(index)
        return answers

    def as_row(self, *, as_messages: bool = False) -> dict[str, Any]:
        """Return the columns from which `read_row` makes this conversation.

        With `as_messages`, these are never `prompt` and `completion`.
        """
        messages = self.messages
        for index in self.untrained:
            messages[index][WEIGHT] = 0.0
        if self.weights:
            # The first weight is that of the row.
            for message, weight in zip(messages, self.weights[1:], strict=True):
                message[WEIGHT] = weight
        row: dict[str, Any] = {"messages": messages}
        prompt, completion = messages[: self.prompt_messages], messages[self.prompt_messages :]
        if prompt and not as_messages:
            row = {"prompt": prompt, "completion": completion}
        for message in prompt if as_messages else ():
            # Of the answers, only the completion is trained on.
            if message["role"] == _ANSWERING:
                message[WEIGHT] = 0.0
        options = self.options
        if "tools" in options:
            # Only in JSON text, a null is read as one.
            row["tools"] = json.dumps(options.pop("tools"), ensure_ascii=False)
        if options:
            row["chat_template_kwargs"] = options
        if self.weights:
            row[WEIGHT] = self.weights[0]
        return row


def read_weight(value: Any) -> float | str:
    """Return the weight of a row or message, which is 1 without one, or why it is not one.

    >>> read_weight(None), read_weight("-0.5"), read_weight("5 kg")
    (1.0, -0.5, "has a weight of '5 kg', which is not a finite number")
    """
    # Every field of a CSV file is a text, and may be empty.
    if value is None or value == "":
        return 1.0
    # Training weighs tokens anew, and may cut the text elsewhere.
    if isinstance(value, list):
        return _TOKEN_WEIGHTS
    try:
        weight = float(value)
    except (TypeError, ValueError, OverflowError):
        weight = math.nan
    if math.isfinite(weight):
        return weight
    return f"has a weight of {value!r}, which is not a finite number"


def has_weights(row: Mapping[str, Any]) -> bool:
    """Test whether a message of any column has a weight other than 0 and 1."""
    for messages in row.values():
        for message in messages if isinstance(messages, list) else ():
            if isinstance(message, dict) and message.get(WEIGHT) not in (None, 0, 1):
                return True
    return False


def conversation(
    messages: object,
    options: Mapping[str, object] = {},
    prompt_messages: int = 0,
    weight: float = 1.0,
) -> Conversation | str:
    """Join messages into a conversation, or return why that is impossible."""
    if not isinstance(messages, list) or not messages:
        return "has no list of messages"
    contents = []
    roles = []
    untrained = []
    weights = [weight]
    is_weighted = weight != 1
    other_fields = []
    for index, item in enumerate(messages):
        message = _read_message(item)
        if isinstance(message, str):
            return f"message {index} {message}"
        contents.append(message["content"])
        roles.append(message["role"])
        weights.append(message[WEIGHT])
        if message["role"] == _ANSWERING and message[WEIGHT] == 0:
            untrained.append(index)
        elif message[WEIGHT] != 1:
            is_weighted = True
        # Arrow gives every message all the keys that any message has.
        extra_fields = _without_none(message)
        for name in ("role", "content", WEIGHT):
            extra_fields.pop(name, None)
        other_fields.append(extra_fields)
    # The line break between two contents belongs to neither, so an end is where the content ends.
    ends = []
    length = 0
    for content in contents:
        length += len(content)
        ends.append(length)
        length += len(_SEPARATOR)
    extras = ""
    if any(other_fields) or options:
        # The order of keys stays, because templates write tools as they are. Values that JSON does
        # not know, such as dates, are written as text.
        fields = {"messages": other_fields, "options": options}
        extras = json.dumps(fields, default=str, ensure_ascii=False)
    if SURROGATE.search(extras):
        return "has a lone surrogate outside its contents, which is not valid Unicode"
    text = _SEPARATOR.join(contents)
    turns = Conversation(text, tuple(roles), tuple(ends), tuple(untrained), prompt_messages, extras)
    return replace(turns, weights=tuple(weights)) if is_weighted else turns


def _without_none(value: Any) -> Any:
    """Drop the keys of dictionaries whose value is None, at any depth."""
    if isinstance(value, dict):
        present = {}
        for key, item in value.items():
            if item is not None:
                present[key] = _without_none(item)
        return present
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value


def _read_message(message: object) -> dict[str, Any] | str:
    """Give a message the fields that templates use, or return what is wrong with it."""
    if not isinstance(message, dict):
        return "is not a message with a role and a content"
    # Arrow gives every message all keys, so each may have those of ShareGPT, too.
    fields = dict(message)
    speaker, value = fields.pop("from", None), fields.pop("value", None)
    if fields.get("role") is None and speaker is not None:
        fields["role"] = _SPEAKERS.get(str(speaker))
        fields["content"] = value
        if not fields["role"]:
            return f"is from {speaker!r}, not one of {', '.join(_SPEAKERS)}"
    for name in _UNTRAINED_FIELDS:
        if fields.get(name):
            return f"has {name}, which is not trained on"
    weight = read_weight(fields.get(WEIGHT))
    if isinstance(weight, str):
        return weight
    fields[WEIGHT] = weight
    for name in ("role", "content"):
        text = fields.get(name)
        if not isinstance(text, str):
            return f"has a {name} that is not text"
        if SURROGATE.search(text):
            return f"has a lone surrogate in its {name}, which is not valid Unicode"
    return fields


def read_row(row: Mapping[str, Any]) -> Conversation | str:
    """Make a conversation of the columns of one of the `FORMATS`, or return why it is skipped."""
    options = _options(row)
    if options is None:
        return _BAD_OPTIONS
    if row.get("history"):
        return "has a history, which is not read: make messages of it"
    weight = read_weight(row.get(WEIGHT))
    if isinstance(weight, str):
        return weight
    prompt_messages = 0
    if "messages" in row:
        messages = row["messages"]
    elif "completion" in row:
        # As in TRL, only the completion is trained on, even if the prompt has answers.
        prompt = _turns_of(row.get("prompt"), "user")
        prompt_messages = len(prompt)
        messages = prompt + _turns_of(row["completion"], "assistant")
    else:
        messages = _other_messages(row)
    turns = conversation(messages, options, prompt_messages, weight)
    if isinstance(turns, str):
        return turns
    places = turns.places
    for index in turns.answers:
        start, end = places[index]
        # The student would learn to stop at once.
        if not turns.text[start:end].strip():
            return f"message {index} is an answer without text"
    return turns


def _turns_of(column: object, role: str) -> list[Any]:
    """Return the messages of a prompt or completion, which is a list of them or one text."""
    if isinstance(column, list | None):
        # If there is no message, `conversation` reports the None in its place.
        return column or [None]
    return [_make_message(role, column)]


def _other_messages(row: Mapping[str, Any]) -> Any:
    """Make messages from the columns of ShareGPT or Alpaca."""
    if "conversations" in row:
        turns = row["conversations"]
        # A system message must not hide that there are no turns, which `conversation` reports.
        if not isinstance(turns, list) or not turns:
            return turns
    else:
        question = row.get("instruction")
        if isinstance(question, str) and row.get("input"):
            question = f"{question}\n\n{row['input']}"
        turns = [_make_message("user", question), _make_message("assistant", row.get("output"))]
    if row.get("system"):
        turns = [_make_message("system", row["system"])] + turns
    return turns


def _make_message(role: str, content: object) -> dict[str, object]:
    return {"role": role, "content": content}


def _options(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Read TRL's columns of what a row passes to its template. None if they cannot be read."""
    tools = row.get("tools") or []
    options = _without_none(row.get("chat_template_kwargs") or {})
    try:
        # Tools may be JSON text, because Arrow gives every tool all keys. A null in that JSON is
        # meant.
        tools = json.loads(tools) if isinstance(tools, str) else _without_none(tools)
    except ValueError:
        return None
    if not (isinstance(tools, list) and isinstance(options, dict)):
        return None
    # Its own template or messages would be rendered instead.
    if not _RENDERER_ARGUMENTS.isdisjoint(options):
        return None
    if tools:
        options["tools"] = tools
    return options
