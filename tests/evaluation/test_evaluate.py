"""evaluate_math.py from the command line to the files it leaves, and everything it rejects."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from inline_grader import graded_inline
from processors import pretend
from transformers import AutoTokenizer

from vocagnolm.evaluation import evaluate as evaluate_math
from vocagnolm.evaluation import runner
from vocagnolm.evaluation.tasks.benchmarks import BENCHMARKS
from vocagnolm.evaluation.tasks.tasks import load_tasks
from vocagnolm.models.load import revision_of

N_ITEMS = 16


@pytest.fixture(scope="module", autouse=True)
def grader() -> Iterator[None]:
    """Grade in this process, as workers take seconds to start."""
    with graded_inline(runner):
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


def test_outputs_are_drawn_in_a_chat(own_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine, drawn = own_model / "mine.yaml", ["--samples", "3", "--temperature", "0.8"]
    # At most 20 tokens, or an answer in a chat would take 2,048.
    record = {"file": "m.jsonl", "question": "{q}", "answer": "{a}", "max_new_tokens_in_chat": 20}
    mine.write_text(json.dumps({"m": record}))
    (own_model / "m.jsonl").write_text("".join(f'{{"q": "{n} + 1?", "a": {n}}}\n' for n in (1, 2)))
    argv = ["--model", str(own_model), "--benchmarks_file", str(mine), "--batch_size", "4"]
    assert evaluate_math.main([*argv, *drawn, "--chat"]) == 2
    assert "--chat needs a chat template" in capsys.readouterr().err
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
    assert f"| {own_model}, avg@3 |" in capsys.readouterr().out


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
    for unit, reason in (("AMX", "the processor multiplies in it, with AMX"), (None, "as it bega")):
        pretend(monkeypatch, unit)
        assert evaluate_math.main(argv) == 0
        assert f"computes in bfloat16 ({reason}" in capsys.readouterr().err
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
