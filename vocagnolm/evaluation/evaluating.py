"""Evaluates a model: load, ask, grade, report. `evaluate.py` reads the command line."""

import os
import re
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import PreTrainedConfig
from transformers import PreTrainedTokenizerBase as Tokenizer

from vocagnolm.evaluation import results, runner
from vocagnolm.evaluation.engines.generation import Chat, Engine, shared_length
from vocagnolm.evaluation.engines.hf_engine import HFEngine
from vocagnolm.evaluation.engines.vllm_engine import VLLMEngine, longest_context
from vocagnolm.evaluation.grading.grading import Grader
from vocagnolm.evaluation.records import SETTINGS_FILE, EvaluationDirectory
from vocagnolm.evaluation.tasks.benchmarks import HARNESS
from vocagnolm.evaluation.tasks.tasks import Task, load_tasks
from vocagnolm.evaluation.wandb_run import log_evaluation
from vocagnolm.fields import OptionError
from vocagnolm.models.load import NO_LIMIT, ModelSource, context_length, revision_of
from vocagnolm.models.precision import choose_dtype
from vocagnolm.record import output_directory
from vocagnolm.shell import printing
from vocagnolm.shell.dist import connect, machine_first, rank0
from vocagnolm.shell.io import JsonObject
from vocagnolm.training.tracking import check_trackers

_FILES = "results.json, row.md and an item file per benchmark"


def evaluate(arguments: Namespace) -> None:
    """Ask and grade all remaining items, and write the report, in all processes of a job."""
    state = connect()
    arguments.batch_size = arguments.batch_size or (64 if state.device.type == "cuda" else 16)
    if arguments.report_to == "wandb":
        rank0(lambda: check_trackers(["wandb"]))
    trust = arguments.trust_remote_code
    source = ModelSource(arguments.model, "model", arguments.revision, trust_remote_code=trust)
    config, tokenizer, chat, tasks = _read_all_but_weights(arguments, source)
    new_tokens = max(task.benchmark.max_new_tokens for task in tasks)
    if arguments.engine == "vllm":
        context = longest_context(config, new_tokens)
    else:
        context = context_length(config)
    # A dry run ends before anything is written and before the weights are loaded.
    if arguments.dry_run:
        previews = [_preview(task, tokenizer, context) for task in tasks]
        printing.print_main("\n".join(previews))
        return
    directory = EvaluationDirectory(output_dir(arguments))
    # The first process owns the directory until the report is written, so no other evaluation
    # changes the items meanwhile.
    with ExitStack() as open_contexts:

        def begin() -> JsonObject:
            open_contexts.enter_context(output_directory(directory.path, SETTINGS_FILE))
            begun = directory.settings().get("dtype")
            arguments.dtype, why = choose_dtype(arguments.dtype, state.device, begun)
            printing.log_main(f"{arguments.model} computes in {arguments.dtype} ({why})")
            model = {"name": source.name, "revision": revision_of(source.name, config)}
            settings = _settings(arguments, tasks, chat, model, context)
            directory.write_settings(settings)
            return settings

        # All processes get the settings, or an error. They are written before the first item, so
        # that no item has unknown settings.
        settings = rank0(begin)
        # Processes on different kinds of machines need one answer.
        arguments.dtype = settings["dtype"]
        engine: Engine
        if arguments.engine == "vllm":
            engine = VLLMEngine(source, tokenizer, arguments.dtype, chat, new_tokens)
        else:
            model: Any = source.load(getattr(torch, arguments.dtype))
            engine = HFEngine(model.to(state.device), tokenizer, arguments.batch_size, chat)
        columns = _complete(tasks, engine, directory, state)
        if state.is_main_process:
            _write_report(columns, directory, settings, arguments, state)


