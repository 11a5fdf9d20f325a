"""Where a model comes from (configuration, weights and tokenizer), and how it is loaded."""

import hashlib
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TorchAoConfig,
)

from vocagnolm.fields import OptionError, json_settings
from vocagnolm.shell.hub import check_name, split_name
from vocagnolm.shell.io import file_sha256, read_json
from vocagnolm.tokenizer import Role, check_tokenizer, load_tokenizer

# The context of a model whose configuration names none.
NO_LIMIT = sys.maxsize
# PEFT writes this file into every directory of adapters.
ADAPTER_CONFIG = "adapter_config.json"
# A hash of weights reads so many parts of a file, of so many bytes.
_PARTS, _PART_BYTES = 16, 1 << 16
# Patterns for the files of weights, and for all files of a model and its tokenizer. They are
# matched in one directory, without its subdirectories.
_WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin", "adapter_model.bin")
_MODEL_FILES = (
    "config.json",
    "generation_config.json",
    ADAPTER_CONFIG,
    "*.py",
    "*.safetensors",
    "pytorch_model*.bin",
    "adapter_model.bin",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
)


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from, and the options for loading it."""

    name: str
    # The argument that names the model in messages.
    role: Role | Literal["model", "checkpoint"]
    revision: str | None = None
    attn_implementation: str | None = None
    trust_remote_code: bool = False
    # More arguments of from_pretrained.
    init_kwargs: Mapping[str, Any] = field(default_factory=dict)
    # The model itself, if it is already loaded.
    loaded: PreTrainedModel | None = None

    @property
    def _named(self) -> str:
        return f"{'' if self.role == 'checkpoint' else '--'}{self.role} {self.name}"

    def config(self) -> PreTrainedConfig:
        """Read only its configuration."""
        check_name(self.role, self.name)
        if self.loaded is not None:
            return self.loaded.config
        if is_adapter(self.name):
            # transformers follows adapters to their model only when it loads weights.
            if self.role != "model":
                raise OptionError(self.role, f"{self.name} has adapters: `vocagnolm export` first")
            adapters = read_json(Path(self.name) / ADAPTER_CONFIG)
            name, revision = adapters["base_model_name_or_path"], adapters.get("revision")
            return replace(self, name=name, revision=revision).config()
        options = {"attn_implementation": self.attn_implementation}
        config: PreTrainedConfig = self._from_pretrained(AutoConfig, **options)
        return config

    def tokenizer(self, config: PreTrainedConfig) -> PreTrainedTokenizerBase:
        """Load its tokenizer, slow or fast, and test that it reads text and fits the model."""
        loaded: PreTrainedTokenizerBase = self._from_pretrained(AutoTokenizer)
        # If files are missing, transformers silently makes an empty tokenizer.
        ids = loaded.encode("1 + 1 = 2", add_special_tokens=False)
        if all(token_id == loaded.unk_token_id for token_id in ids):
            raise ValueError(
                f"{self._named} has a tokenizer that knows no token of a text: copy all files of "
                "the tokenizer, such as tokenizer.json"
            )
        _check_ids(loaded, config, f"{self._named}: its tokenizer", "model")
        return loaded

    def load(
        self,
        dtype: torch.dtype,
        quantization: dict[str, object] | None = None,
        device: torch.device | None = None,
    ) -> PreTrainedModel:
        """Load its weights on a device: in `dtype`, or quantized by a config of transformers.

        The student is always loaded in float32, whatever its checkpoint says, because bfloat16
        weights lose AdamW's small updates.

        Raises:
            ValueError: weights are missing or damaged.
        """
        if self.loaded is not None:
            return self.loaded
        options: dict[str, object] = {
            "dtype": dtype,
            "attn_implementation": self.attn_implementation,
            # transformers goes on where shapes differ, so that the error below can name all.
            "ignore_mismatched_sizes": True,
            "output_loading_info": True,
        }
        is_gguf = split_name(self.name)[1] is not None
        if quantization:
            # Quantized weights cannot be moved once they are loaded.
            options |= {"quantization_config": quantization, "device_map": {"": device}}
        elif is_gguf and hasattr(transformers, "GgufConfig"):
            # Make an ordinary model, which can be trained and saved. This transformers would keep
            # the weights in their blocks if it can. Older ones never do.
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
        model: PreTrainedModel
        model, report = self._from_pretrained(AutoModelForCausalLM, **options)
        if is_gguf:
            # transformers keeps the directory only, but adapters must name their model.
            model.name_or_path = self.name
        # transformers fills missing weights with random numbers and only warns.
        keys = set(report["missing_keys"])
        # The entry of a mismatch begins with the name of the weight, followed by its shapes.
        keys |= {mismatch[0] for mismatch in report["mismatched_keys"]}
        if keys:
            raise ValueError(
                f"{self._named}: {len(keys)} weights, such as {min(keys)}, are not in the "
                "checkpoint, or have another shape there, and would be random: use the complete "
                "checkpoint"
            )
        return model

    def checked_tokenizer(
        self,
        config: PreTrainedConfig,
        role: Role,
        elsewhere: str | PreTrainedTokenizerBase | None = None,
    ) -> PreTrainedTokenizerBase:
        """Load the tokenizer that goes with the model, or one from elsewhere, and test it."""
        if isinstance(elsewhere, PreTrainedTokenizerBase):
            check_tokenizer(elsewhere, role)
            tokenizer = elsewhere
        else:
            tokenizer = load_tokenizer(
                elsewhere or self.name,
                role,
                # A revision belongs to the model, and means nothing in another repository.
                revision=None if elsewhere else self.revision,
                trust_remote_code=self.trust_remote_code,
            )
        _check_ids(tokenizer, config, f"{role} tokenizer {tokenizer.name_or_path}", role)
        return tokenizer

    def skeleton(self, config: PreTrainedConfig) -> PreTrainedModel:
        """Make a model on the meta device from its configuration: shapes without weights."""
        if self.loaded is not None:
            return self.loaded
        with torch.device("meta"):
            model: PreTrainedModel = self._call(AutoModelForCausalLM.from_config, config)
        return model

    def _from_pretrained(self, kind: Any, **options: object) -> Any:
        # The user's own arguments come last. The options reject arguments that contradict them.
        options["revision"] = self.revision or "main"
        place, gguf_file = split_name(self.name)
        if gguf_file:
            options["gguf_file"] = gguf_file
        options |= self.init_kwargs
        return self._call(kind.from_pretrained, place, **options)

    def _call(self, function: Callable[..., Any], *args: object, **options: object) -> Any:
        """Name the model in transformers' errors, and keep one of their many lines."""
        try:
            return function(*args, trust_remote_code=self.trust_remote_code, **options)
        # Files may be damaged in any way, and the user's arguments may be wrong in any way.
        except Exception as error:
            why = str(error).strip().partition("\n")[0]
            raise ValueError(f"{self._named} cannot be loaded: {why}") from error


