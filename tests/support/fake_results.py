"""Fakes of what train.py and evaluate_math.py leave."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vocagnolm.evaluation.records import to_line
from vocagnolm.evaluation.tasks.benchmarks import AVERAGES, BENCHMARKS


def write_json(path: Path, content: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def edit_results(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    edit(directory / "results.json", change)


def edit_settings(directory: Path, benchmark: str = "", **values: object) -> None:
    """Change the settings of an evaluation, or those of one of its benchmarks."""
    path = directory / "settings.json"
    edit(path, lambda settings: (settings["benchmarks"].get(benchmark) or settings).update(values))


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
            "column": BENCHMARKS[name].column,
            "n": len(right),
            "correct": sum(right),
            **numbers(exact[name], name in partial),
            "prompts": {"name": "gsm8k", "origin": "harness", "sha256": "p"},
            "marks": [f"partial: {len(right)} of many items"] if name in partial else [],
        }
        for name, right in verdicts.items()
    }
    averages = {
        average: numbers(sum(exact[name] for name in members) / len(members), bool(partial))
        for average, members in AVERAGES.items()
        if set(members) <= set(exact)
    }
    results = {
        "benchmarks": columns,
        "averages": averages,
    }
    write_json(directory / "results.json", results)
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
