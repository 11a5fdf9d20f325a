"""Few-shot chain-of-thought accuracy on the paper's nine math benchmarks, and the three averages.

    vocagnolm evaluate --model runs/my-student
    accelerate launch evaluate_math.py --model Qwen/Qwen2.5-Math-7B       # one process per GPU
    vocagnolm evaluate --model M --dry_run                                # prompts and token counts
    vocagnolm evaluate --model M --chat              # zero-shot, in the model's own chat template
    vocagnolm evaluate --model M --benchmarks_file mine.yaml         # your own: docs/library.md
    vocagnolm evaluate --regrade FILE.jsonl.gz --benchmark gsm8k          # grade stored outputs

Killed at any moment, the same command resumes. Exit status: 0 done, 2 a wrong argument or file,
130 interrupted.
"""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path

from vocagnolm import cli as command
from vocagnolm.doors import near
from vocagnolm.evaluation.tasks.benchmarks import BENCHMARKS, PAPER_BENCHMARKS, Benchmark
from vocagnolm.evaluation.tasks.own_benchmarks import read_benchmarks
from vocagnolm.extras import require, require_trackers
from vocagnolm.hub import check_name

_NAME = "vocagnolm evaluate"
_NO_MEMORY = "give a smaller --batch_size, a narrower --dtype, or --engine vllm"


def check(argv: Sequence[str] | None = None) -> Namespace:
    """Read the command line; a ValueError where an argument is wrong."""
    parser = command.Parser(_NAME, __doc__)
    add = parser.add_argument
    add("--model", help="A directory, or a name on the hub.")
    add("--revision", help="Branch, tag or commit on the hub.")
    names = ", ".join(BENCHMARKS)
    add("--benchmarks", nargs="+", help=f"Of {names}; default: the paper's nine, or your own.")
    add("--benchmarks_file", type=Path, help="YAML file of your own benchmarks.")
    add("--data_dir", type=Path, help="Items in the harness's layout; without it, downloads.")
    add("--prompts_dir", type=Path, help="The harness's prompts/cot; without it, our own prompts.")
    add("--chat", action="store_true", help="Zero-shot, which is not the paper's protocol.")
    add("--output_dir", type=Path, help="Default: MODEL/evaluation, or runs/NAME/evaluation.")
    add("--limit", type=int, help="Only the first items of each benchmark, up to this number.")
    add("--engine", choices=("hf", "vllm"), default="hf")
    add("--batch_size", type=int, help="Default: 64 on a GPU, 16 on a CPU. hf only.")
    parser.add_dtype()
    add("--report_to", choices=("none", "wandb"), default="none")
    add("--dry_run", action="store_true", help="Print one prompt per benchmark and token counts.")
    add("--regrade", type=Path, metavar="FILE", help="Grade stored outputs; needs --benchmark.")
    add("--benchmark", help="Of the outputs in --regrade FILE.")
    add("--output", type=Path, help="Of --regrade: the graded items; default: standard output.")
    arguments = parser.parse_args(argv)
    # The parser rejects negative numbers, and 0 would ask for nothing.
    for name in ("limit", "batch_size"):
        if vars(arguments)[name] == 0:
            raise ValueError(f"--{name} must be at least 1, got 0")
    for name in ("data_dir", "prompts_dir", "regrade", "benchmarks_file"):
        path = vars(arguments)[name]
        if path is not None and not path.exists():
            raise ValueError(f"--{name} {path}: no such file or directory")
    # There is either a model to ask or a file to regrade: both or neither are an error.
    if bool(arguments.model) == bool(arguments.regrade and arguments.benchmark):
        parser.error("give --model, or --regrade FILE and its --benchmark")
    # Packages, names and downloads are checked before torch is imported, which takes seconds.
    _choose_benchmarks(arguments)
    if arguments.chat and BENCHMARKS["demo"] in arguments.benchmarks:
        parser.error("--chat: the demo asks for no boxed answers")
    require_trackers(arguments.report_to)
    if arguments.engine == "vllm" and not arguments.dry_run:
        require("vllm", "--engine vllm")
    if arguments.model and not arguments.data_dir:
        _check_downloads(arguments.benchmarks)
    return arguments


@command.shell(_NAME, out_of_memory=_NO_MEMORY, resumable=True)
def main(argv: Sequence[str] | None = None) -> None:
    """Evaluate, preview or regrade."""
    arguments = check(argv)
    # The graders and engines take seconds to import, which --help and a wrong argument do not
    # need.
    from vocagnolm.evaluation import evaluate

    if arguments.regrade:
        benchmark = arguments.benchmark
        if arguments.chat:
            benchmark = benchmark.in_chat()
        evaluate.regrade(arguments.regrade, benchmark, arguments.output)
    else:
        evaluate.evaluate(arguments)


def _choose_benchmarks(arguments: Namespace) -> None:
    """Replace the names of benchmarks by their records, those of a user's own file included."""
    user_benchmarks: dict[str, Benchmark] = {}
    if arguments.benchmarks_file:
        user_benchmarks = read_benchmarks(arguments.benchmarks_file)
    # Without names, a user's own file asks for all its benchmarks, and without a file the paper's
    # nine are asked.
    benchmarks = {**BENCHMARKS, **user_benchmarks}
    names: list[str] = []
    # Both `gsm8k,math` and `gsm8k math` name two.
    for argument in arguments.benchmarks or user_benchmarks or PAPER_BENCHMARKS:
        for name in argument.split(","):
            if name and name not in names:
                names.append(name)
    _check_names("--benchmarks", names, benchmarks)
    arguments.benchmarks = [benchmarks[name] for name in names]
    if arguments.benchmark:
        _check_names("--benchmark", [arguments.benchmark], benchmarks)
        arguments.benchmark = benchmarks[arguments.benchmark]


def _check_downloads(benchmarks: Sequence[Benchmark]) -> None:
    """Look for the items on the hub, before a model is loaded."""
    for benchmark in benchmarks:
        if benchmark.hub:
            option = f"--benchmarks {benchmark.id} without --data_dir:"
            check_name(option, benchmark.hub, "dataset")


def _check_names(option: str, names: Sequence[str], benchmarks: Mapping[str, Benchmark]) -> None:
    unknown = sorted(set(names) - benchmarks.keys())
    if unknown:
        nearest = near(unknown[0], benchmarks)
        listed = ", ".join(benchmarks)
        raise ValueError(f"{option}: {', '.join(unknown)}{nearest} not among {listed}")
