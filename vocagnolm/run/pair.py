"""The student and its teachers: from arguments to tokenizers, readers and weights.

Like `vocagnolm.run.job`, which is about the rest of a run, a reader of `vocagnolm.run.parse`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from vocagnolm.data import Guide, Teachers
from vocagnolm.models import sharding
from vocagnolm.models import source as models
from vocagnolm.models.adapters import add_adapters
from vocagnolm.models.quantization import quantization
from vocagnolm.run import memory
from vocagnolm.run import parse as config
from vocagnolm.store.reader import StoredReader
from vocagnolm.store.store import Store
from vocagnolm.teacher import StoredTeacher, TeacherReduction
from vocagnolm.tokenizers import (
    Reader,
    check_same_tokens,
    student_reader,
    teacher_reader,
    tokenizer_sha256,
)

DEFAULT_LENGTH = 2048  # the paper's


@dataclass(frozen=True)
class Pair:
    """The student and its teachers before their weights are loaded.

    Attributes:
        student: the model.
        student_config: its configuration.
        student_reader: how it reads.
        teachers: the models that guide it; none where there is none, or a store of their losses.
        teacher_configs: their configurations.
        teacher_tokenizers: their tokenizers.
        guide: how the teachers' tokens are mapped to the student's, if they are.
    """

    student: models.ModelSource
    student_config: PreTrainedConfig
    student_reader: Reader
    teachers: tuple[models.ModelSource, ...] = ()
    teacher_configs: tuple[PreTrainedConfig, ...] = ()
    teacher_tokenizers: tuple[Any, ...] = ()
    guide: Guide | None = None

    @property
    def teacher_rows(self) -> list[int]:
        """Tokens of each teacher that one row of a batch may hold."""
        return self.guide.limits() if self.guide else [sys.maxsize]


def load_pair(
    model: config.ModelArguments, guidance: config.GuidanceArguments, max_length: int | None = None
) -> Pair:
    """Read configurations and tokenizers, which is cheap, and refuse what cannot work.

    Args:
        model: the models, and how they are loaded.
        guidance: the method.
        max_length: student tokens of a segment; None: the paper's 2048, or the student's context
            if that is shorter.
    """
    common: dict[str, Any] = {
        "attn_implementation": model.attn_implementation,
        "trust_remote_code": model.trust_remote_code,
    }
    student = models.ModelSource(model.student, "student", model.student_revision, **common)
    student_config = student.config()
    context = models.context_length(student_config)
    max_length = max_length or min(DEFAULT_LENGTH, context)
    if max_length > context:
        raise ValueError(f"--max_length {max_length} exceeds the student's context of {context}")
    tokenizer = student.checked_tokenizer(student_config, "student", model.student_tokenizer)
    pair = Pair(student, student_config, student_reader(tokenizer, max_length))
    if model.teacher_losses:
        _teacher_reduction(model)  # refuses bad weights before the corpus is read
        stores = StoredReader(list(map(Store, model.teacher_losses)))
        if guidance.method == "rho1":
            _check_scored_by(tokenizer, stores)
        return replace(pair, guide=stores)
    names = model.teacher or []
    unknown: list[str | None] = [None] * len(names)
    sources = [
        models.ModelSource(name, "teacher", revision, **common)
        for name, revision in zip(names, model.teacher_revision or unknown, strict=True)
    ]
    configs = [source.config() for source in sources]
    tokenizers = [
        source.checked_tokenizer(teacher_config, "teacher", elsewhere)
        for source, teacher_config, elsewhere in zip(
            sources, configs, model.teacher_tokenizer or unknown, strict=True
        )
    ]
    pair = replace(
        pair,
        teachers=tuple(sources),
        teacher_configs=tuple(configs),
        teacher_tokenizers=tuple(tokenizers),
    )
    return replace(pair, guide=_guide(pair, guidance, max_length))


def _guide(pair: Pair, guidance: config.GuidanceArguments, max_length: int) -> Guide | None:
    """How the teachers at hand read what the student reads."""
    contexts = list(map(models.context_length, pair.teacher_configs))
    if guidance.method in ("kld", "rho1"):
        for tokenizer in pair.teacher_tokenizers:
            check_same_tokens(pair.student_reader.tokenizer, tokenizer, guidance.method)
    if guidance.method == "kld":  # the teacher is shown the student's own tokens
        if max_length > min(contexts):
            raise ValueError(
                f"--max_length {max_length} exceeds the teacher's context of {min(contexts)}"
            )
        return None
    if not pair.teachers:
        return None
    readers = map(teacher_reader, pair.teacher_tokenizers, contexts)
    by_position = guidance.method == "uld" and guidance.uld_pairing == "position"
    return Teachers(tuple(readers), by_position)


def _check_scored_by(tokenizer: Any, stores: StoredReader) -> None:
    """Refuse stores of losses of other tokens than the student's."""
    for store in stores.stores:
        if store.manifest["tokenizer_sha256"] != tokenizer_sha256(tokenizer):
            raise ValueError(
                f"--method rho1: --teacher_losses {store.directory} was scored by "
                f"{store.manifest['teacher']} with another tokenizer than the student's: score the "
                "corpus with a model that has the student's, or use --method vocagnolm"
            )


