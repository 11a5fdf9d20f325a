"""Several corpora on the command line of `train.py`: refusals, the plan, settings, caches."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
from adapter_world import World

from vocagnolm import cli, data
from vocagnolm.run import main as train
from vocagnolm.run import prepare
from vocagnolm.run.documents import Documents
from vocagnolm.store import score

CPU = ("--use_cpu", "True", "--teacher", "t")
TWO = ("--dataset", "a.jsonl", "b.jsonl")


@pytest.fixture(scope="module")
def argv(world: World, training_texts: list[str]) -> list[str]:
    """A command line of two corpora without weights; the second one's text is in `body`."""
    other = world.root / "replay.jsonl"
    lines = (json.dumps({"body": text}) + "\n" for text in [*training_texts[60:80], " "])
    other.write_text("".join(lines))
    flags = world.argv("unused", dataset=None, output_dir=None, global_batch_tokens="256")
    corpora = ["--dataset", str(world.pages), str(other), "--text_column", "text", "body"]
    return [*flags, *corpora, "--use_cpu=True"]


@pytest.fixture
def aligned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of documents that are aligned, and not read from a cache."""
    batches: list[int] = []
    align = data._Aligner.align_batch

    def counted(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        batches.append(len(batch["text"]))
        return align(self, batch, *args, **kwargs)

    monkeypatch.setattr(data._Aligner, "align_batch", counted)
    return batches


def test_weights_shape_the_run_and_are_told(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    mixed = [*argv, "--dataset_weights", "0.75", "0.25", f"--output_dir={out}"]
    assert train.main([*mixed, "--report_to=none"]) == 0
    said = capsys.readouterr().out
    share = r"pages 75.0%, read ([\d.]+) times; replay 25.0%, read ([\d.]+) times"
    found = re.search(rf"mixture    {share}: shares of every global batch\n", said)
    sizes = re.search(r"full: ([\d,]+) of pages, ([\d,]+) of replay\n", said)
    assert found
    assert sizes
    for times, part, size in zip(found.groups(), (0.75, 0.25), sizes.groups(), strict=True):
        # Five steps of four blocks.
        assert float(times) == pytest.approx(5 * 4 * part / int(size), rel=0.01)
    assert re.search(r"corpus     \S+replay.jsonl: 16 documents", said)
    assert (out / "skipped_replay.jsonl").read_text() == '{"document": 20, "reason": "empty"}\n'
    kept = json.loads((out / "run.json").read_text())
    assert kept["dataset_weights"] == [0.75, 0.25]
    assert len(kept["dataset"]) == len(set(kept["corpus_digest"])) == 2
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    last = next(entry for entry in log if "eval_loss" in entry)
    low, high = sorted((last["eval_pages_loss"], last["eval_replay_loss"]))
    assert low < last["eval_loss"] < high
    other = [*argv, "--dataset_weights", "0.5", "0.5", f"--output_dir={out}"]
    assert train.main(other) == 2
    assert "--dataset_weights was [0.75, 0.25], now [0.5, 0.5]" in capsys.readouterr().err


def test_corpora_without_weights_are_read_once_as_one(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main([*argv, f"--output_dir={tmp_path}", "--max_steps=-1", "--dry_run"]) == 0
    said = capsys.readouterr().out
    times = re.search(
        r"mixture    pages [\d.]+%, read ([\d.]+) times; replay \S+ read ([\d.]+) ", said
    )
    assert times
    assert all(0.9 < float(one) <= 1 for one in times.groups())
    assert "shares of all blocks, in one order" in said


def test_adding_a_corpus_does_not_align_the_first_again(
    argv: list[str],
    tmp_path: Path,
    aligned: list[int],
    monkeypatch: pytest.MonkeyPatch,
    world: World,
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    alone = [*world.argv("unused", output_dir=None), "--use_cpu=True"]
    assert prepare.main(alone) == 0
    assert sum(aligned) == 60
    assert prepare.main(argv) == 0
    assert sum(aligned) == 60 + 21


def test_a_corpus_too_small_for_its_weight_is_refused(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mixed = [*argv, "--dataset_weights", "1", "99", "--global_batch_tokens=6400"]
    assert train.main([*mixed, f"--output_dir={tmp_path}"]) == 2
    said = capsys.readouterr().err
    expected = (
        r"--dataset_weights: one optimizer step has 100 blocks of 64 tokens, more than a corpus"
    )
    assert re.search(
        expected + r" gives at its weight \(\d+ of pages, \d+ of replay\): lower", said
    )


def test_one_store_serves_all_corpora(
    argv: list[str], world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpora = argv[argv.index("--dataset") : -1]
    scoring = ["--teacher", str(world.teacher), "--output_dir", str(tmp_path / "store")]
    assert score.main([*scoring, *corpora]) == 0
    assert score.main(["--verify", str(tmp_path / "store"), *corpora]) == 0
    stored = [word for word in argv if not word.startswith("--teacher")]
    stored += ["--teacher_losses", str(tmp_path / "store"), "--dataset_weights", "2", "1"]
    assert train.main([*stored, f"--output_dir={tmp_path / 'run'}", "--max_steps=1"]) == 0
    assert "mixture    pages 66.7%" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["audit", "inspect"])
def test_commands_that_look_at_one_corpus_say_so(command: str) -> None:
    assert cli.main([command, "--student", "s", "--teacher", "t", *TWO]) == 2


def test_steps_of_a_mixture_are_extrapolated() -> None:
    """From a tenth of each corpus."""
    sample: Any = SimpleNamespace(scale=10.0)
    blocks: Any = SimpleNamespace(parts={"a": 70, "b": 100})
    assert Documents([sample, sample], blocks, weights=[0.7, 0.3]).steps(10) == 100
