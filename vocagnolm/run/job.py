"""One training job: its options, its models before and with their weights, and its documents."""

import hashlib
import json
import logging
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import datasets
import pyarrow as pa
import pyarrow.compute as pc
import torch
from accelerate.utils import parse_flag_from_env
from torch import nn
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
)
from transformers.training_args import OptimizerNames

from vocagnolm.attention import TORCH_VARLEN, why_not_varlen
from vocagnolm.chat.reading import TRAIN_ON
from vocagnolm.cli import corpora_of, listed, one_for_each, resolve_dtype
from vocagnolm.corpus import (
    files_of,
    is_conversations,
    joined,
    load_corpus,
    load_sample,
)
from vocagnolm.data import MISSING, Segments, align_corpus
from vocagnolm.dist import cores, machine_first
from vocagnolm.extras import is_installed, require
from vocagnolm.io import told_of_full_disk
from vocagnolm.models.adapters import add_adapters
from vocagnolm.models.early_probe import check_kind
from vocagnolm.models.load import (
    QUANTIZATIONS,
    ModelSource,
    check_distinct,
    check_quantizer,
    context_length,
    devices_of_a_machine,
    quantization,
    shard_inside_machine,
)
from vocagnolm.objective import StoredTeacher
from vocagnolm.packing import Blocks
from vocagnolm.readers import (
    Reader,
    Role,
    TeacherReaders,
    check_same_tokens,
    student_reader,
    teacher_reader,
    tokenizer_sha256,
)
from vocagnolm.run.config import NO_EFFECT_ON_NUMBERS, RUN_SETTINGS, VocAgnoConfig
from vocagnolm.run.options import DataOptions, GuidanceOptions, ModelOptions, PackOptions
from vocagnolm.run.plan import Sizes, epoch_steps, sizes_of, skip_reasons
from vocagnolm.store.format import Store, manifest_of
from vocagnolm.store.read import StoredReader

logger = logging.getLogger(__name__)

_PLACES = (
    "student teacher student_tokenizer teacher_tokenizer student_chat_template "
    "teacher_chat_template dataset"
).split()
# Documents of a corpus that a plan is made from, unless it has few enough to read them all.
_SAMPLE_DOCUMENTS, _SMALL_DOCUMENTS = 1000, 10_000
# Skipped documents that are worth a warning.
_LOUD_SHARE = 0.05
_CACHE_IS_FULL = "What is aligned stays: free some room, or set HF_DATASETS_CACHE to another disk"
# Below this, processes take longer to start than they save on 32 cores.
_MANY_DOCUMENTS = 10_000


# -- Options -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """One training job, as the command line, a recipe and the launcher describe it."""

    model: ModelOptions
    data: DataOptions
    args: VocAgnoConfig
    # As --config names it.
    recipe: str | None = None


def settings_of(job: Job) -> dict[str, Any]:
    """Return the settings that define a run: a checkpoint may be resumed only under the same.

    The number of processes is not among them, and neither is the batch of each, unless tokens
    compete within it.
    """
    found = asdict(job.model) | asdict(job.data)
    names = (*(each.name for each in fields(GuidanceOptions)), *RUN_SETTINGS)
    found |= {name: getattr(job.args, name) for name in names}
    for name in NO_EFFECT_ON_NUMBERS:
        del found[name]
    for name in _PLACES:
        # A file or directory has many names, and one absolute path.
        places = [
            str(Path(place).resolve()) if Path(place).exists() else place
            for place in listed(found[name] or [])
        ]
        if found[name]:
            found[name] = places if isinstance(found[name], list) else places[0]
    if job.model.teacher_losses:
        found["teacher_losses"] = [
            {"store": str(Path(path).resolve()), "teacher": manifest_of(Path(path))["teacher"]}
            for path in job.model.teacher_losses
        ]
    if not job.args.splits_alike:
        found["per_device_train_batch_size"] = job.args.per_device_train_batch_size
    return found


