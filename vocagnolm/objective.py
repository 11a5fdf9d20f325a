"""Settings of a method, and its decisions over a batch: the tokens that are trained, Eq. 2 to 6.

Tensors only. The counts are known on the host before any forward pass, so nothing waits for them.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from torch import Tensor

from vocagnolm.collator import Batch, label_tokens, student_segments, teacher_segments
from vocagnolm.conventions import IGNORED_LABEL, UNMAPPED
from vocagnolm.distillation import Distance, Pairs
from vocagnolm.guidance import (
    Aggregation,
    Reduction,
    Scope,
    Score,
    TokenGuidance,
    Unmapped,
    aggregate_teacher_losses,
    is_in_millionths,
    random_scores,
    reduce_teachers,
    select_tokens,
    select_top,
    selected_count,
)
from vocagnolm.host.options import faults_of, option, raise_first, refuse_idle
from vocagnolm.teacher import ResidentTeacher, StoredTeacher, TeacherLosses
from vocagnolm.token_loss import first_tokens

MethodName = Literal["vocagnolm", "cpt", "random", "kld", "uld", "rho1", "chunk"]
Divisor = Literal["all", "selected"]
Choice = Literal["all", "random", "guided"]  # how the tokens that are trained on are chosen

_SHARE = ("top_k", "top_k_warmup_steps", "unmapped", "unselected_weight")
_SELECTION = (*_SHARE, "selection_scope", "loss_divisor")
_OF_CHUNKS = ("chunks", "chunk_guidance", "chunk_selection")
_OF_SEVERAL = ("teacher_reduction", "teacher_weights")
_LOOKED_AT: dict[MethodName, tuple[str, ...]] = {  # options that a method reads
    "vocagnolm": (*_SELECTION, "aggregation", *_OF_SEVERAL),
    "cpt": (),
    "random": _SELECTION,
    "kld": ("kld_direction",),
    "uld": ("uld_weight", "uld_pairing"),
    "rho1": (*_SELECTION, "rho1_score", *_OF_SEVERAL),
    "chunk": (*_SELECTION, "aggregation", *_OF_CHUNKS, *_OF_SEVERAL),
}
_OF_A_TEACHER = ("aggregation", "unmapped", "chunk_selection", *_OF_SEVERAL)


@dataclass(frozen=True)
class Method:
    """All settings of a method: one record for parser, trainer, views and stores.

    Named as the options of `train.py` and described by their help texts. The defaults are the
    paper's. A value that is out of range, or has no effect with the method, is a ValueError.
    """

    method: MethodName = option(
        "vocagnolm",
        "vocagnolm; cpt: plain pretraining; random: a random top_k; or a baseline (Section 4.2).",
    )
    top_k: float = option(0.4, "Share of the tokens trained, Eq. 4.")
    aggregation: Aggregation = option(
        "max",
        "How several teacher losses become one, Eq. 2; share (beyond the paper): each counts by "
        "the share of its token's characters.",
    )
    unmapped: Unmapped = option("include", "Tokens without a teacher token, Section 6.2.")
    # The paper does not say; a sequence's share does not depend on the batch (decision 1).
    selection_scope: Scope = option("sequence", "What the share is taken of.")
    loss_divisor: Divisor = option("all", "Divide by all label tokens (Eq. 3), or all weights.")
    unselected_weight: float = option(0.0, "Of tokens not selected (beyond the paper); 0 is Eq. 4.")
    kld_direction: Literal["reverse", "forward"] = option(
        "reverse", "KL(student || teacher), Eq. 5, or the other way."
    )
    top_k_warmup_steps: float = option(
        0.0,
        "Steps, or below 1 a share of the run, in which --top_k falls from 1 (beyond the paper).",
    )
    uld_weight: float = option(0.5, "Lambda of Eq. 6.")
    uld_pairing: Literal["position", "last"] = option(
        "position",
        "The teacher token that a student token is compared with: the one of the same number in "
        "its document (Boizard et al. 2025), or the last one that covers it.",
    )
    rho1_score: Score = option(
        "loss",
        "Take the top_k of excess loss, or those of them that are also in the top_k of lowest "
        "entropy of the reference (Lin et al. 2024, Appendix H).",
    )
    chunks: int = option(32, "Chunks of a sequence (Section 6.1).")
    chunk_guidance: Literal["teacher", "random"] = option(
        "teacher", "Guide by the teacher's chunks, or pick whole chunks at random."
    )
    chunk_selection: Literal["tokens", "chunks"] = option(
        "chunks",
        "Select whole chunks by the teacher's, the losses of both aggregated alike, or tokens.",
    )
    teacher_reduction: Reduction = option("mean", "How the losses of several teachers become one.")
    teacher_weights: list[float] | None = option(None, "For --teacher_reduction weighted.")

    def __post_init__(self) -> None:
        raise_first(self._wrong_values())
        given = [each.name for each in fields(self) if vars(self)[each.name] != each.default]
        refuse_idle(given, vars(self).keys() - {*self._looked_at()}, f"with {self.as_typed}")

    def _wrong_values(self) -> Iterator[str]:
        yield from faults_of(self)
        if not is_in_millionths(self.top_k):
            yield f"--top_k must have at most six decimals, got {self.top_k}"
        if self.top_k == 1 and self.top_k_warmup_steps:
            yield "--top_k_warmup_steps has no effect with --top_k 1: leave it out"
        if self.method == "chunk" and self.aggregation == "share":
            guides = "--method chunk guides by whole tokens"
            yield f"--aggregation share is by characters, and {guides}: take sum"
        entropy = "--rho1_score loss_and_entropy"
        if self.with_entropies and self.unmapped == "mean":
            unranked = "cannot rank unmapped tokens, which have no entropy"
            yield f"{entropy} {unranked}: use --unmapped include or exclude"
        if self.with_entropies and self.loss_divisor == "selected":
            late = "selects a number of tokens that is known too late for --loss_divisor selected"
            yield f"{entropy} {late}: use all"

    def _looked_at(self) -> tuple[str, ...]:
        idle = () if self.choice == "guided" else _OF_A_TEACHER
        return tuple(name for name in ("method", *_LOOKED_AT[self.method]) if name not in idle)

    def at_step(self, step: int, max_steps: int) -> "Method":
        """Return the method with the share of tokens of a step of the run."""
        warmup = self.top_k_warmup_steps
        steps = math.ceil(max_steps * warmup) if warmup < 1 else int(warmup)
        if step >= steps:
            return self
        top_k = round(1 - (1 - self.top_k) * step / steps, 6)
        return replace(self, top_k=top_k, top_k_warmup_steps=0)

    def in_effect(self) -> dict[str, object]:
        """Return the settings that the method reads; a reduction only where one was asked for."""
        values, defaults = vars(self), {setting.name: setting.default for setting in fields(self)}
        idle = {name for name in _OF_SEVERAL if values[name] == defaults[name]}
        return {name: values[name] for name in self._looked_at() if name not in idle}

    @property
    def as_typed(self) -> str:
        """The method on the command line."""
        if self.method == "chunk" and self.chunk_guidance == "random":
            return "--method chunk --chunk_guidance random"
        return f"--method {self.method}"

    @property
    def choice(self) -> Choice:
        """Choice of the tokens that get weight 1."""
        if self.method in ("cpt", "kld", "uld"):
            return "all"
        random_chunks = self.method == "chunk" and self.chunk_guidance == "random"
        return "random" if self.method == "random" or random_chunks else "guided"

    @property
    def splits_alike(self) -> bool:
        """True where an update is the same for every split of a global batch."""
        return self.selection_scope == "sequence" and self.unmapped != "mean"

    @property
    def needs_teacher(self) -> bool:
        """True but for plain pretraining and random choices."""
        return self.choice == "guided" or self.distance is not None

    @property
    def distance(self) -> Distance | None:
        """The distance that is added to the cross-entropy of every token, Eq. (5) and (6)."""
        if self.method == "kld":
            return "reverse_kl" if self.kld_direction == "reverse" else "forward_kl"
        return "sorted_l1" if self.method == "uld" else None

    @property
    def distance_weight(self) -> float:
        """Lambda of Eq. (6); 1 in Eq. (5)."""
        return self.uld_weight if self.method == "uld" else 1.0

    @property
    def with_entropies(self) -> bool:
        """True where the entropies of the teacher's distributions are asked for."""
        return self.rho1_score == "loss_and_entropy"

    def check_chunks(self, max_length: int) -> None:
        """Reject more chunks than a block has tokens."""
        if self.method == "chunk" and self.chunks > max_length:
            tokens = f"{max_length} tokens of a block (--max_length)"
            raise ValueError(f"--chunks {self.chunks} exceeds the {tokens}: lower it")

    def check_teacher(self, teacher: Sequence[object] | StoredTeacher | None) -> None:
        """Reject a teacher of the wrong kind or number, the lack of one, and weights of others."""
        raise_first(self._wrong_teacher(teacher))

    def _wrong_teacher(self, teacher: Sequence[object] | StoredTeacher | None) -> Iterator[str]:
        if bool(teacher) != self.needs_teacher:
            needs = "needs a teacher" if not teacher else "has no use for a teacher"
            yield f"{self.as_typed} {needs}"
        count = teacher.teachers if isinstance(teacher, StoredTeacher) else len(teacher or [0])
        compares = self.distance is not None or self.with_entropies
        if compares and isinstance(teacher, StoredTeacher):
            yield (
                f"{self.as_typed} compares distributions over words, which a store of losses does "
                "not hold: give the model itself with --teacher"
            )
        if compares and count > 1:
            yield f"{self.as_typed} takes one teacher, got {count}: name one with --teacher"
        expected = count if self.teacher_reduction == "weighted" else 0
        if (found := len(self.teacher_weights or ())) != expected:
            advice = "give one for each teacher" if expected else "leave them out"
            yield (
                f"--teacher_reduction {self.teacher_reduction} takes {expected or 'no'} "
                f"--teacher_weights, found {found}: {advice}"
            )


