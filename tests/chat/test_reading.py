"""Tokens of rendered conversations against a reference that walks over characters."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import NamedTuple

import numpy as np
import pytest
from chat_templates import CONTENTS, FORMS, TEMPLATES, TRIMS, TURN_ENDS, chat_tokenizer, turns
from families import mathematics
from hypothesis import given
from hypothesis import strategies as st

from vocagnolm.alignment import align_spans, covered_shares, narrow_spans, widen_spans
from vocagnolm.chat.formats import Conversation
from vocagnolm.chat.reading import TrainOn, TurnTokens, read_tokens
from vocagnolm.chat.render import Rendered, Template
from vocagnolm.readers import template_of
from vocagnolm.spans import encode_rendered

MULTI = ["1 + 1?", "2", " And 2 + 2 ?\n", "It is 4.\n\n", "", ""]
NAMES = [*TEMPLATES]


class Read(NamedTuple):
    """A conversation as a model reads it, and the same by walking over the rendered text."""

    reading: TurnTokens
    # For every token after the first, its characters in the conversation.
    characters: list[set[int]]
    # The same tokens' characters in the rendered text.
    rendered_spans: list[tuple[int, int]]
    text: str
    # For each message, [begin of the content, end of the content, end of the turn) in the text.
    places: list[tuple[int, int, int]]


@cache
def loaded(name: str) -> tuple[object, Template]:
    tokenizer = chat_tokenizer(name)
    template = template_of(tokenizer, "student")
    assert template
    return tokenizer, template


def walk(name: str, asked: Conversation) -> tuple[str, dict[int, int], list[tuple[int, int, int]]]:
    """Render by the Python form: the text, what each of its characters is, and the places."""
    text, owned, places = "", {}, {}
    pieces = FORMS[name](asked.roles)
    for piece, following in zip(pieces, [*pieces[1:], ""], strict=True):
        if isinstance(piece, str):
            text += piece
            continue
        kept = [*range(*asked.places[piece])]
        if name in TRIMS:
            while kept and asked.text[kept[0]].isspace():
                kept.pop(0)
            while kept and asked.text[kept[-1]].isspace():
                kept.pop()
        begin = len(text)
        owned |= {len(text) + at: character for at, character in enumerate(kept)}
        text += "".join(asked.text[at] for at in kept)
        close = str(following).startswith(TURN_ENDS[name]) * len(TURN_ENDS[name])
        places[piece] = (begin, len(text), len(text) + close)
    return text, owned, [places[number] for number in range(len(asked.roles))]


@cache
def read(name: str, asked: Conversation, train_on: TrainOn, *, student: bool) -> Read | str:
    tokenizer, template = loaded(name)
    rendered = template.render(asked)
    if isinstance(rendered, str):
        return rendered
    (encoding,) = encode_rendered(tokenizer, [rendered.text])
    names = tokenizer.convert_ids_to_tokens(encoding.ids.tolist())
    special = np.array([token == TURN_ENDS[name] for token in names])
    found = read_tokens(
        asked, rendered, encoding.ids, encoding.spans, special if student else None, train_on
    )
    if isinstance(found, str):
        return found
    text, owned, places = walk(name, asked)
    assert rendered.text == text
    spans = [(int(a), int(b)) for a, b in encoding.spans[1:]]
    characters = [{owned[at] for at in range(a, b) if at in owned} for a, b in spans]
    return Read(found, characters, spans, text, places)


def check_labels(asked: Conversation, read: Read, train_on: TrainOn, *, student: bool) -> None:
    """Check that labels are on answers with their ends, or on all; a teacher's only on contents."""
    labelled = {n for a, b in read.reading.labelled.tolist() for n in range(a, b)}
    expected = set()
    for number, ((begin, end, close), role) in enumerate(
        zip(read.places, asked.roles, strict=True)
    ):
        if train_on == "completions" and role != "assistant":
            continue
        stop = close if student else end
        for token, (a, b) in enumerate(read.rendered_spans):
            is_content = a < end and b > begin and begin < end
            if is_content or end <= a < stop:
                expected.add(token)
        assert number in read.reading.stops or role != "assistant"
    if student and train_on == "all":
        expected = {*range(len(read.rendered_spans))}
    assert labelled == expected