# -- Precision and quantization ------------------------------------------------------------------


# PyTorch's kernels for processors without AVX-512. Its variable ATEN_CPU_CAPABILITY can ask for
# them on any processor.
_NARROW_KERNELS = ("NO AVX", "DEFAULT", "AVX2")
# These processors emulate bfloat16 products, at a fraction of float32's speed.
_NO_PRODUCTS = "the processor has no products in bfloat16"


def choose_dtype(choice: str, device: torch.device, begun: str | None = None) -> tuple[str, str]:
    """Return the dtype that models compute in, and a short reason.

    `auto` means the dtype in which the same work has `begun` earlier, or else bfloat16 if the
    device multiplies in it. Any other choice is returned as it is.
    """
    dtype, why, is_slow = "bfloat16", "the default on a GPU", False
    if device.type == "cpu":
        is_narrow = torch.backends.cpu.get_cpu_capability() in _NARROW_KERNELS
        if not is_narrow and torch.cpu._is_amx_tile_supported():
            why = "the processor multiplies in it, with AMX"
        elif not is_narrow and torch.cpu._is_avx512_bf16_supported():
            why = "the processor multiplies in it, with AVX512_BF16"
        else:
            dtype, why, is_slow = "float32", _NO_PRODUCTS, True
    if choice != "auto":
        dtype, why = choice, "as asked for"
    elif begun not in (None, dtype):
        dtype, why = str(begun), "as it began"
    if dtype == "bfloat16" and is_slow:
        why += f", and slow: {_NO_PRODUCTS}"
    return dtype, why


# Each name of a quantization, with the package that computes it.
QUANTIZATIONS = {"fp8": "torchao", "nf4": "bitsandbytes", "int8": "bitsandbytes"}


