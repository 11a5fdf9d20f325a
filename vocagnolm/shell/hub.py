"""Names of models and datasets: local files and directories, or repositories of the hub."""

import re
from pathlib import Path

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from vocagnolm.fields import Kind, OptionError


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


def check_name(option: str, name: str, kind: Kind = "model") -> None:
    """Reject a name that is neither a local path nor one that the hub can have.

    Whether the hub has it is left to the libraries, which know logins and revisions.
    """
    path = Path(name).expanduser()
    # A document that follows --teacher without an option of its own would be another teacher.
    if kind == "model" and path.is_file() and path.suffix != ".gguf":
        raise OptionError(option, f"{name} is a file, and a model is a directory or a .gguf file")
    if path.exists():
        return
    repository, gguf_file = split_name(name) if kind == "model" else (name, None)
    try:
        if gguf_file and "/" not in repository:
            raise HFValidationError("a file on the hub is ORGANISATION/NAME/FILE")
        validate_repo_id(repository)
    except HFValidationError:
        raise OptionError(option, f"{name}: no such file or directory") from None


# Where the hub's cache has a snapshot of a repository.
_CACHED = re.compile(r"(?:models|datasets)--([^/]+?)--([^/]+)/snapshots(/|$)")


def hub_name(name: str) -> str | None:
    """Return the hub's name of a model or dataset, or None if it is local."""
    # A model that was loaded from the cache has the path of its snapshot as its name.
    match = _CACHED.search(name)
    if match:
        return f"{match[1]}/{match[2]}"
    # An absolute path is local, even if it is gone, as in the files of a run that was moved.
    is_local = Path(name).exists() or Path(name).is_absolute()
    return None if is_local else name


def public_name(name: str) -> str:
    """Return a name without this machine's directories."""
    return hub_name(name) or Path(name).name
