"""Several processes as one: the same weights, losses and verdicts, and what they send each other.

    python -m benchmarks.experiments.eight_processes            # 8 gloo processes on this CPU
    python -m benchmarks.experiments.eight_processes --processes 2 --steps 2 --ours 1 2

Processes of one machine play two machines of half of them each. A tiny student is trained online
under DDP, FSDP2 and, from 4 processes on, HSDP (sharded within a machine, replicated between them),
and beside a teacher that is sharded in each machine. Bytes are those of the collective operations
that a process takes part in, sent in a ring; `cost_model.sent_bytes` has the formulas of
docs/scaling.md. gloo itself may send others. Last comes what is ours, by the number of processes.
The exit status is 1 where float32 weights differ by more than 1e-5, bytes by more than 5 %, or a
store or an evaluation at all.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import datasets
import torch
import transformers
from torch import Tensor

from benchmarks.gloo_jobs import (
    SINGLE,
    TEACHER,
    Job,
    World,
    launch,
    llama,
    measure_ours,
    run_command,
    train,
)
from benchmarks.harness import alone, one_thread
from vocagnolm.io import markdown_table

MOST_APART, MOST_OFF = 1e-5, 0.05


@dataclass(frozen=True)
class Size:
    """Processes, an even number, and what they train; numbers of processes to measure ours with."""

    processes: int = 8
    steps: int = 4
    hidden: int = 256
    ours: tuple[int, ...] = ()


@dataclass
class Compared:
    """Tables, the largest share by which bytes are off, and what differs at all."""

    tables: list[list[list[str]]]
    off: float = 0.0
    broken: str = ""

    @property
    def holds(self) -> bool:
        """True if several processes are as one."""
        return self.off <= MOST_OFF and not self.broken


def compare(size: Size) -> Compared:
    """Run everything, in a process that has computed nothing: one that has cannot be forked."""
    one_thread()
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    datasets.disable_progress_bars()
    base = Job(processes=size.processes, steps=size.steps, hidden=size.hidden)
    found = Compared([])
    with tempfile.TemporaryDirectory() as directory:
        world = World.make(Path(directory))
        compare_training(world, base, found)
        compare_commands(world, size.processes, found)
        if size.ours:
            found.tables.append(ours_by_processes(world, base, size.ours))
    return found


def compare_training(world: World, base: Job, found: Compared) -> None:
    """Train in every layout."""
    accumulation = base.accumulation * base.processes
    single = replace(base, processes=1, accumulation=accumulation)
    reference = torch.load(launch(train, world, single, 1) / "weights.pt")
    start = dict(llama(world.vocabularies[0], base.hidden).named_parameters())
    assert _apart(start, reference) > 100 * MOST_APART, "nothing is learned"
    jobs = [replace(base, layout="DDP")]
    jobs += [replace(base, layout="FSDP2", bf16=bf16) for bf16 in (False, True)]
    if base.node > 1:
        jobs += [replace(base, layout="DDP", teacher=TEACHER)]
        jobs += [replace(base, layout="HSDP", bf16=bf16) for bf16 in (False, True)]
    rows = [["layout", "weights apart", "bytes per step", "by the formula", "off"]]
    for job in jobs:
        out = launch(train, world, job, job.processes)
        apart = _apart(torch.load(out / "weights.pt"), reference)
        if apart > MOST_APART and not job.bf16:
            found.broken += f"({job.name}: weights {apart:.1e} apart)"
        report = json.loads((out / "report.json").read_text())
        parameters = sum(value.numel() for value in reference.values())
        expected = job.expected_bytes(parameters, report["teacher"])
        off = report["bytes"] / expected - 1
        found.off = max(found.off, abs(off))
        cells = (f"{apart:.1e}", f"{report['bytes']:,.0f}", f"{expected:,.0f}", f"{off:+.2%}")
        rows.append([job.name, *cells])
    found.tables.append(rows)


def _apart(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    return max((one[name] - other[name]).abs().max().item() for name in other)


def compare_commands(world: World, processes: int, found: Compared) -> None:
    """Score and evaluate with one process and with several."""
    rows = [["command", "same files", "files", "operations", "bytes"]]
    for name, suffix in (("scoring", ".arrow"), ("evaluation", ".jsonl")):
        written = []
        for count in (1, processes):
            out = launch(run_command, world, name, count)
            files = sorted((out / "result").glob(f"*{suffix}"))
            assert files, f"{name} has written no {suffix}"
            written.append([(file.name, file.read_bytes()) for file in files])
        same = written[0] == written[1]
        if not same:
            found.broken += f"({name}: other files)"
        sent = [json.loads(file.read_text()) for file in out.glob("sent*.json")]
        most = max(each["sent"] for each in sent)
        calls = str(max(each["calls"] for each in sent))
        rows.append([name, "yes" if same else "NO", str(len(written[0])), calls, f"{most:,.0f}"])
    found.tables.append(rows)


def ours_by_processes(world: World, base: Job, counts: Sequence[int]) -> list[list[str]]:
    """Measure what is ours for each number of processes; rows of the table."""
    found = []
    for count in counts:
        layout = "DDP" if count > 1 else SINGLE
        out = launch(measure_ours, world, replace(base, layout=layout, processes=count), count)
        ranks = [json.loads(file.read_text()) for file in out.glob("ours*.json")]
        found.append({p: {k: max(r[p][k] for r in ranks) for k in ranks[0][p]} for p in ranks[0]})
    rows = [["what is ours", *map(str, counts)]]
    for part in found[0]:
        for kind, unit in (("sent", "bytes"), ("ms", "ms")):
            values = [each[part][kind] for each in found]
            if any(values):
                shown = [f"{value:,.0f}" if kind == "sent" else f"{value:.2f}" for value in values]
                rows.append([f"{part}: {unit}", *shown])
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run and compare everything, print the tables, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--processes", type=int, default=8, help="an even number")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256, help="width of the student")
    parser.add_argument("--ours", type=int, nargs="*", default=[1, 2, 4, 8], metavar="PROCESSES")
    given = parser.parse_args(argv)
    size = Size(given.processes, given.steps, given.hidden, tuple(given.ours))
    compared = alone(compare, size)
    for table in compared.tables:
        sys.stdout.write(markdown_table(table) + "\n\n")
    sys.stdout.write(compared.broken + "\n")
    return int(not compared.holds)


if __name__ == "__main__":
    sys.exit(main())
