"""Stores that grow with their corpus."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kills import Killed, kill_at
from store_world import (
    ABOUT,
    CONTEXT,
    FakeScorer,
    arguments,
    contents,
    make_job,
    write_corpus,
)
from transformers import PreTrainedTokenizerBase

from vocagnolm import __main__
from vocagnolm.corpus import read_list
from vocagnolm.readers import teacher_reader
from vocagnolm.store import format as store_format
from vocagnolm.store import scoring
from vocagnolm.store.format import SHARDS, Store, find_faults, read_shard, shard_paths
from vocagnolm.store.scoring import ScoringJob
from vocagnolm.store.windows import HFScorer


def score(job: ScoringJob, scorer: FakeScorer) -> None:
    """Score what the store lacks, as the command does."""
    while plan := scoring.begin(job, ABOUT):
        scoring.score_corpus(job.part(plan), scorer, ABOUT)


def tokens_read(scorer: FakeScorer) -> int:
    return sum(window.scored for window in scorer.windows)


def all_texts(job: ScoringJob) -> list[str]:
    """The usable documents of a corpus."""
    return [text for shard in job.shards for text in job.documents(shard)]


def as_bytes(store: Store, text: str) -> tuple[bytes, bytes]:
    document = store.document(text)
    assert document is not None
    return document.spans.tobytes(), document.losses.tobytes()


# A corpus that changes


@pytest.mark.parametrize("order", ["appended", "shuffled"])
def test_teacher_reads_only_what_is_new(
    training_texts: list[str],
    teacher_tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    order: str,
) -> None:
    texts, later = training_texts[:60], training_texts[:80]
    if order == "shuffled":
        random.Random(0).shuffle(later)
    first, second, all_at_once, rest = (FakeScorer() for _ in range(4))
    grown, whole, alone = (tmp_path / name for name in ("grown", "whole", "alone"))
    score(make_job(grown, texts, teacher_tokenizer), first)
    before = contents(grown)
    score(make_job(grown, later, teacher_tokenizer), second)
    score(make_job(whole, later, teacher_tokenizer), all_at_once)
    score(make_job(alone, training_texts[60:80], teacher_tokenizer), rest)
    assert tokens_read(second) == tokens_read(rest) > 0
    assert tokens_read(first) + tokens_read(second) == tokens_read(all_at_once)
    after = contents(grown)
    assert {name: after[name] for name in before if name.endswith(".arrow")} == {
        name: data for name, data in before.items() if name.endswith(".arrow")
    }
    for text in later:
        assert as_bytes(Store(grown), text) == as_bytes(Store(whole), text)
    # Documents that leave the corpus cost nothing, whatever the order and the size of shards.
    job = replace(make_job(grown, later[5:50], teacher_tokenizer), shard_documents=7)
    assert scoring.begin(job, ABOUT) is None
    assert contents(grown) == after


def test_growth_does_not_look_at_older_shards_and_keeps_their_checksums(
    teacher_tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = list("abcdefgh")
    score(make_job(tmp_path, texts[:5], teacher_tokenizer), FakeScorer())
    shard = shard_paths(tmp_path)[1]
    data = bytearray(shard.read_bytes())
    data[-40] ^= 4
    shard.write_bytes(data)
    hashed: list[str] = []
    original = store_format.file_sha256
    monkeypatch.setattr(
        store_format, "file_sha256", lambda path: hashed.append(path.name) or original(path)
    )
    score(make_job(tmp_path, texts, teacher_tokenizer), FakeScorer())
    assert sorted(hashed) == ["shard-00003.arrow", "shard-00004.arrow"]
    faults = find_faults(tmp_path, Store(tmp_path).manifest[SHARDS], by_hash=True)
    assert list(faults) == [shard.name]
    # It is deleted, and its documents are scored once more.
    shard.unlink()
    scorer = FakeScorer()
    score(make_job(tmp_path, texts[::-1], teacher_tokenizer), scorer)
    assert len(scorer.windows) == 2
    assert all(text in Store(tmp_path) for text in texts)
    assert not find_faults(tmp_path, Store(tmp_path).manifest[SHARDS], by_hash=True)


@pytest.mark.parametrize("later", ["efabcd", "efab"])
def test_unfinished_store_keeps_what_it_has_when_the_corpus_changes(
    teacher_tokenizer: PreTrainedTokenizerBase, tmp_path: Path, later: str
) -> None:
    """Its only shard has e and f, which the new corpus would put elsewhere."""
    job = make_job(tmp_path, list("abcdef"), teacher_tokenizer)
    assert scoring.begin(job, ABOUT)
    scoring.score_shard(job, 2, FakeScorer())
    scorer = FakeScorer()
    score(make_job(tmp_path, list(later), teacher_tokenizer), scorer)
    assert len(scorer.windows) == len(later) - 2
    assert all(text in Store(tmp_path) for text in later)


TEXTS = [*"abcdefghij", "c 😀", "数学", "", "Anna has 12 apples, and buys 30 more. " * 9]
KILLS = st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=3)
# Any documents in any order, the kills of the command that scores them, and whether it ever ends.
STEPS = st.tuples(st.lists(st.sampled_from(TEXTS), min_size=1, unique=True), KILLS, st.booleans())
CORPORA = st.lists(STEPS, min_size=1, max_size=4)


def make_any_job(directory: Path, texts: Sequence[str], turns: bool, tokenizer: Any) -> ScoringJob:
    job = make_job(directory, list(texts), tokenizer)
    if not turns:
        return job
    rows = [{"prompt": text, "completion": f"{text} 5"} for text in texts]
    reader = teacher_reader(tokenizer, CONTEXT, "chatml")
    return replace(job, corpus=read_list(rows, None, "rows"), reader=reader)


@given(corpora=CORPORA, turns=st.booleans(), lost=st.integers(0, 20))
def test_store_has_each_document_once_after_any_changes_and_kills(
    corpora: list[tuple[list[str], list[tuple[int, bool]], bool]],
    turns: bool,
    lost: int,
    teacher_tokenizer: PreTrainedTokenizerBase,
) -> None:
    with tempfile.TemporaryDirectory() as root, tempfile.TemporaryDirectory() as other:
        directory = Path(root)
        everything = make_any_job(Path(other), TEXTS, turns, teacher_tokenizer)
        score(everything, FakeScorer())
        expected = Store(other)
        scored: set[str] = set()
        written: dict[Path, bytes] = {}
        for texts, kills, ends in corpora:
            job = make_any_job(directory, texts, turns, teacher_tokenizer)
            for at, before in kills:
                with pytest.MonkeyPatch.context() as patch, suppress(Killed):
                    kill_at(patch, at, before=before)
                    score(job, FakeScorer())
                # What a killed job has written stays, too.
                check_unchanged(directory, written)
            if ends:
                score(job, FakeScorer())
                scored |= set(all_texts(job))
                check_store(directory, scored, expected)
            check_unchanged(directory, written)
        score(job, FakeScorer())
        check_store(directory, set(all_texts(job)), expected)
        shards = shard_paths(directory)
        shards[lost % len(shards)].unlink()
        score(job, FakeScorer())
        check_store(directory, set(all_texts(job)), expected)


def check_unchanged(directory: Path, written: dict[Path, bytes]) -> None:
    """Compare shards with what was written before, to which further ones are added."""
    for path in shard_paths(directory):
        data = path.read_bytes()
        assert written.setdefault(path, data) == data
    assert set(written) == set(shard_paths(directory))


def check_store(directory: Path, texts: set[str], expected: Store) -> None:
    store = Store(directory)
    for text in texts:
        assert as_bytes(store, text) == as_bytes(expected, text)
    rows: Counter[bytes] = Counter()
    for path in shard_paths(directory):
        rows.update(read_shard(path)["document"].to_pylist())
    assert set(rows.values()) <= {1}
    assert [entry["file"] for entry in store.manifest[SHARDS]] == [
        path.name for path in shard_paths(directory)
    ]
    assert not find_faults(directory, store.manifest[SHARDS], by_hash=True)
    assert not list(directory.glob(".shard-*"))


@pytest.mark.parametrize("at", [("losses", 1), ("losses", 9), ("describe", 1), ("describe", 9)])
def test_jobs_of_two_corpora_in_one_directory_lose_nothing(
    teacher: Path,
    corpus: Path,
    texts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    at: tuple[str, int],
) -> None:
    """The second job runs while the first scores its n-th shard, or has listed what is there."""
    theirs = [*texts[::-2], "in their corpus alone"]
    argv = arguments(teacher, write_corpus(tmp_path / "theirs.jsonl", theirs), tmp_path / "S")
    calls: Counter[str] = Counter()

    def interrupted(name: str, original: Any) -> Any:
        def call(*args: Any) -> Any:
            calls[name] += 1
            if (name, calls[name]) == at:
                assert __main__.main(argv) == 0
            return original(*args)

        return call

    monkeypatch.setattr(HFScorer, "losses", interrupted("losses", HFScorer.losses))
    describe = interrupted("describe", store_format._describe)
    monkeypatch.setattr(store_format, "_describe", describe)
    assert __main__.main(arguments(teacher, corpus, tmp_path / "S")) == 0
    store = Store(tmp_path / "S")
    assert all(text in store for text in texts + theirs)
    assert not find_faults(store.directory, store.manifest[SHARDS], by_hash=True)
