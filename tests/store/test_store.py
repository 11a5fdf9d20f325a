"""The store's format: what it gives back, what a kill leaves of it, and what it refuses."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

import vocagnolm.io
from vocagnolm.host.manifest import MANIFEST_FILE, find_faults, manifest_sha256
from vocagnolm.spans import encode_batch
from vocagnolm.store import job, store
from vocagnolm.store.codec import decode_spans, encode_spans, open_shard
from vocagnolm.store.store import Store, StoredSegment, document_key
from vocagnolm.texts.tokenizers import load_tokenizer

TEXTS = ["first 😀", "b", "数学 2025", "first 😀", "another document", "x" * 300, "last"]
TRAILING_ZERO = next(str(i) for i in itertools.count() if not document_key(str(i))[-1])


# Spans


@st.composite
def gapless_spans(draw: Any) -> tuple[int, list[list[int]]]:
    """A first character, and spans whose starts and ends never go back and leave no gap."""
    start = draw(st.integers(0, 10_000))
    spans: list[list[int]] = []
    at, floor = start, start
    for _ in range(draw(st.integers(0, 40))):
        begin = at - draw(st.integers(0, min(at - floor, draw(st.sampled_from([0, 1, 300])))))
        at += draw(st.one_of(st.integers(0, 5), st.integers(120, 135), st.just(70_000)))
        spans.append([begin, at])
        floor = begin
    return start, spans


@given(gapless_spans())
@example((0, []))
@example((5, [[5, 5]]))
@example((0, [[0, 127], [126, 253], [253, 381]]))  # around the longest that a byte holds
def test_spans_come_back_when_they_leave_no_gap(case: tuple[int, list[list[int]]]) -> None:
    start, spans = case
    array = np.array(spans, np.int64).reshape(-1, 2)
    codes, exceptions = encode_spans(array, start)
    assert codes.dtype == np.uint8
    assert exceptions.dtype == np.int32
    assert len(codes) == len(spans)
    decoded = decode_spans(codes, exceptions, start, spans[-1][1] if spans else start)
    assert decoded.dtype == np.int64
    assert decoded.tolist() == spans
    shape = [  # (length, overlap) of each token
        (end - before, before - begin)
        for (begin, end), before in zip(spans, [start, *array[:, 1].tolist()], strict=False)
    ]
    large = [
        i for i, (length, overlap) in enumerate(shape) if 2 * length + overlap > 254 or overlap > 1
    ]
    assert exceptions[::3].tolist() == np.flatnonzero(codes == 255).tolist() == large


@pytest.mark.parametrize("spans", [[[0, 2], [3, 4]], [[1, 2]], [[0, 3], [0, 2]]])
def test_spans_with_a_gap_are_refused(spans: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="gap"):
        encode_spans(np.array(spans), 0)


@pytest.mark.parametrize(("codes", "end"), [([4, 6], 6), ([4, 6], 4), ([5, 6], 5)])
def test_spans_that_do_not_cover_the_text_are_refused(codes: list[int], end: int) -> None:
    none = np.empty(0, np.int32)
    assert decode_spans(np.array([4, 6], np.uint8), none, 0, 5).tolist() == [[0, 2], [2, 5]]
    with pytest.raises(ValueError, match="spans from"):
        decode_spans(np.array(codes, np.uint8), none, 0, end)


def test_spans_come_back_when_tokenizers_made_them(
    tokenizers_by_family: dict[str, PreTrainedTokenizerFast],
    fuzz_texts: Callable[..., list[str]],
) -> None:
    tokens = 0
    for tokenizer in tokenizers_by_family.values():
        for encoding in encode_batch(tokenizer, fuzz_texts(300, seed=7)):
            codes, exceptions = encode_spans(encoding.spans, 0)
            end = encoding.spans[-1, 1] if len(encoding.spans) else 0
            assert np.array_equal(decode_spans(codes, exceptions, 0, end), encoding.spans)
            tokens += len(codes)
    assert tokens > 10_000


def test_token_takes_about_three_bytes(shared_dir: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(shared_dir / "tokenizers" / "qwen2.5"), "teacher")
    lines = (shared_dir / "data" / "corpora" / "planetmath.jsonl").read_text().splitlines()
    texts = [json.loads(line)["text"] for line in lines[:200]]
    encodings = encode_batch(tokenizer, texts)
    segments = [
        (
            document_key(text),
            StoredSegment(0, len(text), encoding.spans, np.ones(len(encoding.ids), np.float32)),
        )
        for text, encoding in zip(texts, encodings, strict=True)
    ]
    store.write_shard(tmp_path, 0, segments, "float16", "source")
    tokens = sum(len(encoding.ids) for encoding in encodings)
    size = (tmp_path / store.shard_name(0)).stat().st_size
    assert 3.0 < size / tokens < 3.1


# Stores


def segments_of(text: str, cuts: Sequence[int], seed: int) -> list[tuple[bytes, StoredSegment]]:
    """A document in segments, a token per character, with made-up losses that float16 holds."""
    rng = np.random.default_rng([seed, len(text)])
    found = []
    for start, end in itertools.pairwise([0, *cuts, len(text)]):
        spans = np.stack([np.arange(start, end), np.arange(start, end) + 1], axis=-1)
        losses = rng.random(end - start).astype(np.float16).astype(np.float32)
        found.append((document_key(text), StoredSegment(start, end, spans, losses)))
    return found


def test_lists_that_go_back_between_rows_are_refused(tmp_path: Path) -> None:
    store.write_shard(tmp_path, 0, segments_of("abcd", [2], seed=0), "float32", "source")
    path = tmp_path / store.shard_name(0)
    before, after = (np.array(ends, np.int32).tobytes() for ends in ([0, 2, 4], [0, 9, 4]))
    assert len(open_shard(path)) == 1
    path.write_bytes(path.read_bytes().replace(before, after))
    with pytest.raises(ValueError, match=r"shard-00000.arrow, which is no shard"):
        open_shard(path)


def about(seed: int) -> dict[str, Any]:
    """The least that the manifest of a store says."""
    return {"teacher": f"teacher {seed}", "tokenizer_sha256": "", "context": 99}


def make_store(
    directory: Path, texts: Sequence[str] = TEXTS, *, seed: int = 0, **description: Any
) -> Path:
    """A store of shards of three documents; those of more than five characters are cut."""
    directory.mkdir(parents=True, exist_ok=True)
    shards = [texts[first : first + 3] for first in range(0, len(texts), 3)]
    for number, shard in enumerate(shards):
        segments = [
            segment for text in shard for segment in segments_of(text, [5] * (len(text) > 5), seed)
        ]
        store.write_shard(directory, number, segments, "float16", f"source {number}")
    store.finish_store(directory, range(len(shards)), about(seed) | description)
    return directory


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def as_lists(segments: Sequence[StoredSegment] | None) -> list[Any]:
    assert segments is not None
    return [(s.start, s.end, s.spans.tolist(), s.losses.tolist()) for s in segments]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished store; read-only by agreement."""
    return make_store(tmp_path_factory.mktemp("store") / "S")


