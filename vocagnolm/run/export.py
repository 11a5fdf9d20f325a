"""Turn a checkpoint into a model that `from_pretrained` loads.

    vocagnolm export runs/my-student/checkpoint-500
    vocagnolm export runs/my-adapters --dtype bfloat16 --output_dir my-student

It joins FSDP's shards and merges adapters, in one process and without a GPU. Exit status: 0 done, 2
a wrong argument or file.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from accelerate.utils import merge_fsdp_weights
from safetensors.torch import load_file, load_model
from transformers import PreTrainedModel

from vocagnolm.cli import Parser, shell
from vocagnolm.fields import OptionError
from vocagnolm.models.adapters import lora_config, merge_adapters, read_adapters
from vocagnolm.models.load import (
    ADAPTER_CONFIG,
    ModelSource,
    is_adapter,
    model_files,
    weight_hashes,
)
from vocagnolm.shell.io import (
    MANIFEST_FILE,
    RUN_FILE,
    JsonObject,
    json_or_empty,
    print_main,
    read_json,
    share_weights,
)
from vocagnolm.tokenizer import load_tokenizer
from vocagnolm.training.run_directory import checkpoint_fault, newest_checkpoint

# Accelerate makes this directory in a checkpoint that FSDP has sharded.
_SHARDS = "pytorch_model_fsdp_0"


@shell("vocagnolm export")
def main(argv: Sequence[str] | None = None) -> None:
    """Export one checkpoint."""
    parser = Parser("vocagnolm export", __doc__)
    add = parser.add_argument
    add("checkpoint", type=Path, help="A checkpoint, or the directory of a finished run.")
    add(
        "--output_dir", type=Path, help="Default: export-500, for step 500, next to the checkpoint."
    )
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="Precision of the weights.",
    )
    add("--trust_remote_code", action="store_true", help="Allow the model to run its own code.")
    print_main(f"exported {export(**vars(parser.parse_args(argv)))}")


def export(
    checkpoint: Path,
    output_dir: Path | None = None,
    *,
    dtype: str = "float32",
    trust_remote_code: bool = False,
) -> Path:
    """Write the whole model of a checkpoint with its tokenizer, or nothing. Returns the directory.

    The checkpoint may be `checkpoint-N` of a run, from one or many processes, the directory of a
    finished run, or one that `save_model` wrote.

    Raises:
        ValueError: the checkpoint or its student is damaged, its adapters cannot be merged, or the
            options do not fit it.
    """
    # The export goes next to the checkpoint, and "." has no name. Do not resolve links.
    if not checkpoint.name.strip("."):
        checkpoint = Path(os.path.abspath(checkpoint))
    settings = _settings_of(checkpoint)
    is_sharded = (checkpoint / _SHARDS).is_dir()
    target = output_dir or checkpoint.with_name(f"export-{checkpoint.name.split('-')[-1]}")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise OptionError("output_dir", f"{target} is not empty: give another directory")
    student = _student_of(checkpoint, settings, trust_remote_code)
    tokenizer = _tokenizer_of(checkpoint, settings, student)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Write the model on the disk of its target, so that a rename can move it there at once. If the
    # command is killed, there is no half model under its name.
    with TemporaryDirectory(dir=target.parent, prefix=".export-") as scratch:
        if is_sharded or is_adapter(checkpoint):
            model = _trained(student, checkpoint, settings, Path(scratch))
        else:
            whole = ModelSource(str(checkpoint), "checkpoint", trust_remote_code=trust_remote_code)
            model = whole.load(torch.float32)
        # Training turned the cache off, but generation needs it.
        model.config.use_cache = True
        model.to(getattr(torch, dtype))
        model_directory = Path(scratch, "model")
        # Write small files, because safetensors holds a file twice in memory while writing it.
        model.save_pretrained(model_directory, max_shard_size="5GB")
        tokenizer.save_pretrained(model_directory)
        share_weights(model_directory)
        # The rename also replaces an empty directory, which the check above allows.
        model_directory.rename(target)
    return target


def _settings_of(checkpoint: Path) -> JsonObject:
    """Return the settings of a checkpoint's run if it is whole, or {} if no run wrote it."""
    manifest = json_or_empty(checkpoint / MANIFEST_FILE)
    # What `save_model` wrote in Python has no list of sizes to compare with.
    is_saved_model = not manifest and bool(model_files(checkpoint))
    fault = None if is_saved_model else checkpoint_fault(checkpoint)
    if fault:
        newest = newest_checkpoint(checkpoint)
        if newest:
            fault = f"it has no whole model: give a checkpoint, such as {newest}"
        raise ValueError(f"{checkpoint}: {fault}")
    # A checkpoint's settings are in its manifest, and a finished run's are next to the manifest.
    return manifest.get("run") or json_or_empty(checkpoint / RUN_FILE)


