"""Which checkpoint a run resumes from, and under which settings."""

from __future__ import annotations

import json
import logging
import os
import pickle
import random
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from manifests import change_manifest
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import Metadata

from vocagnolm.host import manifest
from vocagnolm.host.manifest import (
    MANIFEST_FILE,
    read_manifest,
    written_files,
)
from vocagnolm.host.settings import RUN_FILE, check_settings, origin_fault, write_settings
from vocagnolm.io import write_json
from vocagnolm.run import checkpoints
from vocagnolm.run.checkpoints import (
    change_of_processes,
    checkpoint_fault,
    find_checkpoint,
    finish,
    is_finished,
    make_room,
    resolve,
    rotate,
)

FILES = ("optimizer.pt", "scheduler.pt", "rng_state.pth", "metrics_0.safetensors")


def write_checkpoint(path: Path, step: int) -> None:
    """What is there before the manifest."""
    path.mkdir(parents=True)
    save_file({"weight": torch.full((64, 64), float(step))}, path / "model.safetensors")
    for name in FILES:
        torch.save({"state": torch.full((100,), float(step))}, path / name)
    shards = path / "pytorch_model_fsdp_0"  # of FSDP, in a directory of their own
    shards.mkdir()
    (shards / ".metadata").write_bytes(pickle.dumps(Metadata({})))
    torch.save({"state": torch.zeros(10)}, shards / "__0_0.distcp")
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))


def make_checkpoint(run: Path, step: int) -> Path:
    path = run / f"checkpoint-{step}"
    write_checkpoint(path, step)
    finish(path, step, 1, FILES)
    return path


def make_final_model(run: Path) -> None:
    save_file({"weight": torch.zeros(64, 64)}, run / "model.safetensors")
    (run / "trainer_state.json").write_text('{"global_step": 5, "max_steps": 5}')
    (run / "README.md").write_text("# how it was made")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def put_other(path: Path, name: str) -> None:
    """The file of the checkpoint of another step."""
    other = path.with_name("checkpoint-1")
    if not other.exists():
        write_checkpoint(other, 1)
    shutil.copy(other / name, path / name)
    shutil.rmtree(other)


STATE_FAULT = "trainer_state.json is missing or damaged"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "absent": (shutil.rmtree, "no such directory"),
    "unfinished": (
        lambda path: (path / MANIFEST_FILE).unlink(),
        "it has no manifest.json, so it was not finished or is another tool's",
    ),
    "manifest cut": (lambda path: truncate(path / MANIFEST_FILE), "manifest.json is damaged"),
    "manifest empty": (
        lambda path: (path / MANIFEST_FILE).write_bytes(b""),
        "manifest.json is damaged",
    ),
    "manifest list": (
        lambda path: (path / MANIFEST_FILE).write_text("[]"),
        "manifest.json is damaged",
    ),
    "manifest without files": (
        lambda path: change_manifest(path, files=None),
        "manifest.json is damaged",
    ),
    "manifest of odd files": (
        lambda path: change_manifest(path, files=[{"file": "a", "bytes": "many"}]),
        "manifest.json is damaged",
    ),
    "manifest of files elsewhere": (
        lambda path: change_manifest(path, files=[{"file": "../a", "bytes": 1, "sha256": "0"}]),
        "manifest.json is damaged",
    ),
    "manifest with another number": (
        lambda path: (path / MANIFEST_FILE).write_text(
            (path / MANIFEST_FILE).read_text().replace('"world_size": 1', '"world_size": 2')
        ),
        "manifest.json is damaged: it does not match its own checksum",
    ),
    "manifest of the future": (
        lambda path: change_manifest(path, format=2),
        "manifest.json has format 2, not 1",
    ),
    "manifest of another step": (
        lambda path: change_manifest(path, step=2),
        "manifest.json is of step 2, trainer_state.json of step {step}",
    ),
    "state of another step": (
        lambda path: put_other(path, "trainer_state.json"),
        "manifest.json is of step {step}, trainer_state.json of step 1",
    ),
    "no state": (lambda path: (path / "trainer_state.json").unlink(), STATE_FAULT),
    "state cut": (
        lambda path: (path / "trainer_state.json").write_text('{"global_st'),
        STATE_FAULT,
    ),
    "state null": (lambda path: (path / "trainer_state.json").write_text("null"), STATE_FAULT),
    "state without step": (
        lambda path: (path / "trainer_state.json").write_text("{}"),
        STATE_FAULT,
    ),
    "state bytes": (
        lambda path: (path / "trainer_state.json").write_bytes(b"\xff\xfe"),
        STATE_FAULT,
    ),
    "state changed": (
        lambda path: (path / "trainer_state.json").open("a").write(" "),
        "trainer_state.json has 19 bytes instead of 18",
    ),
    "extra random state": (
        lambda path: (path / "rng_state_1.pth").write_bytes(b"of two processes"),
        "rng_state_1.pth does not belong to it",
    ),
    "extra weights": (
        lambda path: (path / "pytorch_model_fsdp_0" / "__1_0.distcp").write_bytes(b"others"),
        "pytorch_model_fsdp_0/__1_0.distcp does not belong to it",
    ),
} | {
    f"{name} {damage}": (
        lambda path, name=name, change=change: change(path / name),  # type: ignore[misc]
        f"{name} {fault}",
    )
    for name in ("model.safetensors", *FILES, "pytorch_model_fsdp_0/__0_0.distcp")
    for damage, change, fault in (
        ("missing", Path.unlink, "is missing"),
        ("empty", lambda path: path.write_bytes(b""), "has 0 bytes instead of "),
        ("cut", truncate, "has "),
        ("flipped", flip, "does not match its checksum"),
        ("foreign", lambda path: put_other(path.parent, path.name), "does not match its checksum"),
    )
    if "fsdp" not in name or damage != "foreign"  # empty in all
}


