"""Assembles the parts of a trainer from arguments, models and data, for both doors."""

import copy
import sys
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
from transformers import PreTrainedTokenizerBase

from vocagnolm.chat.reading import TrainOn
from vocagnolm.corpus import read_list
from vocagnolm.data import skipped_line
from vocagnolm.fields import listed
from vocagnolm.models.adapters import adapt
from vocagnolm.objective import StoredTeacher
from vocagnolm.packing import Blocks
from vocagnolm.readers import TeacherReaders, student_reader, teacher_reader
from vocagnolm.shell.dist import machine_first, rank0
from vocagnolm.shell.hub import check_login
from vocagnolm.shell.printing import log_main
from vocagnolm.store.format import is_store
from vocagnolm.texts import only_text
from vocagnolm.tokenizer import tokenizer_sha256
from vocagnolm.training.assembled import (
    Assembled,
    assembled_of_loaded,
    settings_of_blocks,
    settings_of_evaluation,
)
from vocagnolm.training.config import VocAgnoConfig
from vocagnolm.training.documents import Documents, align, load_documents
from vocagnolm.training.models import Models, read_models
from vocagnolm.training.options import DataOptions, ModelOptions, PackOptions
from vocagnolm.training.requirements import check_enough, check_launch
from vocagnolm.training.settings import Job, options_without_effect, settings_of


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
    answers, or on everything (`train_on="all"`), in the chat template of each tokenizer.

    A packed sequence has up to `max_length` student tokens and `teacher_context` tokens of each
    teacher, within the contexts of their models. Without a teacher, it is for training on all
    tokens. Aligned documents are cached like those of `datasets.map`.

    Raises:
        ValueError: an argument is wrong, or no document can be used.
    """
    teacher_tokenizers = listed(teacher_tokenizer or [])
    tokenizers = [("student_tokenizer", student_tokenizer)]
    tokenizers += [("teacher_tokenizer", tokenizer) for tokenizer in teacher_tokenizers]
    for name, tokenizer in tokenizers:
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise ValueError(f"{name} must be a tokenizer, got {type(tokenizer).__name__}")
    # A window has a start token, and must have at least one more.
    if not isinstance(teacher_context, int) or teacher_context < 2:
        raise ValueError(f"teacher_context must be an integer of at least 2, got {teacher_context}")
    dataset = _checked(dataset, "dataset")
    if not _is_documents(dataset):
        raise ValueError(f"dataset must be a datasets.Dataset, got {type(dataset).__name__}")
    texts = _read_documents(dataset, text_column, "dataset")
    readers = [teacher_reader(tokenizer, teacher_context) for tokenizer in teacher_tokenizers]
    teachers = TeacherReaders(readers) if readers else None
    options = PackOptions(max_length=max_length, train_on=train_on, dataset_num_proc=num_proc)
    student = student_reader(student_tokenizer, max_length)
    segments = align(texts, student, teachers, options, "dataset")
    if segments.skipped:
        log_main(f"dataset: {skipped_line(segments, len(texts))}")
    limits = teachers.limits() if teachers else [sys.maxsize]
    blocks = Blocks(segments.rows, max_length, limits)
    blocks.corpus_digest = [segments.digest()]
    blocks.tokenizers_sha256 = [tokenizer_sha256(tokenizer) for _, tokenizer in tokenizers]
    return blocks


def _checked(data: Any, name: str) -> Any:
    """Return data that is a dataset, a list of dicts, or packed sequences.

    Raises:
        ValueError: it is none of them, or it is empty.
    """
    if isinstance(data, datasets.DatasetDict):
        raise ValueError(
            f"{name} has several splits ({', '.join(data)}): give one, such as dataset['train']"
        )
    if isinstance(data, dict) and name == "eval_dataset":
        return {key: _checked(part, name) for key, part in data.items()}
    if isinstance(data, datasets.IterableDataset):
        raise ValueError(
            f"{name} is a stream, and a run on it could not resume: load it without streaming=True"
        )
    if isinstance(data, list) and data and all(isinstance(row, dict) for row in data):
        return data
    if isinstance(data, list | datasets.Dataset) and not len(data):
        raise ValueError(f"{name} is empty: it needs at least one document")
    if isinstance(data, str | Path | list | dict | Generator):
        kind = type(data).__name__
        if isinstance(data, list):
            kind = f"a list of {type(data[0]).__name__}"
        raise ValueError(
            f'{name} must be a datasets.Dataset, a list of dicts such as {{"text": ...}}, or the '
            f"Blocks of prepare_dataset, got {kind}"
        )
    return data


def _is_documents(data: Any) -> bool:
    """Test whether data of `_checked` is documents to align, instead of packed sequences."""
    if isinstance(data, list):
        return "student_ids" not in data[0] and "input_ids" not in data[0]
    return isinstance(data, datasets.Dataset)


def _read_documents(data: Any, text_column: str | None, name: str) -> datasets.Dataset:
    """Read the texts or conversations of documents that `_is_documents` finds."""
    if isinstance(data, list):
        return read_list(data, text_column, name)
    return only_text(data, text_column, name)


def assemble(
    job: Job,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    *,
    processing_class: PreTrainedTokenizerBase | None = None,
    sample: bool = False,
) -> Assembled:
    """Read configurations and tokenizers, check what would fail late, and align documents.

    Without a `train_dataset`, the documents are those of the job's corpora. With `sample`, only the
    first documents of a large corpus are read, which is enough for a plan.

    Raises:
        ValueError: an argument, a model or the data is wrong.
    """
    args = job.args
    # Checks go from the cheapest to the most expensive: options, configurations, files, documents.
    check_launch(job)
    models = read_models(job.model, args, args.device, tokenizer=processing_class)
    if args.push_to_hub:
        # One process asks the hub, and all of them raise its error.
        rank0(lambda: check_login(args.hub_token))
    evaluates = eval_dataset is not None or job.data.eval_dataset or job.data.eval_fraction
    for line in options_without_effect(job, evaluates=bool(evaluates)):
        log_main(f"warning: {line}")
    if train_dataset is None:
        return _of_documents(job, models, load_documents(job, models, sample=sample))
    if job.peft_config is not None and models.student.source.loaded is None:
        # Put the adapters on a skeleton without weights, so that a wrong config is found before
        # hours of alignment. Copy the config, because PEFT writes into it.
        skeleton = models.student.source.skeleton(models.student.config)
        config = copy.deepcopy(job.peft_config)
        if hasattr(config, "init_lora_weights"):
            # Some ways to draw them, such as PiSSA, compute with the weights.
            config.init_lora_weights = False
        adapt(skeleton, config, args.seed)
    # The first process of a machine fills the cache, and the others read from it.
    with machine_first():
        packed = _packed(job, models, train_dataset, "train_dataset")
        evaluated = None
        if eval_dataset is not None:
            evaluated = _packed(job, models, eval_dataset, "eval_dataset").blocks
    log_main(f"step: {args.batch_arithmetic()}")
    return Assembled(
        job=job,
        models=models,
        documents=None,
        train_dataset=packed.blocks,
        eval_dataset=evaluated,
        processing_class=models.reader.tokenizer,
        settings=settings_of(job) | packed.settings | settings_of_evaluation(args, evaluated),
        skipped={"skipped.jsonl": packed.reasons} if packed.reasons else {},
    )


def read_whole(assembled: Assembled) -> Assembled:
    """Read the rest of the corpora of which only the first documents were read."""
    models, documents = assembled.models, assembled.documents
    assert models
    assert documents
    if documents.is_whole:
        return assembled
    return _of_documents(assembled.job, models, load_documents(assembled.job, models))


def _of_documents(job: Job, models: Models, documents: Documents) -> Assembled:
    return Assembled(
        job=job,
        models=models,
        documents=documents,
        train_dataset=documents.blocks,
        eval_dataset=documents.eval_blocks,
        processing_class=models.reader.tokenizer,
        # A checkpoint's place in the corpus is the index of a packed sequence.
        settings=settings_of(job)
        | documents.settings
        | settings_of_evaluation(job.args, documents.eval_blocks),
        skipped=documents.skipped,
    )


def assemble_in_python(
    args: VocAgnoConfig,
    student: Any,
    teacher: Any,
    kwargs: Mapping[str, Any],
    peft_config: Any = None,
) -> Assembled:
    """Make a job from the arguments that a trainer gets in Python, and assemble it.

    `kwargs` has `train_dataset`. It may have `eval_dataset`, one dataset or several by name, and
    `processing_class`, the student's tokenizer.
    """
    student = _as_name(student)
    teachers: list[Any] = []
    stores: list[Any] = []
    # The losses of a `StoredTeacher` come with the packed sequences, so it has no path to read.
    guides = [] if isinstance(teacher, StoredTeacher) else listed(teacher or [])
    for guide in guides:
        guide = _as_name(guide)
        if isinstance(guide, str) and is_store(Path(guide)):
            stores.append(guide)
        else:
            teachers.append(guide)
    if teachers and stores:
        raise ValueError("teacher has stores and models: give only one of the two kinds")
    train_dataset = _checked(kwargs.get("train_dataset"), "train_dataset")
    eval_dataset = _checked(kwargs.get("eval_dataset"), "eval_dataset")
    names = ModelOptions(student, teachers or None, stores or None)
    job = Job(names, DataOptions(dataset=[]), args, peft_config=peft_config)
    # Only names need to be read, and only documents to be aligned. Loaded models with packed
    # sequences are ready, and may be of kinds that no tokenizer reads.
    data = [train_dataset]
    data += eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]
    has_documents = any(_is_documents(dataset) for dataset in data)
    has_names = any(isinstance(model, str) for model in [student] + teachers + stores)
    processing_class = kwargs.get("processing_class")
    if not (has_names or has_documents):
        return assembled_of_loaded(job, train_dataset, eval_dataset, processing_class)
    if student is None:
        raise ValueError(
            "model must be a name, a directory or a model: it reads the documents; with "
            "model_init, give the Blocks of prepare_dataset and a loaded teacher"
        )
    if not isinstance(teacher, StoredTeacher):
        args.check_teachers(names.teachers, is_stored=bool(stores))
    args.output_dir = args.output_dir or names.output_dir(args.method)
    return assemble(job, train_dataset, eval_dataset, processing_class=processing_class)


def _as_name(model: Any) -> Any:
    """Return the text of a path. Names and loaded models stay as they are."""
    return str(model) if isinstance(model, Path) else model


def _check_tokenizers(blocks: Any, models: Models, name: str) -> None:
    """Reject sequences of `prepare_dataset` that were packed with the tokenizers of other models.

    The ids of another tokenizer would be trained on as if they were the models' own.
    """
    hashes = getattr(blocks, "tokenizers_sha256", None)
    if hashes is None:
        return
    read = [models.student]
    # An evaluation needs no teacher, and with KLD the teacher reads the student's tokens.
    if name == "train_dataset" and models.guide:
        read += models.teachers
    if len(hashes) < len(read):
        raise ValueError(
            f"{name} was packed for {len(hashes) - 1} teachers, and this run has "
            f"{len(read) - 1}: give their tokenizers to prepare_dataset"
        )
    for model, sha256 in zip(read, hashes, strict=False):
        if tokenizer_sha256(model.tokenizer) != sha256:
            raise ValueError(
                f"{name} was packed with another tokenizer than that of {model.source.name}: give "
                "prepare_dataset the tokenizers of model and teacher"
            )


@dataclass(frozen=True)
class _Packed:
    """Packed sequences, what they add to the settings, and the documents that were left out."""

    blocks: Any
    settings: dict[str, Any]
    reasons: list[tuple[int, str]]


def _packed(job: Job, models: Models, dataset: Any, name: str) -> _Packed:
    """Align and pack documents from Python: a dataset, or one for each name of a dict."""
    dataset = _checked(dataset, name)
    if isinstance(dataset, dict):
        parts = {key: _packed(job, models, part, name).blocks for key, part in dataset.items()}
        return _Packed(parts, {}, [])
    if not _is_documents(dataset):
        _check_tokenizers(dataset, models, name)
        return _Packed(dataset, settings_of_blocks(dataset), [])
    is_trained = name == "train_dataset"
    # A store has only the documents on which it was scored, and an evaluation needs no teacher.
    guide = models.guide if is_trained or job.loads_teacher else None
    texts = _read_documents(dataset, None, name)
    segments = align(texts, models.reader, guide, job.args, name)
    left_out = []
    if segments.skipped:
        left_out = [skipped_line(segments, len(texts))]
        log_main(f"{name}: {left_out[0]}")
    limits = guide.limits() if guide else [sys.maxsize]
    blocks = Blocks(segments.rows, job.args.max_length, limits)
    blocks.corpus_digest = [segments.digest()]
    # An evaluation with less than a step's sequences is fine.
    if is_trained:
        check_enough(blocks, job.args, name, left_out)
    return _Packed(blocks, settings_of_blocks(blocks), segments.reasons)


def pack_late(assembled: Assembled, dataset: Any, name: str) -> Any:
    """Align and pack documents for an evaluation. What is already packed stays."""
    if assembled.models is None:
        return _only_packed(dataset, name)
    return _packed(assembled.job, assembled.models, dataset, name).blocks


def _only_packed(dataset: Any, name: str) -> Any:
    """Reject documents if no tokenizer was read that could align them."""
    # Anything else, such as `Blocks`, is already packed, or is rejected when it is read.
    rows: Any = dataset if isinstance(dataset, list | datasets.Dataset) else ()
    if len(rows) and "student_ids" not in rows[0]:
        raise ValueError(
            f"{name} must be packed, as train_dataset is: give the Blocks of prepare_dataset"
        )
    return dataset
