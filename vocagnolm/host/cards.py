"""Parts that all cards for the hub share: our tags, the citation, names instead of local paths."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vocagnolm.io import ASSETS

TAGS = ["vocagnolm", "arxiv:2503.19123"]
CITATION = (ASSETS / "citation.bib").read_text(encoding="utf-8").rstrip()
# Where the hub's cache keeps a snapshot of a repository.
_CACHED = re.compile(r"(?:models|datasets)--([^/]+?)--([^/]+)/snapshots(/|$)")


def hub_name(place: str) -> str | None:
    """Return the name that the hub knows a model or data set by; None for a local one.

    >>> hub_name("/cache/models--Qwen--Qwen2.5-7B/snapshots/0a1b"), hub_name("Qwen/Qwen2.5-7B")
    ('Qwen/Qwen2.5-7B', 'Qwen/Qwen2.5-7B')
    """
    if found := _CACHED.search(place):
        return f"{found[1]}/{found[2]}"
    is_local = Path(place).exists() or Path(place).is_absolute()
    return None if is_local else place


def public_name(place: str) -> str:
    """Return a name that says nothing of this machine's directories.

    >>> public_name("/home/me/corpora/pages.jsonl")
    'pages.jsonl'
    """
    return hub_name(place) or Path(place).name


def public(settings: object) -> object:
    """Give every path in settings its public name.

    >>> public({"teacher": ["/home/me/qwen", "org/name"], "top_k": 0.4})
    {'teacher': ['qwen', 'org/name'], 'top_k': 0.4}
    """
    if isinstance(settings, Mapping):
        return {name: public(value) for name, value in settings.items()}
    if isinstance(settings, list | tuple):
        return [public(value) for value in settings]
    is_path = isinstance(settings, str) and Path(settings).is_absolute()
    return public_name(str(settings)) if is_path else settings


def push(
    directory: Path, names: Sequence[str], card: str, repository: str, message: str, **given: Any
) -> str:
    """Put files and a card on the hub, in one commit; nothing that names local paths.

    `given` is what the hub's client is told about the repository: its type, a revision, a token.
    """
    # Here, because pages need names alone.
    from huggingface_hub import CommitOperationAdd, HfApi

    files = [CommitOperationAdd(name, directory / name) for name in names]
    files.append(CommitOperationAdd("README.md", card.encode()))
    token, kind = given.get("token"), given.get("repo_type")
    try:
        HfApi().create_repo(repository, token=token, repo_type=kind, exist_ok=True)
        commit = HfApi().create_commit(repository, files, commit_message=message, **given)
    # Those of the network are of no common kind.
    except Exception as error:
        raise ValueError(f"--push_to_hub {repository}: {error}") from error
    return str(commit.repo_url)
