"""The worked examples that stand before a question, and the whole prompt.

A prompt set is one text: exemplars, separated by two blank lines. The package ships its own; those
of the harness, behind the published numbers, are read from a directory and known by their hash.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal

from vocagnolm.evaluation.tasks.benchmarks import Benchmark

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
    """Exemplars as text."""

    # File name without its ending.
    name: str
    text: str
    # "harness" for the harness's own bytes.
    origin: Literal["vocagnolm", "harness", "other"]
    # Of the file's bytes.
    sha256: str


def load_prompt_set(name: str, prompts_dir: Path | None) -> PromptSet:
    """Read a prompt set from the package, or from `prompts_dir`/`name`.md."""
    root = resources.files(__package__) / "prompts" if prompts_dir is None else prompts_dir
    file = root / f"{name}.md"
    if not file.is_file():
        where = "the package" if prompts_dir is None else f"--prompts_dir {prompts_dir}"
        raise ValueError(
            f"{where} has no {name}.md: give the harness's directory prompts/cot, or leave "
            "--prompts_dir out to use the prompts of the package"
        )
    data = file.read_bytes()
    sha256 = hashlib.sha256(data).hexdigest()
    try:
        text = data.decode().replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file} is no UTF-8 text (byte {error.start}): restore the file"
        ) from error
    if prompts_dir is None:
        return PromptSet(name, text, "vocagnolm", sha256)
    is_harness = sha256 == _HARNESS_SHA256.get(name)
    return PromptSet(name, text, "harness" if is_harness else "other", sha256)


def build_prompt(benchmark: Benchmark, prompt_set: PromptSet | None, question: str) -> str:
    """Join exemplars, two blank lines, and the question in the benchmark's template."""
    asked = benchmark.template.format(question=question)
    return asked if prompt_set is None else prompt_set.text.strip() + _SEPARATOR + asked