def quantization(text: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, object]:
    """Return the quantization config for an option. Everything else is in `dtype`.

    The option is a config as JSON, or a name. `fp8`: weights and activations, scaled by row. `nf4`:
    4-bit weights in blocks of 64. `int8`: LLM.int8(), weights and activations except outliers.
    """
    if text not in QUANTIZATIONS:
        if not text.startswith("{"):
            names = ", ".join(QUANTIZATIONS)
            raise OptionError(
                "teacher_quantization", f"must be {names} or a config as JSON, got {text}"
            )
        return json_settings("teacher_quantization", text)
    # transformers decides which layers are not quantized. The head is one of them.
    if text == "int8":
        return {"quant_method": "bitsandbytes", "load_in_8bit": True}
    if text == "nf4":
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_compute_dtype": str(dtype).removeprefix("torch."),
        }
    content: dict[str, object] = TorchAoConfig(fp8_products()).to_dict()  # type: ignore[no-untyped-call]
    return content


def fp8_products() -> object:
    """Make the torchao config for `fp8`, which needs a GPU such as the H100 or L4."""
    # Import the package by name, because it is optional and has no types.
    torchao = importlib.import_module("torchao.quantization")
    config: object = torchao.Float8DynamicActivationFloat8WeightConfig(granularity=torchao.PerRow())
    return config


# -- Files and facts of a model ------------------------------------------------------------------


def _check_ids(
    tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, name: str, role: str
) -> None:
    """Reject a tokenizer with ids for which the model has no embeddings."""
    # Having more rows than ids is common, because vocabularies are padded. So is a padding token
    # without an embedding, which no text has.
    used = set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids)
    rows, largest = config.get_text_config().vocab_size, max(used)
    if largest >= rows:
        raise ValueError(
            f"{name} has ids up to {largest}, but the {role} has embeddings for {rows}: if tokens "
            "were added to it, call model.resize_token_embeddings(len(tokenizer)) and save the "
            "model; else use the model's own tokenizer"
        )


def is_adapter(name: str | Path) -> bool:
    """Test whether a directory has adapters in PEFT's format, and no whole model."""
    directory = Path(name)
    return (directory / ADAPTER_CONFIG).exists() and not (directory / "config.json").exists()


def revision_of(model: str, config: PreTrainedConfig | None) -> str:
    """Identify a version of the model: "sha256:..." over the files of a directory.

    For adapters, it also covers their base model, whose configuration is `config`. For a hub name,
    it is the commit from which that was loaded, or "unknown" if transformers does not say.
    """
    directory = Path(model)
    if directory.is_file():
        return f"sha256:{file_sha256(directory)}"
    if not directory.is_dir():
        return str((vars(config) if config else {}).get("_commit_hash") or "unknown")
    digest = hashlib.sha256()
    for name in model_files(directory):
        digest.update(f"{name} {file_sha256(directory / name)}\n".encode())
    if is_adapter(directory):
        base = read_json(directory / ADAPTER_CONFIG)["base_model_name_or_path"]
        digest.update(revision_of(base, config).encode())
    return f"sha256:{digest.hexdigest()}"


def weight_hashes(model: str) -> dict[str, str]:
    """Return a hash for each file of weights of a local model, by name; {} for a hub name.

    A model has gigabytes, so the hash is of a file's size and of parts from its beginning to its
    end. A training changes most of them.
    """
    path = Path(model).expanduser()
    files = [path / name for name in model_files(path, _WEIGHT_FILES)]
    hashes = {}
    for file in [path] if path.is_file() else files:
        size = file.stat().st_size
        digest = hashlib.sha256(str(size).encode())
        with file.open("rb") as content:
            for number in range(_PARTS):
                content.seek(max(0, size - _PART_BYTES) * number // (_PARTS - 1))
                digest.update(content.read(_PART_BYTES))
        hashes[file.name] = digest.hexdigest()
    return hashes


def model_files(directory: Path, patterns: Sequence[str] = _MODEL_FILES) -> list[str]:
    """List the files of a model and its tokenizer. A run's directory has many others."""
    names = set()
    for pattern in patterns:
        names |= {path.name for path in directory.glob(pattern) if path.is_file()}
    return sorted(names)


def context_length(config: PreTrainedConfig) -> int:
    """Return the most tokens that a model was made for, or `NO_LIMIT` if it does not say.

    A "longrope" model rotates differently beyond the length that it was first trained with, and for
    a whole batch if any row is longer. So its context ends there.
    """
    text_config = config.get_text_config()
    # Recurrent models have none.
    length = getattr(text_config, "max_position_embeddings", None) or NO_LIMIT
    rope = vars(text_config).get("rope_parameters") or {}
    if rope.get("rope_type") == "longrope":
        length = min(length, rope.get("original_max_position_embeddings", length))
    return int(length)
