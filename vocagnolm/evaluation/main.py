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

import math
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from vocagnolm import cli as command
from vocagnolm.doors import near
from vocagnolm.evaluation.sampling import Sampling
from vocagnolm.evaluation.tasks.benchmarks import BENCHMARKS, PAPER_BENCHMARKS, Benchmark
from vocagnolm.evaluation.tasks.own_benchmarks import read_benchmarks
from vocagnolm.shell.extras import require, require_trackers
from vocagnolm.shell.hub import check_name
from vocagnolm.shell.printing import log_main

_NAME = "vocagnolm evaluate"
# Options for asking a model, and for grading stored outputs. All others are for both.
_OF_MODEL = (
    "revision benchmarks data_dir prompts_dir samples temperature top_p output_dir limit engine "
    "batch_size dtype trust_remote_code report_to dry_run"
).split()
_OF_REGRADE = ["benchmark", "output"]
_NO_MEMORY = "give a smaller --batch_size, a narrower --dtype, or --engine vllm"


def _parser() -> command.Parser:
    parser = command.Parser(_NAME, __doc__)
    add = parser.add_argument
    add("--model", help="A hub name or a directory.")
    add("--revision", help="Branch, tag or commit on the hub.")
    names = ", ".join(BENCHMARKS)
    add("--benchmarks", nargs="+", help=f"Any of {names}; default: the paper's nine, or your own.")
    add("--benchmarks_file", type=Path, help="YAML file of your own benchmarks.")
    add("--data_dir", type=Path, help="The harness's data/; default: download.")
    add("--prompts_dir", type=Path, help="The harness's prompts/cot; default: our own prompts.")
    add(
        "--chat",
        action="store_true",
        help="Zero-shot, in the chat template; not the paper's protocol.",
    )
    drawn = "Outputs per item, for avg@k and pass@k; default: 1. Needs --temperature."
    add("--samples", type=int, metavar="K", help=drawn)
    add("--temperature", type=float, help="Default: 0, greedy decoding, as in the paper.")
    add(
        "--top_p",
        type=float,
        help="Sample from the most likely tokens of this total probability; default: 1.",
    )
    place = "MODEL/evaluation, RUN/evaluation-checkpoint-N or runs/NAME/evaluation"
    add("--output_dir", type=Path, help=f"Default: {place}.")
    add("--limit", type=int, help="Ask only the first N items of each benchmark.")
    add("--engine", choices=("hf", "vllm"), default="hf")
    add("--batch_size", type=int, help="For --engine hf; default: 64 on a GPU, 16 on a CPU.")
    parser.add_dtype()
    add("--trust_remote_code", action="store_true", help="Allow the model to run its own code.")
    add("--report_to", choices=("none", "wandb"), default="none")
    add("--dry_run", action="store_true", help="Print one prompt per benchmark, and token counts.")
    add("--regrade", type=Path, metavar="FILE", help="Grade stored outputs; needs --benchmark.")
    add("--benchmark", help="Benchmark of the outputs in --regrade FILE.")
    add("--output", type=Path, help="File for the items of --regrade; default: standard output.")
    return parser


