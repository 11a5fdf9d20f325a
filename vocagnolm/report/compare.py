"""Compare runs: accuracies, paired tests, curves, settings and costs, on one page.

    vocagnolm compare runs/a runs/b --reported "Qwen2.5-Math-Instruct VocAgnoLM" --output_dir out
    vocagnolm compare --wandb lab/students --output_dir out

The first run is the baseline of the others, over the same items. Numbers are never mixed: runs
that were asked or graded differently are not paired, and a number that is partial, or of other
prompts or data than the published ones, is marked wherever it is shown. Exit status: 0 done, 2 a
wrong argument or file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory

from vocagnolm.cli import Parser, shell
from vocagnolm.evaluation.tasks.benchmarks import AVERAGES
from vocagnolm.extras import require
from vocagnolm.hub import public_name
from vocagnolm.io import JsonObject, check_writable, markdown_table, write_json, write_text
from vocagnolm.printing import print_main
from vocagnolm.report.plots import bar_series, draw_bars, draw_curves, embed, read_curves
from vocagnolm.report.render import TEMPLATES
from vocagnolm.report.runs import (
    Row,
    Run,
    TrainingRun,
    differing,
    find_places,
    group_by_setting,
    heading,
    in_order,
    read_reported,
    read_run,
    read_training,
)
from vocagnolm.report.statistics import RESAMPLES, mcnemar_p, pair

# These notes say what a reader has to know to read the tables and pictures.
_STAR = "*: may not be put beside a published number; the notes on its run say why."
_ACCURACIES = f"In brackets: the 95 % interval. {_STAR}"
_PAIRINGS = (
    f"Interval: paired bootstrap, {RESAMPLES:,} resamples; too narrow where few items are decided "
    "by one run only. p: McNemar's exact test, two-sided; p (Holm): corrected for the "
    f"number of benchmarks. {_STAR}"
)
_COSTS = (
    "Tokens/s: the median of the log. Time: since the training was last started. FLOPs: of the "
    "student and of the teachers that are in the run; those of scoring a store are not counted."
)
_UNDECIDED = "no item decides"
_BARS = (
    "Bars of one run: 95 % interval of its evaluation; of several seeds: their mean and standard "
    "deviation. Hollow: as reported (arXiv 2503.19123v1)."
)
_CURVES = (
    "Over the seeds of a setting: the mean, and a band from the lowest to the highest. Of the "
    "excess: the tokens' median, and a band from their 10th to their 90th percentile."
)
# The controls that a method that chooses tokens has to beat, by their names in `METHODS`, and how
# to run them.
_CONTROLS = {
    "CPT": "plain pretraining (--method cpt)",
    "random tokens": "the random control (--method random)",
}
_CHOOSING = {"VocAgnoLM", "Rho-1", "chunks"}
# Losses per token are of the same tokens where these options are equal.
_OF_TOKENS = ("student", "student_tokenizer", "eval_fraction")
# A section of the page has a title, the rows of a table with the header first, and notes.
_Section = tuple[str, list[list[str]], Sequence[str]]


@dataclass(frozen=True)
class Comparison:
    """Some runs compared."""

    # The first of the evaluations is the baseline.
    runs: Sequence[Run]
    # These are runs of vocagnolm train, and the same runs by their setting.
    trained: Sequence[TrainingRun]
    settings: Mapping[str, Sequence[TrainingRun]]
    # Every evaluation and run has its label here.
    labels: Sequence[str]
    # The paper's numbers have row, table, column and reported.
    reported: Sequence[Row]
    # `pair` has compared every other run with the first of its protocol, few-shot or chat.
    pairings: Sequence[Row]


def compare(paths: Sequence[Path], reported: Sequence[str] = ()) -> Comparison:
    """Read runs, pair each evaluation with its protocol's first, and add rows of the paper."""
    if not paths:
        raise ValueError("no RUN to compare: give directories of vocagnolm train or evaluate")
    reported_rows = read_reported(reported)
    places = find_places(paths)
    evaluated = []
    trained = []
    for label, (run_directory, evaluation_directory) in places.items():
        if evaluation_directory:
            evaluated.append(read_run(label, evaluation_directory))
        if run_directory:
            trained.append(read_training(label, run_directory))
    # The first few-shot evaluation and the first chat are the baselines of the others of their
    # protocol: in a chat a model gives other answers to other prompts.
    baselines: dict[bool, Run] = {}
    pairings: list[Row] = []
    for run in evaluated:
        baseline = baselines.setdefault(run.prompts == "chat", run)
        if baseline is not run:
            pairings += pair(baseline, run)
    settings = group_by_setting(trained)
    return Comparison(evaluated, trained, settings, list(places), reported_rows, pairings)


