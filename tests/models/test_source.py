"""Loading a pair of models, and the pairs that are rejected."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BloomConfig,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from vocagnolm.models.cost import sizes_of
from vocagnolm.models.load import (
    NO_LIMIT,
    ModelSource,
    context_length,
)
from vocagnolm.models.sharding import shard_inside_machine

VOCABULARY = 700
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
CONFIGS = [
    LlamaConfig(**SMALL),
    LlamaConfig(**SMALL, tie_word_embeddings=True, num_key_value_heads=2),
    MistralConfig(**SMALL, num_key_value_heads=2),
    Qwen2Config(**SMALL),
    Gemma2Config(**SMALL, head_dim=8),
    GPTNeoXConfig(**SMALL),
    GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4),
]
Tokenizers = dict[str, PreTrainedTokenizerFast]


@pytest.fixture(scope="module")
def saved(tiny_llama: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_llama(VOCABULARY).save_pretrained(path)
    return path


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


# Loading


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_load_gives_the_saved_weights(
    saved: Path, tiny_llama: Callable[..., Any], dtype: torch.dtype
) -> None:
    model = ModelSource(str(saved), "teacher").load(dtype)
    expected = tiny_llama(VOCABULARY).state_dict()
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, expected[name].to(dtype))


def cut_off(directory: Path) -> None:
    os.truncate(directory / "model.safetensors", 99)


def without_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


def with_norm(directory: Path, **norm: torch.Tensor) -> None:
    weights = load_file(directory / "model.safetensors")
    del weights["model.norm.weight"]
    weights |= {f"model.norm.{name}": weight for name, weight in norm.items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def of_an_unfinished_run(directory: Path) -> None:
    (directory / "checkpoint-20").mkdir()
    (directory / "config.json").rename(directory / "checkpoint-20" / "config.json")


REFUSED: list[tuple[Callable[[Path], None], dict[str, Any], str]] = [
    (cut_off, {}, "cannot be loaded"),
    (without_weights, {}, "cannot be loaded"),
    # transformers would draw these at random.
    (with_norm, {}, r"model\.norm\.weight"),
    (lambda directory: with_norm(directory, weight=torch.zeros(5)), {}, r"model\.norm\.weight"),
    (of_an_unfinished_run, {}, r"config\.json"),
    (lambda directory: None, {"foo": 1}, "foo"),
]


@pytest.mark.parametrize(("damage", "init_kwargs", "word"), REFUSED)
def test_model_that_cannot_be_loaded_is_named(
    damage: Callable[[Path], None], init_kwargs: dict[str, Any], word: str, copied: Path
) -> None:
    def load() -> None:
        source = ModelSource(str(copied), "teacher", init_kwargs=init_kwargs)
        source.config()
        source.load(torch.float32)

    damage(copied)
    with pytest.raises(ValueError, match=rf"teacher {copied}.*{word}") as caught:
        load()
    assert "\n" not in str(caught.value)


def test_a_revision_reaches_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    source, asked = ModelSource("some/model", "teacher", revision="v2"), []

    def refuse(name: str, **options: Any) -> None:
        asked.append((name, options["revision"]))
        raise OSError("not here")

    for kind in (AutoConfig, AutoModelForCausalLM, AutoTokenizer):
        monkeypatch.setattr(kind, "from_pretrained", refuse)
    calls = (
        source.config,
        lambda: source.tokenizer(LlamaConfig()),
        lambda: source.load(torch.float32),
    )
    for call in calls:
        with pytest.raises(ValueError, match="--teacher some/model cannot be loaded: not here"):
            call()
    assert asked == [("some/model", "v2")] * 3


# Facts of a configuration


def parameters_of(source: ModelSource, config: Any) -> int:
    return sizes_of(source.skeleton(config)).parameters


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_skeleton_has_the_parameters_of_the_real_model(config: Any) -> None:
    model = AutoModelForCausalLM.from_config(config)
    counted = parameters_of(ModelSource("any", "student"), config)
    assert counted == sum(p.numel() for p in model.parameters())


def test_skeleton_uses_the_models_attention(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    from_config = AutoModelForCausalLM.from_config

    def spy(*args: Any, **kwargs: Any) -> Any:
        made.append(from_config(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(AutoModelForCausalLM, "from_config", spy)
    source = ModelSource(str(saved), "student", "main", attn_implementation="eager")
    assert parameters_of(source, source.config()) > 0
    assert made[0].config._attn_implementation == "eager"
    assert {parameter.device.type for parameter in made[0].parameters()} == {"meta"}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LlamaConfig(max_position_embeddings=512), 512),
        (GPT2Config(n_positions=256), 256),
        (MambaConfig(), NO_LIMIT),
        (BloomConfig(), NO_LIMIT),
        (
            Phi3Config(
                max_position_embeddings=400,
                original_max_position_embeddings=100,
                rope_parameters={
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * 48,
                    "long_factor": [2.0] * 48,
                },
            ),
            100,
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_context_length_follows_the_configuration(config: Any, expected: int) -> None:
    assert context_length(config) == expected


# Pairs


def test_tokenizer_with_ids_beyond_the_embeddings_is_rejected(
    tokenizer_dirs: dict[str, Path], tmp_path: Path
) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_dirs["metaspace"])
    source = ModelSource("any", "teacher")
    for rows in (len(tokenizer), len(tokenizer) + 64):  # exact, and padded
        config = LlamaConfig(**SMALL | {"vocab_size": rows})
        source.checked_tokenizer(config, "teacher", str(tokenizer_dirs["metaspace"]))
    tokenizer.add_tokens(["<one-more>"])
    tokenizer.save_pretrained(tmp_path)
    config = LlamaConfig(**SMALL | {"vocab_size": len(tokenizer) - 1})
    with pytest.raises(ValueError, match=r"has ids up to 600, .* the model's own tokenizer"):
        source.checked_tokenizer(config, "teacher", str(tmp_path))


def test_tokenizer_of_an_evaluated_model_is_tested(
    tokenizer_dirs: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(tokenizer_dirs["metaspace"], tmp_path, dirs_exist_ok=True)
    config = LlamaConfig(**SMALL | {"vocab_size": 600})
    config.save_pretrained(tmp_path)
    source = ModelSource(str(tmp_path), "model")
    tokenizer = source.tokenizer(config)
    # No prompt has the padding token, so it needs no embedding.
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.save_pretrained(tmp_path)
    source.tokenizer(config)
    tokenizer.add_tokens(["<one-more>"])
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="ids up to 601, but the model has embeddings for 600"):
        source.tokenizer(config)
    # transformers then makes a tokenizer of the model's class without any token.
    (tmp_path / "tokenizer.json").unlink()
    settings = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="knows no token of a text: copy all files"):
        source.tokenizer(config)


def test_machines_of_unequal_size_are_rejected(
    tiny_llama: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="3 processes are not 2 per machine"):
        shard_inside_machine(tiny_llama(64), torch.device("cpu"))
