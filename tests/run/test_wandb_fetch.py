"""Runs of Weights & Biases are compared as those in directories are."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
from fake_results import write_evaluation, write_json

from vocagnolm import __main__
from vocagnolm.report.compare import comparison_markdown
from vocagnolm.report.comparison import compare
from vocagnolm.report.fetch import STEP, fetch
from vocagnolm.training.tracking import tracked as under_tracked_names

RIGHT = {"cpt": [True, False, False, False], "vocagnolm": [True, True, True, False]}
SETTINGS = {"student": "s", "dataset": "d", "global_batch_tokens": 512, "seed": 1, "lr": 1.0}
LOG = [
    {"loss": 2.5, "student_loss_nats": 2.75, "tokens_per_s": 100.0, "step": 1},
    {"eval_loss": 3.25, "step": 2},
    {"train_runtime": 7200.0, "total_flos": 1e15, "train_loss": 2.5, "step": 2},
]


class File:
    """A file of a run on the server."""

    def __init__(self, name: str, source: Path):
        self.name, self._source = name, source

    def download(self, root: str) -> IO[bytes]:
        place = Path(root, self.name)
        place.parent.mkdir(parents=True)
        place.write_bytes(self._source.read_bytes())
        return place.open("rb")


class RemoteRun:
    """The part of `wandb.apis.public.Run` that is read."""

    def __init__(
        self,
        name: str,
        config: dict[str, Any],
        history: Sequence[dict[str, Any]] = (),
        files: Sequence[File] = (),
    ):
        self.id, self.name, self.config = f"id{len(name)}", name, config
        self._history, self._files = list(history), list(files)

    def history(self, samples: int, pandas: bool) -> list[dict[str, Any]]:
        assert samples > 10**5
        assert not pandas
        return self._history

    def files(self, pattern: str) -> Iterator[File]:
        return (file for file in self._files if file.name.startswith(pattern.rstrip("%")))


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
    values = under_tracked_names({name: value for name, value in entry.items() if name != "step"})
    return {**values, STEP: entry["step"], "_step": 9, "guidance/tokens": {"_type": "table"}}


def make_run(run: Path, method: str) -> RemoteRun:
    """A run as train.py and evaluate_math.py leave it, in a directory and on the server."""
    write_evaluation(run / "evaluation", {"demo": RIGHT[method]})
    settings = SETTINGS | {"method": method, "teacher": "T" if method == "vocagnolm" else None}
    write_json(run / "run.json", settings)
    state = {"max_steps": 2, "global_step": 2, "total_flos": 1e15, "log_history": LOG}
    write_json(run / "trainer_state.json", state)
    about: dict[str, Any] = {
        "models": {"student": {"parameters": 3}},
        "steps": 2,
        "lr": 1,
        "_wandb": {},
    }
    files = [File(f"evaluation/{x.name}", x) for x in (run / "evaluation").iterdir()]
    return RemoteRun(
        f"show/{method}", {"settings": settings, **about}, list(map(tracked, LOG)), files
    )


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
    run = RemoteRun(
        "a",
        {"settings": {"method": "cpt"}},
        [tracked({name: 1.0, "step": step}) for name, step in starts],
        [File("evaluation/checkpoint-3/results.json", results)],
    )
    server["lab/students"] = [run]
    # They may be fetched again, into the same directories.
    fetch(["lab/students"], tmp_path / "out")
    place, checkpoint = fetch(["lab/students"], tmp_path / "out")
    assert (place.name, checkpoint.name) == ("a", "a-checkpoint-3")
    assert (checkpoint / "evaluation" / "results.json").is_file()
    log = json.loads((place / "trainer_state.json").read_text())["log_history"]
    expected = [(loss, 1), (loss, 2), (held_out, 2), (loss, 3), (loss, 4), (held_out, 4)]
    assert log == [{name: 1.0, "step": step} for name, step in expected]


def test_runs_of_one_name_have_their_ids(
    server: dict[str, list[RemoteRun]], tmp_path: Path
) -> None:
    runs = [RemoteRun(name, {"settings": {"method": "cpt"}}) for name in ("a", "b", "a")]
    for number, run in enumerate(runs):
        run.id = f"id{number}"
    server["lab/students"] = runs
    places = fetch(["lab/students"], tmp_path)
    assert [place.name for place in places] == ["a-id0", "b", "a-id2"]


@pytest.mark.parametrize("name", ["..", "a/..", "/"])
def test_no_name_leads_out_of_the_directory(
    server: dict[str, list[RemoteRun]], name: str, tmp_path: Path
) -> None:
    server["lab/students"] = [RemoteRun(name, {"settings": {"method": "cpt"}})]
    (place,) = fetch(["lab/students"], tmp_path)
    assert place.parent == tmp_path
    assert (place / "run.json").is_file()
