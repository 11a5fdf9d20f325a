"""Several corpora in one run: shares of the weights, and an order that can be resumed."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from references import full_losses
from world import Tokenizers, make_segments, make_trainer

from vocagnolm.conventions import IGNORED_LABEL
from vocagnolm.packing import Blocks
from vocagnolm.training.sampler import mixed_counts, mixed_order


def epochs(
    sizes: list[int], weights: list[float], per_step: int, count: int, seed: int = 0
) -> list[list[int]]:
    kept = int(mixed_counts(sizes, weights).sum()) // per_step * per_step
    return [mixed_order(sizes, weights, seed, epoch)[:kept].tolist() for epoch in range(count)]


@example([(1, 1), (1, 1), (1, 1), (57, 13)])
@given(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 20)), min_size=2, max_size=5))
def test_epoch_reads_all_corpora_in_shares_of_their_weights(corpora: list[tuple[int, int]]) -> None:
    sizes, weights = (list(column) for column in zip(*corpora, strict=True))
    counts, order = mixed_counts(sizes, weights), mixed_order(sizes, weights, 3, 0)
    assert len(order) == counts.sum()
    assert (counts >= sizes).all()
    # The corpus that is largest for its share is read once. The counts follow from it, each rounded
    # by itself, so their sum may differ from the total by a few.
    total = max(
        math.ceil(Fraction(size * sum(weights), weight))
        for size, weight in zip(sizes, weights, strict=True)
    )
    expected = np.array(weights) * total / sum(weights)
    assert np.abs(counts - expected).max() < 0.5 + 1e-9
    first = 0
    for size, times in zip(sizes, counts.tolist(), strict=True):
        own = order[(order >= first) & (order < first + size)] - first
        passes = [own[at : at + size] for at in range(0, times, size)]
        assert all(sorted(turn) == list(range(size)) for turn in passes[:-1])
        assert len(set(passes[-1].tolist())) == len(passes[-1])
        first += size


def test_shares_are_those_that_were_typed() -> None:
    assert mixed_counts([700, 100], [0.7, 0.3]).tolist() == [700, 300]


def test_order_depends_on_seed_and_epoch_alone() -> None:
    corpora = [400, 100], [0.5, 0.5]
    first, second = epochs(*corpora, 8, 2)
    assert len(first) == 800
    assert [first, second] == epochs(*corpora, 8, 2)
    assert first != second != epochs(*corpora, 8, 1, seed=1)[0]
    # The first row of a batch, and so the first process, is not always of one corpus.
    assert min(Counter(index < 400 for index in first[::8]).values()) > 25


@pytest.fixture
def make(
    training_texts: list[str], tokenizers: Tokenizers, pair: tuple[Any, Any], tmp_path: Path
) -> Callable[..., Any]:
    """`make(**training)`: a trainer of two corpora, weighted 2 to 3, each with held-out blocks."""
    rows = make_segments(training_texts[:30], *tokenizers).rows
    parts = {"web": len(rows) // 3, "code": len(rows) - len(rows) // 3}
    blocks = Blocks(rows, 48, 128, parts)

    def trainer(**training: Any) -> Any:
        blocks.weights = [2, 3]
        options = {"eval_dataset": blocks}
        saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": -1}
        return make_trainer(
            tmp_path, blocks, *copy.deepcopy(pair), options=options, **saving | training
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
    blocks = whole.train_dataset
    first, second = epochs(list(blocks.parts.values()), blocks.weights, 4, 2, seed=7)
    drawn, widths = first + second, blocks.teacher_tokens
    by_step = [drawn[at : at + 4] for at in range(0, len(drawn), 4)]
    assert seen == [block for step in by_step for block in sorted(step, key=lambda b: -widths[b])]
    assert seen != drawn
    assert len(seen) < 2 * mixed_counts(list(blocks.parts.values()), blocks.weights).sum()
    steps, left = divmod(whole.state.global_step, 2)
    assert not left
    assert steps > 1
    # As another number of processes would split it.
    for split in ({}, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}):
        again = make(**epoch | split)
        again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{steps + 1}"))
        for a, b in zip(whole.model.parameters(), again.model.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12 if split else 0)


def test_evaluation_has_the_loss_of_each_corpus(make: Callable[..., Any]) -> None:
    trainer = make(per_device_eval_batch_size=7)
    found = trainer.evaluate()
    blocks, texts = trainer.eval_dataset, {}
    batch = trainer.data_collator([blocks[number] for number in range(len(blocks))])
    rows = (batch["input_ids"], batch["position_ids"], batch["labels"])
    losses = full_losses(trainer.model.eval(), *rows)
    tokens = int((batch["labels"] != IGNORED_LABEL).sum())
    assert len(blocks) % 7, "the last batch must be smaller"
    assert found["eval_loss"] == pytest.approx(float(losses.sum() / tokens), rel=1e-6)
    assert found["eval_tokens"] == tokens
    first = 0
    for name, count in blocks.parts.items():
        part = [blocks[number] for number in range(first, first + count)]
        texts[name] = trainer.evaluate(part)
        assert found[f"eval_{name}_loss"] == pytest.approx(texts[name]["eval_loss"], rel=1e-12)
        first += count
    assert not {"eval_web_loss", "eval_code_loss"} & texts["web"].keys()
    assert min(t["eval_loss"] for t in texts.values()) < found["eval_loss"]
