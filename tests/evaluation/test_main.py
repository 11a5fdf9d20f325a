"""evaluate_math.py from the command line to the files it leaves, and everything it rejects."""

from __future__ import annotations

import dataclasses
import json
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from inline_grader import graded_inline
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers import PreTrainedTokenizerBase as Tokenizer

from vocagnolm.evaluation import evaluate
from vocagnolm.evaluation import main as evaluate_math
from vocagnolm.evaluation.engines.hf_engine import HFEngine
from vocagnolm.evaluation.tasks import tasks
from vocagnolm.evaluation.tasks.benchmarks import BENCHMARKS, PAPER_BENCHMARKS
from vocagnolm.evaluation.tasks.tasks import load_tasks, text_sha256
from vocagnolm.models.load import revision_of

N_ITEMS = 16


@pytest.fixture(scope="module", autouse=True)
def grader() -> Iterator[None]:
    """Grading in this process: workers take seconds to start."""
    with graded_inline(evaluate):
        yield


@pytest.fixture(scope="module")
def model(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_llama: Callable[..., Any],
    student_tokenizer: Tokenizer,
) -> Path:
    """A tiny model that says something else every time; tests must not change it."""
    path = tmp_path_factory.mktemp("models") / "student"
    tiny_llama(len(student_tokenizer), initializer_range=0.5).save_pretrained(path)
    student_tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def own_model(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "own"))


