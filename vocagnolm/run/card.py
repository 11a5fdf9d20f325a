"""The card of a trained student, and its push to the hub; neither names a local path."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi, ModelCardData

from vocagnolm.io import ASSETS, json_or_empty

TAGS = ["vocagnolm", "arxiv:2503.19123"]
CITATION = (ASSETS / "citation.bib").read_text(encoding="utf-8").rstrip()
_CARD = """---
{data}
---

# {name}

{student} after continual pretraining on {corpora} with the method `{method}` of
[VocAgnoLM](https://arxiv.org/abs/2503.19123){guided}.
{tracked}
## Settings

```json
{settings}
```

## Citation

```bibtex
{citation}
```
"""
_MESSAGE = "Upload with vocagnolm"
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
    """Return a name that does not tell this machine's directories.

    >>> public_name("/home/me/corpora/pages.jsonl")
    'pages.jsonl'
    """
    return hub_name(place) or Path(place).name


def public(settings: Any) -> Any:
    """Give every path in settings a name that does not tell this machine's directories.

    >>> public({"teacher": ["/home/me/qwen", "org/name"], "top_k": 0.4})
    {'teacher': ['qwen', 'org/name'], 'top_k': 0.4}
    """
    if isinstance(settings, Mapping):
        return {name: public(value) for name, value in settings.items()}
    if isinstance(settings, list | tuple):
        return [public(value) for value in settings]
    if isinstance(settings, str) and Path(settings).is_absolute():
        return public_name(settings)
    return settings


def model_card(directory: Path, settings: Mapping[str, Any], repository: str | None = None) -> str:
    """Describe a trained student, for `README.md` beside its weights."""
    shown = public(settings)
    stores, teachers = shown["teacher_losses"] or [], shown["teacher"] or []
    guides = [*teachers, *(f"the stored losses of {store['teacher']}" for store in stores)]
    data = ModelCardData(
        library_name="peft" if settings["use_peft"] else "transformers",
        pipeline_tag="text-generation",
        tags=[*TAGS, "continual-pretraining"],
        base_model=hub_name(settings["student"]),
        datasets=list(filter(None, map(hub_name, settings["dataset"]))) or None,
    )
    url = json_or_empty(directory / "wandb_run.json").get("url")
    return _CARD.format(
        data=data.to_yaml(),
        name=repository.split("/")[-1] if repository else directory.name,
        student=shown["student"],
        corpora=" and ".join(shown["dataset"]),
        method=settings["method"],
        guided=f", guided by {' and '.join(guides)}" if guides else "",
        tracked=f"\n[Curves in Weights & Biases]({url})\n" if url else "",
        settings=json.dumps(shown, indent=2),
        citation=CITATION,
    )


def check_login(token: str | None) -> None:
    """Raise a ValueError where nobody is logged in to the hub, or it does not answer."""
    try:
        HfApi(token=token).whoami()
    # Those of the network are of no common kind.
    except Exception as error:
        reason = " ".join(str(error).split())
        remedy = "run `hf auth login` or set HF_TOKEN, or leave --push_to_hub out"
        raise ValueError(f"--push_to_hub: {reason}: {remedy}") from error


def push(directory: Path, names: Sequence[str], card: str, repository: str, **given: Any) -> str:
    """Put files and a card on the hub in one commit; return the address of the repository.

    `given` is what the hub is told about the repository: its type, a revision, a token.
    """
    files = [CommitOperationAdd(name, directory / name) for name in names]
    files.append(CommitOperationAdd("README.md", card.encode()))
    kind, token = given.get("repo_type"), given.get("token")
    try:
        HfApi().create_repo(repository, token=token, repo_type=kind, exist_ok=True)
        commit = HfApi().create_commit(repository, files, commit_message=_MESSAGE, **given)
    # Those of the network are of no common kind.
    except Exception as error:
        remedy = "everything is saved; the same command pushes it"
        raise ValueError(f"--push_to_hub {repository}: {error}: {remedy}") from error
    return str(commit.repo_url)
