"""What the paper's runs cost on 1 to 256 GPUs, with a teacher at hand and from a store: estimates.

    python -m benchmarks.estimates.scaling
    python -m benchmarks.estimates.scaling --peak_tflops 312 --memory_tb_s 2.0 --price 1.5

Nothing is run, no weights are read: FLOPs, bytes and messages are counted from the sizes of the
models (`cost_model.py`), hours follow from an assumed share of a GPU's peak (MFU), dollars from an
assumed price. All assumptions are options, and printed. docs/scaling.md has the formulas, and these
tables.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields, replace

from benchmarks.estimates.cost_model import (
    LARGEST,
    NODE,
    SHARDINGS,
    STUDENT,
    TEACHERS,
    TOKEN_RATIO,
    Setup,
    break_even,
    device_gib,
    forward_flops,
    matmul_parameters,
    online_cost,
    step_compute_s,
    step_messages_s,
    stored_cost,
    teacher_flops,
    teacher_hours,
    training_flops,
    training_hours,
    wall_hours,
)

RUNS = (1, 3, 6, 10)
DEVICES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def roofline_table(setup: Setup) -> list[str]:
    """What a GPU could do at its peak, and does at the assumed shares of it."""
    header = ("run", "student GFLOP", "teacher GFLOP", "teacher's share", "tokens/s at the peak")
    student, peak = training_flops(setup), setup.peak_tflops * 1e12
    rows = []
    for teacher in (None, *TEACHERS):
        frozen = teacher_flops(setup, teacher) if teacher else 0.0
        seconds = student / setup.training_mfu + frozen / setup.forward_mfu
        total = student + frozen
        cells = (f"{student / 1e9:.2f}", f"{frozen / 1e9:.2f}", f"{frozen / total:.0%}")
        rates = (f"{peak / total / 1e3:.1f} k", f"{peak / seconds / 1e3:.1f} k")
        rows.append([teacher or "CPT, or from a store", *cells, *rates])
    return markdown((*header, "tokens/s assumed"), rows)


def products_table(setup: Setup) -> list[str]:
    """Whether matrix products wait for memory: FLOPs per byte that they read or write."""
    ridge = setup.peak_tflops / setup.memory_tb_s
    tokens, rows = setup.micro_batch * setup.context, []
    for role, model in (("student", STUDENT), (LARGEST, TEACHERS[LARGEST])):
        for name, outputs in (
            ("key or value", model.key_value_heads * model.head_dim),
            ("query or output", model.heads * model.head_dim),
            ("MLP", model.intermediate),
            ("head", model.vocabulary),
        ):
            inputs = model.hidden
            moved = 2 * (tokens * inputs + inputs * outputs + tokens * outputs)
            intensity = 2 * tokens * inputs * outputs / moved
            bound = "arithmetic" if intensity > ridge else "memory"
            rows.append([f"{role}: {name}", f"{inputs} x {outputs}", f"{intensity:,.0f}", bound])
    return markdown(("matrix product", "weights", "FLOP / byte", "bound by"), rows)


def memory_table(setup: Setup) -> list[str]:
    """GiB of a GPU by layout and number of GPUs."""
    rows = []
    for sharding in SHARDINGS:
        placements = [("none", False), ("on each GPU", False), ("in each machine", False)]
        for teacher, checkpointed in [*placements, ("on each GPU", True)]:
            cells = []
            for devices in DEVICES:
                size = device_gib(setup, sharding, devices, teacher, checkpointed)
                exists = devices >= {"DDP": 1, "FSDP2": 2, "HSDP": 2 * NODE}[sharding]
                over = " (over)" if size > setup.memory_gib else ""
                cells.append(f"{size:.0f}{over}" if exists else "")
            name = f"{sharding}, checkpointing" if checkpointed else sharding
            rows.append([name, teacher, *cells])
    return markdown(("student", "teacher", *map(str, DEVICES)), rows)


def messages_table(setup: Setup) -> list[str]:
    """Milliseconds of an optimizer step: what is sent beside what is computed."""
    devices = [count for count in DEVICES if count > 1]
    one_card = replace(setup, nics=1)
    seconds = {
        name: [step_messages_s(given, what, count) for count in devices]
        for name, what, given in (
            ("DDP", "DDP", setup),
            ("DDP, one network card a machine", "DDP", one_card),
            ("FSDP2", "FSDP2", setup),
            ("FSDP2, one network card a machine", "FSDP2", one_card),
            ("HSDP", "HSDP", setup),
            ("HSDP, one network card a machine", "HSDP", one_card),
            ("teacher sharded in each machine", "in each machine", setup),
            ("teacher sharded over all GPUs", "over all GPUs", setup),
        )
    }
    for name, teacher in (("computing, from a store", None), ("computing, online", LARGEST)):
        seconds[name] = [step_compute_s(setup, count, teacher) for count in devices]
    rows = [[name, *(f"{1e3 * s:,.0f}" for s in row)] for name, row in seconds.items()]
    return markdown(("ms per optimizer step", *map(str, devices)), rows)


def wall_table(setup: Setup) -> list[str]:
    """Hours of runs by number of GPUs."""
    rows = []
    for devices in DEVICES:
        hours = [wall_hours(setup, devices, teacher) for teacher in (None, *TEACHERS)]
        scoring = max(teacher_hours(setup, teacher) for teacher in TEACHERS)
        scoring *= (1 + setup.reread) / devices
        cells = [f"{hidden:.1f} ({exposed:.1f})" for hidden, exposed in hours]
        rows.append([str(devices), cells[0], f"{scoring:.1f}", *cells[1:]])
    online = [f"online, {teacher}" for teacher in TEACHERS]
    return markdown(("GPUs", "from a store", "scoring once, at most", *online), rows)


def dollars_table(setup: Setup) -> list[str]:
    """Dollars of the same runs, at their slower."""
    rows = []
    for devices in DEVICES:
        hours = [wall_hours(setup, devices, teacher)[1] for teacher in (None, *TEACHERS)]
        rows.append([str(devices), *(f"{h * devices * setup.price:,.0f}" for h in hours)])
    online = [f"online, {teacher}" for teacher in TEACHERS]
    return markdown(("GPUs", "from a store", *online), rows)


def scoring_table(setup: Setup) -> list[str]:
    """What scoring once takes."""
    header = ("teacher", "matmul parameters", "GFLOP / token", "tokens", "store", "FLOP")
    rows = []
    for name, model in TEACHERS.items():
        tokens = setup.student_tokens * TOKEN_RATIO[name]
        hours = teacher_hours(setup, name) * (1 + setup.reread)
        flops = setup.student_tokens * teacher_flops(setup, name) * (1 + setup.reread)
        cells = (
            f"{matmul_parameters(model) / 1e9:.3f} B",
            f"{forward_flops(model, setup.context) / 1e9:.2f}",
            f"{tokens / 1e9:.2f} B",
            f"{tokens * setup.bytes_per_token / 1e9:.1f} GB",
            f"{flops:.2e}",
        )
        rows.append([name, *cells, f"{hours:.0f}", f"{hours * setup.price:,.0f}"])
    return markdown((*header, "GPU hours", "dollars"), rows)


def runs_table(setup: Setup) -> list[str]:
    """What k runs take, with the teacher at hand and from a store."""
    runs = [f"k = {k}: online, stored" for k in RUNS]
    cpt, rows = training_hours(setup), []
    for name in TEACHERS:
        online = teacher_hours(setup, name) + cpt
        scoring = teacher_hours(setup, name) * (1 + setup.reread)
        costs = [
            f"{online_cost(online - cpt, cpt, k) * setup.price:,.0f}, "
            f"{stored_cost(scoring, cpt, k) * setup.price:,.0f}"
            for k in RUNS
        ]
        fewest = f"k = {break_even(scoring, cpt, online)}"
        rows.append([name, f"{cpt:.0f} h", f"{online:.0f} h", fewest, *costs])
    return markdown(("teacher", "CPT run", "online run", "break-even", *runs), rows)


def parse_arguments(argv: Sequence[str] | None = None) -> Setup:
    """The assumptions of a command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for option in fields(Setup):
        parser.add_argument(
            f"--{option.name}",
            type=type(option.default),
            default=option.default,
            help=option.metadata["help"],
        )
    return Setup(**vars(parser.parse_args(argv)))


def main(argv: Sequence[str] | None = None) -> None:
    """Print the assumptions and all tables."""
    setup = parse_arguments(argv)
    lines = ["Assumed:", ""]
    lines += [f"- {o.metadata['help']}: {getattr(setup, o.name):g}" for o in fields(Setup)]
    for title, table in (
        ("Roofline, per student token and GPU", roofline_table),
        ("Matrix products of a micro-batch", products_table),
        ("Memory of a GPU, in GiB", memory_table),
        ("Messages", messages_table),
        ("Wall time, in hours", wall_table),
        ("Dollars", dollars_table),
        ("Scoring once", scoring_table),
        ("Runs: GPU hours of one, dollars of k", runs_table),
    ):
        lines += ["", f"{title}:", "", *table(setup)]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