@dataclass(frozen=True)
class Objective:
    """A method with its teacher, if it has one, and the seed of its random choices."""

    method: Method
    teacher: ResidentTeacher | StoredTeacher | None = None
    seed: int = 0

    # -- Eq. 3: the divisor ------------------------------------------------------------------

    def divisor_tokens(self, batch: Batch) -> float:
        """Return what a batch adds to the divisor of Eq. 3: its tokens, or the sum of weights."""
        if self.method.loss_divisor == "all":
            return label_tokens(batch)
        selected, floor = self._selected_tokens(batch), self.method.unselected_weight
        return selected + floor * (label_tokens(batch) - selected) if floor else selected

    def weighted_tokens(self, batch: Batch) -> int:
        """Count the tokens of a batch that get a weight above 0, with entropies at most."""
        has_floor = self.method.unselected_weight > 0
        return label_tokens(batch) if has_floor else self._selected_tokens(batch)

    def _selected_tokens(self, batch: Batch) -> int:
        method, mapped, unmapped = self.method, batch["mapped_tokens"], batch["unmapped_tokens"]
        if method.choice == "all":
            return label_tokens(batch)
        # At random, a teacher's ranges play no part: all tokens compete.
        strategy: Unmapped = "mean" if method.choice == "random" else method.unmapped
        if method.selection_scope == "batch":
            mapped, unmapped = [sum(mapped)], [sum(unmapped)]
        populations = zip(mapped, unmapped, strict=True)
        return sum(selected_count(*counts, method.top_k, strategy) for counts in populations)

    # -- Eq. 2 and Eq. 4: the tokens that are trained ----------------------------------------

    def teacher_losses(self, batch: Batch) -> TeacherLosses | None:
        """Ask the teacher for all that `select` needs; None where none is asked."""
        if self.method.choice != "guided":
            return None
        assert self.teacher is not None
        return self.teacher.losses(batch, with_entropies=self.method.with_entropies)

    def select(
        self, student_loss_BS: Tensor, batch: Batch, teacher: TeacherLosses | None = None
    ) -> TokenGuidance:
        """Decide over every token of a batch, without gradient: where Eq. 2 meets Eq. 4.

        Takes the student's losses, Eq. (1), and from `teacher_losses` the teacher's, if any.
        """
        student_loss_BS = student_loss_BS.detach()
        valid_BS = batch["labels"] != IGNORED_LABEL
        if teacher is None:
            none_BS = torch.zeros_like(student_loss_BS)
            own = (student_loss_BS, none_BS, valid_BS, torch.zeros_like(valid_BS))
            return TokenGuidance(*own, self._unguided(valid_BS, batch), none_BS[:, :0])
        method, ranges_BS2 = self.method, batch["teacher_ranges"]
        shares_BS3 = batch.get("teacher_shares")

        def on_student(values_BT: Tensor) -> tuple[Tensor, Tensor]:
            """Eq. 2, by every teacher, and one value of several teachers'."""
            values_BS, mapped_BS = aggregate_teacher_losses(
                values_BT, ranges_BS2, method.aggregation, teacher.valid_BT, shares_BS3
            )
            teachers, how = values_BS.shape[1] // valid_BS.shape[1], method.teacher_reduction
            return reduce_teachers(values_BS, mapped_BS, teachers, how, method.teacher_weights)

        loss_BS, mapped_BS = on_student(teacher.loss_BT)
        entropy_BS = None if teacher.entropy_BT is None else on_student(teacher.entropy_BT)[0]
        weight_BS = select_tokens(
            self._compared(student_loss_BS, valid_BS, batch),
            loss_BS,
            valid_BS,
            mapped_BS,
            top_k=method.top_k,
            unmapped=method.unmapped,
            scope=method.selection_scope,
            entropy_BS=entropy_BS,
        )
        own = (student_loss_BS, loss_BS, valid_BS, mapped_BS)
        return TokenGuidance(*own, weight_BS, teacher.loss_BT)

    def _compared(self, student_loss_BS: Tensor, valid_BS: Tensor, batch: Batch) -> Tensor:
        """Return the losses of the student that are compared: its tokens', or their chunks'."""
        if self.method.method != "chunk" or self.method.chunk_selection == "tokens":
            return student_loss_BS
        # Tokens of one chunk are equal, so they are chosen in their order:
        #     chunk  0 0 0 1 1 2        their ranges  [0, 3) [0, 3) [0, 3) [3, 5) [3, 5) [5, 6)
        chunk_BS = batch["chunk"]
        edges = (torch.searchsorted(chunk_BS, chunk_BS, right=right) for right in (False, True))
        ranges_BS2 = torch.stack(list(edges), -1)
        how = self.method.aggregation
        return aggregate_teacher_losses(student_loss_BS, ranges_BS2, how, valid_BS)[0]

    def weights(self, selection: TokenGuidance) -> Tensor:
        """Return W of Eq. 3 [B, S]: 1 where selected, `unselected_weight` for other labels."""
        floor_BS = self.method.unselected_weight * selection.valid_BS
        return selection.weight_BS.maximum(floor_BS)

    def _unguided(self, valid_BS: Tensor, batch: Batch) -> Tensor:
        """Weigh all tokens, or a random share of the tokens or of the chunks."""
        method = self.method
        if method.choice == "all":
            return valid_BS.float()
        position_S = torch.arange(valid_BS.shape[1], device=valid_BS.device)
        number_BS = batch["chunk"] if method.method == "chunk" else position_S
        scores_BS = random_scores(batch["block"], number_BS, self.seed)
        return select_top(scores_BS, valid_BS, method.top_k, method.selection_scope).float()

    # -- Eq. 5 and Eq. 6: the distributions that are compared --------------------------------

    def teacher_rows(self, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        """Return the positions and labels [B, T] of every resident teacher's tokens."""
        if self.method.method == "kld":
            return [(batch["position_ids"], batch["labels"])]
        widths = batch["teacher_widths"]
        both = (batch["teacher_position_ids"], batch["teacher_labels"])
        return list(zip(*(torch.split(rows_BT, widths, -1) for rows_BT in both), strict=True))

    def pairs(self, batch: Batch) -> Pairs:
        """Pair student tokens with the teacher's: the same, or the last one of their range."""
        assert isinstance(self.teacher, ResidentTeacher)
        assert self.method.distance is not None
        how = (self.method.distance, self.method.distance_weight)
        valid_BS = batch["labels"] != IGNORED_LABEL
        if self.method.method == "kld":  # of one vocabulary: it reads what the student reads
            rows = (batch["input_ids"], batch["position_ids"], student_segments(batch))
            token_R = first_tokens(valid_BS, label_tokens(batch))
            return Pairs(self.teacher.states(*rows), token_R, token_R, token_R[:0], *how)
        ids_BT, ranges_BS2 = batch["teacher_input_ids"], batch["teacher_ranges"]
        (segments,) = teacher_segments(batch)
        states = self.teacher.states(ids_BT, batch["teacher_position_ids"], segments)
        paired_BS = valid_BS & (ranges_BS2[..., 0] != UNMAPPED)
        token_R = first_tokens(paired_BS, sum(batch["mapped_tokens"]))
        # Rows lie one behind the other:   row 0 [0 .. T)   row 1 [T .. 2T)   ...
        # and a half-open range of row b ends at b * T + last, behind its last token.
        row_B1 = torch.arange(len(ids_BT), device=ids_BT.device)[:, None]
        last_BS = row_B1 * ids_BT.shape[1] + ranges_BS2[..., 1] - 1
        alone_U = first_tokens(valid_BS & ~paired_BS, sum(batch["unmapped_tokens"]))
        return Pairs(states, token_R, last_BS.flatten()[token_R], alone_U, *how)
