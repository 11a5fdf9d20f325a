"""A job before it trains: its models and documents, named by options or given in Python."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
from torch import nn
from transformers import PreTrainedTokenizerBase
from transformers.trainer_utils import SaveStrategy, SchedulerType

from vocagnolm.corpus import files_of, load_corpus, load_sample
from vocagnolm.fields import OptionError, corpora_of, listed, named
from vocagnolm.method import Method, name_own
from vocagnolm.models.adapters import adapt, check_adapted
from vocagnolm.objective import Objective, StoredTeacher
from vocagnolm.packing import Blocks
from vocagnolm.shell.dist import machine_first, rank0
from vocagnolm.shell.hub import check_login
from vocagnolm.shell.printing import log_main
from vocagnolm.store.format import is_store
from vocagnolm.texts import is_conversations
from vocagnolm.tokenizer import tokenizer_sha256
from vocagnolm.training.config import VocAgnoConfig
from vocagnolm.training.models import Models, load_weights, read_models
from vocagnolm.training.options import DataOptions, GuidanceOptions, ModelOptions
from vocagnolm.training.packed import Packed, is_documents, pack_corpora, read_documents
from vocagnolm.training.requirements import check_enough, check_launch
from vocagnolm.training.sampler import mixed_counts
from vocagnolm.training.settings import Job, options_without_effect

# A plan of a large corpus is made from this many documents.
_SAMPLE_DOCUMENTS = 1000
# For a plan, a corpus with at most this many documents is read whole.
_SMALL_DOCUMENTS = 10_000


def prepare_models(
    job: Job, *, evaluates: bool, tokenizer: PreTrainedTokenizerBase | None = None
) -> Models:
    """Check what would fail late, and read the models' configurations and tokenizers."""
    check_launch(job)
    models = read_models(job.model, job.args, job.args.device, tokenizer=tokenizer)
    if job.args.push_to_hub:
        # One process asks the hub, and all of them raise its error.
        rank0(lambda: check_login(job.args.hub_token))
    for line in options_without_effect(job, evaluates=evaluates):
        log_main(f"warning: {line}")
    return models


# -- Documents that options name -----------------------------------------------------------------


def load_documents(job: Job, models: Models, *, sample: bool = False) -> Packed:
    """Read, align and pack the corpora that a job names.

    One process of each machine does the work, and the others read its cache. A `sample` is the
    first documents, unless a corpus is small, or may be too small.

    Raises:
        ValueError: a document has no stored losses, or there is too little to train on.
    """
    data, args = job.data, job.args
    eval_blocks = None
    with machine_first():
        # Read all corpora before the first is aligned, so that a wrong name for the last one does
        # not cost the alignment of the others.
        corpora = _read_corpora(job, sample)
        if data.eval_dataset:
            evaluated = {data.eval_dataset: _read_evaluation(data)}
            eval_blocks = _pack_evaluation(job, models, evaluated, named("eval_dataset")).blocks
        texts = {name: documents for name, (documents, _) in corpora.items()}
        packed = _pack_training(job, models, texts, named("dataset"))
    packed.blocks.weights = data.dataset_weights
    packed = replace(
        packed,
        eval_blocks=eval_blocks or packed.eval_blocks,
        totals=[total for _, total in corpora.values()],
        files=_describe_files(data),
    )
    steps = epoch_steps(job, packed)
    # An epoch without a step is an error only for a whole corpus.
    if packed.is_whole and not steps:
        check_enough(packed.blocks, args, f"{named('dataset')} {' '.join(data.dataset)}")
    # A sample cannot show that a corpus is too small. Only the whole corpus can.
    if not packed.is_whole and steps is not None and steps < 2:
        return load_documents(job, models)
    return packed


def _pack_training(
    job: Job, models: Models, texts: Mapping[str, datasets.Dataset], argument: str
) -> Packed:
    """Align and pack corpora to train on, without what is held out."""
    args = job.args
    if args.method == "chunk" and any(is_conversations(corpus) for corpus in texts.values()):
        raise OptionError(
            "method",
            "chunk needs a loss of every token, and the questions of a conversation have none",
        )
    return pack_corpora(
        texts,
        models.student_reader,
        models.teacher_readers,
        args,
        argument,
        held_out=job.data.eval_fraction,
        # As in Trainer: `seed` unless `data_seed` is given.
        seed=args.seed if args.data_seed is None else args.data_seed,
    )


def _pack_evaluation(
    job: Job, models: Models, texts: Mapping[str, datasets.Dataset], argument: str
) -> Packed:
    """Align and pack a corpus to evaluate on."""
    # A store has only the documents on which it was scored, and an evaluation needs no teacher.
    teachers = models.teacher_readers if job.loads_teacher else None
    return pack_corpora(texts, models.student_reader, teachers, job.args, argument)


