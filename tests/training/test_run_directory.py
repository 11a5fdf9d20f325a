"""Which checkpoint a run resumes from, and under which settings."""

from __future__ import annotations

import json
import logging
import re
import shutil
from pathlib import Path

import pytest
from kills import Killed, kill_at

from vocagnolm.shell.io import MANIFEST_FILE, RUN_FILE, write_json
from vocagnolm.training import run_directory
from vocagnolm.training.run_directory import (
    check_settings,
    checkpoint_fault,
    finish_checkpoint,
    finish_run,
    is_finished,
    newest_checkpoint,
    resolve,
    rotate,
    sizes,
)

FILES = ("model.safetensors", "optimizer.pt", "pytorch_model_fsdp_0/.metadata")


def stage(run: Path, step: int) -> tuple[Path, Path]:
    """Write what all processes save; return its place and the place it will be moved to."""
    name = f"checkpoint-{step}"
    staged = run / ".saving" / name
    for file in FILES:
        (staged / file).parent.mkdir(parents=True, exist_ok=True)
        (staged / file).write_bytes(bytes(1000 + step))
    (staged / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return staged, run / name


def make_checkpoint(run: Path, step: int, **settings: object) -> Path:
    staged, final = stage(run, step)
    finish_checkpoint(staged, final, {"world_size": 1, "run": settings}, sizes(staged))
    return final


def cut(path: Path, size: int | None) -> None:
    """Leave the first bytes of a file, or no file."""
    whole = path.read_bytes()
    path.unlink()
    if size is not None:
        path.write_bytes(whole[:size])


UNFINISHED = "it has no manifest.json"
# A file of a checkpoint, how many of its bytes are left, and the fault.
DAMAGES = [
    (MANIFEST_FILE, None, UNFINISHED),
    (MANIFEST_FILE, 30, UNFINISHED),
    ("trainer_state.json", None, "trainer_state.json is missing"),
    (FILES[0], 907, "model.safetensors has 907 bytes instead"),
    (FILES[2], 0, f"{FILES[2]} has 0 bytes"),
]


@pytest.mark.parametrize(("file", "size", "fault"), DAMAGES)
def test_damaged_checkpoint_gives_way_to_an_older_one(
    file: str, size: int | None, fault: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = make_checkpoint(tmp_path, 5), make_checkpoint(tmp_path, 7)
    assert newest_checkpoint(tmp_path) == str(bad)
    cut(bad / file, size)
    with caplog.at_level(logging.WARNING, logger="vocagnolm.training"):
        assert newest_checkpoint(tmp_path) == str(good)
    assert caplog.messages[0].startswith(f"not resuming from {bad}: {fault}")
    with pytest.raises(ValueError, match=f"^resume_from_checkpoint {bad}: {re.escape(fault)}"):
        resolve(str(bad), tmp_path / "elsewhere")


def test_newest_checkpoint_is_that_of_the_largest_step(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path / "absent") is None
    for step in (2, 10, 9):
        make_checkpoint(tmp_path, step)
    (tmp_path / "checkpoint-99").touch()  # a file
    (tmp_path / "checkpoint-best").mkdir()
    assert newest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")


def test_path_is_resumed_from_until_a_later_step_is_saved(tmp_path: Path) -> None:
    run, path = tmp_path / "run", make_checkpoint(tmp_path, 7).rename(tmp_path / "named")
    for option in ("auto", None):
        assert resolve(option, run) is None
    make_checkpoint(run, 6)
    assert resolve(str(path), run) == str(path)
    later = make_checkpoint(run, 8)
    assert resolve(str(path), run) == resolve("auto", run) == str(later)
    shutil.rmtree(path)
    assert resolve(str(path), run) == str(later)
    with pytest.raises(ValueError, match="no such directory"):
        resolve(str(path), tmp_path / "elsewhere")


def test_checkpoint_of_other_settings_is_skipped_or_rejected(tmp_path: Path) -> None:
    own = make_checkpoint(tmp_path, 5, top_k=0.6, seed=1)
    # Without settings it may belong to any run.
    nameless = make_checkpoint(tmp_path, 6)
    assert checkpoint_fault(nameless) is None
    foreign = make_checkpoint(tmp_path, 7, top_k=0.4, seed=1)
    assert newest_checkpoint(tmp_path, {"top_k": 0.4}) == str(foreign)
    settings = {"top_k": 0.6, "seed": 1}
    assert newest_checkpoint(tmp_path, settings) == str(own)
    assert str(checkpoint_fault(foreign, settings)).endswith("(top_k was 0.4, now 0.6)")
    assert "lacks the settings" in str(checkpoint_fault(nameless, settings))


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("at", range(1, 11))
def test_checkpoint_survives_a_kill_of_a_second_save_of_its_step(
    at: int, before: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, 4)
    staged, final = stage(tmp_path, 4)
    files = sizes(staged)
    with monkeypatch.context() as patch:
        kill_at(patch, at, before=before)
        with pytest.raises(Killed):
            finish_checkpoint(staged, final, {}, files)
    assert newest_checkpoint(tmp_path) in (str(final), f"{final}-replaced")
    for _ in range(2):
        make_checkpoint(tmp_path, 4)
    assert [found.name for found in tmp_path.iterdir()] == ["checkpoint-4"]


def test_files_of_another_machine_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged, final = stage(tmp_path, 4)
    expected, waits = {**sizes(staged), "metrics_1.safetensors": 5}, []
    monkeypatch.setattr(run_directory.time, "sleep", waits.append)
    with pytest.raises(OSError, match=r"lacks metrics_1\.safetensors"):
        finish_checkpoint(staged, final, {}, expected)
    assert (sum(waits), newest_checkpoint(tmp_path)) == (60, None)

    def appears(seconds: float) -> None:
        (staged / "metrics_1.safetensors").write_bytes(b"12345")

    (staged.parent / ".nfs0001").touch()  # a leftover of another save does no harm
    monkeypatch.setattr(run_directory.time, "sleep", appears)
    finish_checkpoint(staged, final, {}, expected)
    assert newest_checkpoint(tmp_path) == str(final)


@pytest.mark.parametrize(
    ("limit", "best", "left"),
    [
        (None, None, [1, 2, 3, 4, 9]),
        (0, None, [1, 2, 3, 4, 9]),
        (1, None, [4]),
        (3, None, [3, 4, 9]),
        (1, "checkpoint-2", [2, 4]),
        (2, "checkpoint-1", [1, 4]),
        (2, "checkpoint-4", [4, 9]),
    ],
)
def test_rotation_keeps_the_last_save_and_the_best(
    limit: int | None, best: str | None, left: list[int], tmp_path: Path
) -> None:
    for step in (1, 2, 3, 9, 4):  # the run did not resume from 9, which is damaged
        newest = make_checkpoint(tmp_path, step)
    rotate(newest, limit, str(tmp_path / best) if best else None)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"checkpoint-{n}" for n in left]


def finish(run: Path) -> None:
    (run / "model.safetensors").write_bytes(bytes(200))
    (run / "trainer_state.json").write_text("{}")
    finish_run(run, ["model.safetensors"])
    (run / "README.md").write_text("# how it was made")


def test_run_is_finished_when_model_and_card_are_whole(tmp_path: Path) -> None:
    assert not is_finished(tmp_path / "absent")
    finish(tmp_path)
    (tmp_path / "README.md").write_text("a better card")
    assert is_finished(tmp_path)
    for name in (MANIFEST_FILE, "README.md"):
        (tmp_path / name).unlink()
        assert not is_finished(tmp_path)
        finish(tmp_path)
    cut(tmp_path / "model.safetensors", 100)
    with pytest.raises(ValueError, match=r"model.safetensors has 100 bytes .* and no checkpoint"):
        is_finished(tmp_path)
    # It is written again from a checkpoint.
    make_checkpoint(tmp_path, 3)
    assert not is_finished(tmp_path)


def test_directory_takes_runs_of_its_settings_only(tmp_path: Path) -> None:
    before = {"top_k": 0.4, "kwargs": {"a": (1, 2)}}
    check_settings(tmp_path / "run", before)
    write_json(tmp_path / RUN_FILE, before)
    check_settings(tmp_path, {"top_k": 0.5})  # nothing is saved that could be lost
    make_checkpoint(tmp_path, 1)
    check_settings(tmp_path, before)
    with pytest.raises(ValueError, match=r"top_k was 0\.4, now 0\.5"):
        check_settings(tmp_path, {**before, "top_k": 0.5})
