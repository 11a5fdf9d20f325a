"""What a method does with a batch: score it with the teacher and weight its tokens, Eq. 2 to 6.

Everything works on tensors. The counts are known on the host before any forward pass, without a
host-device sync. The teacher is never passed to Accelerate: under FSDP2, `prepare_model` would
neither move nor shard it, and would round its outputs. A second model in `prepare` is an error.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from vocagnolm.attention import RowSegments
from vocagnolm.collator import (
    Batch,
    label_tokens,
    student_segments,
    teacher_segments,
)
from vocagnolm.conventions import IGNORED_LABEL, UNMAPPED
from vocagnolm.distillation import HeadStates, Pairs
from vocagnolm.guidance import (
    TokenGuidance,
    accept_tokens,
    aggregate_teacher_losses,
    entropy_gate,
    random_scores,
    reduce_teachers,
    select_tokens,
    select_top,
    selected_count,
    weigh_by_student,
)
from vocagnolm.method import Method, Unmapped
from vocagnolm.output_head import last_hidden_state, read_head
from vocagnolm.token_loss import add_token_losses, first_tokens
from vocagnolm.weighted_loss import OwnWeights


class TeacherLosses(NamedTuple):
    """Losses of the teachers' own tokens, without gradient. Teachers' columns are concatenated."""

    loss_BT: Tensor  # float32, -log P(token | earlier tokens of its segment)
    valid_BT: Tensor  # bool, tokens that have a loss
    entropy_BT: Tensor | None = None  # of the distribution that predicts each token


@dataclass(frozen=True)
class StoredTeacher:
    """Teachers whose losses come with the batch, from one or more stores."""

    teachers: int = 1

    def losses(self, batch: Batch, *, with_entropies: bool = False) -> TeacherLosses:
        """Read the losses of all teachers' tokens."""
        assert not with_entropies, "a store holds losses alone"
        if "teacher_losses" not in batch:
            raise ValueError(
                "train_dataset has no losses of a teacher: give documents with the store as teacher"
            )
        loss_BT = batch["teacher_losses"]
        # A store has no labels. Padding, start tokens and tokens that are not trained on are NaN.
        valid_BT = ~loss_BT.isnan()
        return TeacherLosses(loss_BT.masked_fill(~valid_BT, 0.0), valid_BT)


class OnlineTeacher:
    """Causal LMs, frozen and in eval mode, that score the teachers' rows of a batch.

    This is not a `torch.nn.Module`, so no trainer registers, optimises or saves it. If
    `add_token_losses` rejects a model, it raises a ValueError or `NonFiniteLoss`.
    """

    def __init__(self, models: Sequence[PreTrainedModel], device: torch.device):
        for model in models:
            # Quantized models were placed on their device when they were loaded.
            if not getattr(model, "is_quantized", False):
                model.to(device)  # type: ignore[arg-type]  # its decorator hides that it is a method
        self.models = []
        for model in models:
            frozen = model.train(False).requires_grad_(False)
            self.models.append(add_token_losses(frozen))

    @torch.no_grad()
    def losses(self, batch: Batch, *, with_entropies: bool = False) -> TeacherLosses:
        """Compute the losses of the teachers' tokens and, on request, the entropies."""
        # Columns of two teachers, split by `teacher_widths` and joined again:
        #     [ first teacher's T1 | second teacher's T2 ]
        if "teacher_widths" not in batch:
            raise ValueError(
                "train_dataset was packed without a teacher: give prepare_dataset the teacher's "
                "tokenizer"
            )
        widths = batch["teacher_widths"]
        ids_by_teacher = torch.split(batch["teacher_input_ids"], widths, -1)
        labels_by_teacher = torch.split(batch["teacher_labels"], widths, -1)
        positions_by_teacher = torch.split(batch["teacher_position_ids"], widths, -1)
        segments_by_teacher = teacher_segments(batch)
        losses = []
        entropies = []
        # Teachers run one after another, so only one teacher's activations are in memory.
        for index, model in enumerate(self.models):
            values = model(
                input_ids=ids_by_teacher[index],
                labels=labels_by_teacher[index],
                position_ids=positions_by_teacher[index],
                segments=segments_by_teacher[index],
                label_tokens=batch["teacher_label_tokens"][index],
                token_losses=True,
                with_entropies=with_entropies,
            )
            losses.append(values[0] if with_entropies else values)
            if with_entropies:
                entropies.append(values[1])
        valid_BT = batch["teacher_labels"] != IGNORED_LABEL
        entropy_BT = torch.cat(entropies, -1) if with_entropies else None
        return TeacherLosses(torch.cat(losses, -1), valid_BT, entropy_BT)

    @torch.no_grad()
    def states(
        self, input_ids: Tensor, position_ids: Tensor, segments: RowSegments | None
    ) -> HeadStates:
        """Compute what gives the teacher's distributions at all [B * T] positions."""
        # Methods that compare distributions have one teacher, as `Method.check_teacher` says.
        (model,) = self.models
        rows = {"input_ids": input_ids, "position_ids": position_ids}
        hidden_BTD = last_hidden_state(model, **rows, segments=segments)
        return HeadStates(hidden_BTD.flatten(0, 1), read_head(model, hidden_BTD))


