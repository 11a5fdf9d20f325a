"""An evaluation of a model: load, ask, grade, report; `main` reads its command line."""

import gzip
import math
import os
import sys
import zlib
from argparse import Namespace
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase as Tokenizer

from vocagnolm import printing
from vocagnolm.dist import connect, machine_first, rank0
from vocagnolm.evaluation import report, runner
from vocagnolm.evaluation.engines.generation import Chat, Engine, shared_length
from vocagnolm.evaluation.engines.hf_engine import HFEngine
from vocagnolm.evaluation.engines.vllm_engine import VLLMEngine, longest_context
from vocagnolm.evaluation.extraction import strip_string
from vocagnolm.evaluation.grading.grading import Grader
from vocagnolm.evaluation.tasks.benchmarks import HARNESS, Benchmark
from vocagnolm.evaluation.tasks.tasks import Task, load_tasks, numbered_lines, to_line
from vocagnolm.evaluation.tracking import log_evaluation
from vocagnolm.io import JsonObject, write_text
from vocagnolm.models import load
from vocagnolm.models.load import (
    NO_LIMIT,
    ModelSource,
    context_length,
    revision_of,
)
from vocagnolm.training.tracking import check_trackers

# Of a stored output.
_OUTPUT_FIELDS = ("idx", "gold", "raw_output")
_FILES = "results.json, row.md and an item file per benchmark"


