"""evaluate_math.py from the command line to the files it leaves, and stored outputs again."""

from __future__ import annotations

import gzip
import json
import shutil
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from inline_grader import InlineGrader, graded_inline
from peft import LoraConfig, get_peft_model
from processors import pretend
from transformers import AutoModelForCausalLM, AutoTokenizer

from vocagnolm.evaluation import evaluate as evaluate_math
from vocagnolm.evaluation import regrading, runner
from vocagnolm.evaluation.regrading import regrade
from vocagnolm.evaluation.tasks.benchmarks import BENCHMARKS, Benchmark
from vocagnolm.evaluation.tasks.tasks import load_tasks
from vocagnolm.models.load import revision_of

N_ITEMS = 16


@pytest.fixture(scope="module", autouse=True)
def grader() -> Iterator[None]:
    """Grade in this process, as workers take seconds to start."""
    with graded_inline(runner, regrading):
        yield


@pytest.fixture
def own_model(talker: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(talker, tmp_path / "own"))


def arguments(model: Path, path: Path, *more: str) -> list[str]:
    options = ["--model", str(model), "--benchmarks", "demo", "--limit", str(N_ITEMS)]
    return [*options, "--batch_size", "4", "--output_dir", str(path), *more]


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_outputs_are_all_there_when_it_is_done(
    talker: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate_math.main(arguments(talker, tmp_path)) == 0
    names = {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")}
    assert names == {"demo.jsonl", "results.json", "row.md", "settings.json"}
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["model"]["name"] == str(talker)
    assert results["benchmarks"]["demo"]["n"] == N_ITEMS
    (task,) = load_tasks([BENCHMARKS["demo"]], None, None, N_ITEMS)
    golds = [record["gold"] for record in records(tmp_path / "demo.jsonl")]
    assert golds == [item.gold for item in task.items]
    settings = json.loads((tmp_path / "settings.json").read_text())
    assert settings == results["settings"]
    assert (settings["dtype"], settings["engine"], settings["limit"]) == ("float32", "hf", N_ITEMS)
    assert (tmp_path / "row.md").read_text() in capsys.readouterr().out


def test_adapters_answer_on_top_of_their_model(talker: Path, tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(talker)
    # They change nothing before they are trained.
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    adapted.save_pretrained(tmp_path / "adapters")
    AutoTokenizer.from_pretrained(talker).save_pretrained(tmp_path / "adapters")
    outputs = []
    for model in (talker, tmp_path / "adapters"):
        out = tmp_path / f"of-{model.name}"
        assert evaluate_math.main(arguments(model, out)) == 0
        outputs.append([record["raw_output"] for record in records(out / "demo.jsonl")])
    assert outputs[0] == outputs[1]


def test_results_lie_in_the_model_and_outlive_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {
        "student": "student/evaluation",
        "run/checkpoint-155": "run/evaluation-checkpoint-155",
        "run/checkpoint-best": "run/checkpoint-best/evaluation",
    }
    for model, expected in places.items():
        (tmp_path / model).mkdir(parents=True)
        monkeypatch.chdir(tmp_path / model)
        for name in (str(tmp_path / model), f"{tmp_path / model}/", "."):
            asked = Namespace(model=name, chat=False, sampling=None)
            assert runner.default_dir(asked).absolute() == tmp_path / expected
    asked.model = "org/name"
    assert runner.default_dir(asked) == Path("runs/name/evaluation")


@pytest.mark.parametrize(
    ("device", "processes", "installed", "asked", "begun", "expected"),
    [
        ("cuda", 1, True, {}, "", "vllm"),
        ("cpu", 1, True, {}, "", "hf"),
        ("cuda", 2, True, {}, "", "hf"),
        ("cuda", 1, False, {}, "", "hf"),
        ("cuda", 1, True, {"batch_size": 4}, "", "hf"),
        ("cuda", 1, True, {}, "hf", "hf"),
        ("cuda", 1, True, {"engine": "hf"}, "vllm", "hf"),
    ],
)
def test_vllm_is_the_engine_of_gpus(
    device: str,
    processes: int,
    installed: bool,
    asked: dict[str, Any],
    begun: str,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "is_installed", lambda _: installed)
    arguments = Namespace(**{"model": str(tmp_path), "engine": None, "batch_size": None} | asked)
    if begun:
        (tmp_path / "settings.json").write_text(json.dumps({"engine": begun}))
    state: Any = Namespace(device=Namespace(type=device), num_processes=processes)
    assert runner.engine_of(arguments, runner.EvaluationDirectory(tmp_path), state) == expected
    # Adapters are not a whole model.
    (tmp_path / "adapter_config.json").touch()
    if not (asked or begun):
        assert runner.engine_of(arguments, runner.EvaluationDirectory(tmp_path), state) == "hf"


def test_outputs_are_drawn_in_a_chat(own_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine, drawn = own_model / "mine.yaml", ["--samples", "3", "--temperature", "0.8"]
    # At most 20 tokens, or an answer in a chat would take 2,048.
    record = {"file": "m.jsonl", "question": "{q}", "answer": "{a}", "max_new_tokens_in_chat": 20}
    mine.write_text(json.dumps({"m": record}))
    (own_model / "m.jsonl").write_text("".join(f'{{"q": "{n} + 1?", "a": {n}}}\n' for n in (1, 2)))
    argv = ["--model", str(own_model), "--benchmarks_file", str(mine), "--batch_size", "4"]
    assert evaluate_math.main([*argv, *drawn, "--chat"]) == 2
    assert "--chat needs" in capsys.readouterr().err
    tokenizer = AutoTokenizer.from_pretrained(own_model)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    tokenizer.save_pretrained(own_model)
    assert evaluate_math.main([*argv, *drawn, "--chat"]) == 0
    out = own_model / "evaluation-chat-sampled"
    found = records(out / "m.jsonl")
    order = [(idx, sample) for idx in range(2) for sample in range(3)]
    assert [(record["idx"], record["sample"]) for record in found] == order
    assert {record["protocol"] for record in found} == {"zero-shot chat"}
    results = json.loads((out / "results.json").read_text())
    assert results["settings"]["sampling"] == {"samples": 3, "temperature": 0.8, "top_p": 1.0}
    assert results["settings"]["protocol"]["name"] == "zero-shot chat"
    assert results["benchmarks"]["m"]["marked"] == ["chat", "sampled"]
    printed = capsys.readouterr().out
    column = results["benchmarks"]["m"]
    assert f"| {own_model}, avg@3 | {column['rounded']}* |" in printed
    assert f"| pass@3 | {column['pass_at']['3']['rounded']}* |" in printed


def test_dry_run_needs_no_weights(
    own_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (own_model / "model.safetensors").unlink()
    assert evaluate_math.main(arguments(own_model, tmp_path / "out", "--dry_run")) == 0
    printed = capsys.readouterr().out
    (task,) = load_tasks([BENCHMARKS["demo"]], None, None, N_ITEMS)
    tokenizer = AutoTokenizer.from_pretrained(own_model)
    lengths = [len(tokenizer(prompt).input_ids) for prompt in task.prompts.values()]
    assert f"--- prompt tokens: {min(lengths)} to {max(lengths)}; 0 prompts" in printed
    assert task.prompts[0] in printed
    assert not (tmp_path / "out").exists()


def test_evaluation_goes_on_in_its_precision_when_another_processor_resumes_it(
    talker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    argv = arguments(talker, tmp_path)
    for unit, reason in (("AMX", "with AMX"), (None, "as it began")):
        pretend(monkeypatch, unit)
        assert evaluate_math.main(argv) == 0
        assert reason in capsys.readouterr().err
        assert json.loads((tmp_path / "settings.json").read_text())["dtype"] == "bfloat16"
    assert evaluate_math.main([*argv, "--dtype", "float32"]) == 2
    assert "dtype was bfloat16, now float32" in capsys.readouterr().err


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


def test_revision_of_adapters_changes_when_their_base_does(own_model: Path, tmp_path: Path) -> None:
    base = {"base_model_name_or_path": str(own_model)}
    (tmp_path / "adapter_config.json").write_text(json.dumps(base))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"adapters")
    before = revision_of(str(tmp_path), None)
    (own_model / "model.safetensors").write_bytes(b"trained further")
    assert revision_of(str(tmp_path), None) != before


# Grading stored outputs

OUTPUTS: list[dict[str, Any]] = [
    {"idx": 0, "gold": "8", "raw_output": "5 + 3 = 8.\nThe answer is 8."},
    {"idx": 1, "gold": 8, "raw_output": "The answer is 8.0"},
    {"idx": 2, "gold": 2.5, "raw_output": "The answer is 5/2."},
    {"idx": 3, "gold": "9", "raw_output": ""},
    {"idx": 4, "gold": "x", "raw_output": "The answer is \ud83d.", "note": "lone"},
    {"idx": 5, "gold": "7", "raw_output": "The answer is \x007\x1b."},
    {"idx": 6, "gold": "8", "raw_output": "naïve 数学: 8", "finish_reason": None},
]


def write(path: Path, outputs: list[dict[str, Any]]) -> Path:
    data = "".join(json.dumps(output) + "\n" for output in outputs).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def graded(directory: Path, benchmark: Benchmark, outputs: list[Any]) -> list[Any]:
    """Grade records, and return what is written."""
    output = directory / "graded.jsonl"
    regrade(write(directory / "outputs.jsonl", outputs), benchmark, output)
    return records(output)


@pytest.mark.parametrize("name", ["outputs.jsonl", "outputs.jsonl.gz"])
def test_regrade_writes_what_the_grader_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    file, output = write(tmp_path / name, OUTPUTS), tmp_path / "new" / "graded.jsonl"
    argv = ["--regrade", str(file), "--benchmark", "gsm8k"]
    assert evaluate_math.main([*argv, "--output", str(output)]) == 0
    pairs = [(record["raw_output"], str(record["gold"])) for record in OUTPUTS]
    verdicts = list(InlineGrader().grade(BENCHMARKS["gsm8k"].answer_kind, pairs))
    found = records(output)
    for record, verdict, written in zip(OUTPUTS, verdicts, found, strict=True):
        assert written == record | {"benchmark": "gsm8k"} | asdict(verdict)
    assert [record["correct"] for record in found][:4] == [True, True, True, False]
    printed, complained = capsys.readouterr()
    right = sum(record["correct"] for record in found)
    assert f"as gsm8k: {100 * right / 7:.1f} (95 % interval" in printed
    assert f"{right} of 7 right" in printed
    # Without a file, lines and summary do not mix.
    assert complained == ""
    assert evaluate_math.main(argv) == 0
    assert capsys.readouterr() == (output.read_text(), printed)
    # Earlier verdicts are replaced, and the same file may be.
    damaged = [record | {"correct": None, "decided_by": 3} for record in found]
    before = output.read_bytes()
    regrade(write(output, damaged), BENCHMARKS["gsm8k"], output)
    assert output.read_bytes() == before


def test_regrade_marks_answers_of_a_chat(tmp_path: Path) -> None:
    boxed = {"idx": 0, "gold": "8", "raw_output": r"It is $\boxed{8}$."}
    (record,) = graded(tmp_path, BENCHMARKS["gsm8k"].in_chat(), [boxed])
    assert (record["correct"], record["protocol"]) == (True, "zero-shot chat")


@pytest.mark.parametrize(
    ("name", "output", "gold", "right"),
    [
        ("gsm8k", "The answer is 1250.", "1,250 inches", True),
        ("sat", "The answer is (B).", "b", True),
        ("sat", "The answer is (B).", "(B)", True),
        ("sat", "The answer is (B).", "B.", True),
        ("sat", "The answer is (B).", "c", False),
    ],
)
def test_regrade_normalises_golds(
    name: str, output: str, gold: str, right: bool, tmp_path: Path
) -> None:
    record = {"idx": 0, "gold": gold, "raw_output": output}
    assert graded(tmp_path, BENCHMARKS[name], [record])[0]["correct"] == right


def test_regrade_sums_up_several_outputs_of_an_item(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By hand: 2 and 1 of 2 are right, so 75 %, and every item has a right one."""
    drawn = []
    for idx, sample, text in ((0, 0, "8"), (0, 1, "8"), ("1", 0, "8"), (1, 1, "9")):
        drawn.append({"idx": idx, "sample": sample, "gold": "8", "raw_output": text})
    graded(tmp_path, BENCHMARKS["gsm8k"], drawn)
    printed = capsys.readouterr().out
    assert "as gsm8k: avg@2 75.0 (95 % interval" in printed
    assert "pass@2 100.0, 3 of 4 right" in printed
