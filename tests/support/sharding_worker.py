"""One of several gloo processes: a sharded teacher beside a whole one.

python tests/support/forked_job.py tests/support/sharding_worker.py DIR 4
"""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path

import torch
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM

from vocagnolm.attention import segments_of
from vocagnolm.models.load import shard_inside_machine
from vocagnolm.objective import OnlineTeacher

DEVICE = torch.device("cpu")


def local_bytes(model: torch.nn.Module) -> int:
    """What this process holds of a sharded model."""
    return sum(p.to_local().numel() * p.to_local().element_size() for p in model.parameters())


def batch(rank: int, shapes: list[int]) -> dict:
    generator = torch.Generator().manual_seed(rank)
    columns = shapes[rank % len(shapes)]  # every process has rows of its own shape
    ids = torch.randint(1, 60, (1 + rank, columns), generator=generator)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.2, -100)
    positions = torch.arange(columns).expand_as(ids)
    edges, longest = segments_of([columns] * len(ids))
    return {
        "teacher_segment_edges": [edges],
        "teacher_longest_segment": [longest],
        "teacher_input_ids": ids,
        "teacher_labels": labels,
        "teacher_position_ids": positions,
        "teacher_widths": [columns],
        "teacher_label_tokens": [int((labels[:, 1:] != -100).sum())],
    }


def main() -> None:
    directory = Path(sys.argv[1])
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    report = []
    for machines in (1, 2):
        os.environ["LOCAL_WORLD_SIZE"] = str(torch.distributed.get_world_size() // machines)
        for name in ("plain", "tied"):
            whole = AutoModelForCausalLM.from_pretrained(directory / name, dtype=torch.float32)
            bytes_whole = sum(p.numel() * p.element_size() for p in whole.parameters())
            sharded = shard_inside_machine(copy.deepcopy(whole), DEVICE)
            teachers = OnlineTeacher([whole], DEVICE), OnlineTeacher([sharded], DEVICE)
            same = True
            for round_ in range(2):
                inputs = batch(rank + round_, [9, 17, 30])
                expected, found = (teacher.losses(inputs)[0] for teacher in teachers)
                same = same and torch.equal(expected, found)
            report.append(
                {
                    "machines": machines,
                    "model": name,
                    "same": same,
                    "share": local_bytes(sharded) / bytes_whole,
                    "units": sum(isinstance(module, FSDPModule) for module in sharded.modules()),
                }
            )
    (directory / f"{rank}.json").write_text(json.dumps(report))
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
