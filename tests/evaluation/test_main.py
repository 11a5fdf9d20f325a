"""evaluate_math.py from the command line to the files it leaves, and everything it refuses."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from inline_grader import graded_inline
from locks import locked_elsewhere
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, T5Config
from transformers import PreTrainedTokenizerBase as Tokenizer

from vocagnolm.evaluation import evaluate
from vocagnolm.evaluation import main as evaluate_math
from vocagnolm.evaluation.engines.hf_engine import HFEngine
from vocagnolm.evaluation.tasks import tasks
from vocagnolm.evaluation.tasks.benchmarks import BENCHMARKS, PAPER_BENCHMARKS
from vocagnolm.evaluation.tasks.tasks import load_tasks, prompt_sha256
from vocagnolm.host.manifest import unsealed
from vocagnolm.models.source import revision_of

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
    """A tiny model that says something else every time; read-only by agreement."""
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
    return [unsealed(json.loads(line)) for line in path.read_text().splitlines()]


def refusal(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that the command prints when it refuses."""
    assert evaluate_math.main(argv) == 2
    printed, complained = capsys.readouterr()
    assert printed == ""
    assert complained.startswith("vocagnolm evaluate: error: ")
    assert complained.count("\n") == 1
    return complained


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
        "prompt_sha256": prompt_sha256(task.prompts[idx]),
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
    names = {path.name for path in evaluated.path.iterdir()} - {"printed", "complained"}
    assert names == {"demo.jsonl", "results.json", "row.md", "row.tex", "settings.json"}
    results = unsealed(json.loads((evaluated.path / "results.json").read_text()))
    assert results["model"]["name"] == str(model)
    assert results["model"]["revision"].startswith("sha256:")
    assert results["benchmarks"]["demo"]["n"] == N_ITEMS
    settings = unsealed(json.loads((evaluated.path / "settings.json").read_text()))
    assert settings == results["settings"]
    assert (settings["dtype"], settings["engine"], settings["limit"]) == ("float32", "hf", N_ITEMS)
    assert (evaluated.path / "row.md").read_text() in evaluated.out


def test_log_has_one_line_per_benchmark(evaluated: SimpleNamespace) -> None:
    assert evaluated.err == (
        "demo: 0.0* (95 % interval 0.0 to 19.4), 0 of 16 right; partial: 16 of 400 items\n"
    )
    assert "* partial: 16 of 400 items (Demo)" in evaluated.out
    assert f"written: {evaluated.path}/results.json" in evaluated.out


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
    parsed = evaluate_math._parse(["--model", "org/name", "--benchmarks", "demo"])
    assert evaluate.output_dir(parsed) == Path("runs/name/evaluation")


@pytest.fixture
def tiny_tinyllama(shared_dir: Path, tmp_path: Path, tiny_llama: Callable[..., Any]) -> Path:
    """Random weights behind TinyLlama's tokenizer; MathQA nearly fills the context."""
    source = shared_dir / "tokenizers" / "tinyllama"
    tokenizer = AutoTokenizer.from_pretrained(source)
    path = tmp_path / "tinyllama"
    tiny_llama(len(tokenizer), initializer_range=0.5, max_position_embeddings=1564).save_pretrained(
        path
    )
    tokenizer.save_pretrained(path)
    return path


