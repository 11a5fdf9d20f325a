"""Compare `--selection accept` with constant weights, controls and the other rules.

    python -m benchmarks.experiments.acceptance --output_dir runs/acceptance \
        --corpora gsm8k_train.jsonl math_train.jsonl planetmath.jsonl

Run in the repository's root, with OMP_NUM_THREADS=1. A finished run is a line of
`benchmarks/experiments/acceptance.jsonl` and is not repeated. `const` weights all tokens 1, on the
packed sequences of the guided runs. `shuffled` has the weights of `accept` in a random order within
each micro-batch. The worlds are the text worlds of `worlds`, the demo's with 40 % wrong pages and
with none, and `KINDS` of the text worlds: older students, pages of one line, source code.
`RULE@TEACHER` has another teacher than that of the pages, such as one that should not help.
`RULE-curve` is evaluated ten times during training. `--table` prints the results so far, minus
those of `const`, seed by seed.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.experiments import methods
from benchmarks.experiments.ceiling import recorded_line
from benchmarks.experiments.worlds import SPOILS, DemoWorld, TextWorld, World, write_corpus
from vocagnolm.alignment import widen_spans
from vocagnolm.guidance import TokenGuidance
from vocagnolm.objective import Objective
from vocagnolm.run import train as run_train

RESULTS = Path(__file__).with_suffix(".jsonl")
# In addition to those of `methods`: the student as it begins; one that has read spoilt pages, or
# source code; the pages' own, with losses in 16 bits.
TEACHERS = (*methods.TEACHERS, "start", "junk", "code", "half")
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
    "dft": "--selection=dft",
    "stm": "--selection=stm",
    "eaft": "--selection=eaft",
}
MORE = {
    # Half and twice the learning rate.
    **{
        f"{rule}-lr{rate}": f"{RULES[rule]} --learning_rate={rate}"
        for rate in (0.0015, 0.006)
        for rule in ("const", "accept")
    },
    # The held-out loss, ten times in a run.
    **{
        f"{rule}-curve": f"{RULES[rule]} --eval_strategy=steps --eval_steps=0.1"
        for rule in ("cpt", "paper", "accept")
    },
    **{
        f"{rule}@{teacher}": options.replace("{losses}", f"{{losses-{teacher}}}")
        for teacher in TEACHERS
        for rule, options in (("accept", ACCEPT), ("share40", SHARE_40), ("paper", STORED))
    },
}
PARTS = 5  # of a run, and of the tokens by frequency; weights are averaged over each
DEMOS = ("demo", "demo-right")
METRICS = ("nats_per_character", "top1")
DEMO_METRICS = ("clean_loss", "accuracy")


class MoreWorld(TextWorld):
    """Real documents, with teachers that should not help."""

    def place(self, name: str, seed: int) -> Path:  # noqa: D102
        path = super().place(name, seed)
        if name.endswith("start"):
            return self.root / "needs" / f"{name}-{seed}"
        return self.root / "needs" / name if "junk" in name else path

    def make(self, name: str, path: Path, seed: int) -> None:  # noqa: D102
        if name == "losses-half":
            self.score("teacher", path, seed, "--loss_dtype=float16")
        else:
            super().make(name, path, seed)

    def make_start(self, path: Path, seed: int) -> None:
        """Link the student as it begins."""
        path.symlink_to(self.student(seed))

    def make_junk(self, path: Path, _: int) -> None:
        """Train a teacher on documents that are spoilt like the pages."""
        self._pretrain("teacher", "large", path, self.longer_steps, 1000, texts="junk_texts")

    def make_junk_texts(self, path: Path, _: int) -> None:
        """Write the texts that the teacher of `make_junk` reads."""
        rng = Random("junk")
        spoilt = (self.spoil(text, rng) for text in self.documents[2])
        write_corpus(path, [" ".join(piece for piece, _ in pieces) for pieces in spoilt])

    def make_code(self, path: Path, _: int) -> None:
        """Train a teacher on source code."""
        self._pretrain("teacher", "large", path, self.longer_steps, 1000, texts="code_texts")

    def make_code_texts(self, path: Path, _: int) -> None:
        """Write the texts that the teacher of `make_code` reads."""
        write_corpus(path, source_code())


class OldWorld(MoreWorld):
    """Students with four times as much first pretraining."""

    first_steps = 400

    def place(self, name: str, seed: int) -> Path:  # noqa: D102
        path = super().place(name, seed)
        return path.with_name(f"{self.first_steps}-{path.name}") if name == "base" else path


class ConvergedWorld(OldWorld):
    """Students that have read three times as much as the teacher."""

    first_steps = 1800


class ShortWorld(MoreWorld):
    """Pages of eight words. Such lines also judge students, because they forget longer texts."""

    page_documents, held_out_lines = 20_000, 1000

    @cached_property
    def documents(self) -> tuple[list[str], list[str], list[str]]:
        """The usual documents, with the held-out ones and the pages split into lines."""
        held_out, others, rest = super().documents
        return _lines(held_out)[: self.held_out_lines], _lines(others), rest


def _lines(texts: Sequence[str]) -> list[str]:
    """Split texts into lines of eight words, without repetitions."""
    found: dict[str, None] = {}
    for text in texts:
        words = text.split(" ")
        lines = (" ".join(words[at : at + 8]) for at in range(0, len(words), 8))
        found |= dict.fromkeys(line for line in lines if line.strip())
    return list(found)


class CodeWorld(MoreWorld):
    """Source code instead of mathematics."""

    shared = "code"

    @cached_property
    def _sources(self) -> dict[str, str]:
        return dict.fromkeys(source_code(), "")


def source_code() -> list[str]:
    """Return Python's standard library in pieces of 40 lines."""
    found = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-z]*/*.py")):
        if path.parent.name not in ("site-packages", "test", "idlelib"):
            lines = path.read_text(encoding="utf-8", errors="ignore").splitlines()
            found += ["\n".join(lines[at : at + 40]) for at in range(0, len(lines), 40)]
    return [text for text in found if text.strip()]


class RightWorld(DemoWorld):
    """The demo's world, without wrong solutions."""

    def make_pages(self, path: Path, seed: int) -> None:
        """Write problems among noise."""
        self._write_pages(path, seed, wrong_share=0.0)


KINDS = {"old": OldWorld, "converged": ConvergedWorld, "short": ShortWorld, "code": CodeWorld}
WORLDS = [*SPOILS, *(f"{spoilt}-{kind}" for spoilt in SPOILS for kind in KINDS), *DEMOS]


def make_world(name: str, root: Path, corpora: Sequence[Path]) -> World:
    """Return a world of `WORLDS`."""
    if name in DEMOS:
        return (DemoWorld if name == "demo" else RightWorld)(root / name)
    spoilt, _, kind = name.rpartition("-")
    if kind in KINDS:
        return KINDS[kind](root / name, corpora, SPOILS[spoilt])
    return MoreWorld(root / name, corpora, SPOILS[name])


class Weights:
    """Sums of the weights of a run, for all tokens and for unchanged and spoilt ones."""

    def __init__(self, world: World, *, shuffled: bool):
        self.world, self.shuffled = world, shuffled
        # For each quantity and each part: a sum and a count.
        self.parts: dict[str, list[list[float]]] = defaultdict(
            lambda: [[0.0, 0.0] for _ in range(PARTS)]
        )
        self.all: list[list[float]] = []  # of each micro-batch: sums of W, W^2 and 1
        self.kinds: dict[int, np.ndarray[Any, Any]] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Record the weights that a run selects, after shuffling them if `shuffled`."""
        make, select = run_train.VocAgnoTrainer, Objective.select

        def made(prepared: Any) -> Any:
            self.packed, self.trainer = prepared[2], make(prepared=prepared)
            return self.trainer

        def selected(objective: Objective, student: Any, batch: Any, teacher: Any = None) -> Any:
            found = select(objective, student, batch, teacher)
            if self.shuffled:
                found = shuffle_weights(found, batch["block"])
            self._add(found, objective.weights(found), batch)
            return found

        replaced = mock.patch.object(run_train, "VocAgnoTrainer", made)
        with replaced, selecting(selected):
            yield

    def _add(self, found: TokenGuidance, weight_BS: torch.Tensor, batch: Any) -> None:
        valid_BS, mapped_BS = found.valid_BS, found.mapped_BS & found.valid_BS
        totals = weight_BS.sum(), weight_BS.square().sum(), valid_BS.sum()
        self.all.append([*map(float, totals)])
        step = self.trainer.state.global_step * PARTS // self.trainer.state.max_steps
        self._average("weights", step, weight_BS, valid_BS)
        # The teacher is ahead where its loss is lower.
        is_ahead_BS = found.teacher_loss_BS < found.student_loss_BS
        self._average("ahead", step, is_ahead_BS.float(), mapped_BS)
        for block, weight_S, valid_S, ids_S in zip(
            batch["block"].tolist(), weight_BS, valid_BS, batch["input_ids"], strict=True
        ):
            kind_S = self._kinds(block, len(valid_S))
            fifth_S = self._fifths[ids_S]
            for kind, name in enumerate(("spoilt", "good")):
                chosen = torch.from_numpy(kind_S == kind) & valid_S
                self._average(name, step, weight_S, chosen)
                for fifth in range(PARTS):
                    self._average(f"{name}_fifths", fifth, weight_S, chosen & (fifth_S == fifth))

    def _average(self, name: str, part: int, value: torch.Tensor, chosen: torch.Tensor) -> None:
        sums = self.parts[name][part]
        sums[0] += float(value[chosen].sum())
        sums[1] += float(chosen.sum())

    @cached_property
    def _fifths(self) -> torch.Tensor:
        """The fifth of each vocabulary entry, rarest first; all have about as many tokens."""
        ids = np.concatenate(self.packed.segments.rows["student_ids"])
        counts = np.bincount(ids, minlength=self.trainer.model.config.vocab_size)
        order = counts.argsort(kind="stable")
        before = np.cumsum(counts[order]) - counts[order]
        fifths = np.empty_like(order)
        fifths[order] = before * PARTS // len(ids)
        return torch.from_numpy(fifths.clip(max=PARTS - 1))

    def _kinds(self, block: int, length: int) -> np.ndarray[Any, Any]:
        """Return 1 for the unchanged tokens of a sequence, 0 for spoilt ones, -1 for others."""
        if not isinstance(self.world, TextWorld):
            return np.full(length, -1)
        if block not in self.kinds:
            kind, at = np.full(length, -1), 0
            for place in self.packed.blocks.segments(block).tolist():
                row = self.packed.segments.rows[place]
                spans = row["start"] + widen_spans(row["student_codes"], row["student_exceptions"])
                spoilt = np.append(0, np.cumsum(~self.world.pages[row["document"]][1]))
                is_good = spoilt[spans[:, 1]] == spoilt[spans[:, 0]]
                kind[at + 1 : at + 1 + len(spans)] = is_good  # after the start token
                at += len(row["student_ids"])
            self.kinds[block] = kind
        return self.kinds[block]

    def read(self) -> dict[str, Any]:
        """Return the mean weight, the effective share of the tokens, and averages by parts."""
        weight, squares, tokens = (np.array(each) for each in zip(*self.all, strict=True))
        effective = (weight**2 / np.maximum(tokens * squares, 1e-9)).mean()
        found: dict[str, Any] = {"mean_weight": weight.sum() / tokens.sum(), "ess": effective}
        log = self.trainer.state.log_history
        evaluated = [entry for entry in log if "eval_loss" in entry]
        if len(evaluated) > 1:
            found["curve"] = [[entry["step"], entry["eval_loss"]] for entry in evaluated]
        for name, parts in self.parts.items():
            if sum(count for _, count in parts):
                found[name] = [round(total / max(count, 1), 4) for total, count in parts]
        return found


@contextmanager
def selecting(select: Callable[..., TokenGuidance]) -> Iterator[None]:
    """Let runs select tokens by another function, which gets the losses of whole batches."""
    with (
        mock.patch.object(Objective, "select", select),
        # Otherwise the head would compute weights that depend only on a token's own losses,
        # without `select`.
        mock.patch.object(Objective, "own_weights", return_value=None),
    ):
        yield


def shuffle_weights(found: TokenGuidance, block_B: torch.Tensor) -> TokenGuidance:
    """Permute the weights of the mapped tokens of a batch."""
    weight_BS, here_BS = found.weight_BS.clone(), found.mapped_BS & found.valid_BS
    generator = torch.Generator().manual_seed(int(block_B.sum()))
    values = weight_BS[here_BS]
    weight_BS[here_BS] = values[torch.randperm(len(values), generator=generator)]
    return found._replace(weight_BS=weight_BS)


def read_results() -> dict[tuple[str, int, str], dict[str, Any]]:
    """Return all finished runs by world, seed and rule."""
    rows = map(json.loads, RESULTS.read_text().splitlines() if RESULTS.exists() else ())
    return {(row["world"], row["seed"], row["rule"]): row for row in rows}


def do(world: World, name: str, seed: int, rule: str) -> None:
    """Make a run, and keep its results."""
    options, weights = (RULES | MORE)[rule], Weights(world, shuffled=rule == "shuffled")
    # Make these first, so that their training is not recorded.
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
    """Return tables of loss and top-1 or accuracy, minus those of `const`, and mean weights."""
    rows, lines = read_results(), []
    for world in worlds:
        loss, right = DEMO_METRICS if world in DEMOS else METRICS
        base = {seed: rows.get((world, seed, "const")) for seed in seeds}
        each = " ".join(f"{row[loss]:.3f}" for row in base.values() if row)
        lines += ["", f"{world}; const: {each}", recorded_line(world), ""]
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
    add("--worlds", nargs="+", choices=WORLDS, default=("noisy", "inserted-40", "clean"))
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
