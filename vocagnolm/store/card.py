"""A store on the hub: a data set with a card."""

import json
from pathlib import Path

from huggingface_hub import DatasetCard, DatasetCardData

from vocagnolm.host.cards import CITATION, TAGS, hub_name, public, public_name, push
from vocagnolm.host.manifest import MANIFEST_FILE, SHARDS
from vocagnolm.host.options import listed
from vocagnolm.io import ASSETS
from vocagnolm.store.store import manifest_of


def push_store(directory: Path, repository: str) -> str:
    """Put a finished store and its card on the hub, in one commit; return where."""
    names = [MANIFEST_FILE, *(entry["file"] for entry in manifest_of(directory)[SHARDS])]
    card, message = store_card(directory, repository), "A store of teacher losses"
    return push(directory, names, card, repository, message, repo_type="dataset")


def store_card(directory: Path, repository: str) -> str:
    """Describe a finished store."""
    about = {name: value for name, value in manifest_of(directory).items() if name != SHARDS}
    teacher, corpora = str(about["teacher"]), listed(about.get("dataset", []))
    sources = [source for corpus in corpora if (source := hub_name(corpus))]
    data = DatasetCardData(
        pretty_name=f"Token losses of {public_name(teacher)}",
        tags=[*TAGS, "teacher-loss-store"],
        source_datasets=sources or None,
        configs=[{"config_name": "default", "data_files": "shard-*.arrow"}],
    )
    card = DatasetCard.from_template(
        data,
        template_path=str(ASSETS / "store_card.md"),
        teacher=public_name(teacher),
        dataset=" and ".join(map(public_name, corpora)) or "a corpus",
        repository=repository,
        documents=f"{about['documents']:,}",
        tokens=f"{about['tokens']:,}",
        settings=json.dumps(public(about), indent=2),
        citation=CITATION,
    )
    return str(card)
