"""Print the tables of `pool` and `forgetting`.

    python -m benchmarks.experiments.pool_results
    python -m benchmarks.experiments.pool_results --write    # into results and notebook

Reads `pool.jsonl` and `forgetting.jsonl` beside this file, or those of `--directory`. Nothing is
trained. Numbers are nats per character, means over seeds, and in brackets the smallest and the
largest of several.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.experiments.ceiling import first_line, packing_noise
from benchmarks.experiments.forgetting import RATES, RULES_OF_CURVES, RULES_OF_EPOCHS
from benchmarks.experiments.plots import NOTEBOOK, PAGE, markdown_table, write_between
from benchmarks.experiments.pool import AGAIN, JUNK, PAGE_ARMS, TOKEN_ARMS, read_rows
from benchmarks.experiments.real_results import LABELS, signed

# What the tables call the arms. Others are scores of `rank`, or rules for tokens.
TITLES = {
    "random": "a random quarter",
    "oracle": "mathematics alone: the ceiling",
    "excess_reversed": "`rank --by excess --reverse`",
    "student_reversed": "`rank --by student --reverse`",
}
# What they call the rules of `forgetting`.
RULES = LABELS | {
    "const": "equal weights",
    "again": "equal weights, another order",
    "oracle": "nothing wrong: the ceiling",
}
GENERAL = ("encyclopaedia", "stories", "code", "dialogue")
Row = dict[str, Any]


def clean(row: Row) -> float:
    """Return the loss of held-out clean text, the mean over its kinds."""
    return statistics.mean(row["nats"].values())


def general(row: Row) -> float:
    """Return the loss of general text, the mean over its kinds."""
    return statistics.mean(row["general"].values())


def cell(values: Iterable[float]) -> str:
    """Return the mean difference and, of several, the smallest and the largest."""
    found = list(values)
    if not found:
        return ""
    mean = signed(statistics.mean(found))
    return f"{mean} ({signed(min(found))} to {signed(max(found))})" if found[1:] else mean


def noise_of(pairs: Iterable[tuple[Row, Row]], loss: Callable[[Row], float] = clean) -> float:
    """Return the standard deviation between two orders of the same pages, over all pairs."""
    squares = [packing_noise([loss(one), loss(other)]) ** 2 for one, other in pairs]
    return statistics.mean(squares) ** 0.5 if squares else float("nan")


# -- Pools ---------------------------------------------------------------------------------------


def pool_tables(rows: list[Row]) -> Iterator[str]:
    """Yield the tables of each share of junk and each teacher."""
    start = next((row for row in rows if row["arm"] == "start"), None)
    pairs = []
    for row in rows:
        again = {"random": "again", "oracle": "oracle_again"}.get(row["arm"])
        pairs += [(row, other) for other in rows if other["arm"] == again and at(other) == at(row)]
    noise = noise_of(pairs)
    for junk in sorted({row["junk"] for row in rows}, reverse=True):
        for teacher in sorted({row["teacher"] for row in rows} - {""}) or [""]:
            mine = [row for row in rows if row["junk"] == junk and row["teacher"] in ("", teacher)]
            yield f"{junk} % junk, {teacher}:"
            if any(row["arm"] == "oracle" for row in mine):
                yield pool_table(mine, noise, start)
            if areas := auc_table([row for row in mine if row["arm"] == "auc"]):
                yield areas


def at(row: Row) -> tuple[int, int]:
    """Return the pool of a run."""
    return row["junk"], row["seed"]


def pool_table(rows: list[Row], noise: float, start: Row | None) -> str:
    """Return the arms of one share of junk and one teacher, with the ceiling above them."""
    by_arm = {
        arm: {row["seed"]: row for row in rows if row["arm"] == arm}
        for arm in (*PAGE_ARMS, *TOKEN_ARMS)
    }
    random, oracle = by_arm["random"], by_arm["oracle"]
    ceilings = {s: clean(random[s]) - clean(oracle[s]) for s in random.keys() & oracle.keys()}
    line = ""
    if ceilings:
        line = first_line(statistics.mean(ceilings.values()), noise, "nats per character") + "\n\n"
    lines = []
    if start:
        lines.append(["before", "", cell(clean(start) - clean(r) for r in random.values()), ".000"])
    for arm, by_seed in by_arm.items():
        if arm in AGAIN:
            continue  # They show the noise.
        seeds = sorted(by_seed.keys() & random.keys())
        if not seeds:
            continue
        kept = [right_share(by_seed[s]) for s in seeds]
        title = TITLES.get(arm, f"`rank --by {arm}`" if arm in PAGE_ARMS else arm)
        cells = [f"{title} ({len(seeds)})", f"{100 * statistics.mean(kept):.0f} %"]
        cells += [cell(clean(by_seed[s]) - clean(random[s]) for s in seeds)]
        if start:
            lost = [general(by_seed[s]) - general(start) for s in seeds]
            cells += [signed(statistics.mean(lost))]
        lines.append(cells)
    heads = ["trained on (seeds)", "mathematics", "loss, less random", "general text, less before"]
    heads = heads if start else heads[:3]
    return line + markdown_table(heads, lines)


def right_share(row: Row) -> float:
    """Return the share of the tokens of mathematics among those that a run trained on."""
    return float(sum(share for kind, share in row["shares"].items() if kind not in JUNK))


def auc_table(rows: list[Row]) -> str:
    """Return the AUC of each score, over all junk and against each kind, mean over seeds."""
    if not rows:
        return ""
    lines = []
    for score in rows[0]["auc"]:
        found = [row["auc"][score] for row in rows]
        cells = [
            score,
            " ".join(f"{area:.2f} [{low:.2f}, {high:.2f}]" for area, low, high in found),
        ]
        for kind in JUNK:
            mean = statistics.mean(row["auc_by_kind"][score][kind] for row in rows)
            cells.append(f"{mean:.2f}")
        lines.append(cells)
    return markdown_table(["AUC", "each seed [95 %]", *JUNK], lines)


# -- Forgetting ----------------------------------------------------------------------------------


def curve_table(rows: list[Row], world: str, *, short: bool = False) -> str:
    """Return clean and general loss of each rule and rate, and the distance from equal weights.

    A short table ends after the means of both, and has no other order of the same pages.

    The distance is the general loss of a rule less that of equal weights at the same clean loss, on
    the line through equal weights at all rates of the same seed. Outside the line's ends it is left
    out.
    """
    mine = [row for row in rows if row["pages"] == world]
    lines = []
    for rule in RULES_OF_CURVES:
        for rate in RATES:
            found = [r for r in mine if (r["rule"], r["learning_rate"]) == (rule, rate)]
            if not found or (short and rule == "again"):
                continue
            distances = []
            for row in found:
                equal = [r for r in mine if (r["rule"], r["seed"]) == ("const", row["seed"])]
                points = sorted((clean(r), general(r)) for r in equal)
                expected = on_line(points, clean(row))
                if expected is not None:
                    distances.append(general(row) - expected)
            cells = [f"{RULES[rule]} ({len(found)})", f"{rate:g}"]
            cells += [f"{statistics.mean(clean(r) for r in found):.4f}"]
            cells += [f"{statistics.mean(general(r) for r in found):.4f}"]
            for kind in GENERAL:
                cells.append(f"{statistics.mean(r['general'][kind] for r in found):.3f}")
            lines.append([*cells, cell(distances)])
    heads = ["rule (seeds)", "rate", "domain", "general", *GENERAL, "off the curve"]
    columns = 4 if short else len(heads)
    return markdown_table(heads[:columns], [cells[:columns] for cells in lines])


def forgetting_tables(rows: list[Row], *, short: bool = False) -> Iterator[str]:
    """Yield the tables of the curves, each with the noise of packing first, and of the epochs."""
    for world in ("clean", "noisy"):
        if any(row["pages"] == world for row in rows):
            again = {r["seed"]: r for r in rows if (r["pages"], r["rule"]) == (world, "again")}
            key = (world, "const", RATES[1])
            equal = [r for r in rows if (r["pages"], r["rule"], r["learning_rate"]) == key]
            pairs = [(r, again[r["seed"]]) for r in equal if r["seed"] in again]
            noises = f"domain {noise_of(pairs):.4f}, general {noise_of(pairs, general):.4f}"
            yield f"{world.capitalize()} pages. Noise of packing: {noises}."
            yield curve_table(rows, world, short=short)
    if any(row["pages"] == "epochs" for row in rows):
        yield epochs_table(rows)


def on_line(points: list[tuple[float, float]], x: float) -> float | None:
    """Return the height of the line through points, sorted, at x; None outside of them."""
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 <= x <= x1 and x0 < x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return None


def epochs_table(rows: list[Row]) -> str:
    """Return the clean loss after each epoch, the best of them, and the general loss there."""
    lines = []
    for rule in RULES_OF_EPOCHS:
        found = [row for row in rows if row["pages"] == "epochs" and row["rule"] == rule]
        if not found:
            continue
        cells = [f"{RULES[rule]} ({len(found)})"]
        for epochs in zip(*(row["epochs"] for row in found), strict=True):
            cells.append(f"{statistics.mean(problems(epoch) for epoch in epochs):.3f}")
        best = [min(row["epochs"], key=problems) for row in found]
        cells.append(cell(problems(epoch) for epoch in best))
        cells.append(f"{statistics.mean(general(epoch) for epoch in best):.3f}")
        lines.append(cells)
    heads = ["rule (seeds)", *(f"epoch {n}" for n in range(1, 7)), "best", "general, at its best"]
    return markdown_table(heads, lines)


def problems(epoch: Row) -> float:
    """Return the loss of held-out problems, which are what the epochs train on."""
    return float(statistics.mean(epoch["nats"][kind] for kind in ("gsm8k", "math")))


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--directory", type=Path, default=Path(__file__).parent)
    parser.add_argument("--write", action="store_true", help="into results and notebook")
    arguments = parser.parse_args()
    directory: Path = arguments.directory
    pools = read_rows(directory / "pool.jsonl")
    tables = list(pool_tables(pools)) if pools else []
    for table in tables:
        sys.stdout.write(f"{table}\n\n")
    if arguments.write:
        write_between("pool", NOTEBOOK, "\n\n".join(tables))
    rows = read_rows(directory / "forgetting.jsonl")
    for table in forgetting_tables(rows):
        sys.stdout.write(f"{table}\n\n")
    if arguments.write and rows:
        write_between("forgetting", NOTEBOOK, "\n\n".join(forgetting_tables(rows)))
        write_between("forgetting", PAGE, "\n\n".join(forgetting_tables(rows, short=True)))


if __name__ == "__main__":
    main()
