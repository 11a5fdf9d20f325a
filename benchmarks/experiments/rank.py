"""Measure how well the scores of `vocagnolm rank` separate wrong solutions from right ones.

    python -m benchmarks.experiments.rank --output_dir runs/rank --seeds 0 1 2
    python -m benchmarks.experiments.rank --output_dir runs/rank \
        --problems gsm8k_train.jsonl --student SMOLLM2 --teacher GEMMA3

Run with OMP_NUM_THREADS=1. The first command ranks the demo's pages, 40 % of them wrong, as they
are and as problems alone, without the noise lines around them. The student is the one that all runs
start from, one that has read such pages (`cpt`), or one that has read only right ones
(`reference`). The second command exchanges the solutions of half of 200 problems. Every number is
an area under the curve: the chance that a right document scores better than a wrong one. 0.5 means
no information. The last rows are `TRIALS`, scores that `vocagnolm rank` does not have.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch

from benchmarks.experiments.worlds import BoolArray, DemoWorld, write_corpus
from vocagnolm.__main__ import main as vocagnolm
from vocagnolm.alignment import aggregate_losses, align_spans, covered_shares
from vocagnolm.demo import world as demo_world
from vocagnolm.demo.run import train
from vocagnolm.shell.io import markdown_table
from vocagnolm.store.format import Store
from vocagnolm.store.rank import SCORES

PAGES, WRONG_SHARE = 2000, 0.4
STUDENTS = ("base", "cpt", "reference")
PROBLEMS, EXCHANGED = 200, 100
FloatArray = npt.NDArray[np.float64]
# A model is sure of a token if its loss is below this.
SURE_NATS = 1.0
# Other scores of a document, computed from its tokens.
TRIALS = (
    "least excess",
    "excess, lowest 5 %",
    "excess, median",
    "gain: mean of max(0, excess)",
    "excess where the student is sure",
    "excess where the teacher is sure",
    "excess weighted by p_T",
)


class RankWorld(DemoWorld):
    """The demo's world, with one more student that has read the pages."""

    def make_cpt(self, path: Path, seed: int) -> None:
        """Train the student on the pages, wrong ones included."""
        pages = self.need("pages", seed)
        train(self.student(seed), pages, path, *self.options, "--method=cpt", f"--seed={seed}")

    def model(self, name: str, seed: int) -> Path:
        """Return the path of a student."""
        return self.student(seed) if name == "base" else self.need(name, seed)


def pages_with_truth(count: int, seed: int) -> Iterator[tuple[str, str, bool]]:
    """Draw the demo's pages; yield each, its problem without noise, and whether it is right."""
    rng, excluded = Random(f"pages {seed}"), demo_world.held_out_questions()
    for _ in range(count):
        # The twin draws the same problem with its right solution. Its lines may have another order,
        # because a corruption draws random numbers before the problem is placed.
        twin = Random()
        twin.setstate(rng.getstate())
        page = demo_world.page(rng, WRONG_SHARE, excluded)
        right_page = demo_world.page(twin, 0.0, excluded)
        yield page, problem_in(page), problem_in(page) == problem_in(right_page)


def problem_in(page: str) -> str:
    """Return a page's problem: the line with the question, and the line below with the answer."""
    lines = page.split("\n")
    at = next(number for number, line in enumerate(lines) if line.startswith("Q: "))
    return "\n".join(lines[at : at + 2])


def exchanged(texts: Sequence[str], count: int, rng: Random) -> tuple[list[str], BoolArray]:
    """Give each of some problems the solution of the next one; return which are unchanged.

    The solution is everything after the first line.
    """
    chosen = sorted(rng.sample(range(len(texts)), count))
    changed, is_right = list(texts), np.ones(len(texts), bool)
    for at, other in zip(chosen, [*chosen[1:], chosen[0]], strict=True):
        question, solution = texts[at].partition("\n")[0], texts[other].partition("\n")[2]
        changed[at] = f"{question}\n{solution}"
        is_right[at] = False
    return changed, is_right


def area_under_curve(scores: FloatArray, is_right: BoolArray) -> float:
    """Return the chance that a right document's score is above a wrong one's; ties count half."""
    # The rank sum minus its smallest value counts the pairs (Mann and Whitney 1947).
    ranks = pd.Series(scores).rank().to_numpy()
    right, wrong = int(is_right.sum()), int((~is_right).sum())
    return float((ranks[is_right].sum() - right * (right + 1) / 2) / (right * wrong))


