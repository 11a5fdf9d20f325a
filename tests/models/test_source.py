"""Loading a pair of models, the pairs that are rejected, dtypes and quantization."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import build
from processors import pretend
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BloomConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    PreTrainedTokenizerFast,
)
from transformers.quantizers.auto import AutoQuantizationConfig

from vocagnolm.models.cost import sizes_of
from vocagnolm.models.load import (
    NO_LIMIT,
    ModelSource,
    choose_dtype,
    context_length,
    quantization,
)
from vocagnolm.models.sharding import shard_inside_machine
from vocagnolm.objective import OnlineTeacher
from vocagnolm.token_loss import add_token_losses

VOCABULARY = 700


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


@pytest.mark.parametrize(
    "name", ["llama", "llama_tied", "mistral", "qwen2", "gemma2", "gpt_neox", "gpt2"]
)
def test_skeleton_has_the_parameters_of_the_real_model(name: str) -> None:
    model = build(name)
    skeleton = ModelSource("any", "student").skeleton(model.config)
    assert sizes_of(skeleton).parameters == sum(p.numel() for p in model.parameters())


def test_skeleton_has_the_models_attention_and_no_weights(saved: Path) -> None:
    source = ModelSource(str(saved), "student", "main", attn_implementation="eager")
    skeleton = source.skeleton(source.config())
    assert skeleton.config._attn_implementation == "eager"
    assert {parameter.device.type for parameter in skeleton.parameters()} == {"meta"}


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 64,
    "long_factor": [2.0] * 64,
    "original_max_position_embeddings": 100,
}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LlamaConfig(max_position_embeddings=512), 512),
        (GPT2Config(n_positions=256), 256),
        (MambaConfig(), NO_LIMIT),
        (BloomConfig(), NO_LIMIT),
        (LlamaConfig(max_position_embeddings=400, rope_parameters=LONGROPE), 100),
    ],
    ids=lambda value: type(value).__name__,
)
def test_context_length_follows_the_configuration(config: Any, expected: int) -> None:
    assert context_length(config) == expected


# Pairs


def test_tokenizer_with_ids_beyond_the_embeddings_is_rejected(
    tokenizer_dirs: dict[str, Path],
) -> None:
    source, place = ModelSource("any", "teacher"), str(tokenizer_dirs["metaspace"])
    size = len(PreTrainedTokenizerFast.from_pretrained(place))
    for rows in (size, size + 64):  # exact, and padded
        source.checked_tokenizer(LlamaConfig(vocab_size=rows), "teacher", place)
    with pytest.raises(ValueError, match=r"ids up to 599,"):
        source.checked_tokenizer(LlamaConfig(vocab_size=size - 1), "teacher", place)


def test_tokenizer_of_an_evaluated_model_is_tested(
    tokenizer_dirs: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(tokenizer_dirs["metaspace"], tmp_path, dirs_exist_ok=True)
    config = LlamaConfig(vocab_size=600)
    config.save_pretrained(tmp_path)
    source = ModelSource(str(tmp_path), "model")
    tokenizer = source.tokenizer(config)
    # No prompt has the padding token, so it needs no embedding.
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.save_pretrained(tmp_path)
    source.tokenizer(config)
    tokenizer.add_tokens(["<one-more>"])
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"up to 601, .* for 600"):
        source.tokenizer(config)
    # transformers then makes a tokenizer of the model's class without any token.
    (tmp_path / "tokenizer.json").unlink()
    settings = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="knows no token"):
        source.tokenizer(config)


def test_machines_of_unequal_size_are_rejected(
    tiny_llama: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="3 processes are not 2 per machine"):
        shard_inside_machine(tiny_llama(64), torch.device("cpu"))


# Precision and quantization


CPU, GPU = torch.device("cpu"), torch.device("cuda")
WITH, WITHOUT = "AVX512_BF16", None


@pytest.mark.parametrize("kernels", ["DEFAULT", "AVX2"])
def test_unit_is_not_used_when_pytorch_computes_with_narrower_kernels(
    kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, "AMX")
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: kernels)
    assert choose_dtype("auto", CPU)[0] == "float32"


@pytest.mark.parametrize(
    ("choice", "device", "unit", "begun", "expected", "reason"),
    [
        ("auto", CPU, WITH, None, "bfloat16", "the processor .*AVX512_BF16"),
        ("auto", CPU, "AMX", None, "bfloat16", "the processor .*AMX"),
        ("auto", CPU, WITHOUT, None, "float32", "the processor has"),
        ("auto", GPU, WITHOUT, None, "bfloat16", "the default"),
        ("auto", CPU, WITH, "float32", "float32", "as it began"),
        ("auto", CPU, WITHOUT, "bfloat16", "bfloat16", "as it began, .*slow"),
        ("auto", GPU, WITHOUT, "float32", "float32", "as it began"),
        ("float32", CPU, WITH, "bfloat16", "float32", "as asked for"),
        ("bfloat16", CPU, WITH, "float32", "bfloat16", "as asked for"),
        ("bfloat16", CPU, WITHOUT, None, "bfloat16", "as asked for, .*slow"),
        ("bfloat16", GPU, WITHOUT, None, "bfloat16", "as asked for"),
    ],
)
def test_dtype_is_the_fast_one_unless_asked_for_or_begun_otherwise(
    choice: str,
    device: torch.device,
    unit: str | None,
    begun: str | None,
    expected: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(monkeypatch, unit)
    dtype, why = choose_dtype(choice, device, begun)
    assert dtype == expected
    assert re.match(reason, why)
    assert ("slow" in why) == ("slow" in reason)


def test_quantization_is_a_config_of_transformers() -> None:
    four = AutoQuantizationConfig.from_dict(quantization("nf4", torch.float16))
    assert (four.load_in_4bit, four.bnb_4bit_quant_type) == (True, "nf4")
    assert four.bnb_4bit_compute_dtype == torch.float16
    eight = AutoQuantizationConfig.from_dict(quantization("int8"))
    assert eight.load_in_8bit
    for config in (four, eight):
        assert config.llm_int8_skip_modules is None  # as transformers chooses: the head is one
    given = '{"quant_method": "gptq", "bits": 4}'
    assert quantization(given) == {"quant_method": "gptq", "bits": 4}


def test_quantized_head_is_rejected() -> None:
    model = build()
    model.lm_head.weight = torch.nn.Parameter(
        torch.zeros(61, 32, dtype=torch.int8), requires_grad=False
    )
    with pytest.raises(ValueError, match=r"quantized .*torch\.int8"):
        add_token_losses(model)


def test_a_quantized_teacher_stays_where_it_was_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    model.is_quantized = True
    monkeypatch.setattr(model, "to", lambda device: pytest.fail("moved"))
    OnlineTeacher([model], torch.device("cpu"))
