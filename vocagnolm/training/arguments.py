"""Turns the arguments of `VocAgnoTrainer` into those of `Trainer`."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import IterableDataset
from transformers import PreTrainedModel

from vocagnolm.collator import PackedCollator
from vocagnolm.fields import OptionError, listed
from vocagnolm.method import Method, name_own
from vocagnolm.models.load import context_length
from vocagnolm.objective import Objective, StoredTeacher
from vocagnolm.packing import Blocks
from vocagnolm.shell.extras import is_installed, require
from vocagnolm.training.assembled import Assembled, assembled_of_loaded
from vocagnolm.training.config import VocAgnoConfig
from vocagnolm.training.options import DataOptions, GuidanceOptions, ModelOptions
from vocagnolm.training.requirements import check_evaluation, evaluation_losses
from vocagnolm.training.settings import Job


def own_copy(args: VocAgnoConfig | None, peft_config: object = None) -> VocAgnoConfig:
    """Copy the arguments, because a trainer changes them. Reject other classes."""
    if args is None:
        args = VocAgnoConfig()
    if not isinstance(args, VocAgnoConfig):
        raise ValueError(f"args must be a VocAgnoConfig, got {type(args).__name__}")
    if peft_config is not None:
        require("peft", "peft_config")
        from peft import PeftConfig

        if not isinstance(peft_config, PeftConfig):
            raise ValueError(
                "peft_config must be a config of PEFT, such as LoraConfig, got "
                f"{type(peft_config).__name__}"
            )
    args_copy: VocAgnoConfig = copy.copy(args)
    args_copy.accelerator_config = copy.copy(args.accelerator_config)
    return args_copy


def resolve_method(
    args: VocAgnoConfig, method: str | Method | None, objective: type[Objective] | None
) -> Method:
    """Return the settings of the method. A `method` next to a config replaces the config's."""
    if isinstance(method, str):
        method = Method(method)
    if objective:
        method = replace(method or args.guidance, method=name_own("method", objective))
    if method is not None:
        for name, value in vars(method).items():
            setattr(args, name, value)
        # Together they are checked like a config's.
        GuidanceOptions.__post_init__(args)
    return args.guidance


def assemble_arguments(
    args: VocAgnoConfig, model: Any, teacher: Any, kwargs: dict[str, Any], peft_config: Any
) -> Assembled:
    """Load what is given by name, and pack documents."""
    # All of these would fail only after the alignment, or inside a library.
    check_evaluation(args, evaluation_losses(kwargs.get("eval_dataset")))
    guides = [] if isinstance(teacher, StoredTeacher) else listed(teacher or [])
    for name, place in [("model", model), *(("teacher", guide) for guide in guides)]:
        if place is not None and not isinstance(place, str | Path | nn.Module):
            raise ValueError(
                f"{name} must be a name, a directory or a model, got {type(place).__name__}"
            )
    # A machine for timings may lack `datasets`. It has loaded models and packed sequences only.
    if not is_installed("datasets"):
        teachers = None if isinstance(teacher, StoredTeacher) else listed(teacher or [])
        job = Job(ModelOptions(model, teachers or None), DataOptions(dataset=[]), args)
        return assembled_of_loaded(
            job,
            kwargs.get("train_dataset"),
            kwargs.get("eval_dataset"),
            kwargs.get("processing_class"),
        )
    from vocagnolm.training.assembly import assemble_in_python

    return assemble_in_python(args, model, teacher, kwargs, peft_config)


def load_models(
    assembled: Assembled, model: Any, teacher: Any, method: Method, args: VocAgnoConfig
) -> tuple[Any, Sequence[PreTrainedModel] | StoredTeacher | None]:
    """Return the student and its teachers with their weights. Loaded ones stay as they are."""
    if assembled.models is not None:
        # Import this only now, because it needs `datasets`, which a machine for timings may lack.
        from vocagnolm.training.models import load_weights

        options = assembled.job.model
        model, loaded_teacher = load_weights(assembled.models, options, args.device, args.seed)
        teacher = loaded_teacher or teacher
    # A PeftModel is no PreTrainedModel.
    teachers: Any = [teacher] if isinstance(teacher, nn.Module) else teacher
    if isinstance(teachers, StoredTeacher):
        method.check_teacher(teachers.teachers, is_stored=True)
    else:
        method.check_teacher(len(teachers or ()))
        _reject_shared_model(model, teachers or ())
        _keep_teacher_rope(model, teachers or (), args)
    return model, teachers


def arguments_of_trainer(kwargs: dict[str, Any], peft_config: Any) -> dict[str, Any]:
    """Return the arguments for Trainer. Reject those without effect."""
    if peft_config is not None and kwargs.get("model_init"):
        raise ValueError("peft_config has no effect with model_init: let it return a PeftModel")
    for name in ("compute_metrics", "compute_loss_func", "preprocess_logits_for_metrics"):
        if kwargs.pop(name, None) is not None:
            raise ValueError(f"{name} has no effect: the method computes no logits")
    return kwargs