def check(argv: Sequence[str] | None = None) -> Namespace:
    """Parse the command line. A wrong argument is a ValueError."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    _check_kind(parser, arguments)
    _check_values(arguments)
    arguments.sampling = _sampling(arguments)
    # Check packages, names and downloads before torch is imported, which takes seconds.
    _choose_benchmarks(arguments)
    require_trackers(arguments.report_to)
    if arguments.engine == "vllm" and not arguments.dry_run:
        require("vllm", "--engine vllm")
    if arguments.model and not arguments.data_dir:
        _check_downloads(arguments.benchmarks)
    return arguments


def _check_kind(parser: command.Parser, arguments: Namespace) -> None:
    """An evaluation has a model to ask or stored outputs to grade, each with its own options."""
    if bool(arguments.model) == bool(arguments.regrade):
        raise ValueError("give --model, or --regrade FILE and its --benchmark")
    if arguments.regrade and not arguments.benchmark:
        raise ValueError("--regrade needs the --benchmark of its outputs")
    # An option for the other kind would have no effect, which is not what the user wants.
    kind, other_options = "--model", _OF_REGRADE
    if arguments.regrade:
        kind, other_options = "--regrade", _OF_MODEL
    for name in other_options:
        if vars(arguments)[name] != parser.get_default(name):
            raise ValueError(f"--{name} has no effect with {kind}: leave it out")


def _check_values(arguments: Namespace) -> None:
    """Reject numbers that ask for nothing, and paths that are missing or of the wrong kind."""
    # The parser has already rejected negative numbers.
    for name in ("limit", "batch_size", "samples"):
        if vars(arguments)[name] == 0:
            raise ValueError(f"--{name} must be at least 1, got 0")
    for name in ("data_dir", "prompts_dir", "regrade", "benchmarks_file"):
        path = vars(arguments)[name]
        if path is not None and not path.exists():
            raise ValueError(f"--{name} {path}: no such file or directory")
    for name in ("regrade", "output", "benchmarks_file"):
        path = vars(arguments)[name]
        if path is not None and path.is_dir():
            raise ValueError(f"--{name} {path}: expected a file, found a directory")
    output, regrade = arguments.output, arguments.regrade
    if output and regrade and output.exists() and output.samefile(regrade):
        raise ValueError(f"--output {output}: --regrade has the same file, which would be replaced")


def _sampling(arguments: Namespace) -> Sampling | None:
    """Return how outputs are drawn, or None for greedy decoding. Contradictions are ValueErrors."""
    samples = arguments.samples or 1
    temperature = arguments.temperature or 0.0
    top_p = 1.0 if arguments.top_p is None else arguments.top_p
    if temperature == 0:
        if samples > 1:
            raise ValueError(
                f"--samples {samples} without --temperature would repeat one output {samples} "
                "times: give --temperature, for example 0.6"
            )
        if arguments.top_p is not None:
            raise ValueError("--top_p has no effect without --temperature: leave it out")
        return None
    # vLLM would raise any value between to 0.01.
    if not 0.01 <= temperature < math.inf:
        raise ValueError(f"--temperature must be 0, or 0.01 or more, got {temperature:g}")
    if not 0 < top_p <= 1:
        raise ValueError(f"--top_p must be above 0 and at most 1, got {top_p:g}")
    return Sampling(samples, temperature, top_p)


@command.shell(_NAME, out_of_memory=_NO_MEMORY, resumable=True)
def main(argv: Sequence[str] | None = None) -> None:
    """Evaluate, preview or regrade."""
    arguments = check(argv)
    # Graders and engines take seconds to import, which --help and wrong arguments do not need.
    from vocagnolm.evaluation import evaluate

    if arguments.regrade:
        benchmark = arguments.benchmark
        if arguments.chat:
            benchmark = benchmark.in_chat()
        evaluate.regrade(arguments.regrade, benchmark, arguments.output)
        return
    for option in _without_effect(arguments):
        log_main(f"warning: {option}")
    evaluate.evaluate(arguments)


def _without_effect(arguments: Namespace) -> Iterator[str]:
    """Yield a line for each given option without an effect."""
    benchmarks: list[Benchmark] = arguments.benchmarks
    has_own = any(benchmark.directory for benchmark in benchmarks)
    has_harness_file = any(benchmark.file and not benchmark.directory for benchmark in benchmarks)
    has_prompt_set = any(benchmark.prompt_set for benchmark in benchmarks)
    conditions = (
        (has_own, "benchmarks_file", "without one of its --benchmarks"),
        (has_harness_file, "data_dir", "with these --benchmarks"),
        (has_prompt_set, "prompts_dir", "with these --benchmarks"),
        (not arguments.chat, "prompts_dir", "with --chat"),
        (not Path(arguments.model).is_dir(), "revision", "with a directory"),
        (arguments.engine == "hf", "batch_size", "with --engine vllm"),
    )
    for has_effect, name, condition in conditions:
        if vars(arguments)[name] is not None and not has_effect:
            yield f"--{name} has no effect {condition}"


def _choose_benchmarks(arguments: Namespace) -> None:
    """Replace names of benchmarks by their records, including those of a user's own file."""
    user_benchmarks: dict[str, Benchmark] = {}
    if arguments.benchmarks_file:
        user_benchmarks = read_benchmarks(arguments.benchmarks_file)
    # Without names, all benchmarks of a user's file are asked, or the paper's nine if there is no
    # file.
    benchmarks = {**BENCHMARKS, **user_benchmarks}
    names: list[str] = []
    # Both `gsm8k,math` and `gsm8k math` name two benchmarks.
    for argument in arguments.benchmarks or user_benchmarks or PAPER_BENCHMARKS:
        for name in argument.split(","):
            if name and name not in names:
                names.append(name)
    if not names:
        raise ValueError("--benchmarks: expected names of benchmarks, found none")
    _check_names("--benchmarks", names, benchmarks)
    arguments.benchmarks = [benchmarks[name] for name in names]
    if arguments.benchmark:
        _check_names("--benchmark", [arguments.benchmark], benchmarks)
        arguments.benchmark = benchmarks[arguments.benchmark]
    for benchmark in [arguments.benchmark] if arguments.regrade else arguments.benchmarks:
        if arguments.chat and benchmark.answer_kind == "marked":
            raise ValueError(f"--chat: {benchmark.id} asks for no boxed answers")


def _check_downloads(benchmarks: Sequence[Benchmark]) -> None:
    """Look for the items on the hub before a model is loaded."""
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