def shorten(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """Make completions short, and common characters stop some."""
    short = {
        name: dataclasses.replace(benchmark, max_new_tokens=n, stops=(*benchmark.stops, "er"))
        for name, benchmark in BENCHMARKS.items()
    }
    monkeypatch.setattr(tasks, "BENCHMARKS", MappingProxyType(short))


@pytest.mark.slow
def test_all_nine_benchmarks_run(
    tiny_tinyllama: Path, shared_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten(monkeypatch, 16)
    data, prompts = shared_dir / "data" / "benchmarks", shared_dir / "data" / "prompts" / "cot"
    path = tmp_path / "out"
    argv = ["--model", str(tiny_tinyllama), "--data_dir", str(data), "--prompts_dir", str(prompts)]
    assert evaluate_math.main([*argv, "--limit", "2", "--output_dir", str(path)]) == 0
    results = json.loads((path / "results.json").read_text())
    assert list(results["benchmarks"]) == list(PAPER_BENCHMARKS)
    assert list(results["averages"]) == ["AVG", "AVG w/o TAB, MMLU-STEM, SAT", "AVG w/o SAT"]
    columns = results["benchmarks"].values()
    assert all(column["n"] == 2 and column["marked"] == ["partial"] for column in columns)
    reasons = {reason for column in columns for reason in column["finish_reasons"]}
    assert {"stop", "length", "context"} <= reasons
    for task in load_tasks(PAPER_BENCHMARKS, data, prompts, 2):
        expected = slow_records(tiny_tinyllama, task)
        assert generated(path / f"{task.benchmark.id}.jsonl") == expected


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
    assert "=== demo (Demo): 16 items, 0 shots, data demo_world" in printed
    assert "--- partial: 16 of 400 items" in printed
    mean = f"{sum(lengths) / N_ITEMS:.0f}"
    assert f"--- prompt tokens: {min(lengths)} to {max(lengths)}, mean {mean}; the f" in printed
    assert "--- new tokens: at most 28, and 128 with the prompt\n" in printed
    assert task.prompts[0] in printed
    assert not (tmp_path / "out").exists()


# What it refuses


WRONG_ARGUMENTS: dict[str, tuple[str, str]] = {
    "no model": ("", "expected --model, a directory or a name on the hub, or --regrade FILE"),
    "unknown benchmark": ("--model M --benchmarks gsm8k,gsm9k", "expected some of gsm8k,math,"),
    "no benchmark": ("--model M --benchmarks ,", "found ',': separate them with commas or blanks"),
    "revision": ("--model . --revision main", "--revision has no effect on a directory, .: leave"),
    "no item": ("--model M --limit 0", "--limit must be at least 1, got 0"),
    "no row": ("--model M --batch_size -1", "--batch_size must be at least 1, got -1"),
    "no data": ("--model M --data_dir /no/such", "--data_dir /no/such: expected a directory"),
    "no prompts": ("--model M --prompts_dir /no/such", "/no/such: expected a directory, found no"),
    "demo and data": ("--model M --benchmarks demo --data_dir .", "no effect on the demo: leave"),
    "vllm and batch": ("--model M --engine vllm --batch_size 4", "no effect with --engine vllm: l"),
    "vllm and attention": (
        "--model M --engine vllm --attn_implementation sdpa",
        "--attn_implementation has no effect with --engine vllm: leave it out",
    ),
    "regrade alone": (
        "--regrade F",
        "--benchmark is required with --regrade",
    ),
    "regrade and model": (
        "--regrade F --benchmark gsm8k --model M",
        "--model has no effect with --regrade: leave it out",
    ),
    "regrade and limit": (
        "--regrade F --benchmark gsm8k --limit 3",
        "--limit has no effect with --regrade: leave it out",
    ),
    "regrade and demo chat": ("--regrade F --benchmark demo --chat", "leave demo out"),
    "benchmark alone": (
        "--model M --benchmark gsm8k",
        "--benchmark has no effect without --regrade",
    ),
    "output alone": (
        "--model M --output F",
        "--output has no effect without --regrade",
    ),
    "no such model": (
        "--model /no/such --benchmarks demo",
        "--model /no/such: no such directory",
    ),
}


@pytest.mark.parametrize("name", WRONG_ARGUMENTS)
def test_command_is_refused_in_one_line(capsys: pytest.CaptureFixture[str], name: str) -> None:
    line, said = WRONG_ARGUMENTS[name]
    assert said in refusal(line.split(), capsys)


@pytest.mark.parametrize("word", ["--engine=tgi", "--dtype=int8", "--limit=x", "--benchmark=x"])
def test_command_exits_with_two(capsys: pytest.CaptureFixture[str], word: str) -> None:
    assert "invalid" in refusal(["--model", "M", word], capsys)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vllm is installed")
def test_missing_vllm_is_said_first(capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(["--model", "/no/such", "--engine", "vllm"], capsys)
    assert "install it with `pip install vllm`, or use --engine hf" in said


def lacking(pattern: str) -> Callable[[Path, Path], None]:
    """A change that takes files away from a model."""

    def remove(model: Path, out: Path) -> None:
        for file in model.glob(pattern):
            file.unlink()

    return remove


def narrow(model: Path, out: Path) -> None:
    config = AutoConfig.from_pretrained(model)
    config.max_position_embeddings = 60
    config.save_pretrained(model)


# Changes a model or the place of its results, or returns further options; and the refusal, in which
# {model} and {out} stand for these.
WRONG_FILES: dict[str, tuple[Callable[[Path, Path], Any], str]] = {
    "no weights": (lacking("*.safetensors"), "--model {model} cannot be loaded: "),
    "no configuration": (lacking("config.json"), "--model {model} cannot be loaded: "),
    "no tokenizer": (lacking("token*"), "--model {model} cannot be loaded: "),
    "encoder-decoder": (
        lambda model, _: T5Config(d_model=8, num_layers=1).save_pretrained(model),
        "is a t5 model, which is no causal language model: give one that predicts",
    ),
    "short context": (narrow, "of 16 prompts leave no room for a completion"),
    "results in a file": (lambda _, out: out.write_text(""), "{out} is a file, not a directory"),
    "results in a file's directory": (
        lambda model, _: ["--output_dir", str(model / "config.json" / "out")],
        "config.json is a file, not a directory",
    ),
    "no items": (
        lambda model, _: ["--benchmarks", "gsm8k", "--data_dir", str(model)],
        "--data_dir {model} has no gsm8k/test.jsonl with the 1319 items of gsm8k: get data/gsm8k/"
        "test.jsonl (sha256 9f098df7",
    ),
    "no exemplars": (
        lambda model, _: ["--benchmarks", "gsm8k", "--prompts_dir", str(model)],
        "--prompts_dir {model} has no gsm8k.md: give the harness's directory",
    ),
}


@pytest.mark.parametrize("name", WRONG_FILES)
def test_wrong_files_are_refused_in_one_line(
    own_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    change, said = WRONG_FILES[name]
    out = tmp_path / "out"
    changed = change(own_model, out)
    more = changed if isinstance(changed, list) else []
    before = out.read_bytes() if out.is_file() else None
    expected = said.replace("{model}", str(own_model)).replace("{out}", str(out))
    assert expected in refusal(arguments(own_model, out, *more), capsys)
    assert not list(tmp_path.glob("out/*.jsonl"))
    assert before is None or out.read_bytes() == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_output_is_refused_when_it_cannot_be_read(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "closed").mkdir(mode=0)
    assert "Permission denied" in refusal(arguments(model, tmp_path / "closed"), capsys)


def test_output_is_refused_when_it_holds_another_evaluation(
    evaluated: SimpleNamespace,
    model: Path,
    own_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = Path(shutil.copytree(evaluated.path, tmp_path / "copy"))
    before = (path / "demo.jsonl").read_bytes()
    with next(own_model.glob("*.safetensors")).open("ab") as weights:
        weights.write(b"\0")
    changes = {
        "model was sha256:": arguments(own_model, path),
        "limit was 16, now 7": [*arguments(model, path), "--limit", "7"],
        "dtype was float32, now bfloat16": arguments(model, path, "--dtype", "bfloat16"),
    }
    for said, argv in changes.items():
        complained = refusal(argv, capsys)
        assert said in complained
        assert "give another --output_dir" in complained
    assert (path / "demo.jsonl").read_bytes() == before


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


@contextmanager
def small_files(size: int) -> Iterator[None]:
    """As on a full disk: no file can grow beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.slow
def test_full_disk_is_one_line_and_no_damage(
    evaluated: SimpleNamespace,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with small_files(2048):
        said = refusal(arguments(model, tmp_path), capsys)
    assert "File too large" in said
    assert (tmp_path / "demo.part0.jsonl").stat().st_size == 2048
    assert evaluate_math.main(arguments(model, tmp_path)) == 0
    assert (tmp_path / "demo.jsonl").read_bytes() == (evaluated.path / "demo.jsonl").read_bytes()


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


def test_revision_changes_when_another_token_ends_a_text(own_model: Path) -> None:
    before = revision_of(str(own_model), None)
    path = own_model / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [2, 5]}))
    assert revision_of(str(own_model), None) != before


def test_revision_is_the_commit() -> None:
    assert revision_of("org/name", SimpleNamespace(_commit_hash="c0ffee")) == "c0ffee"
    assert revision_of("org/name", SimpleNamespace(_commit_hash=None)) == "unknown"


def test_names_of_the_harness_are_known() -> None:
    for names in (["minerva_math, sat_math,math"], ["minerva_math", "sat_math,", "math"]):
        arguments = evaluate_math._parse(["--model", "M", "--benchmarks", *names])
        assert arguments.benchmarks == ["math", "sat"]
    regrade = ["--regrade", "F", "--benchmark", "minerva_math"]
    assert evaluate_math._parse(regrade).benchmark == "math"


@pytest.mark.processes
def test_second_evaluation_is_refused(
    own_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--model", str(own_model), "--benchmarks", "demo", "--limit", "1"]
    path = tmp_path / "evaluation"
    with locked_elsewhere(path):
        assert "is written to by another run (process" in refusal(
            [*argv, "--output_dir", str(path)], capsys
        )
        assert {file.name for file in path.iterdir()} == {".lock"}
