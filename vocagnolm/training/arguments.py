"""Reject options of `transformers.TrainingArguments` that have no effect or harm a resumed run."""

from collections.abc import Iterator

from transformers import TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig

_REJECTED = {
    "save_only_model": "leaves nothing to resume from",
    "label_smoothing_factor": "has no effect here",
    "auto_find_batch_size": "has no effect here",
    "ignore_data_skip": "would train on the same blocks again after every interruption",
    "batch_eval_metrics": "is not supported (evaluation needs the losses of all batches)",
    "save_on_each_node": "is not supported (all machines share --output_dir)",
    "enable_jit_checkpoint": "is not needed (signals save a checkpoint in all processes at once)",
}


def unsupported_options(args: TrainingArguments) -> Iterator[str]:
    """Yield a message for each option that is not supported; `args` may not be processed yet."""
    # Options of newer transformers may be absent.
    given = vars(args)
    for name, reason in _REJECTED.items():
        if given.get(name):
            yield f"--{name} {reason}: leave it out"
    if not args.eval_do_concat_batches:
        yield "--eval_do_concat_batches false is not supported: leave it out"
    if (sampling := given.get("train_sampling_strategy", "random")) != "random":
        yield (
            f"--train_sampling_strategy {sampling} is not supported (blocks are equally long, "
            "and packing has put similar ones side by side): leave it out"
        )
    if args.deepspeed:
        yield "--deepspeed is not supported: shard with FSDP2 (accelerate_configs)"
    if args.liger_kernel_config is not None and not args.use_liger_kernel:
        yield "--liger_kernel_config has no effect without --use_liger_kernel: leave it out"


def faults_of_loading(args: TrainingArguments) -> Iterator[str]:
    """Yield a message for ways of reading the data that make other batches than planned."""
    for name, expected, reason in (
        ("use_seedable_sampler", True, "makes resuming inexact"),
        ("split_batches", False, "divides the global batch by the number of processes"),
        ("dispatch_batches", None, "is not supported (batches hold more than tensors)"),
    ):
        found = vars(args.accelerator_config or AcceleratorConfig())[name]
        if found not in (expected, None):
            yield f"--accelerator_config: {name} {found} {reason}: leave it out"
    if (workers := args.dataloader_num_workers) < 0:
        yield f"--dataloader_num_workers must not be negative, got {workers}"
    if (metric := args.metric_for_best_model) not in (None, "loss", "eval_loss"):
        yield (
            f"--metric_for_best_model {metric} is not measured: expected loss, the plain loss "
            "per token of the evaluation"
        )


def argument_faults(args: TrainingArguments) -> Iterator[str]:
    """Yield a message for each of all processed arguments that a trainer cannot work with."""
    yield from unsupported_options(args)
    yield from faults_of_loading(args)
    if (gpus := args.n_gpu) > 1:
        yield (
            f"one process sees {gpus} GPUs; start one process per GPU with accelerate launch, or "
            "set CUDA_VISIBLE_DEVICES"
        )
