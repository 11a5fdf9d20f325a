"""Eq. 3: one training step of teacher-guided language modelling.

The loop is transformers' `Trainer._inner_training_loop`. This module overrides `get_batch_samples`
(for the divisor), `compute_loss`, `prediction_step` and `call_model_init`. Saving, resuming and the
log are in `training.resumable`.

    text -> packed batch (`vocagnolm.packing`) -> losses of both models -> weights -> one update
"""

import copy
import itertools
import logging
import operator
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import EvalPrediction, PreTrainedModel
from transformers.trainer_utils import TrainOutput

from vocagnolm.collator import (
    Batch,
    PackedCollator,
    label_tokens,
    student_segments,
)
from vocagnolm.conventions import IGNORED_LABEL
from vocagnolm.guidance import TokenGuidance
from vocagnolm.method import Method
from vocagnolm.models.adapters import check_adapted
from vocagnolm.models.compiled import compile_model
from vocagnolm.models.probes import check_packing
from vocagnolm.objective import Objective, OnlineTeacher, StoredTeacher, TeacherLosses
from vocagnolm.packing import Blocks
from vocagnolm.shell.io import share_weights
from vocagnolm.token_loss import add_token_losses
from vocagnolm.training.config import VocAgnoConfig
from vocagnolm.training.in_python import (
    arguments_in_python,
    job_in_python,
    pack_evaluations,
    used_teacher,
)
from vocagnolm.training.job import Job, settings_of
from vocagnolm.training.models import Models, load_models
from vocagnolm.training.packed import Packed, make_collator, settings_of_data
from vocagnolm.training.resumable import ResumableTrainer
from vocagnolm.training.throughput import Throughput
from vocagnolm.training.tracking import begin_if_none

if TYPE_CHECKING:
    from peft import PeftConfig

logger = logging.getLogger(__name__)


