"""Tests by the configuration alone whether a model can keep packed documents apart.

The probe of the loaded model (`probes.check_packing`) has the last word. This one runs on a small
model of the same kind, so that a model is not rejected only after hours of alignment.
"""

import copy
import logging
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from vocagnolm.models.probes import PackingError, check_packing

logger = logging.getLogger(__name__)

# A CPU computes these kinds of attention as a GPU does. None means transformers' choice.
_ON_A_CPU = (None, "sdpa", "eager")
# Sizes that do not affect how documents interact, with the largest that a small model has: rows of
# the vocabulary, widths of MLPs, and the tokens that Mamba's slow path takes at once. That path
# pads its input to whole chunks, and holds chunk x chunk x heads x state numbers, which at 256 take
# tens of gigabytes.
_MOST_TOKENS, _MOST_WIDTH, _MOST_CHUNK = 512, 128, 16
_LIMITS = {
    "intermediate_size": _MOST_WIDTH,
    "moe_intermediate_size": _MOST_WIDTH,
    "shared_expert_intermediate_size": _MOST_WIDTH,
    "n_inner": _MOST_WIDTH,
    "mamba_chunk_size": _MOST_CHUNK,
    "chunk_size": _MOST_CHUNK,
}
# Drawing more random weights than this would take too long for an early check.
_MOST_WEIGHTS = 200_000_000
# Fresh weights are so small that even a leak between documents would drown in rounding, so they are
# multiplied by this.
_SPREAD = 4.0
# Raised for a model that cannot be made small, or whose losses cannot be computed.
_NOT_PROBED = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    RuntimeError,
    ImportError,
    AssertionError,
)


def check_kind(config: PreTrainedConfig, attention: str | None, *, trust: bool = False) -> None:
    """Reject a model of a kind that lets packed documents see each other.

    A model that cannot be made small enough is left to the probe of the loaded model.

    Raises:
        ValueError: its documents would not be kept apart. The message says what helps.
    """
    if attention not in _ON_A_CPU:
        return
    try:
        small = _small(config)
        options: dict[str, Any] = {"trust_remote_code": trust}
        if attention:
            options["attn_implementation"] = attention
        # Count the weights on the meta device, before any memory is spent on them.
        with torch.device("meta"):
            skeleton = _make(small, options)
        if skeleton.num_parameters() > _MOST_WEIGHTS:
            return
        # Afterwards, the run draws the same random numbers as without this check.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = _make(small, options).float().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                # Scales of norms and biases have one dimension, and are not multiplied.
                if parameter.dim() > 1:
                    parameter *= _SPREAD
        check_packing(model)
    # This error is a ValueError, too, but must not be caught below.
    except PackingError:
        raise
    # If a kind cannot be made small, or its head is not reproduced, the loaded model is tested.
    except _NOT_PROBED:
        return


def _make(config: PreTrainedConfig, options: dict[str, Any]) -> Any:
    return AutoModelForCausalLM.from_config(config, **options)  # type: ignore[no-untyped-call]


def _small(config: PreTrainedConfig) -> PreTrainedConfig:
    """Copy a configuration with one layer of each kind, a small vocabulary and narrow MLPs."""
    small = copy.deepcopy(config)
    text = small.get_text_config()
    kinds = getattr(text, "layer_types", None) or []
    # If the configuration does not distinguish kinds of layers, two show a leak as well as many.
    layers = _first_of_each(kinds) or [0, 1][: text.num_hidden_layers]
    try:
        if kinds:
            text.layer_types = [kinds[index] for index in layers]
        text.num_hidden_layers = len(layers)
    except AttributeError:
        # These depend on other settings, so keep all layers up to the last new kind.
        text.num_hidden_layers = layers[-1] + 1
    text.vocab_size = min(text.vocab_size, _MOST_TOKENS)
    for name, most in _LIMITS.items():
        size = getattr(text, name, None)
        if isinstance(size, int) and size > most:
            setattr(text, name, most)
    # These ids may be beyond the smaller vocabulary, and the embeddings would reject them.
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(text, name, None)
    return small


def _first_of_each(kinds: list[str]) -> list[int]:
    """Return the indices of the first layer of each kind, in order."""
    return [index for index, kind in enumerate(kinds) if kind not in kinds[:index]]
