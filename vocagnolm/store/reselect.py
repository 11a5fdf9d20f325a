"""Tokens chosen under other settings or by other teachers, from stores: no model is loaded.

A store holds the losses of any model on its own tokens, so the student's losses are a store, too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import datasets
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from vocagnolm.chat.render import Template
from vocagnolm.cli import note
from vocagnolm.collator import Batch, PackedCollator
from vocagnolm.conventions import IGNORED_LABEL
from vocagnolm.data import align_corpus
from vocagnolm.io import markdown_table, write_json, write_text
from vocagnolm.objective import Method, Objective
from vocagnolm.packing import Blocks, IntArray
from vocagnolm.readers import student_reader
from vocagnolm.report.plots import new_plot, save_plot
from vocagnolm.store.reader import StoredReader
from vocagnolm.store.store import Store
from vocagnolm.teacher import StoredTeacher
from vocagnolm.texts.tokenizers import tokenizer_sha256

_BATCH = 16  # blocks looked at together
_SHOWN = 8  # tokens that change most


@dataclass(frozen=True)
class Candidate:
    """A teacher, by its store, and the settings to choose tokens by its losses."""

    # Its number, of which 0 is the student's own.
    store: int
    teacher: str
    method: Method

    def __str__(self) -> str:
        method = self.method
        return f"{self.teacher}, {method.aggregation}, {method.unmapped}, top {method.top_k:g}"

    def to_json(self) -> dict[str, object]:
        """Return what may differ between two candidates."""
        names = ("aggregation", "unmapped", "top_k")
        return {"teacher": self.teacher} | {name: getattr(self.method, name) for name in names}


@dataclass(frozen=True)
class Selections:
    """Counts of the tokens that N candidates choose, alone and together."""

    candidates: list[Candidate]
    # Label tokens that were looked at.
    tokens: int
    # [N, N], those that both candidates choose; the diagonal counts those of one.
    together: IntArray
    # [N, V], by token id, those that a candidate chooses and the first one does not; and reversed.
    gained: IntArray
    lost: IntArray

    def overlap(self) -> npt.NDArray[np.float64]:
        """Return the tokens that both choose as a share of those that either chooses (Jaccard)."""
        own = np.diag(self.together)
        either = np.maximum(own[:, None] + own[None, :] - self.together, 1)
        return np.asarray(self.together / either, np.float64)


def align_stores(
    stores: Sequence[Store],
    tokenizer: PreTrainedTokenizerBase,
    corpus: datasets.Dataset,
    max_length: int,
) -> tuple[Blocks, PackedCollator]:
    """Check the stores, and pack the documents that all of them have into blocks.

    The first store has the losses of the student itself, whose tokenizer this is.
    """
    stored = StoredReader(stores)
    stored.check()
    own = stores[0]
    if own.manifest["tokenizer_sha256"] != tokenizer_sha256(tokenizer):
        raise ValueError(
            f"--student_losses {own.directory} was scored by {own.manifest['teacher']} with "
            f"another tokenizer than --student {tokenizer.name_or_path}: score the corpus with "
            "this student"
        )
    reader = student_reader(tokenizer, max_length)
    if "chat_template" in own.manifest:
        reader = replace(reader, template=Template.of_json(own.manifest))
    segments = align_corpus(corpus, reader, stored)
    if segments.skipped:
        note(f"{len(segments.skipped):,} documents are not in all stores")
    if not len(segments.rows):
        raise ValueError("--dataset has no document that all stores have")
    limits = stored.limits()
    blocks = Blocks(segments.rows, max_length, limits)
    return blocks, PackedCollator(max_length, teacher_max_length=limits, shares=True)


def reselect(
    blocks: Blocks, collator: PackedCollator, candidates: Sequence[Candidate], vocabulary: int
) -> Selections:
    """Choose tokens under every candidate, of a student with a vocabulary of that size."""
    count = len(candidates)
    together = np.zeros((count, count), np.int64)
    gained, lost = (np.zeros((count, vocabulary), np.int64) for _ in range(2))
    tokens = 0
    for first in range(0, len(blocks), _BATCH):
        batch = collator([blocks[n] for n in range(first, min(first + _BATCH, len(blocks)))])
        ids = batch["input_ids"].flatten().numpy()
        tokens += int((batch["labels"] != IGNORED_LABEL).sum())
        chosen = np.stack([row.numpy() for row in _selections(batch, candidates)])
        # A matrix product of integers is slow.
        as_numbers = chosen.astype(np.float64)
        together += (as_numbers @ as_numbers.T).astype(np.int64)
        for number, row in enumerate(chosen):
            gained[number] += np.bincount(ids[row & ~chosen[0]], minlength=vocabulary)
            lost[number] += np.bincount(ids[chosen[0] & ~row], minlength=vocabulary)
    return Selections(list(candidates), tokens, together, gained, lost)


def _selections(batch: Batch, candidates: Sequence[Candidate]) -> Iterator[Tensor]:
    """Choose the tokens of a batch under each candidate, flat."""
    positions = batch["labels"].shape[1]
    losses = StoredTeacher().losses(batch)
    student_BS = _own_losses(batch, losses.loss_BT, positions)
    for candidate in candidates:
        # The ranges of one store follow those of another.
        own = slice(candidate.store * positions, (candidate.store + 1) * positions)
        alone: Batch = {**batch}
        alone["teacher_ranges"] = batch["teacher_ranges"][:, own]
        alone["teacher_shares"] = batch["teacher_shares"][:, own]
        guidance = Objective(candidate.method).select(student_BS, alone, losses)
        yield guidance.weight_BS.flatten().bool()


def _own_losses(batch: Batch, loss_BT: Tensor, positions: int) -> Tensor:
    """Return the student's losses on its own tokens [B, S], from the first store."""
    # Tokens that share a character, as the bytes of an emoji do, are all mapped to all of them:
    #
    #     token      0        1        2        3        4
    #     range      [0, 1)   [1, 4)   [1, 4)   [1, 4)   [4, 5)
    #     is_new     yes      yes      no       no       yes
    #     start      0        1        1        1        4        first token of the same range
    #     own        0        1 + 0    1 + 1    1 + 2    4        first + (position - start)
    range_BS2 = batch["teacher_ranges"][:, :positions]
    first_BS, last_BS = range_BS2.unbind(-1)
    is_new_BS = torch.ones_like(first_BS, dtype=torch.bool)
    is_new_BS[:, 1:] = (range_BS2[:, 1:] != range_BS2[:, :-1]).any(-1)
    position_S = torch.arange(positions)
    start_BS = torch.where(is_new_BS, position_S, 0).cummax(-1).values
    own_BS = (first_BS + position_S - start_BS).clamp(min=0).minimum((last_BS - 1).clamp(min=0))
    return loss_BT.gather(-1, own_BS).masked_fill(first_BS < 0, 0.0)


