"""Asks a model all items of some benchmarks and grades the completions. Survives being killed.

A directory has `settings.json`, written first, and per benchmark `ID.jsonl`, with one output per
line in the order of `idx` and `sample`. Until it is complete, each process appends to its own
`ID.part0.jsonl` and so on.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO

from accelerate import PartialState
from tqdm.auto import tqdm

from vocagnolm.evaluation.engines.generation import Completion, Engine
from vocagnolm.evaluation.grading.grading import Grader
from vocagnolm.evaluation.sampling import seed_of
from vocagnolm.evaluation.tasks.benchmarks import Item
from vocagnolm.evaluation.tasks.tasks import Task, read_records, text_sha256, to_line
from vocagnolm.fields import OptionError
from vocagnolm.record import differences
from vocagnolm.shell.io import JsonObject, json_or_empty, write_json, write_text

SETTINGS_FILE = "settings.json"


class RunDirectory:
    """The files of one evaluation. The directory need not exist."""

    def __init__(self, path: Path):
        self.path = path

    def settings(self) -> JsonObject:
        """Read the settings of the existing evaluation, or return an empty dictionary."""
        return json_or_empty(self.path / SETTINGS_FILE)

    def write_settings(self, settings: JsonObject) -> None:
        """Write the settings, together with those of benchmarks that were run before.

        Rejects settings that differ from those of existing items.
        """
        earlier = self.settings()
        benchmarks = earlier.get("benchmarks", {}) | settings["benchmarks"]
        # A benchmark without a record has nothing that new settings could contradict.
        recorded = [name for name in benchmarks if self.finished(name)]
        if recorded:
            now = settings | {"benchmarks": benchmarks}
            changed = differences(_shared(earlier, recorded), _shared(now, recorded))
            if changed:
                fault = f"holds results of another evaluation ({'; '.join(changed)})"
                raise OptionError("output_dir", f"{self.path} {fault}: give another")
        # Benchmarks that are not run now keep their settings, because their items stay.
        kept = {name: benchmarks[name] for name in recorded} | settings["benchmarks"]
        write_json(self.path / SETTINGS_FILE, settings | {"benchmarks": kept})

    def finished(self, benchmark: str) -> dict[tuple[int, int], JsonObject]:
        """Read the records so far by `idx` and `sample`; see `read_records`."""
        # There may be the whole file, parts, or both after a kill in between.
        paths = self._parts(benchmark)
        whole = self.path / f"{benchmark}.jsonl"
        if whole.exists():
            paths.insert(0, whole)
        return read_records(*paths)

    def _parts(self, benchmark: str) -> list[Path]:
        """List the files to which processes have appended records of a benchmark."""
        return sorted(self.path.glob(f"{benchmark}.part*.jsonl"))

    @contextmanager
    def appending(self, benchmark: str, process: int) -> Iterator[IO[str]]:
        """Open the file to which a process appends its records of a benchmark."""
        path = self.path / f"{benchmark}.part{process}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            # If a kill has cut off the last line, the next record must begin a new line.
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
        # The file was opened in binary mode only to look at its end. Records are appended as text.
        with path.open("a", encoding="utf-8") as text:
            yield text

    def complete(self, benchmark: str, outputs: Sequence[tuple[int, int]]) -> None:
        """Put the records of a finished benchmark into one file, by `idx` and `sample`."""
        # Processes that do not share a directory would each find only their own items.
        records = self.finished(benchmark)
        if not records.keys() >= set(outputs):
            raise OptionError("output_dir", f"{self.path} must be shared by all processes")
        lines = "".join(to_line(records[output]) for output in outputs)
        # Write the whole file before parts are removed, so that a kill in between loses nothing.
        write_text(self.path / f"{benchmark}.jsonl", lines)
        for part in self._parts(benchmark):
            part.unlink()


def _shared(settings: JsonObject, benchmarks: Sequence[str]) -> JsonObject:
    """Return what all items of some benchmarks must share."""
    shared = settings | {"benchmarks": None}
    for name in benchmarks:
        shared[name] = settings.get("benchmarks", {}).get(name)
    # A model with a known revision may be moved.
    model = shared.get("model")
    if model and model["revision"] != "unknown":
        shared["model"] = model["revision"]
    return shared


def run(
    tasks: Sequence[Task],
    engine: Engine,
    grader: Grader,
    directory: RunDirectory,
    state: PartialState,
) -> Iterator[Task]:
    """Complete the records of all tasks, and yield each task when its records are complete.

    Records are written as completions arrive. Outputs that have a record are not asked again. A
    prompt that leaves no room in the context is a ValueError before anything is generated.
    """
    # `generate` checks the prompts when it is called, and runs when its stream is read. So all
    # tasks are checked here before the first one begins.
    shares = [_share(task, directory, state) for task in tasks]
    streams = []
    for task, share in zip(tasks, shares, strict=True):
        benchmark = task.benchmark
        prompts = [task.prompts[item.idx] for item, _ in share]
        seeds = [seed_of(benchmark.id, item.idx, sample) for item, sample in share]
        ending = benchmark.stops, benchmark.max_new_tokens
        streams.append(engine.generate(prompts, *ending, task.sampling, seeds))
    # Every process reads what is there, and checks that its prompts fit, before any of them writes.
    state.wait_for_everyone()
    # With None, tqdm shows a bar only on a terminal.
    disable = None if state.is_main_process else True
    for task, share, stream in zip(tasks, shares, streams, strict=True):
        name = task.benchmark.id
        with (
            directory.appending(name, state.process_index) as file,
            tqdm(total=len(share), desc=name, unit="output", disable=disable) as bar,
        ):
            # Completions arrive in groups, in any order. An index counts within this process's
            # share.
            for completions in stream:
                outputs = [share[completion.index] for completion in completions]
                answers = []
                for (item, _), completion in zip(outputs, completions, strict=True):
                    answers.append((completion.text, item.gold))
                verdicts = grader.grade(task.benchmark.answer_kind, answers)
                for output, completion, verdict in zip(outputs, completions, verdicts, strict=True):
                    file.write(to_line(_record(task, output, completion) | asdict(verdict)))
                # A kill loses at most one group of completions.
                file.flush()
                bar.update(len(completions))
        # All parts must be complete before they are joined, and joined before anybody reads on.
        state.wait_for_everyone()
        if state.is_main_process:
            directory.complete(name, [(item.idx, sample) for item, sample in task.outputs()])
        state.wait_for_everyone()
        yield task


def _share(task: Task, directory: RunDirectory, state: PartialState) -> list[tuple[Item, int]]:
    """Take one of every `num_processes` remaining outputs, so that all have about equal work."""
    finished = directory.finished(task.benchmark.id)
    # Settings do not include everything that makes a prompt, such as the template of a user's own
    # benchmark, so compare the prompts. Records of another evaluator do not have them.
    for (idx, _), record in finished.items():
        if idx in task.prompts and record.get("prompt_sha256") != text_sha256(task.prompts[idx]):
            fault = f"item {idx} of {task.benchmark.id} was asked with another prompt"
            raise ValueError(f"{directory.path}: {fault}: give another --output_dir")
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
