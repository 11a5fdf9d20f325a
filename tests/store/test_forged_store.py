"""Stores that lie: their checksums are right, and what they say is not."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from score_world import arguments, refusal

from vocagnolm.host.manifest import MANIFEST_FILE, manifest_sha256
from vocagnolm.store import store
from vocagnolm.store.store import Store, StoredSegment, document_key

# Two bytes of an emoji, and a word that is longer than a code can say.
TEXT = "a😀" + "x" * 300
SPANS = np.array([[0, 1], [1, 2], [1, 2], [2, 302]])
Manifest = dict[str, Any]
Columns = dict[str, Any]


@pytest.fixture
def honest(tmp_path: Path) -> Path:
    """A store of one document in one shard."""
    segment = StoredSegment(0, len(TEXT), SPANS, np.ones(4, np.float32))
    path = tmp_path / "S"
    path.mkdir()
    store.write_shard(path, 0, [(document_key(TEXT), segment)], "float32", "source")
    about = {"teacher": "T", "tokenizer_sha256": "", "context": 99}
    store.finish_store(path, [0], about)
    assert Store(path).segments(TEXT)
    return path


def forge(directory: Path, change: Callable[[Manifest], object]) -> None:
    """Change a manifest, and its checksum with it."""
    path = directory / MANIFEST_FILE
    manifest = json.loads(path.read_bytes())
    del manifest["sha256"]
    change(manifest)
    sealed = manifest | {"sha256": manifest_sha256(manifest)}
    path.write_text(json.dumps(sealed, indent=1) + "\n")


def forge_shard(directory: Path, content: bytes) -> None:
    """Write another shard, and its checksum with it."""
    (directory / store.shard_name(0)).write_bytes(content)
    digest = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    forge(directory, lambda manifest: manifest["shards"][0].update(digest))


def of_manifest(**changed: Any) -> Callable[[Manifest], object]:
    return lambda manifest: manifest.update(changed)


def of_entry(**changed: Any) -> Callable[[Manifest], object]:
    return lambda manifest: manifest["shards"][0].update(changed)


def rename_key(old: str, new: str) -> Callable[[Manifest], object]:
    return lambda manifest: manifest.update({new: manifest.pop(old)})


MANIFESTS: dict[str, tuple[Callable[[Manifest], object], str]] = {
    "no shards": (rename_key("shards", "files"), "does not describe its shards"),
    "files beside shards": (of_manifest(files=[], shards=3), "does not describe its shards"),
    "shards are an object": (of_manifest(shards={"a": {}}), "does not describe its shards"),
    "an empty shard": (of_manifest(shards=[{}]), "does not describe its shards"),
    "a name above the store": (of_entry(file="../victim.txt"), "does not describe its shards"),
    "an absolute name": (of_entry(file="/victim.txt"), "does not describe its shards"),
    "the manifest as a shard": (of_entry(file=MANIFEST_FILE), "'manifest.json' as the name"),
    "a name in a folder": (of_entry(file="a/shard-00000.arrow"), "as the name of a shard"),
    "a name with a NUL": (of_entry(file="shard-00000.arrow\0"), "as the name of a shard"),
    "a shard named twice": (lambda m: m["shards"].append(m["shards"][0]), "in 1 shards"),
    "a source that is null": (of_entry(source=None), "None as source"),
    "tokens in words": (of_manifest(tokens="four"), "'four' as tokens"),
    "more tokens than in shards": (of_manifest(tokens=5), "'tokens': 4"),
    "negative documents": (of_manifest(documents=-1), "'documents': 1"),
    "a context in words": (of_manifest(context="eval"), "'eval' as context"),
    "a context that is true": (of_manifest(context=True), "True as context"),
    "a context of one": (of_manifest(context=1), "1 as context"),
    "a context of 32 bits": (of_manifest(context=2**31), "2147483648 as context"),
    "a context without end": (of_manifest(context=10**40), "0 as context"),
    "no context": (rename_key("context", "limit"), "None as context"),
    "a teacher that is a list": (of_manifest(teacher=["T"]), "as teacher"),
    "no tokenizer": (rename_key("tokenizer_sha256", "tokenizer"), "None as tokenizer_sha256"),
}


@pytest.mark.stress("stores that lie, with right checksums", "refused in one line")
@pytest.mark.parametrize(("change", "said"), MANIFESTS.values(), ids=MANIFESTS)
def test_forged_manifest_is_refused_in_a_line(
    honest: Path, change: Callable[[Manifest], object], said: str
) -> None:
    forge(honest, change)
    with pytest.raises(ValueError, match="is no finished teacher-loss store") as caught:
        Store(honest)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(honest) in str(caught.value)


def shard(**changed: Any) -> Callable[[Columns], None]:
    """Change some columns, each the list of its only row."""
    return lambda columns: columns.update(changed)


INT32, FLOATS = pa.list_(pa.int32()), pa.list_(pa.float32())
BYTES = pa.list_(pa.uint8())
NULL_LOSS = pa.array([[1.0, None, 1.0, 1.0]], FLOATS)
SHARDS: dict[str, tuple[Callable[[Columns], object], str]] = {
    "a column is missing": (lambda columns: columns.pop("losses"), "which is no shard"),
    "losses are text": (shard(losses=pa.array([["1"] * 4])), "which is no shard"),
    "losses are of 64 bits": (shard(losses=pa.array([[1.0] * 4])), "which is no shard"),
    "keys are short": (shard(document=pa.array([b"key"], pa.binary(3))), "which is no shard"),
    "a key is null": (shard(document=pa.array([None], pa.binary(16))), "a value is missing"),
    "a start is null": (shard(start=pa.array([None], pa.int32())), "a value is missing"),
    "losses are null": (shard(losses=pa.array([None], FLOATS)), "a value is missing"),
    "a loss is null": (shard(losses=NULL_LOSS), "a value is missing"),
    "losses are fewer": (shard(losses=pa.array([[1.0]], FLOATS)), "1 losses of 4 tokens"),
    "codes are fewer": (shard(codes=pa.array([[2, 2, 1]], BYTES)), "4 losses of 3 tokens"),
    "codes are all 254": (shard(codes=pa.array([[254] * 4], BYTES)), "exceptions of other"),
    "spans are too long": (
        shard(codes=pa.array([[254] * 4], BYTES), exceptions=pa.array([[]], INT32)),
        "spans from 0 to 508 of a text [0, 302)",
    ),
    "spans are too short": (
        shard(codes=pa.array([[2] * 4], BYTES), exceptions=pa.array([[]], INT32)),
        "spans from 0 to 4 of a text [0, 302)",
    ),
    "an exception is missing": (shard(exceptions=pa.array([[]], INT32)), "exceptions of other"),
    "exceptions are not of three": (
        shard(exceptions=pa.array([[3, 300]], INT32)),
        "exceptions of other",
    ),
    "an exception is out of range": (
        shard(exceptions=pa.array([[9, 300, 0]], INT32)),
        "exceptions of other",
    ),
    "a length is negative": (
        shard(exceptions=pa.array([[3, -300, 0]], INT32)),
        "spans from 0 to -298 of a text",
    ),
    "lengths are negative between": (
        shard(
            codes=pa.array([[2, 255, 255, 2]], BYTES),
            exceptions=pa.array([[1, 301, 0, 2, -1, 0]], INT32),
        ),
        "leave a gap, or go back",
    ),
    "a length is huge": (
        shard(exceptions=pa.array([[3, 2**31 - 1, 0]], INT32)),
        "spans from 0 to 2147483649 of a text",
    ),
    "an overlap is negative": (
        shard(exceptions=pa.array([[3, 300, -1]], INT32)),
        "leave a gap, or go back",
    ),
    "an overlap leaves the text": (
        shard(
            codes=pa.array([[255, 2, 1, 255]], BYTES),
            exceptions=pa.array([[0, 1, 9, 3, 300, 0]], INT32),
        ),
        "spans from -9 to 302 of a text",
    ),
    "losses are below zero": (
        shard(losses=pa.array([[1.0, -60000.0, 1.0, 1.0]], FLOATS)),
        "losses that are not finite, or below zero",
    ),
    "a loss is infinite": (
        shard(losses=pa.array([[1.0, np.inf, 1.0, 1.0]], FLOATS)),
        "losses that are not finite, or below zero",
    ),
}


def refused_by(directory: Path) -> str:
    """The line with which a document of a store is refused, after its checksums were not."""
    opened = Store(directory)
    opened.check()
    with pytest.raises(ValueError, match=r"get it again, or score the corpus again$") as caught:
        opened.segments(TEXT)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"the teacher-loss store {directory} has ")
    with pytest.raises(ValueError, match="get it again"):
        opened.segments(TEXT)  # as before: nothing half read is kept
    return message


@pytest.mark.stress("stores that lie, with right checksums", "refused in one line")
@pytest.mark.parametrize(("change", "said"), SHARDS.values(), ids=SHARDS)
def test_forged_shard_is_refused_in_a_line(
    honest: Path, change: Callable[[Columns], object], said: str
) -> None:
    with pa.OSFile(str(honest / store.shard_name(0))) as file:
        table = pa.ipc.open_stream(file).read_all()
    columns = {name: table[name].combine_chunks() for name in table.column_names}
    change(columns)
    changed, sink = pa.table(columns), pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, changed.schema) as writer:
        writer.write_table(changed)
    forge_shard(honest, sink.getvalue().to_pybytes())
    assert said in refused_by(honest)


@pytest.mark.stress("stores that lie, with right checksums", "refused in one line")
@pytest.mark.parametrize(
    ("old", "new"),
    [
        # Where the lists of losses and of codes, of four values, end.
        pytest.param([0, 4], [0, 2**30], id="far outside"),
        pytest.param([0, 4], [4, 0], id="backwards"),
        pytest.param([0, 4], [-4, 0], id="before the file"),
    ],
)
def test_lists_outside_of_the_file_are_refused(
    honest: Path, old: list[int], new: list[int]
) -> None:
    content = (honest / store.shard_name(0)).read_bytes()
    before, after = (np.array(ends, np.int32).tobytes() for ends in (old, new))
    assert content.count(before) >= 2
    forge_shard(honest, content.replace(before, after))
    assert "which is no shard" in refused_by(honest)


@pytest.mark.stress("stores that lie, with right checksums", "refused in one line")
@pytest.mark.parametrize("content", [b"", b"no shard", bytes(1000), b"\xff" * 1000])
def test_shard_that_is_no_table_is_refused(honest: Path, content: bytes) -> None:
    forge_shard(honest, content)
    assert "shard-00000.arrow, which is no shard" in refused_by(honest)


@pytest.mark.stress(
    "stores whose manifest names a file elsewhere, under --repair", "the file stays"
)
@pytest.mark.parametrize("named", ["../victim.txt", "{}/victim.txt", "plan.json"])
def test_repair_deletes_nothing_a_manifest_names(
    scored: Path,
    teacher: Path,
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    named: str,
) -> None:
    path, victim = tmp_path / "S", tmp_path / "victim.txt"
    shutil.copytree(scored, path)
    victim.write_text("precious")
    forge(path, of_entry(file=named.format(tmp_path)))
    names = sorted(file.name for file in path.iterdir())
    message = refusal(arguments(teacher, corpus, path, "--repair"), capsys)
    assert "is no finished teacher-loss store" in message
    assert victim.read_text() == "precious"
    assert sorted(file.name for file in path.iterdir()) == names
