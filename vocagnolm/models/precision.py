"""The precision that models compute in by default, and why."""

import torch

# PyTorch's kernels for processors without AVX-512. Its variable ATEN_CPU_CAPABILITY can ask for
# them on any processor.
_NARROW_KERNELS = ("NO AVX", "DEFAULT", "AVX2")
# These processors emulate bfloat16 products, at a fraction of float32's speed.
_NO_PRODUCTS = "the processor has no products in bfloat16"


def bfloat16_unit() -> str | None:
    """Return what this processor multiplies bfloat16 with, AMX or AVX512_BF16, or None."""
    if torch.backends.cpu.get_cpu_capability() in _NARROW_KERNELS:
        return None
    if torch.cpu._is_amx_tile_supported():
        return "AMX"
    return "AVX512_BF16" if torch.cpu._is_avx512_bf16_supported() else None


def choose_dtype(choice: str, device: torch.device, begun: str | None = None) -> tuple[str, str]:
    """Return the dtype that models compute in, and a short reason.

    `auto` means the dtype in which the same work has `begun` earlier, or else bfloat16 if the
    device multiplies in it. Any other choice is returned as it is.
    """
    unit = bfloat16_unit() if device.type == "cpu" else "GPU"
    if unit is None:
        dtype, why = "float32", _NO_PRODUCTS
    elif unit == "GPU":
        dtype, why = "bfloat16", "the default on a GPU"
    else:
        dtype, why = "bfloat16", f"the processor multiplies in it, with {unit}"
    if choice != "auto":
        dtype, why = choice, "as asked for"
    elif begun not in (None, dtype):
        dtype, why = str(begun), "as it began"
    if dtype == "bfloat16" and unit is None:
        why += f", and slow: {_NO_PRODUCTS}"
    return dtype, why
