"""Quantization of a teacher: its config, and whether this machine supports it."""

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from transformers import TorchAoConfig
from transformers.quantizers.auto import AutoHfQuantizer

from vocagnolm.fields import json_settings
from vocagnolm.shell.extras import advice, require_quantization

QUANTIZATIONS = ("fp8", "nf4", "int8")


def quantization(text: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, object]:
    """Return the quantization config for an option. Everything else is in `dtype`.

    The option is a config as JSON, or a name. `fp8`: weights and activations, scaled by row. `nf4`:
    4-bit weights in blocks of 64. `int8`: LLM.int8(), weights and activations except outliers.
    """
    if text not in QUANTIZATIONS:
        return json_settings(f"--teacher_quantization ({', '.join(QUANTIZATIONS)} or JSON)", text)
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


def check_quantizer(settings: Mapping[str, object], wanted_by: str) -> None:
    """Raise a ValueError if a quantization config of transformers needs a missing package."""
    # Our message names the extra to install, so it comes before transformers' own.
    require_quantization(settings, wanted_by)
    try:
        # transformers' own check knows the kinds of quantization that are not named here.
        quantizer: Any = AutoHfQuantizer.from_config(dict(settings), pre_quantized=True)
        quantizer.validate_environment()
    except ImportError as error:
        why = str(error).strip().partition("\n")[0]
        raise ValueError(f"{wanted_by} lacks a package: {why}{advice(error)}") from error
    except (ValueError, TypeError, RuntimeError, AttributeError):
        # It was asked without a device, and may be wrong. Loading asks again, with the device.
        return


def fp8_products() -> object:
    """Make the torchao config for `fp8`, which needs a GPU such as the H100 or L4."""
    # Import the package by name, because it is optional and has no types.
    torchao = importlib.import_module("torchao.quantization")
    config: object = torchao.Float8DynamicActivationFloat8WeightConfig(granularity=torchao.PerRow())
    return config
