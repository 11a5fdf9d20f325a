"""Which tokens would be trained on under other settings or teachers: no model is loaded.

    vocagnolm score --teacher STUDENT --dataset D --output_dir S0     # the student's own losses
    vocagnolm reselect --student STUDENT --student_losses S0 --teacher_losses S1 S2 --dataset D

Every combination of the settings given is compared with the first one. A store is what any model
thinks of its own tokens, so the student's losses are a store too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vocagnolm.collator import Batch, PackedCollator
from vocagnolm.conventions import IGNORED_LABEL
from vocagnolm.corpus import TEXT, load_corpus
from vocagnolm.data import align_corpus
from vocagnolm.guidance import AGGREGATIONS, UNMAPPED_STRATEGIES
from vocagnolm.objective import Method, Objective
from vocagnolm.packing import Blocks
from vocagnolm.store.reader import StoredReader
from vocagnolm.store.store import Store
from vocagnolm.teacher import StoredTeacher
from vocagnolm.tokenizers import load_tokenizer, student_reader, tokenizer_sha256

BATCH = 16  # blocks looked at together
SHOWN = 8  # tokens that change most

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Setting:
    """A teacher, by the name of its store, and a way to choose tokens by its losses."""

    teacher: str
    method: Method

    def __str__(self) -> str:
        method = self.method
        return f"{self.teacher}, {method.aggregation}, {method.unmapped}, top {method.top_k:g}"

    def to_json(self) -> dict[str, object]:
        """Return what may differ between two settings."""
        names = ("aggregation", "unmapped", "top_k")
        return {"teacher": self.teacher} | {name: getattr(self.method, name) for name in names}


@dataclass(frozen=True)
class Selections:
    """How often tokens are chosen, and chosen together.

    Attributes:
        settings: in the order of all arrays.
        tokens: label tokens that were looked at.
        together: [N, N], tokens that both settings choose; the diagonal counts those of one.
        gained: [N, V], by token id, those that a setting chooses and the first one does not.
        lost: [N, V], the other way round.
    """

    settings: list[Setting]
    tokens: int
    together: IntArray
    gained: IntArray
    lost: IntArray

    def overlap(self) -> npt.NDArray[np.float64]:
        """Tokens that both settings choose, as a share of those that either chooses (Jaccard)."""
        own = np.diag(self.together)
        either = np.maximum(own[:, None] + own[None, :] - self.together, 1)
        return np.asarray(self.together / either, np.float64)


def reselect(
    blocks: Blocks, collator: PackedCollator, settings: Sequence[Setting], vocabulary: int
) -> Selections:
    """Choose tokens under every setting.

    Args:
        blocks: whose first store holds the student's losses, and the others those of the teachers.
        collator: of the blocks.
        settings: their teachers are named in the order of the stores.
        vocabulary: of the student, in tokens.
    """
    count = len(settings)
    together = np.zeros((count, count), np.int64)
    gained, lost = (np.zeros((count, vocabulary), np.int64) for _ in range(2))
    tokens = 0
    for batch in _batches(blocks, collator):
        ids = batch["input_ids"].flatten().numpy()
        valid_BS = batch["labels"] != IGNORED_LABEL
        tokens += int(valid_BS.sum())
        chosen = np.stack([row.numpy() for row in _selections(batch, valid_BS, settings)])
        as_numbers = chosen.astype(np.float64)  # a matrix product of integers is slow
        together += (as_numbers @ as_numbers.T).astype(np.int64)
        for number, row in enumerate(chosen):
            gained[number] += np.bincount(ids[row & ~chosen[0]], minlength=vocabulary)
            lost[number] += np.bincount(ids[chosen[0] & ~row], minlength=vocabulary)
    return Selections(list(settings), tokens, together, gained, lost)


def _batches(blocks: Blocks, collator: PackedCollator) -> Iterator[Batch]:
    for first in range(0, len(blocks), BATCH):
        yield collator([blocks[n] for n in range(first, min(first + BATCH, len(blocks)))])


def _selections(batch: Batch, valid_BS: Tensor, settings: Sequence[Setting]) -> Iterator[Tensor]:
    """Choose the tokens of a batch under each setting, flat."""
    positions = valid_BS.shape[1]
    losses = StoredTeacher().losses(batch)
    student_BS = _own_losses(batch, losses.loss_BT, positions)
    names = list(dict.fromkeys(setting.teacher for setting in settings))
    for setting in settings:
        # Ranges are those of one store after those of another, and the first one is the student's.
        first = (1 + names.index(setting.teacher)) * positions
        alone = batch.copy()
        alone["teacher_ranges"] = batch["teacher_ranges"][:, first : first + positions]
        weight_BS = Objective(setting.method).select(student_BS, alone, losses).weight_BS
        yield weight_BS.flatten().bool()


def _own_losses(batch: Batch, loss_BT: Tensor, positions: int) -> Tensor:
    """The student's losses on its own tokens [B, S], from the first store.

    Tokens that share a character, as the bytes of an emoji do, are all mapped to all of them; the
    first is the first of these, and so on.
    """
    range_BS2 = batch["teacher_ranges"][:, :positions]
    first_BS, last_BS = range_BS2.unbind(-1)
    is_new_BS = torch.ones_like(first_BS, dtype=torch.bool)
    is_new_BS[:, 1:] = (range_BS2[:, 1:] != range_BS2[:, :-1]).any(-1)
    position_S = torch.arange(positions)
    start_BS = torch.where(is_new_BS, position_S, 0).cummax(-1).values
    own_BS = (first_BS + position_S - start_BS).clamp(min=0).minimum((last_BS - 1).clamp(min=0))
    return loss_BT.gather(-1, own_BS).masked_fill(first_BS < 0, 0.0)


def table(selections: Selections, tokenizer: Any) -> str:
    """How every setting differs from the first one, as Markdown."""
    own, overlap = np.diag(selections.together), selections.overlap()
    rows = [["setting", "tokens", "also in the first", "overlap", "gains most", "loses most"]]
    for number, setting in enumerate(selections.settings):
        rows.append(
            [
                str(setting),
                f"{own[number] / max(selections.tokens, 1):.1%}",
                f"{selections.together[number, 0] / max(own[number], 1):.1%}",
                f"{overlap[number, 0]:.3f}",
                _most(selections.gained[number], tokenizer),
                _most(selections.lost[number], tokenizer),
            ]
        )
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "\n".join(lines) + "\n"


def _most(counts: IntArray, tokenizer: Any) -> str:
    order = [int(i) for i in np.argsort(-counts, kind="stable")[:SHOWN] if counts[i]]
    return ", ".join(f"{tokenizer.decode([i])!r} {counts[i]:,}" for i in order) or "-"


def draw(selections: Selections, path: Path) -> None:
    """Draw the overlap of all pairs of settings."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    overlap, names = selections.overlap(), list(map(str, selections.settings))
    size = 3 + 0.45 * len(names)
    figure, axes = pyplot.subplots(figsize=(size + 2, size), layout="constrained")
    image = axes.imshow(overlap, cmap="gray_r", vmin=0, vmax=1)
    axes.set_xticks(range(len(names)), names, rotation=90, fontsize=7)
    axes.set_yticks(range(len(names)), names, fontsize=7)
    for (row, column), value in np.ndenumerate(overlap):
        color = "white" if value > 0.5 else "black"
        axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=6, color=color)
    figure.colorbar(image, label="overlap of the chosen tokens (Jaccard)")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="vocagnolm reselect",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--student", required=True, help="Whose tokens: a hub name or a directory.")
    add("--student_losses", type=Path, required=True, help="A store of the student's own losses.")
    add("--teacher_losses", type=Path, nargs="+", required=True, help="Stores of teachers.")
    add("--dataset", required=True, help="What all of them have scored.")
    add("--dataset_config", help="Configuration of a hub dataset.")
    add("--dataset_split", default="train", help="Split of a hub dataset.")
    add("--text_column", default=TEXT, help="Column that holds the text.")
    add("--max_length", type=int, default=2048, help="Student tokens of a block.")
    add("--top_k", type=float, nargs="+", default=[0.4], help="Shares of the tokens, Eq. 4.")
    add("--aggregation", nargs="+", choices=AGGREGATIONS, default=["max"], help="Eq. 2.")
    add("--unmapped", nargs="+", choices=UNMAPPED_STRATEGIES, default=["include"])
    add("--output_dir", type=Path, help="Gets reselect.json, reselect.md and reselect.png.")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Compare settings and return the exit status: 0, or 2 for a wrong argument or file."""
    try:
        arguments = parse(argv)
        tokenizer = load_tokenizer(arguments.student, "student")
        selections = reselect(*load(arguments, tokenizer), len(tokenizer))
        text = table(selections, tokenizer)
        if arguments.output_dir:
            write(selections, text, arguments.output_dir)
    except (OSError, ValueError) as error:
        print("vocagnolm reselect: error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    print(text)
    return 0


def load(
    arguments: argparse.Namespace, tokenizer: Any
) -> tuple[Blocks, PackedCollator, list[Setting]]:
    """Read the stores and the corpus.

    Raises:
        ValueError: a store is damaged, lacks documents, or is not the student's.
    """
    if arguments.max_length < 4:
        raise ValueError(f"--max_length must be at least 4, got {arguments.max_length}")
    stores = [Store(path) for path in (arguments.student_losses, *arguments.teacher_losses)]
    for store in stores:
        store.check()
    reader, stored = student_reader(tokenizer, arguments.max_length), StoredReader(stores)
    if stores[0].manifest["tokenizer_sha256"] != tokenizer_sha256(tokenizer):
        raise ValueError(
            f"--student_losses {arguments.student_losses} was scored by "
            f"{stores[0].manifest['teacher']} with another tokenizer than --student "
            f"{arguments.student}: score the corpus with this student"
        )
    corpus = load_corpus(
        arguments.dataset,
        split=arguments.dataset_split,
        text_column=arguments.text_column,
        config_name=arguments.dataset_config,
    )
    segments = align_corpus(corpus, reader, stored)
    if segments.skipped:
        print(f"{len(segments.skipped):,} documents are not in all stores", file=sys.stderr)
    if not len(segments.rows):
        raise ValueError(f"--dataset {arguments.dataset} has no document that all stores have")
    # A name may be given to several teachers, so the place of a store is its name here.
    names = [path.name for path in arguments.teacher_losses]
    if len(set(names)) < len(names):
        names = list(map(str, arguments.teacher_losses))
    settings = [
        Setting(name, Method("vocagnolm", top_k, aggregation, unmapped))
        for name, aggregation, unmapped, top_k in itertools.product(
            names, arguments.aggregation, arguments.unmapped, arguments.top_k
        )
    ]
    length = arguments.max_length
    blocks = Blocks(segments.rows, length, stored.limits())
    return blocks, PackedCollator(length, teacher_max_length=stored.limits()), settings


def write(selections: Selections, text: str, directory: Path) -> None:
    """Write `reselect.json`, `reselect.md` and `reselect.png`."""
    directory.mkdir(parents=True, exist_ok=True)
    content = {
        "settings": [setting.to_json() for setting in selections.settings],
        "tokens": selections.tokens,
        "together": selections.together.tolist(),
        "overlap": selections.overlap().tolist(),
    }
    (directory / "reselect.json").write_text(json.dumps(content, indent=1) + "\n")
    (directory / "reselect.md").write_text(text, encoding="utf-8")
    draw(selections, directory / "reselect.png")
