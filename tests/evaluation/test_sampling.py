"""Drawn outputs: tokens against loops, every output by its seed alone, avg@k and pass@k by hand."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast as Tokenizer

from vocagnolm.evaluation.accuracy import (
    interval_over_items,
    one_line_summary,
    pass_at_k,
    sampled_accuracy,
    summarize,
    wilson_interval,
)
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


def texts_of(engine: HFEngine, places: Sequence[int], stops: Sequence[str] = ()) -> dict[int, str]:
    """The texts of some of the prompts, by their place among all."""
    prompts = [PROMPTS[place] for place in places]
    seeds = [SEEDS[place] for place in places]
    found = {}
    for group in engine.generate(prompts, stops, NEW_TOKENS, SAMPLING, seeds):
        for completion in group:
            found[places[completion.index]] = completion.text
    return found


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
    expected = {place: text.split(stop)[0].strip() for place, text in slow.items()}
    for batch_size in (1, 4, 16):
        engine = HFEngine(model, tokenizer, batch_size)
        assert texts_of(engine, range(9), [stop]) == expected
    # What a resumed evaluation still asks, in another order.
    assert texts_of(HFEngine(model, tokenizer, 4), [7, 2, 5], [stop]) == {
        place: expected[place] for place in (7, 2, 5)
    }


# Accuracies


def test_pass_at_k_equals_enumeration() -> None:
    for samples in range(1, 7):
        for right in range(samples + 1):
            for k in range(1, samples + 1):
                chosen = list(itertools.combinations(range(samples), k))
                # The first outputs are the right ones.
                passes = sum(min(choice) < right for choice in chosen)
                expected = float(Fraction(passes, len(chosen)))
                assert pass_at_k(samples, right, k) == pytest.approx(expected, abs=1e-15)


def outputs(*rights: str) -> list[dict[str, Any]]:
    """Graded outputs from a string of marks for each item."""
    records = []
    for idx, marks in enumerate(rights):
        for sample, mark in enumerate(marks):
            verdict = {"prediction": "1", "correct": mark == "+", "decided_by": "string"}
            opinion = {"math_verify": mark != "-"}
            records.append({"idx": idx, "sample": sample} | verdict | opinion)
    return records


def test_summary_equals_a_count_by_hand() -> None:
    """5 of 12 outputs are right: 4, 1 and 0 of an item; math-verify accepts one more."""
    records = outputs("++++", "-+--", "---o")
    random.Random(0).shuffle(records)
    found = summarize(records)
    assert (found["n"], found["samples"], found["correct"]) == (3, 4, 5)
    assert found["exact"] == pytest.approx(500 / 12)
    assert found["rounded"] == 41.7
    passes = {k: entry["exact"] for k, entry in found["pass_at"].items()}
    # Of the second item's six pairs, three hold its right output.
    assert passes == pytest.approx({"2": 150 / 3, "4": 200 / 3})
    assert found["pass_at"]["4"]["interval"] == pytest.approx(wilson_interval(2, 3))
    assert found["decided_by"] == {"string": 12}
    assert (found["math_verify"]["correct"], found["math_verify"]["exact"]) == (6, 50.0)
    assert found["math_verify"]["agreement"] == pytest.approx(11 / 12)
    line = one_line_summary(found)
    assert line.startswith("avg@4 41.7 (95 % interval ")
    assert line.endswith(", pass@4 66.7, 5 of 12 right")


def test_pass_counts_are_powers_of_two_and_all() -> None:
    assert list(sampled_accuracy([1], 6)["pass_at"]) == ["2", "4", "6"]
    assert list(sampled_accuracy([1], 8)["pass_at"]) == ["2", "4", "8"]
    assert list(sampled_accuracy([1], 2)["pass_at"]) == ["2"]


# Intervals


def test_interval_is_wilsons_for_as_many_independent_outputs() -> None:
    single = interval_over_items([1, 0, 0, 1, 0], 1)
    assert single == pytest.approx(wilson_interval(2, 5))
    # Outputs that all repeat the first say nothing new.
    assert interval_over_items([1, 0, 0, 1, 0], 64) == pytest.approx(single)
    # By hand: mean 1/2, variance (1/16 + 1/16) / 4 = 1/32, so 4 x 1/4 / (1/32) = 32 outputs.
    by_hand = interval_over_items([1 / 4, 1 / 2, 1 / 2, 3 / 4], 100)
    assert by_hand == pytest.approx(wilson_interval(16, 32))
    # Never more than there are.
    assert interval_over_items([0.5] * 6, 2) == pytest.approx(wilson_interval(6, 12))
    assert interval_over_items([1 / 4, 1 / 2, 1 / 2, 3 / 4], 4) == pytest.approx(
        wilson_interval(8, 16)
    )
    # If none is right, only the items count, as an item's outputs might all be alike.
    assert interval_over_items([0, 0, 0], 64) == wilson_interval(0, 3)
    assert interval_over_items([1, 1, 1], 64) == wilson_interval(3, 3)


@pytest.mark.parametrize("samples", [1, 16])
def test_interval_covers_the_truth_when_items_differ(samples: int) -> None:
    """Where Wilson's interval over all outputs covers it in about half of the cases."""
    rng = np.random.default_rng(0)
    covered = naive = 0
    for _ in range(500):
        right = rng.binomial(samples, rng.beta(0.5, 0.5, 100))
        low, high = interval_over_items(list(right / samples), samples)
        covered += low <= 50 <= high
        low, high = wilson_interval(int(right.sum()), 100 * samples)
        naive += low <= 50 <= high
    assert 0.92 <= covered / 500 <= 0.98
    assert (naive / 500 < 0.6) == (samples == 16)
