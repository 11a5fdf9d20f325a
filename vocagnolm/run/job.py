"""A training job: its options, and its models before and with their weights."""

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.training_args import ParallelMode

from vocagnolm.attention import needs_segments
from vocagnolm.cli import one_for_each, resolve_dtype
from vocagnolm.method import Method
from vocagnolm.models.adapters import add_adapters
from vocagnolm.models.load import (
    QUANTIZATIONS,
    ModelSource,
    check_distinct,
    context_length,
    devices_of_a_machine,
    quantization,
    shard_inside_machine,
)
from vocagnolm.objective import StoredTeacher
from vocagnolm.readers import (
    Reader,
    Role,
    TeacherReaders,
    check_same_tokens,
    student_reader,
    teacher_reader,
    tokenizer_sha256,
)
from vocagnolm.run.config import RunArguments
from vocagnolm.run.options import DataOptions, LoadOptions, ModelOptions, PackOptions
from vocagnolm.run.plan import Sizes, sizes_of
from vocagnolm.store.format import Store, manifest_of
from vocagnolm.store.read import StoredReader

_RUN_IDENTITY = (
    "global_batch_tokens num_train_epochs max_steps seed data_seed bf16 fp16 learning_rate "
    "lr_scheduler_type lr_scheduler_kwargs warmup_steps optim adam_beta1 adam_beta2 adam_epsilon "
    "weight_decay max_grad_norm optim_args neftune_noise_alpha"
).split()
_PLACES = (
    "student teacher student_tokenizer teacher_tokenizer student_chat_template "
    "teacher_chat_template dataset"
).split()
_NO_EFFECT_ON_NUMBERS = (
    "num_proc trust_remote_code eval_dataset save_store teacher_sharding".split()
)


# -- Options -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """One training job, as the command line, a recipe and the launcher describe it."""

    model: ModelOptions
    load: LoadOptions
    data: DataOptions
    pack: PackOptions
    method: Method
    run: RunArguments
    # As --config names it.
    recipe: str | None = None


def settings_of(job: Job) -> dict[str, Any]:
    """Return the settings that define a run: a checkpoint may be resumed only under the same.

    The number of processes is not among them, and neither is the batch of each, unless tokens
    compete within it.
    """
    found: dict[str, Any] = {}
    for options in (job.model, job.load, job.data, job.pack, job.method):
        found |= asdict(options)
    for name in _NO_EFFECT_ON_NUMBERS:
        del found[name]
    for name in _PLACES:
        if isinstance(found[name], str):
            found[name] = _one_name(found[name])
        elif found[name]:
            found[name] = [_one_name(place) for place in found[name]]
    if job.model.teacher_losses:
        found["teacher_losses"] = [
            {"store": str(Path(path).resolve()), "teacher": manifest_of(Path(path))["teacher"]}
            for path in job.model.teacher_losses
        ]
    names = list(_RUN_IDENTITY)
    if not job.method.splits_alike:
        names.append("per_device_train_batch_size")
    return found | {name: getattr(job.run, name) for name in names}


def _one_name(place: str) -> str:
    """Return the absolute path of a file or directory, which has many names, or a hub name."""
    return str(Path(place).resolve()) if Path(place).exists() else place


def check_launch(job: Job) -> None:
    """Raise a ValueError for options that these processes and devices cannot meet."""
    _check_loading(job)
    if job.model.use_peft:
        _check_recomputation(job.run)
    if job.run.fsdp and job.run.parallel_mode != ParallelMode.DISTRIBUTED and not job.run.dry_run:
        raise ValueError(
            "--fsdp shards over several processes: start them with accelerate launch or torchrun"
        )


