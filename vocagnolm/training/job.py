"""A job before it trains: the models and documents that its options name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
from accelerate.utils import parse_flag_from_env
from torch import nn
from transformers import PreTrainedTokenizerBase, Trainer
from transformers.training_args import OptimizerNames

from vocagnolm.corpus import load_corpus, load_sample
from vocagnolm.fields import OptionError, corpora_of, named, options_of, without_effect
from vocagnolm.method import Method
from vocagnolm.models.adapters import adapt, check_adapted
from vocagnolm.models.load import QUANTIZATIONS, quantization
from vocagnolm.models.sharding import devices_of_a_machine
from vocagnolm.objective import StoredTeacher
from vocagnolm.packing import Blocks
from vocagnolm.shell.dist import machine_first
from vocagnolm.shell.extras import is_installed, require, require_quantization
from vocagnolm.shell.io import log_main
from vocagnolm.texts import is_conversations
from vocagnolm.training.config import VocAgnoConfig
from vocagnolm.training.models import Models, load_weights, read_models
from vocagnolm.training.options import DataOptions, ModelOptions
from vocagnolm.training.packed import Packed, pack_corpora
from vocagnolm.training.sampler import mixed_counts

# A plan of a large corpus is made from this many documents.
_SAMPLE_DOCUMENTS = 1000
# For a plan, a corpus with at most this many documents is read whole.
_SMALL_DOCUMENTS = 10_000


@dataclass(frozen=True)
class Job:
    """One training job, described by a command line or by a trainer's arguments in Python.

    In Python, the student and teachers in `model` may be loaded models, and `data` names no corpus.
    """

    model: ModelOptions
    data: DataOptions
    args: VocAgnoConfig
    # The recipe as --config names it.
    recipe: str | None = None
    # Python may give a PEFT config instead of the options for adapters.
    peft_config: Any = None

    @property
    def loads_teacher(self) -> bool:
        """True if a teacher is a model in memory, and not a store."""
        return bool(self.model.teacher)


def prepare_models(
    job: Job, *, evaluates: bool, tokenizer: PreTrainedTokenizerBase | None = None
) -> Models:
    """Check what would fail late, and read the models' configurations and tokenizers."""
    check_launch(job)
    models = read_models(job.model, job.args, job.args.device, tokenizer=tokenizer)
    for line in options_without_effect(job, evaluates=evaluates):
        log_main(f"warning: {line}")
    return models


def options_without_effect(job: Job, *, evaluates: bool) -> Iterator[str]:
    """Yield a line for each option that has another value than its default and no effect."""
    classes = (ModelOptions, DataOptions, VocAgnoConfig)
    values: dict[str, object] = vars(job.args) | vars(job.data) | vars(job.model)
    values["eval_dataset"] = evaluates
    faults = dict(without_effect(values, *classes))
    # A method reads only some of its settings.
    read = job.args.guidance.in_effect()
    for declared in options_of(Method):
        if declared.name not in read and values[declared.name] != declared.default:
            faults[declared.name] = f"with {job.args.guidance.as_typed}"
    for name in sorted(faults):
        yield f"{named(name)} has no effect {faults[name]}"


def check_launch(job: Job) -> None:
    """Raise a ValueError for options that these processes and devices cannot support."""
    args = job.args
    _check_packages(args)
    # A layer's weights are gathered only for its own forward pass. Whatever reads the output head
    # from outside would get a shard.
    if args.teacher_sharding == "node":
        if args.teacher_quantization or args.guidance.distance:
            raise OptionError(
                "teacher_sharding",
                f"is not supported with {named('teacher_quantization')}, or with {named('method')} "
                "kld or uld, which need the teacher's whole output head: leave it out",
            )
        if devices_of_a_machine() < 2 and not args.dry_run:
            raise OptionError("teacher_sharding", "node needs several processes on a machine")
    # FSDP may be set up by the arguments or by the launcher, which uses the environment.
    plugin = args.fsdp_config if isinstance(args.fsdp_config, dict) else {}
    recomputes = parse_flag_from_env("FSDP_ACTIVATION_CHECKPOINTING")
    if job.model.use_peft and (recomputes or plugin.get("activation_checkpointing")):
        raise ValueError(
            f"fsdp_activation_checkpointing is not supported with {named('use_peft')}: PEFT would "
            f"save no adapters: set it to false and use {named('activation_checkpointing')}"
        )


