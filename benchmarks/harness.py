"""The harness of all benchmarks: claims, ways that take turns, and the memory of a process."""

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
LEAN_BYTES, USUAL_BYTES = 2**20, 2**25  # the second is the largest threshold that glibc itself sets
WARM_UP_TURNS = 2  # they compile, and allocate memory that stays
PRELOADED = ["benchmarks.harness", "benchmarks.models"]

P = ParamSpec("P")
T = TypeVar("T")


class Skipped(Exception):  # noqa: N818
    """Raised if a claim cannot be measured here. The message says what is missing."""


@dataclass(frozen=True)
class Claim:
    """A sentence with a number that a measurement can contradict.

    Attributes:
        name: name of the number, unique within a measurement.
        says: the claim, in a short sentence.
        at_most: the largest value for which the claim holds.
        at_least: the smallest such value, if more is better.
        unit: printed after the numbers; "%" prints a fraction as a percentage.
    """

    name: str
    says: str
    at_most: float | None = None
    at_least: float | None = None
    unit: str = "x"

    @property
    def limit(self) -> str:
        """The limit as text."""
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
        """Return whether a measured value is within the limit; NaN never is."""
        if self.at_most is not None:
            return value <= self.at_most
        return self.at_least is not None and value >= self.at_least


@dataclass(frozen=True)
class Measured:
    """The results of one measurement.

    Attributes:
        values: the value of each claim, by its name.
        details: lines that explain the values.
        note: a line of the page that says what the values are about.
        broken: why no claim holds, whatever the values are; empty if nothing is wrong.
    """

    values: dict[str, float]
    details: Sequence[str] = ()
    broken: str = ""
    note: str = ""


@dataclass
class Way:
    """One of several ways to do the same thing, and the cost of its turns.

    Attributes:
        run: what is measured; receives what `prepare` returns.
        prepare: makes the input of `run` from the number of the turn; its time does not count.
        seconds: processor time with one thread; wall-clock time with several or on a GPU.
        added_bytes: peak memory that each turn added; empty if memory is not tracked.
    """

    run: Callable[[object], object]
    prepare: Callable[[int], object] = lambda turn: turn
    seconds: list[float] = field(default_factory=list)
    added_bytes: list[int] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        """The median time of the turns."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> str:
        """The median and quartiles, or the extremes of two turns; of one turn, only its time."""
        return quartiles(self.seconds, " s")

    @property
    def added(self) -> str:
        """The median of the memory that turns added."""
        return f"{statistics.median(self.added_bytes) / 2**20:8,.0f} MiB"


def quartiles(values: Sequence[float], unit: str = "") -> str:
    """Format the median and quartiles, or the extremes of two values; of one, only the value."""
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
    """Run the ways in turns with one thread, in a new random order for each turn.

    Other work on the machine then slows all of them alike, so ratios are more reliable than times.
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
    """Let ways take turns, each in its own process, so that each has its own memory.

    First come `memory` turns, in which freed memory is returned at once, so that only memory in use
    counts. Then come `repetitions` timed turns, with the usual heap. Each of the two series begins
    with a turn that does not count. The processes are forked from this one and share its imports.
    On a machine with a GPU, this process must not have run a backward pass: PyTorch would reject
    one in a forked process.
    """
    one_thread()
    rng, context = random.Random(seed), multiprocessing.get_context("fork")
    found = {name: Way(lambda given: None) for name in makers}
    pipes: dict[str, Connection] = {}
    for name, make in makers.items():
        pipes[name], theirs = context.Pipe()
        context.Process(target=_serve_turns, args=(make, theirs), daemon=True).start()
        theirs.close()  # so that reading ends if the process is killed
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
    """Let ways take turns if memory cannot hold all of them at once.

    In each round, every way is made again, in a process that ends before the next one starts. Its
    first turn, turn 0, does not count. In the first round, a memory turn follows if `memory` is
    set, as in `take_turns_apart`. The last turn is timed. The processes share what this one has
    loaded.
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
    """Let the process at the other end of a pipe take a turn, and return its result."""
    with suppress(BrokenPipeError):  # it has ended, and has sent the reason before
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
                libc.malloc_trim(0)  # free memory would hide what this turn allocates
            pipe.send(_turn(way, given, "cpu", memory=is_lean))
    except BaseException:  # noqa: BLE001 - the other side reports any failure
        pipe.send(traceback.format_exc())


def _map_blocks(libc: ctypes.CDLL, least_bytes: int) -> None:
    """Let glibc map larger blocks separately, so that they are unmapped when they are freed."""
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, least_bytes)
        libc.mallopt(M_TRIM_THRESHOLD, 2 * least_bytes)


def _turn(way: Way, given: object, device: str, memory: bool) -> tuple[float, int]:
    """Run a way once; return its seconds, and the peak memory that it added in bytes."""
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
        # Reset the recorded maximum.
        Path("/proc/self/clear_refs").write_text("5")
        before = resident_bytes("VmRSS")
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start_s = clock()
    way.run(given)
    seconds = clock() - start_s
    return seconds, resident_bytes("VmHWM") - before if memory else 0


def one_thread() -> None:
    """Let PyTorch and the tokenizers use one thread."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)


def alone(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function in a process of its own that has computed nothing before."""
    # The server that forks it has only imported modules.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with ProcessPoolExecutor(1, mp_context=context, initializer=one_thread) as pool:
        return pool.submit(function, *args, **kwargs).result()


def resident_bytes(name: str) -> int:
    """Return this process's memory: `VmRSS` is what it holds now, `VmHWM` the most it has held."""
    status = Path("/proc/self/status")
    if not status.exists():  # not Linux: only the maximum is known, in bytes on macOS
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Not ru_maxrss: on Linux, a process inherits it from its parent.
    lines = (line.split() for line in status.read_text().splitlines())
    return next(int(line[1]) * 1024 for line in lines if line[0] == f"{name}:")
