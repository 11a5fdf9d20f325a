"""The model card of a trained student, and its upload to the hub. Neither shows local paths."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi, ModelCardData

from vocagnolm.fields import OptionError
from vocagnolm.shell.hub import hub_name, public_name, split_name
from vocagnolm.shell.io import ASSETS


def _public(settings: Any) -> Any:
    """Replace every path in settings by a name without this machine's directories."""
    if isinstance(settings, dict):
        return {name: _public(value) for name, value in settings.items()}
    if isinstance(settings, list):
        return [_public(value) for value in settings]
    # `settings_of` has made local paths absolute, and has not changed hub names.
    is_path = isinstance(settings, str) and Path(settings).is_absolute()
    return public_name(settings) if is_path else settings


def model_card(name: str, settings: Mapping[str, Any]) -> str:
    """Describe a trained student, for the `README.md` next to its weights."""
    public = _public(settings)
    teachers = list(public["teacher"] or ())
    for store in public["teacher_losses"] or ():
        teachers.append(f"the stored losses of {store['teacher']}")
    # A teacher may have several stores.
    guided = f", guided by {' and '.join(dict.fromkeys(teachers))}" if teachers else ""
    # The hub links a card to the datasets that it names, so local ones are left out.
    corpora = []
    for corpus in settings["dataset"]:
        name_on_hub = hub_name(corpus)
        if name_on_hub:
            corpora.append(name_on_hub)
    data = ModelCardData(
        library_name="peft" if settings["use_peft"] else "transformers",
        pipeline_tag="text-generation",
        tags=["vocagnolm", "arxiv:2503.19123", "continual-pretraining"],
        base_model=hub_name(split_name(settings["student"])[0]),
        datasets=corpora or None,
    )
    citation = (ASSETS / "citation.bib").read_text(encoding="utf-8").rstrip()
    return f"""---
{data.to_yaml()}
---

# {name}

{public["student"]} after continual pretraining on {" and ".join(public["dataset"])} with the \
method `{settings["method"]}` of
[VocAgnoLM](https://arxiv.org/abs/2503.19123){guided}.

## Settings

```json
{json.dumps(public, indent=2)}
```

## Citation

```bibtex
{citation}
```
"""


def push(
    directory: Path,
    names: Sequence[str],
    card: str,
    repository: str,
    *,
    revision: str | None = None,
    token: str | None = None,
) -> None:
    """Upload files and a card to the hub in one commit."""
    files = [CommitOperationAdd(name, directory / name) for name in names]
    files.append(CommitOperationAdd("README.md", card.encode()))
    hub, message = HfApi(token=token), "Upload with vocagnolm"
    try:
        hub.create_repo(repository, exist_ok=True)
        hub.create_commit(repository, files, commit_message=message, revision=revision)
    # Network errors have no common base class, and none may hide that the model was saved.
    except Exception as error:
        remedy = "everything is saved, and the same command pushes it"
        raise OptionError("push_to_hub", f"failed for {repository} ({error}): {remedy}") from error
