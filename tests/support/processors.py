"""Stand-ins for processors with and without bfloat16 units, whatever the tests run on."""

from __future__ import annotations

import pytest


def pretend(patch: pytest.MonkeyPatch, unit: str | None) -> None:
    """Make PyTorch answer as on a processor with AMX, with AVX512_BF16, or with neither (None)."""
    kernels = "AVX512" if unit else "AVX2"
    patch.setattr("torch.backends.cpu.get_cpu_capability", lambda: kernels)
    patch.setattr("torch.cpu._is_amx_tile_supported", lambda: unit == "AMX")
    # Processors with AMX have these instructions, too.
    patch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: unit is not None)
