"""Fakes of what evaluate_math.py leaves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vocagnolm.evaluation.records import to_line
from vocagnolm.evaluation.tasks.benchmarks import AVERAGES, BENCHMARKS


def write_json(path: Path, content: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def write_results(
    directory: Path,
    exact: Mapping[str, float],
    *,
    name: str = "m",
    around: float = 2.0,
    partial: Sequence[str] = (),
    n: int = 100,
) -> Path:
    """Write a results.json of some accuracies; intervals are `around` points to either side."""

    def numbers(value: float, is_partial: bool) -> dict[str, Any]:
        interval = [value - around, value + around]
        marked = ["partial"] if is_partial else []
        return {
            "exact": value,
            "rounded": round(value, 1),
            "interval": interval,
            "marked": marked,
        }

    columns = {
        one: {
            "column": BENCHMARKS[one].column,
            "version": 1,
            "n": n,
            "correct": round(n * value / 100),
            **numbers(value, one in partial),
            "unanswered": 0.0,
            "math_verify": None,
            "prompts": {"name": "gsm8k", "origin": "harness", "sha256": "p"},
            "data": {"origin": "d", "digest": "d", "verified": True},
            "marks": [f"partial: {n} of many items"] if one in partial else [],
        }
        for one, value in exact.items()
    }
    averages = {
        average: numbers(sum(exact[one] for one in members) / len(members), bool(partial))
        for average, members in AVERAGES.items()
        if set(members) <= set(exact)
    }
    results = {
        "model": {"name": name, "revision": "abc"},
        "grader": "harness@1",
        "second_opinion": "math-verify 9",
        "benchmarks": columns,
        "averages": averages,
        "marks": [],
    }
    write_json(directory / "results.json", results)
    return directory


def record(idx: int, correct: bool) -> dict[str, Any]:
    return {"idx": idx, "prompt_sha256": f"p{idx}", "gold": str(idx), "correct": correct}


def write_evaluation(
    directory: Path, verdicts: Mapping[str, Sequence[bool]], partial: Sequence[str] = ()
) -> Path:
    """Write results with their items; every interval is 10 points to either side."""
    exact = {name: sum(right) / len(right) * 100 for name, right in verdicts.items()}
    (n,) = {len(right) for right in verdicts.values()}
    write_results(directory, exact, name=directory.name, around=10, partial=partial, n=n)
    for name, right in verdicts.items():
        lines = [to_line(record(idx, correct)) for idx, correct in enumerate(right)]
        (directory / f"{name}.jsonl").write_text("".join(lines))
    return directory
