"""Asks a model all items of some benchmarks and grades the completions. Survives being killed."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from accelerate import PartialState
from tqdm.auto import tqdm

from vocagnolm.evaluation.engines.generation import Completion, Engine
from vocagnolm.evaluation.grading.grading import Grader
from vocagnolm.evaluation.records import EvaluationDirectory, to_line
from vocagnolm.evaluation.sampling import seed_of
from vocagnolm.evaluation.tasks.benchmarks import Item
from vocagnolm.evaluation.tasks.tasks import Task, text_sha256
from vocagnolm.shell.io import JsonObject


def run(
    tasks: Sequence[Task],
    engine: Engine,
    grader: Grader,
    directory: EvaluationDirectory,
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


def _share(
    task: Task, directory: EvaluationDirectory, state: PartialState
) -> list[tuple[Item, int]]:
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