def evaluate(arguments: Namespace) -> None:
    """Ask and grade all items that are left, and write the report; in all processes of a job."""
    state = connect()
    arguments.dtype = load.resolve_dtype(arguments.dtype, state.device)
    arguments.batch_size = arguments.batch_size or (64 if state.device.type == "cuda" else 16)
    if arguments.report_to == "wandb":
        rank0(lambda: check_trackers(["wandb"]))
    source = ModelSource(arguments.model, "model", arguments.revision)
    # The first process of a machine downloads.
    with machine_first():
        config, tokenizer = source.config(), source.tokenizer()
        # Without a template of the model's own this is a ValueError.
        chat = Chat(tokenizer, tokenizer.get_chat_template()) if arguments.chat else None
        render = chat.prompt if chat else None
        tasks = load_tasks(
            arguments.benchmarks, arguments.data_dir, arguments.prompts_dir, arguments.limit, render
        )
    context = (longest_context if arguments.engine == "vllm" else context_length)(config)
    if arguments.dry_run:
        printing.print_main("\n".join(_preview(task, tokenizer, context) for task in tasks))
        return
    directory = runner.RunDirectory(output_dir(arguments))
    with ExitStack() as held:

        def begin() -> JsonObject:
            held.enter_context(directory.lock())
            # What items must share to belong to one evaluation.
            settings = {
                "protocol": chat.settings() if chat else None,
                "model": {"name": source.name, "revision": revision_of(source.name, config)},
                "engine": arguments.engine,
                "dtype": arguments.dtype,
                "context": None if context == NO_LIMIT else context,
                "limit": arguments.limit,
                "grader": HARNESS,
                "second_opinion": report.SECOND_OPINION,
                "benchmarks": {task.benchmark.id: task.settings() for task in tasks},
            }
            directory.write_settings(settings)
            return settings

        settings = rank0(begin)
        if arguments.engine == "vllm":
            engine: Engine = VLLMEngine(source, tokenizer, arguments.dtype, chat)
        else:
            model = source.load(getattr(torch, arguments.dtype)).to(state.device)
            engine = HFEngine(model, tokenizer, arguments.batch_size, chat)
        columns = {}
        with Grader(max(1, min(8, (os.cpu_count() or 1) // state.num_processes))) as grader:
            for task in runner.run(tasks, engine, grader, directory, state):
                if state.is_main_process:
                    columns[task.benchmark.id] = column = report.column(task, directory)
                    printing.log_main(f"{task.benchmark.id}: {report.one_line_summary(column)}")
        if state.is_main_process:
            device = state.device.type
            # Facts that may change a number in bfloat16 without being a setting.
            environment = {
                "batch_size": arguments.batch_size if arguments.engine == "hf" else None,
                "processes": state.num_processes,
                "device": torch.cuda.get_device_name() if device == "cuda" else device,
            }
            results = report.build_results(columns, directory, settings, environment)
            report.write_results(results, directory)
            printing.print_main(
                f"{report.to_markdown(results)}\nwritten: {directory.path}/{_FILES}"
            )
            if arguments.report_to == "wandb":
                log_evaluation(results, directory.path)


def _preview(task: Task, tokenizer: Tokenizer, context: int) -> str:
    """Show the first whole prompt, and the token counts of all."""
    benchmark, prompts = task.benchmark, list(task.prompts.values())
    options = {"verbose": False, "add_special_tokens": not benchmark.protocol}
    ids: list[list[int]] = tokenizer(prompts, **options)["input_ids"]
    lengths = list(map(len, ids))
    counts = f"{min(lengths)} to {max(lengths)}, the first {shared_length(ids)} shared"
    too_long = sum(length >= context for length in lengths)
    lines = [
        f"=== {benchmark.id} ({benchmark.column}): {len(prompts)} items, {benchmark.shots} shots",
        *(f"--- {mark}" for mark in task.marks().values()),
        f"--- prompt tokens: {counts}; {too_long} prompts do not fit",
        f"--- new tokens: at most {benchmark.max_new_tokens}",
        prompts[0],
    ]
    return "\n".join(lines) + "\n"


def output_dir(arguments: Namespace) -> Path:
    """Put results beside the model if it is a directory."""
    if arguments.output_dir:
        return Path(arguments.output_dir)
    model = Path(arguments.model)
    name = "evaluation-chat" if arguments.chat else "evaluation"
    return (model if model.is_dir() else Path("runs") / model.name) / name


def regrade(file: Path, benchmark: Benchmark, output: Path | None) -> None:
    """Grade stored outputs and write every line again with its verdict, to stdout without `output`.

    The file holds JSON lines, gzipped if its name ends in .gz, each with `idx`, `gold` (already
    parsed) and `raw_output`, such as our item files.
    """
    records = _read_outputs(file)
    for record in records:
        # Records of ours name their benchmark, and the chat protocol.
        found = record.get("benchmark", benchmark.id), record.get("protocol", benchmark.protocol)
        if found != (benchmark.id, benchmark.protocol):
            whose = " ".join(found).strip()
            raise ValueError(f"{file} has an item of {whose}, not of {benchmark.id}")
    answers = [(record["raw_output"], strip_string(record["gold"])) for record in records]
    with Grader() as grader:
        verdicts = list(map(asdict, grader.grade(benchmark.answer_kind, answers)))
    for record, verdict in zip(records, verdicts, strict=True):
        record.update(benchmark.names(), **verdict)
    lines = "".join(map(to_line, records))
    if output:
        write_text(output, lines)
    else:
        sys.stdout.write(lines)
    line = f"{file} as {benchmark.id}: {report.one_line_summary(report.summarize(verdicts))}"
    print(line, file=sys.stdout if output else sys.stderr)


def _read_outputs(file: Path) -> list[JsonObject]:
    """Read stored outputs; a ValueError names the file, the line and the field that is wrong."""
    content = file.read_bytes()
    if file.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"--regrade {file} is not a whole gzip file: {error}") from error
    records: list[JsonObject] = []
    indices = set()
    for number, record in numbered_lines(content, f"--regrade {file}"):
        fault = _output_fault(record)
        if not fault and record["idx"] in indices:
            fault = f"idx {record['idx']} comes twice, where each item has one output"
        if fault:
            raise ValueError(f"--regrade {file}:{number}: {fault}")
        indices.add(record["idx"])
        records.append(record)
    if not records:
        raise ValueError(f"--regrade {file} holds no outputs")
    return records


def _output_fault(record: JsonObject) -> str | None:
    """Say why a record is no output that can be graded; None if it is one."""
    if missing := [name for name in _OUTPUT_FIELDS if name not in record]:
        fault = f"expected the fields {', '.join(_OUTPUT_FIELDS)}, found {', '.join(record)}"
        if {"doc_id", "target", "resps"} <= record.keys():
            return (
                f"{fault}, as lm-evaluation-harness writes them: make idx of doc_id, gold of the "
                "bare answer in target, and raw_output of the text in resps"
            )
        return f"{fault}: {', '.join(missing)} is missing"
    if not isinstance(record["raw_output"], str):
        found = type(record["raw_output"]).__name__
        return f"raw_output must be the text of one output, found {found}"
    gold = record["gold"]
    if isinstance(gold, bool) or not isinstance(gold, str | int | float):
        return f"gold must be the parsed answer, text or a number, found {type(gold).__name__}"
    # JSON of Python may hold them, such as for an answer that a table lacks.
    if isinstance(gold, float) and not math.isfinite(gold):
        return f"gold must be the parsed answer, text or a number, found {gold}"
    if isinstance(record["idx"], bool) or not isinstance(record["idx"], str | int):
        return f"idx must be a number, found {type(record['idx']).__name__}"
    return None
