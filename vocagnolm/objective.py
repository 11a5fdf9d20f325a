"""What a method makes of a batch: the tokens that it trains, and what it adds (Eq. 2 to 6).

Tensors only. The counts are known on the host before any forward pass, so nothing waits for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from vocagnolm.collator import student_segments, teacher_segments
from vocagnolm.conventions import IGNORED_LABEL
from vocagnolm.distillation import Distillation, Pairs, first_tokens
from vocagnolm.guidance import (
    Guidance,
    aggregate_teacher_losses,
    random_scores,
    select_tokens,
    select_top,
    selected_count,
)
from vocagnolm.teacher import ResidentTeacher, StoredTeacher

Method = Literal["vocagnolm", "cpt", "random", "kld", "uld", "rho1", "chunk"]
Divisor = Literal["all", "selected"]
Choice = Literal["all", "random", "guided"]  # how the tokens that are trained on are chosen
DISTILLATION = {"kld": Distillation("reverse_kl"), "uld": Distillation("sorted_l1", 0.5)}
_WITHOUT_TEACHER = ("cpt", "random")


class Scores(NamedTuple):
    """The teacher's losses [B, T], where there is one, and those on the student's tokens [B, S]."""

    loss_BT: Tensor
    valid_BT: Tensor
    loss_BS: Tensor
    mapped_BS: Tensor
    entropy_BS: Tensor | None


@dataclass(frozen=True)
class Objective:
    """A method with its settings and its teacher.

    Attributes:
        method: see `vocagnolm.trainer.VocAgnoTrainer`.
        guidance: how teacher losses become weights.
        divisor: what the sum of weighted losses is divided by.
        distillation: of `kld` and `uld`.
        teacher: whose losses or distributions guide the student, if anyone's do.
        seed: of the random choices.
    """

    method: Method
    guidance: Guidance
    divisor: Divisor
    distillation: Distillation | None
    teacher: ResidentTeacher | StoredTeacher | None
    seed: int

    @property
    def choice(self) -> Choice:
        """How the tokens are chosen that get weight 1."""
        if self.method == "cpt" or self.distillation is not None:
            return "all"
        return "random" if self.teacher is None else "guided"

    def divisor_tokens(self, batch: Mapping[str, Any]) -> int:
        """What a batch adds to the divisor of Eq. 3."""
        if self.divisor == "all":
            return int(sum(batch["mapped_tokens"]) + sum(batch["unmapped_tokens"]))
        return self.weighted_tokens(batch)

    def weighted_tokens(self, batch: Mapping[str, Any]) -> int:
        """How many tokens of a batch get weight 1."""
        mapped, unmapped = batch["mapped_tokens"], batch["unmapped_tokens"]
        guidance, strategy = self.guidance, self.guidance.unmapped
        if self.choice == "all":
            return int(sum(mapped) + sum(unmapped))
        if self.choice == "random":
            mapped = [a + b for a, b in zip(mapped, unmapped, strict=True)]
            unmapped, strategy = [0] * len(mapped), "exclude"
        if guidance.scope == "batch":
            mapped, unmapped = [sum(mapped)], [sum(unmapped)]
        return sum(
            selected_count(a, b, guidance.top_k, strategy)
            for a, b in zip(mapped, unmapped, strict=True)
        )

    def scores(self, batch: Mapping[str, Any]) -> Scores:
        """Eq. 2: the teacher's loss on every student token, and where there is one."""
        assert self.teacher is not None
        entropy_BT, guidance = None, self.guidance
        if guidance.score == "loss":
            loss_BT, valid_BT = self.teacher.losses(batch)
        else:
            assert isinstance(self.teacher, ResidentTeacher)
            loss_BT, entropy_BT, valid_BT = self.teacher.losses_and_entropies(batch)

        def aggregate(values_BT: Tensor) -> tuple[Tensor, Tensor]:
            ranges_BS2 = batch["teacher_ranges"]
            return aggregate_teacher_losses(values_BT, ranges_BS2, guidance.aggregation, valid_BT)

        loss_BS, mapped_BS = self.teacher.reduce(*aggregate(loss_BT))
        entropy_BS = None if entropy_BT is None else aggregate(entropy_BT)[0]
        return Scores(loss_BT, valid_BT, loss_BS, mapped_BS, entropy_BS)

    def weights(self, loss_BS: Tensor, scores: Scores | None, batch: Mapping[str, Any]) -> Tensor:
        """Eq. 4: weight 1 for the tokens that are trained on, 0 for the others; float32 [B, S]."""
        guidance = self.guidance
        valid_BS: Tensor = batch["labels"] != IGNORED_LABEL
        if self.choice == "all":
            return valid_BS.float()
        if scores is None:
            chunked = self.method == "chunk"
            position_S = torch.arange(valid_BS.shape[1], device=valid_BS.device)
            number_BS = batch["chunk"] if chunked else position_S
            scores_BS = random_scores(batch["block"], number_BS, self.seed)
            return select_top(scores_BS, valid_BS, guidance.top_k, guidance.scope).float()
        weight_BS: Tensor = select_tokens(
            loss_BS,
            scores.loss_BS,
            valid_BS,
            scores.mapped_BS,
            top_k=guidance.top_k,
            unmapped=guidance.unmapped,
            scope=guidance.scope,
            entropy_BS=scores.entropy_BS,
        )
        return weight_BS

    def pairs(self, batch: Mapping[str, Any]) -> Pairs:
        """Eq. 5 and 6: which distribution of the teacher each of the student's is compared with.

        ULD compares a student token's with that of the last teacher token of its range.
        """
        assert isinstance(self.teacher, ResidentTeacher)
        valid_BS = batch["labels"] != IGNORED_LABEL
        if self.method == "kld":  # of one vocabulary: the teacher reads what the student reads
            rows = (batch["input_ids"], batch["position_ids"], student_segments(batch))
            states = self.teacher.states(*rows)
            count = sum(batch["mapped_tokens"]) + sum(batch["unmapped_tokens"])
            token_R = first_tokens(valid_BS, count)
            return Pairs(states, token_R, token_R)
        ids_BT, ranges_BS2 = batch["teacher_input_ids"], batch["teacher_ranges"]
        (segments,) = teacher_segments(batch)
        states = self.teacher.states(ids_BT, batch["teacher_position_ids"], segments)
        token_R = first_tokens(valid_BS & (ranges_BS2[..., 0] >= 0), sum(batch["mapped_tokens"]))
        row_B1 = torch.arange(len(ids_BT), device=ids_BT.device)[:, None]
        last_BS = row_B1 * ids_BT.shape[1] + ranges_BS2[..., 1] - 1
        return Pairs(states, token_R, last_BS.flatten()[token_R])


def check_method(method: str, divisor: str, teacher: object, guidance: Guidance) -> None:
    """Refuse what is unknown, and a method that lacks its teacher or has one of the wrong kind."""
    for option, value, choices in (
        ("--method", method, get_args(Method)),
        ("--loss_divisor", divisor, get_args(Divisor)),
    ):
        if value not in choices:
            raise ValueError(f"{option} must be one of {', '.join(choices)}, got {value!r}")
    if (teacher is not None) != (method not in _WITHOUT_TEACHER) and method != "chunk":
        needs = "needs a teacher" if teacher is None else "has no use for a teacher"
        raise ValueError(f"--method {method} {needs}")
    if guidance.score != "loss" and method != "rho1":
        raise ValueError(f"--rho1_score has no effect with --method {method}: leave it out")
    if method in DISTILLATION or guidance.score != "loss":
        what = "--rho1_score" if guidance.score != "loss" else f"--method {method}"
        if not isinstance(teacher, Sequence) or len(teacher) != 1:
            raise ValueError(f"{what} compares distributions and needs one teacher that is a model")
