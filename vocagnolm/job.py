"""From arguments to the parts of a run: tokenizers, blocks, models, plan.

Besides the scripts, the only reader of `vocagnolm.config`; what it calls takes plain arguments.
"""

from __future__ import annotations

import math
import os
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from vocagnolm import checkpoints, config, models, plan
from vocagnolm.corpus import TEXT, load_corpus, load_sample
from vocagnolm.data import Reader, Segments, align_corpus, student_reader, teacher_reader
from vocagnolm.identity import revision_of
from vocagnolm.loss_recorder import LossRecorder
from vocagnolm.packing import Blocks
from vocagnolm.processes import in_agreement
from vocagnolm.scoring_job import PLAN_FILE, check_plan, versions
from vocagnolm.spans import load_tokenizer, tokenizer_sha256
from vocagnolm.store import MANIFEST_FILE, Store, read_manifest, write_json
from vocagnolm.stored_reader import MISSING, StoredReader
from vocagnolm.teacher import StoredTeacher

DRY_RUN_DOCUMENTS = 1000


@dataclass(frozen=True)
class Pair:
    """The two models before their weights are loaded; the teacher's half is None without one."""

    student: models.ModelSource
    student_config: PreTrainedConfig
    student_reader: Reader
    teacher: models.ModelSource | None = None
    teacher_config: PreTrainedConfig | None = None
    teacher_reader: Reader | StoredReader | None = None

    @property
    def teacher_row(self) -> int:
        """Teacher tokens that one row of a batch may hold."""
        return self.teacher_reader.limit if self.teacher_reader else sys.maxsize


def load_pair(model: config.ModelArguments, max_length: int) -> Pair:
    """Read configurations and tokenizers, which is cheap, and refuse what cannot work."""
    common: dict[str, Any] = {
        "attn_implementation": model.attn_implementation,
        "trust_remote_code": model.trust_remote_code,
    }
    student = models.ModelSource(model.student, "student", model.student_revision, **common)
    student_config = student.config()
    if max_length > (context := models.context_length(student_config)):
        raise ValueError(f"--max_length {max_length} exceeds the student's context of {context}")
    tokenizer = _load_tokenizer(student, "student", student_config, model.student_tokenizer)
    pair = Pair(student, student_config, student_reader(tokenizer, max_length))
    if model.teacher_losses:
        _stored_teacher(model)  # refuses bad weights before the corpus is read
        return replace(pair, teacher_reader=StoredReader(list(map(Store, model.teacher_losses))))
    if model.teacher is None:
        return pair
    teacher = models.ModelSource(model.teacher, "teacher", model.teacher_revision, **common)
    teacher_config = teacher.config()
    tokenizer = _load_tokenizer(teacher, "teacher", teacher_config, model.teacher_tokenizer)
    reader = teacher_reader(tokenizer, models.context_length(teacher_config))
    return replace(pair, teacher=teacher, teacher_config=teacher_config, teacher_reader=reader)


def _load_tokenizer(
    source: models.ModelSource,
    role: models.Role,
    model_config: PreTrainedConfig,
    elsewhere: str | None,
) -> Any:
    tokenizer = load_tokenizer(
        elsewhere or source.name,
        role,
        revision=None if elsewhere else source.revision,
        trust_remote_code=source.trust_remote_code,
    )
    models.check_vocabulary(model_config, tokenizer, role)
    return tokenizer


@dataclass(frozen=True)
class Documents:
    """What was read and aligned: all documents, or in a dry run the first ones.

    Attributes:
        corpus: the documents.
        segments: what became of them; without those that are held out.
        total: how many the whole dataset has; None if the hub does not say.
        held_out: what to evaluate on, if anything.
    """

    corpus: datasets.Dataset
    segments: Segments
    total: int | None
    held_out: Segments | None = None

    def write_skipped(self, output_dir: str | Path) -> None:
        """List the documents that were left out, with the reasons."""
        self.segments.write_skipped(Path(output_dir) / "skipped.jsonl")
        if self.held_out is not None:
            self.held_out.write_skipped(Path(output_dir) / "eval_skipped.jsonl")


