"""Eq. 3: one training step of teacher-guided language modelling.

The loop is transformers' `Trainer._inner_training_loop`. Overridden here: `get_batch_samples` (the
divisor), `compute_loss`, `prediction_step`, `log`, `call_model_init`; the rest in `training`.

    text -> packed batch (`vocagnolm.collator`) -> losses of both models -> weights -> one update
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import EvalPrediction, PreTrainedModel

from vocagnolm.collator import Batch, PackedCollator, label_tokens, student_segments
from vocagnolm.conventions import IGNORED_LABEL
from vocagnolm.guidance import TokenGuidance
from vocagnolm.host.options import checked
from vocagnolm.method import Method, MethodName
from vocagnolm.objective import Objective
from vocagnolm.packing import Blocks
from vocagnolm.run.guard import Recorder, StepBatches, StepGuard
from vocagnolm.run.log import tell_in_lines
from vocagnolm.run.mixture import Mixture, mean_losses
from vocagnolm.run.overlap import Overlap
from vocagnolm.run.rejected import check_student, named_arguments
from vocagnolm.run.resumable import ResumableTrainer
from vocagnolm.run.throughput import Throughput
from vocagnolm.teacher import ResidentTeacher, StoredTeacher, TeacherLosses
from vocagnolm.token_loss import add_token_losses, inner_model


class VocAgnoTrainer(ResumableTrainer):
    """Trains a student on the tokens where it lags behind a teacher most (arXiv 2503.19123).

    `VocAgnoTrainer(model=..., teacher=..., args=..., train_dataset=...)` with `Blocks`, as
    `prepare_dataset` makes them, and otherwise as any Trainer; a `data_collator` is a
    `PackedCollator`, by default that of the blocks. The update is the same for every
    split of a global batch into processes, accumulation steps and micro-batches (with
    `selection_scope="sequence"`, the default, and not `unmapped="mean"`).

    Args:
        teacher: a causal LM with any vocabulary, or several, frozen and moved to the student's
            device. Or a `StoredTeacher`, where the blocks bring the losses of a store with them.
        method: all settings of the method, or the name of one with the paper's settings.
        recorder: keeps the teacher's losses (`vocagnolm.store.record`).
        max_bad_steps: optimizer steps in a row that may be skipped because a loss or a gradient is
            NaN or infinite. The batch of each is written to `bad_steps` in the output directory.
        device_peak_tflops: peak of the device for the MFU in the logs; looked up by default.
        overlap_teacher: score the next micro-batch while the student learns from this one.

    An argument that contradicts another or has no effect is a ValueError. `predict` gives each
    row's sum of losses in nats as `predictions` and its label tokens as `label_ids`: no logits.
    """

    # `compute_loss` divides by the count of the whole optimizer step, once.
    loss_is_scaled_for_ga = True

    @checked
    def __init__(
        self,
        *args: Any,
        teacher: PreTrainedModel | Sequence[PreTrainedModel] | StoredTeacher | None = None,
        method: MethodName | Method = "vocagnolm",
        recorder: Recorder | None = None,
        max_bad_steps: int = 0,
        device_peak_tflops: float | None = None,
        overlap_teacher: bool = False,
        **kwargs: Any,
    ):
        given = named_arguments(args, kwargs)
        models = [teacher] if isinstance(teacher, PreTrainedModel) else teacher
        method = method if isinstance(method, Method) else Method(method)
        is_stored = isinstance(models, StoredTeacher)
        count = models.teachers if isinstance(models, StoredTeacher) else len(models or ())
        method.check_teacher(count, is_stored=is_stored)
        if given.get("data_collator") is None:
            given["data_collator"] = _collator_of(given.get("train_dataset"), method)
        super().__init__(**given | {"compute_metrics": self._mean_token_losses})
        self.model: PreTrainedModel
        check_student(self.model, models)
        self._check_collator(method)
        self.model_accepts_loss_kwargs = True  # what transformers < 5.19 reads instead
        # The keys of a block are no arguments of the model, and all are needed.
        self.args.remove_unused_columns = False
        self.recorder, device = recorder, self.args.device
        # FSDP2 moves the student as training begins only.
        add_token_losses(self.model, device)
        self.teacher: ResidentTeacher | StoredTeacher | None
        self.teacher = ResidentTeacher(models, device) if isinstance(models, Sequence) else models
        self._method, self.orders_steps = method, method.splits_alike
        self.objective: Objective = Objective(method, self.teacher, self.args.seed)
        guides = self.resident if method.choice == "guided" else []
        self.overlap = Overlap(self._begin_early, guides, device) if overlap_teacher else None
        self.step_batches = StepBatches()
        watched = self.phases, device, self.resident, self.accelerator.gather
        self.throughput = Throughput(*watched, device_peak_tflops, overlap_teacher)
        guard = StepGuard(self, self.step_batches, recorder, max_bad_steps)
        for callback in filter(None, (recorder, guard, self.throughput)):
            self.add_callback(callback)
        assert isinstance(self.data_collator, PackedCollator)
        tell_in_lines(self, self.blocks_per_step * self.data_collator.max_length)

    @property
    def resident(self) -> Sequence[PreTrainedModel]:
        """Teachers that are models beside the student."""
        return self.teacher.models if isinstance(self.teacher, ResidentTeacher) else []

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save; the recorder first, as the losses of finished steps are not computed again."""
        if self.recorder is not None:
            self.recorder.write(self.state.global_step)
        super()._save_checkpoint(model, trial)

    def _check_collator(self, method: Method) -> None:
        """Reject what does not collate blocks, or in other chunks than the method's."""
        collate, expected = self.data_collator, method.chunks if method.method == "chunk" else None
        if not isinstance(collate, PackedCollator) or collate.chunks != expected:
            needed = f"with chunks={expected}" if expected else "without chunks"
            raise ValueError(
                f"--method {method.method} needs data_collator=PackedCollator(...) {needed}, for "
                f"the blocks of vocagnolm.packing.Blocks, got {str(collate)[:99]}"
            )
        method.check_chunks(collate.max_length)

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Make a new student that gives token losses, for `model_init`."""
        return add_token_losses(super().call_model_init(trial), self.args.device)

    # -- Eq. 3: the divisor ------------------------------------------------------------------

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], Tensor | None]:
        """Fetch the micro-batches of an optimizer step; count its divisor, over all processes."""
        # A run resumed at its end: Trainer alone would take one more step.
        if self.state.global_step >= self.state.max_steps:
            return [], None
        method = self._method.at_step(self.state.global_step, self.state.max_steps)
        self.objective = replace(self.objective, method=method)
        self.phases.begin("data")
        ahead = self.overlap.ahead(epoch_iterator) if self.overlap else epoch_iterator
        batches, _ = super().get_batch_samples(ahead, num_batches, device)
        self.step_batches.begin(batches)
        count = torch.tensor(sum(map(self.objective.divisor_tokens, batches)), device=device)
        total: Tensor = self.accelerator.reduce(count, "sum")
        self.phases.begin("student")
        return batches, total

    # -- Eq. 2 to 6: the loss ----------------------------------------------------------------

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Eq. 3: this micro-batch's share of the weighted mean loss, times the processes."""
        # DDP and FSDP average gradients over processes; multiplying by their number makes the sum
        # of all shares the mean over the global batch. Gradient flows to the student only.
        assert isinstance(num_items_in_batch, Tensor)
        self.phases.begin("student")
        share = self.accelerator.num_processes / num_items_in_batch.clamp(min=1)
        total = self._distilled if self.objective.method.distance else self._weighted
        loss = total(model, cast(Batch, inputs)) * share
        self.metrics.add_loss(loss)
        self.phases.begin("backward")
        return (loss, {}) if return_outputs else loss

    def _weighted(self, model: nn.Module, inputs: Batch) -> Tensor:
        """Eq. 3: the sum of the losses of the tokens that are trained on."""
        teacher, block_B = None, inputs["block"]
        if self.objective.method.choice == "guided":
            # First: its activations are gone before the student's. Reading a store is no phase.
            with self.phases.within("teacher" if self.resident else "student"):
                teacher = (self.overlap or self.objective.teacher_losses)(inputs)
        used = self._count_tokens(inputs)
        loss_BS: Tensor = self._student_losses(model, inputs, weighted_tokens=used)
        found = self.objective.select(loss_BS, inputs, teacher)
        self.metrics.add_student(loss_BS, found.valid_BS, found.weight_BS, block_B)
        self.step_batches.add_losses(loss_BS, None if teacher is None else teacher.loss_BT)
        if teacher is not None:
            self.metrics.add_teacher(teacher.loss_BT, teacher.valid_BT, block_B)
            excess_BS = found.student_loss_BS - found.teacher_loss_BS
            self.metrics.add_excess(excess_BS, found.mapped_BS & found.valid_BS)
        return (self.objective.weights(found) * loss_BS).sum()

    def _begin_early(self, inputs: Any) -> TeacherLosses | None:
        return self.objective.teacher_losses(cast(Batch, self._prepare_inputs(inputs)))

    def _distilled(self, model: nn.Module, inputs: Batch) -> Tensor:
        """Eq. 5 and 6: the sum of all losses, and of all distances from the teacher."""
        with self.phases.within("teacher"):
            pairs = self.objective.pairs(inputs)
        self._count_tokens(inputs)
        total, loss_BS, distance_R = self._student_losses(model, inputs, instead=pairs.losses)
        valid_BS = inputs["labels"] != IGNORED_LABEL
        self.metrics.add_student(loss_BS, valid_BS, valid_BS.float(), inputs["block"])
        self.step_batches.add_losses(loss_BS)
        self.metrics.add_distances(distance_R, loss_BS, inputs["block"])
        return cast(Tensor, total)

    def _count_tokens(self, inputs: Batch) -> int:
        """Count the tokens that models read, and return the student's that get a weight."""
        used = self.objective.weighted_tokens(inputs)
        self.throughput.count(0, inputs["position_ids"], inputs["labels"], used)
        if self.resident:
            head_tokens = None if self.objective.method.distance is None else 0
            for number, rows in enumerate(self.objective.teacher_rows(inputs)):
                self.throughput.count(1 + number, *rows, head_tokens)
        return used

    @torch.no_grad()
    def token_guidance(self, batch: Batch) -> TokenGuidance:
        """Decide over every token of a batch, as the student is now; trains nothing.

        Every process has to call it, with a batch of its own or the same. A ValueError where no
        token is chosen by a teacher.
        """
        inputs = cast(Batch, self._prepare_inputs(dict(batch)))
        teacher, as_typed = self.objective.teacher_losses(inputs), self._method.as_typed
        if teacher is None:
            raise ValueError(f"{as_typed} chooses no token by a teacher's losses")
        was_training = self.model.training
        self.model.train(False)
        with self.compute_loss_context_manager():
            loss_BS = self._student_losses(self.model_wrapped, inputs)
        self.model.train(was_training)
        return self.objective.select(loss_BS, inputs, teacher)

    def _prepare_inputs(self, inputs: Any) -> dict[str, Any]:
        """Move a batch to the device, if its ids are words of the models that read it."""
        student, *theirs = inputs["largest_ids"]
        if self.objective.method.method == "kld":
            theirs = [student]
        for model, largest in zip((self.model, *self.resident), (student, *theirs), strict=False):
            config = inner_model(model).config
            if largest >= (words := config.get_text_config().vocab_size):
                raise ValueError(
                    f"blocks hold ids up to {largest}, but {config.name_or_path or 'a model'} has "
                    f"{words} words: align the texts with the tokenizer of each model"
                )
        return super()._prepare_inputs(inputs)

    def _student_losses(self, model: nn.Module, inputs: Batch, **options: object) -> Any:
        """Eq. 1 for every student token [B, S]; see `add_token_losses` for the options."""
        # Through the wrapped module's own forward: anything else would make DDP skip its
        # all-reduce, silently.
        options |= {name: inputs[name] for name in ("input_ids", "position_ids", "labels")}
        options |= {"segments": student_segments(inputs), "label_tokens": label_tokens(inputs)}
        return model(**options, token_losses=True)

    # -- Logs and evaluation -------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add how fast the run was since the last log."""
        if "loss" in logs:
            logs |= self.throughput.read()
        super().log(logs, start_time)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[None, Tensor, Tensor]:
        """Sum of the plain losses and number of label tokens of every row."""
        # Trainer averages batch losses with equal weights; gathering the rows' sums instead gives
        # the loss per token, and drops the rows that pad the last batch.
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss_BS = self._student_losses(model, cast(Batch, inputs))
        return None, loss_BS.sum(-1), (inputs["labels"] != IGNORED_LABEL).sum(-1)

    def _mean_token_losses(self, rows: EvalPrediction) -> dict[str, float]:
        """Plain loss per token of all rows, and of those of each corpus if there are several."""
        loader = self.callback_handler.eval_dataloader
        assert loader is not None
        parts = getattr(loader.dataset, "parts", {})
        return mean_losses(np.asarray(rows.predictions), np.asarray(rows.label_ids), parts)


def _collator_of(data: object, method: Method) -> PackedCollator | None:
    """Make the collator of blocks; None for data of another kind."""
    blocks = data.blocks if isinstance(data, Mixture) else data
    if not isinstance(blocks, Blocks):
        return None
    chunks = method.chunks if method.method == "chunk" else None
    return PackedCollator(
        blocks.max_length,
        teacher_max_length=blocks.teacher_max_length,
        chunks=chunks,
        shares=method.aggregation == "share",
    )
