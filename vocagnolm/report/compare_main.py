"""Compare runs, and draw the paper's figures from them.

    vocagnolm compare runs/a runs/b --reported "Qwen2.5-Math-Instruct VocAgnoLM" --output_dir out
    vocagnolm compare --wandb lab/students wandb/ runs/c --output_dir out
    vocagnolm compare runs/* audits/* --figure 6 --output_dir out

The first run is the baseline of the others, over the same items; `comparison.html` has all of it on
one page, with the curves of the training. Numbers are never mixed: runs that were asked or graded
differently are not paired, and a number that is partial, or of other prompts or data than the
published ones, is marked wherever it is shown. With --figure the paper's figures are drawn instead.
Exit status: 0 done, 2 a wrong argument or file.
"""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from vocagnolm.cli import Parser, note, say, shell
from vocagnolm.host.options import refuse_idle
from vocagnolm.io import check_writable
from vocagnolm.report import compare, report
from vocagnolm.report.figures import NUMBERS, make
from vocagnolm.report.wandb_report import import_reports, write_report
from vocagnolm.report.wandb_runs import fetch


@shell("vocagnolm compare")
def main(argv: Sequence[str] | None = None) -> None:
    """Compare runs, from here and from Weights & Biases, or draw figures of them."""
    arguments = _parse(argv)
    out, reported = arguments.output_dir, arguments.reported
    # Before the work, which may take minutes.
    if out:
        check_writable(out)
    if arguments.wandb_report:
        import_reports(arguments.wandb_report)
    with TemporaryDirectory() as scratch:
        runs = arguments.runs
        if arguments.wandb:
            runs += fetch(arguments.wandb, out or Path(scratch))
        if arguments.figure:
            paths = make(arguments.figure, runs, out, arguments.metric, reported)
            say("\n".join(map(str, paths)))
            return
        comparison = compare.compare(runs, reported, arguments.resamples, arguments.seed)
        if out:
            report.write_comparison(comparison, out)
        if arguments.wandb_report:
            note(f"report: {write_report(comparison, arguments.wandb_report)}")
        say(report.comparison_markdown(comparison).rstrip("\n"))


def _parse(argv: Sequence[str] | None) -> Namespace:
    parser = Parser("vocagnolm compare", __doc__)
    add = parser.add_argument
    add(
        "runs",
        nargs="*",
        type=Path,
        metavar="RUN",
        help="A run of train.py, or the evaluation of any model; for figures also an audit or an "
        "inspection.",
    )
    add(
        "--wandb",
        nargs="+",
        default=[],
        metavar="SOURCE",
        help="Runs in Weights & Biases: ENTITY/PROJECT, or its files, as wandb or "
        "wandb/offline-run-ID; with --output_dir they are kept there.",
    )
    back = "Write the comparison as a report of Weights & Biases, too."
    add("--wandb_report", metavar="ENTITY/PROJECT", help=back)
    row = "A row of the paper, or a whole table, as 'Table 2'; again for more."
    add("--reported", action="append", default=[], metavar="NAME", help=row)
    files = "Gets comparison.html, .md, .json and .png, or the figures."
    add("--output_dir", type=Path, help=files)
    figures = f"Draw this figure of the paper ({', '.join(map(str, NUMBERS))}); again for more."
    add("--figure", action="append", type=int, choices=NUMBERS, metavar="N", help=figures)
    add(
        "--metric",
        help="Quality in a figure: gsm8k, AVG or another column of the evaluation, or eval_loss, "
        "the held-out loss after the last step; by default the paper's column.",
    )
    add("--resamples", type=int, default=compare.RESAMPLES, help="Bootstrap resamples.")
    add("--seed", type=int, default=compare.SEED, help="Bootstrap seed.")
    arguments = parser.parse_args(argv)
    given = parser.given(arguments)
    if not arguments.figure:
        refuse_idle(given, ("metric",), "without --figure")
    elif not arguments.output_dir:
        raise ValueError("--figure needs --output_dir: say where the figures shall be")
    # Figures are drawn from the same runs, and have no bootstrap.
    else:
        refuse_idle(given, ("resamples", "seed", "wandb_report"), "with --figure")
    return arguments
