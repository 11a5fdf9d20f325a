"""Evaluates a model: asks it all items of some benchmarks, grades and reports. Survives kills."""

import os
import re
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase as Tokenizer

from vocagnolm.evaluation import results
from vocagnolm.evaluation.accuracy import one_line_summary
from vocagnolm.evaluation.engines.generation import Chat, Completion, Engine
from vocagnolm.evaluation.engines.hf_engine import HFEngine
from vocagnolm.evaluation.engines.vllm_engine import VLLMEngine, longest_context
from vocagnolm.evaluation.grading.grading import Grader
from vocagnolm.evaluation.records import SETTINGS_FILE, EvaluationDirectory, to_line
from vocagnolm.evaluation.tasks.benchmarks import HARNESS, Item
from vocagnolm.evaluation.tasks.tasks import Task, load_tasks, seed_of, text_sha256
from vocagnolm.fields import OptionError
from vocagnolm.models.load import (
    NO_LIMIT,
    ModelSource,
    choose_dtype,
    context_length,
    is_adapter,
    revision_of,
)
from vocagnolm.record import output_directory
from vocagnolm.shell.dist import connect, machine_first, rank0
from vocagnolm.shell.extras import is_installed
from vocagnolm.shell.io import JsonObject, log_main, print_main
from vocagnolm.training.tracking import check_trackers


def evaluate(arguments: Namespace) -> None:
    """Ask and grade all remaining items, and write the report, in all processes of a job."""
    state = connect()
    if arguments.report_to == "wandb":
        rank0(lambda: check_trackers(["wandb"]))
    trust = arguments.trust_remote_code
    source = ModelSource(arguments.model, "model", arguments.revision, trust_remote_code=trust)
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
    directory = EvaluationDirectory(arguments.output_dir or default_dir(arguments))
    arguments.engine = rank0(lambda: engine_of(arguments, directory, state))
    arguments.batch_size = arguments.batch_size or (64 if state.device.type == "cuda" else 16)
    context = context_length(config)
    if arguments.engine == "vllm":
        context = longest_context(config, max(task.benchmark.max_new_tokens for task in tasks))
    # A dry run ends before anything is written and before the weights are loaded.
    if arguments.dry_run:
        for task in tasks:
            print_main(_preview(task, tokenizer, context))
        return
    # The first process owns the directory until the report is written, so no other evaluation
    # changes the items meanwhile.
    with ExitStack() as open_contexts:

        def begin() -> str:
            open_contexts.enter_context(output_directory(directory.path, SETTINGS_FILE))
            begun = directory.settings().get("dtype")
            arguments.dtype, why = choose_dtype(arguments.dtype, state.device, begun)
            log_main(
                f"{arguments.model} computes in {arguments.dtype} ({why}), with {arguments.engine}"
            )
            # All items must share these.
            settings = {
                "protocol": chat.settings() if chat else None,
                "sampling": asdict(arguments.sampling) if arguments.sampling else None,
                "model": {"name": source.name, "revision": revision_of(source.name, config)},
                "engine": arguments.engine,
                "dtype": arguments.dtype,
                "context": None if context == NO_LIMIT else context,
                "limit": arguments.limit,
                "grader": HARNESS,
                "second_opinion": results.SECOND_OPINION,
                "benchmarks": {task.benchmark.id: task.settings() for task in tasks},
            }
            # They are written before the first item, so that no item has unknown settings.
            directory.write_settings(settings)
            return str(arguments.dtype)

        # All processes get the answer of the first, or its error. They may be on different kinds of
        # machines.
        arguments.dtype = rank0(begin)
        grader = open_contexts.enter_context(Grader(processes=state.num_processes))
        engine: Engine
        if arguments.engine == "vllm":
            engine = VLLMEngine(source, tokenizer, arguments.dtype, context, chat)
        else:
            model: Any = source.load(getattr(torch, arguments.dtype))
            engine = HFEngine(model.to(state.device), tokenizer, arguments.batch_size, chat)
        _ask_and_report(tasks, engine, grader, directory, arguments, state)


def engine_of(arguments: Namespace, directory: EvaluationDirectory, state: PartialState) -> str:
    """Return the engine that was asked for or began the evaluation, or the fastest one."""
    chosen = arguments.engine or directory.settings().get("engine")
    if chosen:
        return str(chosen)
    # vLLM uses all GPUs from one process, forms its own batches, and takes whole models.
    is_possible = (
        state.device.type == "cuda"
        and state.num_processes == 1
        and not arguments.batch_size
        and not is_adapter(arguments.model)
    )
    return "vllm" if is_possible and is_installed("vllm") else "hf"


def _ask_and_report(
    tasks: Sequence[Task],
    engine: Engine,
    grader: Grader,
    directory: EvaluationDirectory,
    arguments: Namespace,
    state: PartialState,
) -> None:
    """Ask and grade all remaining items. Write the results, print them, log them if requested."""
    columns = {}
    # Tasks arrive complete, so one task's numbers are shown while the next one runs.
    for task in run(tasks, engine, grader, directory, state):
        if state.is_main_process:
            column = results.column(task, directory)
            columns[task.benchmark.id] = column
            log_main(f"{task.benchmark.id}: {one_line_summary(column)}")
    if not state.is_main_process:
        return
    device = state.device.type
    # These are not settings, but may change a number in bfloat16.
    environment = {
        "batch_size": arguments.batch_size if arguments.engine == "hf" else None,
        "processes": state.num_processes,
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
    }
    report = results.build(columns, directory, environment)
    results.write(report, directory.path)
    # Results that the user puts elsewhere, such as those of a test, are not for the model's card.
    if directory.path.resolve() == default_dir(arguments).resolve():
        results.write_card(report)
    files = "results.json, row.md and an item file per benchmark"
    print_main(f"{results.to_markdown(report)}\nwritten: {directory.path}/{files}")
    if arguments.report_to == "wandb":
        results.log_to_wandb(report, directory.path)


