"""Evaluates a model: load, ask, grade, report. `main` reads the command line."""

import gzip
import json
import math
import os
import re
import sys
import zlib
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import PreTrainedConfig
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from vocagnolm.evaluation import report, runner
from vocagnolm.evaluation.accuracy import summarize
from vocagnolm.evaluation.engines.generation import Chat, Engine, shared_length
from vocagnolm.evaluation.engines.hf_engine import HFEngine
from vocagnolm.evaluation.engines.vllm_engine import VLLMEngine, longest_context
from vocagnolm.evaluation.extraction import normalise_gold
from vocagnolm.evaluation.grading.grading import Grader, Verdict
from vocagnolm.evaluation.tasks.benchmarks import HARNESS, Benchmark
from vocagnolm.evaluation.tasks.tasks import Task, load_tasks, numbered_lines, to_line
from vocagnolm.evaluation.tracking import log_evaluation
from vocagnolm.models.load import (
    NO_LIMIT,
    ModelSource,
    context_length,
    revision_of,
)
from vocagnolm.models.precision import choose_dtype
from vocagnolm.shell import printing
from vocagnolm.shell.dist import connect, machine_first, rank0
from vocagnolm.shell.io import RUN_FILE, JsonObject, check_writable, json_or_empty, write_text
from vocagnolm.training.tracking import check_trackers

# Every stored output has these fields, whoever wrote it.
_OUTPUT_FIELDS = ("idx", "gold", "raw_output")
# Regraded outputs have a verdict, too.
_REGRADED_FIELDS = {*_OUTPUT_FIELDS, *(field.name for field in fields(Verdict))}
_FILES = "results.json, row.md and an item file per benchmark"


