"""A teacher that is sharded inside each machine says what a whole one says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import launch

from vocagnolm.models.load import shard_inside_machine

pytestmark = pytest.mark.processes

PROCESSES, LAYERS = 4, 3


@pytest.mark.slow
def test_sharded_teacher_gives_the_same_losses(
    tiny_llama: Callable[..., Any], tmp_path: Path
) -> None:
    for name, tied in (("plain", False), ("tied", True)):
        model = tiny_llama(64, tie_word_embeddings=tied, num_hidden_layers=LAYERS)
        model.save_pretrained(tmp_path / name)
    launch("sharding_worker.py", tmp_path, PROCESSES)
    for rank in range(PROCESSES):
        for found in json.loads((tmp_path / f"{rank}.json").read_text()):
            assert found["same"], found
            assert found["units"] == LAYERS + 1, "more than a layer is gathered at a time"
            shards = PROCESSES // found["machines"]  # of each machine
            assert found["share"] == pytest.approx(1 / shards, rel=0.1), found


def test_machines_of_unequal_size_are_rejected(
    tiny_llama: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="3 processes are not 2 per machine"):
        shard_inside_machine(tiny_llama(64), torch.device("cpu"))
