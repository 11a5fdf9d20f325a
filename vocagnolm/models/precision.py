"""The precision that models compute in where none is asked for, and why it is that one."""

import torch

# PyTorch's kernels for processors without AVX-512. Its variable ATEN_CPU_CAPABILITY may ask for
# them on any processor.
_NARROW_KERNELS = ("NO AVX", "DEFAULT", "AVX2")
# Such a processor emulates the products, at a fraction of the speed of float32.
_NO_PRODUCTS = "the processor has no products in bfloat16"


def bfloat16_unit() -> str | None:
    """Name what this processor multiplies in bfloat16 with, AMX or AVX512_BF16; None without."""
    if torch.backends.cpu.get_cpu_capability() in _NARROW_KERNELS:
        return None
    if torch.cpu._is_amx_tile_supported():
        return "AMX"
    return "AVX512_BF16" if torch.cpu._is_avx512_bf16_supported() else None


def choose_dtype(choice: str, device: torch.device, begun: str | None = None) -> tuple[str, str]:
    """Return the dtype that models compute in, and in a few words why it is that one.

    `auto` stands for what an earlier start of the same work has `begun` with, and otherwise for
    bfloat16 where the device multiplies in it. A choice other than `auto` is taken as it is.
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
