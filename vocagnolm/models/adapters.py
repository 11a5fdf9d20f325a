"""LoRA adapters around a student: its own weights are frozen, small factors are trained.

The wrapped model goes through Trainer, DDP and FSDP2 as PEFT's models do. Token losses are computed
from the output head's own weight, which therefore must not be adapted.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from vocagnolm.dist import rank0
from vocagnolm.io import read_json
from vocagnolm.models.load import ADAPTER_CONFIG, weights_fault

if TYPE_CHECKING:
    from peft import LoraConfig, PeftConfig, PeftModel

# The checksum of the weights below adapters: an attribute of the adapted model, and a setting.
_CHECKSUM, _SETTING = "base_checksum", "student_weights"


def adapt(model: PreTrainedModel, config: PeftConfig, seed: int) -> PeftModel:
    """Freeze a model and give its layers trainable adapters, in the model's own dtype.

    Every process draws the same initial adapters from the seed, whatever was drawn before. The
    model is changed in place, and may be on the meta device.

    Raises:
        ValueError: it would adapt the output head, or embeddings that share its weight.
    """
    if config.is_prompt_learning:
        raise ValueError(
            f"peft_config: {type(config).__name__} adds virtual tokens, which have no loss: use "
            "adapters, such as LoraConfig"
        )
    checksum = _checksum(model, model.dtype)
    # The run draws the same random numbers afterwards as it would without adapters.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapted = _wrap(model, config)
    check_adapted(adapted)
    setattr(adapted, _CHECKSUM, checksum)
    return adapted


def with_base(settings: Mapping[str, Any], student: object) -> dict[str, Any]:
    """Add to the settings of a run the checksum of the weights below the student's adapters.

    A run resumes, and its adapters are merged, on the same weights only. Without adapters, or
    where PEFT had added them before, nothing is added. Every process has to call it.
    """
    # Under FSDP2 the other processes may have no weights yet.
    checksum = rank0(lambda: getattr(student, _CHECKSUM, None))
    return {**settings, _SETTING: checksum} if checksum else dict(settings)


def check_base(model: PreTrainedModel, settings: Mapping[str, Any]) -> None:
    """Reject a model whose weights are not those that the adapters of a run were trained on."""
    # Runs of older versions, and adapters of other programs, do not say what those were.
    checksum = settings.get(_SETTING)
    if not checksum:
        return
    dtype: torch.dtype = getattr(torch, checksum.partition(" ")[0])
    if _checksum(model, dtype) != checksum:
        raise ValueError(
            f"{model.name_or_path} differs from the model that the adapters were trained on: one "
            "was changed on disk, or in memory before training. Merge them in the program that "
            "trained them: save trainer.model.merge_and_unload()"
        )


def _checksum(model: PreTrainedModel, dtype: torch.dtype) -> str | None:
    """Return "float32 1a2b3c4d" for weights in a dtype; None if they are quantized or not there.

    Rounded to the dtype, the weights of a file are those of a model that was loaded in it.
    """
    if getattr(model, "is_quantized", False) or model.device.type == "meta":
        return None
    checksum = 0
    for _, weight in sorted(model.named_parameters()):
        rounded = weight.detach().to("cpu", dtype).flatten()
        checksum = zlib.crc32(rounded.view(torch.uint8).numpy().data, checksum)
    return f"{str(dtype).removeprefix('torch.')} {checksum:08x}"


def check_adapted(model: nn.Module) -> None:
    """Reject adapters around the output head, or around embeddings that share its weight.

    Losses are computed from the head's own weight, and weights that are merged into one of two
    modules that share them change the other, too. A model without adapters is left alone.
    """
    if not hasattr(model, "get_base_model"):
        return
    base: Any = model.get_base_model()  # type: ignore[operator]
    head, embeddings = base.get_output_embeddings(), base.get_input_embeddings()
    whole_modules = {"the output head": head}
    # A model that lacks one of the two is rejected elsewhere, where its losses are tried.
    if head is None or embeddings is None:
        return
    if _is_tied(base):
        whole_modules["the embeddings, which share the output head's weight,"] = embeddings
    for name, module in whole_modules.items():
        if module is not _inner(module):
            raise ValueError(
                f"peft_config: {name} cannot be adapted, because losses are computed from the "
                "output head's own weight: leave lm_head and embed_tokens, or what they are called "
                f"in {type(base).__name__}, out of target_modules, target_parameters, "
                "modules_to_save and trainable_token_indices"
            )


def _is_tied(base: Any) -> bool:
    """Tell whether the output head and the embeddings share their weight, adapted or not."""
    head, embeddings = base.get_output_embeddings(), base.get_input_embeddings()
    if head is None or embeddings is None:
        return False
    # Under a wrapper of PEFT the original weights tell it.
    return _inner(head).weight is _inner(embeddings).weight


def _inner(module: nn.Module) -> nn.Module:
    """Return the module that PEFT has put a wrapper around; any other as it is."""
    # Wrappers may be nested, as where a layer has both adapters and a trained copy.
    while type(module).__module__.partition(".")[0] == "peft":
        inner = getattr(module, "base_layer", None)
        module = inner if inner is not None else module.original_module  # type: ignore[assignment]
    return module


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
    """Make a `peft.LoraConfig` whose layers are checked; saved adapters name the revision.

    Names that nothing has, which PEFT would pass over, and layers that must stay whole are
    rejected. A name is that of a layer, or the last parts of it, as in PEFT.
    """
    from peft import LoraConfig

    target_names = list(target_modules or ())
    # PEFT knows this word only as text, not in a list, so it is given as text below.
    if target_names == ["all-linear"]:
        target_names = []
    names_saved_whole = list(modules_to_save or ())
    head: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    embeddings = model.get_input_embeddings()
    whole_modules = {head, embeddings} if head.weight is embeddings.weight else {head}
    names_to_save: list[str] = []
    for name in target_names + names_saved_whole:
        # As in PEFT, a name matches whole parts of a layer's path: "proj" is not "q_proj".
        named_layers: list[str] = []
        modules_inside: set[nn.Module] = set()
        for path, module in model.named_modules():
            if f".{path}".endswith(f".{name}"):
                named_layers.append(path)
                modules_inside.update(module.modules())
        if not named_layers:
            raise ValueError(f"--lora_*_modules: {type(model).__name__} has no layer {name}")
        # A block that contains the head would train it, too.
        if whole_modules & modules_inside:
            raise ValueError(
                f"--lora_*_modules: {name} cannot be adapted, because losses are computed from the "
                "output head's own weight: leave it out"
            )
        # PEFT would train every layer whose name ends as one of these does, `k_norm` with `norm`.
        if name in names_saved_whole:
            names_to_save += named_layers
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
    # PEFT would write its README over the run's own, which says when a run is finished.
    wrapped.create_or_update_model_card = lambda output_dir: None  # type: ignore[method-assign]
    return wrapped


def read_adapters(directory: Path) -> tuple[PeftConfig, dict[str, Tensor]]:
    """Read the config of adapters, and their weights, from a directory that PEFT has written.

    Raises:
        ValueError: a file is missing or damaged, or this version of PEFT cannot read it.
    """
    from peft import PeftConfig, __version__, load_peft_weights

    path = directory / ADAPTER_CONFIG
    # PEFT's own error for a file that is no JSON does not name it.
    read_json(path)
    try:
        config = PeftConfig.from_pretrained(str(directory))
    # PEFT looks things up by what the file says, and raises whatever comes of that.
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} cannot be read by peft {__version__} ({type(error).__name__}: {error}): "
            "install the version that wrote it"
        ) from error
    # PEFT looks for the files in this order, and then on the hub.
    for name in ("adapter_model.safetensors", "adapter_model.bin"):
        weights = directory / name
        if weights.exists():
            break
    else:
        raise ValueError(f"{directory} lacks adapter_model.safetensors: give the whole directory")
    reason = weights_fault(weights)
    if reason:
        raise ValueError(f"{weights} is truncated or damaged ({reason}): get a new copy")
    return config, load_peft_weights(str(directory), device="cpu")


def merge_adapters(
    model: PreTrainedModel, config: PeftConfig, state: Mapping[str, Tensor]
) -> PreTrainedModel:
    """Add trained adapters, named as in `adapter_model.safetensors`, to their model's own weights.

    The model is changed in place, and keeps its dtype. Its output head gets a weight of its own if
    the adapters make it differ from the embeddings.

    Raises:
        ValueError: they cannot be merged, or belong to another model, or are not complete.
    """
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    is_prompt = config.is_prompt_learning or config.is_adaption_prompt
    # X-LoRA mixes adapters anew for every input. Layers that are repeated share one weight, but
    # have an adapter each. PEFT would merge both, into another model.
    is_mixture = config.peft_type == "XLORA" or getattr(config, "layer_replication", None)
    if is_prompt or is_mixture:
        raise ValueError(_not_merged(config, "they do more than change weights"))
    wrapped = _wrap(model, config)
    # PEFT passes over weights that are absent or unknown, so all are compared before.
    own_weights = get_peft_model_state_dict(wrapped)
    expected = {name: weight.shape for name, weight in own_weights.items()}
    shapes = {name: weight.shape for name, weight in state.items()}
    if expected != shapes:
        # The symmetric difference holds what one side lacks, or has in another shape.
        wrong_names = sorted(dict(expected.items() ^ shapes.items()))
        raise ValueError(
            f"the adapters do not fit {model.name_or_path}: {len(wrong_names)} of their weights "
            f"are missing, too many or of another shape, such as {wrong_names[0]}"
        )
    set_peft_model_state_dict(wrapped, dict(state))
    base: Any = wrapped.get_base_model()
    is_tied = _is_tied(base)
    if is_tied:
        # PEFT would add an adapter of the head, or of the embeddings, to the weight of both.
        own_head: Any = _inner(base.get_output_embeddings())
        own_head.weight = nn.Parameter(own_head.weight.detach().clone())
    try:
        merged: Any = wrapped.merge_and_unload()
    except (RuntimeError, ValueError) as error:
        # Some errors of PEFT have no text.
        raise ValueError(_not_merged(config, str(error) or repr(error))) from error
    if is_tied:
        head, embeddings = merged.get_output_embeddings(), merged.get_input_embeddings()
        is_tied = torch.equal(head.weight, embeddings.weight)
        merged.config.tie_word_embeddings = is_tied
        if is_tied:
            head.weight = embeddings.weight
    return merged  # type: ignore[no-any-return]


def _not_merged(config: PeftConfig, reason: str) -> str:
    return (
        f"adapters of {type(config).__name__} cannot be merged into their model ({reason}): load "
        "them with it, by PeftModel.from_pretrained"
    )