@pytest.fixture(scope="module")
def evaluated(model: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A finished evaluation on the demo: its directory, and what was printed."""
    path = tmp_path_factory.mktemp("evaluated")
    capture = pytest.MonkeyPatch()
    printed, complained = path / "printed", path / "complained"
    with printed.open("w") as out, complained.open("w") as err:
        capture.setattr("sys.stdout", out)
        capture.setattr("sys.stderr", err)
        status = evaluate_math.main(arguments(model, path))
    capture.undo()
    assert status == 0, complained.read_text()
    return SimpleNamespace(path=path, out=printed.read_text(), err=complained.read_text())


def arguments(model: Path, path: Path, *more: str) -> list[str]:
    options = ["--model", str(model), "--benchmarks", "demo", "--limit", str(N_ITEMS)]
    return [*options, "--batch_size", "4", "--output_dir", str(path), *more]


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# What it does


def slow_record(model: Any, tokenizer: Any, task: tasks.Task, idx: int) -> dict[str, Any]:
    """What plain generation gives for a prompt that is alone, cut afterwards."""
    ids = tokenizer(task.prompts[idx], return_tensors="pt").input_ids
    room = model.config.max_position_embeddings - ids.shape[1]
    cap = min(task.benchmark.max_new_tokens, room)
    with torch.no_grad():
        new = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=cap,
            pad_token_id=0,
        )[0, ids.shape[1] :].tolist()
    reason = "length" if cap == task.benchmark.max_new_tokens else "context"
    if new[-1] == tokenizer.eos_token_id:
        reason = "eos"
    for count in range(1, len(new) + 1):
        text = tokenizer.decode(new[:count], skip_special_tokens=True)
        places = [text.index(stop) for stop in task.benchmark.stops if stop in text]
        if places:
            new, text, reason = new[:count], text[: min(places)], "stop"
            break
    return {
        "benchmark": task.benchmark.id,
        "idx": idx,
        "prompt_sha256": text_sha256(task.prompts[idx]),
        "n_prompt_tokens": ids.shape[1],
        "n_new_tokens": len(new),
        "finish_reason": reason,
        "raw_output": text.strip(),
    }


def slow_records(model: Path, task: tasks.Task) -> list[dict[str, Any]]:
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model)
    return [slow_record(loaded, tokenizer, task, item.idx) for item in task.items]


def generated(path: Path) -> list[dict[str, Any]]:
    """The records without what the graders say."""
    graded = ("prediction", "gold", "correct", "decided_by", "math_verify")
    return [{k: v for k, v in record.items() if k not in graded} for record in records(path)]


def test_records_equal_plain_generation(evaluated: SimpleNamespace, model: Path) -> None:
    (task,) = load_tasks(["demo"], None, None, N_ITEMS)
    expected = slow_records(model, task)
    assert generated(evaluated.path / "demo.jsonl") == expected
    assert {"stop", "length"} <= {record["finish_reason"] for record in expected}
    golds = [record["gold"] for record in records(evaluated.path / "demo.jsonl")]
    assert golds == [item.gold for item in task.items]


def test_outputs_are_all_there_when_it_is_done(evaluated: SimpleNamespace, model: Path) -> None:
    names = {path.name for path in evaluated.path.iterdir()} - {"printed", "complained", ".lock"}
    assert names == {"demo.jsonl", "results.json", "row.md", "settings.json"}
    results = json.loads((evaluated.path / "results.json").read_text())
    assert results["model"]["name"] == str(model)
    assert results["model"]["revision"].startswith("sha256:")
    assert results["benchmarks"]["demo"]["n"] == N_ITEMS
    settings = json.loads((evaluated.path / "settings.json").read_text())
    assert settings == results["settings"]
    assert (settings["dtype"], settings["engine"], settings["limit"]) == ("float32", "hf", N_ITEMS)
    assert (evaluated.path / "row.md").read_text() in evaluated.out


def test_rerun_asks_nothing_again_when_all_is_there(
    evaluated: SimpleNamespace,
    own_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = Path(shutil.copytree(evaluated.path, tmp_path / "copy"))
    before = (path / "demo.jsonl").read_bytes()

    def advance(*_: Any) -> None:
        raise AssertionError("the model was asked")

    monkeypatch.setattr(HFEngine, "_advance", advance)
    assert evaluate_math.main(arguments(own_model, path)) == 0  # a model may have moved
    assert (path / "demo.jsonl").read_bytes() == before


@pytest.mark.slow
def test_results_lie_in_the_model(own_model: Path) -> None:
    argv = ["--model", str(own_model), "--benchmarks", "demo", "--limit", "1"]
    assert evaluate_math.main(argv) == 0
    assert (own_model / "evaluation" / "results.json").is_file()
    assert evaluate_math.main(argv) == 0  # its own files do not make it another model
    asked = Namespace(model="org/name", output_dir=None, chat=False)
    assert evaluate.output_dir(asked) == Path("runs/name/evaluation")


@pytest.mark.slow
def test_all_nine_benchmarks_run(
    tokenizer_dirs: dict[str, Path],
    tmp_path: Path,
    tiny_llama: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dirs["metaspace"])
    data = Path(__file__).parents[1] / "data/evaluation"
    # Few and short items; common characters stop some, and the longest prompts fill the context.
    few = {
        name: dataclasses.replace(
            benchmark, item_count=3, max_new_tokens=16, stops=(*benchmark.stops, "er")
        )
        for name, benchmark in BENCHMARKS.items()
    }
    monkeypatch.setattr(tasks, "BENCHMARKS", MappingProxyType(few))
    asked = load_tasks(PAPER_BENCHMARKS, data / "items", data / "prompts", 2)
    prompts = [prompt for task in asked for prompt in task.prompts.values()]
    context = max(len(tokenizer(prompt).input_ids) for prompt in prompts) + 6
    model = tmp_path / "model"
    tiny_llama(
        len(tokenizer), initializer_range=0.5, max_position_embeddings=context
    ).save_pretrained(model)
    tokenizer.save_pretrained(model)
    argv = ["--model", str(model), "--data_dir", str(data / "items"), "--limit", "2"]
    argv += ["--prompts_dir", str(data / "prompts"), "--output_dir", str(tmp_path / "out")]
    assert evaluate_math.main(argv) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert list(results["benchmarks"]) == list(PAPER_BENCHMARKS)
    assert list(results["averages"]) == ["AVG", "AVG w/o TAB, MMLU-STEM, SAT", "AVG w/o SAT"]
    columns = results["benchmarks"].values()
    assert all(column["n"] == 2 and "partial" in column["marked"] for column in columns)
    reasons = {reason for column in columns for reason in column["finish_reasons"]}
    assert {"stop", "length", "context"} <= reasons
    for task in asked:
        expected = slow_records(model, task)
        assert generated(tmp_path / "out" / f"{task.benchmark.id}.jsonl") == expected


def test_dry_run_prints_prompts_and_counts(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(model, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    assert evaluate_math.main(arguments(bare, tmp_path / "out", "--dry_run")) == 0
    printed, complained = capsys.readouterr()
    assert complained == ""
    (task,) = load_tasks(["demo"], None, None, N_ITEMS)
    tokenizer = AutoTokenizer.from_pretrained(model)
    lengths = [len(tokenizer(prompt).input_ids) for prompt in task.prompts.values()]
    assert "=== demo (Demo): 16 items, 0 shots" in printed
    assert "--- partial: 16 of 400 items" in printed
    assert f"--- prompt tokens: {min(lengths)} to {max(lengths)}, the first" in printed
    assert "--- new tokens: at most 28\n" in printed
    assert task.prompts[0] in printed
    assert not (tmp_path / "out").exists()


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
    complained = capsys.readouterr().err
    assert complained == (
        "vocagnolm evaluate: interrupted: give the same command again to continue\n"
    )
    assert 0 < len(records(tmp_path / "demo.part0.jsonl")) < N_ITEMS
    assert evaluate_math.main(arguments(model, tmp_path)) == 0
    assert len(records(tmp_path / "demo.jsonl")) == N_ITEMS


# Which model it is


@pytest.mark.parametrize(
    ("name", "matters"),
    [
        ("model.safetensors", True),
        ("config.json", True),
        ("generation_config.json", True),
        ("tokenizer.json", True),
        ("modeling_own.py", True),
        ("adapter_model.bin", True),
        ("optimizer.pt", False),
        ("trainer_state.json", False),
        ("wandb_run.json", False),
        ("README.md", False),
        ("evaluation/demo.jsonl", False),
        ("checkpoint-1/model.safetensors", False),
        ("tokenizer/vocab.json", False),
    ],
)
def test_revision_changes_when_a_file_that_matters_does(
    own_model: Path, name: str, matters: bool
) -> None:
    before = revision_of(str(own_model), None)
    assert before == revision_of(str(own_model), None)
    assert before.startswith("sha256:")
    path = own_model / name
    path.parent.mkdir(exist_ok=True)
    content = path.read_bytes() if path.exists() else b""
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]) if content else b"new")
    assert (revision_of(str(own_model), None) != before) == matters