def selection_table(selections: Selections, tokenizer: PreTrainedTokenizerBase) -> str:
    """Format how every candidate differs from the first one, as Markdown."""
    own, overlap = np.diag(selections.together), selections.overlap()

    def most(counts: IntArray) -> str:
        order = [int(i) for i in np.argsort(-counts, kind="stable")[:_SHOWN] if counts[i]]
        return ", ".join(f"{tokenizer.decode([i])!r} {counts[i]:,}" for i in order) or "-"

    def row(number: int, candidate: Candidate) -> list[str]:
        share = own[number] / max(selections.tokens, 1)
        common = selections.together[number, 0] / max(own[number], 1)
        figures = [f"{share:.1%}", f"{common:.1%}", f"{overlap[number, 0]:.3f}"]
        changes = [most(selections.gained[number]), most(selections.lost[number])]
        return [str(candidate), *figures, *changes]

    header = ["setting", "tokens", "also in the first", "overlap", "gains most", "loses most"]
    rows = [row(*numbered) for numbered in enumerate(selections.candidates)]
    return markdown_table([header, *rows], padded=False)


def write_selections(selections: Selections, table: str, directory: Path) -> None:
    """Write `reselect.json`, `reselect.md` and `reselect.png`."""
    directory.mkdir(parents=True, exist_ok=True)
    content = {
        "settings": [candidate.to_json() for candidate in selections.candidates],
        "tokens": selections.tokens,
        "together": selections.together.tolist(),
        "overlap": selections.overlap().tolist(),
    }
    write_json(directory / "reselect.json", content)
    write_text(directory / "reselect.md", table + "\n")
    _draw(selections, directory / "reselect.png")


def _draw(selections: Selections, path: Path) -> None:
    """Draw the overlap of all pairs of candidates."""
    overlap, names = selections.overlap(), list(map(str, selections.candidates))
    size = 3 + 0.45 * len(names)
    figure, (axes,) = new_plot(size + 2, size)
    image = axes.imshow(overlap, cmap="gray_r", vmin=0, vmax=1)
    axes.set_xticks(range(len(names)), names, rotation=90, fontsize=7)
    axes.set_yticks(range(len(names)), names, fontsize=7)
    for (row, column), value in np.ndenumerate(overlap):
        color = "white" if value > 0.5 else "black"
        axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=6, color=color)
    figure.colorbar(image, label="overlap of the chosen tokens (Jaccard)")
    save_plot(figure, path)
