"""Quantized teachers: `--teacher_quantization` as a quantization config of `transformers`.

All ways leave the output head as it is, from which losses are computed.
"""

import importlib
import importlib.util

import torch
from transformers import TorchAoConfig

from vocagnolm.cli import json_settings

# The package of each.
QUANTIZATIONS = {"fp8": "torchao", "nf4": "bitsandbytes", "int8": "bitsandbytes"}
# The least compute capability of a GPU whose matrix units multiply float8.
_FP8_CAPABILITY = (8, 9)


def quantization(text: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, object]:
    """Make the quantization config that an option stands for; all else is in `dtype`.

    The option is a config as JSON, or a name. `fp8`: weights and activations, scaled by row.
    `nf4`: weights, 4 bits each, in blocks of 64. `int8`: LLM.int8(), weights and activations except
    outliers. A ValueError where it is neither, or a package or a GPU is missing.
    """
    if text not in QUANTIZATIONS:
        return json_settings(f"--teacher_quantization ({', '.join(QUANTIZATIONS)} or JSON)", text)
    package = QUANTIZATIONS[text]
    if importlib.util.find_spec(package) is None:
        raise ValueError(
            f"--teacher_quantization {text} needs a package that is not there: pip install "
            f"{package}"
        )
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
    """Make the config of `torchao` that `fp8` stands for."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < _FP8_CAPABILITY:
        raise ValueError(
            "--teacher_quantization fp8 needs a GPU that computes in float8 (compute capability "
            "8.9: H100, L4, RTX 40): use nf4 or int8, or leave it out"
        )
    # Imported by name: the package is optional, and has no types.
    torchao = importlib.import_module("torchao.quantization")
    config: object = torchao.Float8DynamicActivationFloat8WeightConfig(granularity=torchao.PerRow())
    return config