# Finding


def test_checkpoint_fault_passes_a_whole_checkpoint(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, 3)
    assert checkpoint_fault(path) is None
    said = json.loads((path / MANIFEST_FILE).read_text())
    assert (said["format"], said["step"], said["world_size"]) == (1, 3, 1)
    assert "pytorch_model_fsdp_0/.metadata" in {entry["file"] for entry in said["files"]}
    # Elsewhere, and with what an evaluation leaves in it.
    path = path.rename(tmp_path / "kept")
    (path / "evaluation").mkdir()
    (path / "evaluation" / "results.json").touch()
    (path / ".nfs0001").touch()
    assert checkpoint_fault(path) is None


def use_former_layout(path: Path) -> None:
    """Write the manifest as version 0.1 did."""
    said = read_manifest(path)
    files = {e["file"]: {"bytes": e["bytes"], "sha256": e["sha256"]} for e in said["files"]}
    write_json(path / MANIFEST_FILE, said | {"files": files})


@pytest.mark.parametrize("damage", [None, *(name for name in DAMAGES if "manifest" not in name)])
def test_checkpoint_of_the_former_layout_is_read(tmp_path: Path, damage: str | None) -> None:
    path = make_checkpoint(tmp_path, 3)
    use_former_layout(path)
    change, fault = DAMAGES[damage] if damage else (lambda path: None, "")
    change(path)
    assert (checkpoint_fault(path) or "").startswith(fault.format(step=3))
    assert damage or find_checkpoint(tmp_path) == str(path)


@pytest.mark.parametrize("files", [{"a": {"bytes": "many"}}, {"a": 3}, {"a": {"sha256": "0"}}, {}])
def test_former_layout_is_refused_when_it_is_damaged(tmp_path: Path, files: object) -> None:
    path = make_checkpoint(tmp_path, 3)
    write_json(path / MANIFEST_FILE, read_manifest(path) | {"files": files})
    expected = "manifest.json is damaged" if files else "model.safetensors does not belong to it"
    assert expected in str(checkpoint_fault(path)) or not files


@pytest.mark.parametrize("damage", DAMAGES)
def test_checkpoint_fault_says_what_is_wrong_when_damaged(tmp_path: Path, damage: str) -> None:
    path = make_checkpoint(tmp_path, 3)
    change, fault = DAMAGES[damage]
    change(path)
    assert (checkpoint_fault(path) or "").startswith(fault.format(step=3))


@pytest.mark.stress("checkpoints: damaged at random", "refused with the reason")
def test_checkpoint_fault_finds_damage_anywhere(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    path, times = make_checkpoint(tmp_path, 3), int(os.environ.get("VOCAGNOLM_DAMAGES", "60"))
    record_property("times", times)
    rng = random.Random(int(os.environ.get("VOCAGNOLM_SEED", "0")))
    whole = {file: file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}
    for _ in range(times):
        file = rng.choice(list(whole))
        data = whole[file]
        at, bit = rng.randrange(len(data)), 1 << rng.randrange(8)
        harm = rng.choice((data[:at], data + bytes(1), data[:at] + data[at + 1 :], None))
        file.write_bytes(harm or data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :])
        assert checkpoint_fault(path), (file, at)
        file.write_bytes(data)
    assert checkpoint_fault(path) is None


