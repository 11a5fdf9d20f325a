"""The student and its teachers, before and after their weights are loaded."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations.liger import apply_liger_kernel

from vocagnolm.attention import TORCH_VARLEN, why_not_varlen
from vocagnolm.fields import OptionError, named, one_for_each
from vocagnolm.models.adapters import adapt, check_adapted, lora_config
from vocagnolm.models.cost import Sizes, sizes_of
from vocagnolm.models.load import ModelSource, choose_dtype, context_length, quantization
from vocagnolm.models.sharding import shard_inside_machine
from vocagnolm.objective import StoredTeacher
from vocagnolm.readers import Reader, TeacherReaders, student_reader, teacher_reader
from vocagnolm.store.format import Store
from vocagnolm.store.read import StoredReader
from vocagnolm.tokenizer import Role, check_same_tokens, tokenizer_sha256
from vocagnolm.training.config import VocAgnoConfig
from vocagnolm.training.job import Job
from vocagnolm.training.options import GuidanceOptions, ModelOptions

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Model:
    """A model before its weights are loaded. A student's sizes include its adapters."""

    source: ModelSource
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    sizes: Sizes


@dataclass(frozen=True)
class Models:
    """The student and its teachers before their weights are loaded.

    Attributes:
        student_reader: reads texts for the student.
        teachers: none with a store of losses, and none without a teacher.
        teacher_readers: read texts for the teachers; None where nothing is mapped.
        teacher_dtype: precision of the teachers, never "auto".
        options: how models are loaded, and read texts.
    """

    student: Model
    student_reader: Reader
    teachers: list[Model]
    teacher_readers: TeacherReaders | None
    teacher_dtype: str
    options: GuidanceOptions


def read_models(
    model: ModelOptions,
    options: GuidanceOptions,
    device: torch.device,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    shorten: bool = False,
) -> Models:
    """Read configurations and tokenizers, which is cheap. `tokenizer` is the student's, if given.

    With `shorten`, a segment has no more student tokens than fit into the student's context.

    Raises:
        ValueError: a model or tokenizer cannot be read, or they do not go together.
    """
    sources = _sources(model, options)
    # Read all configurations before any tokenizer, which takes longer, so that a wrong name is
    # reported at once.
    configs = [source.config() for source in sources]
    # Tokenizers are listed like the sources, the student's first. None means the one next to the
    # model.
    tokenizers: list[Any] = [tokenizer or options.student_tokenizer]
    tokenizers += options.teacher_tokenizer or [None] * (len(sources) - 1)
    models = []
    for source, config, given_tokenizer in zip(sources, configs, tokenizers, strict=True):
        skeleton: nn.Module = source.skeleton(config)
        # The model's own class chooses attention, so do this before PEFT wraps it.
        source = _with_attention(source, skeleton, options, device)
        if source.role == "student" and model.use_peft:
            # The skeleton is only counted, so the seed of its adapters does not matter.
            skeleton = add_adapters(cast(PreTrainedModel, skeleton), model, seed=0)
        role = cast(Role, source.role)
        checked_tokenizer = source.checked_tokenizer(config, role, given_tokenizer)
        models.append(Model(source, config, checked_tokenizer, sizes_of(skeleton)))
    student, teachers = models[0], models[1:]
    # On a CPU, the teachers' dtype is the student's by default. So the precision of a run on a CPU
    # is one setting, which its directory keeps.
    teacher_dtype: str = options.teacher_dtype
    if teacher_dtype == "auto" and device.type == "cpu" and isinstance(options, VocAgnoConfig):
        teacher_dtype = "bfloat16" if options.is_mixed else "float32"
    context = context_length(student.config)
    length = min(options.max_length, context) if shorten else options.max_length
    if length > context:
        raise OptionError("max_length", f"{length} exceeds the student's context of {context}")
    return Models(
        student=student,
        student_reader=student_reader(student.tokenizer, length, options.student_chat_template),
        teachers=teachers,
        teacher_readers=_teacher_readers(student, teachers, model, options),
        teacher_dtype=choose_dtype(teacher_dtype, device)[0],
        options=options,
    )


def _sources(model: ModelOptions, options: GuidanceOptions) -> list[ModelSource]:
    """Return where the student, and then each teacher, comes from, and how it is loaded."""
    names: list[Any] = [model.student, *(model.teacher or ())]
    revisions: list[str | None] = [options.student_revision]
    revisions += options.teacher_revision or [None] * (len(names) - 1)
    sources = []
    for number, (name, revision) in enumerate(zip(names, revisions, strict=True)):
        # In Python, a model may be given instead of its name.
        loaded = None if isinstance(name, str) else name
        kwargs: Any = options.teacher_model_init_kwargs if number else options.model_init_kwargs
        source = ModelSource(
            name=name if loaded is None else str(loaded.name_or_path),
            role="teacher" if number else "student",
            # An empty revision means none.
            revision=revision or None,
            attn_implementation=options.attn_implementation,
            trust_remote_code=options.trust_remote_code,
            init_kwargs=kwargs or {},
            loaded=loaded,
        )
        sources.append(source)
    return sources


