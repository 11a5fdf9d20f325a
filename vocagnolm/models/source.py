"""Load models with their tokenizers, name their content, and refuse those that cannot work."""

import hashlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from vocagnolm.host.options import refuse_idle
from vocagnolm.io import file_sha256, json_or_empty
from vocagnolm.texts.tokenizers import Role, load_tokenizer

# Context of a model whose configuration names none.
NO_LIMIT = sys.maxsize
# Patterns of a model's files.
_CONFIG_FILES = ("config.json", "generation_config.json", "adapter_config.json", "*.py")
_WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin", "adapter_model.bin")
_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*")
_MODEL_FILES = _CONFIG_FILES + _WEIGHT_FILES + _TOKENIZER_FILES + ("merges.txt", "*.model")
# Raised by transformers, torch and safetensors where files are missing, damaged or others.
_UNREADABLE = (
    *(OSError, ValueError, LookupError, RuntimeError, ImportError, TypeError, AttributeError),
    *(EOFError, UnpicklingError, SafetensorError),
)
# Options of a source as `from_pretrained` takes them, if they are given.
_OPTIONS = ("revision", "attn_implementation", "trust_remote_code")


@dataclass(frozen=True)
class ModelSource:
    """Origin of a model, and the options to load it with."""

    name: str
    # The argument that names it.
    role: Role | Literal["model", "checkpoint"]
    revision: str | None = None
    attn_implementation: str | None = None
    trust_remote_code: bool = False

    @property
    def _option(self) -> str:
        return self.role if self.role == "checkpoint" else f"--{self.role}"

    def _options(self, *names: str) -> dict[str, str | bool]:
        """Return the options of these names that are given."""
        return {name: value for name in names if (value := vars(self)[name]) is not None}

    def config(self) -> PreTrainedConfig:
        """Read its configuration only, which must be that of a causal language model."""
        if is_adapter(self.name):
            raise ValueError(
                f"{self._option} {self.name} holds adapters, which need the model that they were "
                f"trained around: merge them with vocagnolm export {self.name} --merge"
            )
        if self.revision and Path(self.name).is_dir():
            name = "revision" if self.role == "model" else f"{self.role}_revision"
            refuse_idle({name}, {name}, f"on a directory, {self.name}")
        with self._readable_errors():
            options = self._options(*_OPTIONS)
            config: PreTrainedConfig = AutoConfig.from_pretrained(self.name, **options)
        # A class of its own comes with the checkpoint.
        is_remote = "AutoModelForCausalLM" in (vars(config).get("auto_map") or {})
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not is_remote:
            raise ValueError(
                f"{self._option} {self.name} is a {config.model_type} model, which is no causal "
                "language model: give one that predicts the next token"
            )
        return config

    def check_weights(self) -> None:
        """Reject a directory that lacks weights, without reading any."""
        directory = Path(self.name)
        if not directory.is_dir():
            return
        found = {path.name for pattern in _WEIGHT_FILES for path in directory.glob(pattern)}
        for name in sorted(found):
            if not os.access(directory / name, os.R_OK):
                raise ValueError(f"{self._option} {self.name}: {name} may not be read")
        needed: set[str] = set()
        for index in directory.glob("*.index.json"):
            needed |= set(json_or_empty(index).get("weight_map", {}).values())
        if not found or needed - found:
            lacks = min(needed - found, default="files of weights (*.safetensors)")
            raise ValueError(
                f"{self._option} {self.name} lacks {lacks}: give the complete checkpoint"
            )

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Load its tokenizer, slow or fast, untested."""
        with self._readable_errors("the tokenizer of "):
            loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                self.name, revision=self.revision, trust_remote_code=self.trust_remote_code
            )
        return loaded

    def load(
        self,
        dtype: torch.dtype,
        quantization: dict[str, object] | None = None,
        device: torch.device | None = None,
    ) -> PreTrainedModel:
        """Load its weights in `dtype`, or quantized, by a config of transformers, on a device.

        The student is always loaded in float32, whatever its checkpoint says: AdamW's small updates
        are lost on bfloat16 weights. Weights that the checkpoint lacks are a ValueError.
        """
        logging.getLogger("transformers.modeling_utils").addFilter(_is_no_load_report)
        options: dict[str, object] = {**self._options(*_OPTIONS), "dtype": dtype}
        # Quantized weights cannot be moved once they are loaded.
        if quantization:
            options |= {"quantization_config": quantization, "device_map": {"": device}}
        # Sizes that differ are rejected below, by name.
        options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
        with self._readable_errors():
            loaded: Any = AutoModelForCausalLM.from_pretrained(self.name, **options)
        model: PreTrainedModel
        model, report = loaded
        absent = sorted({*report["missing_keys"], *(key[0] for key in report["mismatched_keys"])})
        if absent:
            shown = ", ".join(absent[:3]) + (", ..." if len(absent) > 3 else "")
            raise ValueError(
                f"{self._option} {self.name}: {len(absent)} weights of {type(model).__name__} are "
                f"not in the checkpoint, or have another shape there ({shown}): they would be "
                "random; use the complete checkpoint"
            )
        return model

    def checked_tokenizer(
        self, config: PreTrainedConfig, role: Role, elsewhere: str | None = None
    ) -> PreTrainedTokenizerBase:
        """Load the tokenizer that goes with it, or one from elsewhere, fast and tested."""
        tokenizer = load_tokenizer(
            elsewhere or self.name,
            role,
            revision=None if elsewhere else self.revision,
            trust_remote_code=self.trust_remote_code,
        )
        check_vocabulary(config, tokenizer, role)
        return tokenizer

    def skeleton(self, config: PreTrainedConfig) -> PreTrainedModel:
        """Make the model that `load` will give on the meta device: shapes without weights."""
        # `from_config` takes no revision.
        options = self._options("attn_implementation", "trust_remote_code")
        make: Callable[..., PreTrainedModel] = AutoModelForCausalLM.from_config
        with self._readable_errors(), torch.device("meta"):
            return make(config, **options)

    @contextmanager
    def _readable_errors(self, part: str = "") -> Iterator[None]:
        """Turn the errors of transformers into one line with the option that names the model."""
        try:
            yield
        except _UNREADABLE as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            why = lines[0] if lines else type(error).__name__
            if isinstance(error, UnpicklingError):
                why = "a pickle of more than tensors is never run: get its weights as safetensors"
            elif isinstance(error, OSError) and not Path(self.name).exists():
                if self.name.startswith(("/", ".", "~")) or self.name.count("/") > 1:
                    raise ValueError(f"{self._option} {self.name}: no such directory") from error
                why = f"there is no such directory, and as a name on the hub: {why}"
            raise ValueError(f"{part}{self._option} {self.name} cannot be loaded: {why}") from error


def is_adapter(name: str | Path) -> bool:
    """Test whether a directory holds adapters in PEFT's format, and no whole model."""
    directory = Path(name)
    return (directory / "adapter_config.json").exists() and not (directory / "config.json").exists()