def check_pair(ours: Read, theirs: Read) -> int:
    """Check ranges and shares by a walk over all characters; count the mapped tokens."""
    spans, other = ours.reading.spans, theirs.reading.spans
    for both in (spans, other):
        assert np.array_equal(widen_spans(*narrow_spans(both)[:2]), both)
    found = align_spans(spans, other)
    shares = covered_shares(spans, other, found)
    readers = Counter(chain(*ours.characters))
    owners = defaultdict(list)
    for number, them in enumerate(theirs.characters):
        for character in them:
            owners[character].append(number)
    for token, characters in enumerate(ours.characters):
        under = sorted({number for character in characters for number in owners[character]})
        expected = (under[0], under[-1] + 1) if under else (-1, -1)
        assert tuple(found[token]) == expected
        assert under == [*range(*expected)] or not under
        if not under:
            continue
        parts = [
            sum(1 / readers[c] for c in characters & theirs.characters[n])
            / len(theirs.characters[n])
            for n in under
        ]
        middle = [shares[token, 1]] * (len(under) - 2)
        given = [shares[token, 0], *middle, shares[token, 2]][: len(under)]
        if len(under) > 2:  # those between count as one token
            between = set().union(*(theirs.characters[n] for n in under[1:-1]))
            share = sum(1 / readers[c] for c in characters & between) / len(between)
            parts[1:-1] = [share] * (len(under) - 2)
        assert given == pytest.approx(parts)
    return int((found[:, 0] != -1).sum())


@pytest.mark.parametrize("teacher", NAMES)
@pytest.mark.parametrize("student", NAMES)
def test_solutions_align_in_all_templates(student: str, teacher: str) -> None:
    """100 % of the characters of contents, as nothing in them is trimmed."""
    # A question, and an answer of two lines.
    rows = [text.split("\n", 1) for text in mathematics()[:24:2]]
    for first in range(0, len(rows), 2):
        contents = [part for row in rows[first : first + 2] for part in row]
        asked = turns(*contents[: 2 + first % 4])
        both = [read(name, asked, "completions", student=not at)
                for at, name in enumerate((student, teacher))]  # fmt: skip
        ours, theirs = both
        assert isinstance(ours, Read)
        assert isinstance(theirs, Read)
        of_contents = sum(map(bool, ours.characters))
        assert check_pair(ours, theirs) == of_contents
        assert {*chain(*ours.characters)} == {
            c for a, b in asked.places for c in range(a, b)
        } == {*chain(*theirs.characters)}  # fmt: skip
        check_labels(asked, ours, "completions", student=True)
        check_labels(asked, theirs, "completions", student=False)


@pytest.mark.parametrize("train_on", ["completions", "all"])
@given(
    pair=st.tuples(st.sampled_from(NAMES), st.sampled_from(NAMES)),
    contents=st.lists(CONTENTS, min_size=2, max_size=5),
    system=st.booleans(),
)
def test_fuzz_aligns_as_the_reference_does(
    train_on: TrainOn, pair: tuple[str, str], contents: list[str], system: bool
) -> None:
    asked = turns(*contents, system=system)
    found = [read(name, asked, train_on, student=not at) for at, name in enumerate(pair)]
    for at, one in enumerate(found):
        if isinstance(one, str):
            assert any(words in one for words in ("template refuses", "part of two"))
        else:
            check_labels(asked, one, train_on, student=not at)
    if isinstance(found[0], Read) and isinstance(found[1], Read):
        check_pair(found[0], found[1])


@pytest.mark.parametrize("train_on", ["completions", "all"])
@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_of_the_messages_of_a_token(name: str, train_on: TrainOn) -> None:
    weights = [3.0, 0.5, -2.0, 0.0, 1.0, 4.0, 0.0]
    asked = replace(turns(*MULTI[:4], *MULTI[:2]), weights=tuple(weights), untrained=(5,))
    for student in (True, False):
        found = read(name, asked, train_on, student=student)
        assert isinstance(found, Read)
        # A token without a label has none.
        given: dict[int, float] = {}
        for (first, last), weight in zip(
            found.reading.labelled.tolist(), found.reading.weights, strict=True
        ):
            given |= dict.fromkeys(range(first, last), weight)
        expected: dict[int, float] = {}
        if student and train_on == "all":
            expected = dict.fromkeys(range(len(found.rendered_spans)), 3.0)
        for message, (begin, end, close) in enumerate(found.places):
            if train_on == "completions" and asked.roles[message] != "assistant":
                continue
            for token, (a, b) in enumerate(found.rendered_spans):
                if (a < end and b > begin) or (student and end <= a < close):
                    expected[token] = 3.0 * weights[message + 1]
        assert given == {token: weight for token, weight in expected.items() if weight}


