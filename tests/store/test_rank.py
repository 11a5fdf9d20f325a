"""`vocagnolm rank`: two stores of any tokenizers are lined up, scored, sorted and filtered."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_world import arguments, random_store, write_corpus, write_store
from transformers import PreTrainedTokenizerFast

from vocagnolm import __main__
from vocagnolm.chat.formats import Conversation, read_row
from vocagnolm.corpus import load_corpus
from vocagnolm.readers import teacher_reader, template_of
from vocagnolm.spans import encode, encode_rendered
from vocagnolm.store.choice import kept_count
from vocagnolm.store.format import Store, StoredDocument
from vocagnolm.store.rank import SCORES, score_document

Tokenizers = dict[str, PreTrainedTokenizerFast]
TEXTS = [
    "naïve café 😀😀 12",
    "short 25",
    "数学 3 + 4 = 7",
    "x" * 60,
    "a\n\nb",
    "Anna has 12",
    "12",
]


# Scores


def document(spans: Sequence[Sequence[int]], losses: Sequence[float]) -> StoredDocument:
    return StoredDocument(spans[-1][1], np.array(spans), np.array(losses, np.float32))


def test_scores_are_those_counted_by_hand() -> None:
    # The student |ab|c|def|, the teacher |a|bc|def|: of "bc" half is in "ab" and half in "c".
    student = document([[0, 2], [2, 3], [3, 6]], [3.0, 1.0, 2.0])
    teacher = document([[0, 1], [1, 3], [3, 6]], [1.0, 4.0, 1.5])
    # L_T is 1 + 2, 2 and 1.5: the teacher is level, behind, and ahead on the last three of six.
    expected = {
        "excess": round((6.0 - 6.5) / 6, 6),
        "ahead": 0.5,
        "weight": round((1 + math.exp(-1) + 1) / 3, 6),
        "teacher": round(6.5 / 6, 6),
        "student": round(6.0 / 6, 6),
    }
    assert score_document(student, teacher) == expected


def slow_scores(student: StoredDocument, teacher: StoredDocument) -> dict[str, float]:
    """The same with a loop over characters."""
    # The student's tokens that hold each character.
    holders: list[list[int]] = [[] for _ in range(student.length)]
    for token, (start, end) in enumerate(student.spans.tolist()):
        for character in range(start, end):
            holders[character].append(token)
    # A teacher token's loss is spread over its characters, and there over the student's tokens.
    teacher_loss = [0.0] * len(student.losses)
    for (start, end), loss in zip(teacher.spans.tolist(), teacher.losses.tolist(), strict=True):
        for character in range(start, end):
            for token in holders[character]:
                teacher_loss[token] += loss / (end - start) / len(holders[character])
    student_loss = student.losses.tolist()
    ahead = 0.0
    for tokens in holders:
        for token in tokens:
            ahead += (teacher_loss[token] < student_loss[token]) / len(tokens)
    weights = []
    for token, loss in enumerate(student_loss):
        weights.append(min(1.0, math.exp(loss - teacher_loss[token])))
    total = sum(teacher.losses.tolist())
    return {
        "excess": (sum(student_loss) - total) / student.length,
        "ahead": ahead / student.length,
        "weight": sum(weights) / len(weights),
        "teacher": total / student.length,
        "student": sum(student_loss) / student.length,
    }


@pytest.mark.parametrize(
    "pair",
    [("metaspace", "byte_level"), ("nfc_digits", "metaspace"), ("byte_level", "trimmed")],
    ids="-".join,
)
def test_scores_equal_a_loop_over_characters(
    pair: tuple[str, str], tokenizers_by_family: Tokenizers, fuzz_texts: Callable[..., list[str]]
) -> None:
    rng = np.random.default_rng(0)
    compared = 0
    for text in [*TEXTS, *fuzz_texts(60, seed=4), *fuzz_texts(10, seed=5, pieces=80)]:
        documents = []
        for family in pair:
            spans = encode(tokenizers_by_family[family], text).spans
            losses = rng.uniform(0, 8, len(spans)).astype(np.float32)
            documents.append(StoredDocument(len(text), spans, losses))
        if len(documents[0].spans) and len(documents[1].spans):
            assert score_document(*documents) == pytest.approx(slow_scores(*documents), abs=2e-6)
            compared += 1
    assert compared > 50


# Conversations

# Each answer occurs once in a conversation. A template of the student trims them.
TURNS = (
    ("How many has Anna?", " naïve 😀 ", "And Bob?", "12 and 25"),
    ("数学?", "3 + 4 = 7"),
    ("Who?", "Anna", "Why?", "a\n\nb"),
)


def as_messages(turns: Sequence[str]) -> list[dict[str, Any]]:
    messages = []
    for place, content in enumerate(turns):
        messages.append({"role": ("user", "assistant")[place % 2], "content": content})
    return messages


def read(row: dict[str, Any]) -> Conversation:
    found = read_row(row)
    assert isinstance(found, Conversation)
    return found


def conversation_store(
    directory: Path, rows: Sequence[Conversation], tokenizer: Any, template: str, seed: int
) -> dict[str, StoredDocument]:
    """Write a store with random losses, and return what it has, by the rendered text."""
    rng = np.random.default_rng(seed)
    reader = teacher_reader(tokenizer, 1000, template)
    assert reader.template
    documents = {}
    for row in rows:
        rendered = reader.template.render(row)
        assert not isinstance(rendered, str)
        (encoding,) = encode_rendered(tokenizer, [rendered.text])
        losses = rng.uniform(0, 8, len(encoding.spans)).astype(np.float32)
        document = StoredDocument(len(rendered.text), encoding.spans, losses)
        documents[rendered.text] = document
    write_store(directory, documents.items(), template=reader.template.as_json())
    return documents


def answers_in(text: str, document: StoredDocument, answers: Sequence[str]) -> StoredDocument:
    """The tokens of the answers in a rendered text, with a search for each."""
    spans = []
    losses = []
    length = 0
    for answer in answers:
        start = text.index(answer) if answer in text else text.index(answer.strip())
        # A template that trims an answer leaves out its first characters.
        left_out = 0 if answer in text else len(answer) - len(answer.lstrip())
        end = start + len(answer if answer in text else answer.strip())
        pairs = zip(document.spans.tolist(), document.losses.tolist(), strict=True)
        for (first, last), loss in pairs:
            if max(first, start) < min(last, end):
                begin, stop = max(first, start) - start, min(last, end) - start
                spans.append([begin + left_out + length, stop + left_out + length])
                losses.append(loss)
        length += len(answer)
    return StoredDocument(length, np.array(spans), np.array(losses, np.float32))


def test_conversations_have_the_scores_of_their_answers(
    tokenizers_by_family: Tokenizers, tmp_path: Path
) -> None:
    rows: list[dict[str, Any]] = [{"messages": as_messages(turns)} for turns in TURNS]
    rows[2]["messages"][1]["weight"] = 0
    conversations = [read(row) for row in rows]
    trim = tmp_path / "trim.jinja"
    trim.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}")
    sides = []
    for seed, (role, family, template) in enumerate(
        [("student", "metaspace", str(trim)), ("teacher", "byte_level", "chatml")]
    ):
        tokenizer = tokenizers_by_family[family]
        texts = conversation_store(tmp_path / role, conversations, tokenizer, template, seed)
        sides.append(texts)
    argv = [*rank(tmp_path), "--keep=0.6", "--by=teacher"]
    (tmp_path / "pages.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert __main__.main(argv) == 0
    found = lines(tmp_path / "out/ranks.jsonl")
    expected = []
    trained = [TURNS[0][1::2], TURNS[1][1::2], TURNS[2][3:]]
    for index, answers in enumerate(trained):
        documents = []
        for texts in sides:
            text = list(texts)[index]
            documents.append(answers_in(text, texts[text], answers))
        scores = slow_scores(*documents)
        expected.append(scores | {"document": index, "characters": len("".join(answers))})
        expected[-1]["tokens"] = len(documents[0].losses)
    for row, other in zip(found, expected, strict=True):
        assert row == pytest.approx(other, abs=2e-6)
    # What is kept is trained on as before.
    best = sorted(range(3), key=lambda index: expected[index]["teacher"])[:2]
    kept = [read(row) for row in lines(tmp_path / "out/kept.jsonl")]
    assert kept == [conversations[index] for index in sorted(best)]


def test_kept_conversations_are_those_of_a_corpus_in_several_files(
    tokenizers_by_family: Tokenizers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = {"name": "add", "parameters": {"default": None}}
    later = {"tools": json.dumps([tool]), "chat_template_kwargs": {"thinks": True}, "weight": 0.5}
    rows: list[dict[str, Any]] = [{"messages": as_messages(turns)} for turns in TURNS[:2]]
    rows.append({"messages": as_messages(TURNS[2])} | later)
    rows.append({"prompt": "And 2 + 2?", "completion": "4"})
    conversations = [read(row) for row in rows]
    (tmp_path / "pages").mkdir()
    for name, part in (("first", rows[:2]), ("second", rows[2:3]), ("third", rows[3:])):
        path = tmp_path / f"pages/{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in part))
    for seed, role in enumerate(("student", "teacher")):
        tokenizer = tokenizers_by_family["metaspace"]
        conversation_store(tmp_path / role, conversations, tokenizer, "chatml", seed)
    assert __main__.main([*rank(tmp_path), f"--dataset={tmp_path / 'pages'}", "--keep=1"]) == 0
    # A file has the columns of its first rows.
    monkeypatch.setattr("vocagnolm.corpus.FIRST_ROWS", 1)
    found = []
    for row in load_corpus(str(tmp_path / "out/kept.jsonl")):
        assert row.pop("skipped") is None
        found.append(Conversation(**row))
    assert [turns.messages for turns in found] == [turns.messages for turns in conversations]
    assert [turns.options for turns in found] == [turns.options for turns in conversations]
    assert found[2].options["tools"] == [tool]
    assert [turns.weights[:1] for turns in found] == [[], [], [0.5], []]


# The order, and what is kept


@pytest.mark.parametrize(
    ("count", "share", "kept"),
    [(7, 0.5, 4), (8, 0.5, 4), (100, 0.07, 7), (100, 0.29, 29), (7, 1.0, 7), (7, 1e-9, 1)],
)
def test_count_that_is_kept_is_exact(count: int, share: float, kept: int) -> None:
    assert kept_count(count, share) == kept


# The command


@pytest.fixture
def stores(tmp_path: Path, tokenizers_by_family: Tokenizers) -> tuple[Store, Store]:
    """Random losses by two tokenizers, in two orders; the teacher's has another document."""
    student = random_store(tmp_path / "student", TEXTS, tokenizers_by_family["metaspace"])
    texts = ["another", *reversed(TEXTS)]
    teacher = random_store(tmp_path / "teacher", texts, tokenizers_by_family["byte_level"], seed=1)
    return student, teacher


