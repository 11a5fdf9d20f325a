r"""Compare all methods of `train.py`, with equal students, text and order.

    python -m benchmarks.experiments.methods --output_dir runs/methods
    python -m benchmarks.experiments.methods --output_dir runs/methods \
        --runs vocagnolm top_k-0.6 --seeds 0
    python -m benchmarks.experiments.methods --output_dir runs/methods \
        --world noisy --corpora A.jsonl B.jsonl

Run in the repository's root, with OMP_NUM_THREADS=1. The world `demo` is the embedded one with 40 %
wrong pages. The others continue with real documents, unchanged or spoilt (`worlds`). A seed has its
own student, first pretraining and order, which all its runs share. A finished run is not repeated,
so you can interrupt the command, or give it again with other runs.

Writes `WORLD/results.json` and `results.md`. The table has a row per run, over the seeds that have
finished it. A second table shows the same minus CPT's numbers, seed by seed. The `oracle` knows
which tokens of the pages are unchanged, and selects that many. If it is not better than CPT, or if
`random-kept` is not worse, no selection can show anything. The first line is the world's ceiling,
by runs of `acceptance` on pages without mistakes. Seconds are processor time of
`train.py`: loading, alignment, training, one evaluation.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.experiments.ceiling import recorded_line
from benchmarks.experiments.worlds import (
    SPOILS,
    VOCABULARIES,
    WIDTHS_AND_LAYERS,
    DemoWorld,
    TextWorld,
    World,
)
from vocagnolm.demo.run import train
from vocagnolm.shell.io import write_json

RESULT_FILE, RESULTS_FILE, TABLE_FILE = "result.json", "results.json", "results.md"
BASELINE = "cpt"

# Options of train.py by the name of a run; {names} are needs of a world.
MODELS = dict.fromkeys(("student", "reference", "teacher"), "")  # judged as they are
METHODS = {
    "cpt": "--method=cpt",
    "random": "--method=random",
    "vocagnolm": "--teacher={teacher}",
    "vocagnolm-stored": "--teacher_losses={losses}",
    "kld": "--method=kld --teacher={reference}",
    "kld-forward": "--method=kld --kld_direction=forward --teacher={reference}",
    "rho1": "--method=rho1 --teacher={reference}",
    "rho1-entropy": (
        "--method=rho1 --rho1_score=loss_and_entropy --top_k=0.7 --teacher={reference}"
    ),
    "vocagnolm-reference": "--teacher={reference}",
    **{
        f"chunk-{n}": f"--method=chunk --chunks={n} --aggregation=mean --teacher={{teacher}}"
        for n in (8, 16, 32)
    },
    **{
        f"chunk-{n}-tokens": (
            f"--method=chunk --chunks={n} --chunk_selection=tokens --teacher={{teacher}}"
        )
        for n in (8, 16, 32)
    },
    **{
        f"chunk-{n}-random": f"--method=chunk --chunks={n} --chunk_guidance=random"
        for n in (8, 16, 32)
    },
    "uld": "--method=uld --uld_pairing=last --teacher={teacher}",
    "uld-position": "--method=uld --uld_pairing=position --teacher={teacher}",
}
SHARE = {  # not in the paper
    f"aggregation-share__top_k-{share}__floor-{floor}": (
        f"--aggregation=share --top_k={share} --unselected_weight={floor}"
        " --teacher_losses={losses}"
    )
    for share in (0.4, 0.7)
    for floor in (0.0, 0.3)
}
ABLATIONS = {
    **{
        f"unmapped-{unmapped}__aggregation-{aggregation}": (
            f"--unmapped={unmapped} --aggregation={aggregation} --teacher_losses={{losses}}"
        )
        for unmapped in ("include", "mean", "exclude")
        for aggregation in ("max", "mean", "sum")
        if (unmapped, aggregation) != ("include", "max")  # the defaults are vocagnolm-stored
    },
    **{
        f"top_k-{share}": f"--top_k={share} --teacher_losses={{losses}}"
        for share in (0.5, 0.6, 0.7, 0.8)
    },
    "selection_scope-batch": "--selection_scope=batch --teacher_losses={losses}",
    "loss_divisor-selected": "--loss_divisor=selected --teacher_losses={losses}",
    "attend_across_documents-true": "--attend_across_documents=true --teacher={teacher}",
    **{
        f"teachers-{how}": f"--teacher {{teacher}} {{reference}} --teacher_reduction={how}"
        for how in ("min", "mean", "max")
    },
    **{
        f"uld_weight-{weight}": f"--method=uld --uld_weight={weight} --teacher={{teacher}}"
        for weight in (0.3, 1.0, 1.5)
    },
}
TEACHERS = [f"{name}-{size}" for name in VOCABULARIES for size in WIDTHS_AND_LAYERS]
TEXT_RUNS = {
    **{name: METHODS[name] for name in ("cpt", "random", "vocagnolm-stored", "rho1-entropy")},
    **{name: METHODS[name] for name in ("chunk-32-random", "kld", "uld", "uld-position")},
    "oracle": "--selection_scope=batch --top_k={kept_share} --teacher_losses={oracle_losses}",
    "random-kept": "--method=random --top_k={kept_share}",
    "dft": "--selection=dft",
    "stm": "--selection=stm",
    "eaft": "--selection=eaft",
    "rho1-stored": "--method=rho1 --teacher_losses={reference_losses}",
    "chunk-32-stored": "--method=chunk --chunks=32 --teacher_losses={losses}",
    # Teachers of each tokenizer and size, with the paper's aggregation and with share.
    **{
        f"{teacher}__{rule}": f"--aggregation={rule} --teacher_losses={{losses-{teacher}}}"
        for teacher in TEACHERS
        for rule in ("max", "share")
    },
}
RUNS = {
    "demo": MODELS | METHODS | SHARE | ABLATIONS,
    **dict.fromkeys(SPOILS, MODELS | dict.fromkeys(TEACHERS, "") | TEXT_RUNS | SHARE),
}

Results = dict[str, dict[int, dict[str, float]]]  # by run and seed


class _Needs(dict[str, Path | str]):
    """The needs that options name, which are made when they are looked up."""

    def __init__(self, world: World, seed: int):
        super().__init__()
        self.world, self.seed = world, seed

    def __missing__(self, name: str) -> Path | str:
        if name == "kept_share" and isinstance(self.world, TextWorld):
            return f"{self.world.kept_share:.3f}"
        return self.world.need(name, self.seed)


def do(world: World, name: str, run: str, seed: int) -> None:
    """Train and judge a student, unless that is done.

    Args:
        world: the world of the run.
        name: the name of the run.
        run: its options.
        seed: the seed of the student, of its first pretraining and of its order.
    """
    directory = world.seed_dir(seed) / name
    if _finished(directory, run):
        return
    shutil.rmtree(directory, ignore_errors=True)
    if not run:
        directory.mkdir(parents=True)
        model = world.student(seed) if name == "student" else world.need(name, seed)
        seconds = 0.0
    else:
        model, seconds = directory, _train(world, directory, run, seed)
    result = {"run": run, **world.judge(model), "seconds": seconds}
    write_json(directory / RESULT_FILE, result)


def _train(world: World, directory: Path, run: str, seed: int) -> float:
    """Run `train.py`, and return its processor time in seconds."""
    needs = _Needs(world, seed)
    options = [f"--seed={seed}", "--eval_strategy=no", f"--eval_dataset={needs['clean']}"]
    options += [option.format_map(needs) for option in run.split()]
    student, pages = world.student(seed), world.need("pages", seed)
    started = time.process_time()
    train(student, pages, directory, *world.options, *options)
    return time.process_time() - started


def _finished(directory: Path, run: str) -> dict[str, float]:
    """Return a run's results, or nothing if it is not finished or had other options."""
    file = directory / RESULT_FILE
    result: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"run": None}
    return result if result.pop("run") == run else {}


