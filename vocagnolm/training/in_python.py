"""A job in Python: the arguments of `VocAgnoTrainer` and `prepare_dataset`, and their documents."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from vocagnolm.chat.reading import TRAIN_ON, TrainOn
from vocagnolm.corpus import read_list
from vocagnolm.fields import OptionError, check_interval, listed
from vocagnolm.method import Method, name_own
from vocagnolm.models.load import context_length
from vocagnolm.objective import Objective, StoredTeacher
from vocagnolm.packing import Blocks
from vocagnolm.readers import TeacherReaders, student_reader, teacher_reader
from vocagnolm.shell.dist import machine_first
from vocagnolm.shell.io import log_main
from vocagnolm.store.format import is_store
from vocagnolm.texts import is_conversations, only_text
from vocagnolm.tokenizer import tokenizer_sha256
from vocagnolm.training.config import VocAgnoConfig
from vocagnolm.training.job import Job, check_launch
from vocagnolm.training.models import Models, read_models
from vocagnolm.training.options import DataOptions, GuidanceOptions, ModelOptions, PackOptions
from vocagnolm.training.packed import (
    CHUNK_NEEDS_DOCUMENTS,
    Packed,
    check_enough,
    pack_corpora,
    pack_evaluation,
    pack_training,
)


def prepare_dataset(
    dataset: datasets.Dataset,
    student_tokenizer: PreTrainedTokenizerBase,
    teacher_tokenizer: PreTrainedTokenizerBase | Sequence[PreTrainedTokenizerBase] | None = None,
    *,
    max_length: int = 2048,
    teacher_context: int = 4096,
    text_column: str | None = None,
    train_on: TrainOn | None = None,
    num_proc: int | None = None,
) -> Blocks:
    """Align and pack documents: the `train_dataset` or `eval_dataset` of a `VocAgnoTrainer`.

    Columns `messages`, or `prompt` and `completion`, have conversations. Training is on their
    answers, or on everything (`train_on="all"`), in the chat template of each tokenizer. Tokens are
    mapped by their characters, so ULD needs `uld_pairing="last"`.

    A packed sequence has up to `max_length` student tokens and `teacher_context` tokens of each
    teacher, within the contexts of their models. Without a teacher, it is for training on all
    tokens. Aligned documents are cached like those of `datasets.map`.

    Raises:
        ValueError: an argument is wrong, or no document can be used.
    """
    teacher_tokenizers = listed(teacher_tokenizer or [])
    # A window has a start token, and must have at least one more.
    check_interval("teacher_context", teacher_context, "[2, inf)")
    texts = _read_documents(dataset, "dataset", text_column)
    readers = [teacher_reader(tokenizer, teacher_context) for tokenizer in teacher_tokenizers]
    teachers = TeacherReaders(readers) if readers else None
    options = PackOptions(max_length=max_length, train_on=train_on, dataset_num_proc=num_proc)
    student = student_reader(student_tokenizer, max_length)
    blocks: Blocks = pack_corpora({"": texts}, student, teachers, options, "dataset").blocks
    tokenizers = [student_tokenizer, *teacher_tokenizers]
    blocks.tokenizers_sha256 = [tokenizer_sha256(tokenizer) for tokenizer in tokenizers]
    blocks.read_with = {"uld_pairing": "last"}
    if is_conversations(texts):
        # The templates are those of the tokenizers.
        blocks.read_with |= {"train_on": train_on or TRAIN_ON[0]}
        blocks.read_with |= {"student_chat_template": None, "teacher_chat_template": None}
    return blocks


def _is_documents(data: Any, name: str) -> bool:
    """Test whether data are documents to align, instead of packed sequences or None.

    Raises:
        ValueError: they are neither, such as a `DatasetDict` of several splits or a stream.
    """
    if data is None:
        return False
    is_rows = isinstance(data, list) and bool(data) and isinstance(data[0], dict)
    is_dataset = isinstance(data, datasets.Dataset | Dataset)
    # A run on a stream could not resume.
    if isinstance(data, datasets.IterableDataset) or not (is_rows or is_dataset):
        raise ValueError(
            f'{name} must be a datasets.Dataset, a list of dicts such as {{"text": ...}}, or the '
            f"Blocks of prepare_dataset, got {type(data).__name__}"
        )
    # Rows with ids are packed, and go to the user's collator.
    is_packed = is_rows and bool({"student_ids", "input_ids"} & data[0].keys())
    return isinstance(data, datasets.Dataset) or (is_rows and not is_packed)


def _read_documents(data: Any, name: str, text_column: str | None = None) -> datasets.Dataset:
    """Read the texts or conversations of documents."""
    if isinstance(data, list):
        return read_list(data, text_column, name)
    return only_text(data, text_column, name)


def arguments_in_python(
    args: VocAgnoConfig | None, method: str | Method | None, objective: type[Objective] | None
) -> VocAgnoConfig:
    """Copy a trainer's arguments, which it changes, with the settings of its method.

    A `method` next to a config replaces the config's.
    """
    args = copy.copy(args or VocAgnoConfig())
    sequences = args.per_device_train_batch_size * args.gradient_accumulation_steps
    if args.global_batch_tokens != sequences * args.world_size * args.max_length:
        raise ValueError(
            "args: the size of a batch was changed after the config was made, which leaves "
            "global_batch_tokens as it was: give all sizes to VocAgnoConfig"
        )
    args.accelerator_config = copy.copy(args.accelerator_config)
    if isinstance(method, str):
        method = Method(method)
    if objective:
        method = replace(method or args.guidance, method=name_own("method", objective))
    if method is not None:
        for name, value in vars(method).items():
            setattr(args, name, value)
        # Together they are checked like a config's.
        GuidanceOptions.__post_init__(args)
    return args


def used_teacher(args: VocAgnoConfig, teacher: Any) -> Any:
    """Return the teacher, or None if the method does not ask one, as in a loop over methods."""
    if teacher is None or args.guidance.needs_teacher:
        return teacher
    log_main(f"warning: teacher has no effect with {args.guidance.as_typed}")
    return None


def job_in_python(
    args: VocAgnoConfig,
    student: Any,
    teacher: Any,
    train_dataset: Any,
    eval_dataset: Any,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    peft_config: Any = None,
) -> tuple[Job, Models | None, Packed]:
    """Make a job from the arguments of a trainer, and pack its documents.

    Loaded models with packed sequences are ready, and may be of kinds that no tokenizer reads. So
    nothing is read for them.

    Raises:
        ValueError: an argument, a model or the data is wrong.
    """
    # The losses of a `StoredTeacher` come with the packed sequences, so it has no path to read.
    is_packed = isinstance(teacher, StoredTeacher)
    options = _model_options(student, [] if is_packed else listed(teacher or []))
    count = teacher.teachers if is_packed else options.teachers
    args.check_teachers(count, is_stored=is_packed or bool(options.teacher_losses))
    job = Job(options, DataOptions(dataset=[]), args, peft_config=peft_config)
    # All of them are checked, whatever the first one is.
    kinds = [_is_documents(train_dataset, "train_dataset")]
    for part in eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]:
        kinds.append(_is_documents(part, "eval_dataset"))
    named_models = [options.student, *(options.teacher or ()), *(options.teacher_losses or ())]
    models = None
    args.output_dir = args.output_dir or options.output_dir(args.method)
    if any(kinds) or any(isinstance(model, str) for model in named_models):
        if student is None:
            raise ValueError(
                "model must be a name, a directory or a model, which reads the documents: with "
                "model_init, give the Blocks of prepare_dataset and a loaded teacher"
            )
        check_launch(job, evaluates=eval_dataset is not None)
        models = read_models(options, args, args.device, tokenizer=tokenizer)
    # The first process of a machine fills the cache, and the others read from it.
    with machine_first():
        packed = pack_dataset(job, models, train_dataset, "train_dataset")
        eval_blocks = pack_evaluations(job, models, eval_dataset, "eval_dataset")
    log_main(f"step: {args.batch_arithmetic()}")
    return job, models, replace(packed, eval_blocks=eval_blocks)


def _model_options(student: Any, teachers: list[Any]) -> ModelOptions:
    """Return the options that name models and stores in Python, where models may be loaded."""
    models: list[Any] = []
    stores = []
    for number, model in enumerate([student, *teachers]):
        model = str(model) if isinstance(model, Path) else model
        if number and isinstance(model, str) and is_store(Path(model)):
            stores.append(model)
        else:
            models.append(model)
    if models[1:] and stores:
        raise ValueError("teacher has stores and models: give only one of the two kinds")
    return ModelOptions(models[0], models[1:] or None, stores or None)


def pack_dataset(job: Job, models: Models | None, data: Any, argument: str) -> Packed:
    """Align and pack documents from Python. Packed sequences stay as they are.

    Raises:
        ValueError: documents cannot be used, or sequences do not suit the models.
    """
    if not _is_documents(data, argument):
        if isinstance(data, Blocks):
            _check_blocks(job, models, data, argument)
        return Packed(data)
    if models is None:
        raise ValueError(
            f"{argument} must be packed, as train_dataset is: give the Blocks of prepare_dataset"
        )
    texts = {"": _read_documents(data, argument, job.args.text_column)}
    if argument != "train_dataset":
        return pack_evaluation(job, models, texts, argument)
    packed = pack_training(job, models, texts, argument)
    check_enough(packed.blocks, job.args, argument)
    return packed


def pack_evaluations(job: Job, models: Models | None, data: Any, argument: str) -> Any:
    """Pack the documents of an evaluation, or of each in a dict. None stays None."""
    if isinstance(data, dict):
        return {name: pack_evaluations(job, models, part, argument) for name, part in data.items()}
    return None if data is None else pack_dataset(job, models, data, argument).blocks


def _check_blocks(job: Job, models: Models | None, blocks: Blocks, argument: str) -> None:
    """Reject sequences of `prepare_dataset` that were packed for other models or settings.

    The ids of another tokenizer would be trained on as if they were the models' own, and a segment
    beyond a model's context would get losses for which the model was not made.
    """
    _check_options(job.args, blocks, argument)
    # Without names, the models themselves. Only `model_init` may leave the student open.
    with_configs: list[Any] = [job.model.student, *(job.model.teacher or ())]
    if models:
        with_configs = [models.student, *models.teachers]
        read = [models.student]
        # An evaluation needs no teacher, and with KLD the teacher reads the student's tokens.
        if argument == "train_dataset" and models.teacher_readers:
            read += models.teachers
        hashes = [tokenizer_sha256(model.tokenizer) for model in read]
        # An unknown tokenizer is the user's responsibility.
        packed_for = blocks.tokenizers_sha256 or hashes
        if hashes != packed_for[: len(hashes)]:
            raise ValueError(
                f"{argument} was packed with other tokenizers than those of "
                f"{', '.join(model.source.name for model in read)}: give prepare_dataset the "
                "tokenizers of model and teacher"
            )
    lengths = blocks.longest_segments
    for index, model in enumerate(with_configs):
        if model is None:
            continue
        # A teacher with the student's tokens reads the student's segments.
        length = lengths[index] if index < len(lengths) else lengths[0]
        context = context_length(model.config)
        if length > context:
            role, option = ("teacher", "teacher_context") if index else ("student", "max_length")
            raise ValueError(
                f"{argument} has a segment of {length} {role} tokens, and the {role}'s context is "
                f"{context}: give prepare_dataset {option}={context}"
            )


def _check_options(args: VocAgnoConfig, blocks: Blocks, argument: str) -> None:
    """Reject options that say otherwise than how `prepare_dataset` has read the texts."""
    is_trained = argument == "train_dataset"
    if is_trained and args.max_length != blocks.max_length:
        raise ValueError(
            f"{argument} has sequences of {blocks.max_length} tokens: set args.max_length to it"
        )
    if args.max_length < blocks.max_length:
        raise ValueError(
            f"{argument} has sequences of {blocks.max_length} tokens: give prepare_dataset "
            f"max_length={args.max_length}"
        )
    if args.method == "chunk" and "train_on" in blocks.read_with:
        raise OptionError("method", CHUNK_NEEDS_DOCUMENTS)
    for name, read_with in blocks.read_with.items():
        asked = getattr(args, name)
        # Only ULD pairs tokens, and only in training.
        is_read = name != "uld_pairing" or (is_trained and args.method == "uld")
        if is_read and asked is not None and asked != read_with:
            raise OptionError(
                name, f"is {asked}, but prepare_dataset has read {argument} with {read_with}"
            )
