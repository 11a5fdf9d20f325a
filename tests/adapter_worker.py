"""One of two gloo processes: runs `train.py` under DDP or FSDP2, once for each job.

torchrun --nproc_per_node=2 tests/adapter_worker.py DIR
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import transformers
from accelerate import PartialState
from accelerate.utils import DistributedType
from trainer_worker import fsdp_environment

import train


def main() -> None:
    for job in json.loads((Path(sys.argv[1]) / "jobs.json").read_text()):
        if "accelerate_config" in job:
            # The real FSDP2 path of Accelerate, on CPU: it would fall back to DDP by itself.
            os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
            PartialState._reset_state()
            transformers.training_args.is_torch_bf16_gpu_available = lambda: True
            PartialState._prepare_backend = lambda self, *a, **k: (
                "gloo",
                DistributedType.MULTI_GPU,
            )
            os.environ |= fsdp_environment(job["accelerate_config"])
        assert train.main(job["argv"]) == 0
    torch.distributed.destroy_process_group()
    # One exit in about twenty would abort in gloo's threads, with all the work done.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