def collect(world: World, runs: Mapping[str, str]) -> Results:
    """Return all finished results."""
    seeds = sorted(int(path.name.removeprefix("seed")) for path in world.root.glob("seed*"))
    results: Results = {}
    for name, run in runs.items():
        for seed in seeds:
            if found := _finished(world.seed_dir(seed) / name, run):
                results.setdefault(name, {})[seed] = found
    return results


def table(results: Results) -> str:
    """Return a Markdown table of means and standard deviations over the seeds."""
    first, *others = next(iter(next(iter(results.values())).values()))
    lines = [f"| run | seeds | {' | '.join([first, 'each seed', *others])} |"]
    lines.append("|---" * (len(others) + 4) + "|")
    for name, rows in results.items():
        columns = {metric: [row[metric] for row in rows.values()] for metric in (first, *others)}
        each = " ".join(f"{value:.3f}".removeprefix("0") for value in columns[first])
        spreads = [_spread(columns[x], 1 if x == "seconds" else 3) for x in (first, *others)]
        cells = [name, " ".join(map(str, rows)), spreads[0], each, *spreads[1:]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def paired(results: Results) -> Results:
    """Return each run's results minus those of plain pretraining, seed by seed."""
    base = results.get(BASELINE, {})
    found: Results = {}
    for name, rows in results.items():
        for seed, row in rows.items():
            if name != BASELINE and seed in base:
                less = {metric: value - base[seed][metric] for metric, value in row.items()}
                found.setdefault(name, {})[seed] = less
    return found


def _spread(values: Sequence[float], digits: int) -> str:
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if len(values) < 2 else f"{mean} +- {statistics.stdev(values):.{digits}f}"


def write(world: World, runs: Mapping[str, str]) -> str:
    """Write all finished results, and return them as Markdown."""
    results = collect(world, runs)
    (world.root / RESULTS_FILE).write_text(json.dumps({"runs": results}, indent=1) + "\n")
    lines = [recorded_line(world.root.name), "", table(results), ""]
    if differences := paired(results):
        lines += [f"Less {BASELINE}, seed by seed:", "", table(differences), ""]
    (world.root / TABLE_FILE).write_text("\n".join(lines) + "\n")
    return "\n".join(lines)


def main() -> None:
    """Do the runs, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--output_dir", type=Path, required=True, help="gets a directory for each world")
    add("--world", choices=RUNS, default="demo")
    add("--corpora", type=Path, nargs="+", help=".jsonl files of documents, for all but demo")
    add("--seeds", type=int, nargs="+", default=(0, 1, 2))
    add("--runs", nargs="+", metavar="NAME", help="default: all of the world")
    arguments = parser.parse_args()
    runs = RUNS[arguments.world]
    if unknown := set(arguments.runs or ()) - set(runs):
        parser.error(f"--runs: {', '.join(sorted(unknown))} not among {', '.join(runs)}")
    if (arguments.world == "demo") != (arguments.corpora is None):
        parser.error("--corpora is for every --world but demo, which all need it")
    torch.set_num_threads(1)
    root: Path = arguments.output_dir.resolve() / arguments.world
    world: World = DemoWorld(root)
    if arguments.corpora:
        world = TextWorld(root, arguments.corpora, SPOILS[arguments.world])
    for name in arguments.runs or runs:
        for seed in arguments.seeds:
            do(world, name, runs[name], seed)
    sys.stdout.write(write(world, runs) + "\n")


if __name__ == "__main__":
    main()