class Evil:
    """A pickle that writes a file as it is loaded."""

    def __init__(self, canary: Path):
        self.canary = canary

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.write_text, (self.canary, "run")


INDEX = "pytorch_model_fsdp_0/.metadata"


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth", INDEX])
def test_evil_pickle_is_not_run_and_older_taken(name: str, tmp_path: Path) -> None:
    older, newest = (make_checkpoint(tmp_path / "run", step) for step in (3, 4))
    canary, crafted = tmp_path / "canary", newest / name
    if name == INDEX:
        crafted.write_bytes(pickle.dumps(Evil(canary)))
        fault = f"it cannot be read ({crafted} is no index of shards (an index has no "
    else:
        torch.save(Evil(canary), crafted)
        fault = f"{name} is no saved state ("
    finish(newest, 4, 1, FILES)
    assert str(checkpoint_fault(newest)).startswith(fault)
    assert find_checkpoint(tmp_path / "run") == str(older)
    assert not canary.exists()


@pytest.mark.parametrize(
    "crafted",
    [
        {"log_history": "text"},
        {"log_history": [{"loss": 1.0}]},
        {"log_history": [{"step": 1, "loss": "low"}]},
        {"log_history": ["text"]},
        {"a field of no state": 1},
    ],
)
def test_crafted_state_is_refused_and_older_taken(crafted: object, tmp_path: Path) -> None:
    older, newest = (make_checkpoint(tmp_path, step) for step in (3, 4))
    (newest / "trainer_state.json").write_text(json.dumps({"global_step": 4, **crafted}))
    finish(newest, 4, 1, FILES)
    assert checkpoint_fault(newest) == STATE_FAULT
    assert find_checkpoint(tmp_path) == str(older)


def test_checkpoint_fault_names_the_step_of_renamed_checkpoints(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, 3).rename(tmp_path / "checkpoint-4")
    assert checkpoint_fault(path) == "manifest.json is of step 3, its name of step 4"


def test_checkpoint_fault_reports_what_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, told = make_checkpoint(tmp_path, 3), []
    assert checkpoint_fault(path, told.append) is None
    assert told == []
    monkeypatch.setattr(checkpoints, "_LARGE_BYTES", 1000)
    assert checkpoint_fault(path, told.append) is None
    assert told == [f"checking the 0.0 GB of {path}"]


def test_find_checkpoint_gives_the_newest(tmp_path: Path) -> None:
    for step in (2, 10, 9):
        make_checkpoint(tmp_path, step)
    (tmp_path / "checkpoint-99").touch()  # a file
    (tmp_path / "checkpoint-best").mkdir()
    assert find_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")


@pytest.mark.stress(
    "checkpoints: every kind of damage to every file",
    "refused with the reason; the older one is taken",
)
@pytest.mark.parametrize("damage", [name for name in DAMAGES if name != "absent"])
def test_find_checkpoint_skips_a_damaged_newest_with_warning(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = make_checkpoint(tmp_path, 5), make_checkpoint(tmp_path, 6)
    change, fault = DAMAGES[damage]
    change(bad)
    with caplog.at_level(logging.WARNING, logger="vocagnolm.run.checkpoints"):
        assert find_checkpoint(tmp_path) == str(good)
    (message,) = caplog.messages
    assert message.startswith(f"not resuming from {bad}: {fault.format(step=6)}")


def test_find_checkpoint_gives_none_without_good_ones(tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path) is None
    assert find_checkpoint(tmp_path / "absent") is None
    (make_checkpoint(tmp_path, 1) / "optimizer.pt").unlink()
    assert find_checkpoint(tmp_path) is None


# Writing


def test_finished_checkpoint_survives_a_second_save(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, 4)
    for _ in range(2):  # the first attempt is cut off
        make_room(path)
        assert not path.exists()
        aside = tmp_path / "checkpoint-4-replaced"
        assert find_checkpoint(tmp_path) == str(aside)
        write_checkpoint(path, 4)
        assert find_checkpoint(tmp_path) == str(aside)
    finish(path, 4, 1, FILES)
    assert find_checkpoint(tmp_path) == str(path)
    assert not aside.exists()


def test_finish_refuses_without_the_other_processes_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "checkpoint-4"
    write_checkpoint(path, 4)
    waits: list[float] = []
    monkeypatch.setattr(checkpoints.time, "sleep", waits.append)
    with pytest.raises(OSError, match=r"lacks metrics_1.safetensors.*that all machines share"):
        finish(path, 4, 2, ["metrics_0.safetensors", "metrics_1.safetensors"])
    assert sum(waits) == 60
    assert find_checkpoint(tmp_path) is None


@pytest.mark.parametrize(
    ("limit", "best", "left"),
    [
        (None, None, [1, 2, 3, 4, 5]),
        (0, None, [1, 2, 3, 4, 5]),
        (1, None, [5]),
        (2, None, [4, 5]),  # 3 is not finished
        (3, None, [2, 4, 5]),
        (1, "checkpoint-2", [2, 5]),
        (2, "checkpoint-1", [1, 5]),
        (2, "checkpoint-5", [4, 5]),
        (2, "checkpoint-9", [4, 5]),
    ],
)
def test_rotate_keeps_the_newest_and_the_best(
    limit: int | None, best: str | None, left: list[int], tmp_path: Path
) -> None:
    paths = [make_checkpoint(tmp_path, step) for step in (1, 2, 3, 4, 5)]
    (paths[2] / MANIFEST_FILE).unlink()
    rotate(paths[-1], limit, str(tmp_path / best) if best else None)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"checkpoint-{n}" for n in left]