def findings(comparison: Comparison) -> list[str]:
    """Say what a comparison shows in sentences: of answers, then of held-out losses."""
    settings = comparison.settings
    # The runs of a setting share their method, so that the first one speaks for all.
    methods = {runs[0].method for runs in settings.values()}
    controls = [name for name, runs in settings.items() if runs[0].method in _CONTROLS]
    # The other settings are compared with the controls, or, without any, with the first setting.
    if 0 < len(controls) < len(settings):
        references = controls
    else:
        references = list(settings)[:1]
    held_out = []
    for name in settings:
        if name not in references:
            for reference in references:
                held_out += _held_out(name, reference, settings)
    # A method that chooses tokens may be ahead because it trains at all, or because it trains on
    # fewer tokens. Only the controls tell.
    missing = [control for method, control in _CONTROLS.items() if method not in methods]
    if missing and methods & _CHOOSING:
        needed = " and ".join(missing)
        held_out.append(f"Whether the guidance helps cannot be said without {needed}.")
    # Answers come first: held-out pages may be as wrong as the corpus, and then a lower loss on
    # them is not a better model.
    return _answers(comparison) + held_out


def _answers(comparison: Comparison) -> list[str]:
    """Say by how many points the answers of one run are better than those of another."""
    rows_of: dict[tuple[str, str], list[Row]] = {}
    for row in comparison.pairings:
        if not row["not_paired"]:
            rows_of.setdefault((row["first"], row["other"]), []).append(row)
    sentences = []
    for (first, other), rows in rows_of.items():
        # An average speaks for its benchmarks.
        averages = [row for row in rows if row["column"] in AVERAGES]
        differences = []
        for row in averages[:1] or rows:
            points, interval = _difference(row)
            differences.append(f"{heading(row['column'])} {points} ({interval})")
        sentences.append(f"{other} against {first}, in points: {'; '.join(differences)}.")
    return sentences


def _held_out(
    name: str, reference: str, settings: Mapping[str, Sequence[TrainingRun]]
) -> list[str]:
    """Compare the held-out losses of two settings, if both have such losses of one student.

    The losses must be of the same texts. Texts with equally many tokens are taken for the same.
    """
    runs, reference_runs = settings[name], settings[reference]
    # A student with another vocabulary has other tokens, and its nats per token are other numbers.
    for option in _OF_TOKENS:
        if runs[0].options.get(option) != reference_runs[0].options.get(option):
            return []
    losses = _losses_by_seed(runs)
    reference_losses = _losses_by_seed(reference_runs)
    if not losses or not reference_losses:
        return []
    # Runs of a common seed are compared, and where there is none all runs.
    common_seeds = losses.keys() & reference_losses.keys()
    if common_seeds:
        losses = {seed: losses[seed] for seed in common_seeds}
        reference_losses = {seed: reference_losses[seed] for seed in common_seeds}
    tokens = {run.eval_tokens for run in runs if run.seed in losses}
    reference_tokens = {run.eval_tokens for run in reference_runs if run.seed in reference_losses}
    if tokens != reference_tokens:
        return [f"{name} and {reference} were not evaluated on the same texts."]
    # A gain is how far the loss is below the reference's, and may be negative.
    gain = fmean(reference_losses.values()) - fmean(losses.values())
    better, worse = (name, reference) if gain > 0 else (reference, name)
    if len(common_seeds) > 1:
        wins = 0
        defeats = 0
        for seed in common_seeds:
            # A seed that makes no difference counts for neither side in a sign test.
            wins += losses[seed] < reference_losses[seed]
            defeats += losses[seed] > reference_losses[seed]
        share = f"{wins if gain > 0 else defeats} of {len(common_seeds)}"
        test = f"with {share} seeds, sign test p = {mcnemar_p(wins, defeats):.3f}"
    elif len(losses) == len(reference_losses) == 1:
        test = "one seed each: no test possible"
    else:
        test = "no two seeds in common: no test possible"
    if not gain:
        return [f"{name} and {reference} are level on held-out text; {test}."]
    return [f"{better} is ahead of {worse} by {abs(gain):.3f} nats on held-out text; {test}."]


def _losses_by_seed(runs: Sequence[TrainingRun]) -> dict[str, float]:
    losses = {}
    for run in runs:
        if run.eval_loss is not None:
            losses[run.seed] = run.eval_loss
    return losses


def comparison_markdown(comparison: Comparison) -> str:
    """Lay out a comparison as its findings and tables."""
    parts = []
    bullets = [f"- {finding}" for finding in findings(comparison)]
    if bullets:
        parts.append("\n".join(bullets))
    for title, rows, notes in _sections(comparison):
        # The first note is a paragraph, and a list about the runs may follow: Markdown wants an
        # empty line between the two.
        text = "\n".join(notes).replace("\n- ", "\n\n- ", 1)
        parts.append(f"## {title}\n\n{markdown_table(rows)}\n\n{text}".rstrip("\n"))
    return "\n\n".join(parts) + "\n"