def _complete(
    tasks: Sequence[Task], engine: Engine, directory: EvaluationDirectory, state: PartialState
) -> JsonObject:
    """Ask and grade all remaining items; return a column of results for each benchmark."""
    columns = {}
    # The processes of a job share a machine's cores.
    graders = max(1, min(8, (os.cpu_count() or 1) // state.num_processes))
    with Grader(graders) as grader:
        # Tasks arrive complete, so one task's numbers are shown while the next one runs.
        for task in runner.run(tasks, engine, grader, directory, state):
            if state.is_main_process:
                column = results.column(task, directory)
                columns[task.benchmark.id] = column
                summary = results.one_line_summary(column)
                printing.log_main(f"{task.benchmark.id}: {summary}")
    return columns


def _read_all_but_weights(
    arguments: Namespace, source: ModelSource
) -> tuple[PreTrainedConfig, Tokenizer, Chat | None, list[Task]]:
    """Read or download the configuration, the tokenizer and the benchmarks."""
    # The first process of a machine downloads. The others read the result.
    with machine_first():
        config = source.config()
        tokenizer = source.tokenizer(config)
        chat = None
        if arguments.chat:
            if not tokenizer.chat_template:
                raise OptionError("chat", f"needs a chat template, which {source.name} lacks")
            chat = Chat(tokenizer, tokenizer.get_chat_template())
        tasks = load_tasks(
            arguments.benchmarks,
            arguments.data_dir,
            arguments.prompts_dir,
            arguments.limit,
            render=chat.prompt if chat else None,
            sampling=arguments.sampling,
        )
    return config, tokenizer, chat, tasks


def _settings(
    arguments: Namespace,
    tasks: Sequence[Task],
    chat: Chat | None,
    model: JsonObject,
    context: int,
) -> JsonObject:
    """Return the settings that all items of an evaluation must share."""
    return {
        "protocol": chat.settings() if chat else None,
        "sampling": asdict(arguments.sampling) if arguments.sampling else None,
        "model": model,
        "engine": arguments.engine,
        "dtype": arguments.dtype,
        "context": None if context == NO_LIMIT else context,
        "limit": arguments.limit,
        "grader": HARNESS,
        "second_opinion": results.SECOND_OPINION,
        "benchmarks": {task.benchmark.id: task.settings() for task in tasks},
    }


def _write_report(
    columns: JsonObject,
    directory: EvaluationDirectory,
    settings: JsonObject,
    arguments: Namespace,
    state: PartialState,
) -> None:
    """Write the results, print them, and log them if requested."""
    device = state.device.type
    # These are not settings, but may change a number in bfloat16.
    environment = {
        "batch_size": arguments.batch_size if arguments.engine == "hf" else None,
        "processes": state.num_processes,
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
    }
    report = results.build(columns, directory, settings, environment)
    results.write(report, directory.path)
    # Results that the user puts elsewhere, such as those of a test, are not for the model's card.
    if directory.path.resolve() == _default_dir(arguments).resolve():
        results.write_card(report)
    printing.print_main(f"{results.to_markdown(report)}\nwritten: {directory.path}/{_FILES}")
    if arguments.report_to == "wandb":
        log_evaluation(report, directory.path)


def _preview(task: Task, tokenizer: Tokenizer, context: int) -> str:
    """Show the first whole prompt, and the token counts of all prompts."""
    benchmark = task.benchmark
    prompts = list(task.prompts.values())
    # A chat template has already written the special tokens.
    add_special_tokens = not benchmark.protocol
    encoding = tokenizer(prompts, verbose=False, add_special_tokens=add_special_tokens)
    ids: list[list[int]] = encoding["input_ids"]
    # A prompt as long as the context leaves no room for an answer.
    lengths = [len(prompt_ids) for prompt_ids in ids]
    counts = f"{min(lengths)} to {max(lengths)}, the first {shared_length(ids)} shared"
    too_long = sum(length >= context for length in lengths)
    items = f"{len(prompts)} items, {benchmark.shots} shots"
    lines = [f"=== {benchmark.id} ({benchmark.column}): {items}"]
    for mark in task.marks().values():
        lines.append(f"--- {mark}")
    if task.sampling:
        lines.append(f"--- outputs: {len(task.outputs())}, {task.sampling.samples} per item")
    lines.append(f"--- prompt tokens: {counts}; {too_long} prompts do not fit")
    lines.append(f"--- new tokens: at most {benchmark.max_new_tokens}")
    return "\n".join([*lines, prompts[0]]) + "\n"


def output_dir(arguments: Namespace) -> Path:
    """Return the directory for results."""
    return Path(arguments.output_dir) if arguments.output_dir else _default_dir(arguments)


def _default_dir(arguments: Namespace) -> Path:
    """Return where results go by default: inside the model's directory, if that is local."""
    name = "evaluation"
    if arguments.chat:
        name += "-chat"
    if arguments.sampling:
        name += "-sampled"
    model = Path(arguments.model)
    if not model.is_dir():
        return Path("runs") / model.name / name
    # Make the path absolute, because "." has no name.
    checkpoint = Path(os.path.abspath(model))
    # A run removes its older checkpoints, with everything in them.
    if re.fullmatch(r"checkpoint-[0-9]+", checkpoint.name):
        return checkpoint.with_name(f"{name}-{checkpoint.name}")
    return model / name