def load_documents(pair: Pair, data: config.DataArguments, run: config.RunArguments) -> Documents:
    """Align the corpus; the first process of a node does the work, the others read its cache."""
    where: dict[str, Any] = {
        "split": data.dataset_split,
        "text_column": data.text_column,
        "config_name": data.dataset_config,
    }
    with in_agreement():  # nobody may align what is damaged, and leave it in the cache
        if isinstance(pair.teacher_reader, StoredReader) and run.local_process_index == 0:
            for store in pair.teacher_reader.stores:
                store.check()
    with run.main_process_first(desc="aligning the corpus"):
        if run.dry_run:
            corpus, total = load_sample(data.dataset, DRY_RUN_DOCUMENTS, **where)
        else:
            corpus = load_corpus(data.dataset, **where)
            total = len(corpus)
        segments = align_corpus(
            corpus, pair.student_reader, pair.teacher_reader, num_proc=data.processes(len(corpus))
        )
    missing = sum(reason == MISSING for _, reason in segments.skipped)
    if missing and data.missing_losses == "error":
        raise ValueError(
            f"--teacher_losses lacks {missing:,} of {len(corpus):,} documents of --dataset "
            f"{data.dataset}, or has another text of them: score this corpus, or leave them out "
            "with --missing_losses skip"
        )
    if not len(segments.rows):
        raise ValueError(
            f"--dataset {data.dataset} has no usable document: {len(corpus):,} read, "
            f"{len(segments.skipped):,} skipped ({plan.skip_reasons(segments)})"
        )
    return _hold_out(Documents(corpus, segments, total), pair, data, run)


def _hold_out(
    documents: Documents, pair: Pair, data: config.DataArguments, run: config.RunArguments
) -> Documents:
    """Add what to evaluate on."""
    if data.eval_dataset:
        with run.main_process_first(desc="aligning the evaluation documents"):
            corpus = load_corpus(
                data.eval_dataset, text_column=data.text_column, option="--eval_dataset"
            )
            stored = isinstance(pair.teacher_reader, StoredReader)  # it is asked nothing here
            held_out = align_corpus(
                corpus,
                pair.student_reader,
                None if stored else pair.teacher_reader,
                num_proc=data.processes(len(corpus)),
            )
        if not len(held_out.rows):
            raise ValueError(f"--eval_dataset {data.eval_dataset} has no usable document")
        return replace(documents, held_out=held_out)
    if not data.eval_fraction:
        return documents
    seed = run.seed if run.data_seed is None else run.data_seed
    rest, held_out = documents.segments.split(data.eval_fraction, seed)
    if not len(rest.rows):
        raise ValueError(
            f"--eval_fraction {data.eval_fraction} leaves no document of {data.dataset} to train "
            "on: lower it, or evaluate on other documents with --eval_dataset"
        )
    return replace(documents, segments=rest, held_out=held_out)


def load_blocks(
    pair: Pair, data: config.DataArguments, run: config.RunArguments, documents: Documents
) -> tuple[Blocks, Blocks | None]:
    """Pack the segments to train on, and those to evaluate on if there are any."""
    blocks, eval_blocks = (
        Blocks(segments.rows, data.max_length, pair.teacher_row) if segments is not None else None
        for segments in (documents.segments, documents.held_out)
    )
    assert blocks is not None
    per_step = run.global_batch_tokens // data.max_length
    if len(blocks) < per_step and not run.dry_run:
        raise ValueError(
            f"--dataset {data.dataset} makes {len(blocks):,} blocks of {data.max_length} tokens, "
            f"one optimizer step needs {per_step:,}: lower --global_batch_tokens to at most "
            f"{len(blocks) * data.max_length}"
        )
    return blocks, eval_blocks


