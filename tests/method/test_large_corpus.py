"""A run resumes in the middle of a large corpus without reading what comes before."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from accelerate import skip_first_batches
from methods_world import World
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase
from world import make_models


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
