"""The order of the blocks within a step: the same blocks, less padding, the same update."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler, skip_first_batches
from torch.utils.data import Dataset
from world import make_trainer, outcome

from vocagnolm.method import Method
from vocagnolm.packing import Blocks

Make = Callable[..., Any]
PER_STEP = 8


@pytest.fixture
def make(blocks: Blocks, pair: tuple[Any, Any], tmp_path: Path) -> Make:
    """`make(method, **training)`: a trainer of steps of 8 blocks."""

    def trainer(method: Method | None = None, data: Any = blocks, **training: Any) -> Any:
        options = {"method": method or Method()}
        given = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, **training}
        return make_trainer(tmp_path, data, *copy.deepcopy(pair), options=options, **given)

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
    make: Make, blocks: Blocks, processes: int, resumed: int, data_seed: int | None
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
        after = skip_first_batches(loader, skipped * 4)
        assert [b for batch in after for b in batch["block"].tolist()] == dealt


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


class ManyBlocks(Dataset[Any]):
    """As many blocks as the paper's corpus has, all repeats of a few."""

    def __init__(self, blocks: Blocks):
        self._blocks, self.read = blocks, 0

    def __len__(self) -> int:
        return 7_320_000

    def __getitem__(self, number: int) -> Any:
        self.read += 1
        return {**self._blocks[number % len(self._blocks)], "block": number}


@pytest.mark.slow
def test_resuming_reads_no_block_that_comes_before(make: Make, blocks: Blocks) -> None:
    many = ManyBlocks(blocks)
    options = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    loader = make(data=many, max_steps=-1, **options).get_train_dataloader()
    first = next(iter(skip_first_batches(loader, 400_000)))["block"].tolist()  # as Trainer does
    assert many.read <= 16  # the next batch is fetched ahead
    assert first == list(loader.batch_sampler)[400_000]
