"""Weights & Biases: names of logs, the place of a run, its evaluations, and a comparison."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
from fake_results import write_evaluation, write_json
from wandb_files import PLACE, stored
from world import World

from vocagnolm import __main__
from vocagnolm.cli import Exit
from vocagnolm.evaluation.records import read_records, to_line
from vocagnolm.evaluation.results import log_to_wandb
from vocagnolm.report.compare import comparison_markdown
from vocagnolm.report.comparison import compare
from vocagnolm.report.fetch import STEP, fetch
from vocagnolm.run import parser, tracked_run
from vocagnolm.trainer import VocAgnoTrainer
from vocagnolm.training import tracking
from vocagnolm.training.config import VocAgnoConfig
from vocagnolm.training.options import RunOptions

SECTIONS = ("train/", "guidance/", "teacher/", "speed/", "memory/", "eval/")


@pytest.fixture
def options(world: World) -> list[str]:
    """Options of a run of two steps, with a teacher."""
    steps = {"max_steps": "2", "logging_steps": "1", "global_batch_tokens": "128"}
    changes = {"report_to": None, "output_dir": None, "save_steps": None}
    return [*world.argv("", **steps, **changes), "--use_cpu"]


@pytest.mark.slow
def test_trackers_hold_all_that_was_logged(
    options: list[str], offline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    recipe, out = tmp_path / "recipes" / "table1" / "a.yaml", tmp_path / "run"
    recipe.parent.mkdir(parents=True)
    recipe.write_text("project: lab/p\n")
    argv = [*options, f"--config={recipe}", f"--output_dir={out}"]
    assert parser.main([*argv, "--report_to", "wandb", "tensorboard"]) == 0
    (run,) = offline.glob("offline-run-*")
    found = stored(run)
    config = found["config"]
    where = {"entity": "lab", "project": "p", "run_group": "table1", "display_name": "table1/a"}
    assert found["run"].items() >= {**where, "tags": ["vocagnolm", "student", "teacher"]}.items()
    assert config["settings"] == json.loads((out / "run.json").read_text())
    assert config["parameters"] == config["trained_parameters"] > 0
    assert config["corpus"]["student_tokens"] > config["corpus"]["blocks"] > 0
    assert config["lr_scheduler_type"] == "cosine_with_min_lr"
    # What an evaluation continues from.
    place = json.loads((out / "wandb_run.json").read_text())
    assert place.items() >= {"id": run.name.rpartition("-")[2], "name": "table1/a"}.items()
    assert place.keys() >= PLACE.keys()
    assert place["config"]["corpus"] == config["corpus"]

    history = json.loads((out / "trainer_state.json").read_text())["log_history"]
    logged = [entry for entry in history if "student_loss_nats" in entry]
    rows = [row for row in found["history"] if "train/student_loss_nats" in row]
    for row, entry in zip(rows, logged, strict=True):
        step = entry.pop("step")
        assert row.items() >= {**tracking.tracked(entry), STEP: step}.items()
    names = {name.partition("._")[0] for row in found["history"] for name in row}
    assert "eval/loss" in names
    assert all(name.startswith((*SECTIONS, "_")) for name in names)

    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    entries = {name for entry in history for name in entry} - {"step"}
    assert set(events.Tags()["scalars"]) == set(tracking.tracked(dict.fromkeys(entries)))


@pytest.mark.slow
def test_resumed_run_is_one_with_what_was_cut_off(
    options: list[str], offline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = [*options, "--report_to=wandb", f"--output_dir={tmp_path / 'run'}"]
    own = VocAgnoTrainer.training_step

    def stopped(*args: Any, **kwargs: Any) -> Any:
        signal.raise_signal(signal.SIGUSR1)
        return own(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(VocAgnoTrainer, "training_step", stopped)
        assert parser.main(argv) == Exit.STOPPED
    time.sleep(1.1)  # directories of offline runs are named by the second
    assert parser.main(argv) == 0
    first, second = offline.glob("offline-run-*")
    assert first.name.rpartition("-")[2] == second.name.rpartition("-")[2]


@pytest.mark.parametrize(
    ("recipe", "given", "environment", "expected"),
    [
        (None, {}, {}, {"project": "vocagnolm", "group": None, "name": "out"}),
        ("/recipes/a/b/c.yaml", {}, {}, {"group": "a/b", "name": "a/b/c"}),
        ("/mine/recipes.yaml", {}, {}, {"group": "mine", "name": "mine/recipes"}),
        ("/recipes/a/recipes.yaml", {}, {}, {"group": "a", "name": "a/recipes"}),
        ("/my/own/a.yaml", {}, {}, {"group": "own", "name": "own/a"}),
        ("/mine/a.yaml", {"run_name": "n"}, {"NAME": "m"}, {"group": "mine", "name": "n"}),
        (None, {"project": "e/p"}, {"PROJECT": "q"}, {"entity": "e", "project": "p"}),
        (None, {}, {"PROJECT": "q"}, {"entity": None, "project": "q", "tags": ["cpt", "s", "t"]}),
        (None, {}, {"TAGS": "x,z" + "y" * 64}, {"tags": ["x", "y" * 64]}),
        ("/mine/a.yaml", {}, {"RUN_GROUP": "g", "NAME": "n"}, {"group": "g", "name": "n"}),
    ],
)
@pytest.mark.usefixtures("offline")
def test_place_follows_options_environment_and_recipe(
    recipe: str | None,
    given: dict[str, str],
    environment: dict[str, str],
    expected: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    options = {"project": RunOptions.project, "run_name": None, "output_dir": "runs/out", **given}
    job: Any = SimpleNamespace(args=SimpleNamespace(method="cpt", **options), recipe=recipe)
    found = tracked_run.wandb_arguments(job, {"student": "lab/s", "teacher": ["/x/t"]})
    assert found.items() >= expected.items()


def test_run_that_cannot_be_online_begins_offline(
    offline: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with tracking.begin_run({"project": "p"}) as run:
        assert run.offline
    assert re.search(r"offline \(.*key.*\); `wandb sync .*` sends it", capfd.readouterr().err)


@pytest.mark.slow
def test_resumed_run_that_cannot_reach_the_server_goes_on_offline(
    offline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert offline
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "3")
    with tracking.begin_run({"project": "p", "id": "a-run", "resume": "allow"}) as run:
        assert (run.offline, run.id) == (True, "a-run")


def test_trainer_in_python_begins_offline(
    world: World, offline: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    steps: dict[str, Any] = {"max_length": 64, "max_steps": 1, "use_cpu": True, "method": "cpt"}
    args = VocAgnoConfig(str(tmp_path / "run"), report_to="wandb", run_name="mine", **steps)
    VocAgnoTrainer(str(world.student), args, None, world.rows()).train()
    assert re.search(r"offline \(.*key.*\); `wandb sync .*` sends it", capfd.readouterr().err)
    tracked_run.finish()
    (run,) = offline.glob("offline-run-*")
    found = stored(run)
    assert found["run"].items() >= {"project": "vocagnolm", "display_name": "mine"}.items()


# Evaluations


RECORDS = [
    {"idx": idx, "raw_output": text, "correct": idx == 2}
    for idx, text in enumerate(["lone \ud83d surrogate", "NUL \x00 and \x1b", "数学 😀", ""])
]


def write_results(model: str, directory: Path, protocol: object = None) -> dict[str, Any]:
    results: dict[str, Any] = {
        "model": {"name": model, "revision": "sha256:aa"},
        "benchmarks": {"gsm8k": {"rounded": 36.2, "n": 5, "marked": ["partial"]}},
        "averages": {"AVG w/o SAT": {"rounded": 30.2, "marked": []}},
        "settings": {"protocol": protocol},
        "environment": {},
    }
    write_json(directory / "results.json", results)
    (directory / "gsm8k.jsonl").write_text("".join(map(to_line, RECORDS)))
    return results


@pytest.mark.processes
@pytest.mark.parametrize("part", ["", "checkpoint-20-chat"])
def test_evaluation_is_in_the_training_run(offline: Path, tmp_path: Path, part: str) -> None:
    model = tmp_path / "run" / part.removesuffix("chat").removesuffix("-")
    write_json(tmp_path / "run" / "wandb_run.json", PLACE)
    protocol = {"name": "zero-shot chat"} if part.endswith("chat") else None
    results = write_results(str(model), model / "evaluation", protocol)
    log_to_wandb(results, model / "evaluation")
    (run,) = offline.glob("offline-run-*-abc123")
    found = stored(run)
    start = {"project": "students", "run_group": "table1", "display_name": "table1/a"}
    assert found["run"].items() >= {**start, "tags": ["cpt"]}.items()
    assert found["config"].items() >= PLACE["config"].items()
    assert found["config"][f"evaluation_{part}".rstrip("_")]["model"] == results["model"]
    prefix = f"eval/{part}".rstrip("/")
    expected = {
        f"{prefix}/gsm8k/partial/accuracy_percent": 36.2,
        f"{prefix}/gsm8k/partial/items": 5,
        f"{prefix}/AVG without SAT/accuracy_percent": 30.2,
    }
    assert found["summary"].items() >= expected.items()
    files = run / "files" / "evaluation" / part
    assert json.loads((files / "results.json").read_text()) == results
    assert list(read_records(files / "gsm8k.jsonl").values()) == RECORDS


@pytest.mark.processes
def test_evaluation_of_drawn_outputs_has_a_run_and_names_of_its_own(
    offline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.chdir(tmp_path)
    results = write_results(".", tmp_path / "evaluation")
    results["settings"]["sampling"] = {"samples": 4, "temperature": 0.6, "top_p": 1.0}
    drawn: dict[str, Any] = {"rounded": 41.7, "n": 3, "marked": ["sampled"]}
    drawn["pass_at"] = {"2": {"rounded": 50.0}, "4": {"rounded": 66.7}}
    results["benchmarks"] = {"aime24": drawn}
    log_to_wandb(results, tmp_path / "evaluation")
    (run,) = offline.glob("offline-run-*")
    found = stored(run)
    start = {"project": "mine", "display_name": "evaluation of ."}
    assert found["run"].items() >= start.items()
    prefix = "eval/sampled/aime24/sampled"
    expected = {
        f"{prefix}/avg_at_4_percent": 41.7,
        f"{prefix}/pass_at_2_percent": 50.0,
        f"{prefix}/pass_at_4_percent": 66.7,
        f"{prefix}/items": 3,
    }
    assert found["summary"].items() >= expected.items()
    assert found["config"]["evaluation_sampled"]["settings"] == results["settings"]


# Comparisons of what the server has


RIGHT = {"cpt": [True, False, False, False], "vocagnolm": [True, True, True, False]}
SETTINGS = {"student": "s", "dataset": "d", "global_batch_tokens": 512, "seed": 1, "lr": 1.0}
LOG = [
    {"loss": 2.5, "student_loss_nats": 2.75, "tokens_per_s": 100.0, "step": 1},
    {"eval_loss": 3.25, "step": 2},
    {"train_runtime": 7200.0, "total_flos": 1e15, "train_loss": 2.5, "step": 2},
]


@dataclass
class File:
    """A file of a run on the server."""

    name: str
    source: Path

    def download(self, root: str) -> IO[bytes]:
        place = Path(root, self.name)
        place.parent.mkdir(parents=True)
        place.write_bytes(self.source.read_bytes())
        return place.open("rb")


@dataclass
class RemoteRun:
    """The part of `wandb.apis.public.Run` that is read."""

    name: str
    config: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    stored: list[File] = field(default_factory=list)
    id: str = "id"

    def history(self, samples: int, pandas: bool) -> list[dict[str, Any]]:
        assert samples > 10**5
        assert not pandas
        return self.rows

    def files(self, pattern: str) -> Iterator[File]:
        return (file for file in self.stored if file.name.startswith(pattern.rstrip("%")))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[RemoteRun]]:
    """The runs of each project."""
    import wandb

    projects: dict[str, list[RemoteRun]] = {}
    api = SimpleNamespace(runs=lambda project, order, lazy: projects[project])
    monkeypatch.setattr(wandb, "login", lambda prompt: True)
    monkeypatch.setattr(wandb, "Api", lambda timeout: api)
    return projects


def tracked(entry: dict[str, Any]) -> dict[str, Any]:
    """A row of the server's history."""
    values = {name: value for name, value in entry.items() if name != "step"}
    others = {STEP: entry["step"], "_step": 9, "guidance/tokens": {"_type": "table"}}
    return tracking.tracked(values) | others


