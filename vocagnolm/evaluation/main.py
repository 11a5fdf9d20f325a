"""Few-shot chain-of-thought accuracy on the paper's nine math benchmarks, and the three averages.

    python evaluate_math.py --model runs/my-student
    accelerate launch evaluate_math.py --model Qwen/Qwen2.5-Math-7B       # one process per GPU
    python evaluate_math.py --model M --dry_run                           # prompts and token counts
    python evaluate_math.py --regrade FILE.jsonl.gz --benchmark gsm8k     # grade stored outputs

Killed at any moment, the same command continues. Exit status: 0 done, 2 a wrong argument or file,
130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate import PartialState
from transformers import AutoTokenizer, PreTrainedConfig
from transformers.utils import logging as transformers_logging

from vocagnolm.evaluation import regrading, report, tracking
from vocagnolm.evaluation.engines.generation import Engine, context_length
from vocagnolm.evaluation.engines.hf_engine import HFEngine
from vocagnolm.evaluation.grading.grading import Grader
from vocagnolm.evaluation.records import RunDirectory
from vocagnolm.evaluation.runner import run
from vocagnolm.evaluation.tasks.benchmarks import BENCHMARKS, PAPER_BENCHMARKS
from vocagnolm.evaluation.tasks.preview import preview
from vocagnolm.evaluation.tasks.tasks import Task, load_tasks
from vocagnolm.host.processes import LONGEST_WAIT, SharedError, in_agreement, is_on_cpu
from vocagnolm.models.source import ModelSource, revision_of

_HARNESS_NAMES = {"minerva_math": "math", "sat_math": "sat"}
_ONLY_HF = {"batch_size", "attn_implementation"}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", help="A directory, or a name on the hub.")
    add("--revision", help="Branch, tag or commit on the hub.")
    add("--benchmarks", default=",".join(PAPER_BENCHMARKS), help=f"Of {', '.join(BENCHMARKS)}.")
    add("--data_dir", type=Path, help="Items in the harness's layout; without it, downloads.")
    add("--prompts_dir", type=Path, help="The harness's prompts/cot; without it, our own prompts.")
    add("--output_dir", type=Path, help="Default: MODEL/evaluation, or runs/NAME/evaluation.")
    add("--limit", type=int, help="Only the first so many items of each benchmark.")
    add("--engine", choices=("hf", "vllm"), default="hf")
    add("--batch_size", type=int, help="Default: 64 on a GPU, 16 on a CPU. hf only.")
    add("--dtype", choices=("auto", "bfloat16", "float16", "float32"), default="auto")
    add("--attn_implementation", help="As in transformers. hf only.")
    add("--trust_remote_code", action="store_true")
    add("--report_to", choices=("none", "wandb"), default="none")
    add("--dry_run", action="store_true", help="Print one prompt per benchmark and token counts.")
    add("--regrade", type=Path, metavar="FILE", help="Grade stored outputs; needs --benchmark.")
    add("--benchmark", type=_our_name, choices=BENCHMARKS, help="Of the outputs in --regrade FILE.")
    add("--output", type=Path, help="Of --regrade: the graded items; default: standard output.")
    arguments = parser.parse_args(argv)
    arguments.benchmarks = _benchmark_names(arguments.benchmarks)
    _check_combination(arguments, parser)
    return arguments


def _our_name(name: str) -> str:
    return _HARNESS_NAMES.get(name.strip(), name.strip())


def _benchmark_names(text: str) -> list[str]:
    names = list(dict.fromkeys(filter(None, map(_our_name, text.split(",")))))
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown or not names:
        raise ValueError(
            f"--benchmarks: expected some of {','.join(BENCHMARKS)}, found {text!r}: "
            "separate them with commas"
        )
    return names


def _check_combination(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuse what is missing, and options that would have no effect."""
    given = {name for name, value in vars(arguments).items() if value != parser.get_default(name)}
    given -= {"benchmarks"} if arguments.benchmarks == list(PAPER_BENCHMARKS) else set()
    if arguments.regrade:
        useless = given - {"regrade", "benchmark", "output"}
        if useless or not arguments.benchmark:
            found = ", ".join(f"--{name}" for name in sorted(useless)) or "no --benchmark"
            raise ValueError(f"--regrade takes --benchmark and --output only, found {found}")
    elif useless := given & {"benchmark", "output"}:
        raise ValueError(f"--{min(useless)} belongs to --regrade: leave it out")
    elif not arguments.model:
        raise ValueError("expected --model, a directory or a name on the hub, or --regrade FILE")
    elif arguments.engine == "vllm" and (useless := given & _ONLY_HF):
        raise ValueError(f"--{min(useless)} has no effect with --engine vllm: leave it out")
    elif arguments.benchmarks == ["demo"] and (useless := given & {"data_dir", "prompts_dir"}):
        raise ValueError(f"--{min(useless)} has no effect on the demo: leave it out")
    _check_values(arguments)


