"""Load models with their tokenizers, and name their content."""

import hashlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from vocagnolm.io import file_sha256, json_or_empty
from vocagnolm.texts.tokenizers import Role, load_tokenizer

# Context of a model whose configuration names none.
NO_LIMIT = sys.maxsize
# Patterns of a model's files.
_WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin", "adapter_model.bin")
_MODEL_FILES = (
    *("config.json", "generation_config.json", "adapter_config.json", "*.py", *_WEIGHT_FILES),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    "*.model",
)


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
    def _shown(self) -> str:
        return f"{'' if self.role == 'checkpoint' else '--'}{self.role} {self.name}"

    @property
    def _options(self) -> dict[str, Any]:
        """The options of `from_pretrained`; None would not be its default."""
        names = ("revision", "attn_implementation", "trust_remote_code")
        return {name: value for name in names if (value := vars(self)[name]) is not None}

    def config(self) -> PreTrainedConfig:
        """Read its configuration only."""
        if is_adapter(self.name):
            raise ValueError(
                f"{self._shown} holds adapters: merge them with their model by vocagnolm export "
                f"{self.name} --merge"
            )
        with self._named_errors():
            found: PreTrainedConfig = AutoConfig.from_pretrained(self.name, **self._options)
        return found

    def check_weights(self) -> None:
        """Reject a directory that lacks weights, without reading any."""
        directory = Path(self.name)
        if not directory.is_dir():
            return
        found = {path.name for pattern in _WEIGHT_FILES for path in directory.glob(pattern)}
        needed: set[str] = set()
        for index in directory.glob("*.index.json"):
            needed |= set(json_or_empty(index).get("weight_map", {}).values())
        if not found or needed - found:
            lacks = min(needed - found, default="files of weights (*.safetensors)")
            raise ValueError(f"{self._shown} lacks {lacks}: give the complete checkpoint")

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Load its tokenizer, slow or fast, untested."""
        with self._named_errors():
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
        options: dict[str, object] = {**self._options, "dtype": dtype}
        # Quantized weights cannot be moved once they are loaded.
        if quantization:
            options |= {"quantization_config": quantization, "device_map": {"": device}}
        # Sizes that differ are rejected below, by name.
        options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
        with self._named_errors():
            loaded: Any = AutoModelForCausalLM.from_pretrained(self.name, **options)
        model: PreTrainedModel
        model, report = loaded
        absent = sorted({*report["missing_keys"], *(key[0] for key in report["mismatched_keys"])})
        if absent:
            shown = ", ".join(absent[:3]) + (", ..." if len(absent) > 3 else "")
            raise ValueError(
                f"{self._shown}: {len(absent)} weights are not in the checkpoint, or have another "
                f"shape there, and would be random ({shown}): use the complete checkpoint"
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
        options = {name: self._options[name] for name in self._options if name != "revision"}
        with self._named_errors(), torch.device("meta"):
            make: Callable[..., PreTrainedModel] = AutoModelForCausalLM.from_config
            return make(config, **options)

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Name the model in the errors of transformers, which are long."""
        try:
            yield
        except (OSError, ValueError, ImportError, RuntimeError) as error:
            why = str(error).strip().partition("\n")[0]
            raise ValueError(f"{self._shown} cannot be loaded: {why}") from error


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


def context_length(config: PreTrainedConfig) -> int:
    """Return the most tokens a model was made for, `NO_LIMIT` where its configuration names none.

    A "longrope" model rotates differently past the length it was first trained with, and does so
    for a whole batch as soon as one of its rows is longer: its context ends there.
    """
    text_config = config.get_text_config()
    # Recurrent models have none.
    length = getattr(text_config, "max_position_embeddings", None) or NO_LIMIT
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
            f"has embeddings for {rows}: give the right one with --{role}_tokenizer"
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
            f"{student.name_or_path} and {teacher.name_or_path} are the same model, but their "
            "tokenizers differ: give both the model's own (--student_tokenizer, "
            "--teacher_tokenizer)"
        )
