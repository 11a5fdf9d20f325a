"""The items of a benchmark with their whole prompts, as they are asked in one evaluation."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from vocagnolm.evaluation.engines.generation import shared_length
from vocagnolm.evaluation.tasks.benchmarks import BENCHMARKS, Benchmark, Item
from vocagnolm.evaluation.tasks.few_shot import PromptSet, build_prompt, load_prompt_set
from vocagnolm.evaluation.tasks.sources import LoadedItems, load_items
from vocagnolm.models.source import NO_LIMIT


@dataclass(frozen=True)
class Task:
    """A benchmark as it is asked in one evaluation."""

    benchmark: Benchmark
    loaded: LoadedItems
    # None for the question alone.
    prompt_set: PromptSet | None
    # Items that are asked, the first by `idx`; None for all.
    limit: int | None

    @property
    def items(self) -> tuple[Item, ...]:
        """The items that are asked."""
        return self.loaded.items[: self.limit]

    @property
    def is_partial(self) -> bool:
        """True if items are left out."""
        return len(self.items) < len(self.loaded.items)

    @cached_property
    def prompts(self) -> dict[int, str]:
        """The whole prompt of each item, by `idx`."""
        return {
            item.idx: build_prompt(self.benchmark, self.prompt_set, item.question)
            for item in self.items
        }

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
        if self.is_partial:
            marks["partial"] = f"partial: {len(self.items)} of {len(self.loaded.items)} items"
        origin = self.prompt_set.origin if self.prompt_set else None
        if origin == "vocagnolm":
            marks["own_prompts"] = "prompts: VocAgnoLM's own, not the harness's"
        elif origin == "other":
            marks["other_prompts"] = "prompts: others, not the harness's"
        if not self.loaded.verified:
            marks["unverified_data"] = (
                f"data: {self.loaded.origin} is not verified to be the harness's"
            )
        return marks

    def preview(self, tokenizer: PreTrainedTokenizerBase, context: int) -> str:
        """Show the first whole prompt, and the token counts of all."""
        benchmark, prompts = self.benchmark, list(self.prompts.values())
        ids: list[list[int]] = tokenizer(prompts, verbose=False)["input_ids"]
        lengths = list(map(len, ids))
        room = "" if context == NO_LIMIT else f", and {context} with the prompt"
        if too_long := sum(length >= context for length in lengths):
            room += f"; {too_long} prompts do not fit"
        lines = [
            f"=== {benchmark.id} ({benchmark.column}): {len(prompts)} items, {benchmark.shots} "
            f"shots, data {self.loaded.origin}",
            *(f"--- {mark}" for mark in self.marks().values()),
            f"--- prompt tokens: {min(lengths)} to {max(lengths)}, mean "
            f"{sum(lengths) / len(ids):.0f}; the first {shared_length(ids)} are shared",
            f"--- new tokens: at most {benchmark.max_new_tokens}{room}",
            prompts[0],
        ]
        return "\n".join(lines) + "\n"


def load_tasks(
    names: Iterable[str], data_dir: Path | None, prompts_dir: Path | None, limit: int | None
) -> list[Task]:
    """Read items and prompts of benchmarks; a ValueError says what to do about a bad file."""
    tasks = []
    for name in names:
        benchmark, prompts = BENCHMARKS[name], None
        if benchmark.prompt_set:
            prompts = load_prompt_set(benchmark.prompt_set, prompts_dir)
        tasks.append(Task(benchmark, load_items(benchmark, data_dir), prompts, limit))
    return tasks


def prompt_sha256(prompt: str) -> str:
    """Hash a prompt, as an item's record names it."""
    return hashlib.sha256(prompt.encode()).hexdigest()
