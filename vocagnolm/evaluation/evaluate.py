"""Measure few-shot chain-of-thought accuracy on the paper's nine math benchmarks.

    vocagnolm evaluate --model runs/my-student
    accelerate launch evaluate_math.py --model Qwen/Qwen2.5-Math-7B       # one process per GPU
    vocagnolm evaluate --model M --dry_run                                # prompts and token counts
    vocagnolm evaluate --model M --chat              # zero-shot, in the model's own chat template
    vocagnolm evaluate --model M --benchmarks aime24 --chat --samples 16 --temperature 0.6 # avg@16
    vocagnolm evaluate --model M --benchmarks_file mine.yaml         # your own: docs/library.md
    vocagnolm evaluate --regrade FILE.jsonl.gz --benchmark gsm8k          # grade stored outputs

If the command is interrupted, give it again to resume. Exit status: 0 done, 2 a wrong argument or
file, 130 interrupted.
"""

from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from vocagnolm import cli as command
from vocagnolm.evaluation.tasks.benchmarks import (
    BENCHMARKS,
    PAPER_BENCHMARKS,
    Benchmark,
    read_benchmarks,
)
from vocagnolm.evaluation.tasks.tasks import Sampling
from vocagnolm.fields import OptionError, check_choice, in_range
from vocagnolm.shell.extras import require

_NAME = "vocagnolm evaluate"
_NO_MEMORY = "give a smaller --batch_size, a narrower --dtype, or --engine vllm"


def _parser() -> command.Parser:
    parser = command.Parser(_NAME, __doc__)
    add = parser.add_argument
    add("--model", hub="model", help="A hub name or a directory.")
    add("--revision", help="Branch, tag or commit on the hub.")
    names = ", ".join(BENCHMARKS)
    which = f"Any of {names}; default: the paper's nine, or your own."
    add("--benchmarks", "--benchmark", nargs="+", help=which)
    add("--benchmarks_file", type=Path, help="YAML file of your own benchmarks.")
    add("--data_dir", type=Path, help="The harness's data/; default: download.")
    add("--prompts_dir", type=Path, help="The harness's prompts/cot; default: our own prompts.")
    add("--chat", action="store_true", help="Zero-shot, in the chat template; not the paper's way.")
    add("--temperature", type=float, default=0.0, help="Default: 0, greedy, as in the paper.")
    add_drawn = partial(add, needs=["temperature"])
    add_drawn("--samples", type=int, default=1, metavar="K", help="Outputs per item, for avg@k.")
    add_drawn(
        "--top_p", type=float, default=1.0, help="Share of probability to draw from; default: 1."
    )
    place = "MODEL/evaluation, RUN/evaluation-checkpoint-N or runs/NAME/evaluation"
    add("--output_dir", type=Path, help=f"Default: {place}.")
    add("--limit", type=int, help="Ask only the first N items of each benchmark.")
    add("--engine", choices=("hf", "vllm"), help="Default: vllm on a GPU, if it is installed.")
    add("--batch_size", type=int, help="For --engine hf; default: 64 on a GPU, 16 on a CPU.")
    parser.add_dtype()
    add("--trust_remote_code", action="store_true", help="Allow the model to run its own code.")
    add("--report_to", choices=("none", "wandb"), default="none")
    add("--dry_run", action="store_true", help="Print one prompt per benchmark, and token counts.")
    add("--regrade", type=Path, metavar="FILE", excludes=["model"], help="Grade stored outputs.")
    add("--output", type=Path, needs=["regrade"], help="Default: standard output.")
    return parser


def check(argv: Sequence[str] | None = None) -> Namespace:
    """Parse the command line.

    Raises:
        ValueError: an argument is wrong.
    """
    arguments = _parser().parse_args(argv)
    if not (arguments.model or arguments.regrade):
        raise ValueError("give --model, or --regrade FILE and its --benchmark")
    in_range(arguments, "[1, inf)", "limit", "batch_size", "samples")
    arguments.sampling = None
    if arguments.temperature != 0:
        # vLLM would raise any value between to 0.01.
        in_range(arguments, "[0.01, inf)", "temperature")
        in_range(arguments, "(0, 1]", "top_p")
        arguments.sampling = Sampling(arguments.samples, arguments.temperature, arguments.top_p)
    # Check packages and names before torch is imported, which takes seconds.
    arguments.benchmarks = _choose_benchmarks(arguments)
    if arguments.regrade and len(arguments.benchmarks) != 1:
        raise OptionError("regrade", "needs the --benchmark of its outputs")
    if arguments.engine == "vllm" and not arguments.dry_run:
        require("vllm", "--engine vllm")
    return arguments


def _choose_benchmarks(arguments: Namespace) -> list[Benchmark]:
    """Return the benchmarks that are named, which may be of a user's own file."""
    benchmarks = dict(BENCHMARKS)
    names: Sequence[str] = PAPER_BENCHMARKS
    if arguments.benchmarks_file:
        of_user = read_benchmarks(arguments.benchmarks_file)
        benchmarks |= of_user
        names = list(of_user)
    if arguments.benchmarks:
        # Both `gsm8k,math` and `gsm8k math` name two benchmarks.
        names = " ".join(arguments.benchmarks).replace(",", " ").split()
    chosen = []
    for name in dict.fromkeys(names):
        check_choice("benchmarks", name, list(benchmarks))
        benchmark = benchmarks[name]
        chosen.append(benchmark.in_chat() if arguments.chat else benchmark)
    return chosen


@command.shell(_NAME, out_of_memory=_NO_MEMORY, resumable=True)
def main(argv: Sequence[str] | None = None) -> None:
    """Evaluate, preview or regrade."""
    arguments = check(argv)
    # Graders and engines take seconds to import, which --help and wrong arguments do not need.
    if arguments.regrade:
        from vocagnolm.evaluation.regrading import regrade

        regrade(arguments.regrade, arguments.benchmarks[0], arguments.output)
    else:
        from vocagnolm.evaluation.runner import evaluate

        evaluate(arguments)
