"""Quantization of a teacher: the config that transformers takes."""

import importlib

import torch
from transformers import TorchAoConfig

from vocagnolm.fields import json_settings

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


def fp8_products() -> object:
    """Make the torchao config for `fp8`, which needs a GPU such as the H100 or L4."""
    # Import the package by name, because it is optional and has no types.
    torchao = importlib.import_module("torchao.quantization")
    config: object = torchao.Float8DynamicActivationFloat8WeightConfig(granularity=torchao.PerRow())
    return config
