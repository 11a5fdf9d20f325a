"""The harness of every benchmark: claims, ways that take turns, and the memory of a process."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import random
import resource
import statistics
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc
LEAN_BYTES, USUAL_BYTES = 2**20, 2**25  # the second is where its own rule ends
WARM_UP_TURNS = 2  # they allocate what stays, and compile
PRELOADED = ["benchmarks.harness", "benchmarks.models"]

P = ParamSpec("P")
T = TypeVar("T")


class Skipped(Exception):  # noqa: N818
    """A claim that cannot be measured here; the message says what is missing."""


@dataclass(frozen=True)
class Claim:
    """A sentence with a number that a measurement can contradict.

    Attributes:
        name: of the number, among those that one command measures.
        says: the claim, in a short sentence.
        at_most: the largest value with which it holds.
        at_least: the smallest one, where more is better.
        unit: printed behind the numbers; "%" prints a share as per cent.
    """

    name: str
    says: str
    at_most: float | None = None
    at_least: float | None = None
    unit: str = "x"

    @property
    def limit(self) -> str:
        """The limit, as it is printed."""
        if self.at_most is not None:
            return f"at most {self.show(self.at_most)}"
        assert self.at_least is not None, "a claim has a limit"
        return f"at least {self.show(self.at_least)}"

    def show(self, value: float) -> str:
        """Format a value in the claim's unit."""
        if self.unit == "%":
            return f"{100 * value:.1f} %"
        return f"{value:.3g} {self.unit}" if value < 1000 else f"{value:,.0f} {self.unit}"

    def holds(self, value: float) -> bool:
        """Compare a measured value with the limit; NaN holds none."""
        if self.at_most is not None:
            return value <= self.at_most
        return self.at_least is not None and value >= self.at_least


@dataclass(frozen=True)
class Measured:
    """What one measurement found.

    Attributes:
        values: of each claim, by its name.
        details: lines that explain them.
        note: what they are about, a line of the page.
        broken: why no claim holds whatever the values are; empty where nothing is wrong.
    """

    values: dict[str, float]
    details: Sequence[str] = ()
    broken: str = ""
    note: str = ""


