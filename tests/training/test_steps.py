"""The blocks of a step, of one or several corpora, and the objective that it gets."""

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
from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler, skip_first_batches
from hypothesis import example, given
from hypothesis import strategies as st
from references import full_losses
from torch import Tensor
from world import Tokenizers, make_segments, make_trainer, outcome

from benchmarks.models import backward, prepare
from vocagnolm.conventions import IGNORED_LABEL
from vocagnolm.method import Method
from vocagnolm.objective import Objective
from vocagnolm.packing import Blocks
from vocagnolm.training.sampler import mixed_counts, mixed_order

Make = Callable[..., Any]
PER_STEP = 8


@pytest.fixture
def make(blocks: Blocks, pair: tuple[Any, Any], tmp_path: Path) -> Make:
    """`make(method, **training)`: a trainer of steps of 8 blocks."""

    def trainer(
        method: Method | None = None, data: Any = blocks, objective: Any = None, **training: Any
    ) -> Any:
        options = {"method": method, "objective": objective}
        split = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, **training}
        return make_trainer(tmp_path, data, *copy.deepcopy(pair), options=options, **split)

    return trainer


def steps_of(numbers: list[int]) -> list[list[int]]:
    return [numbers[at : at + PER_STEP] for at in range(0, len(numbers), PER_STEP)]


def drawn_by_accelerate(blocks: Any, epoch: int, seed: int) -> list[list[int]]:
    """Draw as Accelerate does with transformers' sampler, which decides a step's blocks."""
    kept = len(blocks) - len(blocks) % PER_STEP
    sampler = SeedableRandomSampler(blocks, num_samples=kept, data_seed=seed)
    sampler.set_epoch(epoch)
    return steps_of(list(sampler))