def revision_of(model: str, config: PreTrainedConfig | None) -> str:
    """Name what changes when a model does: "sha256:..." over the files of a directory.

    For a name on the hub it is the commit that its configuration was loaded from, "unknown" where
    transformers does not say it.
    """
    directory = Path(model)
    if not directory.is_dir():
        return str((vars(config) if config else {}).get("_commit_hash") or "unknown")
    digest = hashlib.sha256()
    for name in model_files(directory):
        digest.update(f"{name} {file_sha256(directory / name)}\n".encode())
    return f"sha256:{digest.hexdigest()}"


def model_files(directory: Path) -> list[str]:
    """List the files of a model and its tokenizer; a directory of a run holds much else."""
    found = {path for pattern in _MODEL_FILES for path in directory.glob(pattern)}
    return sorted(path.name for path in found if path.is_file())


def _is_no_load_report(record: logging.LogRecord) -> bool:
    """Keep out the table of missing weights, which `load` says in one line."""
    return "LOAD REPORT" not in record.getMessage()


def context_length(config: PreTrainedConfig) -> int:
    """Return the most tokens a model was made for, `NO_LIMIT` where its configuration names none.

    A "longrope" model rotates differently past the length it was first trained with, and does so
    for a whole batch as soon as one of its rows is longer: its context ends there.
    """
    text_config = config.get_text_config()
    try:
        length = text_config.max_position_embeddings or NO_LIMIT
    # Recurrent models have none.
    except AttributeError:
        length = NO_LIMIT
    rope = vars(text_config).get("rope_parameters") or {}
    if rope.get("rope_type") == "longrope":
        length = min(length, rope.get("original_max_position_embeddings", length))
    return int(length)


def tensor_parallel_size(config: PreTrainedConfig, gpus: int) -> int:
    """Return over how many of the GPUs, evenly used, vLLM can spread a model's attention heads.

    A head is on one GPU. Groups of keys are spread likewise, or repeated where GPUs are more.
    """
    text_config = config.get_text_config()
    heads = getattr(text_config, "num_attention_heads", None) or 1
    groups = getattr(text_config, "num_key_value_heads", None) or heads
    for size in range(gpus, 1, -1):
        if gpus % size == heads % size == 0 and 0 in (groups % size, size % groups):
            return size
    return 1


def check_vocabulary(
    config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, role: Role
) -> None:
    """Reject a tokenizer whose ids the model has no embedding for.

    More rows than ids is common (vocabularies are padded); fewer means another model's tokenizer.
    """
    rows, largest = config.get_text_config().vocab_size, max(tokenizer.get_vocab().values())
    if largest >= rows:
        raise ValueError(
            f"{role} tokenizer {tokenizer.name_or_path} has ids up to {largest}, but the {role} "
            f"has embeddings for {rows}: it belongs to another model; give the right one with "
            f"--{role}_tokenizer"
        )


def check_distinct(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    student_tokenizer: PreTrainedTokenizerBase,
    teacher_tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Reject one set of weights under two tokenizers: at least one of them would read nonsense."""
    if student_tokenizer.get_vocab() == teacher_tokenizer.get_vocab():
        return
    ours, theirs = (model.get_input_embeddings().weight.data for model in (student, teacher))
    assert isinstance(ours, torch.Tensor)
    assert isinstance(theirs, torch.Tensor)
    # The teacher may have been loaded in a narrower dtype.
    if ours.shape == theirs.shape and torch.equal(ours.to(theirs.device, theirs.dtype), theirs):
        raise ValueError(
            f"the student {student.name_or_path} and the teacher {teacher.name_or_path} are the "
            "same model, but their tokenizers differ: ids would mean other tokens to one; give "
            "both the model's own tokenizer (--student_tokenizer, --teacher_tokenizer)"
        )
