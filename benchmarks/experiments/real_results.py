"""Make the tables and figures of `real` from `real.jsonl`.

    python -m benchmarks.experiments.real_results            # print the tables
    python -m benchmarks.experiments.real_results --write    # into results and notebook

Run in the repository's root. Nothing is trained. The runs of a table have the same student,
teacher, number of tokens and learning rate. `docs/images/make.py` draws the figures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.experiments import plots
from benchmarks.experiments.ceiling import first_line, packing_noise
from benchmarks.experiments.real import MODELS, RESULTS, RULES
from vocagnolm.report.evaluations import heading
from vocagnolm.report.plots import COLORS, new_plot
from vocagnolm.report.statistics import RESAMPLES, percentile_interval, resampled_differences

# The answers of some models that runs on a CPU kept.
ANSWERS = RESULTS.with_name("real_answers.json")
# Of these, 100 items or fewer were answered, with one seed. The page names them in a sentence.
SMALL = ("math", "mathqa", "mmlu_stem", "sat")
# The world, rule and seed of the run that picks the learning rate.
TUNED = ("noisy", "const", 0)

# What the runs of a table have in common.
GROUP = ("student", "teacher", "tokens", "learning_rate")
WORLDS = {
    "noisy": "wrong solutions",
    "mixed": "code and boilerplate",
    "clean": "nothing wrong",
}
CEILING = "ceiling"  # equal weights on pages with nothing wrong
LABELS = {
    CEILING: "nothing wrong: the ceiling",
    "accept": "acceptance",
    "share": "share, top 40 %",
    "paper": "the paper's: max, top 40 %",
    "rho1": "Rho-1, top 40 %",
    "shuffled": "acceptance, shuffled",
    "random": "a random 40 %",
    "dft": "DFT",
    "stm": "STM",
    "cpt": "CPT, packed without a teacher",
}
# Beside the harm that these do, no other difference could be seen in a figure.
NOT_DRAWN = ("dft", "stm")
KINDS = {
    "gsm8k": "GSM8K",
    "math": "MATH",
    "planetmath": "PlanetMath",
    "textbooks": "textbooks",
}
GENERAL = "general"  # the mean of all kinds of text that no page resembles
ALL_KINDS = KINDS | {GENERAL: "general text, seed 0"}
# On the page, one column has the mean of all kinds that pages resemble.
SHORT = {None: "mathematics", GENERAL: ALL_KINDS[GENERAL]}
Row = dict[str, Any]
# {benchmark: {seed: digits}}: a 1 for every right answer, a 0 for every other one, by item.
Answers = dict[str, dict[str, str]]


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
        """Return nats per character minus those of equal weights, for each seed that has both.

        Args:
            world: the world of the pages.
            rule: the rule of the runs, or `CEILING`.
            kind: a kind of held-out text, or `GENERAL`; None for the mean of all kinds.
        """
        runs = self.runs(world, rule)
        if rule == CEILING and world != "clean":
            runs = self.runs("clean", "const")
        differences = []
        for row in runs:
            equal = self.rows.get((world, "const", row["seed"]))
            if equal and is_judged(row, kind) and is_judged(equal, kind):
                differences.append(nats(row, kind) - nats(equal, kind))
        return differences

    def cell(self, world: str, rule: str, kind: str | None = None) -> str:
        """Return the mean difference and, if there are several, the smallest and the largest."""
        values = self.differences(world, rule, kind)
        if not values:
            return ""
        mean = signed(statistics.mean(values))
        return f"{mean} ({signed(min(values))} to {signed(max(values))})" if values[1:] else mean


def nats(row: Row, kind: str | None = None) -> float:
    """Return nats per character of a kind of text or of `GENERAL`, or the mean of all kinds."""
    if kind == GENERAL:
        return float(statistics.mean(row["general"].values()))
    return float(row["nats"][kind] if kind else statistics.mean(row["nats"].values()))


def is_judged(row: Row, kind: str | None) -> bool:
    """Return whether a run was judged by a kind of text. The first runs had no `GENERAL`."""
    return kind != GENERAL or "general" in row


def signed(value: float) -> str:
    """Return a difference with three digits and without the zero before the point."""
    # Adding zero removes the sign of a negative zero.
    return f"{round(value, 3) + 0.0:+.3f}".replace("0.", ".", 1)


def read_rows(path: Path) -> list[Row]:
    """Return all finished runs, in their order."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def read_results(path: Path = RESULTS) -> dict[tuple[Any, ...], Results]:
    """Return finished runs, grouped by `GROUP`."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in read_rows(path):
        if row["rule"] in RULES:
            groups.setdefault(tuple(row[name] for name in GROUP), []).append(row)
    return {key: Results(rows) for key, rows in groups.items()}


def tuning() -> list[Results]:
    """Return the runs at each learning rate, as long and with the teacher as the first run."""
    return like(next(iter(read_results().values())), "learning_rate")


def like(results: Results, name: str) -> list[Results]:
    """Return the runs that differ in nothing of `GROUP` but one name, in its order."""
    example = next(iter(results.rows.values()))
    found = {}
    for key, others in read_results().items():
        setting = dict(zip(GROUP, key, strict=True))
        value = setting.pop(name)
        if TUNED in others.rows and setting.items() <= example.items():
            found[value] = others
    return [found[value] for value in sorted(found)]


def picked() -> Results:
    """Return the runs at the learning rate at which equal weights have the lowest loss, seed 0."""
    return min(tuning(), key=lambda results: nats(results.rows[TUNED]))


def rules_table(results: Results) -> str:
    """Return all rules in all worlds, as differences from equal weights."""
    heads = []
    for world, label in WORLDS.items():
        heads.append(f"{label} ({len(results.runs(world, 'const'))} seeds)")
    rows = []
    for rule, label in LABELS.items():
        rows.append([label, *(results.cell(world, rule) for world in WORLDS)])
    return plots.markdown_table(["rule", *heads], rows)


def kinds_table(
    results: Results, world: str, kinds: Mapping[Any, str] = ALL_KINDS, *, with_ranges: bool = True
) -> str:
    """Return nats per character of each kind of held-out text, for all rules in a world.

    The student as it was and equal weights are shown with their losses. The other rows are the
    differences from equal weights with the same seed, with or without their range over seeds.
    """
    rows = []
    student = results.runs(world, "const")[0]["student"]
    rows_of_student = [row for row in read_rows(RESULTS) if row["student"] == student]
    start = [row for row in rows_of_student if row["rule"] == "start"]
    for label, runs in (("before", start[-1:]), ("equal weights", results.runs(world, "const"))):
        if runs:
            cells = [mean_cell(runs, kind) for kind in kinds]
            rows.append([f"{label} ({len(runs)})", *cells])
    for rule, label in LABELS.items():
        cells = [results.cell(world, rule, kind) for kind in kinds]
        if not with_ranges:
            cells = [cell.partition(" ")[0] for cell in cells]
        if any(cells):
            rows.append([f"{label} ({len(results.differences(world, rule))})", *cells])
    return plots.markdown_table(["rule (seeds)", *kinds.values()], rows)


def mean_cell(runs: list[Row], kind: str) -> str:
    """Return the mean loss of a kind of text over the runs that were judged by it."""
    judged = [nats(row, kind) for row in runs if is_judged(row, kind)]
    return f"{statistics.mean(judged):.3f}" if judged else ""


def ceiling_line(results: Results, world: str) -> str:
    """Return what pages with nothing wrong gain, as a paragraph, or nothing without such runs."""
    gains = [-value for value in results.differences(world, CEILING)]
    if len(gains) < 2:
        return ""
    return first_line(statistics.mean(gains), packing_noise(gains), "nats per character") + "\n\n"


def guidance_table() -> str:
    """Return what a teacher said of the pages, and the mean gain over all kinds of text.

    One row for each world and teacher, at the picked learning rate. The share of tokens on which
    the teacher is ahead and the mean weight are means over the runs with acceptance.
    """
    shared = {name: picked().rows[TUNED][name] for name in GROUP}
    rules = ("accept", "paper", "random")
    rows = []
    for world, label in WORLDS.items():
        for key, results in read_results().items():
            setting = dict(zip(GROUP, key, strict=True))
            teacher = setting["teacher"]
            runs = results.runs(world, "accept")
            if not runs or setting != shared | {"teacher": teacher}:
                continue
            ahead = statistics.mean(row["teacher_ahead_fraction"][1] for row in runs)
            weight = statistics.mean(row["mean_weight"][1] for row in runs)
            cells = [results.cell(world, rule) for rule in rules]
            rows.append([label, teacher, f"{100 * ahead:.0f} %", f"{weight:.2f}", *cells])
    heads = ["pages with", "teacher", "ahead", "mean weight", *(LABELS[rule] for rule in rules)]
    return plots.markdown_table(heads, rows)


def rates_table() -> str:
    """Return the mean of all kinds of text at each learning rate, for pages with wrong solutions.

    Equal weights are shown with the loss of seed 0. The other columns are the differences from
    equal weights.
    """
    rules = ("accept", "shuffled", "paper", "random")
    rows = []
    for results in tuning():
        equal = results.rows[TUNED]
        cells = [f"{equal['learning_rate']:g}", f"{nats(equal):.3f}"]
        rows.append(cells + [results.cell("noisy", rule) for rule in rules])
    heads = ["learning rate", "equal weights", *(LABELS[rule] for rule in rules)]
    return plots.markdown_table(heads, rows)


def answers_table() -> str:
    """Return the right answers in percent, and the differences from equal weights in points.

    Numbers are means over seeds. A difference is from equal weights with the same seeds and as many
    tokens. `draw_answers` draws their intervals.
    """
    answers = read_answers()
    names = judged_benchmarks(answers)
    labels = {"start": "before", "const": "equal weights"} | LABELS
    rows = []
    for tokens, by_rule in answers.items():
        for rule in by_rule:
            cells = [labels[rule], f"{0 if rule == 'start' else tokens:,}"]
            for name in names:
                cells.append(answers_cell(by_rule, rule, name))
            rows.append(cells)
    return plots.markdown_table(["rule", "tokens", *map(heading, names)], rows)


def read_answers() -> dict[int, dict[str, Answers]]:
    """Return {tokens: {rule: answers}} of models trained at the picked learning rate."""
    answers = json.loads(ANSWERS.read_text(encoding="utf-8"))
    return {int(tokens): by_rule for tokens, by_rule in answers.items()}


def judged_benchmarks(answers: dict[int, dict[str, Answers]]) -> list[str]:
    """Return the benchmarks that a run with equal weights was judged by, without small ones."""
    names: dict[str, None] = {}
    for by_rule in answers.values():
        names |= dict.fromkeys(by_rule["const"])
    return [name for name in names if name not in SMALL]


def answers_cell(by_rule: dict[str, Answers], rule: str, name: str) -> str:
    """Return the right answers to a benchmark in percent and, of a rule, the points it gains."""
    by_seed = by_rule[rule].get(name)
    if by_seed is None:
        return ""
    outputs = "".join(by_seed.values())
    cell = f"{100 * outputs.count('1') / len(outputs):.1f}"
    if rule in ("start", "const"):
        return cell
    points, _, _ = answers_gain(by_seed, by_rule["const"][name], name)
    return f"{cell} ({points:+.1f})"


def answers_gain(
    by_seed: dict[str, str], equal_by_seed: dict[str, str], name: str
) -> tuple[float, float, float]:
    """Return the points that a rule gains over equal weights, and their 95 % interval over items.

    Equal weights must have all seeds of the rule.
    """
    gain_by_item: Counter[int] = Counter()
    outputs = 0
    for seed, digits in by_seed.items():
        for item, (ours, equal) in enumerate(zip(digits, equal_by_seed[seed], strict=True)):
            gain_by_item[item] += int(ours) - int(equal)
            outputs += 1
    points = 100 * gain_by_item.total() / outputs
    items_by_gain = dict(sorted(Counter(gain_by_item.values()).items()))
    draws = resampled_differences(items_by_gain, RESAMPLES, [0, *name.encode()])
    low, high = percentile_interval(draws / len(by_seed))
    return points, low, high


def losses_table(path: Path = RESULTS) -> str:
    """Return nats per character of models that are judged as they are, and with equal weights."""
    rows = []
    for row in read_rows(path):
        if row["rule"] in (*MODELS, "const"):
            name = f"{row['rule']}, {row['world']}, seed {row['seed']}, {row['learning_rate']:g}"
            rows.append([name, *(f"{value:.4f}" for value in row["nats"].values())])
    return plots.markdown_table(["model", *KINDS.values()], rows)


def draw_rules(results: Results) -> Any:
    """Draw a dot for each seed of each rule and kind of text, for pages with wrong solutions."""
    rules = [rule for rule in LABELS if results.runs("noisy", rule) and rule not in NOT_DRAWN]
    figure, panels = new_plot(7, 0.3 * len(rules) + 1, columns=len(KINDS), sharex=True, sharey=True)
    for axes, (kind, title) in zip(panels, KINDS.items(), strict=True):
        axes.axvline(0, color=axes.spines["left"].get_edgecolor(), linewidth=0.8)
        for place, rule in enumerate(rules):
            values = results.differences("noisy", rule, kind)
            color = COLORS[0] if rule == "accept" else COLORS[-1]
            axes.plot(values, [place] * len(values), "o", color=color, markersize=4, alpha=0.7)
        axes.set_title(title, fontsize=9, loc="left")
        axes.set_yticks(range(len(rules)), [LABELS[rule] for rule in rules])
        axes.grid(axis="x", linewidth=0.3)
    panels[0].set_ylim(len(rules) - 0.5, -0.5)
    panels[1].set_xlabel("nats per character, less equal weights; a dot is a seed", fontsize=8)
    return figure


def draw_answers() -> Any:
    """Draw what rules gain over equal weights in points, with 95 % intervals over items."""
    answers = read_answers()
    rows = []
    for tokens, by_rule in answers.items():
        for rule, by_benchmark in by_rule.items():
            if rule in LABELS:
                label = f"{LABELS[rule]}, {tokens // 1000}k"
                rows.append((label, rule, by_benchmark, by_rule["const"]))
    names = judged_benchmarks(answers)
    figure, panels = new_plot(7, 0.3 * len(rows) + 1, columns=len(names), sharex=True, sharey=True)
    for axes, name in zip(panels, names, strict=True):
        axes.axvline(0, color=axes.spines["left"].get_edgecolor(), linewidth=0.8)
        for place, (_, rule, by_benchmark, equal) in enumerate(rows):
            if name in by_benchmark:
                points, low, high = answers_gain(by_benchmark[name], equal[name], name)
                color = COLORS[0] if rule == "accept" else COLORS[-1]
                axes.plot([low, high], [place, place], color=color, linewidth=1.2)
                axes.plot([points], [place], "o", color=color, markersize=4)
        axes.set_title(heading(name), fontsize=9, loc="left")
        axes.set_yticks(range(len(rows)), [label for label, *_ in rows])
        axes.grid(axis="x", linewidth=0.3)
    panels[0].set_ylim(len(rows) - 0.5, -0.5)
    panels[len(names) // 2].set_xlabel("points above equal weights", fontsize=8)
    return figure


def main() -> None:
    """Print the tables and, with --write, write them into the pages."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", action="store_true", help="into results and notebook")
    arguments = parser.parse_args()
    groups = read_results()
    for (student, teacher, tokens, rate), results in groups.items():
        sys.stdout.write(f"\n{student} <- {teacher}, {tokens:,} tokens, learning rate {rate:g}\n\n")
        sys.stdout.write(f"{rules_table(results)}\n")
        for world in WORLDS:
            if results.runs(world, "const"):
                line = ceiling_line(results, world)
                sys.stdout.write(f"\n{world}\n\n{line}{kinds_table(results, world)}\n")
    for table in (guidance_table(), rates_table(), answers_table(), losses_table()):
        sys.stdout.write(f"\n{table}\n")
    if arguments.write:
        line = ceiling_line(picked(), "noisy")
        plots.write_between(
            "real", plots.PAGE, line + kinds_table(picked(), "noisy", SHORT, with_ranges=False)
        )
        plots.write_between("real", plots.NOTEBOOK, kinds_table(picked(), "noisy"))
        plots.write_between("guidance", plots.NOTEBOOK, guidance_table())
        plots.write_between("rates", plots.NOTEBOOK, rates_table())
        plots.write_between("answers", plots.NOTEBOOK, answers_table())


if __name__ == "__main__":
    main()
