"""Ask a model all items of some benchmarks, grade the completions, and survive being killed.

A directory holds `settings.json`, written first, and per benchmark `ID.jsonl`: an output per line,
in the order of `idx` and `sample`. Until it is complete each process appends to its own
`ID.part0.jsonl` and so on.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO

from accelerate import PartialState
from filelock import FileLock, Timeout
from tqdm.auto import tqdm

from vocagnolm.evaluation.engines.generation import Engine
from vocagnolm.evaluation.grading.grading import Grader
from vocagnolm.evaluation.sampling import seed_of
from vocagnolm.evaluation.tasks.benchmarks import Item
from vocagnolm.evaluation.tasks.tasks import Task, read_records, text_sha256, to_line
from vocagnolm.io import JsonObject, differences, json_or_empty, write_json, write_text

_SETTINGS_FILE = "settings.json"


class RunDirectory:
    """The files of one evaluation; the directory need not exist."""

    def __init__(self, path: Path):
        self.path = path

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep every other evaluation out of the directory."""
        # The system lets go of the lock when the process ends, however it ends, so that the file
        # may stay there.
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(self.path / ".lock", timeout=0):
                yield
        except Timeout as error:
            raise ValueError(f"{self.path}: another evaluation is writing there") from error

    def settings(self) -> JsonObject:
        """Read the settings of the evaluation that is there; empty without one."""
        return json_or_empty(self.path / _SETTINGS_FILE)

    def write_settings(self, settings: JsonObject) -> None:
        """Write the settings, together with those of benchmarks that ran before.

        Rejects settings that differ from those of the items that are there.
        """
        earlier_settings = self.settings()
        earlier = earlier_settings.get("benchmarks", {})
        benchmarks = settings["benchmarks"]
        # A benchmark without a record leaves nothing that new settings could contradict.
        with_records = {}
        for name, benchmark_settings in earlier.items():
            if self.finished(name):
                with_records[name] = benchmark_settings
        # A benchmark that is asked for now must have the settings that it had before, and the
        # whole directory has one set of shared ones.
        if with_records or any(self.finished(name) for name in benchmarks):
            changed = differences(_shared(earlier_settings), _shared(settings))
            for name in benchmarks:
                if name in earlier:
                    changed += differences(earlier[name], benchmarks[name], prefix=f"{name} ")
            if changed:
                holder = f"{self.path} holds results of another evaluation"
                raise ValueError(f"{holder} ({'; '.join(changed)}): give another --output_dir")
        # Benchmarks that are not asked for now keep their settings, as their items stay.
        write_json(self.path / _SETTINGS_FILE, settings | {"benchmarks": with_records | benchmarks})

    def finished(self, benchmark: str) -> dict[tuple[int, int], JsonObject]:
        """Read the records so far, by `idx` and `sample`; see `read_records`."""
        # There may be the whole file, parts, or, after a kill in between, both.
        return read_records(*sorted(self.path.glob(f"{benchmark}.*jsonl")))

    @contextmanager
    def appending(self, benchmark: str, process: int) -> Iterator[IO[str]]:
        """Open the file in which a process appends its records of a benchmark."""
        path = self.path / f"{benchmark}.part{process}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            # A kill may have cut off the last line: what follows must begin a line of its own.
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
        # The bytes were opened for the cut alone, and records are appended as text.
        with path.open("a", encoding="utf-8") as text:
            yield text

    def complete(self, benchmark: str, outputs: Sequence[tuple[int, int]]) -> None:
        """Put the records of a finished benchmark, by `idx` and `sample`, into one file."""
        # Processes that do not share a directory would each find their own items only.
        records = self.finished(benchmark)
        recorded = sum(output in records for output in outputs)
        if recorded < len(outputs):
            counts = f"expected {len(outputs)} outputs of {benchmark}, found {recorded}"
            remedy = "give an --output_dir that all processes share"
            raise ValueError(f"{self.path}: {counts}: {remedy}")
        lines = "".join(to_line(records[output]) for output in outputs)
        # The whole file is there before a part goes, so that a kill in between loses nothing.
        write_text(self.path / f"{benchmark}.jsonl", lines)
        for part in sorted(self.path.glob(f"{benchmark}.part*.jsonl")):
            part.unlink()