@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize(("resumed", "data_seed"), [(0, None), (3, None), (9, 5)])
def test_steps_have_the_blocks_that_were_drawn(
    make: Make,
    blocks: Blocks,
    processes: int,
    resumed: int,
    data_seed: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = make(data_seed=data_seed)
    torch.manual_seed(99)  # as another trainer might, or a script that seeds each process
    loader = trainer.get_train_dataloader()
    trainer.state.global_step = resumed
    epoch, skipped = divmod(resumed, len(blocks) // PER_STEP)
    # Each process's micro-batches, as Accelerate deals them out, without the steps made.
    found: list[list[int]] = []
    for process in range(processes):
        shard = BatchSamplerShard(loader.batch_sampler, processes, process)
        found.append(list(shard)[skipped * 4 // processes :])
    dealt = [block for at_once in zip(*found, strict=True) for batch in at_once for block in batch]
    widths = blocks.teacher_tokens.tolist()
    expected = drawn_by_accelerate(blocks, epoch, 3 if data_seed is None else data_seed)[skipped:]
    assert dealt == [b for step in expected for b in sorted(step, key=lambda b: -widths[b])]
    assert steps_of(dealt) != expected
    if processes == 1:
        read, get = [], Blocks.__getitem__

        def told(self: Blocks, sequence: int) -> Any:
            read.append(sequence)
            return get(self, sequence)

        monkeypatch.setattr(Blocks, "__getitem__", told)
        after = skip_first_batches(loader, skipped * 4)  # as Trainer does
        assert [b for batch in after for b in batch["block"].tolist()] == dealt
        assert read == dealt, "a block is read that comes before"


def padding(blocks: Blocks, numbers: list[int], rows: int) -> int:
    """Teacher positions without a token in micro-batches, before rounding."""
    widths = blocks.teacher_tokens[numbers].reshape(-1, rows)
    return int((widths.max(1, keepdims=True) - widths).sum())


@pytest.mark.parametrize("rows", [2, 4, 8])
def test_order_never_adds_padding(
    make: Make, blocks: Blocks, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": 8 // rows}
    trainer = make(**split)
    found = []
    for trainer.orders_steps in (True, False):
        steps = steps_of(list(trainer._get_train_sampler()))
        found.append([padding(blocks, step, rows) for step in steps])
    assert all(ordered <= drawn for ordered, drawn in zip(*found, strict=True))
    assert sum(found[0]) < sum(found[1]) or rows == PER_STEP
    whole = make(per_device_train_batch_size=PER_STEP, gradient_accumulation_steps=1)
    assert steps_of(list(whole._get_train_sampler())) == drawn_by_accelerate(blocks, 0, 3)
    # Two processes with one micro-batch each.
    monkeypatch.setattr(type(whole.args), "world_size", 2)
    first = list(whole._get_train_sampler())[: 2 * PER_STEP]
    assert first == sorted(first, key=lambda block: -blocks.teacher_tokens[block])


@pytest.mark.parametrize("method", ["vocagnolm", "uld"])
def test_order_changes_no_update(make: Make, method: Any) -> None:
    runs = [make(Method(method)), make(Method(method))]
    runs[1].orders_steps = False
    for trainer in runs:
        trainer.train()
    (ordered, logs), (drawn, others) = (outcome(trainer) for trainer in runs)
    for name, weight in ordered.items():
        torch.testing.assert_close(weight, drawn[name], rtol=0, atol=1e-10)
    assert [log.get("loss") for log in logs] == pytest.approx([log.get("loss") for log in others])


@pytest.mark.parametrize(
    ("method", "is_ordered"),
    [
        (Method(), True),
        (Method(selection_scope="batch"), False),
        (Method(unmapped="mean"), False),
    ],
)
def test_order_stays_where_updates_depend_on_it(
    make: Make, blocks: Blocks, method: Method, is_ordered: bool
) -> None:
    found = steps_of(list(make(method)._get_train_sampler()))
    drawn = drawn_by_accelerate(blocks, 0, 3)
    assert [*map(sorted, found)] == [*map(sorted, drawn)]
    assert (found != drawn) == is_ordered
    # A data set without widths.
    plain = [blocks[number] for number in range(len(blocks))]
    assert steps_of(list(make(method, data=plain)._get_train_sampler())) == drawn
    # Fewer blocks than a step takes.
    assert sorted(make(method, data=plain[:5])._get_train_sampler()) == [*range(5)]


class Weighted(Objective):
    """Weights made of the losses that `select` gets, and of those that it returns."""

    uses_argument = True

    def select(self, student_loss_BS: Tensor, batch: Any, teacher: Any = None) -> Any:
        guidance = super().select(student_loss_BS, batch, teacher)
        loss_BS = student_loss_BS if self.uses_argument else guidance.student_loss_BS
        return guidance._replace(weight_BS=loss_BS.exp().neg().exp() * guidance.valid_BS)


class WeightedByReturned(Weighted):
    uses_argument = False


class Counting(Objective):
    """Counts its calls, and gives a weight of 1 to every position, also without a label."""

    calls = 0

    def select(self, student_loss_BS: Tensor, batch: Any, teacher: Any = None) -> Any:
        self.__dict__["calls"] = self.calls + 1
        guidance = super().select(student_loss_BS, batch, teacher)
        return guidance._replace(weight_BS=torch.ones_like(guidance.weight_BS))


def test_weights_of_an_own_objective_have_no_gradient(make: Make, blocks: Blocks) -> None:
    found = []
    for kind in (Weighted, WeightedByReturned):
        trainer = make(objective=kind)
        backward(prepare(trainer), [trainer.data_collator([blocks[index] for index in range(8)])])
        found.append([weight.grad for weight in trainer.model.parameters()])
    for ours, expected in zip(*found, strict=True):
        assert torch.equal(ours, expected)


class Broadcast(Objective):
    """Has one weight for a row, which PyTorch would give to all of its tokens."""

    def select(self, student_loss_BS: Tensor, batch: Any, teacher: Any = None) -> Any:
        guidance = super().select(student_loss_BS, batch, teacher)
        return guidance._replace(weight_BS=guidance.weight_BS[:, :1])


class Bare(Objective):
    def select(self, student_loss_BS: Tensor, batch: Any, teacher: Any = None) -> Any:
        return torch.ones_like(student_loss_BS)


@pytest.mark.parametrize(("kind", "found"), [(Broadcast, r"\[2, 1\]"), (Bare, "Tensor")])
def test_own_objective_without_a_weight_for_each_token_is_an_error(
    kind: Any, found: str, make: Make
) -> None:
    with pytest.raises(ValueError, match=rf"{kind.__name__}\.select must .*{found}"):
        make(objective=kind).train()


@pytest.mark.parametrize("warmup", [0, 3])
def test_own_objective_keeps_what_it_has_counted(warmup: int, make: Make) -> None:
    trainer = make(objective=Counting, top_k_warmup_steps=warmup)
    # A hyperparameter search sets Trainer's attribute of this name.
    trainer.objective = None
    trainer.train()
    assert trainer.token_objective.calls == 3 * 4
    # Weights without a label are not logged.
    assert trainer.state.log_history[0]["selected_fraction"] == 1


# -- Several corpora: shares of the weights, and an order that can be resumed ---------------------


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


@pytest.fixture(scope="module")
def mixed(training_texts: list[str], tokenizers: Tokenizers) -> Blocks:
    """The blocks of two corpora, weighted 2 to 3."""
    rows = make_segments(training_texts[:30], *tokenizers).rows
    parts = {"web": len(rows) // 3, "code": len(rows) - len(rows) // 3}
    blocks = Blocks(rows, 48, 128, parts)
    blocks.weights = [2, 3]
    return blocks


def test_mixture_resumes_bit_equal_in_a_second_epoch(
    make: Make, mixed: Blocks, tmp_path: Path
) -> None:
    epoch = {"data": mixed, "num_train_epochs": 2, "max_steps": -1, "data_seed": 7}
    epoch |= {"save_strategy": "steps", "save_steps": 1}
    epoch |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    whole = make(**epoch)
    seen, compute = [], whole.compute_loss

    def told(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        seen.extend(inputs["block"].tolist())
        return compute(model, inputs, *args, **kwargs)

    whole.compute_loss = told
    whole.train()
    sizes, widths = list(mixed.parts.values()), mixed.teacher_tokens
    first, second = epochs(sizes, mixed.weights, 4, 2, seed=7)
    drawn = first + second
    by_step = [drawn[at : at + 4] for at in range(0, len(drawn), 4)]
    assert seen == [block for step in by_step for block in sorted(step, key=lambda b: -widths[b])]
    assert seen != drawn
    assert len(seen) < 2 * mixed_counts(sizes, mixed.weights).sum()
    steps = len(second) // 4
    assert whole.state.global_step == 2 * steps > 2
    # As another number of processes would split it.
    for split in ({}, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}):
        again = make(**epoch | split)
        again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{steps + 1}"))
        for a, b in zip(whole.model.parameters(), again.model.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12 if split else 0)


def test_evaluation_has_the_loss_of_each_corpus(make: Make, mixed: Blocks) -> None:
    trainer, texts = make(per_device_eval_batch_size=7), {}
    found = trainer.evaluate(mixed)
    batch = trainer.data_collator([mixed[number] for number in range(len(mixed))])
    rows = (batch["input_ids"], batch["position_ids"], batch["labels"])
    losses = full_losses(trainer.model.eval(), *rows)
    tokens = int((batch["labels"] != IGNORED_LABEL).sum())
    assert len(mixed) % 7, "the last batch must be smaller"
    assert found["eval_loss"] == pytest.approx(float(losses.sum() / tokens), rel=1e-6)
    assert found["eval_tokens"] == tokens
    assert found["eval_segments"] == sum(len(mixed.segments(b)) for b in range(len(mixed)))
    first = 0
    for name, count in mixed.parts.items():
        part = [mixed[number] for number in range(first, first + count)]
        texts[name] = trainer.evaluate(part)
        assert found[f"eval_{name}_loss"] == pytest.approx(texts[name]["eval_loss"], rel=1e-12)
        first += count
    assert not {"eval_web_loss", "eval_code_loss"} & texts["web"].keys()
    assert min(t["eval_loss"] for t in texts.values()) < found["eval_loss"]