def check_launch(job: Job) -> None:
    """Raise a ValueError for options that these processes and devices cannot meet."""
    args = job.args
    _check_packages(args)
    if args.teacher_sharding == "node":
        if args.teacher_quantization or args.distance:
            raise ValueError(
                "--teacher_sharding goes neither with --teacher_quantization nor with --method kld "
                "or uld, which need the teacher's whole output head: leave it out"
            )
        if devices_of_a_machine() < 2 and not args.dry_run:
            raise ValueError("--teacher_sharding node needs several processes on a machine")
    # On a GPU such attention computes in 16 bits only, which the first step would say.
    attention = args.attn_implementation or ""
    is_wide = not args.is_mixed or args.teacher_dtype == "float32"
    if args.device.type == "cuda" and is_wide and ("flash" in attention or "varlen" in attention):
        raise ValueError(
            f"--attn_implementation {attention} computes in 16 bits on a GPU: use --bf16 true "
            "without --teacher_dtype float32, or --attn_implementation sdpa"
        )
    plugin = args.fsdp_config if isinstance(args.fsdp_config, dict) else {}
    recomputes = parse_flag_from_env("FSDP_ACTIVATION_CHECKPOINTING")
    if job.model.use_peft and (recomputes or plugin.get("activation_checkpointing")):
        raise ValueError(
            "fsdp_activation_checkpointing does not go with --use_peft, because PEFT would save no "
            "adapters: set it to false and use --activation_checkpointing"
        )


def _check_packages(args: VocAgnoConfig) -> None:
    """Raise a ValueError for options whose packages, which are loaded late, are not installed."""
    # A plan may be made on a smaller machine than the job will run on.
    is_planned = args.dry_run and args.teacher_quantization in QUANTIZATIONS
    if args.teacher_quantization and not is_planned:
        shown = f"--teacher_quantization {args.teacher_quantization}"
        if args.teacher_quantization == "fp8":
            require("torchao", shown)
        check_quantizer(quantization(args.teacher_quantization), shown)
    # The kernels of the hub replace the package.
    if args.attn_implementation == "flash_attention_2" and not is_installed("kernels"):
        require("flash_attn", "--attn_implementation flash_attention_2")
    if args.dry_run:
        return
    try:
        Trainer.get_optimizer_cls_and_kwargs(args)
    except ImportError as error:
        raise ValueError(f"--optim {OptimizerNames(args.optim).value}: {error}") from error
    except ValueError:
        # Some optimizers need the model, or more settings: Trainer says so.
        return


# -- Models ------------------------------------------------------------------------------------


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


# -- Documents ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Corpus:
    """Documents of one corpus, read and aligned; in a sample only the first ones."""

    # As typed.
    name: str
    # With the documents that are held out.
    texts: datasets.Dataset
    # To train on.
    segments: Segments
    # Documents of the whole dataset; None if it is not known.
    total: int | None


@dataclass(frozen=True)
class Documents:
    """Documents of a job, read, aligned and packed, one corpus behind the other.

    Attributes:
        texts: all documents, in the order of the segments' indices.
        settings: what the corpus adds to those of the run: progress is counted in packed sequences.
        files: which files of directories were read, and which were not.
    """

    corpora: list[Corpus]
    texts: datasets.Dataset
    segments: Segments
    blocks: Blocks
    eval_blocks: Blocks | None
    settings: dict[str, Any]
    files: list[str]

    @property
    def is_whole(self) -> bool:
        """False if only the first documents of a dataset were read."""
        return all(each.total == len(each.texts) for each in self.corpora)


def load_documents(job: Job, models: Models, *, sample: bool = False) -> Documents:
    """Read, align and pack the corpora; one process of a machine works, the others read its cache.

    A `sample` is of the first documents, unless a corpus is small, or may be too small.

    Raises:
        ValueError: a document has no stored losses, or there is too little to train on.
    """
    data, args = job.data, job.args
    with machine_first():
        corpora, evaluated = _align_corpora(job, models, sample)
    if data.eval_fraction:
        # The seed of the data, as Trainer reads it.
        seed = args.seed if args.data_seed is None else args.data_seed
        for index, corpus in enumerate(corpora):
            rest, held_out = corpus.segments.split(data.eval_fraction, seed)
            if not len(rest.rows):
                raise ValueError(
                    f"--eval_fraction {data.eval_fraction} leaves no document of {corpus.name} to "
                    "train on: lower it, or evaluate on other documents with --eval_dataset"
                )
            corpora[index] = replace(corpus, segments=rest)
            evaluated.append(held_out)
    limits = models.guide.limits() if models.guide else [sys.maxsize]
    segments, blocks = _pack(corpora, [each.segments for each in corpora], args.max_length, limits)
    blocks.weights = data.dataset_weights
    found = Documents(
        corpora=corpora,
        texts=joined([each.texts for each in corpora]),
        segments=segments,
        blocks=blocks,
        eval_blocks=_pack(corpora, evaluated, args.max_length, limits)[1] if evaluated else None,
        settings=_settings_of_corpora(job, models, corpora, blocks),
        files=_describe_files(data),
    )
    steps = epoch_steps(job, found)
    if found.is_whole and not steps:
        left_out = [
            f"of {each.name} {skipped_line(each.segments, len(each.texts))}"
            for each in corpora
            if each.segments.skipped
        ]
        if data.eval_fraction:
            left_out.append(f"--eval_fraction {data.eval_fraction} holds out others")
        check_enough(blocks, args, f"--dataset {' '.join(data.dataset)}", left_out)
    # The corpus may be too small, which only the whole corpus shows.
    if not found.is_whole and steps is not None and steps < 2:
        return load_documents(job, models)
    return found


