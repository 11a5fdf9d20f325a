"""Manifests that say something else than was written, with the right checksum."""

from __future__ import annotations

from pathlib import Path

from vocagnolm.host.manifest import MANIFEST_FILE, manifest_sha256, read_manifest
from vocagnolm.io import write_json


def change_manifest(directory: Path, **changes: object) -> None:
    """Replace entries of a manifest and its checksum."""
    changed = read_manifest(directory) | changes
    write_json(directory / MANIFEST_FILE, changed | {"sha256": manifest_sha256(changed)})
