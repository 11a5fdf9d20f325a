"""All that only watches a run: trackers, a store of the teacher's losses, a table of guidance."""

import os
import platform
import subprocess
from contextlib import suppress
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Literal

import numpy as np
import psutil  # type: ignore[import-untyped]  # accelerate needs it too
import torch

from vocagnolm.collator import PackedCollator
from vocagnolm.data import Segments
from vocagnolm.dist import cores
from vocagnolm.host.trackers import GUIDANCE_TABLE, Tracking
from vocagnolm.io import JsonObject, versions
from vocagnolm.models.sharding import devices_of_a_machine
from vocagnolm.models.source import revision_of
from vocagnolm.report.callback import GuidanceTable
from vocagnolm.report.view import ViewSettings, sample_blocks
from vocagnolm.run import checkpoints
from vocagnolm.run.config import RunArguments
from vocagnolm.run.documents import Documents
from vocagnolm.run.job import Job
from vocagnolm.run.pair import Pair
from vocagnolm.store.format import SHARDS, begin_store, manifest_of, read_manifest
from vocagnolm.store.record import LossRecorder
from vocagnolm.store.scoring import PACKAGES, check_plan
from vocagnolm.texts.tokenizers import tokenizer_sha256
from vocagnolm.trainer import VocAgnoTrainer

_CODE = "vocagnolm python torch transformers accelerate datasets tokenizers wandb"
_GIB = 2**30
# Of the losses in --save_store.
_STORED_DTYPE: Literal["float16"] = "float16"


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
        "segmentation": f"segments of a run of {model.student} with {job.pack.max_length} tokens",
        "context": reader.limit,
        "engine": "training",
        "dtype": pair.teacher_dtype,
        "quantization": pair.teacher_quantization,
        "loss_dtype": _STORED_DTYPE,
        "dataset": job.settings["dataset"],
        "dataset_documents": documents.total,
    }
    check_plan(directory, description)
    if SHARDS in read_manifest(directory):
        # A run that has finished its store already has only its own end left to do.
        if checkpoints.newest_checkpoint(job.run.output_dir):
            return None
        raise ValueError(f"--save_store {directory} holds a finished store: give another directory")
    return description


def load_recorder(
    job: Job, documents: Documents, description: JsonObject | None
) -> LossRecorder | None:
    """Make the recorder for `--save_store`, and claim its directory."""
    if description is None:
        return None
    assert job.model.save_store
    directory = Path(job.model.save_store)
    # Each process writes what it has read; the plan is written once.
    if job.run.process_index == 0:
        begin_store(directory, description, replace=True)
    read = documents.corpus, documents.segments.rows, documents.blocks
    described = {**description, "versions": versions(PACKAGES)}
    return LossRecorder(directory, *read, _STORED_DTYPE, described)


def load_guidance_table(
    job: Job, pair: Pair, documents: Documents, trainer: VocAgnoTrainer
) -> GuidanceTable | None:
    """Make the callback that shows the guidance of the first block, if that is asked for."""
    model, method = job.model, job.method
    if not job.run.guidance_table_steps:
        return None
    assert isinstance(trainer.data_collator, PackedCollator)
    texts = documents.segments.rows, documents.corpus, pair.student_reader
    sample = sample_blocks(documents.blocks, [0], trainer.data_collator, *texts)
    teacher = " and ".join(model.teacher or model.teacher_losses or ())
    scope = {"sequence": "each block", "batch": "the blocks shown"}[method.selection_scope]
    settings = ViewSettings(model.student, teacher, method, f"the mapped tokens of {scope}")
    every = job.run.guidance_table_steps
    report = partial(trainer.report_table, GUIDANCE_TABLE)
    guide, place = trainer.token_guidance, job.run.output_dir
    return GuidanceTable(guide, sample, every, place, settings, report)