def _check_values(arguments: argparse.Namespace) -> None:
    for name in ("limit", "batch_size"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name}: expected 1 or more, found {value}")
    if arguments.revision and Path(arguments.model).is_dir():
        raise ValueError("--revision has no effect on a directory: leave it out")
    for name in ("data_dir", "prompts_dir"):
        path = getattr(arguments, name)
        if path is not None and not path.is_dir():
            raise ValueError(f"--{name} {path}: expected a directory, found none: give another")


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate, preview or regrade, and return the exit status."""
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        arguments = parse(argv)
        if arguments.regrade:
            regrading.regrade(arguments.regrade, arguments.benchmark, arguments.output)
        else:
            evaluate(arguments)
    except (ValueError, ImportError, OSError) as error:
        if not isinstance(error, SharedError) or PartialState().is_main_process:
            say(f"evaluate_math.py: error: {' '.join(str(error).split())}")
        return 2
    except KeyboardInterrupt:
        say("evaluate_math.py: interrupted: give the same command again to continue")
        return 130
    return 0


def say(text: str) -> None:
    """Print what is no result."""
    print(text, file=sys.stderr, flush=True)


def evaluate(arguments: argparse.Namespace) -> None:
    """Ask a model the benchmarks, and report."""
    state = PartialState(cpu=is_on_cpu(), timeout=LONGEST_WAIT)
    source = ModelSource(
        arguments.model,
        "model",
        arguments.revision,
        arguments.attn_implementation,
        arguments.trust_remote_code,
    )
    directory = RunDirectory(output_dir(arguments))
    with in_agreement():
        tracker = tracking.Tracker(arguments.model) if arguments.report_to == "wandb" else None
        config = source.config()
        tokenizer = load_tokenizer(source)
        tasks = load_tasks(
            arguments.benchmarks, arguments.data_dir, arguments.prompts_dir, arguments.limit
        )
    if arguments.dry_run:
        show(tasks, tokenizer, config, state)
        return
    with ExitStack() as held:
        with in_agreement():
            settings = describe(arguments, config, tasks, state) if state.is_main_process else {}
            if state.is_main_process:
                held.enter_context(directory.lock())
                directory.check_settings(settings)
        with in_agreement():
            engine = load_engine(arguments, source, tokenizer, state)
            if state.is_main_process:
                directory.write_settings(settings)
        workers = max(1, min(8, (os.cpu_count() or 1) // state.num_processes))
        with Grader(workers) as grader:
            for task in run(tasks, engine, grader, directory, state):
                if state.is_main_process:
                    say(report.progress(task, directory))
        if state.is_main_process:
            finish(tasks, directory, settings, environment(arguments, state), tracker)


def environment(arguments: argparse.Namespace, state: Any) -> dict[str, Any]:
    """What may change a number in bfloat16 without being a setting."""
    device = state.device.type
    return {
        "batch_size": batch_size(arguments, state) if arguments.engine == "hf" else None,
        "processes": state.num_processes,
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
    }


def show(tasks: Sequence[Task], tokenizer: Any, config: PreTrainedConfig, state: Any) -> None:
    """Print what would be asked."""
    if state.is_main_process:
        for task in tasks:
            print(preview(task, tokenizer, context_length(config)))


def load_tokenizer(source: ModelSource) -> Any:
    """The model's tokenizer."""
    try:
        return AutoTokenizer.from_pretrained(
            source.name, revision=source.revision, trust_remote_code=source.trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"the tokenizer of --model {source.name} cannot be loaded: {why}"
        ) from error


