"""How good a model of the embedded world is: right answers, and its loss on clean text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from vocagnolm.demo_world import Problem, render
from vocagnolm.spans import encode, start_id
from vocagnolm.token_loss import IGNORED_LABEL

MAX_NEW_TOKENS = 28  # two steps and the final number, one token per digit, take 26


@dataclass(frozen=True)
class Verdict:
    """What the held-out problems say about a model.

    Attributes:
        accuracy: share whose greedy answer ends in the right number, in [0, 1].
        clean_loss: nats per token of problems with their right solutions.
        answer_loss: nats per token of the solutions alone.
    """

    accuracy: float
    clean_loss: float
    answer_loss: float


def judge(model: PreTrainedModel, tokenizer: Any, problems: Sequence[Problem]) -> Verdict:
    """Let a model answer problems, and read it their right solutions."""
    model.eval()  # type: ignore[no-untyped-call]
    start = start_id(tokenizer, "student")
    clean_loss, answer_loss = _losses(model, tokenizer, start, problems)
    answers = answer(model, tokenizer, problems)
    right = [final_number(text) == str(p.answer) for text, p in zip(answers, problems, strict=True)]
    return Verdict(sum(right) / len(right), clean_loss, answer_loss)


@torch.no_grad()
def answer(model: PreTrainedModel, tokenizer: Any, problems: Sequence[Problem]) -> list[str]:
    """What a model says greedily after each question."""
    start, end = start_id(tokenizer, "student"), tokenizer.eos_token_id
    prompts = [[start, *encode(tokenizer, render(p)[0]).ids.tolist()] for p in problems]
    width = max(map(len, prompts))
    input_ids = torch.tensor([[end] * (width - len(ids)) + ids for ids in prompts])
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
    written: Tensor = model.generate(  # type: ignore[operator]
        input_ids=input_ids,
        attention_mask=mask,
        max_new_tokens=MAX_NEW_TOKENS,
        do_sample=False,
        eos_token_id=end,
        pad_token_id=end,
    )
    texts: list[str] = tokenizer.batch_decode(written[:, width:], skip_special_tokens=True)
    return texts


def final_number(text: str) -> str | None:
    """The number behind `####` in the first line of an answer.

    >>> final_number(" 5 + 7 = 12. #### 12")
    '12'
    """
    _, found, rest = text.split("\n")[0].partition("####")
    words = rest.split()
    return words[0] if found and words else None


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