def _student_of(checkpoint: Path, settings: JsonObject, trust_remote_code: bool) -> ModelSource:
    """Return the model with which a run began."""
    adapter = read_json(checkpoint / ADAPTER_CONFIG) if is_adapter(checkpoint) else {}
    begun = settings.get("student_hashes")
    if begun and weight_hashes(settings["student"]) not in (begun, {}):
        raise ValueError(
            f"{settings['student']} has other weights than when {checkpoint} was trained: its "
            "adapters need the earlier ones"
        )
    # A run in Python may have got a model that no name leads to. Adapters name their model in their
    # own file.
    return ModelSource(
        settings.get("student") or adapter.get("base_model_name_or_path") or str(checkpoint),
        "student",
        settings.get("student_revision") or adapter.get("revision"),
        trust_remote_code=trust_remote_code,
        init_kwargs=settings.get("model_init_kwargs") or {},
    )


def _tokenizer_of(checkpoint: Path, settings: JsonObject, student: ModelSource) -> Any:
    """Load the tokenizer that was saved with a checkpoint, or else that of its run."""
    place, revision = settings.get("student_tokenizer"), None
    if (checkpoint / "tokenizer_config.json").exists():
        place = str(checkpoint)
    elif place is None:
        place, revision = student.name, student.revision
    trust = student.trust_remote_code
    return load_tokenizer(place, "student", revision=revision, trust_remote_code=trust)


def _trained(
    student: ModelSource, checkpoint: Path, settings: JsonObject, scratch: Path
) -> PreTrainedModel:
    """Load the student with which a run began, and put the trained weights or adapters into it."""
    # Load the student last, because it may take minutes.
    if is_adapter(checkpoint):
        config, weights = read_adapters(checkpoint)
        return merge_adapters(student.load(torch.float32), config, weights)
    # This works without the training's processes: it joins their shards on the CPU.
    merge_fsdp_weights(str(checkpoint / _SHARDS), str(scratch))
    joined = scratch / "model.safetensors"
    model = student.load(torch.float32)
    if settings.get("use_peft"):
        return merge_adapters(model, _adapter_config(model, settings), load_file(joined))
    # A weight that two layers share is not missing if it was saved under one of its names.
    missing, _ = load_model(model, joined, strict=False)
    if missing:
        raise ValueError(f"{checkpoint} lacks weights of {student.name}: {', '.join(missing)}")
    return model


def _adapter_config(model: PreTrainedModel, settings: JsonObject) -> Any:
    """Return the PEFT config of a run, which Python may have given in place of options."""
    if "peft_config" in settings:
        from peft import get_peft_config

        return get_peft_config(dict(settings["peft_config"]))
    return lora_config(
        model,
        r=settings["lora_r"],
        alpha=settings["lora_alpha"],
        dropout=settings["lora_dropout"],
        target_modules=settings["lora_target_modules"],
        modules_to_save=settings["lora_modules_to_save"],
    )