def _sections(comparison: Comparison) -> list[_Section]:
    # One run speaks for its setting: the others differ from it in their seed alone.
    runs = [runs[0] for runs in comparison.settings.values()]
    options = [["option"] + list(comparison.settings)]
    for name, texts in differing(runs).items():
        options.append([name] + texts)
    sections = [_accuracies(comparison)]
    sections += _pairings(comparison)
    sections.append(("Settings that differ", options, []))
    sections.append(_costs(comparison))
    # A table that is nothing but its header is left out.
    return [section for section in sections if len(section[1]) > 1]


def _accuracies(comparison: Comparison) -> _Section:
    notes = [_ACCURACIES]
    # {(run, its prompts): {column: cell}}
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for run in comparison.runs:
        cells: dict[str, str] = {}
        for score in run.scores:
            star = "*" if score["marked"] else ""
            interval = f"{score['low']:.1f} to {score['high']:.1f}"
            cells[score["column"]] = f"{score['rounded']:.1f}{star} ({interval})"
        lines[run.label, run.prompts] = cells
        name, revision = run.model.rsplit(", revision ", 1)
        # Nineteen characters hold "sha256:" and twelve digits, or nineteen digits of a commit.
        model = f"{public_name(name)}, revision {revision[:19]}"
        notes.append(f"- {run.label}: {model}; verdicts of {run.grader}")
        for note in run.notes:
            notes.append(f"  - {note}")
    # Reported rows follow those of the runs, in the same columns.
    if comparison.runs:
        for score in comparison.reported:
            line = f"reported: {score['row']} ({score['table']})", "paper"
            lines.setdefault(line, {})[score["column"]] = f"{score['reported']:.1f}"
    columns = _columns(lines.values())
    rows = [["run", "prompts"] + [heading(column) for column in columns]]
    for (label, prompts), cells in lines.items():
        rows.append([label, prompts] + [cells.get(column, "-") for column in columns])
    return "Accuracy (%)", rows, notes


def _columns(lines: Iterable[Iterable[str]]) -> list[str]:
    """Return the columns that any line has, in the order of Table 1."""
    columns: set[str] = set()
    for line in lines:
        columns.update(line)
    return in_order(columns)


def _pairings(comparison: Comparison) -> list[_Section]:
    """Lay out the paired tests, a table for each baseline."""
    # These pairs of a run and a column are not to be put next to published numbers.
    marked = set()
    for run in comparison.runs:
        for score in run.scores:
            if score["marked"]:
                marked.add((run.label, score["column"]))
    tables: dict[str, list[list[str]]] = {}
    for pairing in comparison.pairings:
        first, other, column = pairing["first"], pairing["other"], pairing["column"]
        head = ["run", "benchmark", "points", "95 % interval", "items"]
        head += [f"only {first} right", "only the run right", "p", "p (Holm)"]
        rows = tables.setdefault(first, [head])
        # The difference is no better than either of its two numbers.
        is_marked = (first, column) in marked or (other, column) in marked
        row = [other, heading(column) + ("*" if is_marked else "")]
        rows.append(row)
        # The reason takes the place of the points, and a dash that of the other cells.
        if pairing["not_paired"]:
            row.append(f"not paired: {pairing['not_paired']}")
            row += ["-"] * (len(head) - len(row))
            continue
        points, interval = _difference(pairing)
        row += [points, interval]
        for name in ("items", "only_first", "only_other"):
            row.append(_cell(pairing[name], ""))
        for name in ("p", "p_holm"):
            # Where no item decides, p is 1 and says nothing.
            p = None if interval == _UNDECIDED else pairing[name]
            row.append("< 0.001" if p is not None and p < 0.001 else _cell(p, ".3f"))
    sections: list[_Section] = []
    for first, rows in tables.items():
        sections.append((f"Points above {first}, over the same items", rows, [_PAIRINGS]))
    return sections


