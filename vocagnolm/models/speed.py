"""Speed knobs that keep the numbers: compiled layers, Liger's kernels, a quantized teacher.

What each of them changes, and which tokens are selected then, is measured in docs/speed.md.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import TorchAoConfig
from transformers.utils.import_utils import is_liger_kernel_available

QUANTIZATIONS = {"fp8": "torchao", "nf4": "bitsandbytes", "int8": "bitsandbytes"}  # their packages
_FP8_CAPABILITY = (8, 9)  # of a GPU whose matrix units multiply float8
# Graphs of a layer's code: of student and teacher, with and without gradient, for the first shape
# and for any. Beyond PyTorch's limit of 8 a layer would silently run uncompiled.
_GRAPHS_OF_A_LAYER = 32
_LIGER_LOSSES = ("fused_linear_cross_entropy", "cross_entropy")


def decoder_layers(model: Any) -> list[nn.Module]:
    """The layers that repeat: those of the classes that a model names as not to be split.

    Args:
        model: a causal language model, with adapters or without.

    Raises:
        ValueError: it names none.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} names no decoder layers (_no_split_modules), which are "
            "compiled or sharded one by one: leave --compile_layers and --teacher_sharding out"
        )
    return layers


def compile_layers(model: Any, backend: str = "inductor", dynamic: bool | None = None) -> int:
    """Compile every decoder layer of a model, in place, when it first runs.

    Never the whole model: `transformers` would then build a mask for every batch, and the losses
    choose rows at run time. Layers of a kind share their graphs. Parameters keep their names.
    To be called behind `add_token_losses` and `check_packing`, whose probes would be compiled too,
    and before DDP or FSDP2 wrap the model.

    Args:
        model: a causal language model.
        backend: of `torch.compile`.
        dynamic: as in `torch.compile`; by default a second shape makes the third one free.

    Returns:
        How many layers there are.

    Raises:
        ValueError: the model names no decoder layers.
    """
    layers = decoder_layers(model)
    limit = torch._dynamo.config.recompile_limit
    torch._dynamo.config.recompile_limit = max(limit, _GRAPHS_OF_A_LAYER)
    for layer in layers:
        layer.compile(backend=backend, dynamic=dynamic)
    return len(layers)


def liger_settings(given: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """The `liger_kernel_config` that leaves the student's forward, and its losses, alone.

    Trainer applies Liger's kernels as training begins, behind `add_token_losses`. Its fused loss
    would put another forward in the place of the one that gives token losses; its other loss would
    replace `torch.nn.functional.cross_entropy` for the whole process.

    Args:
        given: the option, as a mapping or as JSON.

    Raises:
        ValueError: it is no JSON object, it asks for one of the losses, or the package is missing.
    """
    settings = _json_object("--liger_kernel_config", given) if isinstance(given, str) else given
    for name in _LIGER_LOSSES:
        if settings and settings.get(name):
            raise ValueError(
                f"--liger_kernel_config: {name} would replace the weighted loss: leave it out"
            )
    if not is_liger_kernel_available():
        raise ValueError(
            "--use_liger_kernel needs a package that is not there: pip install liger-kernel"
        )
    return {**(settings or {}), **dict.fromkeys(_LIGER_LOSSES, False)}


def quantization(text: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """The quantization config of `transformers` that `--teacher_quantization` stands for.

    All leave the output head as it is, from which losses are computed.

    Args:
        text: a key of `QUANTIZATIONS`, or a config as JSON. `fp8`: weights and activations, scaled
            by row. `nf4`: weights, 4 bits each, in blocks of 64. `int8`: LLM.int8(), weights and
            activations except outliers.
        dtype: of everything else.

    Raises:
        ValueError: it is neither, or a package or a GPU is missing.
    """
    if text not in QUANTIZATIONS:
        return _json_object(f"--teacher_quantization ({', '.join(QUANTIZATIONS)} or JSON)", text)
    _check_package(text)
    if text == "int8":
        return {"quant_method": "bitsandbytes", "load_in_8bit": True}
    if text == "nf4":
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_compute_dtype": str(dtype).removeprefix("torch."),
        }
    config: Any = TorchAoConfig(fp8_products())
    content: dict[str, Any] = config.to_dict()
    return content


def fp8_products() -> Any:
    """The config of `torchao` that `fp8` stands for.

    Raises:
        ValueError: the package or a GPU is missing.
    """
    _check_package("fp8")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < _FP8_CAPABILITY:
        raise ValueError(
            "--teacher_quantization fp8 needs a GPU that computes in float8 (compute capability "
            "8.9: H100, L4, RTX 40): use nf4 or int8, or leave it out"
        )
    torchao: Any = importlib.import_module("torchao.quantization")
    return torchao.Float8DynamicActivationFloat8WeightConfig(granularity=torchao.PerRow())


def _check_package(name: str) -> None:
    package = QUANTIZATIONS[name]
    if importlib.util.find_spec(package) is None:
        raise ValueError(
            f"--teacher_quantization {name} needs a package that is not there: pip install "
            f"{package}"
        )


def _json_object(option: str, text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{option}: {text} is not JSON: {error}") from error
    if not (isinstance(content, dict) and content):
        raise ValueError(f"{option}: {text} is not a JSON object of settings")
    return content
