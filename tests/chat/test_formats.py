"""Columns of conversations, and the text that their contents make."""

from __future__ import annotations

import json
from typing import Any

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vocagnolm.chat.formats import Conversation, conversation, read_row
from vocagnolm.texts import only_text

ASK, SAY = {"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}
TOOLS = [{"type": "function", "function": {"name": "add"}}, {"type": "function"}]
NULL = [{"type": "function", "function": {"default": None}}]
EMPTY = {"role": "assistant", "content": " \n"}


def read(row: dict[str, Any]) -> Conversation:
    found = read_row(row)
    assert isinstance(found, Conversation)
    return found


@given(st.lists(st.tuples(st.text("a \n", max_size=3), st.text("ua", min_size=1)), min_size=1))
def test_messages_come_back_from_the_text(pairs: list[tuple[str, str]]) -> None:
    messages = [{"role": role, "content": content} for content, role in pairs]
    found = conversation(messages)
    assert isinstance(found, Conversation)
    assert found.messages == messages


# Rows without a conversation, and a word of the reason.
SKIPPED: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "list of messages"),
    ({"messages": []}, "list of messages"),
    ({"messages": "hello"}, "list of messages"),
    ({"messages": [ASK, "2"]}, "message 1 is not"),
    ({"messages": [ASK, {**SAY, "content": None}]}, "message 1 has a content"),
    ({"messages": [{**ASK, "content": [{"type": "text"}]}]}, "message 0 has a content"),
    ({"messages": [{**ASK, "role": None}]}, "message 0 has a role"),
    ({"messages": [ASK, {**SAY, "tool_calls": [1]}]}, "message 1 has tool_calls"),
    ({"messages": [ASK, {**SAY, "thinking": "hm"}]}, "has thinking"),
    ({"messages": [ASK, {**SAY, "weight": float("nan")}]}, "message 1 has a weight"),
    ({"messages": [ASK, {**SAY, "weight": "5 kg"}]}, "weight of '5 kg'"),
    ({"messages": [ASK, SAY], "weight": {}}, "weight of {}"),
    ({"messages": [ASK, SAY], "weight": [0.5, 1.0]}, "list of weights"),
    ({"messages": [ASK, SAY], "weight": "nan"}, "weight of 'nan'"),
    ({"messages": [ASK, SAY], "weight": 10**400}, "finite number"),
    ({"messages": [{**ASK, "content": "\ud83d"}]}, "in its content"),
    ({"messages": [{**ASK, "name": "\ud83d"}]}, "outside its contents"),
    ({"messages": [ASK, EMPTY]}, "message 1 is an answer"),
    ({"messages": [ASK, EMPTY, ASK, SAY]}, "message 1 is an answer"),
    ({"messages": [ASK, SAY], "tools": "{oops"}, "tools"),
    ({"messages": [ASK, SAY], "tools": "3"}, "tools"),
    ({"messages": [ASK, SAY], "chat_template_kwargs": [1]}, "chat_template_kwargs"),
    ({"messages": [ASK], "chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
    ({"messages": [ASK], "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"prompt": None, "completion": "2"}, "message 0"),
    ({"conversations": [{"from": "narrator", "value": "q"}]}, "'narrator'"),
    ({"conversations": [{"from": "human", "value": None}]}, "message 0"),
    ({"instruction": None, "output": "2"}, "message 0"),
    ({"instruction": "q", "output": "2", "history": [["a", "b"]]}, "history"),
]


@pytest.mark.parametrize(("row", "reason"), SKIPPED)
def test_row_without_a_conversation_gives_the_reason(row: dict[str, Any], reason: str) -> None:
    assert reason in str(read_row(row))


@pytest.mark.parametrize(
    ("row", "roles", "text"),
    [
        # Arrow gives every message all fields that one of them has.
        ({"messages": [{**ASK, "tool_calls": None}, SAY]}, "user assistant", "1 + 1?\n2"),
        ({"messages": [ASK, {**EMPTY, "weight": 0}]}, "user assistant", "1 + 1?\n \n"),
        ({"prompt": "1 + 1?", "completion": "2"}, "user assistant", "1 + 1?\n2"),
        ({"prompt": [ASK], "completion": [SAY]}, "user assistant", "1 + 1?\n2"),
        ({"prompt": [ASK], "completion": "2"}, "user assistant", "1 + 1?\n2"),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
         "user assistant", "q\na"),
        ({"conversations": [{"from": "user", "value": "q"}, {"from": "assistant", "value": "a"}],
          "system": "s"}, "system user assistant", "s\nq\na"),
        ({"conversations": [ASK, SAY]}, "user assistant", "1 + 1?\n2"),
        ({"instruction": "Add.", "input": "1, 1", "output": "2"}, "user assistant",
         "Add.\n\n1, 1\n2"),
        ({"instruction": "Add.", "input": "", "output": "2"}, "user assistant", "Add.\n2"),
    ],
)  # fmt: skip
def test_every_format_makes_turns(row: dict[str, Any], roles: str, text: str) -> None:
    found = read(row)
    assert (found.text, " ".join(found.roles), found.extras) == (text, roles, "")
    assert found.prompt_messages == int("prompt" in row)


def test_answers_are_those_of_weight_one_after_the_prompt() -> None:
    found = read(
        {"messages": [ASK, {**SAY, "weight": 0}, {**ASK, "weight": 0}, {**SAY, "weight": 1}]}
    )
    assert (found.untrained, found.answers) == ((1,), [3])
    assert found.messages == [ASK, SAY, ASK, SAY]
    # TRL masks the whole prompt, too.
    prompt = [ASK, {**SAY, "content": ""}, ASK]
    assert read({"prompt": prompt, "completion": [SAY, ASK, SAY]}).answers == [3, 5]


@pytest.mark.parametrize(
    ("weights", "row_weight", "expected"),
    [
        ([None, 1], None, ()),
        ([None, 0], None, ()),
        ([1, 0.5], None, (1, 1, 0.5)),
        ([0, None], None, (1, 0, 1)),
        ([None, -2], 0.5, (0.5, 1, -2)),
        ([None, 0], "3", (3, 1, 0)),
        ([None, " 0.5 "], False, (0, 1, 0.5)),
    ],
)
def test_weights_are_those_of_the_row_and_of_each_message(
    weights: list[Any], row_weight: Any, expected: tuple[float, ...]
) -> None:
    messages = [{**ASK, "weight": weights[0]}, {**SAY, "weight": weights[1]}]
    found = read({"messages": messages, "weight": row_weight})
    assert found.weights == expected
    assert found.untrained == ((1,) if weights[1] == 0 else ())
    assert found.messages == [ASK, SAY]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [ASK, SAY, {**ASK, "name": "Ann"}, {**SAY, "weight": 0}]},
        {"messages": [{**ASK, "weight": 0.5}, SAY, ASK, {**SAY, "weight": 0}], "weight": -2},
        {
            "messages": [ASK, SAY],
            "tools": json.dumps(NULL),
            "chat_template_kwargs": {"thinks": False},
        },
        {"messages": [ASK, SAY], "chat_template_kwargs": {"thinks": True}},
        {"prompt": [ASK, SAY, ASK], "completion": [SAY, ASK, SAY], "tools": TOOLS},
        {"prompt": "1 + 1?", "completion": "2", "weight": 0.5},
        {"conversations": [{"from": "human", "value": "q"}], "system": "s"},
        {"instruction": "Add.", "input": "1, 1", "output": "2"},
    ],
)
def test_conversation_makes_a_row_that_is_read_as_the_same_conversation(
    row: dict[str, Any],
) -> None:
    found = read(row)
    as_text = json.dumps(found.as_row())
    assert read(json.loads(as_text)) == found


