"""Write the student of a checkpoint, whole, for `from_pretrained`.

    vocagnolm export runs/my-student/checkpoint-500
    vocagnolm export runs/my-adapters --merge --dtype bfloat16 --output_dir my-student

What FSDP has saved in shards is merged by one process, without a GPU. Exit status: 0 done, 2 a
wrong argument or file.
"""

import shutil
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import merge_fsdp_weights
from safetensors.torch import load_file
from transformers import GenerationConfig, PreTrainedModel

from vocagnolm.cli import Parser, say, shell
from vocagnolm.io import ASIDE, RUN_FILE, read_json
from vocagnolm.models.adapters import lora_config, merge_adapters, read_adapter_config
from vocagnolm.models.source import ModelSource, is_adapter
from vocagnolm.run.checkpoints import checkpoint_fault, is_finished, run_of
from vocagnolm.run.options import ModelOptions
from vocagnolm.texts.tokenizers import load_tokenizer

# Of a sharded checkpoint, as Accelerate names them.
_SHARDS, _MERGED = "pytorch_model_fsdp_0", "model.safetensors"
# Small, because safetensors holds a file twice while it is written.
_FILE_SIZE = "5GB"


@shell("vocagnolm export")
def main(argv: Sequence[str] | None = None) -> None:
    """Export one checkpoint."""
    parser = Parser("vocagnolm export", __doc__)
    add = parser.add_argument
    add("checkpoint", type=Path, help="A checkpoint of a run, or the directory of a finished run.")
    add("--output_dir", type=Path, help="Default: beside the checkpoint, export-500 for step 500.")
    add("--merge", action="store_true", help="Add adapters to the weights that they belong to.")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="Precision written.")
    add("--trust_remote_code", action="store_true", help="Run model code from the hub.")
    say(f"exported {export(**vars(parser.parse_args(argv)))}")


def export(
    checkpoint: Path,
    output_dir: Path | None = None,
    *,
    merge: bool = False,
    dtype: str = "float32",
    trust_remote_code: bool = False,
) -> Path:
    """Write the whole model of a checkpoint with its tokenizer, or nothing; return the directory.

    The checkpoint may be `checkpoint-N` of a run, from one process or from many, or the directory
    of a finished run. With `merge` adapters are added to the student's weights.

    Raises:
        ValueError: the checkpoint is damaged, or the options do not suit it.
    """
    checkpoint = checkpoint.resolve()
    if not is_finished(checkpoint) and (fault := checkpoint_fault(checkpoint)):
        raise ValueError(f"{checkpoint}: {fault}")
    settings = _settings(checkpoint)
    is_sharded = (checkpoint / _SHARDS).is_dir()
    is_adapted = is_adapter(checkpoint) or (is_sharded and settings["use_peft"])
    if is_adapted != merge:
        remedy = "add --merge for a whole model" if is_adapted else "leave --merge out"
        raise ValueError(f"{checkpoint} holds {'' if is_adapted else 'no '}adapters: {remedy}")
    target = output_dir or checkpoint.with_name(f"export-{checkpoint.name.split('-')[-1]}")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"--output_dir {target} is not empty: give another")
    trusted: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    student = ModelSource(settings["student"], "student", settings["student_revision"], **trusted)
    place, revision = settings["student_tokenizer"], None
    if (checkpoint / "tokenizer_config.json").exists():
        place = str(checkpoint)
    elif place is None:
        place, revision = student.name, student.revision
    tokenizer = load_tokenizer(place, "student", revision=revision, **trusted)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.{uuid.uuid4().hex}{ASIDE}")
    try:
        if is_sharded:
            merge_fsdp_weights(str(checkpoint / _SHARDS), str(aside))
        if is_adapted:
            model = _with_adapters(checkpoint, student, settings, aside)
        elif is_sharded:
            model = _of_shards(student, aside)
        else:
            model = ModelSource(str(checkpoint), "checkpoint", **trusted).load(torch.float32)
        # Training turned the cache off; generation needs it.
        model.config.use_cache = True
        model.to(getattr(torch, dtype))
        model.save_pretrained(aside, max_shard_size=_FILE_SIZE)
        tokenizer.save_pretrained(aside)
        # Replaces an empty directory, too.
        aside.rename(target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return target


def _settings(checkpoint: Path) -> dict[str, Any]:
    """Read the settings of the run that wrote a checkpoint, in it or beside it."""
    if found := run_of(checkpoint):
        return found
    for directory in (checkpoint, checkpoint.parent):
        if (directory / RUN_FILE).exists():
            return read_json(directory / RUN_FILE)
    raise ValueError(f"{checkpoint} has no {RUN_FILE} in it or beside it, as train.py writes it")


def _with_adapters(
    checkpoint: Path, student: ModelSource, settings: Mapping[str, Any], merged: Path
) -> PreTrainedModel:
    """Load the student that a run began with, and add its adapters."""
    model = student.load(torch.float32)
    if is_adapter(checkpoint):
        weights = load_file(checkpoint / "adapter_model.safetensors")
        return merge_adapters(model, read_adapter_config(checkpoint), weights)
    names = [each.name for each in fields(ModelOptions) if each.name in settings]
    options = ModelOptions(**{name: settings[name] for name in names})
    return merge_adapters(model, lora_config(model, options), load_file(merged / _MERGED))


def _of_shards(student: ModelSource, merged: Path) -> PreTrainedModel:
    """Make the student's model of merged weights."""
    model = student.skeleton(student.config())
    found = model.load_state_dict(load_file(merged / _MERGED), assign=True, strict=False)
    # A shared weight may have been saved once.
    model.tie_weights()
    absent = [name for name, weight in model.state_dict().items() if weight.is_meta]
    if wrong := absent or found.unexpected_keys:
        raise ValueError(
            f"this is no checkpoint of {student.name}: {len(wrong)} weights are missing or too "
            f"many, such as {wrong[0]}"
        )
    # The student may have none.
    with suppress(OSError):
        revision = student.revision or "main"
        model.generation_config = GenerationConfig.from_pretrained(student.name, revision=revision)
    return model