def _check_packages(args: VocAgnoConfig) -> None:
    """Raise a ValueError for options whose packages are missing. They are loaded late."""
    # A plan may be made on a smaller machine than the job's.
    is_planned = args.dry_run and args.teacher_quantization in QUANTIZATIONS
    if args.teacher_quantization and not is_planned:
        option = f"{named('teacher_quantization')} {args.teacher_quantization}"
        if args.teacher_quantization == "fp8":
            require("torchao", option)
        require_quantization(quantization(args.teacher_quantization), option)
    # The hub's kernels replace the package.
    if args.attn_implementation == "flash_attention_2" and not is_installed("kernels"):
        require("flash_attn", f"{named('attn_implementation')} flash_attention_2")
    if args.dry_run:
        return
    try:
        Trainer.get_optimizer_cls_and_kwargs(args)
    except ImportError as error:
        raise OptionError("optim", f"{OptimizerNames(args.optim).value}: {error}") from error
    except ValueError:
        # Some optimizers need the model, or more settings. Trainer reports that.
        return


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
    evaluated = {}
    with machine_first():
        # Read all corpora before the first is aligned, so that a wrong name for the last one does
        # not cost the alignment of the others.
        corpora = _read_corpora(job, sample)
        if data.eval_dataset:
            evaluated[data.eval_dataset] = _read_evaluation(data)
            eval_blocks = pack_evaluation(job, models, evaluated, named("eval_dataset")).blocks
        texts = {name: documents for name, (documents, _) in corpora.items()}
        packed = pack_training(job, models, texts, named("dataset"))
    packed.blocks.weights = data.dataset_weights
    packed = replace(
        packed,
        eval_blocks=eval_blocks or packed.eval_blocks,
        totals=[total for _, total in corpora.values()],
        files=_descriptions([*texts.items(), *evaluated.items()]),
    )
    steps = epoch_steps(job, packed)
    # An epoch without a step is an error only for a whole corpus.
    if packed.is_whole and not steps:
        check_enough(packed.blocks, args, f"{named('dataset')} {' '.join(data.dataset)}")
    # A sample cannot show that a corpus is too small. Only the whole corpus can.
    if not packed.is_whole and steps is not None and steps < 2:
        return load_documents(job, models)
    return packed


def pack_training(
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


def pack_evaluation(
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
    return load_corpus(data.eval_dataset, split=None, text_column=column, option="eval_dataset")


def _descriptions(corpora: Iterable[tuple[str, datasets.Dataset]]) -> list[str]:
    """Say which files of each directory are read, and which are not."""
    lines = []
    for name, texts in corpora:
        if texts.info.description:
            lines.append(f"{Path(name).name}: {texts.info.description}")
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


def check_enough(blocks: Blocks, args: VocAgnoConfig, corpus_name: str) -> None:
    """Raise a ValueError if there are fewer packed sequences than one optimizer step needs."""
    rows, processes = args.per_device_train_batch_size, args.world_size
    needed = rows * args.gradient_accumulation_steps * processes
    if len(blocks) >= needed:
        return
    sequences = "1 sequence" if len(blocks) == 1 else f"{len(blocks):,} sequences"
    raise ValueError(
        f"{corpus_name} makes {sequences} of {args.max_length} tokens, and one optimizer step "
        f"needs {needed:,}: {args.batch_arithmetic()}; lower one of these, or give more documents"
    )


# -- Weights --------------------------------------------------------------------------------------


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
    online = [] if isinstance(teachers, StoredTeacher) else teachers
    if any(model is student for model in online):
        raise ValueError(
            "model and teacher are one object, and freezing the teacher would freeze the student; "
            "pass copy.deepcopy(model)"
        )
    if args.use_liger_kernel:
        _keep_teacher_rope(student, online, args)
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