def trial_scores(text: str, student: Store, teacher: Store) -> dict[str, float]:
    """Score a document by `TRIALS`; larger is better."""
    own, other = student.document(text), teacher.document(text)
    assert own is not None
    assert other is not None
    ranges = align_spans(own.spans, other.spans)
    shares = covered_shares(own.spans, other.spans, ranges)
    student_loss = own.losses.astype(np.float64)
    teacher_loss = aggregate_losses(other.losses, ranges, "share", shares)
    excess, likely = student_loss - teacher_loss, np.exp(-teacher_loss)

    def mean_where(chosen: BoolArray) -> float:
        return float(excess[chosen].mean()) if chosen.any() else 0.0

    values = (
        excess.min(),
        np.quantile(excess, 0.05),
        np.median(excess),
        np.maximum(excess, 0.0).mean(),
        mean_where(student_loss < SURE_NATS),
        mean_where(teacher_loss < SURE_NATS),
        (likely * excess).sum() / likely.sum(),
    )
    return dict(zip(TRIALS, map(float, values), strict=True))


def run(*words: str) -> None:
    """Run a command of `vocagnolm`, which must succeed."""
    if status := vocagnolm(words):
        raise SystemExit(status)


def measure(
    directory: Path, student: Path, teacher: Path, texts: Sequence[str], is_right: BoolArray
) -> dict[str, float]:
    """Rank texts with the command, and return the area under the curve of every score and trial.

    The texts and the teacher's store are written next to `directory`, for the next student.
    """
    pages = directory.parent / "texts"
    losses = directory.parent / "teacher"
    if not pages.exists():
        directory.parent.mkdir(parents=True, exist_ok=True)
        write_corpus(pages, texts)
    corpus = f"--dataset={pages}"
    run("score", f"--teacher={teacher}", corpus, f"--output_dir={losses}")
    models = (f"--student={student}", f"--teacher_losses={losses}")
    run("rank", *models, corpus, f"--output_dir={directory}")
    ranks = pd.read_json(directory / "ranks.jsonl", lines=True)
    assert len(ranks) == len(texts)
    areas = {}
    for name, larger_is_better in SCORES.items():
        scores = ranks[name].to_numpy(np.float64)
        areas[name] = area_under_curve(scores if larger_is_better else -scores, is_right)
    stores = Store(directory / "student_losses"), Store(losses)
    trials = pd.DataFrame([trial_scores(text, *stores) for text in texts])
    for name in TRIALS:
        areas[name] = area_under_curve(trials[name].to_numpy(), is_right)
    return areas


def measure_demo(root: Path, seed: int, count: int) -> dict[str, dict[str, float]]:
    """Return the areas of pages and of problems alone for each of `STUDENTS`, by name."""
    world = RankWorld(root)
    teacher = world.need("teacher", seed).resolve()
    pages, problems, right = zip(*pages_with_truth(count, seed), strict=True)
    is_right = np.array(right)
    areas = {}
    for name in STUDENTS:
        student = world.model(name, seed)
        for kind, texts in (("pages", pages), ("problems", problems)):
            directory = world.seed_dir(seed) / kind / name
            areas[f"{kind}, {name}"] = measure(directory, student, teacher, texts, is_right)
    return areas


def table(columns: dict[str, list[dict[str, float]]]) -> str:
    """Return a table with a row per score and a column per corpus and student; means over seeds."""
    rows = [["score", *columns]]
    for name in (*SCORES, *TRIALS):
        row = [name]
        for areas in columns.values():
            values = [of_seed[name] for of_seed in areas]
            spread = f" +- {statistics.stdev(values):.3f}" if len(values) > 1 else ""
            row.append(f"{statistics.mean(values):.3f}{spread}")
        rows.append(row)
    return markdown_table(rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--output_dir", type=Path, required=True)
    add("--seeds", type=int, nargs="+", default=[0])
    add("--pages", type=int, default=PAGES, help="of each seed")
    add("--problems", type=Path, help=".jsonl of problems with solutions, instead of the demo")
    add("--student", type=Path, help="that reads the problems")
    add("--teacher", type=Path, help="that reads the problems")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    root = arguments.output_dir.resolve()
    columns: dict[str, list[dict[str, float]]] = {}
    if arguments.problems:
        lines = arguments.problems.read_text(encoding="utf-8").splitlines()
        texts = [json.loads(line)["text"] for line in lines[:PROBLEMS]]
        texts, is_right = exchanged(texts, EXCHANGED, Random(0))
        models = arguments.student, arguments.teacher
        columns["problems"] = [measure(root / "problems/student", *models, texts, is_right)]
    else:
        for seed in arguments.seeds:
            for name, areas in measure_demo(root, seed, arguments.pages).items():
                columns.setdefault(name, []).append(areas)
    sys.stdout.write(table(columns) + "\n")


if __name__ == "__main__":
    main()
