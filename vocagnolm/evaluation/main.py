"""Few-shot chain-of-thought accuracy on the paper's nine math benchmarks, and the three averages.

    vocagnolm evaluate --model runs/my-student
    accelerate launch evaluate_math.py --model Qwen/Qwen2.5-Math-7B       # one process per GPU
    vocagnolm evaluate --model M --dry_run                                # prompts and token counts
    vocagnolm evaluate --regrade FILE.jsonl.gz --benchmark gsm8k          # grade stored outputs

Killed at any moment, the same command continues. Exit status: 0 done, 2 a wrong argument or file,
130 interrupted.
"""

import os
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from accelerate import PartialState
from transformers import PreTrainedTokenizerBase as Tokenizer

from vocagnolm.evaluation import regrading, report, runner, tracking
from vocagnolm.evaluation.engines.generation import Engine
from vocagnolm.evaluation.engines.hf_engine import HFEngine
from vocagnolm.evaluation.engines.vllm_engine import VLLMEngine, import_vllm
from vocagnolm.evaluation.grading.grading import Grader
from vocagnolm.evaluation.records import Record, RunDirectory
from vocagnolm.evaluation.tasks.benchmarks import BENCHMARKS, PAPER_BENCHMARKS
from vocagnolm.evaluation.tasks.tasks import Task, load_tasks
from vocagnolm.host import command
from vocagnolm.host.processes import connect, in_agreement
from vocagnolm.models.source import NO_LIMIT, ModelSource, context_length, revision_of

_NAME = "vocagnolm evaluate"
_HARNESS_NAMES = {"minerva_math": "math", "sat_math": "sat"}


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate, preview or regrade, and return the exit status."""
    return command.run_command(_NAME, lambda: _evaluate_or_regrade(_parse(argv)), resumable=True)


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
    if arguments.regrade:
        useless = given - {"regrade", "benchmark", "output"}
        if useless or not arguments.benchmark:
            found = ", ".join(f"--{name}" for name in sorted(useless)) or "no --benchmark"
            raise ValueError(f"--regrade takes --benchmark and --output only, found {found}")
        return
    if useless := given & {"benchmark", "output"}:
        raise ValueError(f"--{min(useless)} belongs to --regrade: leave it out")
    if not arguments.model:
        raise ValueError("expected --model, a directory or a name on the hub, or --regrade FILE")
    if arguments.engine == "vllm":
        command.refuse_idle(given, {"batch_size", "attn_implementation"}, "with --engine vllm")
    if arguments.benchmarks == ["demo"]:
        command.refuse_idle(given, {"data_dir", "prompts_dir"}, "on the demo")
    if Path(arguments.model).is_dir():
        command.refuse_idle(given, {"revision"}, "on a directory")
    command.check_at_least(arguments, 1, "limit", "batch_size")
    for name in ("data_dir", "prompts_dir"):
        path = vars(arguments)[name]
        if path is not None and not path.is_dir():
            raise ValueError(f"--{name} {path}: expected a directory, found none: give another")


def _evaluate_or_regrade(arguments: Namespace) -> None:
    if arguments.regrade:
        regrading.regrade(arguments.regrade, arguments.benchmark, arguments.output)
        return
    if arguments.engine == "vllm" and not arguments.dry_run:
        # It may be missing, which is said before anything is downloaded.
        import_vllm()
    _evaluate(arguments)


def _evaluate(arguments: Namespace) -> None:
    state = connect()
    arguments.dtype = command.resolve_dtype(arguments.dtype, state.device)
    arguments.batch_size = arguments.batch_size or (64 if state.device.type == "cuda" else 16)
    attention, is_trusted = arguments.attn_implementation, arguments.trust_remote_code
    source = ModelSource(arguments.model, "model", arguments.revision, attention, is_trusted)
    # Every step that may fail: all processes fail together, with one message.
    with in_agreement():
        tracker = arguments.report_to == "wandb" and tracking.Tracker(arguments.model)
        config, tokenizer = source.config(), source.tokenizer()
        where = arguments.data_dir, arguments.prompts_dir
        tasks = load_tasks(arguments.benchmarks, *where, arguments.limit)
    context = context_length(config)
    if arguments.dry_run:
        for task in tasks:
            command.say(task.preview(tokenizer, context))
        return
    directory = RunDirectory(output_dir(arguments))
    with ExitStack() as held:
        with in_agreement():
            settings = _settings(arguments, tasks, context)
            if state.is_main_process:
                settings["model"]["revision"] = revision_of(arguments.model, config)
                held.enter_context(directory.lock())
                directory.check_settings(settings)
                for task in tasks:
                    runner.unasked(task, directory)
                report.earlier(directory)
        with in_agreement():
            engine = _load_engine(arguments, source, tokenizer, state)
            if state.is_main_process:
                directory.write_settings(settings)
        workers = max(1, min(8, (os.cpu_count() or 1) // state.num_processes))
        with Grader(workers) as grader:
            for task in runner.run(tasks, engine, grader, directory, state):
                if state.is_main_process:
                    command.note(report.progress(task, directory))
        if state.is_main_process:
            environment = _environment(arguments, state)
            results = report.build_results(tasks, directory, settings, environment)
            report.write_results(results, directory)
            written = "results.json, row.md, row.tex and an item file per benchmark"
            command.say(f"{report.to_markdown(results)}\nwritten: {directory.path}/{written}")
            if tracker:
                names = [task.benchmark.id for task in tasks]
                tracker.report(results, {name: directory.finished(name).values() for name in names})


def _settings(arguments: Namespace, tasks: Sequence[Task], context: int) -> Record:
    # What items must share to belong to one evaluation.
    return {
        "model": {"name": arguments.model, "revision": None},
        "engine": arguments.engine,
        "dtype": arguments.dtype,
        "attn_implementation": arguments.attn_implementation,
        "context": None if context == NO_LIMIT else context,
        "limit": arguments.limit,
        "grader": report.GRADER,
        "second_opinion": report.second_opinion(),
        "benchmarks": {task.benchmark.id: task.settings() for task in tasks},
    }


def _environment(arguments: Namespace, state: PartialState) -> dict[str, object]:
    # Facts that may change a number in bfloat16 without being a setting.
    device = state.device.type
    return {
        "batch_size": arguments.batch_size if arguments.engine == "hf" else None,
        "processes": state.num_processes,
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
    }


def _load_engine(
    arguments: Namespace, source: ModelSource, tokenizer: Tokenizer, state: PartialState
) -> Engine:
    if arguments.engine == "vllm":
        if state.num_processes > 1:
            raise ValueError("--engine vllm uses all GPUs by itself: start it with python")
        return VLLMEngine(source, tokenizer, arguments.dtype)
    try:
        model = source.load(getattr(torch, arguments.dtype)).to(state.device)
    except torch.OutOfMemoryError as error:
        remedy = "give a narrower --dtype, or --engine vllm, which spreads it over the GPUs"
        place = f"the memory of {state.device}"
        raise ValueError(f"--model {source.name} does not fit into {place}: {remedy}") from error
    return HFEngine(model, tokenizer, arguments.batch_size)


def output_dir(arguments: Namespace) -> Path:
    """Put results beside the model if it is a directory."""
    if arguments.output_dir:
        return Path(arguments.output_dir)
    model = Path(arguments.model)
    return (model if model.is_dir() else Path("runs") / model.name) / "evaluation"
