"""What trackers are told of a run: its place by options, environment and recipe, and its config."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from wandb_files import stored

from vocagnolm.host.trackers import Tracking
from vocagnolm.models.source import revision_of
from vocagnolm.run import main as train
from vocagnolm.run import watchers
from vocagnolm.run.documents import load_documents
from vocagnolm.run.pair import load_pair
from vocagnolm.run.recipe import parse
from vocagnolm.run.watchers import describe_tracking


@pytest.fixture(scope="module")
def options(
    tokenizer_dirs: dict[str, Path],
    tiny_llama: Callable[..., Any],
    training_texts: list[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> list[str]:
    """Options of a run of one step, with a teacher."""
    root = tmp_path_factory.mktemp("tracked")
    for seed, (name, family) in enumerate((("student", "metaspace"), ("teacher", "byte_level"))):
        shutil.copytree(tokenizer_dirs[family], root / name)
        tiny_llama(700, seed=seed).save_pretrained(root / name)
    lines = (json.dumps({"text": text}) + "\n" for text in training_texts[:20])
    (root / "pages.jsonl").write_text("".join(lines))
    return [
        *(f"--student={root / 'student'}", f"--teacher={root / 'teacher'}", "--use_cpu"),
        *(f"--dataset={root / 'pages.jsonl'}", f"--output_dir={root / 'runs' / 'out'}"),
        *("--max_length=64", "--global_batch_tokens=128", "--max_steps=1"),
    ]


def described(argv: list[str]) -> Tracking:
    job = parse(argv)
    pair = load_pair(job.model, job.load, job.pack, job.method, job.run.device)
    return describe_tracking(job, pair, load_documents(job, pair))


@pytest.mark.parametrize(
    ("recipe", "given", "environment", "expected"),
    [
        ("", [], {}, {"project": None, "group": None, "name": "out"}),
        (
            "recipes/paper/table1/a.yaml",
            [],
            {},
            {"group": "paper/table1", "name": "paper/table1/a"},
        ),
        ("mine/a.yaml", [], {}, {"group": "mine", "name": "mine/a"}),
        ("recipes/old/recipes/t/a.yaml", [], {}, {"group": "t", "name": "t/a"}),
        ("", ["--run_name=n"], {}, {"name": "n"}),
        ("", ["--project=p"], {}, {"project": "p"}),
        ("", ["--project=e/w"], {}, {"project": "e/w"}),
        ("", [], {"WANDB_TAGS": "x,y"}, {"tags": ["x", "y"]}),
        ("", [], {}, {"tags": ["vocagnolm", "student", "teacher"]}),
        (
            "recipes/t/a.yaml",
            [],
            {"WANDB_RUN_GROUP": "g", "WANDB_NAME": "n"},
            {"group": "g", "name": "n"},
        ),
    ],
)
def test_place_follows_options_environment_and_recipe(
    options: list[str],
    offline: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    recipe: str,
    given: list[str],
    environment: dict[str, str],
    expected: dict[str, object],
) -> None:
    if recipe:
        path = tmp_path / recipe
        path.parent.mkdir(parents=True)
        path.write_text("seed: 1\n")
        given = [f"--config={path}"]
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = vars(described([*options, *given]))
    assert {name: found[name] for name in expected} == expected


def test_store_names_the_teacher_that_scored_it(monkeypatch: pytest.MonkeyPatch) -> None:
    manifests = {"a": {"teacher": "A", "teacher_revision": "1"}, "b": {"teacher": "B"}}
    monkeypatch.setattr(watchers, "manifest_of", lambda path: manifests[path.name])
    monkeypatch.setattr(watchers, "revision_of", lambda name, config: "0")
    sizes = SimpleNamespace(parameters=5, trained=3)
    student = SimpleNamespace(source=SimpleNamespace(name="S"), config=None)
    pair: Any = SimpleNamespace(student=student, teachers=[], student_sizes=sizes, teacher_sizes=[])
    job: Any = SimpleNamespace(model=SimpleNamespace(teacher_losses=["a", "b"]))
    assert watchers._models(job, pair) == {
        "student": {"name": "S", "revision": "0", "parameters": 5, "trained_parameters": 3},
        "teacher": {"name": "A", "revision": "1", "store": "a"},
        "teacher_2": {"name": "B", "revision": None, "store": "b"},
    }


@pytest.mark.processes
def test_commit_is_marked_when_files_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        run = ("git", "-C", str(tmp_path), *who, *words)
        return subprocess.run(run, check=True, capture_output=True, text=True).stdout.strip()

    monkeypatch.setattr(watchers, "__file__", str(tmp_path / "vocagnolm" / "run" / "watchers.py"))
    assert watchers._commit() is None
    git("init")
    # Without any commit there is nothing to name.
    assert watchers._commit() is None
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "one")
    git("tag", "v1")
    (tmp_path / "untracked").write_text("")
    assert watchers._commit() == git("rev-parse", "HEAD")
    (tmp_path / "a").write_text("2")
    assert watchers._commit() == git("rev-parse", "HEAD") + "+"


@pytest.mark.slow
def test_run_is_told_apart_by_its_config(
    options: list[str], offline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    more = ["--report_to=wandb", "--guidance_table_steps=1", f"--output_dir={out}"]
    assert train.main([*options, *more, "--top_k=0.5", "--project=lab/p"]) == 0
    (run,) = offline.glob("offline-run-*")
    found = stored(run)
    assert (found["run"]["entity"], found["run"]["project"]) == ("lab", "p")
    config = found["config"]
    settings = json.loads((out / "run.json").read_text())
    assert {name: config[name] for name in settings} == settings
    assert (config["top_k"], config["method"], config["steps"]) == (0.5, "vocagnolm", 1)
    student = options[0].removeprefix("--student=")
    assert config["models"]["student"]["revision"] == revision_of(student, None)
    assert config["models"]["teacher"]["name"] == options[1].removeprefix("--teacher=")
    assert config["corpus"]["digest"] == settings["corpus_digest"]
    assert config["corpus"]["documents"] == 20
    assert config["corpus"]["student_tokens"] > config["corpus"]["blocks"] > 0
    assert config["code"]["vocagnolm"]
    assert config["hardware"]["cores"] == len(os.sched_getaffinity(0))
    assert config["trainer"]["lr_scheduler_type"] == "cosine_with_min_lr"
    assert "guidance/tokens._type" in {name for row in found["history"] for name in row}
    place = json.loads((out / "wandb_run.json").read_text())
    assert (place["id"], place["url"]) == (run.name.rpartition("-")[2], None)
