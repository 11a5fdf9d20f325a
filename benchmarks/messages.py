"""Count the collective operations of a process, and the bytes that it sends for them in a ring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.estimates.cost_model import share_s


@dataclass
class Sent:
    """Operations that a process took part in, and the bytes that it sent in a ring for them."""

    calls: int = 0
    sent: float = 0.0


class Messages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count the collective operations of this process."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = Sent()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Count an operation where it is one between processes, and do it."""
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__:
            self._add(func.__name__, args)
        return func(*args, **(kwargs or {}))

    def _add(self, name: str, args: tuple[Any, ...]) -> None:
        # The largest of the arguments is what is gathered, or what is reduced.
        largest = max((sum(t.nbytes for t in _tensors(arg)) for arg in args), default=0)
        members = next(filter(None, map(_members, args)), 1)
        factor = 2 if "allreduce" in name or "all_reduce" in name else 1
        self.count.calls += 1
        self.count.sent += factor * share_s(largest, members, 1e-9)


def _tensors(arg: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(arg) if isinstance(leaf, Tensor)]


def _members(arg: Any) -> int | None:
    if isinstance(arg, torch.ScriptObject):
        try:
            return torch.distributed.ProcessGroup.unbox(arg).size()
        except RuntimeError:  # another object, such as the kind of reduction
            return None
    if isinstance(arg, str) and arg.isdigit():  # the name of a group
        c10d: Any = torch.distributed.distributed_c10d
        return int(c10d._resolve_process_group(arg).size())
    return None
