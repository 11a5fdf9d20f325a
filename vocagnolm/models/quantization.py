"""Quantized teachers: `--teacher_quantization` as a quantization config of `transformers`.

All ways leave the output head as it is, from which losses are computed.
"""

import importlib

import torch
from transformers import TorchAoConfig

from vocagnolm.cli import json_settings

# The package of each.
QUANTIZATIONS = {"fp8": "torchao", "nf4": "bitsandbytes", "int8": "bitsandbytes"}


def quantization(text: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, object]:
    """Make the quantization config that an option stands for; all else is in `dtype`.

    The option is a config as JSON, or a name. `fp8`: weights and activations, scaled by row.
    `nf4`: weights, 4 bits each, in blocks of 64. `int8`: LLM.int8(), weights and activations except
    outliers.
    """
    if text not in QUANTIZATIONS:
        return json_settings(f"--teacher_quantization ({', '.join(QUANTIZATIONS)} or JSON)", text)
    # Which layers are spared is left to transformers: the head is one of them.
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
    """Make the config of `torchao` that `fp8` stands for; it needs a GPU like the H100 or L4."""
    # Imported by name: the package is optional, and has no types.
    torchao = importlib.import_module("torchao.quantization")
    config: object = torchao.Float8DynamicActivationFloat8WeightConfig(granularity=torchao.PerRow())
    return config
