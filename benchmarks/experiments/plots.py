"""Write the tables of `acceptance` into docs/results.md and the notebook.

    python -m benchmarks.experiments.plots

Run in the repository's root. All numbers come from `acceptance.jsonl`, and nothing is trained.
`docs/images/make.py` draws the figures, light and dark.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.experiments.acceptance import DEMO_METRICS, DEMOS, METRICS, PARTS, read_results
from benchmarks.experiments.ceiling import packing_noise, recorded_gains
from vocagnolm.report.plots import COLORS, add_legend, new_plot

PAGE, NOTEBOOK = Path("docs/results.md"), Path("benchmarks/NOTEBOOK.md")
WORLDS = {
    "noisy": "noisy pages",
    "inserted-40": "junk between words",
    "clean": "clean pages",
    "demo": "demo",
    "demo-right": "demo, none wrong",
}
LABELS = {
    "accept": "acceptance",
    "share40": "share, top 40 %",
    "share70f3": "share, top 70 %, weight .3",
    "paper": "the paper's: max, top 40 %",
    "rho1-accept": "acceptance, student's tokenizer",
    "rho1": "Rho-1, top 40 %, the same tokenizer",
    "shuffled": "acceptance, shuffled",
    "random": "a random 40 %",
    "cpt": "CPT, packed without a teacher",
    "dft": "DFT (3 seeds)",
    "stm": "STM (3 seeds)",
}
# They are so far off that a figure would show nothing else.
NOT_DRAWN = ("dft", "stm")
# The teachers' tokenizers, compared with that of the pages' teacher.
CUTS = {"fine": "finer tokens", "coarse": "coarser tokens", "teacher": "the same tokens"}
# What might break acceptance. A key is a world, and the suffix of the rules with another teacher or
# learning rate.
TRIALS = {
    ("clean", "@start"): "teacher: the student's first state; clean pages",
    ("noisy", "@start"): "the same, noisy pages",
    ("inserted-40", "@start"): "the same, junk between words",
    ("clean", "@code"): "teacher: has read source code; clean pages",
    ("noisy", "@code"): "the same, noisy pages",
    ("inserted-40", "@junk"): "teacher: has read such junk; junk between words",
    ("clean-converged", ""): "students that have read three times as much as the teacher; clean",
    ("noisy-converged", ""): "the same, noisy pages",
    ("clean-old", ""): "students four times as old; clean pages",
    ("noisy-old", ""): "the same, noisy pages",
    ("inserted-40-old", ""): "the same, junk between words",
    ("clean-short", ""): "pages of eight words; clean",
    ("inserted-40-short", ""): "the same, junk between words",
    ("clean-code", ""): "pages of source code; clean",
    ("noisy-code", ""): "the same, noisy",
    ("noisy", "@half"): "losses in 16 bits; noisy pages",
    ("inserted-40", "@half"): "the same, junk between words",
    **{
        (world, f"@{cut}-{size}"): f"teacher: {tokens}, {size}; {WORLDS[world]}"
        for world in ("noisy", "inserted-40", "clean")
        for cut, tokens in CUTS.items()
        for size in ("small", "large")
    },
    **{
        (world, f"-lr{rate}"): f"{label} the learning rate, for both; {WORLDS[world]}"
        for rate, label in ((0.0015, "half"), (0.006, "twice"))
        for world in ("noisy", "inserted-40", "clean")
    },
}
# Minus those of `const` with the same seed.
Differences = list[float]


class Results:
    """All finished runs."""

    def __init__(self) -> None:
        self.rows = read_results()

    def of(self, world: str, rule: str) -> list[dict[str, Any]]:
        """Return the runs of a rule, by seed."""
        seeds = sorted(seed for name, seed, of in self.rows if (name, of) == (world, rule))
        return [self.rows[world, seed, rule] for seed in seeds]

    def differences(self, world: str, rule: str, metric: str) -> Differences:
        """Return what a rule changes, seed by seed."""
        # The baseline has equal weights, and the same learning rate.
        than = f"const{rule[rule.index('-lr') :]}" if "-lr" in rule else "const"
        rows = [(row, self.rows.get((world, row["seed"], than))) for row in self.of(world, rule)]
        return [row[metric] - const[metric] for row, const in rows if const]

    def mean(self, world: str, rule: str, metric: str) -> str:
        """Return the mean of what a rule changes."""
        found = self.differences(world, rule, metric)
        return _signed(statistics.mean(found)) if found else ""

    def cell(self, world: str, rule: str, metric: str) -> str:
        """Return the mean, with all values if they are few, or with the extremes."""
        found = [_signed(value) for value in sorted(self.differences(world, rule, metric))]
        if not found:
            return ""
        mean = self.mean(world, rule, metric)
        each = " ".join(found) if len(found) < 4 else f"{found[0]} to {found[-1]}"
        return f"{mean} ({each})" if len(found) > 1 else mean


def _signed(value: float) -> str:
    return f"{value:+.3f}".replace("0.", ".")


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, without rows that are empty after the first cell."""
    lines = [head, ["---"] * len(head), *(row for row in rows if any(row[1:]))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def evidence(results: Results, *, short: bool = False) -> str:
    """Return a table of all rules, compared with equal weights.

    A short table has the means of the worlds whose seeds a figure shows.
    """
    worlds = {name: DEMO_METRICS[1] if name in DEMOS else METRICS[0] for name in WORLDS}
    counts = {world: len(results.differences(world, "accept", worlds[world])) for world in worlds}
    shown = [world for world, count in counts.items() if count and not (short and world in DEMOS)]
    numbers = results.mean if short else results.cell
    head = [f"{WORLDS[world]} ({counts[world]} seeds)" for world in shown]
    rows = [["nothing wrong: the ceiling", *(ceiling_cell(w, worlds[w]) for w in shown)]]
    for rule, label in LABELS.items():
        rows.append([label, *(numbers(world, rule, worlds[world]) for world in shown)])
    return markdown_table(["rule", *head], rows)


def ceiling_cell(world: str, metric: str) -> str:
    """Return what pages with nothing wrong change, and the noise of this, if they are recorded."""
    gains = recorded_gains(world, metric)
    if not gains:
        return ""
    return f"{_signed(-statistics.mean(gains))}, noise {_signed(packing_noise(gains)).lstrip('+')}"


def trials(results: Results) -> str:
    """Return a table of what may break acceptance.

    The last columns are the mean weight, and the share of tokens on which the teacher is ahead in
    the last fifth of training.
    """
    rows, rules = [], ("accept", "share40", "paper")
    for (world, ending), label in TRIALS.items():
        names = [f"{rule}{ending}" for rule in rules]
        runs = [row for row in results.of(world, names[0]) if "ahead" in row]
        means = [
            f"{statistics.mean(numbers):.2f}" if numbers else ""
            for numbers in (
                [row["mean_weight"] for row in runs],
                [row["ahead"][-1] for row in runs],
            )
        ]
        cells = [results.cell(world, name, METRICS[0]) for name in names]
        rows.append([label, *cells, *means] if any(cells) else [label])
    head = ["what", "acceptance", "share, top 40 %", "the paper's", "mean weight", "teacher ahead"]
    return markdown_table(head, rows)


def draw_evidence(results: Results) -> Any:
    """Draw a dot for each seed of each rule."""
    worlds = [name for name in WORLDS if name not in DEMOS]
    rules = [rule for rule in LABELS if results.of("noisy", rule) and rule not in NOT_DRAWN]
    figure, panels = new_plot(7, 0.3 * len(rules) + 1, columns=len(worlds), sharey=True)
    for axes, world in zip(panels, worlds, strict=True):
        axes.axvline(0, color=axes.spines["left"].get_edgecolor(), linewidth=0.8)
        for place, rule in enumerate(rules):
            found = results.differences(world, rule, METRICS[0])
            color = COLORS[0] if rule.startswith("accept") else COLORS[-1]
            axes.plot(found, [place] * len(found), "o", color=color, markersize=4, alpha=0.7)
        axes.set_title(WORLDS[world], fontsize=9, loc="left")
        axes.set_yticks(range(len(rules)), [LABELS[rule] for rule in rules])
        axes.grid(axis="x", linewidth=0.3)
    panels[0].invert_yaxis()
    panels[1].set_xlabel("nats per character, less all tokens alike; a dot is a seed", fontsize=8)
    return figure


def draw_weights(results: Results) -> Any:
    """Draw the mean weights of good and of spoilt tokens, over training and by frequency."""
    worlds = ("noisy", "inserted-40")
    figure, panels = new_plot(7, 4.6, len(worlds), 2, sharex="col", sharey=True)
    looks = {"accept": ("acceptance", COLORS[0], "o"), "paper": ("the paper's", COLORS[1], "s")}
    lines = {}
    for row, world in enumerate(worlds):
        for column, ending in enumerate(("", "_fifths")):
            axes = panels[2 * row + column]
            for rule, (label, color, marker) in looks.items():
                for kind, dash in (("good", "-"), ("spoilt", "--")):
                    found = [run for run in results.of(world, rule) if kind + ending in run]
                    if not found:
                        continue
                    parts = zip(*(run[kind + ending] for run in found), strict=True)
                    # 0 means that there is no such token.
                    means = [statistics.mean(part) or math.nan for part in parts]
                    look = {"color": color, "marker": marker, "linestyle": dash, "markersize": 4}
                    (line,) = axes.plot(range(1, PARTS + 1), means, **look)
                    lines[f"{label}, {kind} tokens"] = line
            axes.set_ylim(0, 1)
            axes.grid(linewidth=0.3)
            axes.set_title(WORLDS[world], fontsize=9, loc="left")
            if row + 1 == len(worlds):
                names = ("rarest", "most frequent") if ending else ("begin", "end")
                ticks = [names[0], *("" for _ in range(PARTS - 2)), names[1]]
                axes.set_xticks(range(1, PARTS + 1), ticks)
                what = "fifth of the tokens by frequency" if ending else "fifth of the training"
                axes.set_xlabel(what, fontsize=8)
        panels[2 * row].set_ylabel("mean weight", fontsize=8)
    add_legend(figure, lines)
    return figure


def write_between(name: str, path: Path, table: str) -> None:
    """Write a table between the mark with its name and the next end mark."""
    begin, end = f"<!-- {name} -->\n", "\n<!-- end -->"
    before, _, rest = path.read_text(encoding="utf-8").partition(begin)
    path.write_text(f"{before}{begin}\n{table}\n{rest[rest.index(end) :]}", encoding="utf-8")


def main() -> None:
    """Write the tables."""
    results = Results()
    write_between("acceptance", PAGE, evidence(results, short=True))
    write_between("evidence", NOTEBOOK, evidence(results))
    write_between("acceptance", NOTEBOOK, trials(results))


if __name__ == "__main__":
    main()
