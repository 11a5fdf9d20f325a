"""What can be known is said before the corpus is aligned, and by a dry run as by the run."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from adapter_world import World
from huggingface_hub.errors import HTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled

from vocagnolm.io import duration
from vocagnolm.run import documents, estimates
from vocagnolm.run import main as train

HUB = "--push_to_hub: {}: run `hf auth login` or set HF_TOKEN, or leave --push_to_hub out"


def argv_of(world: World, out: Path, **changes: str) -> list[str]:
    """A command line without an evaluation."""
    options = {"eval_fraction": None, "use_cpu": "True", "save_total_limit": "2", **changes}
    return world.argv(str(out), **options)


def without_weights(world: World, place: Path) -> Path:
    shutil.copytree(world.student, place)
    (place / "model.safetensors").unlink()
    return place


def without_a_shard(world: World, place: Path) -> Path:
    shutil.copytree(world.student, place)
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    return place


@pytest.mark.parametrize(
    ("spoil", "line"),
    [
        (without_weights, r"--student {} lacks files of weights \(\*.safetensors\): give the comp"),
        (without_a_shard, "--student {} lacks model-2.safetensors: give the complete checkpoint"),
    ],
)
def test_missing_weights_are_said(
    spoil: Callable[[World, Path], Path], line: str, world: World, tmp_path: Path
) -> None:
    place = spoil(world, tmp_path / "student")
    job = train.parse(argv_of(world, tmp_path / "out", student=str(place)))
    with pytest.raises(ValueError, match=line.format(place)):
        train.build(job)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (LocalTokenNotFoundError("x"), "nobody is logged in to the hub"),
        (OfflineModeIsEnabled("it is\n offline"), "the hub cannot be reached: it is offline"),
        (ConnectionError("no route"), "the hub cannot be reached: no route"),
        # The client's own, which is neither an OSError nor a ValueError.
        (HTTPError("no route"), "the hub cannot be reached: no route"),
    ],
)
def test_hub_is_asked_before_a_push(
    error: Exception, line: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: object) -> None:
        raise error

    monkeypatch.setattr(train.HfApi, "whoami", refuse)
    job = train.parse(argv_of(world, tmp_path / "out", push_to_hub="True"))
    with pytest.raises(ValueError, match=re.escape(HUB.format(line))):
        train.build(job)


@pytest.mark.parametrize("dry", [False, True])
def test_full_disk_is_said_with_the_estimate(
    dry: bool,
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    usage = shutil._ntuple_diskusage(10**9, 10**9 - 1000, 1000)
    monkeypatch.setattr(estimates.shutil, "disk_usage", lambda _: usage)
    argv = argv_of(world, tmp_path / "out")
    assert train.main([*argv, *["--dry_run"] * dry]) == 2
    captured = capfd.readouterr()
    place = re.escape(str(tmp_path / "out"))
    needed = rf"([\d.]+) GB for checkpoints and the model in {place} \(1e-06 GB free\)"
    said = re.match(rf"train.py: error: not enough disk: {needed}: free some, or", captured.err)
    assert said, captured.err
    # Two checkpoints beside the one that is written, and the model: 12 and 4 bytes a parameter.
    count = int(re.search(r"student .*: ([\d,]+) parameters", captured.out)[1].replace(",", ""))
    assert float(said[1]) == pytest.approx((3 * 12 + 4) * count / 1e9, rel=0.01)


GIVEN: dict[str, Any] = {"output_dir": "out", "save_total_limit": 2, "save_steps": 10}
GIVEN |= {"max_steps": 100, "global_batch_tokens": 64, "save_strategy": "steps"}
GIVEN |= {"use_peft": False, "save_store": None, "total": 10}


def fakes(**given: Any) -> tuple[Any, Any, Any]:
    """A job, its pair, and its documents: 10 of `total`, each a block."""
    every = SimpleNamespace(**GIVEN | given, max_length=64, num_train_epochs=1, world_size=4)
    every.attend_across_documents, every.processes = False, lambda count: 2
    method = SimpleNamespace(choice="tokens", unselected_weight=0.0, top_k=0.4)
    job = SimpleNamespace(run=every, data=every, model=every, method=method)
    sizes = SimpleNamespace(parameters=100, trained=10, hidden=1, inner=1)
    pair = SimpleNamespace(student_sizes=sizes, student_skeleton=None, teacher_skeletons=[None])
    rows = MagicMock(data=SimpleNamespace(nbytes=50))
    rows.with_format.return_value = {"student_tokens": [3, 3], "teacher_tokens": [2, 2]}
    tokens = {"student_tokens": 500, "teacher_tokens": 1000}
    segments: Any = SimpleNamespace(rows=rows, total=tokens.get)
    corpus = MagicMock(cache_files=[{"filename": "cache/corpus.arrow"}])
    corpus.__len__.return_value = 10
    read = documents.Corpus("pages", corpus, segments, every.total)
    return job, pair, documents.Documents([read], [0] * 10)  # type: ignore[arg-type]


def test_time_follows_from_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, pair, read = fakes(max_steps=-1, total=30, output_dir=tmp_path)
    # Work for a token at 1.5 keys of the student and 1 of the teacher's, which has two tokens.
    work = SimpleNamespace(
        training_flops=lambda tokens, keys, used: 3 * keys * used / 0.4,
        forward_flops=lambda tokens, keys, used: tokens * keys,
    )
    for name, value in {
        "model_work": lambda skeleton: work,
        "student_layout": lambda run: SimpleNamespace(recomputes=True),
        "_timed_product": lambda *_: 1000.0,
        "_PREPARED_TOKENS_PER_S": 10,
    }.items():
        monkeypatch.setattr(estimates, name, value)
    preparation, training, _ = estimates.describe_time(job, pair, read, done=10)
    assert preparation.startswith("prepare    about 1 m 15 s on 2 of ")
    # 20 of 30 steps of 64 tokens; four devices at half of 1,000 FLOP/s, and 4.5 + 1.5 + 2 FLOP.
    expected = "duration   about 5 s for the 20 steps that are left at 250 tokens per second, 50%"
    assert training.startswith(expected)
    # Beyond the last day that a calendar has.
    endless, pair, read = fakes(max_steps=10**15, total=10, output_dir=tmp_path)
    (told,) = estimates.describe_time(endless, pair, read, done=0)
    assert told.startswith("duration   about ")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # A model of 100 parameters, 10 of them trained: 400 bytes, and moments of 80.
        ({}, [3 * 480 + 400]),
        ({"save_total_limit": None}, [11 * 480 + 400]),
        ({"save_total_limit": 0}, [11 * 480 + 400]),
        ({"save_total_limit": None, "save_steps": 0}, [480 + 400]),
        ({"save_total_limit": None, "save_steps": 0.25}, [5 * 480 + 400]),
        ({"save_strategy": "no"}, [400]),
        ({"use_peft": True}, [3 * 120 + 40]),
        ({"save_store": "store"}, [3 * 480 + 400, 3.05 * 1000]),
        ({"total": 30}, [3 * 480 + 400, 3 * 50]),
    ],
)
def test_disk_holds_all_that_is_written(
    given: dict[str, Any], expected: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cache").mkdir()
    for name, size in (("corpus.arrow", 1000), ("cache-1.arrow", 7)):
        (tmp_path / "cache" / name).write_bytes(b"x" * size)
    job, pair, read = fakes(**given)
    monkeypatch.setattr(estimates.shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
    uses = estimates.disk_uses(job, pair, read)
    assert [use.needed for use in uses] == expected
    # The part that is there already, and not the corpus beside it, counts as free.
    assert [use.free for use in uses] == [107 if "aligned" in use.what else 100 for use in uses]


def lines_of(capfd: pytest.CaptureFixture[str]) -> dict[str, list[str]]:
    """The plan that was printed, and what follows: lines by their first word, in order."""
    lines: dict[str, list[str]] = {}
    for line in capfd.readouterr().out.splitlines():
        lines.setdefault(line[:11].strip(), []).append(line[11:])
    return lines


@pytest.mark.parametrize("is_large", [False, True])
def test_dry_run_says_what_the_run_says(
    is_large: bool,
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if is_large:
        monkeypatch.setattr(documents, "_SMALL_DOCUMENTS", 20)
        monkeypatch.setattr(documents, "_SAMPLE_DOCUMENTS", 20)
    argv = argv_of(world, tmp_path / "out")
    capfd.readouterr()
    assert train.main([*argv, "--dry_run"]) == 0
    dry = lines_of(capfd)
    assert ("prepare" in dry) == is_large
    assert train.build(train.parse(argv))
    real = lines_of(capfd)
    for word in ("student", "teacher", "corpus", "blocks", "batch", "steps", "memory", "disk"):
        assert dry[word][0] == real[word][0]
    assert dry["corpus"][0].startswith("of the first ones, ") == is_large
    # The whole corpus is told behind the plan that is made of a part of it.
    assert [line.startswith("of the") for line in real["corpus"]] == [True, False][not is_large :]


def test_interrupt_ends_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupt(job: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "build", interrupt)
    assert train.main(["--method=cpt", "--use_cpu"]) == 130
    assert capfd.readouterr().err.endswith(
        "train.py: interrupted: give the same command again to continue\n"
    )


def test_new_run_has_no_steps_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trainer_state.json").write_text('{"global_step": 7}')
    assert train._steps_done(None) == 0
    assert train._steps_done(str(tmp_path)) == 7


def test_small_corpus_is_read_whole_when_its_part_is_too_small(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "_SMALL_DOCUMENTS", 3)
    monkeypatch.setattr(documents, "_SAMPLE_DOCUMENTS", 3)
    changes = {"global_batch_tokens": "640000", "dry_run": "True"}
    with pytest.raises(ValueError, match="one optimizer step needs 10,000: lower"):
        train.build(train.parse(argv_of(world, tmp_path / "out", **changes)))


def test_duration_is_that_of_the_log_when_there_is_one(
    world: World, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    argv = [*argv_of(world, tmp_path, max_steps="1000"), "--dry_run"]
    assert train.main(argv) == 0
    said = capfd.readouterr().out
    assert re.search(r"^duration   about .* tokens per second, 50% of a matrix product", said, re.M)
    assert re.search(r"^end        about \w{3} \d\d \w{3} \d{4} \d\d:\d\d", said, re.M)
    tokens = int(re.search(r"^batch      ([\d,]+) tokens", said, re.M)[1].replace(",", ""))
    rows: list[Any] = [{"step": step, "tokens_per_s": tokens * 2} for step in (1, 2)]
    rows += [{"eval_loss": 1}]
    rows += [{"tokens_per_s": 0.0}] * 3  # of steps that were skipped
    text = "".join(json.dumps(row) + "\n" for row in rows) + '{"cut\n3\n{"tokens_per_s": 9'
    (tmp_path / "log.jsonl").write_text(text)
    assert train.main(argv) == 0
    said = capfd.readouterr().out
    expected = f"about {duration(500)} at {tokens * 2:,} tokens per second, the median of "
    assert expected + str(tmp_path / "log.jsonl") in said