def test_rotate_keeps_the_last_save_beside_damaged_steps(tmp_path: Path) -> None:
    older, newest, later = (make_checkpoint(tmp_path, step) for step in (2, 3, 6))
    flip(later / "model.safetensors")
    rotate(newest, 1, None)
    assert find_checkpoint(tmp_path) == str(newest)
    assert not older.exists()


def test_rotate_leaves_what_is_not_the_runs(tmp_path: Path) -> None:
    for step in (1, 2):
        make_checkpoint(tmp_path, step)
    elsewhere = make_checkpoint(tmp_path / "disk", 3)
    (tmp_path / "checkpoint-3").symlink_to(elsewhere)
    plain = make_checkpoint(tmp_path, 4)  # of transformers alone
    for name in (MANIFEST_FILE, "metrics_0.safetensors"):
        (plain / name).unlink()
    for step in (5, 6):  # cut off early and late
        (make_checkpoint(tmp_path, step) / MANIFEST_FILE).unlink()
    (tmp_path / "checkpoint-5" / "trainer_state.json").unlink()
    rotate(make_checkpoint(tmp_path, 7), 1, None)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["checkpoint-4", "checkpoint-7", "disk"]
    assert checkpoint_fault(elsewhere) is None


def test_make_room_removes_only_the_link(tmp_path: Path) -> None:
    elsewhere = make_checkpoint(tmp_path / "disk", 3)
    (elsewhere / MANIFEST_FILE).unlink()
    link = tmp_path / "checkpoint-3"
    link.symlink_to(elsewhere)
    make_room(link)
    assert not link.is_symlink()
    assert (elsewhere / "model.safetensors").exists()


def test_checkpoint_with_a_late_listed_file_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "checkpoint-4"
    write_checkpoint(path, 4)
    late = "pytorch_model_fsdp_0/__0_0.distcp"
    names = written_files(path)
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "written_files", lambda directory: names - {late})
        finish(path, 4, 1, sorted(names))
    assert checkpoint_fault(path) is None


def test_change_of_processes_says_what_differs(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, 3)
    assert change_of_processes(path, 1) is None
    assert f"{path} was saved by 1 processes and goes on in 4: " in str(
        change_of_processes(path, 4)
    )


@pytest.mark.parametrize("option", ["auto", None])
def test_resolve_finds_the_newest_when_not_told_which(tmp_path: Path, option: str | None) -> None:
    assert resolve(option, tmp_path) is None
    path = make_checkpoint(tmp_path, 7)
    assert resolve(option, tmp_path) == str(path)


def test_resolve_takes_the_given_path_without_later_steps(tmp_path: Path) -> None:
    path, run = make_checkpoint(tmp_path / "other", 7), tmp_path / "run"
    assert resolve(str(path), run) == str(path)
    make_checkpoint(run, 6)
    assert resolve(str(path), run) == str(path)
    later, told = make_checkpoint(run, 8), []
    assert resolve(str(path), run, told.append) == str(later)
    assert told == [f"{later} is newer than --resume_from_checkpoint {path}"]
    shutil.rmtree(path)  # as rotation does where it is one of the run's own
    assert resolve(str(path), run) == str(later)
    flip(later / "model.safetensors")
    with pytest.raises(ValueError, match="no such directory"):
        resolve(str(path), run)