# -- The objective -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Objective:
    """A method with its teacher, if it has one, and the seed of its random choices.

    To write your own method, override `select` in a subclass (docs/library.md). It may return any
    weights. `needs_teacher` says whether it has a teacher. `weighted_tokens` counts the tokens with
    a weight, which makes the backward pass of the output head cheaper. `divisor_tokens` changes the
    divisor of the loss.
    """

    needs_teacher: ClassVar[bool] = True

    method: Method
    teacher: OnlineTeacher | StoredTeacher | None = None
    seed: int = 0

    def divisor_tokens(self, batch: Batch) -> float:
        """Return what a batch adds to the divisor of Eq. 3: label tokens, or the sum of weights."""
        if self.method.loss_divisor == "all" or self.method.weighs_alone:
            return label_tokens(batch)
        selected, floor = self._selected_tokens(batch), self.method.unselected_weight
        # Selected tokens have weight 1, and the others `floor`. If that is 0, the sum stays an
        # integer, which adds up exactly in any number of processes.
        return selected + floor * (label_tokens(batch) - selected) if floor else selected

    def weighted_tokens(self, batch: Batch) -> int:
        """Return an upper bound on the tokens with a weight above 0; too low is an error."""
        all_weigh = self.method.weighs_alone or self.method.unselected_weight > 0
        # Nothing is known about the weights of a user's own method, so every token counts.
        all_weigh |= type(self) is not Objective
        return label_tokens(batch) if all_weigh else self._selected_tokens(batch)

    def _selected_tokens(self, batch: Batch) -> int:
        method, mapped, unmapped = self.method, batch["mapped_tokens"], batch["unmapped_tokens"]
        if method.choice == "all":
            return label_tokens(batch)
        # In a random choice all tokens compete, mapped or not.
        strategy: Unmapped = "mean" if method.choice == "random" else method.unmapped
        # The share is rounded up in each sequence or batch, as in `select_top`.
        if method.selection_scope == "batch":
            mapped, unmapped = [sum(mapped)], [sum(unmapped)]
        selected = 0
        for with_teacher, without_teacher in zip(mapped, unmapped, strict=True):
            selected += selected_count(with_teacher, without_teacher, method.top_k, strategy)
        return selected

    def teacher_losses(self, batch: Batch) -> TeacherLosses | None:
        """Get what `select` needs from the teacher; None for a method that does not ask it."""
        if self.method.choice != "guided":
            return None
        assert self.teacher is not None
        return self.teacher.losses(batch, with_entropies=self.method.with_entropies)

    def own_weights(self, batch: Batch, teacher: TeacherLosses | None) -> OwnWeights | None:
        """Return functions that weight each token by its own losses, equal to `select`.

        None if a token's weight depends on other tokens of the batch.
        """
        method = self.method
        by_itself = method.weighs_alone or method.choice == "all"
        # Nothing is known about the weights of a user's own method.
        if not by_itself or type(self) is not Objective:
            return None
        valid_BS = batch["labels"] != IGNORED_LABEL
        token_M = first_tokens(valid_BS, label_tokens(batch))
        valid_N = valid_BS.flatten()
        if teacher is None and method.choice == "all":
            return OwnWeights(token_M, lambda _, token_K: valid_N[token_K].float())
        if teacher is None:

            def weigh_alone(loss_K: Tensor, token_K: Tensor) -> Tensor:
                weight_K = weigh_by_student(loss_K, method.selection, method.stm_perplexity)
                return weight_K.masked_fill(~valid_N[token_K], 0.0)

            own_weights = OwnWeights(token_M, weigh_alone)
            if method.selection == "eaft":
                own_weights = own_weights._replace(gate=entropy_gate)
            return own_weights
        loss_BS, mapped_BS = self._on_student(teacher.loss_BT, batch, teacher)
        teacher_loss_N, mapped_N = loss_BS.flatten(), mapped_BS.flatten()

        def weigh(loss_K: Tensor, token_K: Tensor) -> Tensor:
            teacher_loss_K, mapped_K = teacher_loss_N[token_K], mapped_N[token_K]
            return accept_tokens(loss_K, teacher_loss_K, valid_N[token_K], mapped_K)

        return OwnWeights(token_M, weigh)

    def select(
        self, student_loss_BS: Tensor, batch: Batch, teacher: TeacherLosses | None = None
    ) -> TokenGuidance:
        """Weight every token of a batch by Eq. 2 and Eq. 4, without gradient.

        Args:
            student_loss_BS: the student's losses, Eq. 1.
            batch: from `PackedCollator`.
            teacher: from `teacher_losses`; None without a teacher.
        """
        student_loss_BS = student_loss_BS.detach()
        valid_BS = batch["labels"] != IGNORED_LABEL
        # Without teacher losses, no token is mapped and there are no teacher tokens.
        if teacher is None:
            none_BS = torch.zeros_like(student_loss_BS)
            unmapped_BS = torch.zeros_like(valid_BS)
            weight_BS = self._unguided(student_loss_BS, valid_BS, batch)
            return TokenGuidance(
                student_loss_BS, none_BS, valid_BS, unmapped_BS, weight_BS, none_BS[:, :0]
            )
        loss_BS, mapped_BS = self._on_student(teacher.loss_BT, batch, teacher)
        if self.method.accepts:
            weight_BS = accept_tokens(student_loss_BS, loss_BS, valid_BS, mapped_BS)
        else:
            entropy_BS = None
            # Entropies are mapped to student tokens by the same ranges as losses.
            if teacher.entropy_BT is not None:
                entropy_BS, _ = self._on_student(teacher.entropy_BT, batch, teacher)
            weight_BS = select_tokens(
                self._compared(student_loss_BS, valid_BS, batch),
                loss_BS,
                valid_BS,
                mapped_BS,
                top_k=self.method.top_k,
                unmapped=self.method.unmapped,
                scope=self.method.selection_scope,
                entropy_BS=entropy_BS,
            )
        return TokenGuidance(
            student_loss_BS, loss_BS, valid_BS, mapped_BS, weight_BS, teacher.loss_BT
        )

    def _on_student(
        self, values_BT: Tensor, batch: Batch, teacher: TeacherLosses
    ) -> tuple[Tensor, Tensor]:
        """Return one teacher value per student token [B, S], Eq. 2, and which tokens have one.

        Each teacher's values are aggregated over the range of a token. Then the teachers' values
        are combined.
        """
        method = self.method
        values_BS, mapped_BS = aggregate_teacher_losses(
            values_BT,
            batch["teacher_ranges"],
            method.aggregation_in_effect,
            teacher.valid_BT,
            batch.get("teacher_shares"),
        )
        # The ranges of K teachers are concatenated, so at this point the values are [B, K S].
        teachers = values_BS.shape[1] // batch["labels"].shape[1]
        return reduce_teachers(
            values_BS, mapped_BS, teachers, method.teacher_reduction, method.teacher_weights
        )

    def _compared(self, student_loss_BS: Tensor, valid_BS: Tensor, batch: Batch) -> Tensor:
        """Return the student losses to compare: of its tokens, or of their chunks."""
        if self.method.method != "chunk" or self.method.chunk_selection == "tokens":
            return student_loss_BS
        # All tokens of a chunk have equal losses on both sides, so they are selected together. If
        # the share ends inside a chunk, the first tokens of that chunk are selected:
        #     chunk  0 0 0 1 1 2        their ranges  [0, 3) [0, 3) [0, 3) [3, 5) [3, 5) [5, 6)
        chunk_BS = batch["chunk"]
        # Chunk numbers increase from left to right, so bisection finds where each begins and ends.
        # Padding has the number of the last token, and `valid_BS` leaves it out.
        first_BS = torch.searchsorted(chunk_BS, chunk_BS, right=False)
        end_BS = torch.searchsorted(chunk_BS, chunk_BS, right=True)
        ranges_BS2 = torch.stack([first_BS, end_BS], -1)
        aggregation = self.method.aggregation
        loss_BS, _ = aggregate_teacher_losses(student_loss_BS, ranges_BS2, aggregation, valid_BS)
        return loss_BS

    def weights(self, selection: TokenGuidance) -> Tensor:
        """Return W of Eq. 3 [B, S]: the weights, with `unselected_weight` in place of 0."""
        weight_BS = selection.weight_BS
        if self.method.weighs_alone:
            return weight_BS
        # Not the larger of the two: a user's own method may return negative weights.
        return weight_BS.where(weight_BS != 0, self.method.unselected_weight * selection.valid_BS)

    def _unguided(self, student_loss_BS: Tensor, valid_BS: Tensor, batch: Batch) -> Tensor:
        """Weight tokens without a teacher: all, by the student's losses, or a random share."""
        method = self.method
        if method.choice == "all":
            return valid_BS.float()
        if method.choice == "student":
            weight_BS = weigh_by_student(student_loss_BS, method.selection, method.stm_perplexity)
            # Only the pass of the head knows the entropies, and replaces these weights.
            unknown_BS = valid_BS & (method.selection == "eaft")
            return weight_BS.masked_fill(~valid_BS, 0.0).masked_fill(unknown_BS, torch.nan)
        position_S = torch.arange(valid_BS.shape[1], device=valid_BS.device)
        # All tokens of a chunk have the same number, and so the same score.
        index_BS = batch["chunk"] if method.method == "chunk" else position_S
        scores_BS = random_scores(batch["block"], index_BS, self.seed)
        return select_top(scores_BS, valid_BS, method.top_k, method.selection_scope).float()

    def teacher_rows(self, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        """Return the positions and labels [B, T] of every online teacher's tokens."""
        if self.method.method == "kld":
            return [(batch["position_ids"], batch["labels"])]
        widths = batch["teacher_widths"]
        positions = torch.split(batch["teacher_position_ids"], widths, -1)
        labels = torch.split(batch["teacher_labels"], widths, -1)
        return list(zip(positions, labels, strict=True))

    def pairs(self, batch: Batch) -> Pairs:
        """Pair student tokens with teacher tokens for Eq. 5 and 6."""
        # The host knows how many tokens are mapped and unmapped, so `first_tokens` can cut its
        # result to that length without a host-device sync.
        assert isinstance(self.teacher, OnlineTeacher)
        assert self.method.distance is not None
        weight = self.method.uld_weight if self.method.method == "uld" else 1.0
        valid_BS = batch["labels"] != IGNORED_LABEL
        # For kld the teacher has the student's vocabulary. It reads the student's rows, and every
        # token is paired with itself.
        if self.method.method == "kld":
            token_R = first_tokens(valid_BS, label_tokens(batch))
            states = self.teacher.states(
                batch["input_ids"], batch["position_ids"], student_segments(batch)
            )
            return Pairs(states, token_R, token_R, token_R[:0], self.method.distance, weight)
        ids_BT, ranges_BS2 = batch["teacher_input_ids"], batch["teacher_ranges"]
        (segments,) = teacher_segments(batch)
        states = self.teacher.states(ids_BT, batch["teacher_position_ids"], segments)
        paired_BS = valid_BS & (ranges_BS2[..., 0] != UNMAPPED)
        token_R = first_tokens(paired_BS, sum(batch["mapped_tokens"]))
        # Rows are concatenated:   row 0 [0 .. T)   row 1 [T .. 2T)   ...
        # and a half-open range of row b ends at b * T + last, after its last token.
        row_B1 = torch.arange(len(ids_BT), device=ids_BT.device)[:, None]
        last_BS = row_B1 * ids_BT.shape[1] + ranges_BS2[..., 1] - 1
        alone_U = first_tokens(valid_BS & ~paired_BS, sum(batch["unmapped_tokens"]))
        return Pairs(
            states, token_R, last_BS.flatten()[token_R], alone_U, self.method.distance, weight
        )