def _align_corpora(job: Job, models: Models, sample: bool) -> tuple[list[Corpus], list[Segments]]:
    """Read and align the corpora, and the one that is evaluated on, if any."""
    data = job.data
    # All of them first: a wrong name is reported before any is aligned.
    to_evaluate = None
    if data.eval_dataset:
        column = data.text_column[0] if data.text_column else None
        name, option = data.eval_dataset, "--eval_dataset"
        to_evaluate = load_corpus(name, split=None, text_column=column, option=option)
    read = [(name, *_read(job, name, given, sample)) for name, given in corpora_of(data)]
    if job.args.method == "chunk" and any(is_conversations(texts) for _, texts, _ in read):
        raise ValueError(
            "--method chunk needs a loss of every token, and the questions of a conversation have "
            "none"
        )
    corpora = []
    for name, texts, total in read:
        shown = f"--dataset {name}"
        segments = align(texts, models.reader, models.guide, job.args, shown)
        corpora.append(Corpus(name, texts, segments, total))
    if to_evaluate is None:
        return corpora, []
    # A store knows other documents only, and evaluation needs no teacher.
    online = None if job.model.teacher_losses else models.guide
    shown = f"--eval_dataset {data.eval_dataset}"
    return corpora, [align(to_evaluate, models.reader, online, job.args, shown)]


def _describe_files(data: DataOptions) -> list[str]:
    """Say of each directory which of its files are read, and which are not."""
    found = []
    for name, given in corpora_of(data):
        found.append((name, files_of(name, split=given["split"], config_name=given["config_name"])))
    if data.eval_dataset:
        files = files_of(data.eval_dataset, split=None, option="--eval_dataset")
        found.append((data.eval_dataset, files))
    notes = [(Path(name).name, each.describe()) for name, each in found if each]
    return [f"{name}: {note}" for name, note in notes if note]


def _settings_of_corpora(
    job: Job, models: Models, corpora: Sequence[Corpus], blocks: Blocks
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "corpus_digest": [each.segments.digest() for each in corpora],
        "blocks": len(blocks),
    }
    if any(is_conversations(each.texts) for each in corpora):
        readers = [models.reader, *(models.guide.readers if models.guide else ())]
        shown = repr([reader.template for reader in readers])
        found["chat_templates_sha256"] = hashlib.sha256(shown.encode()).hexdigest()
    if job.model.teacher_losses and models.guide:
        found["teacher_losses_sha256"] = models.guide.fingerprint()
    return found


def _read(
    job: Job, name: str, given: dict[str, Any], sample: bool
) -> tuple[datasets.Dataset, int | None]:
    """Read a corpus or its first documents, with the number of all."""
    if sample and job.args.dry_run:
        # Of a corpus of the hub, without the rest.
        texts, total = load_sample(name, _SAMPLE_DOCUMENTS, **given)
        if total is None or total > _SMALL_DOCUMENTS:
            return texts, total
    texts = load_corpus(name, **given)
    total = len(texts)
    if sample and total > _SMALL_DOCUMENTS:
        texts = texts.select(range(_SAMPLE_DOCUMENTS))
    return texts, total


def align(
    texts: datasets.Dataset,
    reader: Reader,
    guide: TeacherReaders | None,
    options: PackOptions,
    shown: str,
) -> Segments:
    """Align documents; a ValueError where none is left, or a store lacks some."""
    workers = options.dataset_num_proc or cores()
    cache = Path(datasets.config.HF_DATASETS_CACHE)
    with told_of_full_disk(
        cache, lambda: "What is aligned stays: set HF_DATASETS_CACHE to another disk"
    ):
        segments = align_corpus(
            *(texts, reader, guide),
            num_proc=workers if workers > 1 and len(texts) >= _MANY_DOCUMENTS else None,
            train_on=options.train_on or TRAIN_ON[0],
        )
    share = len(segments.skipped) / max(len(texts), 1)
    if _LOUD_SHARE < share < 1:
        logger.warning(
            "%s of the documents of %s are skipped (%s)",
            *(f"{share:.0%}", shown, skip_reasons(segments)),
        )
    missing = sum(reason == MISSING for _, reason in segments.skipped)
    if missing and options.missing_losses == "error":
        raise ValueError(
            f"--teacher_losses lacks {missing:,} of {len(texts):,} documents of {shown}, or has "
            "another text of them: score this corpus, leave them out with --missing_losses skip, "
            "or train on them without a teacher with --missing_losses plain"
        )
    if not len(segments.rows):
        raise ValueError(
            f"{shown} has no usable document: {len(texts):,} read, {len(segments.skipped):,} "
            f"skipped ({skip_reasons(segments)})"
        )
    return segments


