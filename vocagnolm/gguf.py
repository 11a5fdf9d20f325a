"""Names of GGUF files, which from_pretrained takes as a place and the name of a file in it."""

from pathlib import Path

SUFFIX = ".gguf"


def split_name(name: str) -> tuple[str, str | None]:
    """Return the place that from_pretrained takes for a model's name, and its GGUF file, if any.

    "DIR/model.gguf" is a file of a directory. "ORGANISATION/NAME/model.gguf" is one of a repository
    on the hub, where it may lie in a folder. The place of any other name is the name itself.
    """
    if not name.endswith(SUFFIX):
        return name, None
    path = Path(name).expanduser()
    parts = name.split("/")
    # A path that does not exist stays a path where it cannot be a name of the hub.
    if path.exists() or path.is_absolute() or len(parts) < 3:
        return str(path.parent), path.name
    return "/".join(parts[:2]), "/".join(parts[2:])


def gguf_files(directory: Path) -> list[str]:
    """List the GGUF files of a directory."""
    return sorted(path.name for path in directory.glob(f"*{SUFFIX}"))