def _reject_shared_model(student: Any, teachers: Sequence[Any]) -> None:
    """Reject a teacher that is the student."""
    if any(teacher is student for teacher in teachers):
        raise ValueError(
            "model and teacher are one object, and freezing the teacher would freeze the "
            "student; pass copy.deepcopy(model)"
        )


def _keep_teacher_rope(student: Any, teachers: Sequence[Any], args: VocAgnoConfig) -> None:
    """Let Liger leave the rotary embedding alone if a teacher is of the student's family.

    When training begins, after the teachers were tested, Liger replaces it for the whole family, so
    the teacher would compute with it, too.
    """
    kernels = args.liger_kernel_config
    if student is None or not isinstance(kernels, dict):
        return
    families = [teacher.config.model_type for teacher in teachers]
    if student.config.model_type in families:
        args.liger_kernel_config = kernels | {"rope": False}


def make_collator(
    method: Method, args: VocAgnoConfig, collator: object, assembled: Assembled
) -> PackedCollator:
    """Return the given collator if it suits the method, or else the dataset's.

    Raises:
        ValueError: the collator does not suit, or cannot read the training or evaluation data.
    """
    dataset = assembled.train_dataset
    chunks = method.chunks if method.method == "chunk" else None
    if isinstance(dataset, Blocks) and args.max_length != dataset.max_length:
        raise ValueError(
            f"train_dataset has sequences of {dataset.max_length} tokens: set args.max_length to it"
        )
    if collator is None and isinstance(dataset, Blocks):
        collator = PackedCollator(
            dataset.max_length,
            attend_across_documents=args.attend_across_documents,
            teacher_max_length=dataset.teacher_max_length,
            chunks=chunks,
            shares=method.aggregation_in_effect == "share",
        )
    if collator is None:
        raise ValueError(
            "train_dataset must be documents or the Blocks of prepare_dataset, got "
            f"{type(dataset).__name__}"
        )
    if not isinstance(collator, PackedCollator) or collator.chunks != chunks:
        raise OptionError(
            "method",
            f"{method.method} needs the packed sequences of vocagnolm.packing.Blocks and "
            f"data_collator=PackedCollator(..., chunks={chunks}), got {str(collator)[:99]}",
        )
    if isinstance(dataset, Blocks):
        _check_collator(collator, dataset, args)
    method.check_chunks(collator.max_length)
    check_packed(assembled.eval_dataset, collator, "eval_dataset")
    return collator


def _check_collator(collator: PackedCollator, blocks: Blocks, args: VocAgnoConfig) -> None:
    """Raise a ValueError if a collator contradicts the packed sequences or the config."""
    crosses = args.attend_across_documents
    if collator.max_length != blocks.max_length:
        raise ValueError(
            f"data_collator has max_length={collator.max_length}, and train_dataset sequences of "
            f"{blocks.max_length} tokens: give both the same"
        )
    if collator.attend_across_documents != crosses:
        raise ValueError(
            f"data_collator has attend_across_documents={not crosses}, and args {crosses}: give "
            "both the same"
        )


def check_stored(source: object, blocks: Blocks, collator: Callable[[list[Any]], Any]) -> None:
    """Raise a ValueError if losses of a store are needed, and packed sequences have none."""
    if isinstance(source, StoredTeacher) and "teacher_losses" not in collator([blocks[0]]):
        raise ValueError(
            "train_dataset has no losses of a teacher: give documents with the store as teacher"
        )


def check_contexts(models: Sequence[Any], name: str, blocks: Blocks) -> None:
    """Raise a ValueError if a segment has more tokens than the model that reads it was made for.

    `models` are the student and its loaded teachers. Documents are cut to fit, but the caller of
    `prepare_dataset` chooses how long the segments of Blocks may be.
    """
    lengths = blocks.longest_segments
    for index, model in enumerate(models):
        # A teacher with the student's tokens reads the student's segments.
        length = lengths[index] if index < len(lengths) else lengths[0]
        context = context_length(model.config)
        if length > context:
            role, option = ("teacher", "teacher_context") if index else ("student", "max_length")
            raise ValueError(
                f"{name} has a segment of {length} {role} tokens, and the {role}'s context is "
                f"{context}: give prepare_dataset {option}={context}"
            )


def check_packed(dataset: Any, collator: Callable[[list[Any]], Any], name: str) -> None:
    """Collate one item of a dataset, or of each in a dict, if it is not Blocks.

    The first evaluation, which would fail, may come after hours of training.

    Raises:
        ValueError: it is neither documents, which would be Blocks by now, nor packed sequences.
    """
    for part in dataset.values() if isinstance(dataset, dict) else [dataset]:
        if part is None or isinstance(part, Blocks | IterableDataset):
            continue
        try:
            collator([part[0]])
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(
                f"{name} must be documents or the Blocks of prepare_dataset, got "
                f"{type(part).__name__}"
            ) from error
