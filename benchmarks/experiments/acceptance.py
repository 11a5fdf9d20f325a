"""`--selection accept` beside constant weights, controls and the other rules.

    python -m benchmarks.experiments.acceptance --output_dir runs/acceptance \
        --corpora gsm8k_train.jsonl math_train.jsonl planetmath.jsonl

Run in the repository's root, with OMP_NUM_THREADS=1. A finished run is a line of
`benchmarks/experiments/acceptance.jsonl` and is not repeated. `const` weighs all tokens 1, on the
packed sequences of the guided runs; `shuffled` has the weights of `accept` in a random order within
each micro-batch. Worlds are those of `worlds`, the demo's with 40 % wrong pages and with none;
students of `OLD` worlds have read four times as much before. `--table` prints what there is, less
`const`, seed by seed.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.experiments import methods
from benchmarks.experiments.worlds import SPOILS, DemoWorld, TextWorld, World
from vocagnolm.alignment import widen_spans
from vocagnolm.guidance import TokenGuidance
from vocagnolm.objective import Objective
from vocagnolm.run import train as run_train

RESULTS = Path(__file__).with_suffix(".jsonl")
STORED = "--teacher_losses={losses}"
ACCEPT = f"--selection=accept {STORED}"
SHARE_40 = f"--aggregation=share {STORED}"
RULES = {
    "const": f"--top_k=1 {STORED}",
    "accept": ACCEPT,
    "shuffled": ACCEPT,
    "paper": STORED,
    "share40": SHARE_40,
    "share70f3": f"--top_k=0.7 --unselected_weight=0.3 {SHARE_40}",
    "cpt": "--method=cpt",
    "random": "--method=random",
    "rho1": "--method=rho1 --teacher_losses={reference_losses}",
    "rho1-accept": "--method=rho1 --selection=accept --teacher_losses={reference_losses}",
}
MORE = {
    "const-lr.0015": f"{RULES['const']} --learning_rate=0.0015",
    "const-lr.006": f"{RULES['const']} --learning_rate=0.006",
    **{
        f"{rule}@{teacher}": options.replace("{losses}", f"{{losses-{teacher}}}")
        for teacher in methods.TEACHERS
        for rule, options in (("accept", ACCEPT), ("share40", SHARE_40))
    },
}
PARTS = 5  # of a run, for which weights are averaged
OLD = [f"{name}-old" for name in SPOILS]
DEMOS = ("demo", "demo-right")
METRICS = ("nats_per_character", "top1")
DEMO_METRICS = ("clean_loss", "accuracy")


class OldWorld(TextWorld):
    """Students that have read more before."""

    first_steps = 400

    def place(self, name: str, seed: int) -> Path:  # noqa: D102
        path = super().place(name, seed)
        return path.with_name(f"old-{path.name}") if name == "base" else path


class RightWorld(DemoWorld):
    """The demo's, without wrong solutions."""

    def make_pages(self, path: Path, seed: int) -> None:
        """Problems among noise."""
        self._write_pages(path, seed, wrong_share=0.0)


def make_world(name: str, root: Path, corpora: Sequence[Path]) -> World:
    """Return a world of this page."""
    if name in DEMOS:
        return (DemoWorld if name == "demo" else RightWorld)(root / name)
    kind = OldWorld if name in OLD else TextWorld
    return kind(root / name, corpora, SPOILS[name.removesuffix("-old")])


