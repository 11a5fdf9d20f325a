"""What a run is made from: its options, and what identifies its models and documents."""

import hashlib
import inspect
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers.trainer_utils import SaveStrategy, SchedulerType

from vocagnolm.fields import options_of
from vocagnolm.method import Method, load_own
from vocagnolm.models.load import weight_sizes
from vocagnolm.packing import Blocks
from vocagnolm.store.format import manifest_of
from vocagnolm.texts import is_conversations
from vocagnolm.training.job import Job
from vocagnolm.training.models import Models
from vocagnolm.training.packed import Packed


def settings_of(job: Job) -> dict[str, Any]:
    """Return the settings that define a run. A checkpoint resumes only under the same settings.

    They do not include the number of processes, nor the batch size of each, unless tokens compete
    within it.
    """
    settings: dict[str, Any] = {}
    for options in (job.model, job.data, job.args):
        for declared in options_of(options):
            value = getattr(options, declared.name)
            if declared.role == "place":
                # A run that is started from another directory is the same run.
                value = _absolute(value)
            if declared.role != "words":
                settings[declared.name] = value
    settings |= _teacher_files(job) | _own_code(job.args.guidance)
    if job.model.teacher_losses:
        settings["teacher_losses"] = _stores(job.model.teacher_losses)
    if job.peft_config is not None:
        settings["use_peft"] = True
        settings["peft_config"] = _described(job.peft_config)
    # Such a method ranks or averages tokens within a micro-batch, so its size matters.
    if not job.args.guidance.splits_alike:
        settings["per_device_train_batch_size"] = job.args.per_device_train_batch_size
    return settings


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


def _teacher_files(job: Job) -> dict[str, list[dict[str, int]]]:
    """Tell local teachers apart by the sizes of their files, because a path may have other ones."""
    # In Python, a teacher may be a loaded model.
    names = [teacher for teacher in job.model.teacher or [] if isinstance(teacher, str)]
    sizes = [weight_sizes(name) for name in names]
    # A finished run does not need its teacher's files any more.
    return {"teacher_files": sizes} if any(sizes) else {}


def _own_code(method: Method) -> dict[str, list[str]]:
    """Return hashes of the code that a user wrote, which may be edited before a run resumes."""
    hashes = []
    for option in ("method", "aggregation"):
        name = getattr(method, option)
        if ":" in name:
            # The code of some objects, such as those of compiled modules, cannot be read.
            with suppress(OSError, TypeError):
                code = inspect.getsource(load_own(option, name))
                hashes.append(hashlib.sha256(code.encode()).hexdigest())
    return {"own_code_sha256": hashes} if hashes else {}


def _stores(paths: Sequence[str]) -> list[dict[str, str]]:
    """Identify stores by their paths and by their teachers."""
    stores = []
    for path in paths:
        teacher = manifest_of(Path(path))["teacher"]
        stores.append({"store": str(Path(path).resolve()), "teacher": teacher})
    return stores


def _absolute(place: Any) -> Any:
    """Return the absolute path of a local model or file, because a path has many spellings.

    A list gives a list, and None stays None.
    """
    if place is None:
        return None
    if isinstance(place, list | tuple):
        return [_absolute(item) for item in place]
    if not isinstance(place, str | Path):
        # A loaded model. One that was made in memory has no name.
        place = str(place.config.name_or_path)
    return str(Path(place).resolve()) if place and Path(place).exists() else str(place)


def _described(peft_config: Any) -> dict[str, Any]:
    """Return a PEFT config's description of the adapters, with sets in a stable order."""
    settings = {}
    for name, value in peft_config.to_dict().items():
        # The run's own settings name the model, and a newer PEFT may resume the run.
        if name in ("base_model_name_or_path", "revision", "inference_mode", "peft_version"):
            continue
        # The order of a set differs between Python processes, and JSON has no sets.
        settings[name] = sorted(value) if isinstance(value, set | frozenset) else value
    return settings
