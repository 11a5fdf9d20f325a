"""Write the student of a checkpoint whole, for `from_pretrained`.

What FSDP has saved in pieces is put together by one process, without a GPU.
"""

import shutil
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from vocagnolm.cli import note
from vocagnolm.io import ASIDE, MANIFEST_FILE, RUN_FILE, read_json, sizes, write_json
from vocagnolm.models.adapters import (
    lora_config,
    merge_adapters,
    read_adapter_config,
)
from vocagnolm.models.source import ModelSource, is_adapter, revision_of
from vocagnolm.run import checkpoints, relayout
from vocagnolm.run.options import ModelOptions
from vocagnolm.texts.tokenizers import load_tokenizer

# Small, because safetensors holds a file twice while it is written.
_SHARD_SIZE = "5GB"


@dataclass(frozen=True)
class Exported:
    """An exported model; `revision` is "sha256:..." over its files, as evaluations record it."""

    directory: Path
    parameters: int
    dtype: str
    revision: str


def export(
    checkpoint: Path,
    output_dir: Path | None = None,
    *,
    merge: bool = False,
    dtype: Literal["float32", "bfloat16"] = "float32",
    trust_remote_code: bool = False,
) -> Exported:
    """Write the whole model of a checkpoint, with its configuration and tokenizer, or nothing.

    The checkpoint may be `checkpoint-N` of a run, from one process or from many, or the directory
    of a finished run. Lacking parts come from the student that `run.json` names. With `merge`
    adapters are added to the student's weights; nothing else can be done with them.

    Raises:
        ValueError: the checkpoint is damaged, or the options do not suit it.
    """
    checkpoint = checkpoint.resolve()
    step = checkpoint.name.removeprefix("checkpoint-")
    target = output_dir or checkpoint.with_name(f"export-{step}")
    source = _Source(checkpoint, trust_remote_code)
    source.check(merge)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"--output_dir {target} is not empty: give another")
    tokenizer = source.tokenizer()
    note(f"reading {checkpoint}")
    # One weight is converted after the other, so that the model is in memory once.
    model: Any = source.model()
    model.to({"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype])
    # Training turned the cache off; generation needs it.
    model.config.use_cache = True
    note(f"writing {target}")
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.{uuid.uuid4().hex}{ASIDE}")
    try:
        try:
            model.save_pretrained(aside, max_shard_size=_SHARD_SIZE)
        except SafetensorError as error:
            raise OSError(f"{target} cannot be written: {error}") from error
        tokenizer.save_pretrained(aside)
        about = {"exported_from": str(checkpoint), "dtype": dtype, "files": sizes(aside)}
        write_json(aside / MANIFEST_FILE, about)
        # Replaces an empty directory, too.
        aside.rename(target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return Exported(target, model.num_parameters(), dtype, revision_of(str(target), None))


@dataclass(frozen=True)
class _Source:
    """A checkpoint, and the student that its run names."""

    checkpoint: Path
    trust_remote_code: bool

    def check(self, merge: bool) -> None:
        """Reject a damaged checkpoint, and `merge` for anything but adapters."""
        if fault := checkpoints.checkpoint_fault(self.checkpoint):
            raise ValueError(f"{self.checkpoint}: {fault}")
        if self.is_adapted and not merge:
            raise ValueError(
                f"{self.checkpoint} holds adapters, which PEFT loads as they are: add --merge for "
                "a whole model"
            )
        if merge and not self.is_adapted:
            raise ValueError(f"--merge has no effect: {self.checkpoint} holds no adapters")

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """Settings of the run; empty if it has written none."""
        if found := checkpoints.run_of(self.checkpoint):
            return found
        for directory in (self.checkpoint, self.checkpoint.parent):
            if (path := directory / RUN_FILE).exists():
                return read_json(path)
        return {}

    @property
    def is_sharded(self) -> bool:
        """True if FSDP has saved the weights in pieces."""
        return relayout.is_sharded(self.checkpoint)

    @property
    def is_adapted(self) -> bool:
        """True if it holds adapters instead of a model."""
        sharded_adapters = self.is_sharded and self.settings.get("use_peft", False)
        return bool(is_adapter(self.checkpoint) or sharded_adapters)

    @cached_property
    def student(self) -> ModelSource:
        """Student that the run began with."""
        name, revision = self.settings.get("student"), self.settings.get("student_revision")
        if not self.settings and is_adapter(self.checkpoint):
            adapters = read_adapter_config(self.checkpoint)
            name, revision = adapters.base_model_name_or_path, adapters.revision
        if not name:
            raise ValueError(
                f"{self.checkpoint} does not say which student it is of: expected "
                f"{RUN_FILE} in it or beside it, as train.py writes it"
            )
        trust = self.trust_remote_code
        return ModelSource(name, "student", revision, trust_remote_code=trust)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the checkpoint's own tokenizer, or the one that the run has used."""
        trust, revision = self.trust_remote_code, None
        has_own = (self.checkpoint / "tokenizer_config.json").exists()
        place = str(self.checkpoint) if has_own else self.settings.get("student_tokenizer")
        if not place:
            place, revision = self.student.name, self.student.revision
        return load_tokenizer(place, "student", revision=revision, trust_remote_code=trust)

    def model(self) -> PreTrainedModel:
        """Load the trained model in float32."""
        if self.is_adapted:
            model = self.student.load(torch.float32)
            if is_adapter(self.checkpoint):
                config = read_adapter_config(self.checkpoint)
            else:
                names = [each.name for each in fields(ModelOptions) if "lora" in each.name]
                options = ModelOptions(**{name: self.settings[name] for name in names})
                config = lora_config(model, options)
            return merge_adapters(model, config, self._weights())
        if self.is_sharded:
            return self._put_together()
        trust = self.trust_remote_code
        whole = ModelSource(str(self.checkpoint), "checkpoint", trust_remote_code=trust)
        return whole.load(torch.float32)

    def _weights(self) -> dict[str, Tensor]:
        if self.is_sharded:
            return relayout.read_sharded(self.checkpoint, relayout.MODEL)
        return load_file(self.checkpoint / "adapter_model.safetensors")

    def _put_together(self) -> PreTrainedModel:
        model = self.student.skeleton(self.student.config())
        found = model.load_state_dict(self._weights(), assign=True, strict=False)
        # A shared weight may have been saved once.
        model.tie_weights()
        absent = [name for name, weight in model.state_dict().items() if weight.is_meta]
        if wrong := absent or found.unexpected_keys:
            raise ValueError(
                f"{self.checkpoint} is no checkpoint of {self.student.name}: {len(wrong)} weights "
                f"are missing or too many, such as {wrong[0]}"
            )
        # The student may have none.
        with suppress(OSError):
            revision = self.student.revision or "main"
            generation = GenerationConfig.from_pretrained(self.student.name, revision=revision)
            model.generation_config = generation
        return model
