"""Few-shot chain-of-thought accuracy on the paper's nine math benchmarks, and the three averages.

    vocagnolm evaluate --model runs/my-student
    accelerate launch evaluate_math.py --model Qwen/Qwen2.5-Math-7B       # one process per GPU
    vocagnolm evaluate --model M --dry_run                                # prompts and token counts
    vocagnolm evaluate --model M --chat              # zero-shot, in the model's own chat template
    vocagnolm evaluate --regrade FILE.jsonl.gz --benchmark gsm8k          # grade stored outputs

Killed at any moment, the same command resumes. Exit status: 0 done, 2 a wrong argument or file,
130 interrupted.
"""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from vocagnolm import cli as command
from vocagnolm.evaluation.tasks.benchmarks import BENCHMARKS, PAPER_BENCHMARKS

_NAME = "vocagnolm evaluate"
_HARNESS_NAMES = {"minerva_math": "math", "sat_math": "sat"}
_NO_MEMORY = "give a smaller --batch_size, a narrower --dtype, or --engine vllm"


@command.shell(_NAME, out_of_memory=_NO_MEMORY, resumable=True)
def main(argv: Sequence[str] | None = None) -> None:
    """Evaluate, preview or regrade."""
    arguments = _parse(argv)
    # Only now: what grades and asks takes seconds to import.
    from vocagnolm.evaluation import evaluate, regrading

    if arguments.regrade:
        benchmark = BENCHMARKS[arguments.benchmark]
        asked = benchmark.in_chat() if arguments.chat else benchmark
        regrading.regrade(arguments.regrade, asked, arguments.output)
    else:
        evaluate.evaluate(arguments)


def _parse(argv: Sequence[str] | None = None) -> Namespace:
    """Read the command line; a ValueError says what is wrong or missing."""
    parser = command.Parser(_NAME, __doc__)
    add = parser.add_argument
    add("--model", help="A directory, or a name on the hub.")
    add("--revision", help="Branch, tag or commit on the hub.")
    names = f"Of {', '.join(BENCHMARKS)}."
    add("--benchmarks", nargs="+", default=list(PAPER_BENCHMARKS), help=names)
    add("--data_dir", type=Path, help="Items in the harness's layout; without it, downloads.")
    add("--prompts_dir", type=Path, help="The harness's prompts/cot; without it, our own prompts.")
    add("--chat", action="store_true", help="Zero-shot: not the paper's protocol, and marked so.")
    add("--chat_template", type=Path, metavar="FILE", help="In place of the model's own.")
    add("--output_dir", type=Path, help="Default: MODEL/evaluation, or runs/NAME/evaluation.")
    add("--limit", type=int, help="Only the first so many items of each benchmark.")
    add("--engine", choices=("hf", "vllm"), default="hf")
    add("--batch_size", type=int, help="Default: 64 on a GPU, 16 on a CPU. hf only.")
    parser.add_dtype()
    add("--attn_implementation", help="As in transformers. hf only.")
    add("--trust_remote_code", action="store_true")
    add("--report_to", choices=("none", "wandb"), default="none")
    add("--dry_run", action="store_true", help="Print one prompt per benchmark and token counts.")
    add("--regrade", type=Path, metavar="FILE", help="Grade stored outputs; needs --benchmark.")
    add("--benchmark", type=_our_name, choices=BENCHMARKS, help="Of the outputs in --regrade FILE.")
    add("--output", type=Path, help="Of --regrade: the graded items; default: standard output.")
    arguments = parser.parse_args(argv)
    asked = map(_our_name, ",".join(arguments.benchmarks).split(","))
    arguments.benchmarks = list(dict.fromkeys(filter(None, asked)))
    _check(arguments)
    return arguments


def _our_name(name: str) -> str:
    return _HARNESS_NAMES.get(name.strip(), name.strip())


def _check(arguments: Namespace) -> None:
    if bool(arguments.model) == bool(arguments.regrade):
        raise ValueError("give --model, a directory or a name on the hub, or --regrade FILE")
    if arguments.regrade and not arguments.benchmark:
        raise ValueError("--regrade needs --benchmark")
    names = [arguments.benchmark] if arguments.regrade else arguments.benchmarks
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown or not names:
        raise ValueError(f"--benchmarks: {unknown} are not of {', '.join(BENCHMARKS)}")
    if arguments.chat and "demo" in names:
        raise ValueError("--chat: the demo is asked for no boxed answers: leave demo out")
    if arguments.chat_template and not arguments.chat:
        raise ValueError("--chat_template has no effect without --chat")
    for option in ("limit", "batch_size"):
        if (value := vars(arguments)[option]) is not None and value < 1:
            raise ValueError(f"--{option} must be at least 1, got {value}")
