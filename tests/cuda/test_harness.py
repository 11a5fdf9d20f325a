"""The watch finds what is planted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from fake_cuda import Watch

Run = Callable[..., Any]


def small_faults() -> tuple[dict[str, int], ...]:
    """Do everything that waits, and much that does not; return the kinds of records."""
    with Watch() as watch:
        x, host = torch.ones(4, 3, device="cuda"), torch.ones(4, 3)
        row, flat = x[0], x.flatten()
        watch.clear()
        float(x.sum()), bool((x > 0).all()), int(row[0])
        x.tolist()
        assert flat.nonzero().shape == (12, 1)
        assert x[x > 0].shape == (12,)
        assert x[x[:, 0] > 0].shape == (4, 3)
        x[x > 0] = row[0]  # fills
        x[x[:, 0] > 0] = x
        x.cpu(), host.cuda(), torch.tensor(1, device="cuda"), x.copy_(host)
        host.pin_memory(), host.cuda()
        torch.cuda.synchronize()
        torch.cuda.Event().synchronize()
        host.cuda(non_blocking=True), x.copy_(host, non_blocking=True)
        x.to("cpu", non_blocking=True)
        x.masked_fill_(x > 0, 0.0).where(x > 0, 1.0).to(torch.bfloat16).clone()
        x.sum() + host.sum(), x * 2.0
    records = (watch.waits, watch.copies, watch.mixed, watch.cpu)
    kinds: Any = [Counter[str]() for _ in records]
    for found, seen in zip(kinds, records, strict=True):
        for key, count in seen.items():
            found[key.what] += count
    return tuple(dict(found) for found in kinds)


def test_waits_copies_and_mixes_are_told_apart(on_fake_cuda: Run) -> None:
    waits, copies, mixed, cpu = on_fake_cuda(small_faults)
    assert waits == {
        "item": 3,
        "tolist": 1,
        "nonzero": 1,
        "boolean mask": 3,
        "copy to the host": 1,
        "copy to the device": 4,
        "synchronize": 2,
    }
    assert copies == {"copy to the device": 2, "copy to the host": 1}
    assert mixed == {"add": 1}
    assert cpu == {"lift_fresh": 1, "sum": 1}
