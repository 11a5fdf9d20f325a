"""The audit: what it measures on small corpora, and what it writes."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from real_data import real_data
from transformers import PreTrainedTokenizerFast as Tokenizer

from vocagnolm import __main__
from vocagnolm.alignment import align_spans
from vocagnolm.corpus import load_corpus
from vocagnolm.report import audit as audit_module
from vocagnolm.report.audit import audit, verdict
from vocagnolm.report.mapping import chunk_overlaps, count_map
from vocagnolm.spans import encode
from vocagnolm.tokenizer import load_tokenizer

SMALL: dict[str, Any] = {"sequence_length": 64, "sequences": 5, "chunks": (2, 8, 64)}
# The paper's overlap, in percent of the teacher's vocabulary; then over bytes (docs/audit.md).
REAL = {
    "mistral-7b-v0.1": (75.58, 75.57),
    "llemma-7b": (99.95, 99.95),
    "deepseek-math-7b": (9.61, 24.24),
    "qwen2.5": (6.32, 17.37),
}


def corpus_of(texts: list[Any]) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"text": texts})


@pytest.fixture(scope="module")
def student(tokenizers_by_family: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers_by_family["metaspace"]


@pytest.fixture(scope="module")
def teachers(tokenizers_by_family: dict[str, Tokenizer]) -> dict[str, Tokenizer]:
    return {name: tokenizers_by_family[name] for name in ("byte_level", "metaspace")}


@pytest.fixture
def content(
    student: Tokenizer, teachers: dict[str, Tokenizer], training_texts: list[str]
) -> dict[str, Any]:
    return audit(student, teachers, corpus_of(training_texts[:90]), **SMALL)


def test_audit_adds_up_batches(
    student: Tokenizer,
    teachers: dict[str, Tokenizer],
    training_texts: list[str],
    content: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    summed = Counter[str]()
    for text in training_texts[:90]:
        ours = encode(student, text).spans
        theirs = encode(teachers["byte_level"], text).spans
        summed.update(count_map(ours, theirs, align_spans(ours, theirs)))
    iou = pytest.approx(summed["iou_sum"] / summed["student_tokens"])
    assert content["teachers"][0]["token_level"] == {"iou": iou, "ios": 1.0}
    assert content["teachers"][0]["counts"] == pytest.approx(dict(summed))
    monkeypatch.setattr(audit_module, "_BATCH", 7)
    again = audit(student, teachers, corpus_of(training_texts[:90]), **SMALL)
    assert again == content
    same = content["teachers"][1]
    assert same["token_level"] == {"iou": 1.0, "ios": 1.0}
    assert [(point["iou"], point["ios"]) for point in same["chunks"]] == [(1.0, 1.0)] * 3
    assert same["mapping"]["one_to_one"] == 1.0


def sequences(student: Tokenizer, texts: list[str]) -> list[tuple[str, Any]]:
    """The first five texts of 64 tokens, from shuffled documents."""
    order = list(range(len(texts)))
    random.Random(0).shuffle(order)
    return list(audit_module._sequences(corpus_of(texts).select(order), student, 64))[:5]


def test_chunks_are_means_over_sequences_of_whole_documents(
    student: Tokenizer,
    teachers: dict[str, Tokenizer],
    training_texts: list[str],
    content: dict[str, Any],
) -> None:
    pairs = []
    begun = set()
    for text, spans in sequences(student, training_texts[:90]):
        assert len(spans) == 64
        assert spans[-1, 1] == len(text)
        assert np.array_equal(encode(student, text).spans[:60], spans[:60])
        begun.add(next(n for n, whole in enumerate(training_texts) if whole[:20] == text[:20]))
        pairs.append((spans, encode(teachers["byte_level"], text).spans))
    assert len(pairs) == 5
    assert begun != set(range(5))  # in random order
    for point in content["teachers"][0]["chunks"]:
        means = [chunk_overlaps(*pair, point["chunks"])[0].mean() for pair in pairs]
        assert point["iou"] == pytest.approx(np.mean(means))
        assert point["iou_standard_error"] == pytest.approx(np.std(means, ddof=1) / np.sqrt(5))
    coarse, *_, fine = content["teachers"][0]["chunks"]
    assert 1 > coarse["ios"] > fine["ios"] > 0


def test_unusable_documents_are_counted_and_skipped(
    student: Tokenizer, teachers: dict[str, Tokenizer], training_texts: list[str], tmp_path: Path
) -> None:
    texts = ["", None, "   ", training_texts[0]]
    found = audit(student, teachers, corpus_of(texts), **SMALL)
    assert (found["documents"], found["skipped"]) == (1, 3)
    with pytest.raises(ValueError, match="no usable document: 3 read"):
        audit(student, teachers, corpus_of(texts[:3]), **SMALL)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n{"text": "\xff\xfe"}\n')
    found = audit(student, teachers, load_corpus(str(path)), **SMALL)
    assert (found["documents"], found["skipped"]) == (1, 1)


def test_verdict_warns_of_unmapped_and_straddling_tokens() -> None:
    fit = {"mapped": 1.0, "unmapped": 0.0, "one_to_one": 0.9, "straddling": 0.05}
    assert verdict(fit).startswith("a good pair")
    assert "--aggregation" not in verdict(fit)
    assert "--aggregation share" in verdict(fit | {"straddling": 0.15})
    assert verdict(fit | {"mapped": 0.97, "unmapped": 0.03}).startswith("a poor pair")


@pytest.mark.slow
def test_vocabulary_overlap_is_the_papers(training_texts: list[str]) -> None:
    root = real_data("tokenizers")
    student = load_tokenizer(str(root / "tinyllama"), "student")
    teachers = {name: load_tokenizer(str(root / name), "teacher") for name in REAL}
    found = audit(student, teachers, corpus_of(training_texts[:50]), **SMALL)
    for teacher in found["teachers"]:
        overlap = teacher["vocabulary_overlap"]
        shares = tuple(round(100 * overlap[kind]["teacher"], 2) for kind in ("raw", "bytes"))
        assert shares == REAL[teacher["teacher"]]
        assert teacher["token_level"]["ios"] == 1.0
        assert teacher["counts"]["unmapped"] == 0


# The command


@pytest.fixture
def command(
    tmp_path: Path, tokenizer_dirs: dict[str, Path], training_texts: list[str]
) -> list[str]:
    path = tmp_path / "pages.jsonl"
    lines = (json.dumps({"body": text}) + "\n" for text in training_texts[:60])
    path.write_text("".join(lines), encoding="utf-8")
    return [
        *("audit", "--student", str(tokenizer_dirs["metaspace"])),
        *("--teacher", str(tokenizer_dirs["nfc_digits"]), str(tokenizer_dirs["byte_level"])),
        *("--dataset", str(path), "--text_column", "body", "--sequence_length", "64"),
        *("--documents", "50"),
    ]


def test_command_writes_table_json_and_figure(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a" / "out"
    # A second audit replaces the first one's files.
    for chunks in ([], ["--chunks", "2", "16"]):
        assert __main__.main([*command, *chunks, "--output_dir", str(out)]) == 0
        shown = capsys.readouterr().out
        assert shown == (out / "audit.md").read_text(encoding="utf-8")
        found = json.loads((out / "audit.json").read_text(encoding="utf-8"))
        # Without a choice, every chunk has a token.
        assert found["settings"]["chunks"] == ([2, 16] if chunks else [2, 4, 8, 16, 32, 64])
    assert found["documents"] == 50
    assert found["sequences"] > 1
    for teacher in found["teachers"]:
        assert {"teacher", "vocabulary_overlap", "mapping", "token_level", "chunks"} <= set(teacher)
        assert [point["chunks"] for point in teacher["chunks"]] == [2, 16]
        assert 0 < teacher["token_level"]["iou"] <= teacher["token_level"]["ios"] == 1


@pytest.mark.parametrize(
    "wrong",
    [
        "--chunks 0",
        "--chunks 64 65",
        "--documents 0",
        "--dataset talks.jsonl",
        "--output_dir .",
    ],
)
def test_wrong_argument_is_refused(
    wrong: str,
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A corpus of conversations is none, and another program's audit.md stays."""
    monkeypatch.chdir(tmp_path)
    Path("talks.jsonl").write_text('{"prompt": "1 + 1?", "completion": "2"}\n')
    Path("audit.md").write_text("mine")
    if "talks" in wrong:
        command = command[: command.index("--dataset")]
    assert __main__.main([*command, *wrong.split()]) == 2
    assert f"error: {wrong.split()[0]} " in capsys.readouterr().err
    assert Path("audit.md").read_text() == "mine"
