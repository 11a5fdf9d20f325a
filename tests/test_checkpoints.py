"""Which checkpoint a run resumes from, and under which settings."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vocagnolm.checkpoints import (
    SETTINGS_FILE,
    check_settings,
    checkpoint_fault,
    find_checkpoint,
    is_finished,
    resolve,
    write_settings,
)


def make_checkpoint(run: Path, step: int) -> Path:
    path = run / f"checkpoint-{step}"
    path.mkdir(parents=True)
    save_file({"weight": torch.zeros(64, 64)}, path / "model.safetensors")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        torch.save({"state": torch.zeros(100)}, path / name)
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return path


def make_final_model(run: Path) -> None:
    save_file({"weight": torch.zeros(64, 64)}, run / "model.safetensors")
    (run / "trainer_state.json").write_text('{"global_step": 5, "max_steps": 5}')
    (run / "README.md").write_text("# how it was made")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def make_sharded_weights(path: Path) -> None:
    (path / "model.safetensors").unlink()
    names = [f"model-0000{shard}-of-00002.safetensors" for shard in (1, 2)]
    for name in names:
        save_file({name: torch.zeros(8)}, path / name)
    index = {"weight_map": {name: name for name in names}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def lose_a_shard(path: Path) -> None:
    make_sharded_weights(path)
    (path / "model-00002-of-00002.safetensors").unlink()


def break_the_index(path: Path) -> None:
    make_sharded_weights(path)
    (path / "model.safetensors.index.json").write_text("{oops")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "absent": (shutil.rmtree, "no such directory"),
    "sentinel": (
        lambda path: (path / "checkpoint-is-incomplete.txt").touch(),
        "it was not finished",
    ),
    "no state": (
        lambda path: (path / "trainer_state.json").unlink(),
        "trainer_state.json is missing or damaged",
    ),
    "state cut": (
        lambda path: (path / "trainer_state.json").write_text('{"global_st'),
        "trainer_state.json is missing or damaged",
    ),
    "state empty": (
        lambda path: (path / "trainer_state.json").write_text(""),
        "trainer_state.json is missing or damaged",
    ),
    "state list": (
        lambda path: (path / "trainer_state.json").write_text("[]"),
        "trainer_state.json is missing or damaged",
    ),
    "state null": (
        lambda path: (path / "trainer_state.json").write_text("null"),
        "trainer_state.json is missing or damaged",
    ),
    "state without step": (
        lambda path: (path / "trainer_state.json").write_text("{}"),
        "trainer_state.json is missing or damaged",
    ),
    "state bytes": (
        lambda path: (path / "trainer_state.json").write_bytes(b"\xff\xfe"),
        "trainer_state.json is missing or damaged",
    ),
    "no weights": (
        lambda path: (path / "model.safetensors").unlink(),
        "it holds no weights",
    ),
    "weights cut": (
        lambda path: truncate(path / "model.safetensors"),
        "model.safetensors is missing or damaged",
    ),
    "weights empty": (
        lambda path: (path / "model.safetensors").write_bytes(b""),
        "model.safetensors is missing or damaged",
    ),
    "shard lost": (lose_a_shard, "model-00002-of-00002.safetensors is missing or damaged"),
    "index broken": (break_the_index, "model.safetensors.index.json is missing or damaged"),
} | {
    f"{name} {damage}": (
        lambda path, name=name, change=change: change(path / name),  # type: ignore[misc]
        f"{name} is missing or damaged",
    )
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth")
    for damage, change in (
        ("missing", Path.unlink),
        ("empty", lambda path: path.write_bytes(b"")),
        ("cut", truncate),
        ("zeros", lambda path: path.write_bytes(bytes(500))),
    )
    if (name, damage) != ("rng_state.pth", "missing")  # Trainer goes on with a warning
}


def make_fsdp_checkpoint(run: Path, step: int) -> Path:
    path = make_checkpoint(run, step)
    for name in ("model.safetensors", "optimizer.pt"):
        (path / name).unlink()
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        (path / name).mkdir()
        (path / name / ".metadata").touch()
    return path


# Finding


def test_checkpoint_fault_finds_nothing_when_the_checkpoint_is_whole(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, 3)
    assert checkpoint_fault(path) is None
    make_sharded_weights(path)
    assert checkpoint_fault(path) is None
    assert checkpoint_fault(make_fsdp_checkpoint(tmp_path, 4)) is None


@pytest.mark.parametrize("damage", DAMAGES)
def test_checkpoint_fault_says_what_is_wrong_when_damaged(tmp_path: Path, damage: str) -> None:
    path = make_checkpoint(tmp_path, 3)
    change, fault = DAMAGES[damage]
    change(path)
    assert checkpoint_fault(path) == fault


@pytest.mark.parametrize("kind", ["pytorch_model_fsdp", "optimizer"])
def test_checkpoint_fault_says_which_shards_are_not_complete_when_fsdp(
    tmp_path: Path, kind: str
) -> None:
    path = make_fsdp_checkpoint(tmp_path, 4)
    (path / f"{kind}_0" / ".metadata").unlink()
    assert checkpoint_fault(path) == f"{kind}_* is not complete"


def test_find_checkpoint_gives_the_newest_when_all_are_good(tmp_path: Path) -> None:
    for step in (2, 10, 9):
        make_checkpoint(tmp_path, step)
    (tmp_path / "checkpoint-99").touch()  # a file
    (tmp_path / "checkpoint-best").mkdir()
    assert find_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")


@pytest.mark.parametrize("damage", [name for name in DAMAGES if name != "absent"])
def test_find_checkpoint_skips_the_newest_with_a_warning_when_damaged(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = make_checkpoint(tmp_path, 5), make_checkpoint(tmp_path, 6)
    change, fault = DAMAGES[damage]
    change(bad)
    with caplog.at_level(logging.WARNING, logger="vocagnolm.checkpoints"):
        assert find_checkpoint(tmp_path) == str(good)
    assert caplog.messages == [f"not resuming from {bad}: {fault}"]


def test_find_checkpoint_gives_none_when_there_is_no_good_one(tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path) is None
    assert find_checkpoint(tmp_path / "absent") is None
    (make_checkpoint(tmp_path, 1) / "optimizer.pt").unlink()
    assert find_checkpoint(tmp_path) is None


@pytest.mark.parametrize("option", ["auto", None])
def test_resolve_finds_the_newest_when_not_told_which(tmp_path: Path, option: str | None) -> None:
    assert resolve(option, tmp_path) is None
    path = make_checkpoint(tmp_path, 7)
    assert resolve(option, tmp_path) == str(path)


def test_resolve_takes_the_given_path_when_it_is_good(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, 7)
    make_checkpoint(tmp_path, 8)
    assert resolve(str(path), tmp_path) == str(path)


@pytest.mark.parametrize("damage", DAMAGES)
def test_resolve_refuses_the_given_path_when_it_is_damaged(tmp_path: Path, damage: str) -> None:
    make_checkpoint(tmp_path, 8)  # a good one beside it changes nothing
    path = make_checkpoint(tmp_path, 7)
    change, fault = DAMAGES[damage]
    change(path)
    expected = f"--resume_from_checkpoint {path}: {fault}"
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        resolve(str(path), tmp_path)


@pytest.mark.parametrize(
    ("state", "finished"),
    [
        ({"global_step": 5, "max_steps": 5}, True),
        ({"global_step": 4, "max_steps": 5}, False),
        ({"global_step": 5}, False),
    ],
)
def test_is_finished_compares_the_steps_when_everything_is_there(
    tmp_path: Path, state: dict[str, int], finished: bool
) -> None:
    make_final_model(tmp_path)
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    assert is_finished(tmp_path) is finished


@pytest.mark.parametrize("missing", ["model.safetensors", "README.md", "trainer_state.json"])
def test_is_finished_says_no_when_a_file_is_missing(tmp_path: Path, missing: str) -> None:
    make_final_model(tmp_path)
    assert is_finished(tmp_path)
    (tmp_path / missing).unlink()
    assert not is_finished(tmp_path)


def test_is_finished_says_no_when_the_weights_are_cut_off(tmp_path: Path) -> None:
    make_final_model(tmp_path)
    truncate(tmp_path / "model.safetensors")
    assert not is_finished(tmp_path)


# Settings


def test_check_settings_accepts_when_nothing_changed(tmp_path: Path) -> None:
    settings = {"top_k": 0.4, "kwargs": {"a": (1, 2)}, "teacher": None}
    check_settings(tmp_path / "run", settings)  # there is none yet
    write_settings(tmp_path / "run", settings)
    check_settings(tmp_path / "run", settings)
    assert [path.name for path in (tmp_path / "run").iterdir()] == [SETTINGS_FILE]


def test_check_settings_lists_every_difference_when_settings_changed(tmp_path: Path) -> None:
    write_settings(tmp_path, {"top_k": 0.4, "seed": 1, "old": "x", "same": 5})
    check_settings(tmp_path, {"top_k": 0.5})  # nothing has been saved that could be lost
    make_checkpoint(tmp_path, 1)
    expected = (
        f"{tmp_path} holds a run with other settings (--new was None, now y; "
        "--top_k was 0.4, now 0.5): give another --output_dir"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        check_settings(tmp_path, {"top_k": 0.5, "seed": 1, "new": "y", "same": 5})


@pytest.mark.parametrize("content", [b"", b"{oops", b"[]", b"null", b'"text"', b"\xff\xfe"])
def test_check_settings_refuses_when_its_file_is_damaged(tmp_path: Path, content: bytes) -> None:
    (tmp_path / SETTINGS_FILE).write_bytes(content)
    make_checkpoint(tmp_path, 1)
    expected = f"{tmp_path / SETTINGS_FILE} is damaged: give another --output_dir"
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        check_settings(tmp_path, {"top_k": 0.4})


@pytest.mark.parametrize("below", ["", "sub/run"])
def test_check_settings_refuses_when_the_directory_is_a_file(tmp_path: Path, below: str) -> None:
    file = tmp_path / "file"
    file.write_text("precious")
    expected = f"--output_dir {file / below}: {file} is a file, not a directory"
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        check_settings(file / below, {})
    assert file.read_text() == "precious"