def _shared(settings: JsonObject) -> JsonObject:
    """Return the settings that all benchmarks of an evaluation share."""
    shared = settings | {"benchmarks": None}
    # A model whose content is known by its revision may be moved.
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
    """Complete the records of all tasks, and give each task when they are complete.

    Records are written as completions come; outputs that have one are not asked for again. A prompt
    that leaves no room in the context is a ValueError before anything is generated.
    """
    # `generate` checks the prompts when it is called, and runs when its stream is read: all tasks
    # are checked here before the first one begins.
    shares = [_share(task, directory, state) for task in tasks]
    streams = []
    for task, share in zip(tasks, shares, strict=True):
        benchmark = task.benchmark
        prompts = [task.prompts[item.idx] for item, _ in share]
        seeds = [seed_of(benchmark.id, item.idx, sample) for item, sample in share]
        ending = benchmark.stops, benchmark.max_new_tokens
        streams.append(engine.generate(prompts, *ending, task.sampling, seeds))
    # Every process reads what is there, and finds that its prompts fit, before any of them writes.
    state.wait_for_everyone()
    # With None, tqdm shows a bar on a terminal only.
    disable = None if state.is_main_process else True
    for task, share, stream in zip(tasks, shares, streams, strict=True):
        name = task.benchmark.id
        with (
            directory.appending(name, state.process_index) as file,
            tqdm(total=len(share), desc=name, unit="output", disable=disable) as bar,
        ):
            # Completions come in any order, in groups. An index is the place in this process's
            # share.
            for completions in stream:
                answers = []
                for completion in completions:
                    item, _ = share[completion.index]
                    answers.append((completion.text, item.gold))
                verdicts = grader.grade(task.benchmark.answer_kind, answers)
                for completion, verdict in zip(completions, verdicts, strict=True):
                    item, sample = share[completion.index]
                    record: JsonObject = task.benchmark.names() | {"idx": item.idx}
                    # Greedy decoding has one output per item, which needs no number.
                    if task.sampling:
                        record["sample"] = sample
                    record |= {
                        "question": item.question,
                        "prompt_sha256": text_sha256(task.prompts[item.idx]),
                        "n_prompt_tokens": completion.n_prompt_tokens,
                        "n_new_tokens": completion.n_new_tokens,
                        "finish_reason": completion.finish_reason,
                        "raw_output": completion.text,
                        # The verdict holds the prediction, too. Here it stands next to the gold.
                        "prediction": verdict.prediction,
                        "gold": item.gold,
                    }
                    file.write(to_line(record | asdict(verdict)))
                # A kill loses the completions of one group at most.
                file.flush()
                bar.update(len(completions))
        # All parts are whole before they are put together, and are gone before anybody reads on.
        state.wait_for_everyone()
        if state.is_main_process:
            directory.complete(name, [(item.idx, sample) for item, sample in task.outputs()])
        state.wait_for_everyone()
        yield task


def _share(task: Task, directory: RunDirectory, state: PartialState) -> list[tuple[Item, int]]:
    """Take one of every `num_processes` outputs that are left, so that all have equal work."""
    finished = directory.finished(task.benchmark.id)
    # The settings do not hold all that makes a prompt, such as the template of a user's own
    # benchmark. What was asked is compared itself. Outputs of another evaluator do not say.
    for (idx, _), record in finished.items():
        if idx in task.prompts and record.get("prompt_sha256") != text_sha256(task.prompts[idx]):
            fault = f"item {idx} of {task.benchmark.id} was asked with another prompt"
            raise ValueError(f"{directory.path}: {fault}: give another --output_dir")
    left = [output for output in task.outputs() if (output[0].idx, output[1]) not in finished]
    # All processes sort alike, by the length of prompts, so that their shares are disjoint and
    # about equally long.
    left.sort(key=lambda output: (-len(task.prompts[output[0].idx]), output[0].idx, output[1]))
    return left[state.process_index :: state.num_processes]
