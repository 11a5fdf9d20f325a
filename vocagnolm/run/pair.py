"""The student and its teachers: from arguments to tokenizers, readers, sizes and weights."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from vocagnolm.cli import one_for_each, resolve_dtype
from vocagnolm.method import Method
from vocagnolm.models import sharding
from vocagnolm.models.adapters import add_adapters
from vocagnolm.models.quantization import quantization
from vocagnolm.models.source import ModelSource, check_distinct, context_length
from vocagnolm.readers import Guide, Reader, Teachers, student_reader, teacher_reader
from vocagnolm.run.memory import Sizes, sizes_of
from vocagnolm.run.options import LoadOptions, ModelOptions, PackOptions
from vocagnolm.store.format import Store
from vocagnolm.store.read import StoredReader
from vocagnolm.teacher import StoredTeacher
from vocagnolm.texts.tokenizers import Role, check_same_tokens, tokenizer_sha256


@dataclass(frozen=True)
class Model:
    """A model before its weights are loaded."""

    source: ModelSource
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase

    @property
    def context(self) -> int:
        """Most tokens that it was made for."""
        return context_length(self.config)


@dataclass(frozen=True)
class Pair:
    """The student and its teachers before their weights are loaded.

    Attributes:
        teachers: none with a store of losses, and none without a teacher.
        guide: maps the teachers' tokens to the student's; None where nothing is mapped.
        device: gets the teachers.
    """

    student: Model
    student_reader: Reader
    teachers: tuple[Model, ...]
    guide: Guide | None
    options: ModelOptions
    load: LoadOptions
    device: torch.device

    @property
    def is_stored(self) -> bool:
        """True where the teachers' losses come from stores."""
        return bool(self.options.teacher_losses)

    @property
    def teacher_rows(self) -> list[int]:
        """Tokens of each teacher that one row of a batch may hold."""
        return self.guide.limits() if self.guide else [sys.maxsize]

    @property
    def teacher_dtype(self) -> str:
        """Precision of the teachers, never "auto"."""
        return resolve_dtype(self.load.teacher_dtype, self.device)

    @cached_property
    def teacher_quantization(self) -> dict[str, object] | None:
        """Quantization config of the teachers, if any; a dry run does not need its packages."""
        name = self.load.teacher_quantization
        return quantization(name, getattr(torch, self.teacher_dtype)) if name else None

    @cached_property
    def student_skeleton(self) -> PreTrainedModel:
        """Shapes of the student, with its adapters, which it may be unable to have (ValueError)."""
        skeleton = self.student.source.skeleton(self.student.config)
        if self.options.use_peft:
            return cast(PreTrainedModel, add_adapters(skeleton, self.options, seed=0))
        return skeleton

    @cached_property
    def student_sizes(self) -> Sizes:
        """Sizes of the student."""
        return sizes_of(self.student_skeleton)

    @cached_property
    def teacher_skeletons(self) -> list[PreTrainedModel]:
        """Shapes of the teachers."""
        return [teacher.source.skeleton(teacher.config) for teacher in self.teachers]

    @cached_property
    def teacher_sizes(self) -> list[Sizes]:
        """Sizes of the teachers."""
        return list(map(sizes_of, self.teacher_skeletons))


def load_pair(
    model: ModelOptions,
    load: LoadOptions,
    pack: PackOptions,
    method: Method,
    device: torch.device,
    *,
    shorten: bool = False,
) -> Pair:
    """Read configurations and tokenizers, which is cheap, and reject what cannot work.

    With `shorten`, a segment has no more student tokens than fit the context.

    Raises:
        ValueError: a model or tokenizer cannot be read, or they do not suit each other.
    """
    given = [model.student], [model.student_revision], [model.student_tokenizer]
    (student,) = _models(load, "student", *given)
    length = min(pack.max_length, student.context) if shorten else pack.max_length
    if length > student.context:
        raise ValueError(
            f"--max_length {length} exceeds the student's context of {student.context}"
        )
    reader = student_reader(student.tokenizer, length, pack.student_chat_template)
    if model.teacher_losses:
        stores = StoredReader(list(map(Store, model.teacher_losses)))
        if method.method == "rho1":
            _check_scored_by(student.tokenizer, stores)
        return Pair(student, reader, (), stores, model, load, device)
    names = model.teacher or []
    unknown: list[str | None] = [None] * len(names)
    revisions, elsewhere = model.teacher_revision or unknown, model.teacher_tokenizer or unknown
    teachers = _models(load, "teacher", names, revisions, elsewhere)
    guide = _guide(student, teachers, pack.teacher_chat_template, method, length)
    return Pair(student, reader, tuple(teachers), guide, model, load, device)


