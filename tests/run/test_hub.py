"""What the hub gets: our card and nothing that names this machine's directories."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from huggingface_hub import CommitOperationAdd, HfApi, ModelCard
from huggingface_hub.errors import HTTPError
from world import World

from vocagnolm.run import parser
from vocagnolm.run.card import model_card, push
from vocagnolm.shell.hub import hub_name

SETTINGS: dict[str, Any] = {
    "student": "org/student",
    "dataset": ["org/corpus", "/home/me/pages.jsonl"],
    "teacher": ["org/teacher", "/home/me/own-teacher"],
    "teacher_losses": None,
    "method": "vocagnolm",
    "use_peft": False,
}


def test_card_has_what_the_hub_asks_for() -> None:
    card = ModelCard(model_card("run", SETTINGS))
    assert card.data.to_dict() == {
        "base_model": "org/student",
        "datasets": ["org/corpus"],
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["vocagnolm", "arxiv:2503.19123", "continual-pretraining"],
    }
    assert "guided by org/teacher and own-teacher." in card.text
    assert "/home/me" not in str(card)


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("org/name", "org/name"),
        ("/c/hub/models--a--b-c/snapshots/01", "a/b-c"),
        ("/c/hub/datasets--a--b/snapshots/01/data", "a/b"),
        ("/home/me/model", None),
    ],
)
def test_hub_name_is_found_in_its_cache(place: str, name: str | None) -> None:
    assert hub_name(place) == name


def test_push_that_fails_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HfApi, "create_repo", Mock(side_effect=HTTPError("no route")))
    with pytest.raises(ValueError, match=r"^--push_to_hub .*me/a.*no route.*: everything is saved"):
        push(tmp_path, [], "", "me/a")


def test_push_has_our_card_and_no_path_of_the_machine(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed: dict[str, bytes] = {}

    def commit(self: object, repository: str, files: list[CommitOperationAdd], **_: object) -> None:
        assert repository == "me/mine"
        assert not pushed  # one commit
        for file in files:
            with file.as_file() as content:
                pushed[file.path_in_repo] = content.read()

    create = Mock(return_value=Mock(repo_id="me/mine"))
    monkeypatch.setattr(HfApi, "create_repo", create)
    # Some versions of Trainer take this from the hub's module when they are imported.
    monkeypatch.setattr("transformers.trainer.create_repo", create, raising=False)
    monkeypatch.setattr(HfApi, "create_commit", commit)
    written = tmp_path / "mine"
    argv = world.argv(str(written), method="cpt", teacher=None, max_steps="2", eval_fraction=None)
    assert parser.main([*argv, "--use_cpu", "--push_to_hub", "--hub_model_id=me/mine"]) == 0
    assert pushed.keys() >= {"README.md", "config.json", "model.safetensors", "tokenizer.json"}
    assert all((written / name).read_bytes() == content for name, content in pushed.items())
    assert "# mine" in ModelCard(pushed["README.md"].decode()).text
    # Only what others may see: no settings with paths, no optimizer.
    for place in (tmp_path, world.root):
        assert not [name for name in pushed if str(place).encode() in pushed[name]]
