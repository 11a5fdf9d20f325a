"""Drawn outputs: tokens against loops, and every output by its seed alone."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast as Tokenizer

from vocagnolm.evaluation.engines.hf_engine import HFEngine, draw_tokens
from vocagnolm.evaluation.tasks.tasks import Sampling, seed_of, uniform

NEW_TOKENS = 12

# Seeds


def test_seeds_are_those_of_earlier_versions() -> None:
    """Otherwise a resumed evaluation would mix outputs of two rules."""
    assert seed_of("aime24", 3, 1) == 840059799
    assert uniform(840059799, 5) == 0.0004904476070635155


# Tokens


def drawn_token(logits: Sequence[float], number: float, sampling: Sampling) -> int:
    """Walk down the tokens from the likeliest to the one that reaches a number's share."""
    weights = [math.exp((x - max(logits)) / sampling.temperature) for x in logits]
    order = sorted(range(len(logits)), key=lambda token: (-weights[token], token))
    kept: list[int] = []
    while sum(weights[token] for token in kept) < sampling.top_p * sum(weights):
        if len(kept) == len(order):
            break
        kept.append(order[len(kept)])
    target = number * sum(weights[token] for token in kept)
    walked = 0.0
    for token in kept:
        walked += weights[token]
        if target < walked:
            return token
    return kept[-1]


@pytest.mark.parametrize(
    "sampling", [Sampling(1, 1.0), Sampling(1, 0.6, 0.95), Sampling(1, 2, 0.3)]
)
def test_tokens_equal_a_walk_over_sorted_probabilities(sampling: Sampling) -> None:
    rng = random.Random(0)
    logits = [[rng.gauss(0, 2) for _ in range(30)] for _ in range(400)]
    numbers = [rng.random() for _ in logits]
    found = draw_tokens(torch.tensor(logits), torch.tensor(numbers), sampling)
    pairs = zip(logits, numbers, strict=True)
    assert found.tolist() == [drawn_token(row, number, sampling) for row, number in pairs]


@pytest.mark.parametrize("number", [0.0, 1 - 2**-48])
@pytest.mark.parametrize("top_p", [1e-9, 0.5, 1.0])
def test_token_is_one_that_is_kept_at_the_ends(number: float, top_p: float) -> None:
    logits = torch.tensor([[0.0, 9.0, -float("inf"), -90.0]])
    (token,) = draw_tokens(logits, torch.tensor([number]), Sampling(1, 1.0, top_p)).tolist()
    assert token == 1 or (token in (0, 3) and top_p == 1.0 and number > 0.5)


# Outputs


@pytest.fixture
def tokenizer(tokenizers_by_family: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers_by_family["byte_level"]


@pytest.fixture
def model(tokenizer: Tokenizer, tiny_llama: Callable[..., Any]) -> Any:
    """A model whose next token is nearly as uncertain as that of a real one."""
    ends = {"bos_token_id": None, "eos_token_id": None}
    return tiny_llama(len(tokenizer), initializer_range=0.2, max_position_embeddings=160, **ends)


PROMPTS = [f"Ben has {n} apples.\nThe answer is {'so ' * (n % 5)}" for n in range(9)]
SEEDS = [seed_of("gsm8k", n, 0) for n in range(9)]
SAMPLING = Sampling(1, 0.8, 0.95)


@torch.no_grad()
def slow_text(model: Any, tokenizer: Tokenizer, place: int) -> str:
    """Draw each token alone, from the logits of the whole text so far, by the seed's number."""
    ids = tokenizer(PROMPTS[place])["input_ids"]
    new: list[int] = []
    for step in range(NEW_TOKENS):
        logits = model(torch.tensor([ids + new])).logits[0, -1].tolist()
        new.append(drawn_token(logits, uniform(SEEDS[place], step), SAMPLING))
    return str(tokenizer.decode(new, clean_up_tokenization_spaces=False)).strip()


def test_outputs_equal_drawing_token_by_token_in_any_batch(
    model: Any, tokenizer: Tokenizer
) -> None:
    slow = {place: slow_text(model, tokenizer, place) for place in range(9)}
    assert len(set(slow.values())) == 9
    # Some rows stop, so that others resume in other batches.
    stop = slow[4][6:10]
    # The last is what a resumed evaluation still asks, in another order.
    for batch_size, places in ((1, range(9)), (4, range(9)), (16, range(9)), (4, [7, 2, 5])):
        prompts = [PROMPTS[place] for place in places]
        seeds = [SEEDS[place] for place in places]
        engine = HFEngine(model, tokenizer, batch_size)
        found = {}
        for group in engine.generate(prompts, [stop], NEW_TOKENS, SAMPLING, seeds):
            for completion in group:
                found[places[completion.index]] = completion.text
        assert found == {place: slow[place].split(stop)[0].strip() for place in places}