def rank(tmp_path: Path, *options: str, texts: Sequence[Any] = TEXTS) -> list[str]:
    """The command line for a corpus of these texts; output goes to `out`."""
    corpus = write_corpus(tmp_path / "pages.jsonl", list(texts))
    losses = [f"--{role}_losses={tmp_path / role}" for role in ("student", "teacher")]
    return ["rank", *losses, f"--dataset={corpus}", f"--output_dir={tmp_path / 'out'}", *options]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_rank_writes_the_scores_of_each_document_in_the_corpus_order(
    stores: tuple[Store, Store], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A row that is not a document keeps its place, and a repeated one has its scores twice.
    assert __main__.main(rank(tmp_path, texts=[*TEXTS, "", None, TEXTS[0]])) == 0
    expected = []
    for index, text in [*enumerate(TEXTS), (9, TEXTS[0])]:
        student, teacher = (store.document(text) for store in stores)
        assert student
        assert teacher
        scores = score_document(student, teacher)
        expected.append({"document": index, **scores, "characters": len(text)})
        expected[-1]["tokens"] = len(student.losses)
    assert lines(tmp_path / "out/ranks.jsonl") == expected
    assert not (tmp_path / "out/kept.jsonl").exists()
    printed = capsys.readouterr().out
    assert "8 documents; skipped: 2" in printed
    mean = sum(row["excess"] for row in expected) / 8
    assert f"means: excess {mean:.3f}" in printed


@pytest.mark.parametrize("by", SCORES)
def test_rank_sorts_and_keeps_the_best(
    stores: tuple[Store, Store], tmp_path: Path, by: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert __main__.main(rank(tmp_path)) == 0
    in_order = lines(tmp_path / "out/ranks.jsonl")
    assert __main__.main(rank(tmp_path, "--by", by, "--sort", "--keep=0.4")) == 0
    # Few documents are not examples of both ends.
    assert capsys.readouterr().out.count(f" {TEXTS[1]}\n") == 1
    found = lines(tmp_path / "out/ranks.jsonl")
    assert found == sorted(
        in_order, key=lambda row: row[by], reverse=by not in ("teacher", "student")
    )
    assert found != in_order
    kept = sorted(row["document"] for row in found[:3])
    rows = lines(tmp_path / "out/kept.jsonl")
    assert rows == [{"document": index, "text": TEXTS[index]} for index in kept]
    # Training reads what is kept with the existing stores.
    corpus = load_corpus(str(tmp_path / "out/kept.jsonl"))
    assert all(text in stores[1] for text in corpus["text"])


def test_rank_keeps_the_first_of_equal_documents(
    stores: tuple[Store, Store], tmp_path: Path
) -> None:
    # A sort of few numbers is stable by chance.
    texts = [TEXTS[1]] * 45 + [TEXTS[0]] * 5
    assert __main__.main(rank(tmp_path, "--keep=0.5", "--by=ahead", texts=texts)) == 0
    scores = {row["document"]: row["ahead"] for row in lines(tmp_path / "out/ranks.jsonl")}
    first = sorted(scores, key=lambda document: -scores[document])[:25]
    assert [row["document"] for row in lines(tmp_path / "out/kept.jsonl")] == sorted(first)


def test_documents_without_losses_and_missing_ones_are_skipped(
    stores: tuple[Store, Store], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    student, _ = stores
    none = StoredDocument(len(TEXTS[2]), np.empty((0, 2), np.int64), np.empty(0, np.float32))
    documents = []
    for text in TEXTS:
        stored = student.document(text)
        assert stored
        documents.append((text, none if text == TEXTS[2] else stored))
    shutil.rmtree(tmp_path / "student")
    write_store(tmp_path / "student", documents)
    argv = rank(tmp_path, "--keep=1", "--missing_losses=skip", texts=[*TEXTS, "new"])
    assert __main__.main(argv) == 0
    expected = [0, 1, 3, 4, 5, 6]
    for name in ("ranks.jsonl", "kept.jsonl"):
        assert [row["document"] for row in lines(tmp_path / "out" / name)] == expected
    assert "6 documents; skipped: 2" in capsys.readouterr().out


def test_document_in_two_stores_of_a_model_has_the_losses_of_the_first(
    stores: tuple[Store, Store], tmp_path: Path, tokenizers_by_family: Tokenizers
) -> None:
    assert __main__.main(rank(tmp_path)) == 0
    alone = lines(tmp_path / "out/ranks.jsonl")
    random_store(tmp_path / "other", TEXTS, tokenizers_by_family["metaspace"], seed=9)
    both = ["--student_losses", str(tmp_path / "student"), str(tmp_path / "other")]
    assert __main__.main([*rank(tmp_path), *both]) == 0
    assert lines(tmp_path / "out/ranks.jsonl") == alone


def test_model_scores_the_corpus_where_there_is_no_store(
    teacher: Path, corpus: Path, scored: Path, tmp_path: Path, tokenizers_by_family: Tokenizers
) -> None:
    texts = load_corpus(str(corpus))["text"]
    random_store(tmp_path / "own", texts, tokenizers_by_family["metaspace"])
    common = ["rank", f"--student_losses={tmp_path / 'own'}", f"--dataset={corpus}"]
    by_model = [f"--teacher={teacher}", f"--output_dir={tmp_path / 'model'}"]
    assert __main__.main([*common, *by_model]) == 0
    # The same model as `vocagnolm score` runs it, with its own context.
    alone = arguments(teacher, corpus, tmp_path / "stored")
    alone = [word for word in alone if word not in ("--context", "48", "--min_context", "8")]
    assert __main__.main(alone) == 0
    by_store = [f"--teacher_losses={tmp_path / 'stored'}", f"--output_dir={tmp_path / 'store'}"]
    assert __main__.main([*common, *by_store]) == 0
    found, expected = (lines(tmp_path / name / "ranks.jsonl") for name in ("model", "store"))
    assert len(found) == len(texts)
    for row, other in zip(found, expected, strict=True):
        assert row == pytest.approx(other, abs=1e-3)
    assert Store(tmp_path / "model/teacher_losses").manifest["documents"] == len(set(texts))


def test_store_that_lacks_documents_is_rejected_before_a_model_scores(
    teacher: Path, stores: tuple[Store, Store], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stores
    argv = rank(tmp_path, texts=[*TEXTS, "new", "newer"])
    argv.remove(f"--teacher_losses={tmp_path / 'teacher'}")
    argv.append(f"--teacher={teacher}")
    assert __main__.main(argv) == 2
    assert "student: 2 of 9 documents are missing" in capsys.readouterr().err
    assert not (tmp_path / "out" / "teacher_losses").exists()


def test_models_without_a_template_read_conversations_in_given_ones(
    teacher: Path,
    teacher_tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # For the command, the same model by another name is another model.
    shutil.copytree(teacher, tmp_path / "student")
    corpus = tmp_path / "talks.jsonl"
    corpus.write_text(json.dumps({"messages": as_messages(TURNS[0])}) + "\n")
    argv = ["rank", f"--dataset={corpus}", f"--output_dir={tmp_path / 'out'}"]
    models = {"student": tmp_path / "student", "teacher": teacher}
    templates = {"student": "plain", "teacher": "chatml"}
    for role, model in models.items():
        argv.append(f"--{role}={model}")
    for role, template in templates.items():
        assert __main__.main(argv) == 2
        assert f"error: --{role}_chat_template " in capsys.readouterr().err
        # Neither model has begun to score.
        assert not (tmp_path / "out" / "student_losses").exists()
        argv.append(f"--{role}_chat_template={template}")
    assert __main__.main(argv) == 0
    for role, template in templates.items():
        stored = Store(tmp_path / "out" / f"{role}_losses").manifest["chat_template"]
        expected = template_of(teacher_tokenizer, "teacher", template)
        assert expected is not None
        assert stored == expected.source
    assert len(lines(tmp_path / "out/ranks.jsonl")) == 1
