"""What the hub gets: our cards, of students and of stores, and nothing of this machine's paths."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from datasets import load_dataset
from hub import Hub, serving
from huggingface_hub import DatasetCard, HfApi, ModelCard
from huggingface_hub.errors import HTTPError
from stored_world import random_store
from transformers import AutoTokenizer, TrainerState

from vocagnolm.evaluation.card import add_to_card
from vocagnolm.host.cards import hub_name, push
from vocagnolm.run.failures import explain
from vocagnolm.run.model_card import model_card

SETTINGS: dict[str, Any] = {
    "student": "org/student",
    "dataset": "org/corpus",
    "teacher": ["org/teacher", "/home/me/own-teacher"],
    "teacher_losses": None,
    "method": "vocagnolm",
    "use_peft": False,
    "global_batch_tokens": 100,
}
COLUMN: dict[str, Any] = {
    "column": "GSM8K",
    "partial": False,
    "marks": ["our own prompts"],
    "marked": ["prompts"],
    "rounded": 36.2,
}


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with serving() as found:
        yield found


@pytest.fixture(scope="module")
def student(
    tokenizer_dirs: dict[str, Path],
    tiny_llama: Callable[..., Any],
    training_texts: list[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    root = tmp_path_factory.mktemp("hub")
    shutil.copytree(tokenizer_dirs["metaspace"], root / "student")
    tiny_llama(700).save_pretrained(root / "student")
    (root / "student" / "README.md").write_text("---\nlicense: mit\n---\n")
    lines = (json.dumps({"text": text}) + "\n" for text in training_texts[:20])
    (root / "pages.jsonl").write_text("".join(lines))
    return root / "student"


def run(hub: Hub, cwd: Path, *words: str) -> str:
    """A process that knows no hub but the stand-in."""
    online = {"HF_HUB_OFFLINE": "0", "HF_HOME": str(cwd / "hf"), "HF_HUB_DISABLE_XET": "1"}
    environment = {**os.environ, **online, "HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_stand_in"}
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def state(steps: int = 20) -> TrainerState:
    log = [{"step": n, "student_loss_nats": 3 - n / 10, "loss": 1.0} for n in range(1, steps + 1)]
    return TrainerState(global_step=steps, log_history=[*log, {"step": steps, "eval_loss": 0.5}])


def test_card_says_what_the_hub_asks(tmp_path: Path) -> None:
    tracker = {"id": "a", "url": "https://wandb.ai/me/p/runs/a"}
    (tmp_path / "wandb_run.json").write_text(json.dumps(tracker))
    card = ModelCard(model_card(tmp_path / "run", SETTINGS, state(), "me/run"))
    assert "wandb.ai" not in card.text
    card = ModelCard(model_card(tmp_path, SETTINGS, state(), "me/run"))
    data = card.data.to_dict()
    assert data["tags"] == ["vocagnolm", "arxiv:2503.19123", "continual-pretraining"]
    assert (data["base_model"], data["datasets"]) == ("org/student", "org/corpus")
    assert (data["pipeline_tag"], data["library_name"]) == ("text-generation", "transformers")
    assert tracker["url"] in card.text
    assert "guided by org/teacher and own-teacher." in card.text
    assert "/home/me" not in str(card)
    assert "@inproceedings{shin2025" in card.text
    # The first step, the last one, and eight between.
    assert [line for line in card.text.splitlines() if line.startswith("| 2")] == [
        "| 20   | 2,000  | 1.0000  | 0.5000     |"
    ]
    assert sum(line.startswith("| ") for line in card.text.splitlines()) == 1 + 10


@pytest.mark.parametrize("written", ["license: [a\n", "1: mit\n", "- mit\n", "\tlicense: mit\n"])
def test_students_card_may_be_damaged(written: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(f"---\n{written}---\n")
    card = ModelCard(model_card(tmp_path, SETTINGS | {"student": str(tmp_path)}, state()))
    assert card.data.license is None


def test_push_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object, *_: object, **__: object) -> None:
        raise HTTPError("no route")

    monkeypatch.setattr(HfApi, "create_repo", refuse)
    with pytest.raises(ValueError, match="no route") as caught:
        push(tmp_path, [], "", "me/a", "End of training")
    told = "--push_to_hub me/a: no route: the model is saved; start again, which pushes it"
    assert explain(caught.value, "the model") == told


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


def test_evaluation_goes_into_the_card(tmp_path: Path) -> None:
    results = {"model": {"name": str(tmp_path)}, "benchmarks": {"gsm8k": COLUMN}}
    path = tmp_path / "README.md"
    path.write_text("---\ntags: [other]\n---\n# Theirs\n")
    before = path.read_text()
    add_to_card(results, "| a table |\n")
    assert path.read_text() == before
    path.write_text(model_card(tmp_path, SETTINGS, state()))
    # Twice: a later evaluation takes the place of an earlier one.
    for table in ("| old table |\n", "| a table |\n"):
        add_to_card(results, table)
    card = ModelCard.load(path)
    (found,) = card.data.eval_results or ()
    assert (found.dataset_type, found.metric_value) == ("openai/gsm8k", 36.2)
    assert "our own prompts" in str(found.metric_name)
    assert card.text.endswith("## Evaluation\n\n| a table |\n")
    assert "old table" not in card.text
    results["benchmarks"] = {"gsm8k": COLUMN | {"partial": True, "rounded": 1.0}}
    add_to_card(results, "")
    assert ModelCard.load(path).data.eval_results[0].metric_value == 36.2


def test_card_stays_whole_when_writing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "README.md").write_text(before := model_card(tmp_path, SETTINGS, state()))

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="No space"):
        add_to_card({"model": {"name": str(tmp_path)}, "benchmarks": {"gsm8k": COLUMN}}, "| a |\n")
    assert (tmp_path / "README.md").read_text() == before


@pytest.mark.slow
@pytest.mark.processes
def test_pushed_student_has_our_card_and_loads(hub: Hub, student: Path, tmp_path: Path) -> None:
    argv = [
        *("--method=cpt", f"--student={student}", f"--dataset={student.parent / 'pages.jsonl'}"),
        *("--max_length=64", "--global_batch_tokens=128", "--max_steps=2", "--use_cpu"),
        *("--report_to=none", "--output_dir=runs/mine", "--push_to_hub", "--save_steps=1"),
        "--hub_model_id=me/mine",
    ]
    run(hub, tmp_path, sys.executable, "-m", "vocagnolm.cli", "train", *argv)
    files = hub.repositories["me/mine"]
    written = tmp_path / "runs" / "mine"
    assert files.keys() >= {"README.md", "config.json", "model.safetensors", "tokenizer.json"}
    assert all((written / name).read_bytes() == content for name, content in files.items())
    card = ModelCard(files["README.md"].decode())
    assert card.data.license == "mit"
    assert "# mine" in card.text
    assert 'pipeline("text-generation", "me/mine")' in card.text
    # Nothing but what was meant to be seen: no settings with paths, no optimizer.
    assert not [name for name in files if str(tmp_path).encode() in files[name]]
    assert hub.commits == ["End of training"]
    load = "from transformers import AutoModelForCausalLM as A, AutoTokenizer as T; "
    load += "A.from_pretrained('me/mine'); print(len(T.from_pretrained('me/mine')))"
    assert int(run(hub, tmp_path, sys.executable, "-c", load)) > 0


@pytest.mark.processes
def test_store_has_a_card_and_can_be_pushed(
    hub: Hub, tokenizer_dirs: dict[str, Path], training_texts: list[str], tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dirs["metaspace"])
    store = tmp_path / "stores" / "mine"
    random_store(store, training_texts[:8], tokenizer, teacher="/home/me/teacher")
    argv = ("score", "--verify", "stores/mine", "--push_to_hub", "me/losses")
    said = run(hub, tmp_path, sys.executable, "-m", "vocagnolm.cli", *argv)
    assert said.splitlines()[-1] == f"pushed to {hub.url}/me/losses"
    files = hub.repositories["me/losses"]
    assert files.keys() == {"README.md", *(path.name for path in store.iterdir())}
    card = DatasetCard(files["README.md"].decode())
    assert card.data.tags == ["vocagnolm", "arxiv:2503.19123", "teacher-loss-store"]
    assert "The loss of teacher on each of" in card.text
    # Its shards are files that `datasets` reads.
    rows = load_dataset("arrow", data_files=str(store / card.data["configs"][0]["data_files"]))
    assert len(rows["train"]) == 8
