"""What takes no time: nothing waits for the device in a micro-batch, nothing is read to resume."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import skip_first_batches
from methods_world import METHODS, World
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase, masking_utils
from world import make_models, make_trainer

from vocagnolm import distillation
from vocagnolm.objective import StoredTeacher

# What a host waits for: operations whose result's size or value it must know, and copies to it.
OPERATIONS = ("nonzero", "_local_scalar_dense", "masked_select", "unique", "equal.default")
COPIES = ("tolist", "cpu", "numpy")


@pytest.fixture(scope="module")
def world(
    training_texts: list[str],
    student_tokenizer: PreTrainedTokenizerBase,
    teacher_tokenizer: PreTrainedTokenizerBase,
    tiny_llama: Callable[..., Any],
) -> World:
    tokenizers = student_tokenizer, teacher_tokenizer
    student, teacher = make_models(tiny_llama, *tokenizers)
    reference = tiny_llama(len(student_tokenizer), seed=5).double()
    return World(training_texts[:30], tokenizers, (student, teacher, reference))


class Waits(TorchDispatchMode):
    """Records the operations that make the host wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.is_ours = True

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = str(operation)
        masks = (x for x in tree_leaves(args[1:]) if isinstance(x, torch.Tensor))
        by_mask = ".index" in name and any(x.dtype in (torch.bool, torch.uint8) for x in masks)
        if self.is_ours and (by_mask or any(known in name for known in OPERATIONS)):
            self.found.append(name)
        return operation(*args, **kwargs or {})


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    found = Waits()
    for name in COPIES:
        original = getattr(torch.Tensor, name)

        def copy(self: Any, *args: Any, name: str = name, original: Any = original) -> Any:
            found.found.append(name)
            return original(self, *args)

        monkeypatch.setattr(torch.Tensor, name, copy)
    # To learn whether rows are packed, transformers asks the device in every forward pass that gets
    # position ids and makes a mask. That is not ours; docs/speed.md tells of it.
    packed = masking_utils.find_packed_sequence_indices

    def indices(position_ids: torch.Tensor) -> torch.Tensor | None:
        found.is_ours = False
        mask = packed(position_ids)
        found.is_ours = True
        return mask

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", indices)
    # As on a GPU: on a CPU numpy sorts, where nothing waits.
    monkeypatch.setattr(distillation, "_order", torch.argsort)
    monkeypatch.setattr(distillation, "_sort", lambda q, rows: q.sort().values)
    return found


@pytest.mark.parametrize("method", ["cpt", "vocagnolm", "stored", *METHODS])
def test_training_a_micro_batch_waits_for_nothing(
    method: str, world: World, waits: Waits, tmp_path: Path
) -> None:
    if method == "stored":
        blocks = world.blocks(world.theirs)
        trainer = make_trainer(tmp_path, blocks, world.student, StoredTeacher())
    else:
        trainer = world.trainer(tmp_path, method)
    batch = trainer.data_collator([trainer.train_dataset[number] for number in range(4)])
    if method == "stored":
        batch["teacher_losses"] = torch.rand(batch["teacher_labels"].shape)
    assert (batch["position_ids"] == 0).sum() > 4, "nothing is packed"
    waits.found.clear()
    with waits:
        loss = trainer.compute_loss(trainer.model, batch, num_items_in_batch=torch.tensor(100))
        loss.backward()
        trainer.metrics.keep_step()
    assert waits.found == []
    assert trainer.model.lm_head.weight.grad.abs().sum() > 0


def test_waits_are_found_when_there_are_some(waits: Waits) -> None:
    values = torch.rand(5)
    for wait in (
        lambda: values[values > 0.5],
        lambda: values.masked_select(values > 0.5),
        lambda: values.sum().item(),
        lambda: bool(values.sum() > 0),
        lambda: values.nonzero(),
        values.tolist,
        values.cpu,
        lambda: torch.zeros(5).index_put_((values > 0.5,), torch.tensor(1.0)),
    ):
        waits.found.clear()
        with waits:
            wait()
        assert len(waits.found) == 1


class ManyBlocks(Dataset[Any]):
    """As many blocks as the paper's corpus has, of which each is one of a few."""

    def __init__(self, blocks: Any):
        self._blocks, self.read = blocks, 0

    def __len__(self) -> int:
        return 7_320_000

    def __getitem__(self, number: int) -> Any:
        self.read += 1
        return {**self._blocks[number % len(self._blocks)], "block": number}


@pytest.mark.slow
def test_resuming_among_7_million_blocks_takes_seconds(
    world: World, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    blocks = ManyBlocks(world.blocks())

    def loader() -> Any:
        trainer = world.trainer(tmp_path, "cpt", per_device_train_batch_size=8, max_steps=-1)
        trainer.train_dataset = blocks
        return trainer.get_train_dataloader()

    began = time.monotonic()
    resumed = skip_first_batches(loader(), 400_000)  # as Trainer does
    first = next(iter(resumed))["block"].tolist()
    seconds = time.monotonic() - began
    record_property("seconds_to_first_batch", seconds)
    assert seconds < 60
    assert blocks.read <= 16  # the next batch is fetched ahead
    order = list(loader().batch_sampler)[400_000]
    assert first == order