@dataclass
class Way:
    """One of several ways to do the same, and what its turns took.

    Attributes:
        run: what is measured; receives what `prepare` returns.
        prepare: makes it from the number of the turn; its time does not count.
        seconds: processor time of one thread; of several, and on a GPU, the clock's.
        added_bytes: the most that turns added to the memory; empty where it is not tracked.
    """

    run: Callable[[object], object]
    prepare: Callable[[int], object] = lambda turn: turn
    seconds: list[float] = field(default_factory=list)
    added_bytes: list[int] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        """The median of the turns."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> str:
        """Median and quartiles, or the extremes of two turns, or one."""
        return quartiles(self.seconds, " s")

    @property
    def added(self) -> str:
        """The median of what turns added to the memory."""
        return f"{statistics.median(self.added_bytes) / 2**20:8,.0f} MiB"


def quartiles(values: Sequence[float], unit: str = "") -> str:
    """Median and quartiles, or the extremes of two values, or one."""
    low, high = min(values), max(values)
    if len(values) > 2:
        low, _, high = statistics.quantiles(values, n=4)
    spread = f"{low:.3f} to {high:.3f}{unit}" if len(values) > 1 else ""
    return f"{statistics.median(values):8.3f}{unit}{spread:>22}"


def take_turns(
    ways: Mapping[str, Way],
    repetitions: int,
    device: str = "cpu",
    warm_up: int = WARM_UP_TURNS,
    memory: bool = False,
    seed: int = 0,
) -> None:
    """Run the ways in turns, in an order that is drawn anew for each turn, with one thread.

    Other work on the machine then disturbs all of them alike: ratios hold better than times.
    """
    one_thread()
    rng = random.Random(seed)
    for turn in range(warm_up + repetitions):
        for name in rng.sample(list(ways), len(ways)):
            way = ways[name]
            given = way.prepare(turn)
            seconds, added_bytes = _turn(way, given, device, memory)
            if turn >= warm_up:
                way.seconds.append(seconds)
                if memory:
                    way.added_bytes.append(added_bytes)


def take_turns_apart(
    makers: Mapping[str, Callable[[], Way]], repetitions: int, memory: int = 0, seed: int = 0
) -> dict[str, Way]:
    """Let ways take turns, each made and run in a process of its own, so that memory is its own.

    First come `memory` turns, in which what is freed is given back at once, so that the memory is
    what is in use; then those of time, with a heap as it always is. Before both is one that does
    not count. The processes are forked from this one, and have imported what it has; beside a GPU
    it must not have run a backward pass, which PyTorch then rejects in them.
    """
    one_thread()
    rng, context = random.Random(seed), multiprocessing.get_context("fork")
    found = {name: Way(lambda given: None) for name in makers}
    pipes: dict[str, Connection] = {}
    for name, make in makers.items():
        pipes[name], theirs = context.Pipe()
        context.Process(target=_serve_turns, args=(make, theirs), daemon=True).start()
        theirs.close()  # so that one that is killed is the end of what can be read
    kinds = {True: memory, False: repetitions}
    turns = [(is_lean, turn) for is_lean, last in kinds.items() if last for turn in range(last + 1)]
    for is_lean, turn in turns:
        for name in rng.sample(list(makers), len(makers)):
            taken = _ask(name, pipes[name], is_lean, turn)
            if turn and is_lean:
                found[name].added_bytes.append(taken[1])
            elif turn:
                found[name].seconds.append(taken[0])
    for pipe in pipes.values():
        pipe.send(None)
    return found


def take_turns_alone(
    makers: Mapping[str, Callable[[], Way]], rounds: int, threads: int, memory: bool, seed: int = 0
) -> dict[str, Way]:
    """Let ways take turns where the memory does not hold all of them at once.

    In each round every way is made anew, in a process that ends before the next one begins. It
    takes a turn that does not count, which is turn 0, then with `memory` and in the first round one
    of memory, as `take_turns_apart` does, and one of time. What this process has loaded is shared.
    """
    one_thread()
    rng, context = random.Random(seed), multiprocessing.get_context("fork")
    found = {name: Way(lambda given: None) for name in makers}
    for turn in range(1, rounds + 1):
        for name in rng.sample(list(makers), len(makers)):
            pipe, theirs = context.Pipe()
            job = context.Process(
                target=_serve_turns, args=(makers[name], theirs, threads), daemon=True
            )
            job.start()
            theirs.close()
            is_measured = memory and turn == 1
            for is_lean, number in ((is_measured, 0), *[(True, turn)] * is_measured, (False, turn)):
                taken = _ask(name, pipe, is_lean, number)
                if number and is_lean:
                    found[name].added_bytes.append(taken[1])
                elif number:
                    found[name].seconds.append(taken[0])
            pipe.send(None)
            job.join()
    return found


def _ask(name: str, pipe: Connection, is_lean: bool, turn: int) -> tuple[float, int]:
    """Let the process behind a pipe take a turn, and wait for what it took."""
    with suppress(BrokenPipeError):  # what ended it was sent before
        pipe.send((is_lean, turn))
    try:
        taken: tuple[float, int] | str = pipe.recv()
    except EOFError:
        taken = "its process was ended, perhaps for want of memory"
    if isinstance(taken, str):
        raise RuntimeError(f"{name}: {taken}")
    return taken


def _serve_turns(make: Callable[[], Way], pipe: Connection, threads: int = 1) -> None:
    torch.set_num_threads(threads)
    libc = ctypes.CDLL(None)
    _map_blocks(libc, LEAN_BYTES)
    try:
        way = make()
        for is_lean, turn in iter(pipe.recv, None):
            given = way.prepare(turn)
            gc.collect()
            if not is_lean:
                _map_blocks(libc, USUAL_BYTES)
            elif hasattr(libc, "malloc_trim"):
                libc.malloc_trim(0)  # what is free already would hide what this turn takes
            pipe.send(_turn(way, given, "cpu", memory=is_lean))
    except BaseException:  # noqa: BLE001 - whatever it is, the other side reports it
        pipe.send(traceback.format_exc())


def _map_blocks(libc: ctypes.CDLL, least_bytes: int) -> None:
    """Let glibc map larger blocks on their own: they neither stay when freed nor lie in pieces."""
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, least_bytes)
        libc.mallopt(M_TRIM_THRESHOLD, 2 * least_bytes)


def _turn(way: Way, given: object, device: str, memory: bool) -> tuple[float, int]:
    """Run a way once: its seconds, and the most that it added to the memory."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, start_s = torch.cuda.memory_allocated(), time.perf_counter()
        way.run(given)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start_s
        return seconds, torch.cuda.max_memory_allocated() - before
    before = 0
    if memory:
        # The kernel forgets the maximum.
        Path("/proc/self/clear_refs").write_text("5")
        before = resident_bytes("VmRSS")
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start_s = clock()
    way.run(given)
    seconds = clock() - start_s
    return seconds, resident_bytes("VmHWM") - before if memory else 0


def one_thread() -> None:
    """Let PyTorch and the tokenizers compute with one thread."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)


def alone(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function in a process of its own, which has computed nothing before."""
    # Forked from a process that has imported and done nothing else.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with ProcessPoolExecutor(1, mp_context=context, initializer=one_thread) as pool:
        return pool.submit(function, *args, **kwargs).result()


def resident_bytes(name: str) -> int:
    """Return this process's memory: `VmRSS` is what it holds, `VmHWM` the most it has held."""
    status = Path("/proc/self/status")
    if not status.exists():  # not Linux: only the maximum is known, in bytes on macOS
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Not ru_maxrss: Linux lets a process inherit it from the one that started it.
    lines = (line.split() for line in status.read_text().splitlines())
    return next(int(line[1]) * 1024 for line in lines if line[0] == f"{name}:")
