"""The tables and figures of `real`, from `real.jsonl`.

    python -m benchmarks.experiments.real_results            # print the tables
    python -m benchmarks.experiments.real_results --write    # into docs/results.md, too

Run in the repository's root; nothing is trained. A table has one student, teacher, number of tokens
and learning rate. `docs/images/make.py` draws the figures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.experiments import plots, real_pages
from benchmarks.experiments.real import MODELS, RESULTS, RULES
from vocagnolm.report.plots import COLORS, draw_curves, new_plot

# What the runs of a table have in common.
GROUP = ("student", "teacher", "tokens", "learning_rate")
WORLDS = {"noisy": "wrong solutions", "mixed": "code and boilerplate", "clean": "clean pages"}
LABELS = {
    "accept": "acceptance",
    "share": "share, top 40 %",
    "paper": "the paper's: max, top 40 %",
    "rho1": "Rho-1, top 40 %",
    "shuffled": "acceptance, shuffled",
    "random": "a random 40 %",
    "cpt": "CPT, packed without a teacher",
}
CURVES = {"const": "equal weights", "paper": "the paper's: max, top 40 %", "accept": "acceptance"}
STEP_TOKENS = 4096
Row = dict[str, Any]


class Results:
    """The runs of a table.

    Args:
        rows: results that agree in `GROUP`.
    """

    def __init__(self, rows: list[Row]):
        self.rows = {(row["world"], row["rule"], row["seed"]): row for row in rows}

    def runs(self, world: str, rule: str) -> list[Row]:
        """Return the runs of a rule, by seed."""
        keys = sorted(key for key in self.rows if key[:2] == (world, rule))
        return [self.rows[key] for key in keys]

    def differences(self, world: str, rule: str, kind: str | None = None) -> list[float]:
        """Return nats per character less those of equal weights, for each seed that has both.

        Args:
            world: of the pages.
            rule: of the runs.
            kind: of held-out text; None for the mean of all kinds.
        """
        differences = []
        for row in self.runs(world, rule):
            equal = self.rows.get((world, "const", row["seed"]))
            if equal:
                differences.append(nats(row, kind) - nats(equal, kind))
        return differences

    def cell(self, world: str, rule: str) -> str:
        """Return the mean of the differences and the least and the largest of them."""
        values = self.differences(world, rule)
        if not values:
            return ""
        mean = signed(statistics.mean(values))
        return f"{mean} ({signed(min(values))} to {signed(max(values))})"


def nats(row: Row, kind: str | None = None) -> float:
    """Return nats per character of a kind of text, or the mean of all kinds."""
    return float(row["nats"][kind] if kind else statistics.mean(row["nats"].values()))


def signed(value: float) -> str:
    """Return a difference with four digits and without the zero before the point."""
    return f"{value:+.4f}".replace("0.", ".", 1)


def read_rows(path: Path) -> list[Row]:
    """Return all finished runs, in their order."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def read_results(path: Path = RESULTS) -> dict[tuple[Any, ...], Results]:
    """Return finished runs by what the runs of a table have in common; the most runs first."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in read_rows(path):
        if row["rule"] in RULES:
            groups.setdefault(tuple(row[name] for name in GROUP), []).append(row)
    by_size = sorted(groups.items(), key=lambda group: -len(group[1]))
    return {key: Results(rows) for key, rows in by_size}


def largest() -> Results:
    """Return the runs of the largest table."""
    return next(iter(read_results().values()))


def rules_table(results: Results) -> str:
    """Return all rules in all worlds, as differences from equal weights."""
    heads = []
    for world, label in WORLDS.items():
        heads.append(f"{label} ({len(results.runs(world, 'const'))} seeds)")
    rows = []
    for rule, label in LABELS.items():
        rows.append([label, *(results.cell(world, rule) for world in WORLDS)])
    return plots.markdown_table(["rule", *heads], rows)


def kinds_table(results: Results, world: str) -> str:
    """Return all rules on each kind of held-out text, as means of the differences."""
    rows = []
    for rule, label in LABELS.items():
        cells = []
        for kind in real_pages.KINDS:
            values = results.differences(world, rule, kind)
            cells.append(signed(statistics.mean(values)) if values else "")
        rows.append([label, *cells])
    return plots.markdown_table([f"rule, {WORLDS[world]}", *real_pages.KINDS], rows)


def losses_table(path: Path = RESULTS) -> str:
    """Return nats per character of the models as they are, and of runs with equal weights."""
    rows = []
    for row in read_rows(path):
        if row["rule"] in (*MODELS, "const"):
            name = f"{row['rule']}, {row['world']}, seed {row['seed']}, {row['learning_rate']:g}"
            rows.append([name, *(f"{value:.4f}" for value in row["nats"].values())])
    return plots.markdown_table(["model", *real_pages.KINDS], rows)


def draw_rules(results: Results) -> Any:
    """Draw a dot for each seed of each rule."""
    rules = [rule for rule in LABELS if results.runs("noisy", rule)]
    figure, panels = new_plot(7, 0.3 * len(rules) + 1, columns=len(WORLDS), sharey=True)
    for axes, (world, title) in zip(panels, WORLDS.items(), strict=True):
        axes.axvline(0, color=axes.spines["left"].get_edgecolor(), linewidth=0.8)
        for place, rule in enumerate(rules):
            values = results.differences(world, rule)
            color = COLORS[0] if rule == "accept" else COLORS[-1]
            axes.plot(values, [place] * len(values), "o", color=color, markersize=4, alpha=0.7)
        axes.set_title(title, fontsize=9, loc="left")
        axes.set_yticks(range(len(rules)), [LABELS[rule] for rule in rules])
        axes.grid(axis="x", linewidth=0.3)
    panels[0].invert_yaxis()
    panels[1].set_xlabel("nats per character, less equal weights; a dot is a seed", fontsize=8)
    return figure


def draw_losses(results: Results) -> Any:
    """Draw the held-out loss against tokens: the mean of the seeds, and their range."""
    curves: dict[str, dict[str, pd.DataFrame]] = {}
    for world, title in WORLDS.items():
        by_rule = {}
        for rule, label in CURVES.items():
            points = [point for row in results.runs(world, rule) for point in row["held_out_loss"]]
            log = pd.DataFrame(points, columns=["step", "loss"])
            curve = log.groupby("step").loss.agg(mean="mean", low="min", high="max").reset_index()
            by_rule[label] = curve.assign(tokens=curve.step * STEP_TOKENS)
        curves[f"held-out loss, {title}"] = by_rule
    return draw_curves(curves)


def main() -> None:
    """Print the tables, and write the main one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", action="store_true", help="into docs/results.md")
    arguments = parser.parse_args()
    groups = read_results()
    for (student, teacher, tokens, rate), results in groups.items():
        sys.stdout.write(f"\n{student} <- {teacher}, {tokens:,} tokens, learning rate {rate:g}\n\n")
        sys.stdout.write(f"{rules_table(results)}\n")
        for world in WORLDS:
            sys.stdout.write(f"\n{kinds_table(results, world)}\n")
    sys.stdout.write(f"\n{losses_table()}\n")
    if arguments.write:
        plots.write_between("real", plots.PAGE, rules_table(largest()))


if __name__ == "__main__":
    main()
