"""Runs and evaluations that show everything a comparison can show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fake_results import edit_results, edit_settings, record, write_evaluation, write_run

from vocagnolm.evaluation.records import to_line
from vocagnolm.evaluation.tasks.benchmarks import PAPER_BENCHMARKS

# Eight items: only the first is right on 1, only the other on 3, both on 2, neither on 2.
FIRST = [True, False, False, False, True, True, False, False]
OTHER = [False, True, True, True, True, True, False, False]
# Three items of four outputs. The first run has 1, 2 and 0 right ones, the other 4, 2 and 1.
DRAWN_FIRST, DRAWN_OTHER = ["+---", "++--", "----"], ["++++", "--++", "---+"]


def entry(step: int, loss: float, **values: float) -> dict[str, float]:
    return {"step": step, "student_loss_nats": loss, "selected_fraction": 0.4} | values


def write_drawn(directory: Path, rights: list[str], temperature: float = 0.6) -> Path:
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

    def drawn(results: dict[str, Any]) -> None:
        column = results["benchmarks"]["gsm8k"]
        column.update(n=len(rights), samples=samples, marked=["sampled"], marks=["sampled: 4"])

    edit_results(directory, drawn)
    sampling = {"samples": samples, "temperature": temperature, "top_p": 1.0}
    edit_settings(directory, sampling=sampling)
    return directory


def in_chat(results: dict[str, Any]) -> None:
    for column in results["benchmarks"].values():
        column.update(prompts=None, marked=["chat"], marks=["zero-shot"])


def write_chat(directory: Path, right: list[bool]) -> None:
    edit_results(write_evaluation(directory, {"gsm8k": right}), in_chat)
    edit_settings(directory, protocol={"name": "zero-shot chat", "template_sha256": "t"})


def compared_runs(root: Path) -> list[Path]:
    """Three settings, one with two seeds; few-shot, chat and drawn; some of it not to be paired."""
    log = [entry(n, 3 - n / 10, tokens_per_s=100.0 + n) for n in range(1, 10)]
    # The run was extended, so it ended twice.
    log.insert(4, {"step": 4, "train_runtime": 60.0})
    log.append({"step": 9, "train_runtime": 7200.0, "eval_loss": 2.5, "eval_tokens": 99})
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
    edit_results(runs[2] / "evaluation", lambda results: results["benchmarks"].pop("sat"))
    edit_settings(runs[2] / "evaluation", "math", prompts_sha256="q")
    teacher = write_evaluation(root / "T", {"gsm8k": FIRST[:5]}, partial=["gsm8k"])
    return [*runs, teacher]
