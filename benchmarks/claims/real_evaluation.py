"""Compare `vocagnolm evaluate` with lm-evaluation-harness, on a pretrained model and GSM8K.

SmolLM2-135M comes from the directory in VOCAGNOLM_TEST_MODELS. It answers the first questions of
GSM8K's test split in VOCAGNOLM_TEST_DATA, each after the same eight solved ones, about 960 tokens
in all. Both ways get the same prompts, batches, stop strings and limits, and decode greedily in
float32. Ours is the engine of `vocagnolm evaluate`, theirs is `HFLM.generate_until`. Time is
processor time of one thread. The texts must be the same. The claim `grading` covers grading.
"""

from __future__ import annotations

import importlib.util
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.claims import evaluation
from benchmarks.claims.real import find_model
from benchmarks.harness import Claim, Measured, Skipped, one_thread
from vocagnolm.evaluation.tasks.benchmarks import BENCHMARKS
from vocagnolm.evaluation.tasks.tasks import load_tasks

CLAIMS = (
    Claim("time", "SmolLM2 answers GSM8K in half the time of lm-eval's", at_most=0.5),
    Claim("differ", "with the same texts", at_most=0, unit="differ"),
)
OURS, THEIRS = "vocagnolm evaluate", "lm-evaluation-harness"


@dataclass(frozen=True)
class Size:
    """The model and its questions; directories default to those of the tests."""

    models: str = ""
    model: str = "smollm2-135m"
    data_dir: str = ""
    prompts: int = 16
    batch: int = 16
    new_tokens: int = 128


FULL, TINY = Size(), Size(prompts=2, new_tokens=4)


def measure(size: Size) -> Measured:
    """Return the share of the harness's time, and how many texts differ.

    Raises:
        Skipped: the harness, the model or the questions are missing.
    """
    directory = find_model(size.models, size.model)
    if not importlib.util.find_spec("lm_eval"):
        raise Skipped("it needs lm-eval: pip install -e '.[bench]'")
    prompts = read_prompts(size)
    one_thread()
    reader = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    few = evaluation.Size(new_tokens=size.new_tokens, batch=size.batch)
    texts: dict[str, dict[int, str]] = {}
    seconds: dict[str, float] = {}
    for name, way in ((THEIRS, evaluation.harness), (OURS, evaluation.shared_prefix)):
        way(model, reader, [prompts[0][-200:]], few)  # warm up
        start_s = time.process_time()
        texts[name] = way(model, reader, prompts, few)
        seconds[name] = time.process_time() - start_s
    same = sum(texts[THEIRS][index] == text for index, text in texts[OURS].items())
    details = [f"{name:22}{took:7.1f} s" for name, took in seconds.items()]
    details.append(f"{same} of {len(prompts)} texts the same")
    values = {"time": seconds[OURS] / seconds[THEIRS], "differ": len(prompts) - same}
    return Measured(values, details)


def read_prompts(size: Size) -> list[str]:
    """Return the first prompts of GSM8K.

    Raises:
        Skipped: its file is missing.
    """
    place = os.environ.get("VOCAGNOLM_TEST_DATA", "")
    directory = Path(size.data_dir) if size.data_dir else Path(place, "data", "benchmarks")
    benchmark = BENCHMARKS["gsm8k"]
    if not (size.data_dir or place) or not (directory / str(benchmark.file)).exists():
        raise Skipped(f"set VOCAGNOLM_TEST_DATA to a directory that has data/{benchmark.file}")
    (task,) = load_tasks([benchmark], directory, None, size.prompts)
    return list(task.prompts.values())