def make_run(run: Path, method: str) -> RemoteRun:
    """A run with its evaluation, in a directory and on the server."""
    write_evaluation(run / "evaluation", {"demo": RIGHT[method]})
    settings = SETTINGS | {"method": method, "teacher": "T" if method == "vocagnolm" else None}
    write_json(run / "run.json", settings)
    state = {"max_steps": 2, "global_step": 2, "total_flos": 1e15, "log_history": LOG}
    write_json(run / "trainer_state.json", state)
    files = [File(f"evaluation/{x.name}", x) for x in (run / "evaluation").iterdir()]
    config = {"settings": settings, "steps": 2, "_wandb": {}}
    return RemoteRun(f"show/{method}", config, [tracked(entry) for entry in LOG], files)


def test_server_is_compared_as_directories(
    server: dict[str, list[RemoteRun]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [tmp_path / "runs" / method for method in RIGHT]
    server["lab/students"] = [make_run(run, run.name) for run in runs]
    server["lab/students"].append(RemoteRun("theirs", {"lr": 1}, [{"loss": 1.0}]))
    fetched = fetch(["lab/students"], tmp_path / "out")
    assert [path.name for path in fetched] == ["cpt", "vocagnolm"]
    expected = comparison_markdown(compare(runs))
    assert comparison_markdown(compare(fetched)) == expected
    assert "3.2500" in expected
    # One from its directory, the other from the server.
    del server["lab/students"][0]
    page = tmp_path / "page"
    argv = ["compare", str(runs[0]), "--wandb", "lab/students", "--output_dir", str(page)]
    assert __main__.main(argv) == 0
    assert capsys.readouterr().out.strip() == expected.strip()
    assert (page / "comparison.html").is_file()
    server["lab/students"] = server["lab/students"][1:]
    with pytest.raises(ValueError, match="lab/students: no runs"):
        fetch(["lab/students"], tmp_path / "other")


def test_resumed_run_is_read_without_what_was_repeated(
    server: dict[str, list[RemoteRun]], tmp_path: Path
) -> None:
    loss, held_out = "student_loss_nats", "eval_loss"
    starts = [
        *((loss, 1), (loss, 2), (held_out, 2), (loss, 3)),
        *((loss, 2), (held_out, 2), (loss, 3), (loss, 4)),
        *((loss, 4), (held_out, 4)),
    ]
    results = write_json(tmp_path / "results.json", {})
    rows = [tracked({name: 1.0, "step": step}) for name, step in starts]
    files = [File("evaluation/checkpoint-3/results.json", results)]
    server["lab/students"] = [RemoteRun("a", {"settings": {"method": "cpt"}}, rows, files)]
    # They may be fetched again, into the same directories.
    fetch(["lab/students"], tmp_path / "out")
    place, checkpoint = fetch(["lab/students"], tmp_path / "out")
    assert (place.name, checkpoint.name) == ("a", "a-checkpoint-3")
    assert (checkpoint / "evaluation" / "results.json").is_file()
    log = json.loads((place / "trainer_state.json").read_text())["log_history"]
    expected = [(loss, 1), (loss, 2), (held_out, 2), (loss, 3), (loss, 4), (held_out, 4)]
    assert log == [{name: 1.0, "step": step} for name, step in expected]


def test_each_run_has_its_own_directory_below(
    server: dict[str, list[RemoteRun]], tmp_path: Path
) -> None:
    names = ("a", "b", "a", "..", "a/..", "/")
    server["lab/students"] = [
        RemoteRun(name, {"settings": {"method": "cpt"}}, id=f"id{number}")
        for number, name in enumerate(names)
    ]
    places = fetch(["lab/students"], tmp_path)
    assert [place.name for place in places] == ["a-id0", "b", "a-id2", "id3", "id4", "id5"]
    assert {place.parent for place in places} == {tmp_path}
    assert all((place / "run.json").is_file() for place in places)