def test_store_gives_back_what_was_written(finished: Path) -> None:
    assert list(contents(finished)) == [
        "manifest.json", *(store.shard_name(number) for number in range(3))
    ]  # fmt: skip
    opened = Store(finished)
    opened.check()
    for text in TEXTS:
        expected = [segment for _, segment in segments_of(text, [5] * (len(text) > 5), 0)]
        assert as_lists(opened.segments(text)) == as_lists(expected)
    assert opened.segments("absent") is None
    assert opened.segments("") is None
    manifest = opened.manifest
    assert (manifest["documents"], manifest["segments"]) == (7, 12)
    assert manifest["tokens"] == sum(map(len, TEXTS))
    assert manifest["teacher"] == "teacher 0"


def test_key_that_ends_in_zero_is_found(tmp_path: Path) -> None:
    """NumPy takes zeros at the end of a string for none."""
    opened = Store(make_store(tmp_path / "S", [TRAILING_ZERO, "another"]))
    assert as_lists(opened.segments(TRAILING_ZERO))
    assert opened.document_keys() == {*map(document_key, [TRAILING_ZERO, "another"])}


def test_document_without_all_segments_is_absent(tmp_path: Path) -> None:
    tail = segments_of("a whole document", [4, 9], 0)[1:]
    store.write_shard(tmp_path, 0, tail, "float16", "")
    store.finish_store(tmp_path, [0], about(0))
    assert Store(tmp_path).segments("a whole document") is None


@pytest.mark.parametrize("shards", [0, 1, 2])
def test_empty_shards_hold_no_documents(tmp_path: Path, shards: int) -> None:
    for number in range(shards):
        store.write_shard(tmp_path, number, [], "float16", "")
    store.finish_store(tmp_path, range(shards), about(0))
    opened = Store(tmp_path)
    opened.check()
    assert opened.manifest["tokens"] == 0
    assert opened.segments("text") is None


