"""The audit: what it measures on small corpora, and what it writes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pytest
from real_data import real_data
from transformers import PreTrainedTokenizerFast as Tokenizer

from benchmarks import chunks
from vocagnolm import __main__
from vocagnolm.alignment import align_spans
from vocagnolm.corpus import load_corpus
from vocagnolm.report import audit as audit_module
from vocagnolm.report.audit import audit, count_map, map_shares, verdict
from vocagnolm.spans import encode
from vocagnolm.tokenizer import load_tokenizer

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


def test_audit_adds_up_batches(
    student: Tokenizer,
    teachers: dict[str, Tokenizer],
    training_texts: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    content = audit(student, teachers, corpus_of(training_texts[:90]))
    summed = Counter[str]()
    for text in training_texts[:90]:
        ours = encode(student, text).spans
        theirs = encode(teachers["byte_level"], text).spans
        summed.update(count_map(ours, theirs, align_spans(ours, theirs)))
    other, same = [teacher["mapping"] for teacher in content["teachers"]]
    assert other == pytest.approx(map_shares(summed))
    assert (same["iou"], same["ios"], same["one_to_one"]) == (1.0, 1.0, 1.0)
    monkeypatch.setattr(audit_module, "_BATCH", 7)
    again = audit(student, teachers, corpus_of(training_texts[:90]))
    assert again == content


def test_unusable_documents_are_counted_and_skipped(
    student: Tokenizer, teachers: dict[str, Tokenizer], training_texts: list[str], tmp_path: Path
) -> None:
    texts = ["", None, "   ", training_texts[0]]
    found = audit(student, teachers, corpus_of(texts))
    assert (found["documents"], found["skipped"]) == (1, 3)
    with pytest.raises(ValueError, match="no usable document: 3 read"):
        audit(student, teachers, corpus_of(texts[:3]))
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n{"text": "\xff\xfe"}\n')
    found = audit(student, teachers, load_corpus(str(path)))
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
    found = audit(student, teachers, corpus_of(training_texts[:50]))
    for teacher in found["teachers"]:
        overlap = teacher["vocabulary_overlap"]
        shares = tuple(round(100 * overlap[kind], 2) for kind in ("raw", "bytes"))
        assert shares == REAL[teacher["teacher"]]
        assert teacher["mapping"]["ios"] == 1.0
        assert teacher["mapping"]["unmapped"] == 0


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
        *("--dataset", str(path), "--text_column", "body", "--documents", "50"),
    ]


def test_command_writes_table_and_json(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a" / "out"
    # A second audit replaces the first one's files.
    for _ in range(2):
        assert __main__.main([*command, "--output_dir", str(out)]) == 0
        shown = capsys.readouterr().out
        assert shown == (out / "audit.md").read_text(encoding="utf-8")
    found = json.loads((out / "audit.json").read_text(encoding="utf-8"))
    assert (found["documents"], len(found["teachers"])) == (50, 2)
    for teacher in found["teachers"]:
        assert 0 < teacher["mapping"]["iou"] <= teacher["mapping"]["ios"] == 1
    # The documents of an audit are cut into chunks.
    chunked = tmp_path / "chunks.json"
    argv = ["--audit", str(out / "audit.json"), "--output", str(chunked)]
    chunks.main([*argv, "--sequence_length", "64", "--sequences", "5"])
    for teacher in json.loads(chunked.read_text(encoding="utf-8"))["teachers"]:
        coarse, *_, fine = teacher["chunks"]
        assert 1 > coarse["ios"] > fine["ios"] > 0
        assert coarse["ios_standard_error"] > 0


@pytest.mark.parametrize(
    "wrong",
    [
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
