"""Knows which extra installs each optional package, and which transformers were tested.

It does not import torch, which takes seconds, so a command can say at once what is missing.
"""

import logging
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec

from packaging.version import Version

from vocagnolm.fields import named

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
# Trackers that `--report_to` calls by their package names.
_TRACKERS = ("mlflow", "tensorboard", "trackio", "wandb")


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


def require_trackers(report_to: str | Iterable[str] | None) -> None:
    """Require the packages of one or more trackers that `report_to` names."""
    names = [report_to] if isinstance(report_to, str) else report_to or ()
    for name in names:
        # tensorboardX writes the same files, and transformers accepts either.
        is_replaced = name == "tensorboard" and is_installed("tensorboardX")
        if name in _TRACKERS and not is_replaced:
            require(name, f"{named('report_to')} {name}")


def require_quantization(settings: Mapping[str, object], wanted_by: str) -> None:
    """Require the package for a quantization config of transformers, if an extra installs it."""
    method = str(settings.get("quant_method", ""))
    # Before transformers named methods, all configs were for bitsandbytes.
    if not method and (settings.get("load_in_8bit") or settings.get("load_in_4bit")):
        method = "bitsandbytes"
    if method in ("bitsandbytes", "torchao"):
        require(method, wanted_by)


@cache
def check_transformers() -> None:
    """Warn once about a transformers that is newer than the tested ones."""
    installed = version("transformers")
    # Compare only major and minor versions, because patch releases rename nothing.
    if Version(installed).release[:2] > Version(NEWEST_TRANSFORMERS).release[:2]:
        logging.getLogger(__name__).warning(
            "this vocagnolm was tested with transformers up to %s, not with %s: if anything fails, "
            'pip install "transformers==%s.*"',
            NEWEST_TRANSFORMERS,
            installed,
            NEWEST_TRANSFORMERS,
        )


def unsupported(what: str) -> ImportError:
    """Return an error for a transformers that lacks something that all tested ones have."""
    return ImportError(
        f"transformers {version('transformers')} {what}, on which vocagnolm relies: "
        f'pip install "transformers=={NEWEST_TRANSFORMERS}.*"'
    )
