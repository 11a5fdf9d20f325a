"""Several corpora on the command line: the plan, settings, logs, caches, `vocagnolm prepare`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
from world import World

from vocagnolm import data
from vocagnolm.run import parser, prepare
from vocagnolm.store import score
from vocagnolm.training import packed
from vocagnolm.training.job import Job
from vocagnolm.training.models import Models, read_models
from vocagnolm.training.packed import Packed, pack_documents, read_corpora, settings_of_data


@pytest.fixture(scope="module")
def argv(world: World, training_texts: list[str]) -> list[str]:
    """A command line of two corpora without weights; the second one's text is in `body`."""
    other = world.root / "replay.jsonl"
    lines = (json.dumps({"body": text}) + "\n" for text in [*training_texts[60:80], " "])
    other.write_text("".join(lines))
    flags = world.argv("unused", dataset=None, output_dir=None, global_batch_tokens="256")
    corpora = ["--dataset", str(world.pages), str(other), "--text_column", "text", "body"]
    return [*flags, *corpora, "--use_cpu=True"]


def test_weights_shape_the_run(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    mixed = [*argv, "--dataset_weights", "0.75", "0.25", f"--output_dir={out}"]
    assert parser.main([*mixed, "--report_to=none"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"mixture    pages 75.0% \(read [\d.]+ times\), replay 25.0% \(", printed)
    assert re.search(r"corpus     replay.jsonl: 16 documents", printed)
    assert (out / "skipped_replay.jsonl").read_text() == '{"document": 20, "reason": "empty"}\n'
    kept = json.loads((out / "run.json").read_text())
    assert kept["dataset_weights"] == [0.75, 0.25]
    assert len(kept["dataset"]) == len(set(kept["corpus_digest"])) == 2
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    last = next(entry for entry in log if "eval_loss" in entry)
    low, high = sorted((last["eval_pages_loss"], last["eval_replay_loss"]))
    assert low < last["eval_loss"] < high
    other = [*argv, "--dataset_weights", "0.5", "0.5", f"--output_dir={out}"]
    assert parser.main(other) == 2
    assert "dataset_weights was [0.75, 0.25]" in capsys.readouterr().err


def packed_of(argv: list[str]) -> tuple[Job, Models, Packed]:
    job = parser.parse(argv)
    models = read_models(job.model, job.args, job.args.device)
    return job, models, pack_documents(job, models, read_corpora(job))


def test_documents_are_counted_in_each_corpus(argv: list[str]) -> None:
    *_, found = packed_of(argv)
    rows, first = found.segments.rows["document"], len(found.parts[0].rows)
    assert rows[:] == [*found.parts[0].rows["document"], *found.parts[1].rows["document"]]
    for texts, part in zip(found.texts.values(), (rows[:first], rows[first:]), strict=True):
        assert max(part) < len(texts)


def test_held_out_documents_depend_on_the_seed_of_the_data(argv: list[str]) -> None:
    seeds = ["--seed=7"], ["--seed=8", "--data_seed=7"], ["--seed=7", "--data_seed=8"]
    one, same, other = (packed_of([*argv, *each])[2].blocks.corpus_digest for each in seeds)
    assert one == same != other


def test_conversations_have_templates_and_losses_of_answers_alone(
    world: World, tmp_path: Path
) -> None:
    said = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    pages = tmp_path / "chats.jsonl"
    pages.write_text((json.dumps({"messages": said}) + "\n") * 40)
    chats = {"dataset": str(pages), "student_chat_template": "plain", "use_cpu": "true"}
    argv = world.argv("unused", teacher_chat_template="plain", global_batch_tokens="64", **chats)
    assert settings_of_data(*packed_of(argv))["chat_templates_sha256"]
    with pytest.raises(ValueError, match="chunk needs"):
        packed_of([*argv, "--method=chunk"])


def test_nothing_that_was_prepared_is_aligned_again(
    argv: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    world: World,
    capfd: pytest.CaptureFixture[str],
) -> None:
    aligned: list[int] = []
    align = data._Aligner.align_batch

    def counted(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        aligned.append(len(batch["text"]))
        return align(self, batch, *args, **kwargs)

    monkeypatch.setattr(data._Aligner, "align_batch", counted)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    assert prepare.main(world.argv("run", use_cpu="True")) == 0
    assert sum(aligned) == 60
    assert not (world.root / "run").exists()
    capfd.readouterr()
    assert prepare.main(argv) == 0
    prepared = capfd.readouterr().out.splitlines()
    assert prepared[-1].startswith("evaluated  ")
    assert parser.main([*argv, "--dry_run"]) == 0
    assert set(prepared) <= set(capfd.readouterr().out.splitlines())
    assert sum(aligned) == 60 + 21


def test_one_store_serves_all_corpora(
    argv: list[str], world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpora = argv[argv.index("--dataset") : -1]
    scoring = ["--teacher", str(world.teacher), "--output_dir", str(tmp_path / "store")]
    assert score.main([*scoring, *corpora]) == 0
    stored = [word for word in argv if not word.startswith("--teacher")]
    stored += ["--teacher_losses", str(tmp_path / "store"), "--dataset_weights", "2", "1"]
    assert parser.main([*stored, f"--output_dir={tmp_path / 'run'}", "--max_steps=1"]) == 0
    assert "mixture    pages 66.7%" in capsys.readouterr().out
    assert parser.main([*stored, "--method=rho1", f"--output_dir={tmp_path / 'rho1'}"]) == 2
    assert "another tokenizer" in capsys.readouterr().err


def test_steps_of_a_mixture_are_extrapolated() -> None:
    """From a tenth of each corpus: 1,000 sequences of b are 30 %, and 2,334 of a the rest."""
    blocks = SimpleNamespace(parts={"a": 70, "b": 100}, weights=[0.7, 0.3])
    texts: Any = {"a": range(10), "b": range(10)}
    sample = Packed(blocks, texts=texts, totals=[100, 100])
    job: Any = SimpleNamespace(args=SimpleNamespace(global_batch_tokens=640, max_length=64))
    assert packed.epoch_steps(job, sample) == 333