def load_engine(
    arguments: argparse.Namespace, source: ModelSource, tokenizer: Any, state: Any
) -> Engine:
    """The model, ready to answer, on this process's device."""
    dtype_name = dtype(arguments, state.device)
    if arguments.engine == "vllm":
        from vocagnolm.evaluation.engines.vllm_engine import VLLMEngine

        if state.num_processes > 1:
            raise ValueError(
                "--engine vllm spreads a model over the GPUs itself: start it with python"
            )
        return VLLMEngine(
            source.name, tokenizer, dtype_name, source.revision, source.trust_remote_code
        )
    try:
        model = source.load(getattr(torch, dtype_name)).to(state.device)
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"--model {source.name} does not fit into the memory of {state.device}: give a "
            "narrower --dtype, or --engine vllm, which spreads it over the GPUs"
        ) from error
    return HFEngine(model, tokenizer, batch_size(arguments, state))


def batch_size(arguments: argparse.Namespace, state: Any) -> int:
    """Prompts of a batch."""
    return int(arguments.batch_size or (64 if state.device.type == "cuda" else 16))


def dtype(arguments: argparse.Namespace, device: torch.device) -> str:
    """The type that `--dtype auto` means: bfloat16 on a GPU, float32 on a CPU."""
    if arguments.dtype != "auto":
        return str(arguments.dtype)
    return "bfloat16" if device.type == "cuda" else "float32"


def output_dir(arguments: argparse.Namespace) -> Path:
    """Where results go: beside the model if it is a directory."""
    if arguments.output_dir:
        return Path(arguments.output_dir)
    model = Path(arguments.model)
    return (model if model.is_dir() else Path("runs") / model.name) / "evaluation"


def describe(
    arguments: argparse.Namespace, config: PreTrainedConfig, tasks: Sequence[Task], state: Any
) -> dict[str, Any]:
    """What must be the same for items to belong to one evaluation."""
    return {
        "model": {
            "name": arguments.model,
            "revision": revision_of(arguments.model, config),
        },
        "engine": arguments.engine,
        "dtype": dtype(arguments, state.device),
        "attn_implementation": arguments.attn_implementation,
        "context": context_length(config),
        "limit": arguments.limit,
        "grader": report.GRADER,
        "second_opinion": report.second_opinion(),
        "benchmarks": {task.benchmark.id: task.settings() for task in tasks},
    }


def finish(
    tasks: Sequence[Task],
    directory: RunDirectory,
    settings: dict[str, Any],
    environment: dict[str, Any],
    tracker: tracking.Tracker | None,
) -> None:
    """Write and print the row, and report it."""
    results = report.build_results(tasks, directory, settings, environment)
    report.write_results(results, directory)
    print(report.markdown(results))
    print(f"written: {directory.path}/results.json, row.md, row.tex and an item file per benchmark")
    if tracker:
        names = [task.benchmark.id for task in tasks]
        tracker.report(results, {name: directory.finished(name).values() for name in names})


def run_script() -> NoReturn:
    """Run `main` as a process of its own, and leave it at once."""
    status = main()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        sys.stdout.flush()
        # Threads of gloo may abort a process that takes its time to end.
        os._exit(status)
    sys.exit(status)