def load_models(
    pair: Pair, model: config.ModelArguments, device: torch.device, seed: int = 42
) -> tuple[nn.Module, list[PreTrainedModel] | StoredTeacher | None]:
    """Load the weights of all models; a stored teacher has none.

    Args:
        pair: where they are.
        model: how they are to be loaded.
        device: where the teachers will be.
        seed: of the student's adapters, if it is to have some.

    Raises:
        ValueError: a model cannot be loaded, or the student cannot have these adapters.
    """
    student = pair.student.load(torch.float32)
    teacher = _load_teacher(pair, model, device, student)
    if model.use_peft:
        return add_adapters(student, model, seed, pair.student.revision), teacher
    return student, teacher


def _load_teacher(
    pair: Pair, model: config.ModelArguments, device: torch.device, student: PreTrainedModel
) -> list[PreTrainedModel] | StoredTeacher | None:
    if model.teacher_losses:
        reduction = _teacher_reduction(model)
        return StoredTeacher(reduction.teachers, reduction.reduction, reduction.weights)
    dtype = getattr(torch, teacher_dtype(model, device))
    teachers = []
    for source, tokenizer in zip(pair.teachers, pair.teacher_tokenizers, strict=True):
        teacher = source.load(dtype, teacher_quantization(model, device), device)
        models.check_distinct(student, teacher, pair.student_reader.tokenizer, tokenizer)
        if model.teacher_sharding == "node":  # before the next one is loaded
            teacher = sharding.shard_inside_machine(teacher, device)
        teachers.append(teacher)
    return teachers or None


def student_sizes(pair: Pair, model: config.ModelArguments) -> memory.Sizes:
    """The student's sizes, adapters included, before weights are loaded.

    Raises:
        ValueError: the student cannot have the adapters that are asked for.
    """
    skeleton: Any = pair.student.skeleton(pair.student_config)
    if model.use_peft:
        skeleton = add_adapters(skeleton, model, seed=0)
    return memory.sizes_of(skeleton)


def teacher_sizes(pair: Pair) -> list[memory.Sizes]:
    """The sizes of the teachers, before weights are loaded."""
    both = zip(pair.teachers, pair.teacher_configs, strict=True)
    return [memory.sizes_of(teacher.skeleton(its_config)) for teacher, its_config in both]


def teacher_dtype(model: config.ModelArguments, device: torch.device) -> str:
    """The precision of the teachers on a device."""
    if model.teacher_dtype != "auto":
        return model.teacher_dtype
    return "float32" if device.type == "cpu" else "bfloat16"


def teacher_quantization(
    model: config.ModelArguments, device: torch.device
) -> dict[str, Any] | None:
    """The quantization config of the teachers on a device, if they are quantized."""
    name = model.teacher_quantization
    return quantization(name, getattr(torch, teacher_dtype(model, device))) if name else None


def _teacher_reduction(model: config.ModelArguments) -> TeacherReduction:
    count = len(model.teacher or model.teacher_losses or ())
    return TeacherReduction(count, model.teacher_reduction, tuple(model.teacher_weights or ()))


def trainer_options(
    arguments: config.Arguments, teacher: list[PreTrainedModel] | StoredTeacher | None
) -> dict[str, Any]:
    """What the trainer is told of the method."""
    model, _, guidance, _ = arguments
    return {
        "method": guidance.method,
        "guidance": guidance.guidance(),
        "divisor": guidance.loss_divisor,
        "distillation": guidance.distillation(),
        "teacher_reduction": _teacher_reduction(model) if isinstance(teacher, list) else None,
    }