def _read_corpora(job: Job, sample: bool) -> dict[str, tuple[datasets.Dataset, int | None]]:
    """Read each corpus or its first documents, with the number of all, by its name."""
    corpora: dict[str, tuple[datasets.Dataset, int | None]] = {}
    for name, options in corpora_of(job.data):
        if sample and job.args.dry_run:
            # A plan for a hub dataset does not download the rest.
            texts, total = load_sample(name, _SAMPLE_DOCUMENTS, **options)
            if total is None or total > _SMALL_DOCUMENTS:
                corpora[name] = texts, total
                continue
        # A small corpus is cheap to read whole, and then its plan is exact.
        texts = load_corpus(name, **options)
        total = len(texts)
        if sample and total > _SMALL_DOCUMENTS:
            texts = texts.select(range(_SAMPLE_DOCUMENTS))
        corpora[name] = texts, total
    return corpora


def _read_evaluation(data: DataOptions) -> datasets.Dataset:
    assert data.eval_dataset
    column = data.text_column[0] if data.text_column else None
    return load_corpus(data.eval_dataset, split=None, text_column=column, option="--eval_dataset")


def _describe_files(data: DataOptions) -> list[str]:
    """Say which files of each directory are read, and which are not."""
    listings = []
    for name, options in corpora_of(data):
        files = files_of(name, split=options["split"], config_name=options["config_name"])
        listings.append((name, files))
    if data.eval_dataset:
        files = files_of(data.eval_dataset, split=None, option="--eval_dataset")
        listings.append((data.eval_dataset, files))
    lines = []
    for name, files in listings:
        description = files.describe() if files else ""
        if description:
            lines.append(f"{Path(name).name}: {description}")
    return lines


def steps_of(job: Job, packed: Packed) -> int | None:
    """Return the optimizer steps of a run, or None if the size of its corpus is unknown."""
    if job.args.max_steps > 0:
        return job.args.max_steps
    steps = epoch_steps(job, packed)
    return None if steps is None else math.ceil(job.args.num_train_epochs * steps)


def epoch_steps(job: Job, packed: Packed) -> int | None:
    """Return the optimizer steps of an epoch, extrapolated from a sample, or None if unknown."""
    sizes, weights = packed.expected_sequences(), packed.blocks.weights
    if sizes is None:
        return None
    # With weights, an epoch may read the sequences of a corpus several times.
    sequences = sum(sizes) if weights is None else mixed_counts(sizes, weights).sum()
    # A step is a whole number of sequences. An incomplete step at the end of an epoch is not read.
    return int(sequences) // (job.args.global_batch_tokens // job.args.max_length)


# -- Models and documents in Python --------------------------------------------------------------


