"""Few-shot chain-of-thought accuracy on the paper's nine math benchmarks, and the three averages.

    vocagnolm evaluate --model runs/my-student
    accelerate launch evaluate_math.py --model Qwen/Qwen2.5-Math-7B       # one process per GPU
    vocagnolm evaluate --model M --dry_run                                # prompts and token counts
    vocagnolm evaluate --model M --chat              # zero-shot, in the model's own chat template
    vocagnolm evaluate --regrade FILE.jsonl.gz --benchmark gsm8k          # grade stored outputs

Killed at any moment, the same command continues. Exit status: 0 done, 2 a wrong argument or file,
130 interrupted.
"""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from vocagnolm import cli as command
from vocagnolm.evaluation.tasks.benchmarks import BENCHMARKS, PAPER_BENCHMARKS
from vocagnolm.host.options import refuse_idle

_NAME = "vocagnolm evaluate"
_HARNESS_NAMES = {"minerva_math": "math", "sat_math": "sat"}


@command.shell(_NAME, resumable=True)
def main(argv: Sequence[str] | None = None) -> None:
    """Evaluate, preview or regrade."""
    _evaluate_or_regrade(_parse(argv))


def _parse(argv: Sequence[str] | None = None) -> Namespace:
    """Read the command line; a ValueError says what is wrong, missing or without effect."""
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
    given = parser.given(arguments)
    arguments.benchmarks = _benchmark_names(",".join(arguments.benchmarks))
    _check(arguments, given)
    return arguments


def _our_name(name: str) -> str:
    return _HARNESS_NAMES.get(name.strip(), name.strip())


def _benchmark_names(text: str) -> list[str]:
    names = list(dict.fromkeys(filter(None, map(_our_name, text.split(",")))))
    if not names or not BENCHMARKS.keys() >= set(names):
        found = f"expected some of {','.join(BENCHMARKS)}, found {text!r}"
        raise ValueError(f"--benchmarks: {found}: separate them with commas or blanks")
    return names


def _check(arguments: Namespace, given: set[str]) -> None:
    names = [arguments.benchmark] if arguments.regrade else arguments.benchmarks
    if arguments.chat and "demo" in names:
        raise ValueError("--chat: the demo is asked for no boxed answers: leave demo out")
    if arguments.regrade:
        refuse_idle(given, given - {"regrade", "benchmark", "output", "chat"}, "with --regrade")
        if not arguments.benchmark:
            raise ValueError("--benchmark is required with --regrade")
        return
    if not arguments.model:
        raise ValueError("expected --model, a directory or a name on the hub, or --regrade FILE")
    idle = [
        (True, {"benchmark", "output"}, "without --regrade"),
        (arguments.engine == "vllm", {"batch_size", "attn_implementation"}, "with --engine vllm"),
        (arguments.chat, {"prompts_dir"}, "with --chat, which asks zero-shot"),
        (not arguments.chat, {"chat_template"}, "without --chat"),
        (arguments.benchmarks == ["demo"], {"data_dir", "prompts_dir"}, "on the demo"),
    ]
    for holds, options, condition in idle:
        if holds:
            refuse_idle(given, options, condition)
    for name in ("data_dir", "prompts_dir"):
        path = vars(arguments)[name]
        if path is not None and not path.is_dir():
            raise ValueError(f"--{name} {path}: expected a directory, found none: give another")


def _evaluate_or_regrade(arguments: Namespace) -> None:
    # Only now: what grades and asks takes seconds to import.
    from vocagnolm.evaluation import evaluate, regrading
    from vocagnolm.evaluation.engines.vllm_engine import import_vllm

    if arguments.regrade:
        benchmark = BENCHMARKS[arguments.benchmark]
        asked = benchmark.in_chat() if arguments.chat else benchmark
        regrading.regrade(arguments.regrade, asked, arguments.output)
        return
    if arguments.engine == "vllm" and not arguments.dry_run:
        # It may be missing, which is said before anything is downloaded.
        import_vllm()
    evaluate.evaluate(arguments)
