"""Knows which extra installs each optional package, and which transformers were tested.

It does not import torch, which takes seconds, so a command can say at once what is missing.
"""

from importlib.metadata import version
from importlib.util import find_spec

# The newest version that passed all tests. Minor releases have renamed what this package uses.
NEWEST_TRANSFORMERS = "5.24"
# The extra that installs each optional package, by import name.
EXTRAS = {
    "bitsandbytes": "quantization",
    "liger_kernel": "liger",
    "peft": "peft",
    "torchao": "quantization",
    "vllm": "vllm",
    "wandb": "wandb",
}


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
    """Say what to install if an optional package is missing.

    Raises:
        ValueError: it is missing.
    """
    if not is_installed(package):
        extra = EXTRAS.get(package)
        requirement = f'"vocagnolm[{extra}]"' if extra else package
        raise ValueError(
            f"{wanted_by} needs {package}, which is not installed: pip install {requirement}"
        )


def unsupported(what: str) -> ImportError:
    """Return an error for a transformers that lacks something that all tested ones have."""
    return ImportError(
        f"transformers {version('transformers')} {what}, on which vocagnolm relies: "
        f'pip install "transformers=={NEWEST_TRANSFORMERS}.*"'
    )
