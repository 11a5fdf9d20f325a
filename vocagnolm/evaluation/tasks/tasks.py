"""What is asked: the items of a benchmark with their whole prompts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from vocagnolm.evaluation.tasks.benchmarks import BENCHMARKS, Benchmark, Item
from vocagnolm.evaluation.tasks.few_shot import PromptSet, build_prompt, load_prompt_set
from vocagnolm.evaluation.tasks.sources import LoadedItems, load_items


@dataclass(frozen=True)
class Task:
    """A benchmark as it is asked in one evaluation.

    Attributes:
        benchmark: its record.
        loaded: all its items, and where they come from.
        prompt_set: the exemplars; None for the question alone.
        limit: how many items are asked, the first by `idx`; None for all.
    """

    benchmark: Benchmark
    loaded: LoadedItems
    prompt_set: PromptSet | None
    limit: int | None

    @property
    def items(self) -> tuple[Item, ...]:
        """The items that are asked."""
        return self.loaded.items[: self.limit]

    @property
    def is_partial(self) -> bool:
        """Whether items are left out."""
        return len(self.items) < len(self.loaded.items)

    @cached_property
    def prompts(self) -> dict[int, str]:
        """The whole prompt of each item, by `idx`."""
        return {
            item.idx: build_prompt(self.benchmark, self.prompt_set, item.question)
            for item in self.items
        }

    def settings(self) -> dict[str, Any]:
        """What must be the same for two items to belong together."""
        return {
            "version": self.benchmark.version,
            "data_sha256": self.loaded.digest,
            "prompts_sha256": self.prompt_set.sha256 if self.prompt_set else None,
            "max_new_tokens": self.benchmark.max_new_tokens,
        }

    def marks(self) -> dict[str, str]:
        """Why the accuracy may not be put beside a published one: in a word, and in a sentence."""
        marks = {}
        if self.is_partial:
            marks["partial"] = f"partial: {len(self.items)} of {len(self.loaded.items)} items"
        if self.prompt_set and self.prompt_set.origin != "harness":
            is_own = self.prompt_set.origin == "vocagnolm"
            whose = "VocAgnoLM's own" if is_own else "others"
            name = "own_prompts" if is_own else "other_prompts"
            marks[name] = f"prompts: {whose}, not the harness's"
        if not self.loaded.verified:
            marks["unverified_data"] = (
                f"data: {self.loaded.origin} is not verified to be the harness's"
            )
        return marks


def load_tasks(
    names: Iterable[str], data_dir: Path | None, prompts_dir: Path | None, limit: int | None
) -> list[Task]:
    """Read items and prompts of benchmarks.

    Raises:
        ValueError: a file is missing or not what it should be; the message says what to do.
    """
    tasks = []
    for name in names:
        benchmark = BENCHMARKS[name]
        prompts = (
            load_prompt_set(benchmark.prompt_set, prompts_dir) if benchmark.prompt_set else None
        )
        tasks.append(Task(benchmark, load_items(benchmark, data_dir), prompts, limit))
    return tasks


def prompt_sha256(prompt: str) -> str:
    """The hash by which an item's record names its prompt."""
    return hashlib.sha256(prompt.encode()).hexdigest()
