"""The manifest of a directory: it knows every byte of the files, and every bit of itself."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from vocagnolm.host.manifest import (
    MANIFEST_FILE,
    content_fault,
    manifest_sha256,
    read_manifest,
    write_manifest,
)

ABOUT = {"step": 3, "world_size": 2, "run": {"learning_rate": 8e-5, "teacher": "T é", "seed": None}}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory as a checkpoint is one."""
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)))
    (tmp_path / "state.json").write_text("{}")
    write_manifest(tmp_path, ABOUT)
    return tmp_path


# All eight together take long.
@pytest.mark.parametrize(
    "bit", [pytest.param(bit, marks=pytest.mark.slow if bit > 1 else ()) for bit in range(8)]
)
def test_every_flipped_bit_of_a_manifest_is_seen(directory: Path, bit: int) -> None:
    path = directory / MANIFEST_FILE
    whole = path.read_bytes()
    assert read_manifest(directory).items() >= ABOUT.items()
    assert len(whole) > 400
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
        with pytest.raises(ValueError, match=rf"^{MANIFEST_FILE} (is damaged|has format)"):
            read_manifest(directory)


@pytest.mark.parametrize("lost", [1, 2, 100, 10_000])
def test_manifest_that_is_cut_off_is_refused(directory: Path, lost: int) -> None:
    path = directory / MANIFEST_FILE
    path.write_bytes(path.read_bytes()[:-lost])
    with pytest.raises(ValueError, match="is damaged"):
        read_manifest(directory)


@pytest.mark.parametrize("key", ["files", "shards"])
def test_manifest_must_describe_its_own_files(directory: Path, key: str) -> None:
    path = directory / MANIFEST_FILE
    manifest = json.loads(path.read_bytes())
    del manifest["sha256"]
    manifest["shards" if key == "files" else "other"] = manifest.pop("files")
    sealed = manifest | {"sha256": manifest_sha256(manifest)}
    path.write_text(json.dumps(sealed, indent=1) + "\n")
    with pytest.raises(ValueError, match=f"it does not describe its {key}"):
        read_manifest(directory, key)


def test_former_layout_is_read_and_told(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = directory / MANIFEST_FILE
    with caplog.at_level(logging.WARNING):
        said = read_manifest(directory)
        assert caplog.messages == []
        files = {e["file"]: {"bytes": e["bytes"], "sha256": e["sha256"]} for e in said["files"]}
        path.write_text(json.dumps(said | {"files": files}))
        former = read_manifest(directory)
    assert former == said
    assert content_fault(directory, former) is None
    assert caplog.messages == [
        f"{path} is of an earlier version: it has no checksum of itself, only of the files"
    ]
