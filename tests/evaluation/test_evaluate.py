"""evaluate_math.py from the command line to the files it leaves, and everything it rejects."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from inline_grader import graded_inline
from processors import pretend
from transformers import AutoTokenizer
from transformers import PreTrainedTokenizerBase as Tokenizer

from vocagnolm.evaluation import evaluate as evaluate_math
from vocagnolm.evaluation import runner
from vocagnolm.evaluation.engines.hf_engine import HFEngine
from vocagnolm.evaluation.tasks.benchmarks import BENCHMARKS
from vocagnolm.evaluation.tasks.tasks import load_tasks
from vocagnolm.models.load import revision_of

N_ITEMS = 16


@pytest.fixture(scope="module", autouse=True)
def grader() -> Iterator[None]:
    """Grade in this process, as workers take seconds to start."""
    with graded_inline(runner):
        yield


@pytest.fixture(scope="module")
def model(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_llama: Callable[..., Any],
    student_tokenizer: Tokenizer,
) -> Path:
    """A tiny model that answers every prompt differently; tests must not change it."""
    path = tmp_path_factory.mktemp("models") / "student"
    tiny_llama(len(student_tokenizer), initializer_range=0.5).save_pretrained(path)
    student_tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def own_model(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "own"))


def arguments(model: Path, path: Path, *more: str) -> list[str]:
    options = ["--model", str(model), "--benchmarks", "demo", "--limit", str(N_ITEMS)]
    return [*options, "--batch_size", "4", "--output_dir", str(path), *more]


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# What it does


def test_outputs_are_all_there_when_it_is_done(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate_math.main(arguments(model, tmp_path)) == 0
    names = {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")}
    assert names == {"demo.jsonl", "results.json", "row.md", "settings.json"}
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["model"]["name"] == str(model)
    assert results["model"]["revision"].startswith("sha256:")
    assert results["benchmarks"]["demo"]["n"] == N_ITEMS
    (task,) = load_tasks([BENCHMARKS["demo"]], None, None, N_ITEMS)
    golds = [record["gold"] for record in records(tmp_path / "demo.jsonl")]
    assert golds == [item.gold for item in task.items]
    settings = json.loads((tmp_path / "settings.json").read_text())
    assert settings == results["settings"]
    assert (settings["dtype"], settings["engine"], settings["limit"]) == ("float32", "hf", N_ITEMS)
    assert (tmp_path / "row.md").read_text() in capsys.readouterr().out


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("student", "student/evaluation"),
        ("run/checkpoint-155", "run/evaluation-checkpoint-155"),
        ("run/checkpoint-best", "run/checkpoint-best/evaluation"),
    ],
)
def test_results_lie_in_the_model_and_outlive_a_checkpoint(
    model: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / model).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / model)
    for name in (str(tmp_path / model), f"{tmp_path / model}/", "."):
        asked = Namespace(model=name, chat=False, sampling=None)
        assert runner.default_dir(asked).absolute() == tmp_path / expected
    asked.model = "org/name"
    assert runner.default_dir(asked) == Path("runs/name/evaluation")


def test_drawn_outputs_are_summed_up_and_resume(
    own_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--model", str(own_model), "--benchmarks", "demo", "--limit", "4"]
    drawn = [*argv, "--samples", "3", "--temperature", "0.8", "--top_p", "0.95"]
    assert evaluate_math.main([*drawn, "--batch_size", "5"]) == 0
    out = own_model / "evaluation-sampled"
    lines = (out / "demo.jsonl").read_text().splitlines(keepends=True)
    found = records(out / "demo.jsonl")
    order = [(idx, sample) for idx in range(4) for sample in range(3)]
    assert [(record["idx"], record["sample"]) for record in found] == order
    assert len({record["raw_output"] for record in found}) > 4
    mark = "sampled: 3 outputs per item (temperature 0.8, top_p 0.95), not the paper's greedy"
    said = capsys.readouterr().out
    results = json.loads((out / "results.json").read_text())
    assert results["settings"]["sampling"] == {"samples": 3, "temperature": 0.8, "top_p": 0.95}
    column = results["benchmarks"]["demo"]
    assert (column["n"], column["samples"]) == (4, 3)
    assert "sampled" in column["marked"]
    for text in (said, (out / "row.md").read_text()):
        assert mark in text
        assert f"| {own_model}, avg@3 | {column['rounded']:.1f}* |" in text
        assert f"| pass@3 | {column['pass_at']['3']['rounded']:.1f}* |" in text
    # Killed and asked again in other batches, it gives the same texts.
    (out / "demo.jsonl").unlink()
    (out / "demo.part0.jsonl").write_text("".join(lines[1:3] + lines[7:8]))
    assert evaluate_math.main([*drawn, "--batch_size", "2"]) == 0
    assert (out / "demo.jsonl").read_text().splitlines(keepends=True) == lines
    # Neither greedy outputs nor those of other settings go among these.
    warmer = [*drawn[6:8], "--temperature", "0.7"]
    for other, change in (
        ([], "sampling was {'samples': 3"),
        (warmer, "sampling.temperature was 0.8, now 0.7"),
    ):
        capsys.readouterr()
        assert evaluate_math.main([*argv, *other, "--output_dir", str(out)]) == 2
        assert change in capsys.readouterr().err


def test_dry_run_prints_prompts_and_counts(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(model, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    assert evaluate_math.main(arguments(bare, tmp_path / "out", "--dry_run")) == 0
    printed = capsys.readouterr().out
    (task,) = load_tasks([BENCHMARKS["demo"]], None, None, N_ITEMS)
    tokenizer = AutoTokenizer.from_pretrained(model)
    lengths = [len(tokenizer(prompt).input_ids) for prompt in task.prompts.values()]
    assert "=== demo (Demo): 16 items, 0 shots" in printed
    assert "--- partial: 16 of 400 items" in printed
    assert f"--- prompt tokens: {min(lengths)} to {max(lengths)}; 0 prompts" in printed
    assert "--- new tokens: at most 28\n" in printed
    assert task.prompts[0] in printed
    assert not (tmp_path / "out").exists()


# What is rejected

DEMO = ["--model", "m", "--benchmarks", "demo"]
REGRADE = ["--regrade", "FILE", "--benchmark", "gsm8k"]
WRONG_ARGUMENTS = [
    ([], "model"),
    ([*DEMO, "--regrade", "FILE"], "regrade"),
    (REGRADE[:2], "benchmark"),
    ([*DEMO, "--output", "FILE"], "output"),
    ([*REGRADE[:3], "gsm9k"], "benchmarks .*gsm9k"),
    ([*DEMO, "--benchmarks", "gsm9k"], "benchmarks .*gsm9k"),
    ([*DEMO, "--limit", "0"], "limit"),
    ([*DEMO, "--batch_size", "0"], "batch_size"),
    ([*DEMO, "--chat"], "chat .*demo"),
    ([*REGRADE[:3], "demo", "--chat"], "chat .*demo"),
    ([*DEMO, "--samples", "4"], "samples"),
    ([*DEMO, "--samples", "0", "--temperature", "1"], "samples"),
    ([*DEMO, "--top_p", "0.9"], "top_p"),
    ([*DEMO, "--temperature", "1", "--top_p", "0"], "top_p"),
    ([*DEMO, "--temperature", "-1"], "temperature"),
    ([*DEMO, "--temperature", "0.005"], "temperature"),
    ([*DEMO, "--temperature", "nan"], "temperature"),
    ([*DEMO, "--temperature", "inf"], "temperature"),
    ([*DEMO, "--benchmarks_file", "."], "benchmarks_file"),
]


@pytest.mark.parametrize(("argv", "named"), WRONG_ARGUMENTS)
def test_wrong_arguments_are_named(argv: list[str], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        evaluate_math.check(argv)


# What can happen on the way


@pytest.mark.slow
def test_interrupt_says_how_to_go_on(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    whole = HFEngine._run

    def interrupted(self: Any, *given: Any) -> Iterator[Any]:
        yield next(whole(self, *given))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(HFEngine, "_run", interrupted)
        assert evaluate_math.main(arguments(model, tmp_path)) == 130
    *_, last = capsys.readouterr().err.splitlines()
    assert last == "vocagnolm evaluate: interrupted: give the same command again to continue"
    assert 0 < len(records(tmp_path / "demo.part0.jsonl")) < N_ITEMS
    assert evaluate_math.main(arguments(model, tmp_path)) == 0
    assert len(records(tmp_path / "demo.jsonl")) == N_ITEMS


def test_evaluation_goes_on_in_its_precision_when_another_processor_resumes_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    argv = arguments(model, tmp_path)
    for unit, reason in (("AMX", "the processor multiplies in it, with AMX"), (None, "as it bega")):
        pretend(monkeypatch, unit)
        assert evaluate_math.main(argv) == 0
        assert f"computes in bfloat16 ({reason}" in capsys.readouterr().err
        assert json.loads((tmp_path / "settings.json").read_text())["dtype"] == "bfloat16"
    assert evaluate_math.main([*argv, "--dtype", "float32"]) == 2
    assert "dtype was bfloat16, now float32" in capsys.readouterr().err


# Which model it is


def test_revision_changes_when_a_file_that_matters_does(own_model: Path) -> None:
    before = revision_of(str(own_model), None)
    for name in ("optimizer.pt", "README.md", "evaluation/demo.jsonl", "tokenizer/vocab.json"):
        (own_model / name).parent.mkdir(exist_ok=True)
        (own_model / name).write_bytes(b"new")
        assert revision_of(str(own_model), None) == before
    for name in ("model.safetensors", "config.json", "tokenizer.json", "modeling_own.py"):
        path = own_model / name
        path.write_bytes(path.read_bytes()[:-1] + b"x" if path.exists() else b"new")
        after = revision_of(str(own_model), None)
        assert after.startswith("sha256:")
        assert after != before
        before = after
