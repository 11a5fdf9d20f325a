"""Reject arguments of `transformers` that have no effect or harm a run, in one line each."""

import copy
import inspect
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from accelerate.utils import parse_flag_from_env
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainingArguments, get_scheduler
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.trainer_utils import IntervalStrategy, SaveStrategy, SchedulerType
from transformers.training_args import OptimizerNames

from vocagnolm.dist import connection_fault
from vocagnolm.host.options import REFUSED, raise_first, wrong_values

logger = logging.getLogger(__name__)

# Steps of a run that is never made: its schedule is, as a check.
_CHECK_STEPS = 1000
# Arguments of any Trainer that would end in errors of Python's own.
_KINDS = {"model": nn.Module | None, "args": TrainingArguments | None} | {
    "callbacks": list | None,
    "optimizers": tuple | list,
}
# Options with the one value that is accepted, and what is wrong with any other.
REJECTED: dict[str, tuple[object, str]] = REFUSED["options"]


def unsupported_options(args: TrainingArguments) -> Iterator[str]:
    """Yield a message for each option that is not supported; `args` may not be processed yet."""
    for name, (value, reason) in REJECTED.items():
        # Another transformers may lack one.
        if (found := vars(args).get(name, value)) != value:
            yield f"--{name} {found} {reason}: leave it out"
    yield from wrong_values(vars(args))
    # An Accelerate file asks in the environment.
    if args.deepspeed or parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
        yield "DeepSpeed is not supported: shard with FSDP2 (accelerate_configs)"
    if args.max_steps == 0:
        yield "--max_steps 0 makes no update: leave it out, or use --dry_run to see the plan"


def argument_faults(args: TrainingArguments) -> Iterator[str]:
    """Yield a message for each of all processed arguments that a trainer cannot work with."""
    if fault := connection_fault(args.world_size):
        yield fault
    yield from unsupported_options(args)
    yield from _faults_of_loading(args)
    yield from _faults_of_evaluation(args)
    given = {name for name, value in vars(args).items() if value not in (None, False, 0, "no")}
    for needed, names in REFUSED["idle_without"].items():
        for name in names:
            if name in given and not given & {*needed.split(" or ")}:
                yield f"--{name} has no effect without --{needed}: leave it out"
    yield from _faults_of_schedule(args)
    yield from _faults_of_optimizer(args)
    if args.fp16 and args.device.type == "cpu":
        yield "--fp16 has no effect on a CPU: leave it out, or use --bf16"
    kernels = args.liger_kernel_config or {}
    fuses = kernels.get("fused_linear_cross_entropy", True) or kernels.get("cross_entropy", False)
    if args.use_liger_kernel and fuses:
        yield (
            "--use_liger_kernel would replace the loss: set fused_linear_cross_entropy and "
            "cross_entropy to false in --liger_kernel_config"
        )
    sharding = vars(args).get("fsdp_plugin_args") if args.fsdp else None
    if sharding is None and parse_flag_from_env("ACCELERATE_USE_FSDP"):
        # Accelerate's own default is the first version.
        sharding = {"fsdp_version": os.environ.get("FSDP_VERSION", "1")}
    if sharding is not None and int(sharding["fsdp_version"]) != 2:
        yield "FSDP1 is not supported: set fsdp_version: 2, as in accelerate_configs"
    if (gpus := args.n_gpu) > 1:
        yield (
            f"one process sees {gpus} GPUs; start one process per GPU with accelerate launch, or "
            "set CUDA_VISIBLE_DEVICES"
        )


def _faults_of_loading(args: TrainingArguments) -> Iterator[str]:
    """Yield a message for ways of reading the data that make other batches than planned."""
    for name, expected, reason in (
        ("use_seedable_sampler", True, "makes resuming inexact"),
        ("split_batches", False, "divides the global batch by the number of processes"),
        ("dispatch_batches", None, "is not supported (batches hold more than tensors)"),
    ):
        found = vars(args.accelerator_config or AcceleratorConfig())[name]
        if found not in (expected, None):
            yield f"--accelerator_config: {name} {found} {reason}: leave it out"


def _faults_of_evaluation(args: TrainingArguments) -> Iterator[str]:
    """Yield a message for options that look at evaluations which are not made."""
    if (metric := args.metric_for_best_model) not in (None, "loss", "eval_loss"):
        yield (
            f"--metric_for_best_model {metric} is not measured: expected loss, the plain loss "
            "per token of the evaluation"
        )
    if args.greater_is_better:
        yield "--greater_is_better true would keep the largest loss: leave it out"
    if args.greater_is_better is not None and args.metric_for_best_model is None:
        yield "--greater_is_better has no effect without --metric_for_best_model: leave it out"
    if args.save_strategy == SaveStrategy.BEST and args.eval_strategy == IntervalStrategy.NO:
        yield "--save_strategy best needs an evaluation to choose by: set --eval_strategy"


def _faults_of_schedule(args: TrainingArguments) -> Iterator[str]:
    """Make the learning rate's schedule once, while an error costs nothing yet."""
    kwargs = cast(dict[str, Any], args.lr_scheduler_kwargs or {})
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=args.learning_rate)
    # Making the schedule takes its first step, of warm-up; the last one decays.
    try:
        schedule = get_scheduler(args.lr_scheduler_type, optimizer, 1, _CHECK_STEPS, kwargs)
        for factor in vars(schedule).get("lr_lambdas", ()):
            factor(_CHECK_STEPS - 1)
    except (TypeError, ValueError, ArithmeticError) as error:
        yield (
            f"--lr_scheduler_kwargs {json.dumps(kwargs)} does not suit "
            f"--lr_scheduler_type {SchedulerType(args.lr_scheduler_type).value}: {error}"
        )


def _faults_of_optimizer(args: TrainingArguments) -> Iterator[str]:
    """Yield a message where none can be made; one that asks for the model is made later."""
    name = OptimizerNames(args.optim).value
    try:
        made = Trainer.get_optimizer_cls_and_kwargs(args)
        for option in ("optim_args", "optim_target_modules"):
            without = copy.copy(args)
            vars(without)[option] = None
            if vars(args)[option] and Trainer.get_optimizer_cls_and_kwargs(without) == made:
                yield f"--{option} has no effect with --optim {name}: leave it out"
    except (ImportError, ValueError) as error:
        if "need to pass a" not in str(error):
            yield f"--optim {name} cannot be used: {error}"


def named_arguments(args: Sequence[object], kwargs: Mapping[str, object]) -> dict[str, Any]:
    """Return the arguments of a Trainer by their names; one that is not taken is a ValueError."""
    others = {*REFUSED["of_others"]} & {name for name in kwargs if kwargs[name] is not None}
    raise_first(f"{name} has no effect: {REFUSED['of_others'][name]}" for name in sorted(others))
    try:
        given = dict(inspect.signature(Trainer).bind_partial(*args, **kwargs).arguments)
    except TypeError as error:
        raise ValueError(f"the trainer {error}") from error
    raise_first(wrong_values(given, _KINDS))
    return given


def check_student(student: PreTrainedModel, teachers: object) -> None:
    """Reject a student that its teacher freezes; warn of weights on which updates are lost."""
    if isinstance(teachers, Sequence) and any(teacher is student for teacher in teachers):
        raise ValueError(
            "model and teacher are one object, and freezing the teacher would freeze the "
            "student; pass copy.deepcopy(model)"
        )
    if (dtype := student.dtype) in (torch.bfloat16, torch.float16):
        instead = "load it in float32 and set bf16=True for bfloat16 compute"
        text = "the student's weights are %s, on which small updates are lost: %s"
        logger.warning(text, dtype, instead)
