"""LoRA adapters around a student. Its own weights are frozen, and small factors are trained.

Trainer, DDP and FSDP2 treat the wrapped model like any PEFT model. Token losses are computed from
the output head's own weight, so the head must not have an adapter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

if TYPE_CHECKING:
    from peft import LoraConfig, PeftConfig, PeftModel


def adapt(model: PreTrainedModel, config: PeftConfig, seed: int) -> PeftModel:
    """Freeze a model and give its layers trainable adapters, in the model's own dtype.

    Every process draws the same initial adapters from the seed, whatever it has drawn before. The
    model is changed in place, and may be on the meta device.

    Raises:
        ValueError: the output head, or embeddings that share its weight, would get an adapter, or
            the model has adapters already.
    """
    if hasattr(model, "peft_config"):
        raise ValueError("the model has adapters already: leave peft_config out")
    # Afterwards, the run draws the same random numbers as without adapters.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapted = _wrap(model, config)
    check_adapted(adapted)
    return adapted


def check_adapted(model: nn.Module) -> None:
    """Reject adapters around the output head, or around embeddings that share its weight.

    Losses are computed from the head's own weight. If two modules share weights, merging an adapter
    of one would change the other. A model without adapters passes.
    """
    if not hasattr(model, "get_base_model"):
        return
    base: Any = model.get_base_model()  # type: ignore[operator]
    whole_modules = {"the output head": base.get_output_embeddings()}
    if base.config.get_text_config().tie_word_embeddings:
        shared = "the embeddings, which share the output head's weight,"
        whole_modules[shared] = base.get_input_embeddings()
    for name, module in whole_modules.items():
        # PEFT replaces what it adapts, trains or saves by its own modules.
        if type(module).__module__.startswith("peft."):
            raise ValueError(
                f"{name} cannot be adapted, because losses are computed from the output head's own "
                "weight: leave lm_head and embed_tokens, or what they are called in "
                f"{type(base).__name__}, out of the layers to adapt, train or save"
            )


def lora_config(
    model: PreTrainedModel,
    *,
    r: int,
    alpha: int,
    dropout: float,
    target_modules: Sequence[str] | None = None,
    modules_to_save: Sequence[str] | None = None,
    revision: str | None = None,
) -> LoraConfig:
    """Make a `peft.LoraConfig`. Saved adapters name the revision.

    Rejects names that match nothing, which PEFT would ignore. As in PEFT, a name is that of a
    layer, or the last parts of it.
    """
    from peft import LoraConfig

    target_names = list(target_modules or ())
    # PEFT accepts this word only as text, not in a list, so it is given as text below.
    if target_names == ["all-linear"]:
        target_names = []
    names_saved_whole = list(modules_to_save or ())
    names_to_save: list[str] = []
    for name in target_names + names_saved_whole:
        # A name matches whole parts of a layer's path: "proj" does not match "q_proj".
        paths = [path for path, _ in model.named_modules() if f".{path}".endswith(f".{name}")]
        if not paths:
            raise ValueError(f"{type(model).__name__} has no layer {name}: name others to adapt")
        # PEFT would save every layer whose name ends with one of these: `norm` also means `k_norm`.
        if name in names_saved_whole:
            names_to_save += paths
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=r,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=target_names or "all-linear",
        modules_to_save=names_to_save or None,
        revision=revision,
    )


def _wrap(model: PreTrainedModel, config: PeftConfig) -> PeftModel:
    from peft import get_peft_model

    wrapped: PeftModel = get_peft_model(model, config)
    # PEFT would overwrite the run's own README, which shows that a run is finished.
    wrapped.create_or_update_model_card = lambda output_dir: None  # type: ignore[method-assign]
    return wrapped


def read_adapters(directory: Path) -> tuple[PeftConfig, dict[str, Tensor]]:
    """Read the config and the weights of adapters from a directory that PEFT has written.

    Raises:
        ValueError: a file is missing or damaged, or this version of PEFT cannot read it.
    """
    from peft import PeftConfig, __version__, load_peft_weights

    try:
        config = PeftConfig.from_pretrained(str(directory))
        return config, load_peft_weights(str(directory), device="cpu")
    # A damaged file can raise anything.
    except Exception as error:
        raise ValueError(
            f"the adapters in {directory} cannot be loaded by peft {__version__} "
            f"({type(error).__name__}: {error}): give the whole directory, or install the version "
            "that wrote it"
        ) from error


def merge_adapters(
    model: PreTrainedModel, config: PeftConfig, state: Mapping[str, Tensor]
) -> PreTrainedModel:
    """Add trained adapters, named as in `adapter_model.safetensors`, to their model's own weights.

    The model is changed in place and keeps its dtype.

    Raises:
        ValueError: they belong to another model, or are incomplete.
    """
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    wrapped = _wrap(model, config)
    check_adapted(wrapped)
    # PEFT ignores missing or unknown weights, so compare all of them first.
    own_weights = get_peft_model_state_dict(wrapped)
    expected = {name: weight.shape for name, weight in own_weights.items()}
    shapes = {name: weight.shape for name, weight in state.items()}
    if expected != shapes:
        # The symmetric difference has what one side lacks, or has in another shape.
        wrong_names = sorted(dict(expected.items() ^ shapes.items()))
        raise ValueError(
            f"the adapters do not fit {model.name_or_path}: {len(wrong_names)} of their weights "
            f"are missing, too many or of another shape, such as {wrong_names[0]}"
        )
    set_peft_model_state_dict(wrapped, dict(state))
    # Adapters that do more than change weights lack the method, or raise their own errors.
    merged: PreTrainedModel = wrapped.merge_and_unload()
    return merged
