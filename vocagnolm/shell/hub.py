"""Names on the hub, checked in seconds. The libraries ask five times before they give up."""

import logging
import re
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Literal

from huggingface_hub import HfApi, constants, get_session
from huggingface_hub.errors import HFValidationError, HTTPError  # type: ignore[attr-defined]
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from vocagnolm.fields import OptionError

Kind = Literal["model", "dataset"]
# The hub must answer within this time, whatever it says.
_WAIT_S = 3.0
_warn_once = cache(logging.getLogger(__name__).warning)


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
    """Reject a name that is no local path and that the hub cannot have, or cannot be asked for.

    What is cached is read without the hub. A warning says how to avoid the wait.
    """
    if Path(name).expanduser().exists():
        return
    repository, gguf_file = split_name(name) if kind == "model" else (name, None)
    is_directory = kind == "model" and gguf_file is None
    absent = f"no such {'directory' if is_directory else 'file or directory'}"
    try:
        if gguf_file and "/" not in repository:
            raise HFValidationError("a file on the hub is ORGANISATION/NAME/FILE")
        validate_repo_id(repository)
    except HFValidationError:
        raise OptionError(option, f"{name}: {absent}") from None
    # Whether the hub has the name is left to the libraries, which know logins and revisions. Only a
    # hub that does not answer is handled here, because they would ask it five times.
    fault = "" if constants.HF_HUB_OFFLINE else _unreachable()
    if not fault:
        return
    reason = f"{constants.ENDPOINT} cannot be reached ({fault})"
    # The directory of the model ORGANISATION/NAME is models--ORGANISATION--NAME.
    snapshots = Path(constants.HF_HUB_CACHE, f"{kind}s--{repository.replace('/', '--')}/snapshots")
    if not snapshots.is_dir():
        raise OptionError(
            option,
            f"{name}: {absent}, and {reason}: give one, or put it into the cache and "
            "set HF_HUB_OFFLINE=1",
        )
    _warn_once(f"{reason}: set HF_HUB_OFFLINE=1 to read what is cached at once")


@cache
def _unreachable() -> str:
    """Return why the hub cannot be reached, or "" if it answers anything."""
    # The thread appends its result. If none comes in time, the first reason stays the last.
    reasons = [f"no answer in {_WAIT_S:g} s"]

    def ask() -> None:
        try:
            get_session().head(constants.ENDPOINT, timeout=_WAIT_S)
            reasons.append("")
        except (HTTPError, OSError) as error:
            reasons.append(" ".join(str(error).split()))

    # The thread is needed because no time-out covers the look-up of a host name. As a daemon, a
    # look-up that hangs does not keep the process alive.
    thread = Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_WAIT_S)
    return reasons[-1]


# Where the hub's cache has a snapshot of a repository.
_CACHED = re.compile(r"(?:models|datasets)--([^/]+?)--([^/]+)/snapshots(/|$)")


def hub_name(place: str) -> str | None:
    """Return the hub's name of a model or dataset, or None if it is local."""
    # A model that was loaded from the cache has the path of its snapshot as its name.
    match = _CACHED.search(place)
    if match:
        return f"{match[1]}/{match[2]}"
    # An absolute path is local, even if it is gone, as in the files of a run that was moved.
    is_local = Path(place).exists() or Path(place).is_absolute()
    return None if is_local else place


def public_name(place: str) -> str:
    """Return a name without this machine's directories."""
    return hub_name(place) or Path(place).name


def check_login(token: str | None) -> None:
    """Raise a ValueError if nobody is logged in to the hub, or it does not answer."""
    try:
        HfApi(token=token).whoami()
    # Network errors have no common base class.
    except Exception as error:
        remedy = "run `hf auth login` or set HF_TOKEN, or leave --push_to_hub out"
        raise OptionError("push_to_hub", f"{error}: {remedy}") from error
