"""Columns of conversations, and the text that their contents make."""

from __future__ import annotations

import json

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vocagnolm.chat.formats import Conversation, conversation, read_row
from vocagnolm.texts import only_text

ASK, SAY = {"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}


@given(st.lists(st.tuples(st.text("a \n", max_size=3), st.text("ua", min_size=1)), min_size=1))
def test_messages_come_back_from_the_text(pairs: list[tuple[str, str]]) -> None:
    messages = [{"role": role, "content": content} for content, role in pairs]
    found = conversation(messages)
    assert isinstance(found, Conversation)
    assert found.messages == messages


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (None, "has no list of messages"),
        ([], "has no list of messages"),
        ("hello", "has no list of messages"),
        ([ASK, "2"], "message 1 is not a message"),
        ([ASK, {"role": "assistant", "content": None}], "message 1 has a content that is not text"),
        ([{"role": "user", "content": [{"type": "text"}]}], "message 0 has a content that is not"),
        ([{**ASK, "role": None}], "message 0 has a role that is not text"),
        ([ASK, {**SAY, "tool_calls": [1]}], "message 1 has tool_calls"),
        ([ASK, {**SAY, "thinking": "hm"}], "has thinking"),
        ([ASK, {**SAY, "weight": 0.5}], "message 1 has a weight of 0.5, where 0 and 1 are known"),
        ([ASK, {**SAY, "weight": "0"}], "message 1 has a weight of '0', where 0 and 1 are known"),
        ([{**ASK, "content": "\ud83d"}], "lone surrogate in its content"),
        ([{**ASK, "name": "\ud83d"}], "lone surrogate outside its contents"),
    ],
)
def test_faulty_messages_are_told_by_number(messages: object, reason: str) -> None:
    assert reason in str(conversation(messages))


def test_absent_fields_of_messages_are_no_fault() -> None:
    # Arrow gives every message all fields that one of them has.
    assert conversation([{**ASK, "tool_calls": None}, SAY]) == conversation([ASK, SAY])


def test_answers_of_weight_nothing_are_no_answers() -> None:
    messages = [ASK, {**SAY, "weight": 0}, {**ASK, "weight": 0}, {**SAY, "weight": 1}, SAY]
    found = conversation(messages)
    assert isinstance(found, Conversation)
    assert (found.untrained, found.answers) == ((1,), [3, 4])
    assert found.messages == [ASK, SAY, ASK, SAY, SAY]


@pytest.mark.parametrize(
    ("columns", "text_column", "expected"),
    [
        (["text", "id"], None, "text"),
        (["messages", "id"], None, "in messages"),
        (["messages", "prompt", "completion"], None, "in messages"),
        (["prompt", "completion"], None, "prompt\ncompletion"),
        (["messages", "text"], None, "in messages"),
        (["messages", "text"], "text", "text"),
        (["prompt", "completion"], "completion", "completion"),
    ],
)
def test_format_is_found_by_the_columns(
    columns: list[str], text_column: str | None, expected: str
) -> None:
    row = {name: name for name in columns} | {"messages": [{**ASK, "content": "in messages"}]}
    corpus = datasets.Dataset.from_list([{name: row[name] for name in columns}])
    assert only_text(corpus, text_column, "a.jsonl")["text"][:] == [expected]


@pytest.mark.parametrize("library", ["numpy", "pandas", "arrow"])
def test_format_of_a_dataset_does_not_matter(library: str) -> None:
    rows = [{"messages": [ASK, SAY]}]
    corpus = datasets.Dataset.from_list(rows)
    formatted = only_text(corpus.with_format(library), None, "rows")
    assert formatted.to_list() == only_text(corpus, None, "rows").to_list()


@pytest.mark.parametrize(
    ("columns", "text_column"), [(["prompt"], None), (["messages"], "text"), (["text"], "body")]
)
def test_format_is_not_found_without_its_column(
    columns: list[str], text_column: str | None
) -> None:
    with pytest.raises(ValueError, match=r"text_column '.*' is not a column of a.jsonl"):
        only_text(
            datasets.Dataset.from_dict({name: [] for name in columns}), text_column, "a.jsonl"
        )


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1 + 1?", "completion": "2"},
        {"prompt": [ASK], "completion": [SAY]},
        {"prompt": [ASK], "completion": "2"},
    ],
)
def test_prompt_and_completion_make_turns(row: dict[str, object]) -> None:
    assert read_row(row) == conversation([ASK, SAY], prompt_messages=1)
    assert "message 0" in str(read_row({"prompt": None, "completion": "2"}))


