"""What `vocagnolm score` and `vocagnolm rank` reject: one line that names the option or file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from store_world import arguments, random_store, write_corpus
from transformers import PreTrainedTokenizerFast

from vocagnolm import __main__
from vocagnolm.store import score
from vocagnolm.store.format import MANIFEST_FILE, shard_name

TEXTS = ["naïve café 😀😀 12", "short 25", "数学 3 + 4 = 7", "x" * 60, "Anna has 12"]

# Options alone

SCORE = "--teacher T --dataset D --output_dir S"
SERVER = f"{SCORE} --server http://h --served_model M"
OPTIONS = {
    f"{SCORE} --served_model M": "served_model",
    f"{SCORE} --api sglang": "api",
    f"{SCORE} --concurrency 2": "concurrency",
    f"{SCORE} --server http://h": "server",
    f"{SCORE} --context 1": "context",
    f"{SCORE} --batch_tokens 0": "batch_tokens",
    f"{SERVER} --dtype float32": "dtype",
    f"{SERVER} --batch_tokens 8": "batch_tokens",
    "--verify S --output_dir S": "output_dir",
    "--verify S --server http://h": "server",
    "--verify S --dataset D": "dataset",
    "--dataset D --output_dir S": "teacher",
    # These go together.
    f"{SCORE} --dtype float32 --batch_tokens 8": None,
    f"{SERVER} --api vllm --concurrency 2": None,
    "--verify S --shard_documents 1000": None,
}


@pytest.mark.parametrize("options", OPTIONS)
def test_options_of_score_that_do_not_go_together(
    options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for directory in ("D", "T"):
        Path(directory).mkdir()
    if OPTIONS[options] is None:
        score.check(options.split())
        return
    with pytest.raises(ValueError, match=rf"{OPTIONS[options]}\b"):
        score.check(options.split())


# With files


@dataclass(frozen=True)
class Files:
    """A teacher, the corpus and store of `scored`, and two stores of `TEXTS`, all to be spoilt."""

    root: Path
    teacher: Path
    corpus: Path

    def score(self, *more: str, corpus: Path | None = None, to: str = "S") -> list[str]:
        return arguments(self.teacher, corpus or self.corpus, self.root / to, *more)

    def rank(self, *more: str, texts: list[str] = TEXTS) -> list[str]:
        corpus = write_corpus(self.root / "texts.jsonl", texts)
        losses = [f"--{role}_losses={self.root / role}" for role in ("student", "teacher")]
        return ["rank", *losses, f"--dataset={corpus}", f"--output_dir={self.root / 'out'}", *more]


@pytest.fixture
def files(
    scored: Path,
    teacher: Path,
    corpus: Path,
    tmp_path: Path,
    tokenizers_by_family: dict[str, PreTrainedTokenizerFast],
) -> Files:
    shutil.copytree(scored, tmp_path / "S")
    for seed, (role, family) in enumerate([("student", "metaspace"), ("teacher", "byte_level")]):
        random_store(tmp_path / role, TEXTS, tokenizers_by_family[family], seed=seed)
    return Files(tmp_path, teacher, corpus)


def other_kind(files: Files) -> list[str]:
    path = files.root / "conversations.jsonl"
    path.write_text(json.dumps({"prompt": "How many?", "completion": "5"}) + "\n")
    return files.score("--teacher_chat_template", "chatml", corpus=path)


def documents_after_conversations(files: Files) -> list[str]:
    argv = other_kind(files)
    argv[argv.index("--output_dir") + 1] = str(files.root / "C")
    assert __main__.main(argv) == 0
    return files.score(to="C")


def truncated(files: Files) -> list[str]:
    shard = files.root / "S" / shard_name(3)
    shard.write_bytes(shard.read_bytes()[:-100])
    return files.score()


def unreadable(files: Files) -> list[str]:
    shard = files.root / "S" / shard_name(3)
    data = shard.read_bytes()
    # The size stays.
    shard.write_bytes(bytes([255]) * 400 + data[400:])
    return files.score()


def no_document(files: Files) -> list[str]:
    empty = write_corpus(files.root / "empty.jsonl", ["", " ", None])
    return files.score(corpus=empty, to="new")


def no_manifest(files: Files) -> list[str]:
    (files.root / "S" / MANIFEST_FILE).unlink()
    return files.score()


def same_stores(files: Files) -> list[str]:
    return files.rank(f"--student_losses={files.root / 'teacher'}")


def two_teachers(files: Files) -> list[str]:
    return files.rank("--teacher_losses", str(files.root / "teacher"), str(files.root / "S"))


def other_files(files: Files) -> list[str]:
    (files.root / "out").mkdir()
    (files.root / "out/notes.txt").write_text("mine")
    return files.rank()


def kept_documents(files: Files) -> list[str]:
    (files.root / "out").mkdir()
    for name in ("ranks.jsonl", "kept.jsonl"):
        write_corpus(files.root / "out" / name, TEXTS)
    return files.rank(f"--dataset={files.root / 'out/kept.jsonl'}")


def conversations(files: Files) -> list[str]:
    argv = files.rank()
    row = {"prompt": "How many?", "completion": "5"}
    (files.root / "texts.jsonl").write_text(json.dumps(row) + "\n")
    return argv


CASES: list[tuple[Callable[[Files], list[str]], str]] = [
    (lambda files: files.score("--min_context", "9"), "min_context was 8, now 9"),
    (lambda files: files.score("--min_context", "47"), "--min_context"),
    (lambda files: files.score("--context", "40"), "context was 48, now 40"),
    (lambda files: files.score("--loss_dtype", "float32"), "loss_dtype was float16"),
    # A directory with a model and a store would be one for a command and the other in Python.
    (lambda files: files.score(to=str(files.teacher)), "holds config.json"),
    (other_kind, "chat_template was None, now "),
    (documents_after_conversations, "chat_template was "),
    (truncated, "shard-00003.arrow damaged"),
    (unreadable, "shard-00003.arrow is damaged"),
    (no_document, "--dataset"),
    (no_manifest, "shard-0"),
    (lambda files: files.rank("--keep=0"), "--keep"),
    (lambda files: files.rank("--keep=nan"), "--keep"),
    (lambda files: files.rank("--by=ahead"), "--by"),
    (lambda files: files.rank("--by=loss", "--sort"), "'excess'"),
    (lambda files: files.rank("--dry_run"), "--dry_run"),
    (lambda files: files.rank("--label_column=missing"), "--label_column missing"),
    (lambda files: files.rank("--group_column=missing", "--keep=0.5"), "--group_column missing"),
    (lambda files: files.rank("--label_column=text"), "--good"),
    (lambda files: files.rank("--label_column=text", "--good=neither"), "--label_column"),
    (lambda files: files.rank("--dtype=float32"), "--dtype"),
    (lambda files: files.rank("--teacher=student"), "--teacher"),
    (lambda files: files.rank("--text_column=body"), "--text_column"),
    (kept_documents, "has the corpus"),
    (lambda files: files.rank(texts=[*TEXTS, "new", "another"]), "2 of 7"),
    (lambda files: files.rank("--missing_losses=skip", texts=["new"]), "--dataset"),
    (same_stores, "--student_losses"),
    (two_teachers, "--teacher_losses"),
    (other_files, "notes.txt"),
    (conversations, "losses of documents"),
]


@pytest.mark.parametrize(("spoil", "words"), CASES)
def test_refusal_is_one_line_and_changes_nothing(
    spoil: Callable[[Files], list[str]],
    words: str,
    files: Files,
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = spoil(files)
    before = files_of(files.root)
    capsys.readouterr()
    assert __main__.main(argv) == 2
    printed, complained = capsys.readouterr()
    assert printed == ""
    assert words in complained
    assert complained.count("\n") == 1
    assert files_of(files.root) == before


def files_of(root: Path) -> dict[str, Any]:
    """The files below a directory, without locks."""
    paths = [path for path in root.rglob("*") if path.is_file() and path.suffix != ".lock"]
    return {str(path): path.read_bytes() for path in paths}