@pytest.mark.parametrize("damage", DAMAGES)
def test_resolve_rejects_a_damaged_given_path(tmp_path: Path, damage: str) -> None:
    make_checkpoint(tmp_path / "run", 6)  # a good one changes nothing
    path = make_checkpoint(tmp_path, 7)
    change, fault = DAMAGES[damage]
    change(path)
    expected = f"--resume_from_checkpoint {path}: {fault.format(step=7)}"
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}"):
        resolve(str(path), tmp_path / "run")


def test_checkpoint_with_other_settings_is_skipped_or_rejected(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_settings(tmp_path / "other", {"top_k": 0.4, "seed": 1})
    foreign = make_checkpoint(tmp_path / "other", 7)
    assert origin_fault(foreign, {"top_k": 0.4}, {}) is None
    origin = partial(origin_fault, settings={"top_k": 0.6, "new": 1}, defaults={"new": 1})
    fault = "it is of a run with other settings (--top_k was 0.4, now 0.6)"
    with pytest.raises(ValueError, match=re.escape(fault)):
        resolve(str(foreign), tmp_path / "run", origin=origin)
    shutil.copytree(foreign, tmp_path / "run" / "checkpoint-7")
    own = make_checkpoint(tmp_path / "run", 6)  # does not say whose it is
    with caplog.at_level(logging.WARNING, logger="vocagnolm.run.checkpoints"):
        assert resolve("auto", tmp_path / "run", origin=origin) == str(own)
    assert caplog.messages == [f"not resuming from {tmp_path / 'run' / 'checkpoint-7'}: {fault}"]


def test_older_checkpoint_replaces_an_unreadable_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = make_checkpoint(tmp_path, 5), make_checkpoint(tmp_path, 6)
    read = manifest.file_sha256

    def fail_on_newest(path: Path, **options: Any) -> str:
        if path.parent == bad:
            raise OSError(5, "Input/output error", str(path))
        return read(path, **options)

    monkeypatch.setattr(manifest, "file_sha256", fail_on_newest)
    assert "it cannot be read ([Errno 5]" in str(checkpoint_fault(bad))
    assert find_checkpoint(tmp_path) == str(good)


@pytest.mark.parametrize(
    ("state", "finished"),
    [
        ({"global_step": 5, "max_steps": 5}, True),
        ({"global_step": 4, "max_steps": 5}, False),
        ({"global_step": 5}, False),
    ],
)
def test_is_finished_compares_the_steps(
    tmp_path: Path, state: dict[str, int], finished: bool
) -> None:
    make_final_model(tmp_path)
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    assert is_finished(tmp_path) is finished


@pytest.mark.parametrize("missing", ["model.safetensors", "README.md", "trainer_state.json"])
def test_is_finished_denies_when_a_file_is_missing(tmp_path: Path, missing: str) -> None:
    make_final_model(tmp_path)
    assert is_finished(tmp_path)
    (tmp_path / missing).unlink()
    assert not is_finished(tmp_path)


def test_is_finished_denies_when_weights_are_truncated(tmp_path: Path) -> None:
    make_final_model(tmp_path)
    truncate(tmp_path / "model.safetensors")
    assert not is_finished(tmp_path)


# Settings


def test_check_settings_accepts_when_nothing_changed(tmp_path: Path) -> None:
    settings = {"top_k": 0.4, "kwargs": {"a": (1, 2)}, "teacher": None}
    check_settings(tmp_path / "run", settings)  # there is none yet
    write_settings(tmp_path / "run", settings)
    check_settings(tmp_path / "run", settings)
    assert [path.name for path in (tmp_path / "run").iterdir()] == [RUN_FILE]


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
    (tmp_path / RUN_FILE).write_bytes(content)
    make_checkpoint(tmp_path, 1)
    expected = f"{tmp_path / RUN_FILE} is damaged: give another --output_dir"
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        check_settings(tmp_path, {"top_k": 0.4})


@pytest.mark.parametrize("below", ["", "sub/run"])
def test_check_settings_rejects_a_file_as_directory(tmp_path: Path, below: str) -> None:
    file = tmp_path / "file"
    file.write_text("precious")
    expected = f"--output_dir {file / below}: {file} is a file, not a directory"
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        check_settings(file / below, {})
    assert file.read_text() == "precious"