def evaluate(arguments: Namespace) -> None:
    """Ask and grade all remaining items, and write the report, in all processes of a job."""
    state = connect()
    arguments.batch_size = arguments.batch_size or (64 if state.device.type == "cuda" else 16)
    if arguments.report_to == "wandb":
        rank0(lambda: check_trackers(["wandb"]))
    directory = runner.RunDirectory(output_dir(arguments))
    if not arguments.dry_run:
        rank0(lambda: check_writable(directory.path))
        begun = rank0(directory.settings).get("dtype")
        # Processes on different kinds of machines need one answer.
        choice = arguments.dtype
        arguments.dtype, why = rank0(lambda: choose_dtype(choice, state.device, begun))
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
    with ExitStack() as open_contexts:

        def begin() -> JsonObject:
            # Only the first process holds the lock, until the evaluation ends. Settings are
            # compared under the lock, and an error reaches all processes.
            open_contexts.enter_context(directory.lock())
            model = {"name": source.name, "revision": revision_of(source.name, config)}
            settings = _settings(arguments, tasks, chat, model, context)
            directory.write_settings(settings)
            return settings

        # Write the settings before the first item, so that no item has unknown settings.
        settings = rank0(begin)
        printing.log_main(f"{arguments.model} computes in {arguments.dtype} ({why})")
        engine = _load_engine(arguments, source, tokenizer, chat, new_tokens, state.device)
        columns = {}
        # The processes of a job share a machine's cores.
        graders = max(1, min(8, (os.cpu_count() or 1) // state.num_processes))
        with Grader(graders) as grader:
            # Tasks arrive complete, so one task's numbers are shown while the next one runs.
            for task in runner.run(tasks, engine, grader, directory, state):
                if state.is_main_process:
                    column = report.column(task, directory)
                    columns[task.benchmark.id] = column
                    printing.log_main(f"{task.benchmark.id}: {report.one_line_summary(column)}")
        # The lock is still held, so no other evaluation changes the items meanwhile.
        if state.is_main_process:
            _write_report(columns, directory, settings, arguments, state)


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
                raise ValueError(f"--chat: the tokenizer of {source.name} has no chat template")
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


def _load_engine(
    arguments: Namespace,
    source: ModelSource,
    tokenizer: Tokenizer,
    chat: Chat | None,
    new_tokens: int,
    device: torch.device,
) -> Engine:
    """Load the weights into the requested engine."""
    if arguments.engine == "vllm":
        return VLLMEngine(source, tokenizer, arguments.dtype, chat, new_tokens)
    model: Any = source.load(getattr(torch, arguments.dtype))
    return HFEngine(model.to(device), tokenizer, arguments.batch_size, chat)


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
        "sampling": arguments.sampling.settings() if arguments.sampling else None,
        "model": model,
        "engine": arguments.engine,
        "dtype": arguments.dtype,
        "context": None if context == NO_LIMIT else context,
        "limit": arguments.limit,
        "grader": HARNESS,
        "second_opinion": report.SECOND_OPINION,
        "benchmarks": {task.benchmark.id: task.settings() for task in tasks},
    }


def _write_report(
    columns: JsonObject,
    directory: runner.RunDirectory,
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
    results = report.build_results(columns, directory, settings, environment)
    report.write_results(results, directory)
    # Results that the user puts elsewhere, such as those of a test, are not for the model's card.
    if directory.path.resolve() == _default_dir(arguments).resolve():
        report.write_card(results)
    printing.print_main(f"{report.to_markdown(results)}\nwritten: {directory.path}/{_FILES}")
    if arguments.report_to == "wandb":
        log_evaluation(results, directory.path)


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
    lines = []
    lines.append(
        f"=== {benchmark.id} ({benchmark.column}): {len(prompts)} items, {benchmark.shots} shots"
    )
    for mark in task.marks().values():
        lines.append(f"--- {mark}")
    if task.sampling:
        lines.append(f"--- outputs: {len(task.outputs())}, {task.sampling.samples} per item")
    lines.append(f"--- prompt tokens: {counts}; {too_long} prompts do not fit")
    lines.append(f"--- new tokens: at most {benchmark.max_new_tokens}")
    lines.append(prompts[0])
    return "\n".join(lines) + "\n"


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
    is_checkpoint = re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-[0-9]+", checkpoint.name)
    # A run removes its older checkpoints, with everything in them.
    if is_checkpoint and "method" in json_or_empty(checkpoint.parent / RUN_FILE):
        return checkpoint.with_name(f"{name}-{checkpoint.name}")
    return model / name


def regrade(file: Path, benchmark: Benchmark, output: Path | None) -> None:
    """Grade stored outputs and write every line with its new verdict to `output`, or to stdout.

    The file has JSON lines, gzipped if its name ends in .gz. Each has `idx`, `gold` (parsed) and
    `raw_output`, like our item files.
    """
    if output:
        check_writable(output.parent, f"--output {output}: its directory")
        _check_replaceable(output)
    # Read the whole file first, so that a wrong line is found before any grading.
    records = _read_outputs(file, benchmark)
    answers = []
    for record in records:
        gold = normalise_gold(benchmark.answer_kind, record["gold"])
        answers.append((record["raw_output"], gold))
    with Grader() as grader:
        verdicts = [asdict(verdict) for verdict in grader.grade(benchmark.answer_kind, answers)]
    # The verdict replaces the fields of an earlier one. All other fields stay.
    lines = ""
    judged = []
    for record, verdict in zip(records, verdicts, strict=True):
        record |= benchmark.names()
        record |= verdict
        judged.append({"idx": str(record["idx"])} | verdict)
        lines += to_line(record)
    if output:
        write_text(output, lines)
    else:
        sys.stdout.write(lines)
    # If the lines go to stdout, another program may read them, so the summary goes to stderr.
    line = f"{file} as {benchmark.id}: {report.one_line_summary(summarize(judged))}"
    print(line, file=sys.stdout if output else sys.stderr)


def _check_replaceable(output: Path) -> None:
    """Reject an existing file that no regrading wrote, because it would be replaced."""
    # Nothing is lost with an empty file, or with a device.
    if not output.is_file() or output.stat().st_size == 0:
        return
    first: JsonObject = {}
    try:
        with gzip.open(output) if output.suffix == ".gz" else output.open("rb") as file:
            line = file.readline()
        for _, record in numbered_lines(line, str(output)):
            first = record
    except (OSError, EOFError, zlib.error, ValueError):
        # The message below is for any other file.
        pass
    if not first.keys() >= _REGRADED_FIELDS:
        raise ValueError(
            f"--output {output}: expected a new file or regraded outputs, found another file: "
            "give another name, or move it away"
        )


def _read_outputs(file: Path, benchmark: Benchmark) -> list[JsonObject]:
    """Read stored outputs. A ValueError names the file, the line and the wrong field."""
    content = file.read_bytes()
    if file.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"--regrade {file} is not a complete gzip file: {error}") from error
    records: list[JsonObject] = []
    # {idx: numbers of its outputs}. The idx is text here, because another evaluator may write 7 and
    # "7" for the same item.
    samples: dict[str, set[int]] = {}
    for number, record in numbered_lines(content, f"--regrade {file}"):
        fault = _output_fault(record, benchmark)
        if fault:
            raise ValueError(f"--regrade {file}:{number}: {fault}")
        idx, sample = str(record["idx"]), record.get("sample", 0)
        # A repeated output would count twice.
        if sample in samples.setdefault(idx, set()):
            fault = f"idx {idx} comes twice: number the outputs of an item by sample, from 0"
            raise ValueError(f"--regrade {file}:{number}: {fault}")
        samples[idx].add(sample)
        records.append(record)
    if not records:
        raise ValueError(f"--regrade {file} holds no outputs")
    first = next(iter(samples))
    count = len(samples[first])
    for idx, numbers in samples.items():
        if len(numbers) != count:
            found = f"{count} outputs of idx {first} and {len(numbers)} of idx {idx}"
            raise ValueError(
                f"--regrade {file}: expected equally many outputs of each item, found {found}"
            )
    return records


def _output_fault(record: JsonObject, benchmark: Benchmark) -> str | None:
    """Return why a record is not an output that can be graded, or None."""
    missing = [name for name in _OUTPUT_FIELDS if name not in record]
    if missing:
        fault = f"expected the fields {', '.join(_OUTPUT_FIELDS)}, found {', '.join(record)}"
        # The most common files of other evaluators get their own advice.
        if {"doc_id", "target", "resps"} <= record.keys():
            return (
                f"{fault}, as lm-evaluation-harness writes them: make idx of doc_id, gold of the "
                "bare answer in target, and raw_output of the text in resps"
            )
        return f"{fault}: {', '.join(missing)} is missing"
    # Our own records name their benchmark and the chat protocol.
    names = {name: record[name] for name in ("benchmark", "protocol") if name in record}
    if names and names != benchmark.names():
        return f"expected an output of {benchmark.names()}, found one of {names}"
    if not isinstance(record["raw_output"], str):
        kind = type(record["raw_output"]).__name__
        fault = f"raw_output must be the text of one output, found {kind}"
        several = ": write a line for each, numbered by sample"
        return fault + several if isinstance(record["raw_output"], list) else fault
    sample = record.get("sample", 0)
    if type(sample) is not int:
        return f"sample must be the number of an output, found {json.dumps(sample)}"
    # Python treats True and False as integers, but they are no answers.
    gold = record["gold"]
    if isinstance(gold, bool) or not isinstance(gold, str | int | float):
        return f"gold must be the parsed answer, text or a number, found {type(gold).__name__}"
    # Python's JSON may contain NaN, for example for an answer that a table lacks.
    if isinstance(gold, float) and not math.isfinite(gold):
        return f"gold must be the parsed answer, text or a number, found {gold}"
    try:
        normalise_gold(benchmark.answer_kind, gold)
    except ValueError as error:
        return str(error)
    if isinstance(record["idx"], bool) or not isinstance(record["idx"], str | int):
        return f"idx must be a number or a text, found {type(record['idx']).__name__}"
    return None