def test_stored_document_without_tokens_is_found(tmp_path: Path) -> None:
    empty = StoredSegment(0, 4, np.empty((0, 2), np.int64), np.empty(0, np.float32))
    store.write_shard(tmp_path, 0, [(document_key("text"), empty)], "float16", "")
    store.finish_store(tmp_path, [0], about(0))
    assert as_lists(Store(tmp_path).segments("text")) == [(0, 4, [], [])]


def test_documents_without_tokens_are_counted(tmp_path: Path) -> None:
    none = np.empty((0, 2), np.int64), np.empty(0, np.float32)
    rows = [
        *segments_of("text", [2], 0),
        *((document_key(t), StoredSegment(0, 1, *none)) for t in "ab"),
    ]
    store.write_shard(tmp_path, 0, rows, "float16", "")
    # Of a job that did not count them.
    (path,) = tmp_path.glob("*.entry.json")
    entry = json.loads(path.read_text())
    path.write_text(json.dumps({name: entry[name] for name in entry if name != "unscored"}))
    store.finish_store(tmp_path, [0], about(0))
    manifest = Store(tmp_path).manifest
    assert (manifest["documents"], manifest["unscored"]) == (3, 2)


def test_store_opens_with_datasets_when_it_is_anywhere(finished: Path, tmp_path: Path) -> None:
    files = sorted(map(str, finished.glob("*.arrow")))
    rows = datasets.load_dataset("arrow", data_files=files, split="train", cache_dir=str(tmp_path))
    assert len(rows) == 12
    assert rows.column_names == ["document", "start", "end", "codes", "exceptions", "losses"]
    assert sum(map(len, rows["losses"])) == sum(map(len, TEXTS))
    assert rows[0]["document"] == document_key(TEXTS[0])


# Writing


def test_shard_stays_when_another_job_was_first(tmp_path: Path) -> None:
    first, second = (segments_of("text", [], seed) for seed in (0, 1))
    path = tmp_path / store.shard_name(0)
    store.write_shard(tmp_path, 0, first, "float32", "source", is_shared=True)
    before = path.read_bytes()
    store.write_shard(tmp_path, 0, second, "float32", "source", is_shared=True)
    assert path.read_bytes() == before
    store.write_shard(tmp_path, 0, second, "float32", "source")
    assert path.read_bytes() != before
    store.finish_store(tmp_path, [0], about(0))
    Store(tmp_path).check()