def skipped_line(segments: Segments, documents: int) -> str:
    """Say how many documents were skipped, and why."""
    count = len(segments.skipped)
    return f"{count:,} of {documents:,} documents were skipped: {skip_reasons(segments)}"


def check_enough(
    blocks: Blocks, args: VocAgnoConfig, shown: str, left_out: Sequence[str] = ()
) -> None:
    """Raise a ValueError for fewer packed sequences than one optimizer step needs.

    The message says what left documents out, and gives numbers that these sequences allow.
    """
    rows, world = args.per_device_train_batch_size, args.world_size
    needed = rows * args.gradient_accumulation_steps * world
    if len(blocks) >= needed:
        return
    sequences = "1 sequence" if len(blocks) == 1 else f"{len(blocks):,} sequences"
    found = (
        f"{shown} makes {sequences} of {args.max_length} tokens, and one optimizer step needs "
        f"{needed:,}"
    )
    if left_out:
        found += f" ({'; '.join(left_out)})"
    # Batches that the sequences fill, of the size that was asked for.
    steps = len(blocks) // (rows * world)
    most_rows = len(blocks) // world
    asked_rows = "per_device_train_batch_size" in args.asked_of_batch
    advice = []
    if not most_rows:
        advice = ["--max_length, or give more documents"]
    elif "global_batch_tokens" in args.asked_of_batch:
        whole = steps * rows if asked_rows and steps else most_rows
        advice = [f"--global_batch_tokens to at most {whole * world * args.max_length}"]
        if asked_rows and not steps:
            advice.append(f"--per_device_train_batch_size to {most_rows}")
    elif steps:
        advice = [f"--gradient_accumulation_steps to at most {steps}"]
    else:
        advice = [f"--per_device_train_batch_size to at most {most_rows}"]
        if args.gradient_accumulation_steps > 1:
            advice.append("--gradient_accumulation_steps to 1")
    raise ValueError(f"{found}: lower {' and '.join(advice)}")


def _pack(
    corpora: Sequence[Corpus], parts: Sequence[Segments], max_length: int, limits: Sequence[int]
) -> tuple[Segments, Blocks]:
    """Pack segments of one data set, or of each corpus: documents are counted through all."""
    if len(parts) == 1:
        return parts[0], Blocks(parts[0].rows, max_length, limits)
    rows, skipped, first, sizes = [], [], 0, {}
    names = _short_names([corpus.name for corpus in corpora])
    for name, corpus, part in zip(names, corpora, parts, strict=True):
        table = part.rows.data
        column = pc.add(table.column("document"), pa.scalar(first, pa.int32()))
        table = table.set_column(table.column_names.index("document"), "document", column)
        about = {"info": part.rows.info, "fingerprint": part.rows._fingerprint}
        rows.append(datasets.Dataset(table, indices_table=part.rows._indices, **about))
        skipped += [(first + document, why) for document, why in part.skipped]
        first += len(corpus.texts)
        sizes[name] = len(part.rows)
    segments = Segments(datasets.concatenate_datasets(rows), skipped)
    return segments, Blocks(segments.rows, max_length, limits, sizes)


def _short_names(names: Sequence[str]) -> list[str]:
    """Name corpora in logs, where two may not be alike.

    >>> _short_names(["data/web.jsonl.gz", "org/finemath-4plus", "old/web.jsonl"])
    ['web', 'finemath_4plus', 'web_3']
    """
    short: list[str] = []
    for index, name in enumerate(names, 1):
        stem = re.sub(r"\W+", "_", Path(name).name.split(".")[0]) or "corpus"
        short.append(f"{stem}_{index}" if stem in short else stem)
    return short


def write_skipped(documents: Documents, output_dir: str | Path) -> None:
    """List the documents that were left out, with the reasons; a file for each corpus."""
    for each, name in zip(documents.corpora, documents.blocks.parts, strict=True):
        reasons = each.segments.reasons
        if reasons:
            lines = [json.dumps({"document": index, "reason": why}) for index, why in reasons]
            path = Path(output_dir, f"skipped_{name}.jsonl" if name else "skipped.jsonl")
            path.write_text("\n".join([*lines, ""]), encoding="utf-8")
