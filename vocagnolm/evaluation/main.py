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
from collections.abc import Sequence
from pathlib import Path

from vocagnolm import cli as command
from vocagnolm.doors import near
from vocagnolm.evaluation.tasks.benchmarks import BENCHMARKS, PAPER_BENCHMARKS, read_benchmarks
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
    known = ", ".join(BENCHMARKS)
    add("--benchmarks", nargs="+", help=f"Of {known}; default: the paper's nine, or your own.")
    add("--benchmarks_file", type=Path, help="YAML file of your own benchmarks.")
    add("--data_dir", type=Path, help="Items in the harness's layout; without it, downloads.")
    add("--prompts_dir", type=Path, help="The harness's prompts/cot; without it, our own prompts.")
    add("--chat", action="store_true", help="Zero-shot, which is not the paper's protocol.")
    add("--output_dir", type=Path, help="Default: MODEL/evaluation, or runs/NAME/evaluation.")
    add("--limit", type=int, help="Only the first so many items of each benchmark.")
    add("--engine", choices=("hf", "vllm"), default="hf")
    add("--batch_size", type=int, help="Default: 64 on a GPU, 16 on a CPU. hf only.")
    parser.add_dtype()
    add("--report_to", choices=("none", "wandb"), default="none")
    add("--dry_run", action="store_true", help="Print one prompt per benchmark and token counts.")
    add("--regrade", type=Path, metavar="FILE", help="Grade stored outputs; needs --benchmark.")
    add("--benchmark", help="Of the outputs in --regrade FILE.")
    add("--output", type=Path, help="Of --regrade: the graded items; default: standard output.")
    arguments = parser.parse_args(argv)
    for name in ("limit", "batch_size"):
        if vars(arguments)[name] == 0:
            raise ValueError(f"--{name} must be at least 1, got 0")
    for name in ("data_dir", "prompts_dir", "regrade", "benchmarks_file"):
        path = vars(arguments)[name]
        if path is not None and not path.exists():
            raise ValueError(f"--{name} {path}: no such file or directory")
    if bool(arguments.model) == bool(arguments.regrade and arguments.benchmark):
        parser.error("give --model, or --regrade FILE and its --benchmark")
    _choose_benchmarks(arguments)
    if arguments.chat and "demo" in arguments.benchmarks:
        parser.error("--chat: the demo asks for no boxed answers")
    require_trackers(arguments.report_to)
    if arguments.engine == "vllm" and not arguments.dry_run:
        require("vllm", "--engine vllm")
    downloads = arguments.model and not arguments.data_dir
    for name in arguments.benchmarks if downloads else ():
        if hub := BENCHMARKS[name].hub:
            check_name(f"--benchmarks {name} without --data_dir:", hub, "dataset")
    return arguments


@command.shell(_NAME, out_of_memory=_NO_MEMORY, resumable=True)
def main(argv: Sequence[str] | None = None) -> None:
    """Evaluate, preview or regrade."""
    arguments = check(argv)
    # Only now: the graders and engines take seconds to import.
    from vocagnolm.evaluation import evaluate

    if arguments.regrade:
        benchmark = BENCHMARKS[arguments.benchmark]
        asked = benchmark.in_chat() if arguments.chat else benchmark
        evaluate.regrade(arguments.regrade, asked, arguments.output)
    else:
        evaluate.evaluate(arguments)


def _choose_benchmarks(arguments: Namespace) -> None:
    """Add a user's own benchmarks to ours, and list the names of those that are asked."""
    own = read_benchmarks(arguments.benchmarks_file) if arguments.benchmarks_file else {}
    BENCHMARKS.update(own)
    # `gsm8k,math` and `gsm8k math`.
    names = ",".join(arguments.benchmarks or own or PAPER_BENCHMARKS).split(",")
    arguments.benchmarks = list(dict.fromkeys(filter(None, names)))
    given = {"--benchmarks": arguments.benchmarks, "--benchmark": [arguments.benchmark or "demo"]}
    for option, benchmarks in given.items():
        if unknown := set(benchmarks) - BENCHMARKS.keys():
            nearest = near(min(unknown), BENCHMARKS)
            listed = ", ".join(BENCHMARKS)
            raise ValueError(f"{option}: {', '.join(sorted(unknown))}{nearest} not among {listed}")
