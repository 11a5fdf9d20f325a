"""Quality of a model of the embedded world: right answers, and its loss on clean text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from vocagnolm.conventions import IGNORED_LABEL
from vocagnolm.demo import world as demo_world
from vocagnolm.demo.world import Problem, render
from vocagnolm.evaluation.engines.hf_engine import HFEngine
from vocagnolm.evaluation.grading.extraction import extract
from vocagnolm.evaluation.tasks.tasks import load_tasks
from vocagnolm.spans import encode
from vocagnolm.tokenizers import start_id


@dataclass(frozen=True)
class Verdict:
    """Quality of a model on the held-out problems.

    Attributes:
        accuracy: share whose greedy answer ends in the right number, in [0, 1].
        clean_loss: nats per token of problems with their right solutions.
        answer_loss: nats per token of the solutions alone.
    """

    accuracy: float
    clean_loss: float
    answer_loss: float


def judge(model: PreTrainedModel, tokenizer: Any, limit: int | None = None) -> Verdict:
    """Let a model answer the first `limit` held-out problems, and read it their right solutions."""
    model.eval()  # type: ignore[no-untyped-call]
    start = start_id(tokenizer, "student")
    clean_loss, answer_loss = _losses(
        model, tokenizer, start, demo_world.held_out_problems()[:limit]
    )
    return Verdict(_accuracy(model, tokenizer, limit), clean_loss, answer_loss)


def _accuracy(model: PreTrainedModel, tokenizer: Any, limit: int | None) -> float:
    """Return the accuracy of `evaluate_math.py --benchmarks demo`, as a share."""
    (task,) = load_tasks(["demo"], data_dir=None, prompts_dir=None, limit=limit)
    benchmark, items = task.benchmark, task.items
    prompts = [task.prompts[item.idx] for item in items]
    engine = HFEngine(model, tokenizer, batch_size=len(prompts))
    groups = engine.generate(prompts, benchmark.stops, benchmark.max_new_tokens)
    right = [
        extract(benchmark.answer_kind, completion.text) == items[completion.index].gold
        for group in groups
        for completion in group
    ]
    return sum(right) / len(items)


@torch.no_grad()
def _losses(
    model: PreTrainedModel, tokenizer: Any, start: int, problems: Sequence[Problem]
) -> tuple[float, float]:
    ids, answer_starts = [], []
    for item in problems:
        prompt, solution = render(item)
        encoding = encode(tokenizer, prompt + solution)
        ids.append([start, *encoding.ids.tolist()])
        answer_starts.append(1 + int((encoding.spans[:, 1] <= len(prompt)).sum()))
    width = max(map(len, ids))
    labels_BS = torch.tensor([row + [IGNORED_LABEL] * (width - len(row)) for row in ids])
    logits_BSV = model(input_ids=labels_BS.clamp(min=0)).logits
    loss_BS = F.cross_entropy(logits_BSV[:, :-1].mT, labels_BS[:, 1:], reduction="none")
    is_text_BS = labels_BS[:, 1:] != IGNORED_LABEL
    position_S = torch.arange(1, width)
    is_answer_BS = is_text_BS & (position_S >= torch.tensor(answer_starts)[:, None])
    return float(loss_BS[is_text_BS].mean()), float(loss_BS[is_answer_BS].mean())
