"""From arguments to the parts of a run: documents, blocks, identity.

Reads what `vocagnolm.run.parse` has parsed; what it calls takes plain arguments.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import datasets

from vocagnolm.collator import PackedCollator
from vocagnolm.corpus import load_corpus, load_sample
from vocagnolm.data import MISSING, Segments, align_corpus
from vocagnolm.host.files import write_json
from vocagnolm.host.manifest import MANIFEST_FILE
from vocagnolm.host.processes import first_of_machine_first, in_agreement
from vocagnolm.host.versions import versions
from vocagnolm.models.source import revision_of
from vocagnolm.packing import Blocks
from vocagnolm.run import describe as plan
from vocagnolm.run import parse as config
from vocagnolm.run.pair import Pair, teacher_dtype, teacher_quantization
from vocagnolm.store.job import PACKAGES, check_plan
from vocagnolm.store.recorder import LossRecorder
from vocagnolm.store.store import PLAN_FILE, manifest_of
from vocagnolm.tokenizers import tokenizer_sha256
from vocagnolm.trainer import VocAgnoTrainer
from vocagnolm.training import checkpoints
from vocagnolm.views.callback import GuidanceTable
from vocagnolm.views.view import ViewSettings
from vocagnolm.views.view import load_sample as load_guidance_sample

DRY_RUN_DOCUMENTS = 1000


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
    with in_agreement(takes_long=True):  # nobody may align what is damaged, and cache it
        if pair.guide and run.local_process_index == 0:
            pair.guide.check()
    with first_of_machine_first():
        if run.dry_run:
            corpus, total = load_sample(data.dataset, DRY_RUN_DOCUMENTS, **where)
        else:
            corpus = load_corpus(data.dataset, **where)
            total = len(corpus)
        segments = align_corpus(
            corpus, pair.student_reader, pair.guide, num_proc=data.processes(len(corpus))
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
        with first_of_machine_first():
            corpus = load_corpus(
                data.eval_dataset, text_column=data.text_column, option="--eval_dataset"
            )
            # A store is asked nothing here.
            guide = pair.guide if pair.guide and pair.guide.readers else None
            held_out = align_corpus(
                corpus,
                pair.student_reader,
                guide,
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
        Blocks(segments.rows, data.max_length, pair.teacher_rows) if segments is not None else None
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


def load_recorder(
    pair: Pair, arguments: config.Arguments, documents: Documents, blocks: Blocks
) -> LossRecorder | None:
    """What keeps the teacher's losses, with `--save_store`.

    Raises:
        ValueError: the directory holds another store.
    """
    model, data, _, run = arguments
    if not model.save_store:
        return None
    assert pair.guide
    ((reader,), (teacher,), (teacher_config,)) = (
        pair.guide.readers,
        pair.teachers,
        pair.teacher_configs,
    )
    directory = Path(model.save_store)
    description = {
        "teacher": teacher.name,
        "teacher_revision": revision_of(teacher.name, teacher_config),
        "tokenizer_sha256": tokenizer_sha256(reader.tokenizer),
        "special_tokens": {"before": reader.start, "behind": None},
        "segmentation": f"segments of a run of {model.student} with {data.max_length} tokens",
        "context": reader.limit,
        "engine": "training",
        "dtype": teacher_dtype(model, run.device),
        "quantization": teacher_quantization(model, run.device),
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
    where = (directory, documents.corpus, segments, blocks, reader)
    return LossRecorder(*where, model.store_dtype, description | {"versions": versions(PACKAGES)})


def load_guidance_table(
    trainer: VocAgnoTrainer,
    pair: Pair,
    arguments: config.Arguments,
    documents: Documents,
    blocks: Blocks,
) -> GuidanceTable | None:
    """What shows the guidance of the first block while the student learns, if that is asked for."""
    model, _, guidance, run = arguments
    if not guidance.guidance_table_steps:
        return None
    assert isinstance(trainer.data_collator, PackedCollator)
    readers = pair.guide.readers if pair.guide else ()
    sample = load_guidance_sample(
        blocks,
        [0],
        trainer.data_collator,
        documents.segments.rows,
        documents.corpus,
        (pair.student_reader, readers[0] if readers else None),
    )
    scope = {"sequence": "each block", "batch": "the blocks shown"}[guidance.selection_scope]
    settings = ViewSettings(
        model.student,
        " and ".join(map(str, model.teacher or model.teacher_losses or ())),
        guidance.method,
        guidance.top_k,
        guidance.aggregation,
        guidance.unmapped,
        f"the mapped tokens of {scope}",
    )
    return GuidanceTable(trainer, sample, guidance.guidance_table_steps, run.output_dir, settings)


_RUN_IDENTITY = (
    *("global_batch_tokens", "num_train_epochs", "max_steps", "seed", "data_seed", "bf16", "fp16"),
    *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "optim"),
    *("adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay", "max_grad_norm", "optim_args"),
    "neftune_noise_alpha",
)
_WITHOUT_EFFECT_ON_NUMBERS = {
    *("num_proc", "trust_remote_code", "eval_dataset", "save_store", "store_dtype"),
    *("guidance_table_steps", "compile_layers", "teacher_sharding", "device_peak_tflops"),
}


def settings(arguments: config.Arguments) -> dict[str, Any]:
    """What defines a run: a checkpoint may only be resumed under the same.

    The number of processes does not, and neither does the batch of each, unless tokens compete
    within it.
    """
    model, data, guidance, run = arguments
    values = asdict(model) | asdict(data) | asdict(guidance)
    values = {k: v for k, v in values.items() if k not in _WITHOUT_EFFECT_ON_NUMBERS}
    for name in ("student", "dataset"):
        values[name] = _one_name(values[name])
    for name in ("teacher", "teacher_revision", "teacher_tokenizer"):  # as it is, of a single one
        if values[name]:
            given = [_one_name(value) for value in values[name]]
            values[name] = given if len(given) > 1 else given[0]
    if model.teacher_losses:
        values["teacher_losses"] = [
            {"store": str(Path(path).resolve()), "teacher": manifest_of(Path(path))["teacher"]}
            for path in model.teacher_losses
        ]
    names = list(_RUN_IDENTITY)
    if guidance.selection_scope == "batch" or guidance.unmapped == "mean":
        names.append("per_device_train_batch_size")
    return values | {name: getattr(run, name) for name in names}


def defaults() -> dict[str, Any]:
    """What `settings` are if nothing is said; a run was under them before an option existed."""
    parts = (config.ModelArguments, config.DataArguments, config.GuidanceArguments)
    return {option.name: option.default for part in parts for option in fields(part)}


def _one_name(name: str) -> str:
    """A directory has many names, and one that is absolute."""
    return str(Path(name).resolve()) if Path(name).exists() else name


def corpus_settings(pair: Pair, documents: Documents, blocks: Blocks) -> dict[str, Any]:
    """What the corpus adds to `settings` once it is read: a checkpoint's place is a block's."""
    read = {"corpus_digest": documents.segments.digest(), "blocks": len(blocks)}
    if pair.guide and not pair.guide.readers:  # a store
        read["teacher_losses_sha256"] = pair.guide.fingerprint()
    return read