def _preview(task: Task, tokenizer: Tokenizer, context: int) -> str:
    """Show the first whole prompt, and the token counts of all prompts."""
    benchmark = task.benchmark
    prompts = list(task.prompts.values())
    # A chat template has already written the special tokens.
    add_special_tokens = not benchmark.protocol
    encoding = tokenizer(prompts, verbose=False, add_special_tokens=add_special_tokens)
    lengths = [len(prompt_ids) for prompt_ids in encoding["input_ids"]]
    # A prompt as long as the context leaves no room for an answer.
    too_long = sum(length >= context for length in lengths)
    counts = f"{min(lengths)} to {max(lengths)}; {too_long} prompts do not fit"
    items = f"{len(prompts)} items, {benchmark.shots} shots"
    lines = [f"=== {benchmark.id} ({benchmark.column}): {items}"]
    for mark in task.marks().values():
        lines.append(f"--- {mark}")
    lines.append(f"--- prompt tokens: {counts}")
    room = max(0, context - min(lengths))
    lines.append(f"--- new tokens: at most {min(benchmark.max_new_tokens, room)}")
    return "\n".join([*lines, prompts[0]]) + "\n"


def default_dir(arguments: Namespace) -> Path:
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


def run(
    tasks: Sequence[Task],
    engine: Engine,
    grader: Grader,
    directory: EvaluationDirectory,
    state: PartialState,
) -> Iterator[Task]:
    """Complete the records of all tasks, and yield each task when its records are complete.

    Records are written as completions arrive. Outputs that have a record are not asked again.

    Raises:
        ValueError: a prompt leaves no room in the context. Nothing has been generated then.
    """
    # `generate` checks the prompts when it is called, and runs when its stream is read. So all
    # tasks are checked here before the first one begins.
    streams = []
    for task in tasks:
        benchmark = task.benchmark
        share = _share(task, directory, state)
        prompts = [task.prompts[item.idx] for item, _ in share]
        seeds = [seed_of(benchmark.id, item.idx, sample) for item, sample in share]
        ending = benchmark.stops, benchmark.max_new_tokens
        streams.append((task, share, engine.generate(prompts, *ending, task.sampling, seeds)))
    # Every process reads what is there, and checks that its prompts fit, before any of them writes.
    state.wait_for_everyone()
    # With None, tqdm shows a bar only on a terminal.
    disable = None if state.is_main_process else True
    for task, share, stream in streams:
        name = task.benchmark.id
        with (
            directory.appending(name, state.process_index) as file,
            tqdm(total=len(share), desc=name, unit="output", disable=disable) as bar,
        ):
            # Completions arrive in groups, in any order. An index counts within this process's
            # share.
            for completions in stream:
                answers = []
                for completion in completions:
                    item, _ = share[completion.index]
                    answers.append((completion.text, item.gold))
                verdicts = grader.grade(task.benchmark.answer_kind, answers)
                for completion, verdict in zip(completions, verdicts, strict=True):
                    record = _record(task, share[completion.index], completion)
                    file.write(to_line(record | asdict(verdict)))
                # A kill loses at most one group of completions.
                file.flush()
                bar.update(len(completions))
        # All parts must be complete before they are joined, and joined before any process reads on.
        state.wait_for_everyone()
        if state.is_main_process:
            directory.complete(name, [(item.idx, sample) for item, sample in task.outputs()])
        state.wait_for_everyone()
        yield task


def _share(
    task: Task, directory: EvaluationDirectory, state: PartialState
) -> list[tuple[Item, int]]:
    """Take one of every `num_processes` remaining outputs, so that all have about equal work."""
    finished = directory.finished(task.benchmark.id)
    # Settings do not include everything that makes a prompt, such as the template of a user's
    # benchmark, so compare the prompts. Records of another evaluator do not have them.
    for (idx, _), record in finished.items():
        if idx in task.prompts and record.get("prompt_sha256") != text_sha256(task.prompts[idx]):
            fault = f"has item {idx} of {task.benchmark.id}, asked with another prompt"
            raise OptionError("output_dir", f"{fault}: give another directory")
    left = [output for output in task.outputs() if (output[0].idx, output[1]) not in finished]
    # All processes sort by the length of prompts in the same way, so their shares are disjoint and
    # about equally long.
    left.sort(key=lambda output: (-len(task.prompts[output[0].idx]), output[0].idx, output[1]))
    return left[state.process_index :: state.num_processes]


def _record(task: Task, output: tuple[Item, int], completion: Completion) -> JsonObject:
    """Return the record of an output, to which its verdict is added."""
    item, sample = output
    record: JsonObject = task.benchmark.names() | {"idx": item.idx}
    # Greedy decoding has one output per item, so it needs no number.
    if task.sampling:
        record["sample"] = sample
    return record | {
        "question": item.question,
        "prompt_sha256": text_sha256(task.prompts[item.idx]),
        "n_prompt_tokens": completion.n_prompt_tokens,
        "n_new_tokens": completion.n_new_tokens,
        "finish_reason": completion.finish_reason,
        "raw_output": completion.text,
        # The verdict fills this in. Here the prediction stands next to the gold.
        "prediction": None,
        "gold": item.gold,
    }