def arguments_in_python(
    args: VocAgnoConfig | None, method: str | Method | None, objective: type[Objective] | None
) -> VocAgnoConfig:
    """Copy a trainer's arguments, which it changes, with the settings of its method.

    A `method` next to a config replaces the config's.
    """
    if args is None:
        args = VocAgnoConfig()
    if not isinstance(args, VocAgnoConfig):
        raise ValueError(f"args must be a VocAgnoConfig, got {type(args).__name__}")
    args = copy.copy(args)
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
    is_stored = isinstance(teacher, StoredTeacher)
    options = _model_options(student, [] if is_stored else listed(teacher or []))
    job = Job(options, DataOptions(dataset=[]), args, peft_config=peft_config)
    data = [("train_dataset", train_dataset)]
    for evaluation in eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]:
        data.append(("eval_dataset", evaluation))
    # All of them are checked, whatever the first one is.
    kinds = [is_documents(dataset, argument) for argument, dataset in data]
    named_models = [options.student, *(options.teacher or ()), *(options.teacher_losses or ())]
    models = None
    if any(kinds) or any(isinstance(model, str) for model in named_models):
        if student is None:
            raise ValueError(
                "model must be a name, a directory or a model: it reads the documents; with "
                "model_init, give the Blocks of prepare_dataset and a loaded teacher"
            )
        if not is_stored:
            args.check_teachers(options.teachers, is_stored=bool(options.teacher_losses))
        args.output_dir = args.output_dir or options.output_dir(args.method)
        evaluates = eval_dataset is not None
        models = prepare_models(job, evaluates=evaluates, tokenizer=tokenizer)
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
        argument = "teacher" if number else "model"
        if model is not None and not isinstance(model, str | Path | nn.Module):
            raise ValueError(
                f"{argument} must be a name, a directory or a model, got {type(model).__name__}"
            )
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
        ValueError: documents cannot be used, or sequences are of other tokenizers.
    """
    if not is_documents(data, argument):
        if models:
            _check_tokenizers(data, models, argument)
        return Packed(data)
    if models is None:
        raise ValueError(
            f"{argument} must be packed, as train_dataset is: give the Blocks of prepare_dataset"
        )
    texts = {"": read_documents(data, argument)}
    if argument != "train_dataset":
        return _pack_evaluation(job, models, texts, argument)
    packed = _pack_training(job, models, texts, argument)
    check_enough(packed.blocks, job.args, argument)
    return packed


def pack_evaluations(job: Job, models: Models | None, data: Any, argument: str) -> Any:
    """Pack the documents of an evaluation, or of each in a dict. None stays None."""
    if isinstance(data, dict):
        return {name: pack_evaluations(job, models, part, argument) for name, part in data.items()}
    return None if data is None else pack_dataset(job, models, data, argument).blocks


def _check_tokenizers(blocks: Any, models: Models, argument: str) -> None:
    """Reject sequences of `prepare_dataset` that were packed with the tokenizers of other models.

    The ids of another tokenizer would be trained on as if they were the models' own.
    """
    hashes = getattr(blocks, "tokenizers_sha256", None)
    if hashes is None:
        return
    read = [models.student]
    # An evaluation needs no teacher, and with KLD the teacher reads the student's tokens.
    if argument == "train_dataset" and models.teacher_readers:
        read += models.teachers
    if len(hashes) < len(read):
        raise ValueError(
            f"{argument} was packed for {len(hashes) - 1} teachers, and this run has "
            f"{len(read) - 1}: give their tokenizers to prepare_dataset"
        )
    for model, sha256 in zip(read, hashes, strict=False):
        if tokenizer_sha256(model.tokenizer) != sha256:
            raise ValueError(
                f"{argument} was packed with another tokenizer than that of {model.source.name}: "
                "give prepare_dataset the tokenizers of model and teacher"
            )


def load_models(
    job: Job, models: Models | None, student: Any, teacher: Any
) -> tuple[Any, StoredTeacher | list[Any]]:
    """Return the student, with its adapters, and its teachers. Loaded ones stay as they are."""
    args = job.args
    if isinstance(student, nn.Module):
        # It may already have adapters, to which the same rules apply.
        check_adapted(student)
    if models is not None:
        student, loaded = load_weights(models, job.model, args.device, args.seed)
        teacher = loaded or teacher
    if isinstance(teacher, StoredTeacher):
        args.guidance.check_teacher(teacher.teachers, is_stored=True)
        teachers: Any = teacher
    else:
        # A PeftModel is no PreTrainedModel.
        teachers = [teacher] if isinstance(teacher, nn.Module) else list(teacher or ())
        args.guidance.check_teacher(len(teachers))
        if any(model is student for model in teachers):
            raise ValueError(
                "model and teacher are one object, and freezing the teacher would freeze the "
                "student; pass copy.deepcopy(model)"
            )
        if args.use_liger_kernel:
            _keep_teacher_rope(student, teachers, args)
    if job.peft_config is not None:
        student = adapt(student, job.peft_config, args.seed)
    return student, teachers


def _keep_teacher_rope(student: Any, teachers: list[Any], args: VocAgnoConfig) -> None:
    """Let Liger leave the rotary embedding alone if a teacher is of the student's family.

    When training begins, after the teachers were tested, Liger replaces it for the whole family, so
    the teacher would compute with it, too.
    """
    kernels: Any = args.liger_kernel_config
    families = [teacher.config.model_type for teacher in teachers]
    if student is not None and student.config.model_type in families:
        args.liger_kernel_config = kernels | {"rope": False}


# -- What a run was made from --------------------------------------------------------------------


def settings_of_data(job: Job, models: Models | None, packed: Packed) -> dict[str, Any]:
    """Return what the documents add to a run's settings, because progress is counted in them."""
    args, settings = job.args, dict[str, Any]()
    # Other packed sequences, such as a list, have no digest. The user answers for their order.
    if isinstance(packed.blocks, Blocks):
        settings["blocks"] = len(packed.blocks)
        settings["corpus_digest"] = packed.blocks.corpus_digest
    readers = models.teacher_readers if models else None
    # A template determines the tokens of a conversation, and its file may change.
    if models and any(is_conversations(texts) for texts in packed.texts.values()):
        templates = [models.student_reader.template]
        templates += [reader.template for reader in readers.readers] if readers else []
        settings["chat_templates_sha256"] = hashlib.sha256(repr(templates).encode()).hexdigest()
    # A store may keep its name while its losses are scored again, so keep their hash.
    if job.model.teacher_losses and readers:
        settings["teacher_losses_sha256"] = readers.fingerprint()
    # A resumed run compares the losses of an evaluation that steers it with those before.
    steers = (
        args.load_best_model_at_end
        or args.save_strategy == SaveStrategy.BEST
        or args.lr_scheduler_type == SchedulerType.REDUCE_ON_PLATEAU
    )
    if steers:
        parts = (
            packed.eval_blocks if isinstance(packed.eval_blocks, dict) else {"": packed.eval_blocks}
        )
        digests = {name: getattr(part, "corpus_digest", None) for name, part in parts.items()}
        settings["evaluation"] = {"metric": args.metric_for_best_model, "documents": digests}
    return settings
