"""Compute over the next micro-batch on a stream of its own, while this one is trained on.

    stream of the run | student 0          | student 1, update  | student 2          | ...
    second stream     |          teacher 1 |          teacher 2 |          teacher 3 | ...

At every bar each stream waits for what the other was given before it, so that neither reads what
is not written, nor writes to memory that the other still reads.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from vocagnolm.host.options import raise_first

WITH_STREAMS = ("cuda",)
_Batch = Mapping[str, Any]
Found = TypeVar("Found")


def overlap_faults(is_guided: bool, is_sharded: bool, device: str) -> Iterator[str]:
    """Yield a message for each reason why a teacher's pass cannot run beside the student's."""
    if not is_guided:
        yield (
            "--overlap_teacher has no effect without a --teacher whose losses choose the tokens: "
            "leave it out"
        )
    if is_sharded:
        yield (
            "--overlap_teacher does not go with --teacher_sharding node, which gathers weights on "
            "streams of its own: leave one of them out"
        )
    if device not in WITH_STREAMS:
        yield f"--overlap_teacher needs a GPU, found {device}: leave it out"


class Overlap(Generic[Found]):
    """Computes from micro-batches, each while the one before it is trained on.

    Called with the batches of `ahead` in their order, it returns what `compute` does; with any
    other batch it computes at once. It holds one more batch, and what one pass needs.

    Args:
        compute: from a batch, without a gradient.
        models: that it asks.
        device: of the batches; a ValueError where it has no streams.
    """

    def __init__(
        self, compute: Callable[[_Batch], Found], models: Sequence[nn.Module], device: torch.device
    ):
        is_sharded = any(isinstance(model, FSDPModule) for model in models)
        raise_first(overlap_faults(bool(models), is_sharded, device.type))
        self._compute = compute
        self._streams = torch.get_device_module(device)
        self._second = self._streams.Stream()
        self._source: Iterator[_Batch] | None = None
        self._ahead: Iterator[_Batch] = iter(())
        self._following: dict[Tensor, _Batch] = {}  # by the batch before, which `block` identifies
        self._begun: tuple[_Batch, Found] | None = None

    def ahead(self, batches: Iterator[_Batch]) -> Iterator[_Batch]:
        """Return the same batches; each is fetched before the one ahead of it is handed out."""
        if batches is not self._source:
            self._source, self._ahead = batches, self._fetch(batches)
        return self._ahead

    def _fetch(self, batches: Iterator[_Batch]) -> Iterator[_Batch]:
        self._following.clear()
        batch = next(batches, None)
        while batch is not None:
            following = next(batches, None)
            if following is not None:
                self._following[batch["block"]] = following
            yield batch
            batch = following

    def __call__(self, batch: _Batch) -> Found:
        """Return what was begun for this batch, or compute it now; begin what follows it."""
        first = self._streams.current_stream()
        if self._begun is not None and self._begun[0]["block"] is batch["block"]:
            first.wait_stream(self._second)
            found = self._begun[1]
        else:
            found = self._compute(batch)
        if (following := self._following.pop(batch["block"], None)) is not None:
            self._second.wait_stream(first)
            with self._streams.stream(self._second):
                # Held until the next begins: a batch that is never asked for is read until then.
                self._begun = following, self._compute(following)
        return found