def describe_tracking(job: Job, pair: Pair, documents: Documents) -> Tracking:
    """Place a run among others, as its options, the environment and its recipe say, in this order.

    The recipe's folder is the experiment. The config has the settings as in `run.json`, and beside
    them all that else a run is told apart by.
    """
    run, said, recipe = job.run, os.environ.get, _recipe_parts(job.recipe)
    models = _models(job, pair)
    tags = [tag for tag in said("WANDB_TAGS", "").split(",") if tag]
    return Tracking(
        project=None if run.project == RunArguments.project else run.project,
        group=said("WANDB_RUN_GROUP") or "/".join(recipe[:-1]) or None,
        name=run.run_name
        or said("WANDB_NAME")
        or "/".join(recipe)
        or Path(str(run.output_dir)).resolve().name,
        tags=tags or [job.method.method, *(Path(str(x["name"])).name for x in models.values())],
        config={
            **job.settings,
            **documents.settings(pair),
            "recipe": job.recipe,
            "models": models,
            "corpus": _corpora(documents),
            "code": versions(_CODE) | {"commit": _commit()},
            "hardware": _hardware(run),
        },
    )


def _recipe_parts(recipe: str | None) -> tuple[str, ...]:
    """Return the path of a recipe below the last `recipes`, or its folder and name."""
    if not recipe:
        return ()
    parts = Path(recipe).resolve().with_suffix("").parts
    below = parts[::-1].index("recipes") if "recipes" in parts else 2
    return parts[-below:]


def _models(job: Job, pair: Pair) -> dict[str, dict[str, object]]:
    """Describe student and teachers by role; a store names the teacher that scored it."""
    found: dict[str, dict[str, object]] = {}
    roles = chain(("student", "teacher"), (f"teacher_{number}" for number in count(2)))
    all_sizes = (pair.student_sizes, *pair.teacher_sizes)
    for model, sizes in zip((pair.student, *pair.teachers), all_sizes, strict=True):
        found[next(roles)] = {
            "name": model.source.name,
            "revision": revision_of(model.source.name, model.config),
            "parameters": sizes.parameters,
        }
    found["student"]["trained_parameters"] = pair.student_sizes.trained
    for path in job.model.teacher_losses or ():
        manifest = manifest_of(Path(path))
        found[next(roles)] = {
            "name": manifest["teacher"],
            "revision": manifest.get("teacher_revision"),
            "store": path,
        }
    return found


def _corpora(documents: Documents) -> dict[str, object]:
    """Count what is read, and of several corpora the parts too, by their names in the logs."""
    blocks, held_out = documents.blocks, documents.held_out
    about = {
        **_counts(documents.segments, len(blocks), held_out),
        "fill_fraction": blocks.fill_fraction,
    }
    if len(blocks.parts) > 1:
        pairs = zip(blocks.parts.items(), documents.corpora, strict=True)
        about["parts"] = {
            name: _counts(each.segments, count, each.held_out) for (name, count), each in pairs
        }
    return about


def _counts(segments: Segments, blocks: int, held_out: Segments | None) -> dict[str, object]:
    used = np.unique(segments.rows.with_format("numpy")["document"][:])
    return {
        "digest": segments.digest(),
        "documents": len(used),
        "skipped_documents": len(segments.skipped),
        "segments": len(segments.rows),
        "student_tokens": segments.total("student_tokens"),
        "teacher_tokens": segments.total("teacher_tokens"),
        "blocks": blocks,
        "held_out_segments": 0 if held_out is None else len(held_out.rows),
    }


def _commit() -> str | None:
    """Return the commit of the code, with a "+" where files differ from it; None of a wheel."""
    place = Path(__file__).parents[2]
    if not (place / ".git").exists():
        return None
    named = "describe --always --exclude=* --abbrev=40 --dirty=+"
    with suppress(OSError, subprocess.SubprocessError):
        git = ["git", "-C", str(place), *named.split()]
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    return None


def _hardware(run: RunArguments) -> dict[str, object]:
    is_cuda = run.device.type == "cuda"
    memory = torch.cuda.mem_get_info()[1] if is_cuda else psutil.virtual_memory().total
    return {
        "device": torch.cuda.get_device_name() if is_cuda else platform.processor() or "cpu",
        "device_memory_gib": round(memory / _GIB, 1),
        "devices": run.world_size,
        "machines": max(1, run.world_size // devices_of_a_machine()),
        "cores": cores(),
        "platform": platform.platform(),
    }
