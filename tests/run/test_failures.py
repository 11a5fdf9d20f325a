"""How a run ends when something ends it: in one line."""

from __future__ import annotations

import multiprocessing
from multiprocessing import synchronize

import pytest
import torch
from safetensors import SafetensorError
from torch import distributed
from torch.distributed.checkpoint.api import CheckpointException

from vocagnolm.run import failures

DISK = OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("error", "begins", "holds"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "out of memory in a step: try, ", "node"),
        (distributed.DistBackendError("NCCL late\nmore"), "another process ", "(NCCL late)"),
        (RuntimeError("Connection closed by peer [::1]"), "another process ", "[::1])"),
        (RuntimeError("DataLoader worker (pid 5) died"), "a process of --data", "SIGUSR1"),
        (
            RuntimeError("Caught RuntimeError in DataLoader worker\nunable to ... shared memory"),
            "no room for batches in /dev/shm in a step: use --dataloader_num_workers 0, or ",
            "(Caught RuntimeError",
        ),
        (
            RuntimeError("--push_to_hub me/a: late"),
            "--push_to_hub me/a: late: the model is",
            "again",
        ),
        (BrokenPipeError(32, "Broken pipe"), "nobody reads what is printed any more", "[Errno 32]"),
        (DISK, "a file could not be read or written in a step: ", "([Errno 28] No space"),
        (SafetensorError("I/O error"), "a file could not", "(I/O error)"),
        (RuntimeError("PytorchStreamWriter: file write failed"), "a file could not", "(Pytorch"),
        (CheckpointException("all", {1: (DISK, None)}), "a file could not", "([Errno 28] No space"),
    ],
)
def test_explain_says_in_one_line_what_to_do(error: BaseException, begins: str, holds: str) -> None:
    explanation = failures.explain(error, "a step")
    assert explanation is not None
    assert explanation.startswith(begins), explanation
    assert holds in explanation
    assert "\n" not in explanation


def test_lock_without_shared_memory_has_its_own_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    # A name that no lock can have.
    monkeypatch.setattr(synchronize.SemLock, "_make_name", staticmethod(lambda: "/no/name"))
    with pytest.raises(OSError, match=r"\[Errno") as caught:
        multiprocessing.Lock()
    assert "no room for batches in /dev/shm" in str(failures.explain(caught.value, "a step"))


def test_explain_leaves_an_error_alone() -> None:
    assert failures.explain(RuntimeError("shapes do not match"), "a step") is None
    assert failures.explain(ValueError("no"), "a step") is None
