"""What options need from packages, processes, devices and documents, checked before training."""

from typing import Any

from accelerate.utils import parse_flag_from_env
from transformers import Trainer
from transformers.training_args import OptimizerNames

from vocagnolm.fields import OptionError, named
from vocagnolm.models.quantization import QUANTIZATIONS, quantization
from vocagnolm.models.sharding import devices_of_a_machine
from vocagnolm.packing import Blocks
from vocagnolm.shell.extras import is_installed, require, require_quantization
from vocagnolm.training.config import VocAgnoConfig
from vocagnolm.training.settings import Job


def check_launch(job: Job) -> None:
    """Raise a ValueError for options that these processes and devices cannot support."""
    args = job.args
    _check_packages(args)
    # A layer's weights are gathered only for its own forward pass. Whatever reads the output head
    # from outside would get a shard.
    if args.teacher_sharding == "node":
        if args.teacher_quantization or args.guidance.distance:
            raise OptionError(
                "teacher_sharding",
                f"is not supported with {named('teacher_quantization')}, or with {named('method')} "
                "kld or uld, which need the teacher's whole output head: leave it out",
            )
        if devices_of_a_machine() < 2 and not args.dry_run:
            raise OptionError("teacher_sharding", "node needs several processes on a machine")
    # FSDP may be set up by the arguments or by the launcher, which uses the environment.
    plugin = args.fsdp_config if isinstance(args.fsdp_config, dict) else {}
    recomputes = parse_flag_from_env("FSDP_ACTIVATION_CHECKPOINTING")
    if job.model.use_peft and (recomputes or plugin.get("activation_checkpointing")):
        raise ValueError(
            f"fsdp_activation_checkpointing is not supported with {named('use_peft')}: PEFT would "
            f"save no adapters: set it to false and use {named('activation_checkpointing')}"
        )


def check_evaluation(args: VocAgnoConfig, eval_dataset: Any) -> None:
    """Raise an OptionError if no evaluation gives the metric that chooses the best model.

    Trainer would find that after the first evaluation.
    """
    metric = args.metric_for_best_model
    losses = _losses_of(eval_dataset)
    if metric is None or not losses:
        return
    # As in Trainer, the prefix may be left out.
    if metric.removeprefix("eval_") not in losses:
        raise OptionError(
            "metric_for_best_model",
            f"{metric} is not among the losses of the evaluation: give one of {', '.join(losses)}",
        )
    if args.greater_is_better:
        raise OptionError("greater_is_better", "True keeps the worst model: a lower loss is better")


def _losses_of(eval_dataset: Any) -> list[str]:
    """Return the names of the losses that an evaluation of these packed sequences gives."""
    if eval_dataset is None:
        return []
    if isinstance(eval_dataset, dict):
        losses = []
        for name, dataset in eval_dataset.items():
            losses += [f"{name}_{loss}" for loss in _losses_of(dataset)]
        return losses
    # Packed sequences of several corpora also have a loss of each.
    parts = getattr(eval_dataset, "parts", {})
    return ["loss", *(f"{name}_loss" for name in parts if len(parts) > 1)]


def _check_packages(args: VocAgnoConfig) -> None:
    """Raise a ValueError for options whose packages are missing. They are loaded late."""
    # A plan may be made on a smaller machine than the job's.
    is_planned = args.dry_run and args.teacher_quantization in QUANTIZATIONS
    if args.teacher_quantization and not is_planned:
        option = f"{named('teacher_quantization')} {args.teacher_quantization}"
        if args.teacher_quantization == "fp8":
            require("torchao", option)
        require_quantization(quantization(args.teacher_quantization), option)
    # The hub's kernels replace the package.
    if args.attn_implementation == "flash_attention_2" and not is_installed("kernels"):
        require("flash_attn", f"{named('attn_implementation')} flash_attention_2")
    if args.dry_run:
        return
    try:
        Trainer.get_optimizer_cls_and_kwargs(args)
    except ImportError as error:
        raise OptionError("optim", f"{OptimizerNames(args.optim).value}: {error}") from error
    except ValueError:
        # Some optimizers need the model, or more settings. Trainer reports that.
        return


def check_enough(blocks: Blocks, args: VocAgnoConfig, corpus_name: str) -> None:
    """Raise a ValueError if there are fewer packed sequences than one optimizer step needs."""
    rows, processes = args.per_device_train_batch_size, args.world_size
    needed = rows * args.gradient_accumulation_steps * processes
    if len(blocks) >= needed:
        return
    sequences = "1 sequence" if len(blocks) == 1 else f"{len(blocks):,} sequences"
    raise ValueError(
        f"{corpus_name} makes {sequences} of {args.max_length} tokens, and one optimizer step "
        f"needs {needed:,}: {args.batch_arithmetic()}; lower one of these, or give more documents"
    )
