"""The Trainer of teacher-guided language modelling: the outer loop of Eq. 3 and Eq. 4.

Enters: models and packed batches (`vocagnolm.packing`). Knows no tokenizer.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, get_args

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import RandomSampler, Sampler
from transformers import EvalPrediction, PreTrainedModel, Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from vocagnolm.callbacks import StepGuard
from vocagnolm.guidance import (
    Guidance,
    aggregate_teacher_losses,
    random_scores,
    select_tokens,
    select_top,
    selected_count,
)
from vocagnolm.metrics import GuidanceMetrics
from vocagnolm.teacher import ResidentTeacher, StoredTeacher
from vocagnolm.token_loss import IGNORED_LABEL, add_token_losses

logger = logging.getLogger(__name__)

Method = Literal["vocagnolm", "cpt", "random"]
Divisor = Literal["all", "selected"]


class VocAgnoTrainer(Trainer):
    """Trains a student on the tokens where it lags behind a teacher most (arXiv 2503.19123).

    `VocAgnoTrainer(model=..., teacher=..., args=..., train_dataset=..., data_collator=...)` with
    `vocagnolm.packing`'s `Blocks` and `PackedCollator`, and otherwise as any Trainer. The update is
    the same for every split of a global batch into processes, accumulation steps and micro-batches
    (with `Guidance.scope="sequence"`, the default, and not `unmapped="mean"`). An epoch ends with
    its last whole global batch.

    Args:
        teacher: a causal LM with any vocabulary. It is frozen, moved to the student's device, and
            neither optimised nor saved. Or a `StoredTeacher`, where the blocks bring the losses of
            a store with them. Only for `method="vocagnolm"`.
        method: `vocagnolm`; `cpt`, plain continual pretraining on every token; or `random`, a
            random `guidance.top_k` of the tokens (the control that separates which tokens are
            chosen from how many).
        guidance: how teacher losses become weights; the defaults are the paper's.
        divisor: what the sum of weighted losses is divided by, counted over the whole optimizer
            step: `all` label tokens (Eq. 3 as printed) or the `selected` ones.
        on_teacher_losses: called with the numbers [B] of the blocks of every training batch and
            the teacher's losses [B, T], in nats.

    Raises:
        ValueError: an argument contradicts another or has no effect.
        NonFiniteLoss: losses of a model are NaN or infinite.
    """

    # compute_loss divides by the count of the whole optimizer step, once.
    loss_is_scaled_for_ga = True

    def __init__(
        self,
        *args: Any,
        teacher: PreTrainedModel | StoredTeacher | None = None,
        method: Method = "vocagnolm",
        guidance: Guidance | None = None,
        divisor: Divisor = "all",
        on_teacher_losses: Callable[[Tensor, Tensor], None] | None = None,
        **kwargs: Any,
    ):
        _check_choice("--method", method, get_args(Method))
        _check_choice("--loss_divisor", divisor, get_args(Divisor))
        if (teacher is not None) != (method == "vocagnolm"):
            needs = "needs a teacher" if teacher is None else "has no use for a teacher"
            raise ValueError(f"--method {method} {needs}")
        for name in ("compute_metrics", "compute_loss_func"):
            if kwargs.get(name) is not None:
                raise ValueError(
                    f"{name} has no effect: the loss is Eq. 3, and logits are not made"
                )
        if kwargs.get("data_collator") is None:
            raise ValueError(
                "blocks need data_collator=vocagnolm.packing.PackedCollator(max_length)"
            )
        super().__init__(*args, **kwargs | {"compute_metrics": _mean_token_loss})
        self.model: PreTrainedModel
        if teacher is not None and teacher is self.model:
            raise ValueError(
                "model and teacher are one object, and freezing the teacher would freeze the "
                "student; pass copy.deepcopy(model)"
            )
        if self.args.label_smoothing_factor:
            raise ValueError("label_smoothing_factor has no effect: losses are those of the labels")
        if self.model.dtype in (torch.bfloat16, torch.float16):
            logger.warning(
                "the student's weights are %s, on which small updates are lost: load it in float32 "
                "and set bf16=True for bfloat16 compute",
                self.model.dtype,
            )
        _keep_losses_float32(self.accelerator)
        self.model_accepts_loss_kwargs = True  # what transformers < 5.19 reads instead
        if self.args.n_gpu > 1:
            raise ValueError(
                f"one process sees {self.args.n_gpu} GPUs; start one process per GPU with "
                "accelerate launch, or set CUDA_VISIBLE_DEVICES"
            )
        # The keys of a block are not the names of the model's arguments, and all are needed.
        self.args.remove_unused_columns = False
        self.on_teacher_losses = on_teacher_losses
        self.method, self.guidance, self.divisor = method, guidance or Guidance(), divisor
        add_token_losses(self.model)
        self.teacher = (
            teacher
            if teacher is None or isinstance(teacher, StoredTeacher)
            else ResidentTeacher(teacher, self.args.device)
        )
        self.metrics = GuidanceMetrics(self.args.device)
        self.add_callback(StepGuard(self))

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Make a new student, for `model_init`, that gives token losses."""
        return add_token_losses(super().call_model_init(trial))

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int] | None:
        """End an epoch where the last whole global batch ends.

        Accelerate would repeat the first blocks until every process has a batch, and an epoch's
        last step would depend on how many processes there are. What is left out differs by epoch.
        """
        sampler = super()._get_train_sampler(train_dataset)
        if not isinstance(sampler, RandomSampler):
            return sampler
        args = self.args
        blocks_per_step = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        blocks = len(sampler.data_source)
        kept = blocks - blocks % blocks_per_step if blocks > blocks_per_step else blocks
        return RandomSampler(sampler.data_source, num_samples=kept, generator=sampler.generator)

    # -- Eq. 3: the divisor ------------------------------------------------------------------

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], Tensor | None]:
        """Fetch the micro-batches of an optimizer step and count its divisor, over all processes.

        Both divisors follow from labels and ranges alone, so they are known before any forward.
        """
        if self.state.global_step >= self.state.max_steps:
            return [], None  # a run resumed at its end; Trainer alone would take one more step
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        count = torch.tensor(sum(map(self._divisor_count, batches)), device=device)
        return batches, self.accelerator.reduce(count, "sum")

    def _divisor_count(self, batch: Mapping[str, Any]) -> int:
        if self.divisor == "all" or self.method == "cpt":
            return int(sum(batch["mapped_tokens"]) + sum(batch["unmapped_tokens"]))
        return self._weighted_tokens(batch)

    def _weighted_tokens(self, batch: Mapping[str, Any]) -> int:
        """How many tokens of a batch get weight 1: known on the host, so nothing waits for it."""
        mapped, unmapped = batch["mapped_tokens"], batch["unmapped_tokens"]
        guidance, strategy = self.guidance, self.guidance.unmapped
        if self.method == "cpt":
            return int(sum(mapped) + sum(unmapped))
        if self.method == "random":
            mapped = [a + b for a, b in zip(mapped, unmapped, strict=True)]
            unmapped, strategy = [0] * len(mapped), "exclude"
        if guidance.scope == "batch":
            mapped, unmapped = [sum(mapped)], [sum(unmapped)]
        return sum(
            selected_count(a, b, guidance.top_k, strategy)
            for a, b in zip(mapped, unmapped, strict=True)
        )

    # -- Eq. 2 to 4: the loss ----------------------------------------------------------------

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Eq. 3: this micro-batch's share of the weighted mean loss, times the processes.

        DDP and FSDP average gradients over processes; multiplying by their number makes the sum of
        all shares the mean over the global batch. Gradient flows to the student only.
        """
        # The teacher goes first: its activations are gone before the student's come.
        teacher = self._score_with_teacher(inputs) if self.teacher is not None else None
        loss_BS = self._student_losses(model, inputs, self._weighted_tokens(inputs))
        valid_BS = inputs["labels"] != IGNORED_LABEL
        weight_BS = self._weights(loss_BS.detach(), valid_BS, teacher, inputs["block"])
        self.metrics.add_student(loss_BS, valid_BS, weight_BS, inputs["block"])
        assert isinstance(num_items_in_batch, Tensor)
        share = self.accelerator.num_processes / num_items_in_batch.clamp(min=1)
        loss = (weight_BS * loss_BS).sum() * share
        return (loss, {}) if return_outputs else loss

    def _score_with_teacher(self, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Eq. 2: the teacher's loss on every student token [B, S], and where there is one."""
        assert self.teacher is not None
        with self.metrics.time_teacher():
            loss_BT, valid_BT = self.teacher.losses(inputs)
        if self.on_teacher_losses is not None:
            self.on_teacher_losses(inputs["block"], loss_BT)
        self.metrics.add_teacher(loss_BT, valid_BT, inputs["block"])
        return self.teacher.reduce(
            *aggregate_teacher_losses(
                loss_BT, inputs["teacher_ranges"], self.guidance.aggregation, valid_BT
            )
        )

    def _weights(
        self,
        loss_BS: Tensor,
        valid_BS: Tensor,
        teacher: tuple[Tensor, Tensor] | None,
        block_B: Tensor,
    ) -> Tensor:
        """Eq. 4: weight 1 for the tokens that are trained on, 0 for the others."""
        guidance = self.guidance
        if self.method == "random":
            scores_BS = random_scores(block_B, loss_BS.shape[1], self.args.seed)
            return select_top(scores_BS, valid_BS, guidance.top_k, guidance.scope).float()
        if teacher is None:
            return valid_BS.float()
        teacher_BS, mapped_BS = teacher
        self.metrics.add_excess(loss_BS - teacher_BS, mapped_BS & valid_BS)
        return select_tokens(
            loss_BS,
            teacher_BS,
            valid_BS,
            mapped_BS,
            top_k=guidance.top_k,
            unmapped=guidance.unmapped,
            scope=guidance.scope,
        )

    def _student_losses(
        self, model: nn.Module, inputs: dict[str, Any], weighted_tokens: int | None = None
    ) -> Tensor:
        """Eq. 1 for every student token [B, S].

        Through the wrapped module's own forward: anything else would make DDP skip its all-reduce,
        silently.
        """
        losses: Tensor = model(
            input_ids=inputs["input_ids"],
            position_ids=inputs["position_ids"],
            labels=inputs["labels"],
            token_losses=True,
            weighted_tokens=weighted_tokens,
        )
        return losses

    # -- Evaluation, logs and safety ---------------------------------------------------------

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[None, Tensor, Tensor]:
        """Sum of the plain losses and number of label tokens of every row.

        Trainer averages batch losses with equal weights; gathering the rows' sums instead gives the
        loss per token, and drops the rows that pad the last batch.
        """
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss_BS = self._student_losses(model, inputs)
        return None, loss_BS.sum(-1), (inputs["labels"] != IGNORED_LABEL).sum(-1)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add what was measured since the last log."""
        if "loss" in logs:

            def reduce(sums: Tensor) -> Tensor:
                total: Tensor = self.accelerator.reduce(sums, "sum")
                return total

            logs |= self.metrics.read(reduce, self.accelerator.num_processes)
        super().log(logs, start_time)

    @property
    def evaluated_last_step(self) -> bool:
        """Whether the model as it is now has been evaluated already."""
        return not self.args.load_best_model_at_end and any(
            "eval_loss" in entry and entry["step"] == self.state.global_step
            for entry in self.state.log_history
        )

    def reduce_max(self, values: Tensor) -> Tensor:
        """Largest value over all processes, element by element."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(values, op=ReduceOp.MAX)
        return values

    def save_progress(self) -> str:
        """Save a checkpoint of the last completed step, if it has none, and return its path."""
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        path = os.path.join(str(self.args.output_dir), name)
        exists = torch.tensor(int(os.path.isdir(path)), device=self.args.device)
        if not self.reduce_max(exists).item():  # all processes save, or none
            self._save_checkpoint(self.model, trial=None)
        return path


def _keep_losses_float32(accelerator: Accelerator) -> None:
    """Undo two defaults of Accelerate's FSDP2 under mixed precision.

    It casts what the student's forward returns, here losses that are to be ranked, and reduces
    gradients in the parameters' bfloat16 or float16.
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None and plugin.fsdp_version == 2 and plugin.mixed_precision_policy:
        plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=plugin.mixed_precision_policy.param_dtype, reduce_dtype=torch.float32
        )


def _mean_token_loss(rows: EvalPrediction) -> dict[str, float]:
    sums, counts = np.asarray(rows.predictions), np.asarray(rows.label_ids)
    return {"loss": float(sums.sum(dtype=np.float64) / max(counts.sum(), 1))}


def _check_choice(option: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{option} must be one of {', '.join(choices)}, got {value!r}")