@pytest.mark.parametrize("name", NAMES)
@given(contents=st.lists(CONTENTS, min_size=1, max_size=3))
def test_ids_are_those_of_apply_chat_template(name: str, contents: list[str]) -> None:
    tokenizer, template = loaded(name)
    asked = turns(*contents)
    rendered = template.render(asked)
    assert isinstance(rendered, Rendered)
    (encoding,) = encode_rendered(tokenizer, [rendered.text])
    expected = tokenizer.apply_chat_template(asked.messages, tokenize=True, return_dict=False)
    assert encoding.ids.tolist() == expected


def test_conversation_ends_behind_an_answer() -> None:
    asked = turns(*MULTI[:4])
    whole = read("qwen2.5", asked, "completions", student=True)
    assert isinstance(whole, Read)
    assert [*whole.reading.stops] == [1, 3]
    short = whole.reading.until(1)
    assert loaded("qwen2.5")[0].decode(short.values).endswith("assistant\n2<|im_end|>")
    first, last = short.labelled
    assert first.tolist() == whole.reading.labelled[0].tolist()
    assert last[0] == last[1]
    assert whole.reading.until(3).spans.shape < whole.reading.spans.shape


def test_answers_of_a_prompt_have_labels_only_with_all() -> None:
    asked = replace(turns(*MULTI[:4]), prompt_messages=3)
    completion = read("qwen2.5", asked, "completions", student=True)
    everything = read("qwen2.5", asked, "all", student=True)
    assert isinstance(completion, Read)
    assert isinstance(everything, Read)
    whole = read("qwen2.5", turns(*MULTI[:4]), "completions", student=True)
    assert isinstance(whole, Read)
    assert completion.reading.labelled.tolist() == whole.reading.labelled[1:].tolist()
    assert everything.reading.labelled.tolist() == [[0, len(everything.rendered_spans)]]
    # The conversation cannot end inside its prompt.
    assert [*completion.reading.stops] == [3]


@pytest.mark.parametrize(
    ("template", "spans", "expected"),
    [
        ("{{ m.content }}", [[0, 2], [2, 3]], "part of two"),
        ("{{ m.content }}<end>", [[0, 1], [1, 6], [6, 8], [8, 13]], [[1, 1], [2, 4], [4, 4]]),
        ("{{ m.content }}<end>", [[0, 5], [5, 6], [6, 8], [8, 13]], [[1, 1], [2, 4], [4, 4]]),
    ],
)
def test_first_token_is_not_content(
    template: str, spans: list[list[int]], expected: object
) -> None:
    bare = Template(f"{{% for m in messages %}}{template}{{% endfor %}}", (), "student")
    asked = turns("a", "bc")
    rendered = bare.render(asked)
    assert isinstance(rendered, Rendered)
    ends = np.array([False, True, False, True])[: len(spans)]
    found = read_tokens(asked, rendered, ends, np.array(spans), ends, "completions")
    if isinstance(found, TurnTokens):
        assert found.labelled.tolist() == [[1, 3]]
        assert found.spans.tolist() == expected
    else:
        assert str(expected) in str(found)


@pytest.mark.parametrize(
    ("template", "contents", "spans", "special", "stop"),
    [
        # The answer's own text ends with the name of the token that closes it.
        ("{{ m.content }}<e>", ["q", "b<e>"], [1, 4, 5, 8, 11], [1, 3, 4], 4),
        # No token closes the answer. The message after it begins with such a token.
        ("{{ m.content }}", ["q", "a", "<e>z"], [1, 2, 5, 6], [2], 1),
    ],
)
def test_answer_ends_with_the_token_that_closes_it(
    template: str, contents: list[str], spans: list[int], special: list[int], stop: int
) -> None:
    bare = Template(f"{{% for m in messages %}}{template}{{% endfor %}}", (), "student")
    asked = turns(*contents)
    rendered = bare.render(asked)
    assert isinstance(rendered, Rendered)
    closing = np.zeros(len(spans), bool)
    closing[special] = True
    ranges = np.array([[0, *spans[:-1]], spans]).T
    found = read_tokens(asked, rendered, closing, ranges, closing, "completions")
    assert isinstance(found, TurnTokens)
    assert found.stops == {1: stop}
