"""Description of a run for its trackers: its settings, models, corpus, code and machine."""

import os
import platform
import subprocess
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil  # type: ignore[import-untyped]  # accelerate needs it too
import torch

from vocagnolm.data import Segments
from vocagnolm.host.command import is_main
from vocagnolm.host.processes import cores, in_agreement
from vocagnolm.host.trackers import Tracking, offline_reason
from vocagnolm.host.versions import versions
from vocagnolm.models.sharding import devices_of_a_machine
from vocagnolm.models.source import revision_of
from vocagnolm.run.documents import Documents
from vocagnolm.run.job import Job
from vocagnolm.run.pair import Pair
from vocagnolm.run.training_arguments import RunArguments
from vocagnolm.store.store import manifest_of

_CODE = "vocagnolm python torch transformers accelerate datasets tokenizers wandb"
_GIB = 2**30


def check_trackers(run: RunArguments) -> None:
    """Meet what trackers may refuse, such as a wrong key, before the corpus is aligned."""
    with in_agreement():
        if is_main() and "wandb" in (run.report_to or ()):
            offline_reason()


def describe_tracking(job: Job, pair: Pair, documents: Documents) -> Tracking:
    """Place a run among others, as its options, the environment and its recipe say, in this order.

    The recipe's folder is the experiment. The config has the settings as in `run.json`, and beside
    them all that else a run is told apart by.
    """
    run, said, recipe = job.run, os.environ.get, _recipe_parts(job.recipe)
    models = _models(job, pair)
    tags = run.wandb_tags or [tag for tag in said("WANDB_TAGS", "").split(",") if tag]
    project = None if run.project == RunArguments.project else run.project
    return Tracking(
        project=run.wandb_project or project,
        group=run.wandb_group or said("WANDB_RUN_GROUP") or "/".join(recipe[:-1]) or None,
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
    all_sizes = (pair.student_sizes, *pair.teacher_sizes)
    loaded = zip((pair.student, *pair.teachers), all_sizes, strict=True)
    for number, (model, sizes) in enumerate(loaded):
        name = model.source.name
        found[f"teacher_{number}" if number > 1 else "teacher" if number else "student"] = {
            "name": name,
            "revision": revision_of(name, model.config),
            "parameters": sizes.parameters,
        }
    found["student"]["trained_parameters"] = pair.student_sizes.trained
    for number, path in enumerate(job.model.teacher_losses or (), 1):
        manifest = manifest_of(Path(path))
        found[f"teacher_{number}" if number > 1 else "teacher"] = {
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
    found = []
    with suppress(OSError, subprocess.SubprocessError):
        for command in ("rev-parse HEAD", "status --porcelain --untracked-files=no"):
            git = ["git", "-C", str(place), *command.split()]
            found.append(subprocess.run(git, capture_output=True, text=True, check=True).stdout)
    return found[0].strip() + "+" * bool(found[-1].strip()) if len(found) == 2 else None


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
