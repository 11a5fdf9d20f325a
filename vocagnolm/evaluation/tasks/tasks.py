"""The items of a benchmark with their whole prompts, as they are asked in one evaluation."""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Literal

from vocagnolm.evaluation.tasks.benchmarks import BENCHMARKS, Benchmark, Item
from vocagnolm.evaluation.tasks.sources import LoadedItems, load_items

_Origin = Literal["vocagnolm", "harness", "other"]
_SEPARATOR = "\n\n\n"
# prompts/cot/ of ZubinGou/math-evaluation-harness at db77bc6.
_HARNESS_SHA256 = {
    "gsm8k": "f7b267f942be471e4ea8013cdba4c4df3cad1f969774c073e9165c568043a7b8",
    "minerva_math": "6637ad6e3ece303c059196bebdc3607ab9f617f4a57f73ac44afeb7f4320c829",
    "mathqa": "ba599b1fda1932b423e368b6a43643a10763cec1753dcdaca51375fdcd33c0cb",
    "mmlu_stem": "c5e61e1f80bbf4b08d60db5abaa55dcdc1a211093ce33e2a591ae9647bf8907a",
}


@dataclass(frozen=True)
class PromptSet:
    """Worked examples that stand before a question: one text, separated by two blank lines."""

    name: str
    text: str
    # "harness" for the harness's own bytes.
    origin: _Origin
    sha256: str


def load_prompt_set(name: str, prompts_dir: Path | None) -> PromptSet:
    """Read a prompt set from the package, or from `prompts_dir`/`name`.md."""
    directory = prompts_dir or resources.files(__package__) / "prompts"
    data = (directory / f"{name}.md").read_bytes()
    sha256 = hashlib.sha256(data).hexdigest()
    origin: _Origin = "harness" if sha256 == _HARNESS_SHA256.get(name) else "other"
    text = data.decode().replace("\r\n", "\n")
    return PromptSet(name, text, origin if prompts_dir else "vocagnolm", sha256)


def build_prompt(benchmark: Benchmark, prompt_set: PromptSet | None, question: str) -> str:
    """Join worked examples, two blank lines, and the question in the benchmark's template."""
    asked = benchmark.template.format(question=question)
    return asked if prompt_set is None else prompt_set.text.strip() + _SEPARATOR + asked


@dataclass(frozen=True)
class Task:
    """A benchmark as it is asked in one evaluation."""

    benchmark: Benchmark
    loaded: LoadedItems
    # None for the question alone.
    prompt_set: PromptSet | None
    # Items that are asked, the first by `idx`; None for all.
    limit: int | None
    # Puts a prompt into a chat template.
    render: Callable[[str], str] | None = None

    @property
    def items(self) -> tuple[Item, ...]:
        """The items that are asked."""
        return self.loaded.items[: self.limit]

    @cached_property
    def prompts(self) -> dict[int, str]:
        """The whole prompt of each item, by `idx`."""
        prompts = {}
        for item in self.items:
            prompt = build_prompt(self.benchmark, self.prompt_set, item.question)
            prompts[item.idx] = self.render(prompt) if self.render else prompt
        return prompts

    def settings(self) -> dict[str, object]:
        """Settings that two items must share to belong together."""
        return {
            "version": self.benchmark.version,
            "data_sha256": self.loaded.digest,
            "prompts_sha256": self.prompt_set.sha256 if self.prompt_set else None,
            "max_new_tokens": self.benchmark.max_new_tokens,
        }

    def marks(self) -> dict[str, str]:
        """Reasons not to put the accuracy beside a published one: in a word, and in a sentence."""
        marks = {}
        asked, known = len(self.items), len(self.loaded.items)
        if self.benchmark.protocol:
            marks["chat"] = f"protocol: {self.benchmark.protocol}, not the paper's few-shot"
        if asked < known:
            marks["partial"] = f"partial: {asked} of {known} items"
        if self.prompt_set and self.prompt_set.origin != "harness":
            marks["other_prompts"] = f"prompts: {self.prompt_set.origin}, not the harness's"
        if not self.loaded.verified:
            marks["other_data"] = f"data: {self.loaded.origin} is not verified to be the harness's"
        return marks


def load_tasks(
    names: Iterable[str],
    data_dir: Path | None,
    prompts_dir: Path | None,
    limit: int | None,
    render: Callable[[str], str] | None = None,
) -> list[Task]:
    """Read items and prompts of benchmarks; `render` puts each into a chat template."""
    tasks = []
    for name in names:
        benchmark = BENCHMARKS[name].in_chat() if render else BENCHMARKS[name]
        prompts = benchmark.prompt_set and load_prompt_set(benchmark.prompt_set, prompts_dir)
        items = load_items(benchmark, data_dir)
        tasks.append(Task(benchmark, items, prompts or None, limit, render))
    return tasks


def prompt_sha256(prompt: str) -> str:
    """Hash a prompt, as an item's record names it."""
    return hashlib.sha256(prompt.encode()).hexdigest()