def load_models(
    pair: Pair, model: config.ModelArguments, device: torch.device
) -> tuple[PreTrainedModel, PreTrainedModel | StoredTeacher | None]:
    """Load the weights of both models; a stored teacher has none."""
    student = pair.student.load(torch.float32)
    if isinstance(pair.teacher_reader, StoredReader):
        return student, _stored_teacher(model)
    if pair.teacher is None or pair.teacher_reader is None:
        return student, None
    teacher = pair.teacher.load(getattr(torch, _teacher_dtype(model, device)))
    models.check_distinct(
        student, teacher, pair.student_reader.tokenizer, pair.teacher_reader.tokenizer
    )
    return student, teacher


def _teacher_dtype(model: config.ModelArguments, device: torch.device) -> str:
    if model.teacher_dtype != "auto":
        return model.teacher_dtype
    return "float32" if device.type == "cpu" else "bfloat16"


def _stored_teacher(model: config.ModelArguments) -> StoredTeacher:
    stores = model.teacher_losses or ()
    return StoredTeacher(len(stores), model.teacher_reduction, tuple(model.teacher_weights or ()))


def load_recorder(
    pair: Pair, arguments: config.Arguments, documents: Documents, blocks: Blocks
) -> LossRecorder | None:
    """What keeps the teacher's losses, with `--save_store`.

    Raises:
        ValueError: the directory holds another store.
    """
    model, data, _, run = arguments
    if not (model.save_store and isinstance(pair.teacher_reader, Reader) and pair.teacher):
        return None
    directory = Path(model.save_store)
    description = {
        "teacher": model.teacher,
        "teacher_revision": revision_of(pair.teacher.name, pair.teacher_config),
        "tokenizer_sha256": tokenizer_sha256(pair.teacher_reader.tokenizer),
        "special_tokens": {"before": pair.teacher_reader.start, "behind": None},
        "segmentation": f"segments of a run of {model.student} with {data.max_length} tokens",
        "context": pair.teacher_reader.limit,
        "engine": "training",
        "dtype": _teacher_dtype(model, run.device),
        "loss_dtype": model.store_dtype,
        "dataset": data.dataset,
        "dataset_documents": len(documents.corpus),
    }
    check_plan(directory, description)
    if (directory / MANIFEST_FILE).exists():
        if checkpoints.find_checkpoint(run.output_dir):
            return None  # this run has finished it already, and only its own end is left
        raise ValueError(f"--save_store {directory} holds a finished store: give another directory")
    if run.process_index == 0:
        directory.mkdir(parents=True, exist_ok=True)
        write_json(directory / PLAN_FILE, description)
    segments = documents.segments.rows
    where = (directory, documents.corpus, segments, blocks, pair.teacher_reader)
    return LossRecorder(*where, model.store_dtype, description | versions())


def describe(pair: Pair, arguments: config.Arguments, documents: Documents, blocks: Blocks) -> str:
    """The plan of a run."""
    model, data, guidance, run = arguments
    parameters = pair.student.count_parameters(pair.student_config)
    is_sharded = bool(run.fsdp) or os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    devices = run.world_size if is_sharded else 1
    micro_batch = (run.per_device_train_batch_size or 1) * data.max_length
    memory: dict[str, float] = {
        "student with AdamW": models.training_bytes(parameters) / devices,
        "activations": micro_batch * models.student_bytes_per_token(pair.student_config),
    }
    lines = [f"student    {model.student}: {parameters:,} parameters"]
    if pair.teacher is not None and pair.teacher_config is not None:
        teacher_parameters = pair.teacher.count_parameters(pair.teacher_config)
        lines.append(f"teacher    {model.teacher}: {teacher_parameters:,} parameters, frozen")
        wide = model.teacher_dtype == "float32" or (
            model.teacher_dtype == "auto" and run.device.type == "cpu"
        )
        memory["teacher"] = teacher_parameters * (4 if wide else 2)
    if isinstance(pair.teacher_reader, StoredReader):
        for store in pair.teacher_reader.stores:
            made = f"{store.manifest['teacher']}, {store.manifest['tokens']:,} tokens"
            lines.append(f"teacher    {store.directory}: losses of {made}")
    settings = ", ".join(f"{name} {value}" for name, value in guidance.in_effect().items())
    lines.append(f"guidance   {settings}")
    lines += [
        *plan.describe_corpus(documents.segments, blocks, pair.teacher_reader is not None),
        *(plan.describe_skipped(documents.held_out, "held out") if documents.held_out else ()),
        f"batch      {run.batch_arithmetic(data.max_length)}",
        f"steps      {_steps(data, run, documents, blocks)}, learning rate {run.learning_rate:g}",
        *plan.describe_memory(memory),
        f"output     {run.output_dir}",
    ]
    return "\n".join(lines)


