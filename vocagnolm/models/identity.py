"""Which model it is that an evaluation belongs to."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from vocagnolm.host.files import file_sha256

# What a model is made of; a directory of a run holds much else.
_PATTERNS = (
    *("config.json", "generation_config.json", "adapter_config.json", "*.safetensors"),
    *(
        "pytorch_model*.bin",
        "adapter_model.bin",
        "tokenizer*",
        "special_tokens_map.json",
        "added_tokens.json",
    ),
    *("vocab.*", "merges.txt", "*.model", "*.py"),
)


def revision_of(model: str, config: Any) -> str:
    """What changes when a model does.

    Args:
        model: a directory, or a name on the hub.
        config: its configuration, as transformers loaded it.

    Returns:
        "sha256:..." over the files of a directory; for the hub the commit, "unknown" where
        transformers does not say it.
    """
    directory = Path(model)
    if not directory.is_dir():
        return str(getattr(config, "_commit_hash", None) or "unknown")
    digest = hashlib.sha256()
    paths = {path for pattern in _PATTERNS for path in directory.glob(pattern) if path.is_file()}
    for path in sorted(paths):
        digest.update(f"{path.name} {file_sha256(path)}\n".encode())
    return f"sha256:{digest.hexdigest()}"
