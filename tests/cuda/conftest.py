"""Tests on a CUDA device that computes nothing: what it proves is in `fake_cuda`."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest
from fake_cuda import in_fork, start, stop


@pytest.fixture(scope="session")
def on_fake_cuda() -> Iterator[Callable[..., Any]]:
    """`on_fake_cuda(function, *args)`: call a function in a process of its own with the device.

    The process runs the function's file again, so the function must be at its top level, and its
    result must be picklable. All processes are forked from one that has imported everything.
    Calls with `keep=True` share a process, which is faster, as PyTorch has seen most shapes there.
    """
    if not shutil.which("g++"):
        pytest.skip("the device is compiled with g++, which is not here")

    def call(function: Callable[..., Any], *args: Any, keep: bool = False) -> Any:
        file = function.__code__.co_filename
        return pool.submit(in_fork, file, function.__name__, args, keep).result()

    with ProcessPoolExecutor(1, get_context("spawn"), start) as pool:
        yield call
        pool.submit(stop).result()
