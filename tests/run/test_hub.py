"""What the hub gets: our card and nothing that names this machine's directories."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hub import Hub, serving
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import HTTPError
from transformers import AutoModelForCausalLM, AutoTokenizer

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


def run(hub: Hub, cwd: Path, *words: str) -> str:
    """Run a process whose only hub is the stand-in; return what it prints."""
    online = {"HF_HUB_OFFLINE": "0", "HF_HOME": str(cwd / "hf"), "HF_HUB_DISABLE_XET": "1"}
    environment = {**os.environ, **online, "HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_stand_in"}
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_card_has_what_the_hub_asks_for() -> None:
    card = ModelCard(model_card("run", SETTINGS))
    data = card.data.to_dict()
    assert data["tags"] == ["vocagnolm", "arxiv:2503.19123", "continual-pretraining"]
    assert (data["base_model"], data["datasets"]) == ("org/student", ["org/corpus"])
    assert (data["pipeline_tag"], data["library_name"]) == ("text-generation", "transformers")
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
    def reject(self: object, *_: object, **__: object) -> None:
        raise HTTPError("no route")

    monkeypatch.setattr(HfApi, "create_repo", reject)
    with pytest.raises(ValueError, match=r"^--push_to_hub me/a: no route: everything is saved"):
        push(tmp_path, [], "", "me/a")


@pytest.mark.slow
@pytest.mark.processes
def test_pushed_student_has_our_card_and_loads(
    tokenizer_dirs: dict[str, Path],
    tiny_llama: Callable[..., Any],
    training_texts: list[str],
    tmp_path: Path,
) -> None:
    shutil.copytree(tokenizer_dirs["metaspace"], tmp_path / "student")
    tiny_llama(700).save_pretrained(tmp_path / "student")
    lines = (json.dumps({"text": text}) + "\n" for text in training_texts[:20])
    (tmp_path / "pages.jsonl").write_text("".join(lines))
    argv = [
        *("--method=cpt", "--student=student", "--dataset=pages.jsonl", "--max_length=64"),
        *("--global_batch_tokens=128", "--max_steps=2", "--use_cpu", "--report_to=none"),
        *("--output_dir=runs/mine", "--push_to_hub", "--save_steps=1", "--hub_model_id=me/mine"),
    ]
    with serving() as hub:
        run(hub, tmp_path, sys.executable, "-m", "vocagnolm", "train", *argv)
        files = hub.repositories["me/mine"]
        written = tmp_path / "runs" / "mine"
        assert files.keys() >= {"README.md", "config.json", "model.safetensors", "tokenizer.json"}
        assert all((written / name).read_bytes() == content for name, content in files.items())
        assert "# mine" in ModelCard(files["README.md"].decode()).text
        # Only what others may see: no settings with paths, no optimizer.
        assert not [name for name in files if str(tmp_path).encode() in files[name]]
        assert len(hub.commits) == 1
    pulled = tmp_path / "pulled"
    pulled.mkdir()
    for name, content in files.items():
        (pulled / name).write_bytes(content)
    assert len(AutoTokenizer.from_pretrained(pulled)) <= 700
    assert AutoModelForCausalLM.from_pretrained(pulled).config.vocab_size == 700
