"""An evaluation of a model: load, ask, grade, report; `main` reads its command line."""

import os
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from accelerate import PartialState
from transformers import PreTrainedTokenizerBase as Tokenizer

from vocagnolm import cli as command
from vocagnolm.dist import connect, in_agreement
from vocagnolm.evaluation import report, runner, tracking
from vocagnolm.evaluation.engines.chat import Chat, load_chat
from vocagnolm.evaluation.engines.generation import shared_length
from vocagnolm.evaluation.engines.hf_engine import HFEngine
from vocagnolm.evaluation.engines.vllm_engine import VLLMEngine, longest_context
from vocagnolm.evaluation.grading.grading import Grader
from vocagnolm.evaluation.records import Record, RunDirectory
from vocagnolm.evaluation.tasks.tasks import Task, load_tasks
from vocagnolm.models.source import NO_LIMIT, ModelSource, context_length, revision_of


def evaluate(arguments: Namespace) -> None:
    """Ask and grade all items that are left, and write the report; in all processes of a job."""
    state = connect()
    arguments.dtype = command.resolve_dtype(arguments.dtype, state.device)
    arguments.batch_size = arguments.batch_size or (64 if state.device.type == "cuda" else 16)
    attention, is_trusted = arguments.attn_implementation, arguments.trust_remote_code
    source = ModelSource(arguments.model, "model", arguments.revision, attention, is_trusted)
    # Every step that may fail: all processes fail together, with one message.
    with in_agreement():
        if arguments.engine == "vllm" and not arguments.dry_run:
            import vllm  # noqa: F401  # may be missing: known before anything is downloaded
        tracker = arguments.report_to == "wandb" and tracking.Tracker(
            arguments.model, chat=arguments.chat
        )
        config, tokenizer = source.config(), source.tokenizer()
        chat = load_chat(tokenizer, arguments.chat_template) if arguments.chat else None
        tasks = load_tasks(
            arguments.benchmarks,
            arguments.data_dir,
            arguments.prompts_dir,
            arguments.limit,
            chat.prompt if chat else None,
        )
    context = (longest_context if arguments.engine == "vllm" else context_length)(config)
    if arguments.dry_run:
        for task in tasks:
            command.say(_preview(task, tokenizer, context))
        return
    directory = RunDirectory(output_dir(arguments))
    with ExitStack() as held:
        with in_agreement():
            if state.is_main_process:
                held.enter_context(directory.lock())
                revision = revision_of(arguments.model, config)
                settings = _settings(arguments, tasks, context, revision, chat)
                directory.check_settings(settings)
            engine = _load_engine(arguments, source, tokenizer, state, chat)
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


def _preview(task: Task, tokenizer: Tokenizer, context: int) -> str:
    """Show the first whole prompt, and the token counts of all."""
    benchmark, prompts = task.benchmark, list(task.prompts.values())
    options = {"verbose": False, "add_special_tokens": not task.render}
    ids: list[list[int]] = tokenizer(prompts, **options)["input_ids"]
    lengths = list(map(len, ids))
    room = "" if context == NO_LIMIT else f", and {context} with the prompt"
    if too_long := sum(length >= context for length in lengths):
        room += f"; {too_long} prompts do not fit"
    lines = [
        f"=== {benchmark.id} ({benchmark.column}): {len(prompts)} items, {benchmark.shots} shots, "
        f"data {task.loaded.origin}",
        *(f"--- {mark}" for mark in task.marks().values()),
        f"--- prompt tokens: {min(lengths)} to {max(lengths)}, mean "
        f"{sum(lengths) / len(ids):.0f}; the first {shared_length(ids)} are shared",
        f"--- new tokens: at most {benchmark.max_new_tokens}{room}",
        prompts[0],
    ]
    return "\n".join(lines) + "\n"


def _settings(
    arguments: Namespace, tasks: Sequence[Task], context: int, revision: str, chat: Chat | None
) -> Record:
    # What items must share to belong to one evaluation; the paper's protocol has no name.
    return {
        **({"protocol": chat.settings()} if chat else {}),
        "model": {"name": arguments.model, "revision": revision},
        "engine": arguments.engine,
        "dtype": arguments.dtype,
        "attn_implementation": arguments.attn_implementation,
        "context": None if context == NO_LIMIT else context,
        "limit": arguments.limit,
        "grader": report.GRADER,
        "second_opinion": report.second_opinion(),
        "benchmarks": {task.benchmark.id: task.settings() for task in tasks},
    }


def _environment(arguments: Namespace, state: PartialState) -> Record:
    # Facts that may change a number in bfloat16 without being a setting.
    device = state.device.type
    return {
        "batch_size": arguments.batch_size if arguments.engine == "hf" else None,
        "processes": state.num_processes,
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
    }


def _load_engine(
    arguments: Namespace,
    source: ModelSource,
    tokenizer: Tokenizer,
    state: PartialState,
    chat: Chat | None,
) -> HFEngine | VLLMEngine:
    if arguments.engine == "vllm":
        if state.num_processes > 1:
            raise ValueError("--engine vllm uses all GPUs by itself: start it with python")
        return VLLMEngine(source, tokenizer, arguments.dtype, chat)
    model = source.load(getattr(torch, arguments.dtype)).to(state.device)
    return HFEngine(model, tokenizer, arguments.batch_size, chat)


def output_dir(arguments: Namespace) -> Path:
    """Put results beside the model if it is a directory."""
    if arguments.output_dir:
        return Path(arguments.output_dir)
    model = Path(arguments.model)
    name = "evaluation-chat" if arguments.chat else "evaluation"
    return (model if model.is_dir() else Path("runs") / model.name) / name
