"""LoRA adapters around a student: its own weights are frozen, small factors are trained.

The wrapped model goes through Trainer, DDP and FSDP2 as PEFT's models do. Token losses are computed
from the output head's own weight, which therefore must not be adapted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

if TYPE_CHECKING:
    from peft import LoraConfig, PeftConfig, PeftModel

    from vocagnolm.run.options import ModelOptions

_ALL_LINEAR = "all-linear"


def add_adapters(
    model: PreTrainedModel, options: ModelOptions, seed: int, revision: str | None = None
) -> PeftModel:
    """Freeze a model and give its layers trainable adapters, in the model's own dtype.

    Every process draws the same initial adapters from the seed, whatever was drawn before. Saved
    adapters name the model and its revision on the hub. The model is changed in place, and may be
    on the meta device. A ValueError where a named layer is not there, or may not have an adapter.
    """
    _check_names(model, options)
    config = lora_config(model, options, revision)
    # The run draws the same random numbers afterwards as without adapters.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _wrap(model, config)


def lora_config(model: nn.Module, options: ModelOptions, revision: str | None = None) -> LoraConfig:
    """Make the `peft.LoraConfig` of the options."""
    from peft import LoraConfig

    # PEFT would train every layer whose name ends as one of these does, `k_norm` with `norm`.
    whole = [n for name in options.lora_modules_to_save or () for n in _named(model, name)]
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=options.lora_r,
        lora_alpha=options.lora_alpha,
        lora_dropout=options.lora_dropout,
        target_modules=_targets(options),
        modules_to_save=whole or None,
        revision=revision,
    )


def _wrap(model: PreTrainedModel, config: PeftConfig) -> PeftModel:
    from peft import get_peft_model

    wrapped: PeftModel = get_peft_model(model, config)
    # PEFT would write its README over the run's own, which says when a run is finished.
    wrapped.create_or_update_model_card = lambda output_dir: None  # type: ignore[method-assign]
    return wrapped


def _targets(options: ModelOptions) -> str | list[str]:
    names = options.lora_target_modules or [_ALL_LINEAR]
    return _ALL_LINEAR if names == [_ALL_LINEAR] else names


def _check_names(model: PreTrainedModel, options: ModelOptions) -> None:
    """Reject names that nothing has, which PEFT would pass over, and layers that must stay whole.

    A name is that of a layer, or the last parts of it, as in PEFT.
    """
    head: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    embeddings = model.get_input_embeddings()
    whole = {head, embeddings} if head.weight is embeddings.weight else {head}
    targets = [] if _targets(options) == _ALL_LINEAR else options.lora_target_modules or []
    for name in [*targets, *(options.lora_modules_to_save or [])]:
        named = _named(model, name)
        if not named:
            raise ValueError(f"--lora_*_modules: {type(model).__name__} has no layer {name}")
        if whole & {inner for module in named.values() for inner in module.modules()}:
            raise ValueError(
                f"--lora_*_modules: {name} cannot be adapted, because losses are computed from the "
                "output head's own weight: leave it out"
            )


def _named(model: nn.Module, name: str) -> dict[str, nn.Module]:
    """Return the layers of a name, or with it as their last parts, by their whole names."""
    modules = model.named_modules()
    return {key: module for key, module in modules if key and f".{key}".endswith(f".{name}")}


def merge_adapters(
    model: PreTrainedModel, config: PeftConfig, state: Mapping[str, Tensor]
) -> PreTrainedModel:
    """Add trained adapters, named as in `adapter_model.safetensors`, to their model's own weights.

    The model is changed in place, and keeps its dtype. A ValueError where the adapters belong to
    another one, or are not complete.
    """
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    wrapped = _wrap(model, config)
    expected = {name: w.shape for name, w in get_peft_model_state_dict(wrapped).items()}
    found = {name: weight.shape for name, weight in state.items()}
    if expected != found:
        wrong = sorted(dict(expected.items() ^ found.items()))
        raise ValueError(
            f"the adapters do not fit {model.name_or_path}: {len(wrong)} of their weights are "
            f"missing, too many or of another shape, such as {wrong[0]}"
        )
    set_peft_model_state_dict(wrapped, dict(state))
    merged: PreTrainedModel = wrapped.merge_and_unload()
    return merged