class VocAgnoTrainer(ResumableTrainer):
    """Trains a student on the tokens where it lags behind a teacher most (arXiv 2503.19123).

    Use it as `VocAgnoTrainer(model=..., teacher=..., args=VocAgnoConfig(...), train_dataset=...)`,
    and otherwise like any Trainer. A `data_collator` must be a `PackedCollator`. The update does
    not depend on how the global batch is split into processes, accumulation steps and
    micro-batches, except with `selection_scope="batch"` or `unmapped="mean"`.

    Args:
        model: the student: a hub name, a directory, or a model. A name is loaded in float32.
        args: `TrainingArguments` with the settings of this trainer. The defaults are the paper's.
        train_dataset: documents (column `text`) or conversations (`messages`, or `prompt` and
            `completion`), as a `datasets.Dataset` or a list of dicts, to be aligned and packed; or
            the `Blocks` of `prepare_dataset`. `eval_dataset` is the same, or a dict of them.
        processing_class: the student's tokenizer, if it is not stored with the model.
        teacher: one or more causal LMs with any vocabulary, by name or loaded. They are frozen and
            moved to the student's device. Or one or more directories of stores; or, for `Blocks`, a
            `StoredTeacher`.
        peft_config: adapters to train instead of the student's weights.
        method: all settings of the method, or the name of a method with the paper's settings. It
            replaces the settings in `args`.
        objective: your own method, in place of `method`.
        prepared: a job with its models and packed sequences (`vocagnolm.training.job`), in place of
            models, arguments and data.

    `predict` returns no logits: `predictions` are the sums of the losses of each row, in nats, and
    `label_ids` the numbers of label tokens.
    """

    # `compute_loss` divides by the count of the whole optimizer step. Without this attribute,
    # Trainer would also divide each loss by the number of micro-batches.
    loss_is_scaled_for_ga = True
    # Trainer's constructor makes a student for `model_init`, too, and drops it.
    _compiles = False

    def __init__(
        self,
        model: str | nn.Module | None = None,
        args: VocAgnoConfig | None = None,
        data_collator: PackedCollator | None = None,
        train_dataset: Any = None,
        *,
        teacher: Any = None,
        peft_config: "PeftConfig | None" = None,
        method: str | Method | None = None,
        objective: type[Objective] | None = None,
        prepared: tuple[Job, Models | None, Packed] | None = None,
        **kwargs: Any,
    ):
        for name in ("compute_metrics", "compute_loss_func", "preprocess_logits_for_metrics"):
            if kwargs.get(name) is not None:
                raise ValueError(f"{name} has no effect: the method computes no logits")
        if prepared is None:
            args = arguments_in_python(args, method, objective)
            # TRL's trainers call it `teacher_model`.
            teacher = used_teacher(args, kwargs.pop("teacher_model", teacher))
            prepared = job_in_python(
                args,
                model,
                teacher,
                train_dataset,
                kwargs.get("eval_dataset"),
                tokenizer=kwargs.get("processing_class"),
                peft_config=peft_config,
            )
        job, models, packed = prepared
        args, guidance = job.args, job.args.guidance
        # This checks the data, so it comes before gigabytes of weights are loaded.
        collator = make_collator(args, packed, data_collator)
        student, teachers = load_models(job, models, model, teacher)
        if models is not None:
            kwargs["processing_class"] = models.student.tokenizer
        kwargs |= {
            "train_dataset": packed.blocks,
            "eval_dataset": packed.eval_blocks,
            "data_collator": collator,
            "compute_metrics": self._mean_token_losses,
        }
        use_cache = getattr(getattr(student, "config", None), "use_cache", None)
        super().__init__(model=student, args=args, **kwargs)
        self.model: PreTrainedModel
        if use_cache is not None:
            # Trainer sets use_cache to False in the configuration, and saved models would keep it.
            # Generation needs the cache, and training never uses it.
            self.model.config.use_cache = use_cache
        self._prepare_student()
        source: OnlineTeacher | StoredTeacher | None = None
        self.online_teachers: Sequence[PreTrainedModel] = []
        if isinstance(teachers, StoredTeacher):
            source = teachers
        elif teachers:
            source = OnlineTeacher(teachers, self.args.device)
            self.online_teachers = source.models
        self.throughput = Throughput(
            self.accelerator, self.online_teachers, args.device_peak_tflops
        )
        self.add_callback(self.throughput)
        self._job, self._models = job, models
        self._compiles = args.compiles_layers
        # Sorting sequences by width changes the micro-batches, so the split must not matter.
        self.orders_steps = guidance.splits_alike
        self.settings = settings_of(job) | settings_of_data(job, models, packed)
        self.skipped = packed.skipped
        # Trainer's own `objective` is the metric of a hyperparameter search.
        self.token_objective: Objective = (guidance.own_objective or Objective)(
            guidance, source, self.args.seed
        )
        if guidance.weighs_alone:
            self.metrics.weight_name = "mean_weight"
        if isinstance(packed.blocks, Blocks) and not args.attend_across_documents:
            self._check_packing(packed.blocks)

    def _prepare_student(self) -> None:
        """Make the student return token losses, and turn off what Trainer would do to them.

        Raises:
            ValueError: the user's optimizer has none of the weights to train.
        """
        trained = [weight for weight in self.model.parameters() if weight.requires_grad]
        for dtype in {weight.dtype for weight in trained} & {torch.bfloat16, torch.float16}:
            logger.warning(
                "the student's weights are %s, which loses small updates: load it in float32 and "
                "set bf16=True for bfloat16 compute",
                dtype,
            )
        optimized_ids = set()
        for group in self.optimizer.param_groups if self.optimizer else ():
            optimized_ids |= {id(parameter) for parameter in group["params"]}
        trained_ids = {id(weight) for weight in trained}
        if self.optimizer and optimized_ids.isdisjoint(trained_ids):
            raise ValueError(
                "optimizers: the optimizer has none of the student's trained weights: load the "
                "model (and add its adapters) first, and then make the optimizer from it"
            )
        self.model_accepts_loss_kwargs = True  # what transformers < 5.19 reads instead
        # Trainer would drop the keys of a packed sequence that are not arguments of the model.
        self.args.remove_unused_columns = False
        # The filter hides NaNs, and needs a host-device sync per micro-batch.
        self.args.logging_nan_inf_filter = False
        # The device is passed, because FSDP2 moves the student only when training begins.
        add_token_losses(self.model, self.args.device)

    def _check_packing(self, blocks: Blocks) -> None:
        """Reject attention that crosses documents, or has a window that is too short for one."""
        models = [self.model, *self.online_teachers]
        student_length, *teacher_lengths = blocks.longest_segments
        evaluated = self.eval_dataset
        for data in evaluated.values() if isinstance(evaluated, dict) else [evaluated]:
            if isinstance(data, Blocks):
                # A held-out document may be longer than all training documents.
                student_length = max(student_length, data.longest_segments[0])
        # A teacher with the student's tokens reads the student's rows.
        lengths = [student_length, *(teacher_lengths or [student_length] * len(models))]
        for model, longest in zip(models, lengths, strict=False):
            check_packing(model, self.args.device, longest=longest)

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> TrainOutput:
        """Train from the beginning or from a checkpoint, as `resuming` says."""
        # The settings are also attributes of the arguments, where changing them does nothing.
        if not vars(self._job.args.guidance).items() <= vars(self.args).items():
            raise ValueError(
                "args: settings of the method were changed after the trainer was made, which has "
                "no effect: make another trainer"
            )
        # Trainer leaves the one in its arguments to scripts. A command decides what "auto" means.
        if resume_from_checkpoint is None and self.args.resume_from_checkpoint != "auto":
            resume_from_checkpoint = self.args.resume_from_checkpoint
        if "wandb" in (self.args.report_to or ()) and self.is_world_process_zero():
            begin_if_none(self.args)
        # The probes have run, so their few tokens are not what is compiled for.
        if self._compiles:
            for model in (self.model, *self.online_teachers):
                compile_model(model, self.args.torch_compile_backend, self.args.torch_compile_mode)
        with self.resuming(resume_from_checkpoint) as checkpoint:
            output = super().train(checkpoint, *args, **kwargs)
        # Trainer's own mean covers only this process's steps. `log` has put the whole run's into
        # the metrics.
        return output._replace(training_loss=output.metrics["train_loss"])

    def evaluate(self, eval_dataset: Any = None, *args: Any, **options: Any) -> dict[str, float]:
        """Evaluate on packed sequences, or on documents like those of the constructor."""
        return super().evaluate(self._packed(eval_dataset, "eval_dataset"), *args, **options)

    def predict(self, test_dataset: Any, *args: Any, **options: Any) -> Any:
        """Return the sums of losses of packed sequences or documents."""
        return super().predict(self._packed(test_dataset, "test_dataset"), *args, **options)

    def _packed(self, dataset: Any, argument: str) -> Any:
        """Align and pack documents; packed sequences, and names of evaluations, stay."""
        if dataset is None or isinstance(dataset, Blocks | str):
            return dataset
        return pack_evaluations(self._job, self._models, dataset, argument)

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Make a new student that returns token losses, for `model_init`."""
        student = super().call_model_init(trial)
        check_adapted(student)
        if self._compiles:
            compile_model(student, self.args.torch_compile_backend, self.args.torch_compile_mode)
        return add_token_losses(student, self.args.device)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model, and in the run's own directory its log, which `compare` reads."""
        super().save_model(output_dir, _internal_call)
        if self.args.should_save:
            share_weights(Path(output_dir or str(self.args.output_dir)))
        is_own = output_dir in (None, self.args.output_dir)
        # Before training, there is no log.
        if is_own and not _internal_call and self.state.global_step:
            self.save_state()

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], Tensor | None]:
        """Fetch the micro-batches of a step, and count its divisor over all processes."""
        # If a run is resumed at its end, Trainer would make one more step.
        if self.state.global_step >= self.state.max_steps:
            return [], None
        # With a warm-up of top_k, the share of the tokens changes from step to step.
        method = self._job.args.guidance.at_step(self.state.global_step, self.state.max_steps)
        if method != self.token_objective.method:
            # A user's objective keeps the attributes that it has set.
            self.token_objective = copy.copy(self.token_objective)
            object.__setattr__(self.token_objective, "method", method)
        # The parent class is not called, because it would count and gather labels on the device.
        batches = list(itertools.islice(epoch_iterator, num_batches))
        # The collator has counted on the host. `torch.full` fills the tensor on the device: a copy
        # from the host would wait for the last update.
        tokens = sum(self.token_objective.divisor_tokens(batch) for batch in batches)
        # A user's objective may count in integers on one process, and in floats on another.
        process_tokens = torch.full((), float(tokens), device=device)
        all_tokens: Tensor = self.accelerator.reduce(process_tokens, "sum")
        return batches, all_tokens

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute gradients, and log the loss that they are of, which a subclass may change."""
        loss: Tensor = super().training_step(*args, **kwargs)
        self.metrics.add_loss(loss)
        return loss

    def hyperparameter_search(
        self, hp_space: Any = None, compute_objective: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Search for the lowest loss of the evaluation, or for the best of the user's objective."""
        # Trainer's own objective is the sum of all metrics, and two of them are counts.
        objective = compute_objective or operator.itemgetter("eval_loss")
        return super().hyperparameter_search(hp_space, objective, *args, **kwargs)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Eq. 3: this micro-batch's share of the weighted mean loss, times the processes."""
        # DDP and FSDP average gradients over processes. Multiplied by their number, the shares add
        # up to the mean over the global batch. Only the student gets a gradient.
        assert isinstance(num_items_in_batch, Tensor)
        # Without any token, the sum of losses is 0, too.
        share = self.accelerator.num_processes / (num_items_in_batch + (num_items_in_batch == 0))
        if self.token_objective.method.distance:
            loss_sum = self._distilled(model, cast(Batch, inputs))
        else:
            loss_sum = self._weighted(model, cast(Batch, inputs))
        loss = loss_sum * share
        return (loss, {}) if return_outputs else loss

    def _weighted(self, model: nn.Module, inputs: Batch) -> Tensor:
        """Eq. 3: the weighted sum of the losses of a micro-batch."""
        teacher, block_B = None, inputs["block"]
        if self.token_objective.method.choice == "guided":
            # The teacher runs first, so its activations are freed before the student runs.
            teacher = self.token_objective.teacher_losses(inputs)
        # Only tokens that may get a weight need gradients from the head.
        used = self._count_tokens(inputs)
        loss_sum, loss_BS, guidance = self._guide(model, inputs, teacher, used)
        # A user's objective may give weights to tokens without a label.
        weight_BS = guidance.weight_BS * guidance.valid_BS
        self.metrics.add_student(loss_BS, guidance.valid_BS, weight_BS, block_B)
        if teacher is not None:
            self.metrics.add_teacher(teacher.loss_BT, teacher.valid_BT, block_B)
            excess_BS = guidance.student_loss_BS - guidance.teacher_loss_BS
            self.metrics.add_excess(excess_BS, guidance.mapped_BS & guidance.valid_BS)
        if loss_sum is None:
            summed_BS = self.token_objective.weights(guidance) * loss_BS
            # The weights of the corpus change no choice, no divisor and no metric but the loss.
            if "weights" in inputs:
                summed_BS = summed_BS * inputs["weights"]
            loss_sum = summed_BS.sum()
        return loss_sum

    def _guide(
        self,
        model: nn.Module,
        inputs: Batch,
        teacher: TeacherLosses | None,
        weighted_tokens: int | None = None,
    ) -> tuple[Tensor | None, Tensor, TokenGuidance]:
        """Return the student's losses and the weights, and their sum if one pass gives it."""
        own_weights = self.token_objective.own_weights(inputs, teacher)
        if own_weights is None:
            loss_BS = self._student_losses(model, inputs, weighted_tokens=weighted_tokens)
            guidance = self.token_objective.select(loss_BS.detach(), inputs, teacher)
            # Another shape may be broadcast, and silently weight other tokens.
            shape = getattr(getattr(guidance, "weight_BS", None), "shape", type(guidance).__name__)
            if shape != loss_BS.shape:
                raise ValueError(
                    f"{type(self.token_objective).__name__}.select must return a TokenGuidance "
                    f"with weights of the shape {tuple(loss_BS.shape)}, got {shape}"
                )
            return None, loss_BS, guidance
        # One pass of the head computes the losses, the weights and the gradients.
        one_pass = own_weights._replace(corpus_BS=inputs.get("weights")).losses
        loss_sum, loss_BS, weight_BS = self._student_losses(model, inputs, instead=one_pass)
        guidance = self.token_objective.select(loss_BS, inputs, teacher)
        return loss_sum, loss_BS, guidance._replace(weight_BS=weight_BS)

    def _distilled(self, model: nn.Module, inputs: Batch) -> Tensor:
        """Eq. 5 and 6: the sum of all losses, and of all distances from the teacher."""
        pairs = self.token_objective.pairs(inputs)._replace(corpus_BS=inputs.get("weights"))
        self._count_tokens(inputs)
        total, loss_BS, distance_R = self._student_losses(model, inputs, instead=pairs.losses)
        valid_BS = inputs["labels"] != IGNORED_LABEL
        self.metrics.add_student(loss_BS, valid_BS, valid_BS.float(), inputs["block"])
        self.metrics.add_distances(distance_R, loss_BS, inputs["block"])
        return cast(Tensor, total)

    def _count_tokens(self, inputs: Batch) -> int:
        """Count the tokens that models read; return how many student tokens may get a weight."""
        used = self.token_objective.weighted_tokens(inputs)
        self.throughput.count(0, inputs["position_ids"], inputs["labels"], used)
        if self.online_teachers:
            # A distance computes its own product with the teacher's head, outside of the forward
            # pass.
            head_tokens = None if self.token_objective.method.distance is None else 0
            for index, rows in enumerate(self.token_objective.teacher_rows(inputs), start=1):
                self.throughput.count(index, *rows, head_tokens)
        return used

    @torch.no_grad()
    def token_guidance(self, batch: Batch) -> TokenGuidance:
        """Weight every token of a batch with the student as it is now, without training.

        Every process must call this, with the same batch or one of its own.
        """
        inputs = cast(Batch, self._prepare_inputs(dict(batch)))
        teacher = self.token_objective.teacher_losses(inputs)
        was_training = self.model.training
        self.model.train(False)
        with self.compute_loss_context_manager():
            _, _, guidance = self._guide(self.model_wrapped, inputs, teacher)
        self.model.train(was_training)
        return guidance

    def _student_losses(self, model: nn.Module, inputs: Batch, **options: object) -> Any:
        """Eq. 1 for every student token [B, S]; see `add_token_losses` for the options."""
        # Losses must come from the wrapped module's forward: with any other method, DDP would
        # silently skip its all-reduce.
        options |= {name: inputs[name] for name in ("input_ids", "position_ids", "labels")}
        options |= {"segments": student_segments(inputs), "label_tokens": label_tokens(inputs)}
        return model(**options, token_losses=True)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[None, Tensor, Tensor]:
        """Return the sum of the unweighted losses and the number of label tokens of every row."""
        # Trainer averages the losses of batches with equal weights. Gathering the sums of rows
        # instead gives the loss per token, and drops the rows that pad the last batch.
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss_BS = self._student_losses(model, cast(Batch, inputs))
        return None, loss_BS.sum(-1), (inputs["labels"] != IGNORED_LABEL).sum(-1)

    def _mean_token_losses(self, rows: EvalPrediction) -> dict[str, float]:
        """Return the unweighted loss per token of all rows, and of each corpus of several.

        `tokens` and `segments` are counts. Runs that are evaluated on the same texts have as many
        tokens, and as many segments if the texts are cut at the same places.
        """
        loader = self.callback_handler.eval_dataloader
        assert loader is not None
        # Without `eval_do_concat_batches`, each batch has its own array.
        sums = np.hstack(cast(Any, rows.predictions))
        counts = np.hstack(cast(Any, rows.label_ids))
        rows_by_name = {"loss": slice(None)}
        parts = getattr(loader.dataset, "parts", {})
        if len(parts) > 1:
            # Rows are ordered by corpus.
            first = 0
            for name, size in parts.items():
                rows_by_name[f"{name}_loss"] = slice(first, first + size)
                first += size
        report: dict[str, float] = {}
        for name, part in rows_by_name.items():
            loss = sums[part].sum(dtype=np.float64)
            tokens = counts[part].sum()
            # Without tokens, there is no loss to report.
            if tokens:
                report[name] = float(loss / tokens)
        report["tokens"] = int(counts.sum())
        if isinstance(loader.dataset, Blocks):
            report["segments"] = loader.dataset.segment_count
        return report
