"""Quality of a model of the embedded world: right answers, and its loss on clean text."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vocagnolm.conventions import IGNORED_LABEL
from vocagnolm.demo import world
from vocagnolm.evaluation.engines.hf_engine import HFEngine
from vocagnolm.evaluation.extraction import extract
from vocagnolm.evaluation.tasks.tasks import load_tasks
from vocagnolm.readers import start_id
from vocagnolm.spans import encode


@dataclass(frozen=True)
class Quality:
    """Quality of a model on the held-out problems.

    The accuracy is the share whose greedy answer ends in the right number; losses are nats per
    token, of problems with their right solutions and of the solutions alone.
    """

    accuracy: float
    clean_loss: float
    answer_loss: float


def judge(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, limit: int | None = None
) -> Quality:
    """Let a model answer the first `limit` held-out problems, and read it their right solutions."""
    model.eval()  # type: ignore[no-untyped-call]
    losses = _losses(model, tokenizer, world.held_out_problems()[:limit])
    return Quality(_accuracy(model, tokenizer, limit), *losses)


def _accuracy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, limit: int | None
) -> float:
    """Return the accuracy of `evaluate_math.py --benchmarks demo`, as a share."""
    (task,) = load_tasks(["demo"], data_dir=None, prompts_dir=None, limit=limit)
    benchmark, items = task.benchmark, task.items
    prompts = [task.prompts[item.idx] for item in items]
    engine = HFEngine(model, tokenizer, batch_size=len(prompts))
    groups = engine.generate(prompts, benchmark.stops, benchmark.max_new_tokens)
    right = sum(
        extract(benchmark.answer_kind, completion.text) == items[completion.index].gold
        for group in groups
        for completion in group
    )
    return right / len(items)


@torch.no_grad()
def _losses(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, problems: Sequence[world.Problem]
) -> tuple[float, float]:
    """Return the mean losses of all tokens, and of those of the solutions."""
    rows, answer_starts = [], []
    for item in problems:
        prompt, solution = world.render(item)
        encoding = encode(tokenizer, prompt + solution)
        rows.append([start_id(tokenizer, "student"), *encoding.ids.tolist()])
        # The token that the solution begins in counts to it.
        answer_starts.append(1 + int((encoding.spans[:, 1] <= len(prompt)).sum()))
    width = max(map(len, rows))
    labels_BS = torch.tensor([row + [IGNORED_LABEL] * (width - len(row)) for row in rows])
    logits_BSV = model(input_ids=labels_BS.clamp(min=0)).logits
    # labels   start  Q  :  ...  A  :  5  +  7  padding
    # losses          .  .  ...  .  .  .  .  .               is_text
    #                                  .  .  .               is_answer: from answer_starts on
    loss_BS = F.cross_entropy(logits_BSV[:, :-1].mT, labels_BS[:, 1:], reduction="none")
    is_text_BS = labels_BS[:, 1:] != IGNORED_LABEL
    is_answer_BS = torch.arange(1, width) >= torch.tensor(answer_starts)[:, None]
    return float(loss_BS[is_text_BS].mean()), float(loss_BS[is_text_BS & is_answer_BS].mean())