def test_shard_stays_when_there_are_no_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(1, "no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    test_shard_stays_when_another_job_was_first(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_finished_store_stays_when_another_job_is_late(tmp_path: Path) -> None:
    make_store(tmp_path)
    before = contents(tmp_path)
    late = segments_of(TEXTS[0], [], seed=9)
    store.write_shard(tmp_path, 0, late, "float16", "source 0", is_shared=True)
    store.finish_store(tmp_path, range(3), about(0))
    assert contents(tmp_path) == before


@pytest.mark.parametrize("at", ["before the link", "after the link"])
def test_finished_store_survives_tidying_while_another_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    make_store(tmp_path)
    before, link = contents(tmp_path), os.link

    def tidied(source: Any, target: Any) -> None:
        if at == "before the link":
            store.tidy(tmp_path)
        link(source, target)

    monkeypatch.setattr(os, "link", tidied)
    late = segments_of(TEXTS[0], [], seed=9)
    store.write_shard(tmp_path, 0, late, "float16", "source 0", is_shared=True)
    store.tidy(tmp_path)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", [MANIFEST_FILE, store.PLAN_FILE])
def test_finished_store_survives_a_second_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Two jobs end, or one begins as another ends: the file aside of the slower one is tidied."""
    make_store(tmp_path)
    before = contents(tmp_path)
    for owner, function in ((Path, "replace"), (os, "link")):
        original = getattr(owner, function)

        def tidied(source: Any, target: Any, original: Any = original) -> None:
            store.tidy(tmp_path)
            original(source, target)

        monkeypatch.setattr(owner, function, tidied)
    if name == MANIFEST_FILE:
        store.finish_store(tmp_path, range(3), about(0))
    else:
        job.begin(tmp_path, {"teacher": "teacher 0"})
    assert contents(tmp_path) == before


def test_write_file_fails_without_its_directory(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        vocagnolm.io.write_json(tmp_path / "gone" / "file.json", {})


def test_shard_is_written_if_of_the_same_texts(tmp_path: Path) -> None:
    assert not store.is_written(tmp_path, 0, "source")
    store.write_shard(tmp_path, 0, segments_of("text", [], 0), "float16", "source")
    assert store.is_written(tmp_path, 0, "source")
    entry = tmp_path / "shard-00000.arrow.entry.json"
    content = entry.read_bytes()
    entry.unlink()  # cut off just before it was written
    assert store.is_written(tmp_path, 0, "source")
    entry.write_bytes(content)
    with pytest.raises(ValueError, match=r"shard-00000\.arrow is made of other documents"):
        store.is_written(tmp_path, 0, "another")
    (tmp_path / store.shard_name(0)).write_bytes(b"no shard")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"shard-00000\.arrow is damaged.*: delete it"):
            store.is_written(tmp_path, 0, "source")
        (tmp_path / "shard-00000.arrow.entry.json").unlink(missing_ok=True)


class Killed(BaseException):
    """Ends what runs as SIGKILL would: nobody catches it, and no code of the package ends it."""


class Killer:
    """Counts what changes a directory, and kills before or after one of those operations."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int, *, before: bool):
        self.operations = 0
        self._lock = threading.Lock()  # checksums are read by several threads
        self._at, self._before = at, before
        self._undo = monkeypatch
        self._wrap(os, "link")
        self._wrap(os, "fsync")
        for name in ("replace", "unlink", "open"):
            self._wrap(Path, name)

    def _wrap(self, owner: Any, name: str) -> None:
        original = getattr(owner, name) if name != "fsync" else int  # which would take long

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if name == "open" and "w" not in str(args[1:]):
                return original(*args, **kwargs)
            with self._lock:
                self.operations += 1
                is_last = self.operations == self._at
            if is_last and self._before:
                raise Killed
            result = original(*args, **kwargs)
            if is_last:
                raise Killed
            return result

        self._undo.setattr(owner, name, wrapped)


def score_all(directory: Path) -> list[int]:
    """What a scoring job does with the store; gives the shards that it wrote."""
    if (directory / MANIFEST_FILE).exists():
        store.tidy(directory)
        return []
    wrote = []
    for number in range(3):
        if not store.is_written(directory, number, f"source {number}"):
            wrote.append(number)
            segments = segments_of(f"text {number}", [], 0)
            store.write_shard(
                directory, number, segments, "float16", f"source {number}", is_shared=True
            )
    store.finish_store(directory, range(3), about(0))
    return wrote


def kills() -> Iterator[tuple[int, bool]]:
    for at in itertools.count(1):
        yield at, True
        yield at, False


def test_store_is_the_same_when_writing_was_killed(tmp_path: Path) -> None:
    """Exhaustive: before and after every operation on the directory, until none is left."""
    (tmp_path / "whole").mkdir()
    assert score_all(tmp_path / "whole") == [0, 1, 2]
    expected = contents(tmp_path / "whole")
    for at, before in kills():
        directory = tmp_path / f"{at} {before}"
        directory.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            killer = Killer(patch, at, before=before)
            try:
                score_all(directory)
            except Killed:
                pass
            else:
                assert killer.operations < at
                break
        visible = {path.name for path in directory.glob("*.arrow")}
        for name in visible:  # whole, or not there
            assert (directory / name).read_bytes() == expected[name]
        rewritten = score_all(directory)
        assert not {store.shard_name(number) for number in rewritten} & visible
        assert contents(directory) == expected
    assert at > 20


def test_description_does_not_outlive_its_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise Killed

    store.write_shard(tmp_path, 0, segments_of("one", [], 0), "float16", "first")
    monkeypatch.setattr(store, "write_json", killed)
    with pytest.raises(Killed):
        store.write_shard(tmp_path, 0, segments_of("two", [], 0), "float16", "second")
    assert store.is_written(tmp_path, 0, "second")


@pytest.mark.parametrize(
    ("manifest", "advice"),
    [({"engine": "training"}, "the training run that saved it"), ({"engine": "hf"}, "--repair")],
)
def test_bad_shards_are_made_again_by_their_maker(manifest: Any, advice: str) -> None:
    assert advice in store.remedy(manifest)


def test_store_is_the_same_when_mending_was_killed(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    score_all(tmp_path / "whole")
    expected = contents(tmp_path / "whole")
    for at, before in kills():
        directory = tmp_path / f"{at} {before}"
        shutil.copytree(tmp_path / "whole", directory)
        (directory / store.shard_name(1)).write_bytes(b"bad")

        def mend(directory: Path = directory) -> None:
            if (directory / MANIFEST_FILE).exists():
                faults = dict(find_faults(directory, store.manifest_of(directory)["shards"]))
                if faults:
                    store.reopen(directory, list(faults))
            score_all(directory)

        with pytest.MonkeyPatch.context() as patch:
            Killer(patch, at, before=before)
            try:
                mend()
            except Killed:
                pass
            else:
                break
        mend()
        assert contents(directory) == expected
    assert at > 10


# Corruption


def flip_a_bit(rng: random.Random, directory: Path, other: Path) -> str:
    path = rng.choice(sorted(directory.iterdir()))
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return path.name


def truncate(rng: random.Random, directory: Path, other: Path) -> str:
    path = rng.choice(sorted(directory.iterdir()))
    data = path.read_bytes()
    path.write_bytes(data[: rng.randrange(len(data))])
    return path.name


def append(rng: random.Random, directory: Path, other: Path) -> str:
    path = rng.choice(sorted(directory.iterdir()))
    path.write_bytes(path.read_bytes() + rng.choice([b"\x00", b"\n", b" ", rng.randbytes(99)]))
    return path.name


def delete(rng: random.Random, directory: Path, other: Path) -> str:
    path = rng.choice(sorted(directory.iterdir()))
    path.unlink()
    return path.name


def swap(rng: random.Random, directory: Path, other: Path) -> str:
    one, two = rng.sample(sorted(directory.glob("*.arrow")), 2)
    data = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(data)
    return one.name


def take_anothers_file(rng: random.Random, directory: Path, other: Path) -> str:
    """A shard of another teacher's store, or its manifest: another teacher's, and tokenizer's."""
    name = rng.choice(sorted(contents(directory)))
    shutil.copyfile(other / name, directory / name)
    return "shard" if name == MANIFEST_FILE else name


def change_the_manifest(rng: random.Random, directory: Path, other: Path) -> str:
    """Say something else of it, with everything else as it should be."""
    path = directory / MANIFEST_FILE
    manifest = json.loads(path.read_bytes())
    key = rng.choice([key for key in manifest if key != "shards"])
    manifest[key] = rng.choice(["another", rng.randrange(100, 999), None])
    path.write_text(json.dumps(manifest, indent=1) + "\n")
    return path.name


def change_the_format(rng: random.Random, directory: Path, other: Path) -> str:
    path = directory / MANIFEST_FILE
    manifest = json.loads(path.read_bytes())
    del manifest["sha256"]
    manifest["format"] = rng.choice([0, 2, 3, "1", None])
    digest = manifest_sha256(manifest)
    path.write_text(json.dumps({**manifest, "sha256": digest}, indent=1) + "\n")
    return "format"


CORRUPTIONS: dict[Callable[[random.Random, Path, Path], str], int] = {
    flip_a_bit: 600,
    truncate: 100,
    append: 50,
    delete: 50,
    swap: 50,
    take_anothers_file: 50,
    change_the_manifest: 60,
    change_the_format: 40,
}


@pytest.mark.stress(
    "stores: damaged at random, or another's files", "refused in one line that names the file"
)
@pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=lambda corrupt: corrupt.__name__)
def test_corrupted_store_is_refused_with_the_file(
    finished: Path,
    tmp_path: Path,
    corrupt: Callable[[random.Random, Path, Path], str],
    record_property: Callable[[str, object], None],
) -> None:
    record_property("times", CORRUPTIONS[corrupt])
    rng = random.Random(corrupt.__name__)
    other = make_store(tmp_path / "other", seed=1, tokenizer_sha256="another")
    directory, good = tmp_path / "S", contents(finished)
    shutil.copytree(finished, directory)
    for _ in range(CORRUPTIONS[corrupt]):
        named = corrupt(rng, directory, other)
        with pytest.raises(ValueError, match=r"get it again|score|use the version") as caught:
            Store(directory).check()
        message = str(caught.value)
        assert "\n" not in message
        assert named in message
        assert str(directory) in message
        for name, content in good.items():
            (directory / name).write_bytes(content)
    Store(directory).check()


def test_corruptions_are_a_thousand_when_counted() -> None:
    assert sum(CORRUPTIONS.values()) == 1000


def test_document_is_absent_when_its_text_was_changed(finished: Path) -> None:
    opened, rng = Store(finished), random.Random(0)
    for _ in range(200):
        text = rng.choice(TEXTS)
        at = rng.randrange(len(text))
        changed = text[:at] + rng.choice(["", "é", " ", text[at] * 2, text[at].swapcase() + "̈"])
        changed += text[at + 1 :]
        assert (opened.segments(changed) is None) == (changed not in TEXTS)


def test_directory_without_a_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no finished teacher-loss store.*vocagnolm score"):
        Store(tmp_path)
