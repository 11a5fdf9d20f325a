"""Several corpora in one run: exact shares, an order that can be resumed, no hidden repetition."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from world import Tokenizers, make_segments, make_trainer

from vocagnolm.packing import Blocks
from vocagnolm.run.mixture import MixedSampler, Mixture


def mixture(sizes: list[int], weights: list[float]) -> Mixture:
    return Mixture(range(sum(sizes)), sizes, weights)  # type: ignore[arg-type]


def epochs(mixed: Mixture, per_step: int, count: int, seed: int = 0) -> list[list[int]]:
    sampler, found = MixedSampler(mixed, per_step, seed), []
    for epoch in range(count):
        sampler.set_epoch(epoch)
        found.append(list(sampler))
    return found


@given(st.lists(st.integers(1, 100), min_size=2, max_size=6), st.integers(1, 40))
def test_shares_are_exact_to_a_block_in_every_batch(weights: list[int], per_step: int) -> None:
    mixed = mixture([9] * len(weights), [float(weight) for weight in weights])
    total = np.zeros(len(weights), np.int64)
    for step, counts in enumerate(islice(mixed.counts(per_step), 50), 1):
        assert sum(counts) == per_step
        total += counts
        for share, here, so_far in zip(mixed.shares, counts, total.tolist(), strict=True):
            assert abs(here - share * per_step) < 1
            assert abs(so_far - share * per_step * step) < 1


def test_shares_are_those_that_were_typed() -> None:
    mixed = mixture([7, 3], [0.7, 0.3])
    assert mixed.shares == [Fraction(7, 10), Fraction(3, 10)]
    assert list(islice(mixed.counts(4), 5)) == [[3, 1]] * 4 + [[2, 2]]


@pytest.mark.parametrize(
    ("sizes", "weights", "per_step", "steps"),
    [([70, 100], [0.7, 0.3], 10, 10), ([7, 3], [1, 1], 2, 3), ([100, 6], [1, 3], 8, 1)],
)
def test_epoch_ends_where_a_corpus_would_repeat(
    sizes: list[int], weights: list[float], per_step: int, steps: int
) -> None:
    mixed = mixture(sizes, weights)
    assert mixed.steps(per_step) == steps
    (epoch,) = epochs(mixed, per_step, 1)
    assert len(epoch) == len(set(epoch)) == steps * per_step
    # A corpus of which a tenth was read makes ten times as many.
    assert mixed.steps(per_step, [10.0, 10.0]) >= 10 * steps


def test_mixture_without_a_whole_step_is_refused() -> None:
    with pytest.raises(ValueError, match=r"8 blocks is more .* \[100, 5\], shares \[0.25, 0.75\]$"):
        epochs(mixture([100, 5], [1, 3]), 8, 1)


def test_corpora_go_on_in_their_own_pass() -> None:
    sizes = [10, 26]
    flat = [block for epoch in epochs(mixture(sizes, [1, 1]), 4, 8) for block in epoch]
    assert len(flat) == 8 * 5 * 4
    for first, size in ((0, 10), (10, 26)):
        own = [block for block in flat if first <= block < first + size]
        passes = [own[at : at + size] for at in range(0, len(own), size)]
        assert all(set(turn) == set(range(first, first + size)) for turn in passes[:-1])
        assert passes[0] != passes[1]


def test_corpora_are_shuffled_within_a_batch() -> None:
    (epoch,) = epochs(mixture([400, 400], [1, 1]), 8, 1)
    firsts = Counter(block < 400 for block in epoch[::8])
    assert min(firsts.values()) > 25
    assert epochs(mixture([400, 400], [1, 1]), 8, 1, seed=1) != [epoch]


@pytest.fixture
def make(
    training_texts: list[str], tokenizers: Tokenizers, pair: tuple[Any, Any], tmp_path: Path
) -> Callable[..., Any]:
    """`make(**training)`: a trainer of two corpora, 1 to 1, with blocks of each held out."""
    rows = make_segments(training_texts[:30], *tokenizers).rows
    parts = {"web": len(rows) // 3, "code": len(rows) - len(rows) // 3}
    blocks = Blocks(rows, 48, 128, parts)

    def trainer(**training: Any) -> Any:
        mixed = Mixture(blocks, list(blocks.parts.values()), [1, 1])
        options = {"eval_dataset": blocks}
        saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": -1}
        return make_trainer(
            tmp_path, mixed, *copy.deepcopy(pair), options=options, **saving | training
        )

    return trainer


def test_mixture_resumes_bit_equal_in_a_second_epoch(
    make: Callable[..., Any], tmp_path: Path
) -> None:
    epoch = {"num_train_epochs": 2, "data_seed": 7}
    epoch |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    whole = make(**epoch)
    seen, compute = [], whole.compute_loss

    def told(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        seen.extend(inputs["block"].tolist())
        return compute(model, inputs, *args, **kwargs)

    whole.compute_loss = told
    whole.train()
    first, second = epochs(whole.train_dataset, 4, 2, seed=7)
    drawn, widths = first + second, whole.train_dataset.blocks.teacher_tokens
    by_step = [drawn[at : at + 4] for at in range(0, len(drawn), 4)]
    assert seen == [block for step in by_step for block in sorted(step, key=lambda b: -widths[b])]
    assert seen != drawn
    steps, left = divmod(whole.state.global_step, 2)
    assert not left
    assert steps > 1
    # As another number of processes would split it.
    for split in ({}, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}):
        again = make(**epoch | split)
        assert len(again.get_train_dataloader().dataset) == sum(again.train_dataset.sizes)
        again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{steps + 1}"))
        for a, b in zip(whole.model.parameters(), again.model.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12 if split else 0)


def test_evaluation_tells_the_loss_of_each_corpus(make: Callable[..., Any]) -> None:
    trainer = make(per_device_eval_batch_size=5)
    found = trainer.evaluate()
    blocks, texts = trainer.eval_dataset, {}
    first = 0
    for name, count in blocks.parts.items():
        part = [blocks[number] for number in range(first, first + count)]
        texts[name] = trainer.evaluate(part)
        assert found[f"eval_{name}_loss"] == pytest.approx(texts[name]["eval_loss"], rel=1e-12)
        first += count
    assert not {"eval_web_loss", "eval_code_loss"} & texts["web"].keys()
    assert min(t["eval_loss"] for t in texts.values()) < found["eval_loss"]