@pytest.mark.parametrize(
    ("columns", "text_column", "expected"),
    [
        ("text id", None, "text"),
        ("messages id", None, "in messages"),
        ("messages prompt completion", None, "in messages"),
        ("prompt completion", None, "prompt\ncompletion"),
        ("messages text", None, "in messages"),
        ("messages text", "text", "text"),
        ("prompt completion", "completion", "completion"),
        ("prompt", None, None),
        ("messages", "text", None),
        ("text", "body", None),
    ],
)
def test_format_is_found_by_the_columns(
    columns: str, text_column: str | None, expected: str | None
) -> None:
    row = {name: name for name in columns.split()}
    if "messages" in row:
        row |= {"messages": [{**ASK, "content": "in messages"}]}  # type: ignore[dict-item]
    corpus = datasets.Dataset.from_list([row])
    if expected is None:
        with pytest.raises(ValueError, match=r"text_column '.*' .*a\.jsonl"):
            only_text(corpus, text_column, "a.jsonl")
        return
    for library in (None, "numpy", "pandas", "arrow"):
        found = only_text(corpus.with_format(library), text_column, "a.jsonl")
        assert found.with_format(None)["text"][:] == [expected]


@pytest.mark.parametrize(
    ("columns", "options"),
    [
        ({"tools": TOOLS}, {"tools": TOOLS}),
        ({"tools": json.dumps(TOOLS)}, {"tools": TOOLS}),
        ({"tools": json.dumps(NULL)}, {"tools": NULL}),
        ({"tools": [{"type": "function", "name": None}]}, {"tools": TOOLS[1:]}),
        ({"tools": None, "chat_template_kwargs": {"thinks": False, "a": None}}, {"thinks": False}),
    ],
)
def test_tools_and_options_are_for_the_template(
    columns: dict[str, Any], options: dict[str, Any]
) -> None:
    speaker = {**ASK, "name": "Ann"}
    found = read({"messages": [speaker, SAY], **columns})
    assert found.messages == [speaker, SAY]
    # Templates write tools with their keys in the order in which they are.
    assert json.dumps(found.options) == json.dumps(options)