def test_answers_of_a_prompt_are_context() -> None:
    # TRL masks the whole prompt, too.
    row = {"prompt": [ASK, {**SAY, "content": ""}, ASK], "completion": [SAY, ASK, SAY]}
    found = read_row(row)
    assert isinstance(found, Conversation)
    assert found.answers == [3, 5]


@pytest.mark.parametrize(
    ("row", "roles", "text"),
    [
        ({"conversations": [{"from": "human", "value": "1 + 1?"}, {"from": "gpt", "value": "2"}]},
         ("user", "assistant"), "1 + 1?\n2"),
        ({"conversations": [{"from": "user", "value": "q"}, {"from": "assistant", "value": "a"}],
          "system": "s"}, ("system", "user", "assistant"), "s\nq\na"),
        ({"conversations": [ASK, SAY]}, ("user", "assistant"), "1 + 1?\n2"),
        ({"instruction": "Add.", "input": "1, 1", "output": "2"}, ("user", "assistant"),
         "Add.\n\n1, 1\n2"),
        ({"instruction": "Add.", "input": "", "output": "2"}, ("user", "assistant"), "Add.\n2"),
    ],
)  # fmt: skip
def test_formats_of_others_make_turns(
    row: dict[str, object], roles: tuple[str, ...], text: str
) -> None:
    found = read_row(row)
    assert isinstance(found, Conversation)
    assert (found.text, found.roles) == (text, roles)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"conversations": [{"from": "narrator", "value": "q"}]}, "'narrator'"),
        ({"conversations": [{"from": "human", "value": None}]}, "message 0"),
        ({"instruction": None, "output": "2"}, "message 0"),
        ({"instruction": "q", "output": "2", "history": [["a", "b"]]}, "history"),
    ],
)
def test_turns_of_others_without_text_are_told(row: dict[str, object], reason: str) -> None:
    assert reason in str(read_row(row))


@pytest.mark.parametrize("answer", ["", " \n"])
def test_answers_without_text_are_told_unless_their_weight_is_nothing(answer: str) -> None:
    empty = {**SAY, "content": answer}
    system = {"role": "system", "content": ""}
    reason = "message 2 is an answer without text"
    assert read_row({"messages": [system, ASK, empty]}) == reason
    assert read_row({"messages": [system, ASK, empty, ASK, SAY]}) == reason
    messages = [system, ASK, {**empty, "weight": 0}, ASK, SAY]
    assert isinstance(read_row({"messages": messages}), Conversation)


TOOLS = [{"type": "function", "function": {"name": "add"}}, {"type": "function"}]
NULL = [{"type": "function", "function": {"default": None}}]


@pytest.mark.parametrize(
    ("columns", "options"),
    [
        ({"tools": TOOLS}, {"tools": TOOLS}),
        ({"tools": json.dumps(TOOLS)}, {"tools": TOOLS}),
        ({"tools": json.dumps(NULL)}, {"tools": NULL}),
        ({"tools": [{"type": "function", "name": None}]}, {"tools": TOOLS[1:]}),
        ({"tools": None, "chat_template_kwargs": {"thinks": False, "a": None}}, {"thinks": False}),
        ({"tools": "{oops"}, None),
        ({"tools": "3"}, None),
        ({"chat_template_kwargs": [1]}, None),
        ({"chat_template_kwargs": {"chat_template": "x"}}, None),
        ({"chat_template_kwargs": {"messages": []}}, None),
    ],
)
def test_tools_and_options_are_for_the_template(
    columns: dict[str, object], options: dict[str, object] | None
) -> None:
    speaker = {**ASK, "name": "Ann"}
    found = read_row({"messages": [speaker, SAY], **columns})
    if options is None:
        assert "tools that are not a list in JSON" in str(found)
        return
    assert isinstance(found, Conversation)
    assert (found.messages, found.options) == ([speaker, SAY], options)
    # Templates write tools with their keys in the order in which they are.
    assert json.dumps(found.options) == json.dumps(options)
    bare = conversation([ASK, SAY], options)
    assert isinstance(bare, Conversation)
    assert bare.options == options