def add_adapters(
    model: PreTrainedModel, options: ModelOptions, seed: int, revision: str | None = None
) -> nn.Module:
    """Freeze a model and give its layers the adapters of the options, drawn from the seed.

    Saved adapters name the model and its hub revision.

    Raises:
        ValueError: a named layer does not exist, or cannot have an adapter.
    """
    config = lora_config(
        model,
        r=options.lora_r,
        alpha=options.lora_alpha,
        dropout=options.lora_dropout,
        target_modules=options.lora_target_modules,
        modules_to_save=options.lora_modules_to_save,
        revision=revision,
    )
    return adapt(model, config, seed)


def _with_attention(
    source: ModelSource, skeleton: nn.Module, options: GuidanceOptions, device: torch.device
) -> ModelSource:
    """Choose torch_varlen if nothing else is requested, and a GPU computes in 16 bits."""
    trains = source.role == "student"
    if not isinstance(options, VocAgnoConfig) or not options.is_mixed:
        return source
    if not options.is_for_gpu:
        return source
    # Keep the user's choice, whether it was made by the option or by loading the model.
    if source.loaded is not None or options.attn_implementation:
        return source
    if not trains and options.teacher_dtype == "float32":
        return source
    reason = why_not_varlen(cast(PreTrainedModel, skeleton), trains=trains)
    if reason:
        logger.warning(
            "--%s %s computes with sdpa, which takes more memory than torch_varlen: %s",
            source.role,
            source.name,
            reason,
        )
        return source
    return replace(source, attn_implementation=TORCH_VARLEN)


def _teacher_readers(
    student: Model,
    teachers: Sequence[Model],
    model: ModelOptions,
    options: GuidanceOptions,
) -> TeacherReaders | None:
    """Open the stores of losses, or return how the teachers read what the student reads."""
    if model.teacher_losses:
        stores = [Store(path) for path in model.teacher_losses]
        for store in stores:
            is_same = store.manifest["tokenizer_sha256"] == tokenizer_sha256(student.tokenizer)
            if options.method == "rho1" and not is_same:
                raise OptionError(
                    "method",
                    f"rho1 compares token by token, and {store.directory} was scored by "
                    f"{store.manifest['teacher']} with another tokenizer than the student's: use "
                    f"{named('method')} vocagnolm, or score with a model that has the student's",
                )
        return StoredReader(
            stores,
            first=options.teacher_reduction == "first",
            plain=options.missing_losses == "plain",
        )
    # Both methods compare the models token by token, which needs one vocabulary.
    if options.method in ("kld", "rho1"):
        for teacher in teachers:
            check_same_tokens(student.tokenizer, teacher.tokenizer, options.method)
    contexts = [context_length(teacher.config) for teacher in teachers]
    # With KLD, the teacher gets the student's own tokens, and nothing is mapped.
    if options.method == "kld" and options.max_length > contexts[0]:
        raise OptionError(
            "max_length", f"{options.max_length} exceeds the teacher's context of {contexts[0]}"
        )
    if options.method == "kld" or not teachers:
        return None
    templates = one_for_each(
        "teacher_chat_template", options.teacher_chat_template, len(teachers), "teachers"
    )
    readers = []
    for teacher, context, template in zip(teachers, contexts, templates, strict=True):
        readers.append(teacher_reader(teacher.tokenizer, context, template))
    by_position = options.method == "uld" and options.uld_pairing == "position"
    return TeacherReaders(readers, by_position)


def load_models(
    job: Job, models: Models | None, student: Any, teacher: Any
) -> tuple[Any, StoredTeacher | list[Any]]:
    """Return the student, with its adapters, and its teachers. Loaded ones stay as they are."""
    args = job.args
    if isinstance(student, nn.Module):
        # It may already have adapters, to which the same rules apply.
        check_adapted(student)
    # A PeftModel is no PreTrainedModel.
    teachers: Any = [teacher] if isinstance(teacher, nn.Module) else teacher or []
    if models is not None:
        student, loaded = load_weights(models, job.model, args.device, args.seed)
        teachers = loaded or teachers
    if args.use_liger_kernel and not isinstance(teachers, StoredTeacher):
        # Trainer fuses the student when training begins. Liger replaces the rotary embedding of a
        # whole family, so teachers get all kernels, too, and are tested with them.
        for model in teachers:
            apply_liger_kernel(model, args.liger_kernel_config)  # type: ignore[no-untyped-call]
    if job.peft_config is not None:
        student = adapt(student, job.peft_config, args.seed)
    return student, teachers


def load_weights(
    models: Models, options: ModelOptions, device: torch.device, seed: int = 42
) -> tuple[nn.Module, list[PreTrainedModel] | StoredTeacher | None]:
    """Load the weights of the student and its teachers. The seed is for adapters.

    Raises:
        ValueError: a model cannot be loaded, or the student cannot have these adapters.
    """
    # The student is in float32, because 16-bit weights would lose small updates.
    student = models.student.source.load(torch.float32)
    teacher_dtype = getattr(torch, models.teacher_dtype)
    quantized = models.options.teacher_quantization
    config = quantization(quantized, teacher_dtype) if quantized else None
    teachers = []
    for teacher in models.teachers:
        model = teacher.source.load(teacher_dtype, config, device)
        if models.options.teacher_sharding == "node":
            # Spread a teacher before the next one is loaded, because a machine may not hold two
            # whole ones.
            model = shard_inside_machine(model, device)
        teachers.append(model)
    trained: nn.Module = student
    if options.use_peft:
        trained = add_adapters(student, options, seed, models.student.source.revision)
    if options.teacher_losses:
        return trained, StoredTeacher(options.teachers)
    return trained, teachers or None
