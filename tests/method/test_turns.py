"""Conversations as rows: what has a label, what is cut or skipped, and what is counted."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from vocagnolm.alignment import align_segment
from vocagnolm.chat.reading import TrainOn
from vocagnolm.collator import PackedCollator
from vocagnolm.corpus import read_list
from vocagnolm.data import align_corpus
from vocagnolm.fields import OptionError
from vocagnolm.packing import Blocks
from vocagnolm.readers import Reader, TeacherReaders, student_reader, teacher_reader

Tokenizers = dict[str, PreTrainedTokenizerBase]
TALK = ["What is 12 + 30?", "It is 42.", "And\n7 * 6 ? ", "The same: 42."]


def talk(*contents: str, last: str = "assistant") -> list[dict[str, str]]:
    roles = ["user", "assistant"] * len(contents)
    roles[len(contents) - 1] = last
    return [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]


def corpus_of(*conversations: object) -> datasets.Dataset:
    return read_list([{"messages": messages} for messages in conversations], None, "rows")


Pair = Callable[..., list[Reader]]


@pytest.fixture
def pair(tokenizers_by_family: Tokenizers) -> Pair:
    """`pair(student_limit, teacher_limit)`: readers with templates that differ."""

    def make(student_limit: int = 200, teacher_limit: int = 200) -> list[Reader]:
        # A copy, as the template is set on the tokenizer, which all tests share.
        ours = deepcopy(tokenizers_by_family["metaspace"])
        theirs = tokenizers_by_family["nfc_digits"]
        student = student_reader(ours, student_limit, "plain")
        return [student, teacher_reader(theirs, teacher_limit, "chatml")]

    return make


def retold(reader: Reader, before: str, after: str) -> Reader:
    """A reader with another template."""
    assert reader.template
    source = reader.template.source.replace(before, after)
    assert source != reader.template.source
    return replace(reader, template=replace(reader.template, source=source))


def said(reader: Reader, row: dict[str, Any], side: str) -> list[str]:
    """The labelled parts of a row, decoded."""
    ranges = np.reshape(row[f"{side}_labelled"], (-1, 2)).tolist()
    return [reader.tokenizer.decode(row[f"{side}_ids"][first:last]) for first, last in ranges]


def test_cache_tells_labels_and_templates_apart(pair: Pair, tmp_path: Path) -> None:
    corpus_of(talk(*TALK)).save_to_disk(tmp_path / "talk")
    corpus = datasets.load_from_disk(tmp_path / "talk")
    student, teacher = pair()
    other = retold(student, "capitalize", "upper")
    (answers,) = align_corpus(corpus, student, teacher).rows["student_labelled"]
    whole, changed = (
        align_corpus(corpus, s, teacher, train_on="all").rows for s in (student, other)
    )
    assert whole["student_labelled"][0] != answers
    assert whole["student_ids"][0] != changed["student_ids"][0]


def test_conversations_are_not_paired_by_number(pair: Pair) -> None:
    student, teacher = pair()
    with pytest.raises(ValueError, match=r"^uld_pairing position"):
        align_corpus(corpus_of(talk(*TALK)), student, TeacherReaders((teacher,), by_position=True))


@pytest.mark.parametrize("train_on", ["completions", "all"])
def test_row_has_both_renderings_and_labels(train_on: TrainOn, pair: Pair) -> None:
    student, teacher = pair()
    (row,) = align_corpus(corpus_of(talk(*TALK)), student, teacher, train_on=train_on).rows
    text = student.tokenizer.decode(row["student_ids"])
    shown = teacher.tokenizer.decode(row["teacher_ids"])
    first, second = (f"User: {a}\n\nAssistant: {b}</s>" for a, b in (TALK[:2], TALK[2:]))
    assert text == f"<s>{first}{second}"
    assert shown.startswith(
        f"<|im_start|>user\n{TALK[0]}<|im_end|>\n<|im_start|>assistant\n{TALK[1]}"
    )
    ours, theirs = said(student, row, "student"), said(teacher, row, "teacher")
    if train_on == "completions":
        assert ours == [f"{TALK[1]}</s>", f"{TALK[3]}</s>"]
        assert theirs == [TALK[1], TALK[3]]
    else:
        assert ours == [text.removeprefix("<s>")]
        assert theirs == TALK
    assert (row["start"], row["end"]) == (0, len("\n".join(TALK)))
    assert (row["left_out_messages"], row["trimmed_characters"]) == (0, 0)


def test_every_labelled_token_of_an_answer_is_guided(pair: Pair) -> None:
    segments = align_corpus(corpus_of(talk(*TALK)), *pair())
    (row,) = segments.rows
    (ranges,) = align_segment(row)
    answers = np.reshape(row["student_labelled"], (-1, 2))
    guiding = {n for a, b in np.reshape(row["teacher_labelled"], (-1, 2)) for n in range(a, b)}
    for first, last in answers:
        # The last label ends the turn.
        assert (ranges[first : last - 1, 0] != -1).all()
        assert ranges[last - 1].tolist() == [-1, -1]
        assert {n for a, b in ranges[first : last - 1] for n in range(a, b)} <= guiding
    assert segments.mapped_text_fraction == 1
    assert 0 < row["text_tokens"] < row["student_tokens"]


@pytest.mark.parametrize("train_on", ["completions", "all"])
def test_answer_of_weight_nothing_has_no_label(train_on: TrainOn, pair: Pair) -> None:
    student, teacher = pair()
    messages: list[dict[str, Any]] = talk(*TALK)
    messages[1]["weight"] = 0
    (row,) = align_corpus(corpus_of(messages), student, teacher, train_on=train_on).rows
    ours, theirs = said(student, row, "student"), said(teacher, row, "teacher")
    if train_on == "completions":
        assert (ours, theirs) == ([f"{TALK[3]}</s>"], [TALK[3]])
    else:
        rest = f"User: {TALK[2]}\n\nAssistant: {TALK[3]}</s>"
        assert ours == [f"User: {TALK[0]}\n\nAssistant: ", rest]
        assert theirs == [TALK[0], *TALK[2:]]
    messages[3]["weight"] = 0
    ((_, reason),) = align_corpus(corpus_of(messages), student, teacher).skipped
    assert "no answer" in reason


@pytest.mark.parametrize("train_on", ["completions", "all"])
def test_weights_are_those_of_the_labelled_parts(train_on: TrainOn, pair: Pair) -> None:
    student, teacher = pair()
    assert student.template
    # Between two messages there is nothing, and no range has tokens.
    source = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    student = replace(student, template=replace(student.template, source=source))
    messages: list[dict[str, Any]] = talk(*TALK)
    weights = [0.5, -2.0, 1.0, 3.0]
    for message, weight in zip(messages, weights, strict=True):
        message["weight"] = weight
    corpus = read_list([{"messages": messages, "weight": 2}], None, "rows")
    (row,) = align_corpus(corpus, student, teacher, train_on=train_on).rows
    found = zip(said(student, row, "student"), row["student_weights"], strict=True)
    every = 2 if train_on == "completions" else 1
    expected = [(f"{TALK[n]}</s>", 2 * weights[n]) for n in range(every - 1, 4, every)]
    assert list(found) == expected


@pytest.mark.parametrize(("student_limit", "teacher_limit"), [(60, 200), (200, 75)])
def test_long_conversation_ends_behind_an_answer(
    student_limit: int, teacher_limit: int, pair: Pair
) -> None:
    corpus = corpus_of(talk(*TALK), talk(*TALK[:2]), talk(TALK[0], "no " * 150))
    segments = align_corpus(corpus, *pair(student_limit, teacher_limit))
    cut, whole = segments.rows
    assert cut["left_out_messages"] == 2
    assert cut["end"] == len("\n".join(TALK[:2])) == whole["end"]
    for name in ("student_labelled", "student_ids", "teacher_labelled"):
        assert cut[name] == whole[name]
    # The teacher needs nothing after an answer's content, as it guides nothing.
    assert cut["teacher_ids"] == whole["teacher_ids"][: cut["teacher_tokens"]]
    (skipped, too_long), (shortened, left_out) = segments.reasons
    assert (skipped, shortened) == (2, 0)
    assert "first answer" in too_long
    assert "last 2 messages" in left_out


@pytest.mark.parametrize("model", [0, 1])
def test_conversation_fills_a_context_exactly(model: int, pair: Pair) -> None:
    corpus = corpus_of(talk(*TALK))
    (row,) = align_corpus(corpus, *pair()).rows
    # Up to the last label.
    tokens = row[("student_labelled", "teacher_labelled")[model]][-1]
    for limit, left_out in ((tokens, 0), (tokens - 1, 2)):
        limits = [200, 200]
        limits[model] = limit
        (row,) = align_corpus(corpus, *pair(*limits)).rows
        assert row["left_out_messages"] == left_out


def test_unusable_conversations_are_skipped_with_reasons(pair: Pair) -> None:
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    student, teacher = pair()
    assert teacher.template
    teacher = retold(teacher, teacher.template.source, strict + teacher.template.source)
    bad = [{"role": "system", "content": "s"}, *talk(*TALK)]
    corpus = corpus_of(talk(*TALK), bad, None, talk("only asked", last="user"))
    segments = align_corpus(corpus, student, teacher)
    assert segments.rows["document"][:] == [0]
    reasons = dict(segments.skipped)
    assert reasons[1].startswith("the teacher's ")
    for number, words in ((1, "refuses it: no system"), (2, "list of messages"), (3, "no answer")):
        assert words in reasons[number]


def test_trimmed_characters_are_counted_and_unmapped(pair: Pair) -> None:
    student, teacher = pair()
    trims = retold(teacher, "message['content']", "message['content'] | trim")
    corpus = corpus_of(talk("q", "  42 \n\n"))
    rows = [align_corpus(corpus, student, reader).rows[0] for reader in (teacher, trims)]
    assert [row["trimmed_characters"] for row in rows] == [0, 5]
    assert rows[0]["unmapped_text_tokens"] == 0 < rows[1]["unmapped_text_tokens"]


def test_several_teachers_have_their_labels_in_their_columns(
    pair: Pair, tokenizers_by_family: Tokenizers
) -> None:
    student, first = pair()
    second = teacher_reader(tokenizers_by_family["byte_level"], 300, "plain")
    (row,) = align_corpus(corpus_of(talk(*TALK)), student, TeacherReaders((first, second))).rows
    at, _ = row["teacher_counts"]
    labelled = np.array(row["teacher_labelled"])
    for reader, ids, ranges in (
        (first, row["teacher_ids"][:at], labelled[:4]),
        (second, row["teacher_ids"][at:], labelled[4:] - at),
    ):
        parts = said(reader, {"teacher_ids": ids, "teacher_labelled": ranges}, "teacher")
        # The second one's tokens include the space before them.
        assert [part.strip() for part in parts] == [TALK[1], TALK[3]]


def test_answers_without_an_end_are_warned_of(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    student, teacher = pair()
    endless = retold(student, "eos_token", "' ~ '")
    for reader in (student, endless):
        (row,) = align_corpus(corpus_of(talk(*TALK)), reader, teacher).rows
        assert ("learn to stop" in caplog.text) == (reader is endless)
    assert said(endless, row, "student") == [TALK[1], TALK[3]]


def test_end_of_another_turn_does_not_count(pair: Pair) -> None:
    student = retold(pair()[0], "if message['role'] == 'assistant'", "if loop.last")
    (row,) = align_corpus(corpus_of(talk(*TALK)), student, None).rows
    assert said(student, row, "student") == [TALK[1], f"{TALK[3]}</s>"]


def test_template_of_documents_is_not_asked_for(pair: Pair) -> None:
    student, teacher = pair()
    bare_student, bare_teacher = (replace(reader, template=None) for reader in (student, teacher))
    pages = datasets.Dataset.from_dict({"text": ["a page"]})
    assert len(align_corpus(pages, bare_student, None).rows) == 1
    for readers, option in (
        ((bare_student, teacher), "student_chat_template"),
        ((student, bare_teacher), "teacher_chat_template"),
    ):
        with pytest.raises(OptionError, match=f"^{option} is needed"):
            align_corpus(corpus_of(talk(*TALK)), *readers)


def test_teacher_without_a_content_to_label_has_no_label(pair: Pair) -> None:
    messages: list[dict[str, Any]] = talk("", "not trained on")
    messages[1]["weight"] = 0
    rows = align_corpus(corpus_of(messages), *pair(), train_on="all").rows
    batch = PackedCollator(200)([Blocks(rows, 200, 200)[0]])
    assert (batch["labels"] >= 0).any()
    assert (batch["teacher_labels"] == -100).all()
