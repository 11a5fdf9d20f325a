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

from vocagnolm.analysis import compare, report
from vocagnolm.analysis.figures import NUMBERS, make
from vocagnolm.analysis.wandb_report import import_reports, write_report
from vocagnolm.analysis.wandb_runs import fetch
from vocagnolm.host.command import Parser, note, refuse_idle, say, shell
from vocagnolm.host.files import check_writable


@shell("vocagnolm compare")
def main(argv: Sequence[str] | None = None) -> None:
    """Compare runs, from here and from Weights & Biases."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    # Before the work, which may take minutes.
    if arguments.output_dir:
        check_writable(arguments.output_dir)
    if arguments.wandb_report:
        import_reports(arguments.wandb_report)
    with TemporaryDirectory() as scratch:
        if arguments.wandb:
            arguments.runs += fetch(arguments.wandb, arguments.output_dir or Path(scratch))
        _compare_runs(parser, arguments)


def _compare_runs(parser: Parser, arguments: Namespace) -> None:
    runs, out, reported = arguments.runs, arguments.output_dir, arguments.reported
    if arguments.figure:
        if not out:
            raise ValueError("--figure needs --output_dir: say where the figures shall be")
        # Figures are drawn from the same runs, and have no bootstrap.
        refuse_idle(parser.given(arguments), ("resamples", "seed", "wandb_report"), "with --figure")
        say("\n".join(map(str, make(arguments.figure, runs, out, arguments.metric, reported))))
        return
    refuse_idle(parser.given(arguments), ("metric",), "without --figure")
    comparison = compare.compare(runs, reported, arguments.resamples, arguments.seed)
    if out:
        report.write_comparison(comparison, out)
    if arguments.wandb_report:
        note(f"report: {write_report(comparison, arguments.wandb_report)}")
    say(report.comparison_markdown(comparison).rstrip("\n"))


def _parser() -> Parser:
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
    return parser