class Weights:
    """Sums of the weights of a run, and of its tokens that are as they were or spoilt."""

    def __init__(self, world: World, *, shuffled: bool):
        self.world, self.shuffled = world, shuffled
        self.parts: dict[str, list[list[float]]] = {}
        self.all: list[list[float]] = []  # of a micro-batch: sums of W, W^2 and 1
        self.kinds: dict[int, np.ndarray[Any, Any]] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look at, and shuffle, what a run selects."""
        make, select = run_train.make_trainer, Objective.select

        def made(job: Any, models: Any, documents: Any) -> Any:
            self.documents, self.trainer = documents, make(job, models, documents)
            return self.trainer

        def selected(objective: Objective, student: Any, batch: Any, teacher: Any = None) -> Any:
            found = select(objective, student, batch, teacher)
            if self.shuffled:
                found = _shuffled(found, batch["block"])
            self._add(objective.weights(found), found.valid_BS, batch["block"].tolist())
            return found

        replaced = mock.patch.object(run_train, "make_trainer", made)
        with replaced, mock.patch.object(Objective, "select", selected):
            yield

    def _add(self, weight_BS: torch.Tensor, valid_BS: torch.Tensor, blocks: list[int]) -> None:
        totals = weight_BS.sum(), weight_BS.square().sum(), valid_BS.sum()
        self.all.append([*map(float, totals)])
        step = self.trainer.state.global_step * PARTS // self.trainer.state.max_steps
        for block, weight_S, valid_S in zip(blocks, weight_BS, valid_BS, strict=True):
            kind_S = self._kinds(block, len(valid_S))
            for kind, name in enumerate(("spoilt", "good")):
                chosen = torch.from_numpy(kind_S == kind) & valid_S
                sums = self.parts.setdefault(name, [[0.0, 0.0] for _ in range(PARTS)])[step]
                sums[0] += float(weight_S[chosen].sum())
                sums[1] += float(chosen.sum())

    def _kinds(self, block: int, length: int) -> np.ndarray[Any, Any]:
        """1 for the tokens of a sequence that are as they were, 0 for spoilt, -1 for others."""
        if not isinstance(self.world, TextWorld):
            return np.full(length, -1)
        if block not in self.kinds:
            kind, at = np.full(length, -1), 0
            for place in self.documents.blocks.segments(block).tolist():
                row = self.documents.segments.rows[place]
                spans = row["start"] + widen_spans(row["student_steps"], row["student_jumps"])
                spoilt = np.append(0, np.cumsum(~self.world.pages[row["document"]][1]))
                is_good = spoilt[spans[:, 1]] == spoilt[spans[:, 0]]
                kind[at + 1 : at + 1 + len(spans)] = is_good  # behind the start token
                at += len(row["student_ids"])
            self.kinds[block] = kind
        return self.kinds[block]

    def read(self) -> dict[str, Any]:
        """Return the mean weight, the effective share of the tokens, and weights by parts."""
        weight, squares, tokens = (np.array(each) for each in zip(*self.all, strict=True))
        effective = (weight**2 / np.maximum(tokens * squares, 1e-9)).mean()
        found: dict[str, Any] = {"mean_weight": weight.sum() / tokens.sum(), "ess": effective}
        for name, parts in self.parts.items():
            if sum(count for _, count in parts):
                found[name] = [round(total / max(count, 1), 4) for total, count in parts]
        return found


def _shuffled(found: TokenGuidance, block_B: torch.Tensor) -> TokenGuidance:
    """Permute the weights of the mapped tokens of a batch."""
    weight_BS, here_BS = found.weight_BS.clone(), found.mapped_BS & found.valid_BS
    generator = torch.Generator().manual_seed(int(block_B.sum()))
    values = weight_BS[here_BS]
    weight_BS[here_BS] = values[torch.randperm(len(values), generator=generator)]
    return found._replace(weight_BS=weight_BS)


def read_results() -> dict[tuple[str, int, str], dict[str, Any]]:
    """All finished runs by world, seed and rule."""
    rows = map(json.loads, RESULTS.read_text().splitlines() if RESULTS.exists() else ())
    return {(row["world"], row["seed"], row["rule"]): row for row in rows}


def do(world: World, name: str, seed: int, rule: str) -> None:
    """Make a run, and keep its results."""
    options, weights = (RULES | MORE)[rule], Weights(world, shuffled=rule == "shuffled")
    # Their training is not watched.
    for need in {"base", "clean", "pages", *re.findall(r"{(.*?)}", options)}:
        world.need(need, seed)
    with weights.watched():
        methods.do(world, rule, options, seed)
    result = json.loads((world.seed_dir(seed) / rule / methods.RESULT_FILE).read_text())
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    row = {"world": name, "seed": seed, "rule": rule, "options": options}
    row |= {metric: round(x, 5) for metric, x in result.items() if metric not in ("run", "seconds")}
    row |= {k: v if isinstance(v, list) else round(v, 4) for k, v in weights.read().items()}
    row |= {"seconds": round(result["seconds"]), "commit": commit.stdout.strip()}
    with RESULTS.open("a") as file:
        file.write(json.dumps(row) + "\n")


def table(worlds: Sequence[str], seeds: Sequence[int]) -> str:
    """Loss less that of `const`, mean and seed by seed; top-1 or accuracy; mean weight."""
    rows, lines = read_results(), []
    for world in worlds:
        loss, right = DEMO_METRICS if world in DEMOS else METRICS
        base = {seed: rows.get((world, seed, "const")) for seed in seeds}
        each = " ".join(f"{row[loss]:.3f}" for row in base.values() if row)
        lines += ["", f"{world}; const: {each}", ""]
        lines += [
            f"| rule | {loss} | each seed | {right}, in % | mean weight |",
            "|---|---|---|---|---|",
        ]
        for rule in RULES | MORE:
            found: dict[str, list[float]] = defaultdict(list)
            for seed, than in base.items():
                if than and (row := rows.get((world, seed, rule))):
                    found["nats"].append(row[loss] - than[loss])
                    found["top1"].append(100 * (row[right] - than[right]))
                    found["weight"].append(row["mean_weight"])
            if found:
                means = [statistics.mean(values) for values in found.values()]
                each = " ".join(f"{value:+.3f}".replace("0.", ".") for value in found["nats"])
                cells = [rule, f"{means[0]:+.3f}".replace("0.", "."), each]
                lines.append(f"| {' | '.join(cells)} | {means[1]:+.2f} | {means[2]:.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Do the runs, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--output_dir", type=Path)
    add("--corpora", type=Path, nargs="+", default=(), help=".jsonl files of documents")
    add(
        "--worlds",
        nargs="+",
        choices=[*SPOILS, *OLD, *DEMOS],
        default=("noisy", "inserted-40", "clean"),
    )
    add("--seeds", type=int, nargs="+", default=range(10, 15))
    add("--rules", nargs="+", choices=RULES | MORE, default=[*RULES])
    add("--table", action="store_true", help="run nothing")
    arguments = parser.parse_args()
    if not arguments.table:
        torch.set_num_threads(1)
        root = arguments.output_dir.resolve()
        paths = [path.resolve() for path in arguments.corpora]
        worlds = {name: make_world(name, root, paths) for name in arguments.worlds}
        for seed in arguments.seeds:
            for rule in arguments.rules:
                for name, world in worlds.items():
                    if (name, seed, rule) not in read_results():
                        do(world, name, seed, rule)
    sys.stdout.write(table(arguments.worlds, arguments.seeds) + "\n")


if __name__ == "__main__":
    main()