def _models(
    load: LoadOptions,
    role: Role,
    names: list[str],
    revisions: Sequence[str | None],
    elsewhere: Sequence[str | None],
) -> list[Model]:
    attention, trust = load.attn_implementation, load.trust_remote_code
    sources = [
        ModelSource(name, role, revision or None, attention, trust)
        for name, revision in zip(names, revisions, strict=True)
    ]
    # All of them first: a wrong name is told before any tokenizer is read, which takes longer.
    configs = [source.config() for source in sources]
    return [
        Model(source, config, source.checked_tokenizer(config, role, place))
        for source, config, place in zip(sources, configs, elsewhere, strict=True)
    ]


def _guide(
    student: Model, teachers: list[Model], templates: list[str] | None, method: Method, length: int
) -> Guide | None:
    """Return the co-resident teachers' way to read what the student reads."""
    if method.method in ("kld", "rho1"):
        for teacher in teachers:
            check_same_tokens(student.tokenizer, teacher.tokenizer, method.method)
    # With KLD the teacher is shown the student's own tokens, and nothing is mapped.
    if method.method == "kld":
        if length > (context := min(teacher.context for teacher in teachers)):
            raise ValueError(f"--max_length {length} exceeds the teacher's context of {context}")
        return None
    if not teachers:
        return None
    by_position = method.method == "uld" and method.uld_pairing == "position"
    given = one_for_each("teacher_chat_template", templates, len(teachers), "teachers")
    readers = (
        teacher_reader(each.tokenizer, each.context, template)
        for each, template in zip(teachers, given, strict=True)
    )
    return Teachers(tuple(readers), by_position)


def _check_scored_by(tokenizer: PreTrainedTokenizerBase, stores: StoredReader) -> None:
    """Reject stores of losses of other tokens than the student's."""
    for store in stores.stores:
        if store.manifest["tokenizer_sha256"] != tokenizer_sha256(tokenizer):
            raise ValueError(
                f"--method rho1: --teacher_losses {store.directory} was scored by "
                f"{store.manifest['teacher']} with another tokenizer than the student's: score the "
                "corpus with a model that has the student's, or use --method vocagnolm"
            )


def load_models(
    pair: Pair, seed: int = 42
) -> tuple[nn.Module, list[PreTrainedModel] | StoredTeacher | None]:
    """Load the weights of all models; a stored teacher has none. The seed is for adapters.

    Raises:
        ValueError: a model cannot be loaded, or the student cannot have these adapters.
    """
    options, dtype = pair.options, getattr(torch, pair.teacher_dtype)
    student = pair.student.source.load(torch.float32)
    teachers = []
    for teacher in pair.teachers:
        model = teacher.source.load(dtype, pair.teacher_quantization, pair.device)
        check_distinct(student, model, pair.student.tokenizer, teacher.tokenizer)
        # Sharded before the next one is loaded.
        if pair.load.teacher_sharding == "node":
            model = sharding.shard_inside_machine(model, pair.device)
        teachers.append(model)
    stored = StoredTeacher(len(options.teacher_losses)) if options.teacher_losses else None
    # Behind the comparison, as adapters change the student.
    if options.use_peft:
        adapted = add_adapters(student, options, seed, pair.student.source.revision)
        return adapted, stored or teachers or None
    return student, stored or teachers or None
