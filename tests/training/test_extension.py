"""A run goes on for longer, and ends as if it had been meant to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import get_scheduler
from world import World, assert_equal_weights

from vocagnolm import VocAgnoConfig, VocAgnoTrainer
from vocagnolm.run import parser
from vocagnolm.training import run_directory
from vocagnolm.training.extension import changes_of

CONSTANT = {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": "2"}


def test_longer_run_equals_one_that_was_never_finished(
    world: World, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = world.train("whole", max_steps="7", **CONSTANT)
    for steps in ("3", "7"):
        found = world.train("extended", max_steps=steps, **CONSTANT)
    assert_equal_weights(found, whole)
    directory = world.root / "extended"
    assert json.loads((directory / "trainer_state.json").read_text())["global_step"] == 7
    assert json.loads((directory / "run.json").read_text())["max_steps"] == 7
    capfd.readouterr()
    argv = world.argv("extended", use_cpu="True", **CONSTANT)
    assert parser.main([*argv, "--max_steps=7"]) == 0
    assert "nothing to do" in capfd.readouterr().out
    # A shorter run is another one.
    assert parser.main([*argv, "--max_steps=3"]) == 2
    assert "max_steps was 7, now 3" in capfd.readouterr().err


def test_cosine_goes_on_when_it_is_asked_to(
    world: World, capfd: pytest.CaptureFixture[str]
) -> None:
    world.train("cosine", max_steps="2")
    directory = world.root / "cosine"
    for name in ("evaluation", "evaluation-checkpoint-2"):
        (directory / name).mkdir()
    argv = world.argv("cosine", use_cpu="True", max_steps="4")
    assert parser.main(argv) == 2
    assert "--extend true" in capfd.readouterr().err
    assert parser.main([*argv, "--extend"]) == 0
    # Its results are not those of the new model.
    evaluations = sorted(path.name for path in directory.glob("evaluation*"))
    assert evaluations == ["evaluation-checkpoint-2", "evaluation-checkpoint-2-again"]
    # The same run without the option, as a scheduler may start it again.
    assert parser.main(argv) == 0


def test_longer_run_that_was_killed_does_not_start_over(
    world: World, capfd: pytest.CaptureFixture[str]
) -> None:
    world.train("killed", max_steps="2")
    directory = world.root / "killed"
    log = (directory / "log.jsonl").read_bytes()
    # A longer run has begun, and has saved nothing yet.
    run = json.loads((directory / "run.json").read_text())
    (directory / "run.json").write_text(json.dumps(run | {"max_steps": 4, "extend": True}))
    (directory / "manifest.json").unlink()
    argv = world.argv("killed", use_cpu="True", max_steps="4")
    assert parser.main(argv) == 2
    assert "--extend true" in capfd.readouterr().err
    assert (directory / "log.jsonl").read_bytes() == log
    assert parser.main([*argv, "--extend"]) == 0


def test_longer_run_in_python_is_not_finished_until_it_ends(world: World, tmp_path: Path) -> None:
    def trainer(epochs: int) -> Any:
        options: dict[str, Any] = {"method": "cpt", "lr_scheduler_type": "constant"}
        options |= {"max_length": 64, "use_cpu": True, "num_train_epochs": epochs}
        args = VocAgnoConfig(str(tmp_path), **options)
        return VocAgnoTrainer(str(world.student), args, None, world.rows())

    trainer(1).train()
    for name in ("manifest.json", "README.md"):
        (tmp_path / name).write_text(json.dumps({"files": {"log.jsonl": 0}}))
    (tmp_path / "log.jsonl").write_text("")
    steps = run_directory.step_of(run_directory.checkpoints(tmp_path)[0])
    longer = trainer(2)
    assert run_directory.is_finished(tmp_path)
    assert not run_directory.find_start(tmp_path, longer.settings, None)[1]
    longer.train(resume_from_checkpoint=True)
    assert longer.state.global_step == 2 * steps
    assert not run_directory.is_finished(tmp_path)


STABLE: dict[str, Any] = {"num_decay_steps": 4}
# Schedule, its settings, warm-up, steps made, and other changes.
PASTS: list[tuple[str, Any, float, int, dict[str, Any]]] = [
    ("constant", None, 0, 20, {}),
    ("constant_with_warmup", None, 3, 20, {}),
    ("constant_with_warmup", None, 0.1, 20, {}),
    ("warmup_stable_decay", STABLE, 3, 16, {}),
    ("warmup_stable_decay", STABLE, 3, 17, {}),
    ("cosine", None, 0, 20, {}),
    ("cosine", None, 5, 4, {}),
    ("linear", None, 0, 1, {}),
    ("constant", None, 0, 20, {"num_train_epochs": 2.0}),
    ("cosine", None, 0, 20, {"num_train_epochs": 2.0}),
]


def rates(name: str, kwargs: Any, warmup: float, steps: int, done: int) -> list[float]:
    """The learning rate of each step up to the next one, by making them."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1e-3)
    first = int(warmup) if warmup >= 1 else -int(-(steps * warmup) // 1)
    schedule = get_scheduler(name, optimizer, first, steps, kwargs)
    found = [optimizer.param_groups[0]["lr"]]
    for _ in range(done):
        optimizer.step()
        schedule.step()
        found.append(optimizer.param_groups[0]["lr"])
    return found


@pytest.mark.parametrize("past", PASTS)
def test_run_goes_on_when_its_past_stays(past: Any, tmp_path: Path) -> None:
    name, kwargs, warmup, done, change = past
    state = {"global_step": done, "max_steps": 20}
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    before = {"max_steps": 20, "num_train_epochs": 1.0, "learning_rate": 1e-3, "seed": 1}
    before |= {"lr_scheduler_type": name, "lr_scheduler_kwargs": kwargs, "warmup_steps": warmup}
    now = {**before, "max_steps": 40, "extend": None}
    if change:
        before["max_steps"] = now["max_steps"] = -1
    now |= change
    short, long = (rates(name, kwargs, warmup, steps, done) for steps in (20, 40))
    found = changes_of(before, now, tmp_path)
    assert ["extend" in text for text in found] == [True] * (short != long)
    assert changes_of(before, {**now, "extend": True}, tmp_path) == []
    # Anything else keeps it from going on.
    assert len(changes_of(before, {**now, "extend": True, "seed": 2}, tmp_path)) == 1


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"max_steps": 12}, "max_steps was 20, now 12"),
        ({"max_steps": 30, "top_k_warmup_steps": 0.5}, "extend"),
        ({"max_steps": 30, "top_k_warmup_steps": 5}, ""),
    ],
)
def test_other_lengths(change: dict[str, Any], word: str, tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text('{"global_step": 20, "max_steps": 20}')
    before = {"max_steps": 20, "num_train_epochs": 1.0, "learning_rate": 1.0, "warmup_steps": 0}
    before |= {"lr_scheduler_type": "constant", "lr_scheduler_kwargs": None}
    before |= {"top_k_warmup_steps": change.get("top_k_warmup_steps", 0)}
    found = changes_of(before, before | change, tmp_path)
    assert len(found) == bool(word)
    assert word in "".join(found)
    if not word:
        epochs = {**before, "max_steps": -1}
        assert changes_of(epochs, {**before, "max_steps": 20}, tmp_path)[0].startswith("max_steps")