def _check_loading(job: Job) -> None:
    """Check that the models can be held as asked."""
    load, run = job.load, job.run
    # A plan may be made on a smaller machine than the job will run on.
    is_planned = run.dry_run and load.teacher_quantization in QUANTIZATIONS
    if load.teacher_quantization and not is_planned:
        quantization(load.teacher_quantization)
    if load.teacher_sharding != "none":
        if load.teacher_quantization:
            raise ValueError("--teacher_quantization does not go with --teacher_sharding")
        if job.method.distance:
            raise ValueError(
                f"--teacher_sharding does not go with --method {job.method.method}, which needs "
                "the teacher's whole output head: leave it out"
            )
        if devices_of_a_machine() < 2 and not run.dry_run:
            raise ValueError(
                "--teacher_sharding node has no effect with one process on a machine: leave it out"
            )
    is_wide = not run.is_mixed or load.teacher_dtype == "float32"
    if is_wide and run.device.type == "cuda" and needs_segments(load.attn_implementation):
        raise ValueError(
            f"--attn_implementation {load.attn_implementation} computes in 16 bits on a GPU: use "
            "--bf16 true without --teacher_dtype float32, or --attn_implementation sdpa"
        )


def _check_recomputation(run: RunArguments) -> None:
    """Check that recomputed layers leave no adapter untrained or unsaved."""
    # Transformers is about to rename the option: one of the two may be absent.
    for name in ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"):
        if (vars(run).get(name) or {}).get("use_reentrant"):
            raise ValueError(
                f"--{name}: use_reentrant does not go with --use_peft, because what enters the "
                "first layer has no gradient: leave it out"
            )
    plugin = run.fsdp_config if isinstance(run.fsdp_config, dict) else {}
    in_environment = os.environ.get("FSDP_ACTIVATION_CHECKPOINTING", "").lower() == "true"
    if plugin.get("activation_checkpointing") or in_environment:
        raise ValueError(
            "fsdp_activation_checkpointing does not go with --use_peft, because PEFT would save no "
            "adapters: set it to false and use --activation_checkpointing"
        )


# -- Models ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """A model before its weights are loaded."""

    source: ModelSource
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    # With the adapters of a student.
    sizes: Sizes

    @property
    def context(self) -> int:
        """Most tokens that it was made for."""
        return context_length(self.config)


@dataclass(frozen=True)
class Models:
    """The student and its teachers before their weights are loaded.

    Attributes:
        reader: the student's.
        teachers: none with a store of losses, and none without a teacher.
        guide: maps the teachers' tokens to the student's; None where nothing is mapped.
        teacher_dtype: precision of the teachers, never "auto".
        device: gets the teachers.
    """

    student: Model
    reader: Reader
    teachers: list[Model]
    guide: TeacherReaders | None
    options: ModelOptions
    load: LoadOptions
    teacher_dtype: str
    device: torch.device

    @property
    def teacher_quantization(self) -> dict[str, object] | None:
        """Quantization config of the teachers, if any."""
        name = self.load.teacher_quantization
        return quantization(name, getattr(torch, self.teacher_dtype)) if name else None

    @property
    def teacher_rows(self) -> list[int]:
        """Tokens of each teacher that one row of a batch may hold."""
        return self.guide.limits() if self.guide else [sys.maxsize]


