"""Ask a model all items of some benchmarks, grade the completions, and survive being killed."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from accelerate import PartialState
from tqdm.auto import tqdm

from vocagnolm.evaluation.engines.generation import Completion
from vocagnolm.evaluation.engines.hf_engine import HFEngine
from vocagnolm.evaluation.engines.vllm_engine import VLLMEngine
from vocagnolm.evaluation.grading.grading import Grader, Verdict
from vocagnolm.evaluation.records import Record, RunDirectory, to_line
from vocagnolm.evaluation.tasks.benchmarks import Item
from vocagnolm.evaluation.tasks.tasks import Task, prompt_sha256


def run(
    tasks: Sequence[Task],
    engine: HFEngine | VLLMEngine,
    grader: Grader,
    directory: RunDirectory,
    state: PartialState,
) -> Iterator[Task]:
    """Complete the records of all tasks, and give each task when they are complete.

    Records are written as completions come; items that have one are not asked again. A prompt that
    leaves no room in the context is a ValueError before anything is generated.
    """
    shares = [_share(task, directory, state) for task in tasks]
    streams = []
    for task, share in zip(tasks, shares, strict=True):
        prompts = [task.prompts[item.idx] for item in share]
        benchmark = task.benchmark
        streams.append(engine.generate(prompts, benchmark.stops, benchmark.max_new_tokens))
    # Every process has read what is there, and found its prompts to fit, before one writes more.
    state.wait_for_everyone()
    # None: shown on a terminal.
    disable = None if state.is_main_process else True
    for task, share, stream in zip(tasks, shares, streams, strict=True):
        name = task.benchmark.id
        with (
            directory.appending(name, state.process_index) as file,
            tqdm(total=len(share), desc=name, unit="item", disable=disable) as bar,
        ):
            for completions in stream:
                answers = [(done.text, share[done.index].gold) for done in completions]
                verdicts = grader.grade(task.benchmark.answer_kind, answers)
                for done, verdict in zip(completions, verdicts, strict=True):
                    file.write(to_line(_record(task, share[done.index], done, verdict)))
                file.flush()
                bar.update(len(completions))
        state.wait_for_everyone()
        if state.is_main_process:
            directory.complete(name, [item.idx for item in task.items])
        state.wait_for_everyone()
        yield task


def _share(task: Task, directory: RunDirectory, state: PartialState) -> list[Item]:
    """Take one of every `num_processes` items that are left, so that all have equal work."""
    finished = directory.finished(task.benchmark.id)
    for idx, record in finished.items():
        if idx in task.prompts and record["prompt_sha256"] != prompt_sha256(task.prompts[idx]):
            fault = f"item {idx} of {task.benchmark.id} was asked with another prompt"
            raise ValueError(f"{directory.path}: {fault}: give another --output_dir")
    left = [item for item in task.items if item.idx not in finished]
    left.sort(key=lambda item: (-len(task.prompts[item.idx]), item.idx))
    return left[state.process_index :: state.num_processes]


def _record(task: Task, item: Item, completion: Completion, verdict: Verdict) -> Record:
    return {
        **task.benchmark.names(),
        "idx": item.idx,
        "prompt_sha256": prompt_sha256(task.prompts[item.idx]),
        "n_prompt_tokens": completion.n_prompt_tokens,
        "n_new_tokens": completion.n_new_tokens,
        "finish_reason": completion.finish_reason,
        "raw_output": completion.text,
        # Here to stand beside the gold.
        "prediction": verdict.prediction,
        "gold": item.gold,
        **asdict(verdict),
    }
