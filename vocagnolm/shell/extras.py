"""Knows which extra installs each optional package, and which transformers were tested.

It does not import torch, which takes seconds, so a command can say at once what is missing.
"""

from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec

# The newest version that passed all tests. Minor releases have renamed what this package uses.
NEWEST_TRANSFORMERS = "5.24"
# The extra that installs each optional package, by import name.
EXTRAS = {
    "bitsandbytes": "quantization",
    "flash_attn": "flash",
    "gguf": "gguf",
    "google.protobuf": "tokenizers",
    "liger_kernel": "liger",
    "peft": "peft",
    "sentencepiece": "tokenizers",
    "tensorboard": "tensorboard",
    "tiktoken": "tokenizers",
    "torchao": "quantization",
    "trackio": "trackio",
    "vllm": "vllm",
    "wandb": "wandb",
}
# Extras that transformers may need to load a model or a tokenizer.
_OF_LOADING = ("flash", "gguf", "peft", "quantization", "tokenizers")


def is_installed(package: str) -> bool:
    """Test whether a package can be imported, without importing it."""
    try:
        spec = find_spec(package)
    except ImportError:
        return False
    # A directory without Python files is a namespace package, such as the `wandb` that offline runs
    # leave in the working directory. It has a spec, but no origin.
    return spec is not None and spec.origin is not None


def require(package: str, wanted_by: str) -> None:
    """Raise a ValueError that says what to install if an optional package is missing."""
    if not is_installed(package):
        extra = EXTRAS.get(package)
        requirement = f'"vocagnolm[{extra}]"' if extra else package
        raise ValueError(
            f"{wanted_by} needs {package}, which is not installed: pip install {requirement}"
        )


def advice(error: BaseException) -> str:
    """Return what to install if loading failed because a package is missing, or ""."""
    text = str(error).lower()
    # A path may contain the name of a package, too.
    if not isinstance(error, ImportError) and "install" not in text:
        return ""
    for package, extra in EXTRAS.items():
        # Errors name the last part of a dotted name: "protobuf" for google.protobuf.
        is_named = extra in _OF_LOADING and package.rpartition(".")[2] in text
        if is_named and not is_installed(package):
            return f': pip install "vocagnolm[{extra}]"'
    return ""


def require_quantization(settings: Mapping[str, object], wanted_by: str) -> None:
    """Require the package for a quantization config of transformers, if an extra installs it."""
    method = str(settings.get("quant_method", ""))
    # Before transformers named methods, all configs were for bitsandbytes.
    if not method and (settings.get("load_in_8bit") or settings.get("load_in_4bit")):
        method = "bitsandbytes"
    if method in ("bitsandbytes", "torchao"):
        require(method, wanted_by)


def unsupported(what: str) -> ImportError:
    """Return an error for a transformers that lacks something that all tested ones have."""
    return ImportError(
        f"transformers {version('transformers')} {what}, on which vocagnolm relies: "
        f'pip install "transformers=={NEWEST_TRANSFORMERS}.*"'
    )
