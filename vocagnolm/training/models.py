"""The student and its teachers, before and with their weights."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from vocagnolm.attention import TORCH_VARLEN, why_not_varlen
from vocagnolm.fields import one_for_each
from vocagnolm.models.adapters import adapt, lora_config
from vocagnolm.models.early_probe import check_kind
from vocagnolm.models.load import (
    ModelSource,
    check_distinct,
    context_length,
    resolve_dtype,
)
from vocagnolm.models.memory import Sizes, sizes_of
from vocagnolm.models.quantization import quantization
from vocagnolm.models.sharding import shard_inside_machine
from vocagnolm.objective import StoredTeacher
from vocagnolm.readers import (
    Reader,
    TeacherReaders,
    student_reader,
    teacher_reader,
)
from vocagnolm.store.format import Store
from vocagnolm.store.read import StoredReader
from vocagnolm.tokenizer import Role, check_same_tokens, tokenizer_sha256
from vocagnolm.training.config import VocAgnoConfig
from vocagnolm.training.options import GuidanceOptions, ModelOptions, PackOptions

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Model:
    """A model before its weights are loaded."""

    source: ModelSource
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    # With the adapters of a student.
    sizes: Sizes


@dataclass(frozen=True)
class Models:
    """The student and its teachers before their weights are loaded.

    Attributes:
        reader: the student's.
        teachers: none with a store of losses, and none without a teacher.
        guide: maps the teachers' tokens to the student's; None where nothing is mapped.
        teacher_dtype: precision of the teachers, never "auto".
        options: how they are loaded, and read texts.
    """

    student: Model
    reader: Reader
    teachers: list[Model]
    guide: TeacherReaders | None
    teacher_dtype: str
    options: GuidanceOptions

    @property
    def teacher_quantization(self) -> dict[str, object] | None:
        """Quantization config of the teachers, if any."""
        name, dtype = self.options.teacher_quantization, getattr(torch, self.teacher_dtype)
        return quantization(name, dtype) if name else None


def read_models(
    model: ModelOptions,
    options: GuidanceOptions,
    device: torch.device,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    shorten: bool = False,
) -> Models:
    """Read configurations and tokenizers, which is cheap; `tokenizer` is the student's, if given.

    With `shorten`, a segment has no more student tokens than fit the student's context.

    Raises:
        ValueError: a model or tokenizer cannot be read, or they do not suit each other.
    """

    def source_of(model: Any, role: Role, revision: str | None, more: Any) -> ModelSource:
        loaded = None if isinstance(model, str) else model
        name = model if loaded is None else str(loaded.name_or_path)
        # An empty revision stands for none.
        given = (revision or None, options.attn_implementation, options.trust_remote_code)
        return ModelSource(name, role, *given, more or {}, loaded)

    names, more = model.teacher or [], options.model_init_kwargs
    sources = [source_of(model.student, "student", options.student_revision, more)]
    for name, revision in zip(names, options.teacher_revision or [""] * len(names), strict=True):
        sources.append(source_of(name, "teacher", revision, options.teacher_model_init_kwargs))
    places: list[Any] = [tokenizer or options.student_tokenizer]
    places += options.teacher_tokenizer or [None] * len(names)
    # All configurations first: a wrong name is reported before any tokenizer is read, which takes
    # longer.
    configs = [source.config() for source in sources]
    for source, config in zip(sources, configs, strict=True):
        is_packed = isinstance(options, PackOptions) and not options.attend_across_documents
        if is_packed and source.loaded is None:
            check_kind(config, source.attn_implementation, trust=source.trust_remote_code)
    found = []
    for source, config, place in zip(sources, configs, places, strict=True):
        role = cast(Role, source.role)
        skeleton: nn.Module = source.skeleton(config)
        source = _with_attention(source, skeleton, options, device)
        if role == "student" and model.use_peft:
            skeleton = add_adapters(cast(PreTrainedModel, skeleton), model, seed=0)
        read = source.checked_tokenizer(config, role, place)
        found.append(Model(source, config, read, sizes_of(skeleton)))
    student, *teachers = found
    for teacher in teachers:
        if _is_same(student.source, teacher.source):
            logger.warning(
                "the teacher is the student itself (%s): at first no token's loss is above its own",
                teacher.source.name,
            )
    context = context_length(student.config)
    length = min(options.max_length, context) if shorten else options.max_length
    if length > context:
        raise ValueError(f"--max_length {length} exceeds the student's context of {context}")
    reader = student_reader(student.tokenizer, length, options.student_chat_template)
    guide = _guide_of(student, teachers, model, options)
    dtype = resolve_dtype(options.teacher_dtype, device)
    return Models(student, reader, teachers, guide, dtype, options)


def add_adapters(
    model: PreTrainedModel, options: ModelOptions, seed: int, revision: str | None = None
) -> nn.Module:
    """Freeze a model and give its layers the adapters of the options, drawn from the seed.

    Saved adapters name the model and its revision on the hub. A ValueError where a named layer is
    not there, or may not have an adapter.
    """
    config = lora_config(model, **options.lora_arguments(), revision=revision)
    return adapt(model, config, seed)


def _is_same(student: ModelSource, teacher: ModelSource) -> bool:
    """Test whether two names are of one model."""
    names = [
        str(Path(source.name).resolve()) if Path(source.name).exists() else source.name
        for source in (student, teacher)
    ]
    return bool(student.name) and names[0] == names[1] and student.revision == teacher.revision


def _with_attention(
    source: ModelSource, skeleton: nn.Module, options: GuidanceOptions, device: torch.device
) -> ModelSource:
    """Choose torch_varlen where nothing else is asked for, and a GPU computes in 16 bits."""
    trains = source.role == "student"
    if not isinstance(options, VocAgnoConfig) or not options.is_mixed:
        return source
    # A plan is for a GPU, wherever it is made.
    if device.type != "cuda" and not options.dry_run:
        return source
    if source.loaded is not None or options.attn_implementation:
        return source
    if not trains and options.teacher_dtype == "float32":
        return source
    if reason := why_not_varlen(cast(PreTrainedModel, skeleton), trains=trains):
        logger.warning(
            "--%s %s computes with sdpa, which takes more memory than torch_varlen: %s",
            *(source.role, source.name, reason),
        )
        return source
    return replace(source, attn_implementation=TORCH_VARLEN)


def _guide_of(
    student: Model, teachers: Sequence[Model], model: ModelOptions, options: GuidanceOptions
) -> TeacherReaders | None:
    """Open the stores of losses, or return how the teachers read what the student reads."""
    if model.teacher_losses:
        stores = [Store(path) for path in model.teacher_losses]
        for store in stores if options.method == "rho1" else ():
            if store.manifest["tokenizer_sha256"] != tokenizer_sha256(student.tokenizer):
                raise ValueError(
                    f"--method rho1: --teacher_losses {store.directory} was scored by "
                    f"{store.manifest['teacher']} with another tokenizer than the student's: score "
                    "the corpus with a model that has the student's, or use --method vocagnolm"
                )
        return StoredReader(
            stores,
            first=options.teacher_reduction == "first",
            plain=options.missing_losses == "plain",
        )
    if options.method in ("kld", "rho1"):
        for teacher in teachers:
            check_same_tokens(student.tokenizer, teacher.tokenizer, options.method)
    contexts = [context_length(teacher.config) for teacher in teachers]
    # With KLD the teacher is shown the student's own tokens, and nothing is mapped.
    if options.method == "kld" and options.max_length > contexts[0]:
        raise ValueError(
            f"--max_length {options.max_length} exceeds the teacher's context of {contexts[0]}"
        )
    if options.method == "kld" or not teachers:
        return None
    given, readers = options.teacher_chat_template, []
    templates = one_for_each("teacher_chat_template", given, len(teachers), "teachers")
    for teacher, context, template in zip(teachers, contexts, templates, strict=True):
        readers.append(teacher_reader(teacher.tokenizer, context, template))
    by_position = options.method == "uld" and options.uld_pairing == "position"
    return TeacherReaders(readers, by_position)


def load_weights(
    models: Models, options: ModelOptions, device: torch.device, seed: int = 42
) -> tuple[nn.Module, list[PreTrainedModel] | StoredTeacher | None]:
    """Load the weights of the student and its teachers; the seed is that of adapters.

    Raises:
        ValueError: a model cannot be loaded, or the student cannot have these adapters.
    """
    dtype, source = getattr(torch, models.teacher_dtype), models.student.source
    # Small updates would be lost on weights in 16 bits.
    student = source.load(torch.float32)
    teachers = []
    for teacher in models.teachers:
        model = teacher.source.load(dtype, models.teacher_quantization, device)
        check_distinct(student, model, models.student.tokenizer, teacher.tokenizer)
        # Before the next one is loaded: a machine may not hold two whole ones.
        if models.options.teacher_sharding == "node":
            model = shard_inside_machine(model, device)
        teachers.append(model)
    stored = StoredTeacher(len(options.teacher_losses)) if options.teacher_losses else None
    # Behind the comparison, which adapters would mislead.
    trained = add_adapters(student, options, seed, source.revision) if options.use_peft else student
    return trained, stored or teachers or None