def _difference(row: Row) -> tuple[str, str]:
    """Write the points of a pairing, and their interval."""
    texts = []
    for name in ("points", "low", "high"):
        # Adding 0.0 makes 0.0 of -0.0.
        rounded = round(row[name], 1) + 0.0
        texts.append(f"{rounded:+.1f}")
    points, low, high = texts
    is_decided = row["points"] or row["low"] or row["high"]
    return points, f"{low} to {high}" if is_decided else _UNDECIDED


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def _costs(comparison: Comparison) -> _Section:
    head = ["run", "trained as", "seed", "steps", "student tokens", "held-out loss"]
    head += ["tokens/s", "time", "FLOPs"]
    rows = [head]
    for run in comparison.trained:
        log = run.state.get("log_history", [])
        steps = run.state.get("global_step", 0)
        speeds = [entry["tokens_per_s"] for entry in log if "tokens_per_s" in entry]
        seconds = [entry["train_runtime"] for entry in log if "train_runtime" in entry]
        seed, _ = json.loads(run.seed)
        row = [run.label, run.name, str(seed)]
        row.append(f"{steps:,}")
        row.append(f"{steps * run.batch_tokens:,}")
        row.append(_cell(run.eval_loss, ".4f"))
        # The first steps compile and warm up, so the median says more than the mean.
        row.append(_cell(median(speeds) if speeds else None, ",.0f"))
        # A run that was extended has an entry for each time that it ended.
        row.append(str(timedelta(seconds=round(seconds[-1]))) if seconds else "-")
        row.append(_cell(run.state.get("total_flos"), ".2e"))
        rows.append(row)
    return "Cost", rows, [_COSTS]


def to_json(comparison: Comparison) -> JsonObject:
    """Return the content of `comparison.json`, from which benchmarks/figures.py draws."""
    evaluated = []
    scores: list[Row] = []
    for run in comparison.runs:
        evaluated.append(
            {
                "label": run.label,
                "model": run.model,
                "grader": run.grader,
                "prompts": run.prompts,
                "conditions": run.conditions,
                "notes": run.notes,
            }
        )
        scores += run.scores
    trained = {}
    for setting, runs in comparison.settings.items():
        for training in runs:
            trained[training.label] = {
                "run": training.label,
                "setting": setting,
                "method": training.method,
                "teacher": training.teacher,
                "seed": training.seed,
                "options": training.options,
                "eval_loss": training.eval_loss,
            }
    return {
        "runs": evaluated,
        # The order is that of the command line, not that of the settings.
        "trained": [trained[training.label] for training in comparison.trained],
        "scores": scores,
        "reported": comparison.reported,
        "pairings": comparison.pairings,
    }


def write_comparison(comparison: Comparison, directory: Path) -> None:
    """Write `comparison.html`, `.md`, `.json` and, of what has accuracies, `.png`."""
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "comparison.json", to_json(comparison))
    write_text(directory / "comparison.md", comparison_markdown(comparison))
    pictures = []
    if comparison.runs:
        graders = ", ".join(dict.fromkeys(run.grader for run in comparison.runs))
        series = bar_series(comparison.runs, comparison.settings, comparison.reported)
        columns = _columns(bars.index for bars in series.values())
        headings = {column: heading(column) for column in columns}
        figure = draw_bars(series, headings, f"Accuracies; verdicts of {graders}")
        figure.savefig(directory / "comparison.png")
        pictures.append(("Accuracy", embed(figure), _BARS))
    # A run that was stopped before its first log has no curves.
    curves = read_curves(comparison.settings)
    if curves:
        pictures.append(("Along the training", embed(draw_curves(curves)), _CURVES))
    page = TEMPLATES.get_template("comparison.html").render(
        names=comparison.labels,
        findings=findings(comparison),
        baselines=list(dict.fromkeys(row["first"] for row in comparison.pairings)),
        pictures=pictures,
        sections=_sections(comparison),
    )
    write_text(directory / "comparison.html", page)


@shell("vocagnolm compare")
def main(argv: Sequence[str] | None = None) -> None:
    """Compare runs, from here and from Weights & Biases."""
    parser = Parser("vocagnolm compare", __doc__)
    add = parser.add_argument
    projects = "Runs in Weights & Biases; with --output_dir they are kept there."
    row = "A row of the paper, or a whole table, as 'Table 2'; again for more."
    add("runs", nargs="*", type=Path, metavar="RUN", help="A run, or an evaluation.")
    add("--wandb", nargs="+", default=[], metavar="ENTITY/PROJECT", help=projects)
    add("--reported", action="append", default=[], metavar="NAME", help=row)
    add("--output_dir", type=Path, help="Gets comparison.html, .md, .json and .png.")
    arguments = parser.parse_args(argv)
    out = arguments.output_dir
    # The directory is tried before the work, which may take minutes.
    if out:
        check_writable(out)
    # Without --output_dir the fetched runs are needed only until they are compared.
    with TemporaryDirectory() as scratch:
        runs = arguments.runs
        if arguments.wandb:
            require("wandb", "--wandb")
            from vocagnolm.report.fetch import fetch

            runs += fetch(arguments.wandb, out or Path(scratch))
        comparison = compare(runs, arguments.reported)
        if out:
            write_comparison(comparison, out)
        print_main(comparison_markdown(comparison).rstrip("\n"))
