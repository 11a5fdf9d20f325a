"""What a trainer is given in Python: models by name or loaded, documents or packed sequences."""

import copy
import sys
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
from transformers import PreTrainedTokenizerBase

from vocagnolm.chat.reading import TrainOn
from vocagnolm.data import skipped_line
from vocagnolm.dist import machine_first, rank0
from vocagnolm.doors import python_door, worded
from vocagnolm.fields import listed
from vocagnolm.hub import check_login
from vocagnolm.models.adapters import adapt
from vocagnolm.objective import StoredTeacher
from vocagnolm.packing import Blocks
from vocagnolm.printing import log_main
from vocagnolm.readers import TeacherReaders, student_reader, teacher_reader
from vocagnolm.store.format import is_store
from vocagnolm.texts import only_text
from vocagnolm.training.config import VocAgnoConfig
from vocagnolm.training.documents import align, check_enough
from vocagnolm.training.models import Models, load_weights, read_models
from vocagnolm.training.options import DataOptions, ModelOptions, PackOptions
from vocagnolm.training.requirements import check_launch
from vocagnolm.training.settings import Job


@python_door
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

    Columns `messages`, or `prompt` and `completion`, hold conversations, of which the answers are
    trained on, or all (`train_on="all"`), in the chat template of each tokenizer.

    A packed sequence has up to `max_length` tokens of the student and `teacher_context` of the, or
    each, teacher, within the contexts of their models. Without a teacher it is for training on all
    tokens. Aligned documents are cached as `datasets.map` caches.

    Raises:
        ValueError: the column is not there, or no document of it can be used.
    """
    dataset = _as_dataset(dataset, "dataset")
    if not isinstance(dataset, datasets.Dataset):
        raise ValueError(f"dataset must be a datasets.Dataset, got {type(dataset).__name__}")
    texts = only_text(dataset, text_column, "dataset")
    readers = [teacher_reader(each, teacher_context) for each in listed(teacher_tokenizer or [])]
    teachers = TeacherReaders(readers) if readers else None
    options = PackOptions(max_length=max_length, train_on=train_on, dataset_num_proc=num_proc)
    student = student_reader(student_tokenizer, max_length)
    segments = align(texts, student, teachers, options, "dataset")
    if segments.skipped:
        log_main(f"dataset: {skipped_line(segments, len(texts))}")
    return Blocks(segments.rows, max_length, teachers.limits() if teachers else [sys.maxsize])


def _as_dataset(given: Any, name: str) -> Any:
    """Make a data set of a list of dicts; packed sequences stay as they are.

    Raises:
        ValueError: it is neither, or it is empty.
    """
    if isinstance(given, datasets.DatasetDict):
        raise ValueError(
            f"{name} has several splits ({', '.join(given)}): give one, as in dataset['train']"
        )
    if isinstance(given, dict) and name == "eval_dataset":
        return {key: _as_dataset(each, name) for key, each in given.items()}
    if isinstance(given, datasets.IterableDataset):
        raise ValueError(
            f"{name} is a stream, which has no order to resume in: load it without streaming=True"
        )
    if isinstance(given, list) and given and all(isinstance(row, dict) for row in given):
        are_ids = not {"student_ids", "input_ids"}.isdisjoint(given[0])
        return given if are_ids else datasets.Dataset.from_list(given)
    if isinstance(given, list | datasets.Dataset) and not len(given):
        raise ValueError(f"{name} is empty: it needs at least one document")
    if isinstance(given, str | Path | list | dict | Generator):
        found = type(given).__name__
        if isinstance(given, list):
            found = f"a list of {type(given[0]).__name__}"
        raise ValueError(
            f'{name} must be a datasets.Dataset, a list of dicts such as {{"text": ...}}, or the '
            f"Blocks of prepare_dataset, got {found}"
        )
    return given


# Packs documents that a trainer is given; the name is of its argument.
Packer = Callable[[Any, str], Any]


@dataclass(frozen=True)
class _Packer:
    """Aligns and packs documents as the command does; what is packed already stays."""

    models: Models
    args: VocAgnoConfig
    is_stored: bool

    def __call__(self, dataset: Any, name: str) -> Any:
        """Return the packed sequences of a data set, or of several by name."""
        if isinstance(dataset, str):
            # It names one of several that the trainer has.
            return dataset
        dataset = _as_dataset(dataset, name)
        if isinstance(dataset, dict):
            return {key: self(each, name) for key, each in dataset.items()}
        if not isinstance(dataset, datasets.Dataset):
            return dataset
        is_trained = name == "train_dataset"
        # A store knows other documents only, and evaluation needs no teacher.
        guide = self.models.guide if is_trained or not self.is_stored else None
        texts = only_text(dataset, None, name)
        segments = align(texts, self.models.reader, guide, self.args, name)
        left_out = [skipped_line(segments, len(texts))] if segments.skipped else []
        for line in left_out:
            log_main(f"{name}: {line}")
        limits = guide.limits() if guide else [sys.maxsize]
        blocks = Blocks(segments.rows, self.args.max_length, limits)
        if is_trained:
            check_enough(blocks, self.args, name, left_out)
        return blocks


def load_given(
    args: VocAgnoConfig,
    student: Any,
    teacher: Any,
    others: dict[str, Any],
    peft_config: Any = None,
) -> tuple[Any, Any, dict[str, Any], Packer]:
    """Load models that a trainer is given by name, and pack documents, as a command does.

    What is loaded and packed already stays as it is. The others hold `train_dataset`, and may hold
    `eval_dataset`, a data set or several by name, and the student's tokenizer `processing_class`.
    Returned last is what packs documents that are given to `evaluate` or `predict`.

    Raises:
        ValueError: as for the command, whose options are named.
    """
    teachers = [] if isinstance(teacher, StoredTeacher) else listed(teacher or [])
    student, *teachers = (str(x) if isinstance(x, Path) else x for x in (student, *teachers))
    data = {name: _as_dataset(others.get(name), name) for name in ("train_dataset", "eval_dataset")}
    several = data["eval_dataset"] if isinstance(data["eval_dataset"], dict) else {}
    named = any(isinstance(model, str) for model in (student, *teachers))
    values = (*data.values(), *several.values())
    if args.push_to_hub:
        rank0(lambda: check_login(args.hub_token))
    if not named and not any(isinstance(each, datasets.Dataset) for each in values):
        return student, teacher, others, _only_packed
    if student is None:
        raise ValueError("model must be a name, a directory or a model: it reads the documents")
    stores = [each for each in teachers if isinstance(each, str) and is_store(Path(each))]
    teachers = [each for each in teachers if each not in stores]
    names = ModelOptions(student, teachers or None, stores or None)
    if not isinstance(teacher, StoredTeacher):
        args.check_teacher(names.teachers, is_stored=bool(stores))
    args.output_dir = args.output_dir or names.output_dir(args.method)
    check_launch(Job(names, DataOptions(), args))
    models = read_models(names, args, args.device, tokenizer=others.get("processing_class"))
    for model in (models.student, *models.teachers):
        model.source.check_weights()
        model.source.check_packages()
    if peft_config is not None and models.student.source.loaded is None:
        # On no weights, before hours of alignment.
        skeleton = models.student.source.skeleton(models.student.config)
        adapt(skeleton, copy.deepcopy(peft_config), args.seed)

    pack = _Packer(models, args, is_stored=bool(stores))
    with machine_first():
        data = {name: pack(dataset, name) for name, dataset in data.items()}
    log_main(worded(f"step: {args.batch_arithmetic()}"))
    student, loaded = load_weights(models, names, args.device, args.seed)
    others = {**others, **data, "processing_class": models.reader.tokenizer}
    return student, loaded or teacher, others, pack


def _only_packed(dataset: Any, name: str) -> Any:
    """Reject documents where no tokenizer has been read that could align them."""
    rows: Any = dataset if isinstance(dataset, list | datasets.Dataset) else ()
    if len(rows) and "student_ids" not in rows[0]:
        raise ValueError(
            f"{name} must be packed, as train_dataset is: give the Blocks of prepare_dataset"
        )
    return dataset
