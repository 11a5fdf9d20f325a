"""Names of GGUF files, which from_pretrained takes as a place and a file name."""

from pathlib import Path


def split_name(name: str) -> tuple[str, str | None]:
    """Split a model's name into the place that from_pretrained takes and its GGUF file, if any.

    "DIR/model.gguf" is a file in a directory. "ORGANISATION/NAME/model.gguf" is a file in a hub
    repository, perhaps in a folder. For any other name, the place is the name itself.
    """
    if not name.endswith(".gguf"):
        return name, None
    path = Path(name).expanduser()
    parts = name.split("/")
    # A path that does not exist stays a path if it cannot be a hub name.
    if path.exists() or path.is_absolute() or len(parts) < 3:
        return str(path.parent), path.name
    return "/".join(parts[:2]), "/".join(parts[2:])
