"""Options of a run that only watch it: a store of its teacher's losses, a table of its guidance."""

from functools import partial
from pathlib import Path

from vocagnolm.collator import PackedCollator
from vocagnolm.host.files import JsonObject, write_json
from vocagnolm.host.manifest import MANIFEST_FILE
from vocagnolm.host.trackers import GUIDANCE_TABLE
from vocagnolm.host.versions import versions
from vocagnolm.models.source import revision_of
from vocagnolm.run.documents import Documents
from vocagnolm.run.job import Job
from vocagnolm.run.pair import Pair
from vocagnolm.store.job import PACKAGES, check_plan
from vocagnolm.store.recorder import LossRecorder
from vocagnolm.store.store import PLAN_FILE
from vocagnolm.texts.tokenizers import tokenizer_sha256
from vocagnolm.trainer import VocAgnoTrainer
from vocagnolm.training import checkpoints
from vocagnolm.views.callback import GuidanceTable
from vocagnolm.views.view import ViewSettings, sample_blocks


def describe_store(job: Job, pair: Pair, documents: Documents) -> JsonObject | None:
    """Describe the store of `--save_store`; None where none is kept, or the run has finished it.

    Raises:
        ValueError: the directory holds another store.
    """
    model = job.model
    if not model.save_store:
        return None
    assert pair.guide
    ((reader,), (teacher,)) = pair.guide.readers, pair.teachers
    directory = Path(model.save_store)
    # The same keys as `vocagnolm score` writes, so that both kinds of stores are read alike.
    description: JsonObject = {
        "teacher": teacher.source.name,
        "teacher_revision": revision_of(teacher.source.name, teacher.config),
        "tokenizer_sha256": tokenizer_sha256(reader.tokenizer),
        "special_tokens": {"before": reader.start, "behind": None},
        "segmentation": f"segments of a run of {model.student} with {job.data.max_length} tokens",
        "context": reader.limit,
        "engine": "training",
        "dtype": pair.teacher_dtype,
        "quantization": pair.teacher_quantization,
        "loss_dtype": model.store_dtype,
        "dataset": job.settings["dataset"],
        "dataset_documents": documents.total,
    }
    check_plan(directory, description)
    if (directory / MANIFEST_FILE).exists():
        # A run that has finished its store already has only its own end left to do.
        if checkpoints.find_checkpoint(job.run.output_dir):
            return None
        raise ValueError(f"--save_store {directory} holds a finished store: give another directory")
    return description


def load_recorder(
    job: Job, pair: Pair, documents: Documents, description: JsonObject | None
) -> LossRecorder | None:
    """Make the recorder for `--save_store`, and claim its directory."""
    model = job.model
    if description is None:
        return None
    assert pair.guide
    assert model.save_store
    directory = Path(model.save_store)
    # Each process writes what it has read; the plan is written once.
    if job.run.process_index == 0:
        directory.mkdir(parents=True, exist_ok=True)
        write_json(directory / PLAN_FILE, description)
    read = documents.corpus, documents.segments.rows, documents.blocks
    described = {**description, "versions": versions(PACKAGES)}
    return LossRecorder(directory, *read, model.store_dtype, described)


def load_guidance_table(
    job: Job, pair: Pair, documents: Documents, trainer: VocAgnoTrainer
) -> GuidanceTable | None:
    """Make the callback that shows the guidance of the first block, if that is asked for."""
    model, method = job.model, job.method
    if not method.guidance_table_steps:
        return None
    assert isinstance(trainer.data_collator, PackedCollator)
    texts = documents.segments.rows, documents.corpus, pair.student_reader
    sample = sample_blocks(documents.blocks, [0], trainer.data_collator, *texts)
    teacher = " and ".join(model.teacher or model.teacher_losses or ())
    scope = {"sequence": "each block", "batch": "the blocks shown"}[method.selection_scope]
    settings = ViewSettings(model.student, teacher, method, f"the mapped tokens of {scope}")
    every = method.guidance_table_steps
    report = partial(trainer.report_table, GUIDANCE_TABLE)
    guide, place = trainer.token_guidance, job.run.output_dir
    return GuidanceTable(guide, sample, every, place, settings, report)
