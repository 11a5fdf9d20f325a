"""Fakes of what training runs and evaluations leave, and all that a comparison can show."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vocagnolm.evaluation.records import to_line
from vocagnolm.evaluation.tasks.benchmarks import AVERAGES, PAPER_BENCHMARKS


def write_json(path: Path, content: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def edit(path: Path, benchmark: str = "", **values: object) -> None:
    """Change what a file has of an evaluation, or of one of its benchmarks."""
    content = json.loads(path.read_text())
    (content["benchmarks"].get(benchmark) or content).update(values)
    path.write_text(json.dumps(content))


def edit_settings(directory: Path, benchmark: str = "", **values: object) -> None:
    edit(directory / "settings.json", benchmark, **values)


def record(idx: int, correct: bool) -> dict[str, Any]:
    return {"idx": idx, "prompt_sha256": f"p{idx}", "gold": str(idx), "correct": correct}


def write_evaluation(
    directory: Path, verdicts: Mapping[str, Sequence[bool]], partial: Sequence[str] = ()
) -> Path:
    """Write results with their items; every interval is +-10 points."""

    def numbers(value: float, is_partial: bool) -> dict[str, Any]:
        shown = {"exact": value, "rounded": round(value, 1), "interval": [value - 10, value + 10]}
        return shown | {"marked": ["partial"] if is_partial else []}

    exact = {name: sum(right) / len(right) * 100 for name, right in verdicts.items()}
    columns = {
        name: {
            "n": len(right),
            "correct": sum(right),
            **numbers(exact[name], name in partial),
            "prompts": {"origin": "harness"},
            "marks": [f"partial: {len(right)} of many items"] if name in partial else [],
        }
        for name, right in verdicts.items()
    }
    averages = {
        average: numbers(sum(exact[name] for name in members) / len(members), bool(partial))
        for average, members in AVERAGES.items()
        if set(members) <= set(exact)
    }
    write_json(directory / "results.json", {"benchmarks": columns, "averages": averages})
    asked = {"version": 1, "data_sha256": "d", "prompts_sha256": "p", "max_new_tokens": 1024}
    settings: dict[str, Any] = {"protocol": None, "sampling": None, "grader": "harness@1"}
    settings["model"] = {"name": directory.name, "revision": "abc"}
    settings |= {"engine": "hf", "dtype": "float32", "context": 2048}
    settings["benchmarks"] = {name: dict(asked) for name in verdicts}
    write_json(directory / "settings.json", settings)
    for name, right in verdicts.items():
        lines = [to_line(record(idx, correct)) for idx, correct in enumerate(right)]
        (directory / f"{name}.jsonl").write_text("".join(lines))
    return directory


def write_run(place: Path, log: Sequence[dict[str, float]], **options: Any) -> Path:
    """Write settings and the log of a run; a batch has 1,000 tokens."""
    defaults: dict[str, Any] = {
        "method": "vocagnolm",
        "teacher": ["T"],
        "top_k": 0.4,
        "dataset": "d",
        "seed": 0,
    }
    defaults |= {"data_seed": None, "teacher_losses": None, "global_batch_tokens": 1000}
    write_json(place / "run.json", defaults | options)
    last = max(entry["step"] for entry in log)
    state = {"max_steps": last, "global_step": last, "total_flos": 3e12, "log_history": list(log)}
    write_json(place / "trainer_state.json", state)
    return place


# Runs and evaluations that show everything a comparison can show

# Eight items: only the first is right on 1, only the other on 3, both on 2, neither on 2.
FIRST = [True, False, False, False, True, True, False, False]
OTHER = [False, True, True, True, True, True, False, False]
# Three items of four outputs. The first run has 1, 2 and 0 right ones, the other 4, 2 and 1.
DRAWN_FIRST, DRAWN_OTHER = ["+---", "++--", "----"], ["++++", "--++", "---+"]


def entry(step: int, loss: float, **values: float) -> dict[str, float]:
    return {"step": step, "student_loss_nats": loss, "selected_fraction": 0.4} | values


def write_drawn(directory: Path, rights: list[str]) -> None:
    """Write results of drawn outputs with their items, as an evaluation does."""
    samples = len(rights[0])
    outcomes = []
    lines = []
    for idx, marks in enumerate(rights):
        for sample, mark in enumerate(marks):
            outcomes.append(mark == "+")
            lines.append(to_line(record(idx, mark == "+") | {"sample": sample}))
    write_evaluation(directory, {"gsm8k": outcomes})
    (directory / "gsm8k.jsonl").write_text("".join(lines))
    counts = {"n": len(rights), "samples": samples}
    edit(directory / "results.json", "gsm8k", **counts, marked=["sampled"], marks=["sampled: 4"])
    edit_settings(directory, sampling={"samples": samples, "temperature": 0.6, "top_p": 1.0})


def write_chat(directory: Path, right: list[bool]) -> None:
    write_evaluation(directory, {"gsm8k": right})
    edit(directory / "results.json", "gsm8k", prompts=None, marked=["chat"], marks=["zero-shot"])
    edit_settings(directory, protocol={"name": "zero-shot chat", "template_sha256": "t"})


def compared_runs(root: Path) -> list[Path]:
    """Three settings, one with two seeds; few-shot, chat and drawn; some of it not to be paired."""
    log = [entry(n, 3 - n / 10, tokens_per_s=100.0 + n) for n in range(1, 10)]
    # The first step compiles.
    log[0]["tokens_per_s"] = 1.0
    log.append({"step": 9, "eval_loss": 2.5, "eval_tokens": 99})
    plain: dict[str, Any] = {"method": "cpt", "teacher": None}
    runs = [
        write_run(root / "plain", [entry(9, 2.0, eval_loss=2.75, eval_tokens=99)], **plain),
        write_run(root / "guided", log),
        write_run(root / "guided1", log, seed=1),
        write_run(root / "wider", [entry(1, 1.0)], top_k=0.6, dataset="/home/someone/d"),
    ]
    for run, right in zip(runs, (FIRST, OTHER, OTHER), strict=False):
        write_evaluation(run / "evaluation", dict.fromkeys(PAPER_BENCHMARKS, right))
    for run, right, rights in zip(runs, (FIRST, OTHER), (DRAWN_FIRST, DRAWN_OTHER), strict=False):
        write_chat(run / "evaluation-chat", right[1:])
        write_drawn(run / "evaluation-sampled", rights)
    # The second seed has no SAT, and was asked MATH with other prompts.
    results = json.loads((runs[2] / "evaluation" / "results.json").read_text())
    del results["benchmarks"]["sat"]
    write_json(runs[2] / "evaluation" / "results.json", results)
    edit_settings(runs[2] / "evaluation", "math", prompts_sha256="q")
    teacher = write_evaluation(root / "T", {"gsm8k": FIRST[:5]}, partial=["gsm8k"])
    return [*runs, teacher]
