"""Measure what reads a model without training it: evaluation, and scoring of a corpus."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.gpu_first.report import Report, timed
from benchmarks.models import SIZES, make_config, make_model
from vocagnolm.evaluation.engines.generation import Completion
from vocagnolm.evaluation.engines.hf_engine import HFEngine
from vocagnolm.store.windows import HFScorer, Window

_BATCH_TOKENS = 16384  # the default of `vocagnolm score`


class _Numbers:
    """A tokenizer whose texts are numbers, so that an engine can be given random ids."""

    eos_token_id = None

    def __call__(self, texts: Sequence[str], **_: object) -> dict[str, list[list[int]]]:
        return {"input_ids": [[int(word) for word in text.split()] for text in texts]}

    def decode(self, ids: Sequence[int], **_: object) -> str:
        return " ".join(map(str, ids))


def evaluate(report: Report) -> None:
    """Measure completions of prompts with a shared few-shot prefix; no answer ends early."""
    sizes = ("tiny", 4, 64, 16) if report.is_tiny else ("full", 64, 1024, 128)
    scale, rows, shared, new = sizes
    model = make_model(make_config("student", scale), report.device, torch.bfloat16)
    model.generation_config.eos_token_id = None
    rng, words = random.Random(0), range(SIZES["student", scale][-1])
    prefix = rng.choices(words, k=shared)
    lengths = [rng.randint(8, shared // 4) for _ in range(2 * rows)]
    texts = [" ".join(map(str, [*prefix, *rng.choices(words, k=n)])) for n in lengths]
    tokenizer: Any = _Numbers()
    engine = HFEngine(model, tokenizer, rows)
    # The first call warms up. cuDNN may plan attention again for each number of keys, which grows
    # with every token.
    for attention, tokens in (("any", 8), ("any", new), ("without cuDNN's", new)):
        made: list[Completion] = []

        def run(tokens: int = tokens, made: list[Completion] = made) -> None:
            made.extend(x for group in engine.generate(texts, ["Question:"], tokens) for x in group)

        torch.backends.cuda.enable_cudnn_sdp(attention == "any")  # type: ignore[no-untyped-call]
        seconds, gib = timed(run)
        torch.backends.cuda.enable_cudnn_sdp(True)  # type: ignore[no-untyped-call]
        written = sum(one.n_new_tokens for one in made)
        name = f"evaluation, {len(texts)} prompts, {tokens} new tokens each: new tokens per s"
        report.say(name, written / seconds, s=seconds, gib=gib, rows=rows, attention=attention)


def score(report: Report) -> None:
    """Measure the scoring of windows of a corpus with the teacher, as in `vocagnolm score`."""
    scale, count, context = ("tiny", 16, 128) if report.is_tiny else ("full", 64, 4095)
    model = make_model(make_config("teacher", scale), report.device, torch.bfloat16)
    rng, words = random.Random(0), range(SIZES["teacher", scale][-1])
    lengths = [min(context, 2 + int(rng.lognormvariate(0, 1) * context / 4)) for _ in range(count)]
    windows = [Window(n, rng.choices(words, k=size), size - 1) for n, size in enumerate(lengths)]
    scorer = HFScorer(model, _BATCH_TOKENS)
    scorer.losses(windows[:4])  # warms up
    seconds, gib = timed(lambda: scorer.losses(windows))
    scored = sum(window.scored for window in windows)
    report.say("scoring: tokens per s", scored / seconds, s=seconds, gib=gib, windows=count)