def read_models(
    model: ModelOptions,
    load: LoadOptions,
    pack: PackOptions,
    method: Method,
    device: torch.device,
    *,
    shorten: bool = False,
) -> Models:
    """Read configurations and tokenizers, which is cheap.

    With `shorten`, a segment has no more student tokens than fit the student's context.

    Raises:
        ValueError: a model or tokenizer cannot be read, or they do not suit each other.
    """
    given = load.attn_implementation, load.trust_remote_code
    names, revisions = model.teacher or [], model.teacher_revision
    # An empty revision stands for none.
    sources = [ModelSource(model.student, "student", model.student_revision or None, *given)]
    for index, name in enumerate(names):
        revision = revisions[index] if revisions else ""
        sources.append(ModelSource(name, "teacher", revision or None, *given))
    places = [model.student_tokenizer, *(model.teacher_tokenizer or [""] * len(names))]
    # All configurations first: a wrong name is reported before any tokenizer is read, which takes
    # longer.
    configs = [source.config() for source in sources]
    found = []
    for source, config, place in zip(sources, configs, places, strict=True):
        role = cast(Role, source.role)
        skeleton: nn.Module = source.skeleton(config)
        if role == "student" and model.use_peft:
            skeleton = add_adapters(cast(PreTrainedModel, skeleton), model, seed=0)
        tokenizer = source.checked_tokenizer(config, role, place)
        found.append(Model(source, config, tokenizer, sizes_of(skeleton)))
    student, *teachers = found
    length = min(pack.max_length, student.context) if shorten else pack.max_length
    if length > student.context:
        raise ValueError(
            f"--max_length {length} exceeds the student's context of {student.context}"
        )
    reader = student_reader(student.tokenizer, length, pack.student_chat_template)
    guide: TeacherReaders | None
    if model.teacher_losses:
        guide = _stored_guide(student.tokenizer, model.teacher_losses, method)
    else:
        guide = _online_guide(student, teachers, pack, method, length)
    dtype = resolve_dtype(load.teacher_dtype, device)
    return Models(student, reader, teachers, guide, model, load, dtype, device)


def _stored_guide(
    tokenizer: PreTrainedTokenizerBase, paths: Sequence[str], method: Method
) -> StoredReader:
    """Open stores of losses and check their sizes; with rho1 they are of the student's tokens."""
    stores = [Store(path) for path in paths]
    for store in stores if method.method == "rho1" else ():
        if store.manifest["tokenizer_sha256"] != tokenizer_sha256(tokenizer):
            raise ValueError(
                f"--method rho1: --teacher_losses {store.directory} was scored by "
                f"{store.manifest['teacher']} with another tokenizer than the student's: score the "
                "corpus with a model that has the student's, or use --method vocagnolm"
            )
    return StoredReader(stores)


def _online_guide(
    student: Model, teachers: Sequence[Model], pack: PackOptions, method: Method, length: int
) -> TeacherReaders | None:
    """Return how the teachers in memory read what the student reads."""
    if not teachers:
        return None
    if method.method in ("kld", "rho1"):
        for teacher in teachers:
            check_same_tokens(student.tokenizer, teacher.tokenizer, method.method)
    # With KLD the teacher is shown the student's own tokens, and nothing is mapped.
    if method.method == "kld":
        if length > (context := min(teacher.context for teacher in teachers)):
            raise ValueError(f"--max_length {length} exceeds the teacher's context of {context}")
        return None
    given, readers = pack.teacher_chat_template, []
    templates = one_for_each("teacher_chat_template", given, len(teachers), "teachers")
    for teacher, template in zip(teachers, templates, strict=True):
        readers.append(teacher_reader(teacher.tokenizer, teacher.context, template))
    by_position = method.method == "uld" and method.uld_pairing == "position"
    return TeacherReaders(tuple(readers), by_position)


def load_weights(
    models: Models, seed: int = 42
) -> tuple[nn.Module, list[PreTrainedModel] | StoredTeacher | None]:
    """Load the weights of the student and its teachers; the seed is that of adapters.

    Raises:
        ValueError: a model cannot be loaded, or the student cannot have these adapters.
    """
    options, dtype = models.options, getattr(torch, models.teacher_dtype)
    # Small updates would be lost on weights in 16 bits.
    student = models.student.source.load(torch.float32)
    teachers = []
    for teacher in models.teachers:
        model = teacher.source.load(dtype, models.teacher_quantization, models.device)
        check_distinct(student, model, models.student.tokenizer, teacher.tokenizer)
        # Before the next one is loaded: a machine may not hold two whole ones.
        if models.load.teacher_sharding == "node":
            model = shard_inside_machine(model, models.device)
        teachers.append(model)
    stored = StoredTeacher(len(options.teacher_losses)) if options.teacher_losses else None
    trained: nn.Module = student
    # Behind the comparison, which adapters would mislead.
    if options.use_peft:
        trained = add_adapters(student, options, seed, models.student.source.revision)
    return trained, stored or teachers or None