def _steps(
    data: config.DataArguments, run: config.RunArguments, documents: Documents, blocks: Blocks
) -> str:
    read, total = len(documents.corpus), documents.total
    if run.max_steps > 0:
        return f"{run.max_steps:,}"
    if total is None:
        return "known when the whole corpus is read"
    steps_of_epoch = len(blocks) * data.max_length * total // (read * run.global_batch_tokens)
    steps = f"{math.ceil(run.num_train_epochs * steps_of_epoch):,}"
    note = f"about {steps} (extrapolated from {read:,} of {total:,} documents)"
    return steps if total == read else note


def example(pair: Pair, documents: Documents) -> str:
    """The first segment's first tokens, aligned."""
    if not isinstance(pair.teacher_reader, Reader):
        return ""
    row = documents.segments.rows[0]
    text = documents.corpus[row["document"]][TEXT][row["start"] : row["end"]]
    return "\n".join(plan.aligned_example(text, pair.student_reader, pair.teacher_reader))


_RUN_IDENTITY = (
    *("global_batch_tokens", "num_train_epochs", "max_steps", "seed", "data_seed", "bf16", "fp16"),
    *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "optim"),
    *("adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay", "max_grad_norm", "optim_args"),
    "neftune_noise_alpha",
)
_WITHOUT_EFFECT_ON_NUMBERS = {
    *("num_proc", "trust_remote_code", "eval_dataset", "save_store", "store_dtype"),
}


def settings(arguments: config.Arguments) -> dict[str, Any]:
    """What defines a run: a checkpoint may only be resumed under the same.

    The number of processes does not, and neither does the batch of each, unless tokens compete
    within it.
    """
    model, data, guidance, run = arguments
    values = asdict(model) | asdict(data) | asdict(guidance)
    values = {k: v for k, v in values.items() if k not in _WITHOUT_EFFECT_ON_NUMBERS}
    for name in ("student", "teacher", "dataset"):
        if values[name] and Path(values[name]).exists():  # one place has many names
            values[name] = str(Path(values[name]).resolve())
    if model.teacher_losses:
        values["teacher_losses"] = [
            {"store": str(Path(path).resolve()), "teacher": read_manifest(Path(path))["teacher"]}
            for path in model.teacher_losses
        ]
    names = list(_RUN_IDENTITY)
    if guidance.selection_scope == "batch" or guidance.unmapped == "mean":
        names.append("per_device_train_batch_size")
    return values | {name: getattr(run, name) for name in names}


def corpus_settings(pair: Pair, documents: Documents, blocks: Blocks) -> dict[str, Any]:
    """What the corpus adds to `settings` once it is read: a checkpoint's place is a block's."""
    read = {"corpus_digest": documents.segments.digest(), "blocks": len(blocks)}
    if isinstance(pair.teacher_reader, StoredReader):
        read["teacher_losses_sha256"] = pair.teacher_reader.fingerprint()
    return read
