"""The items of a benchmark with their whole prompts, as they are asked in one evaluation."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Literal

from transformers import PreTrainedTokenizerBase

from vocagnolm.evaluation.engines.chat import Chat
from vocagnolm.evaluation.engines.generation import shared_length
from vocagnolm.evaluation.tasks.benchmarks import BENCHMARKS, Benchmark, Item
from vocagnolm.evaluation.tasks.sources import LoadedItems, load_items
from vocagnolm.models.source import NO_LIMIT

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
    file = (prompts_dir or resources.files(__package__) / "prompts") / f"{name}.md"
    if not file.is_file():
        where = f"--prompts_dir {prompts_dir}" if prompts_dir else "the package"
        raise ValueError(
            f"{where} has no {name}.md: give the harness's directory prompts/cot, or leave "
            "--prompts_dir out to use the prompts of the package"
        )
    data = file.read_bytes()
    sha256 = hashlib.sha256(data).hexdigest()
    try:
        text = data.decode().replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        message = f"{file} is no UTF-8 text (byte {error.start}): restore the file"
        raise ValueError(message) from error
    origin: _Origin = "harness" if sha256 == _HARNESS_SHA256.get(name) else "other"
    return PromptSet(name, text, origin if prompts_dir else "vocagnolm", sha256)


def build_prompt(benchmark: Benchmark, prompt_set: PromptSet | None, question: str) -> str:
    """Join exemplars, two blank lines, and the question in the benchmark's template."""
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
    # The template of another protocol, if it is not the paper's.
    chat: Chat | None = None

    @property
    def items(self) -> tuple[Item, ...]:
        """The items that are asked."""
        return self.loaded.items[: self.limit]

    @cached_property
    def prompts(self) -> dict[int, str]:
        """The whole prompt of each item, by `idx`."""
        benchmark, shots = self.benchmark, self.prompt_set
        asked = {item.idx: build_prompt(benchmark, shots, item.question) for item in self.items}
        return {idx: self.chat.prompt(text) for idx, text in asked.items()} if self.chat else asked

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
        asked, known = len(self.items), len(self.loaded.items)
        prompts = self.prompt_set.origin if self.prompt_set else None
        zero_shot = "protocol: zero-shot in the model's chat template, not the paper's few-shot"
        unverified = f"data: {self.loaded.origin} is not verified to be the harness's"
        marks = [
            (self.chat, "chat", zero_shot),
            (asked < known, "partial", f"partial: {asked} of {known} items"),
            (prompts == "vocagnolm", "own_prompts", "prompts: VocAgnoLM's own, not the harness's"),
            (prompts == "other", "other_prompts", "prompts: others, not the harness's"),
            (not self.loaded.verified, "unverified_data", unverified),
        ]
        return {word: sentence for holds, word, sentence in marks if holds}

    def preview(self, tokenizer: PreTrainedTokenizerBase, context: int) -> str:
        """Show the first whole prompt, and the token counts of all."""
        benchmark, prompts = self.benchmark, list(self.prompts.values())
        options = {"verbose": False, "add_special_tokens": not self.chat}
        ids: list[list[int]] = tokenizer(prompts, **options)["input_ids"]
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
    names: Iterable[str],
    data_dir: Path | None,
    prompts_dir: Path | None,
    limit: int | None,
    chat: Chat | None = None,
) -> list[Task]:
    """Read items and prompts of benchmarks; a ValueError says what to do about a bad file."""
    tasks = []
    for name in names:
        benchmark, prompts = BENCHMARKS[name], None
        if chat:
            benchmark = benchmark.in_chat()
        if benchmark.prompt_set:
            prompts = load_prompt_set(benchmark.prompt_set, prompts_dir)
        tasks.append(Task(benchmark, load_items(benchmark, data_dir), prompts, limit, chat))
    return tasks


def prompt_sha256(prompt: str) -> str:
    """Hash a prompt, as an item's record names it."""
    return hashlib.sha256(prompt.encode()).hexdigest()
