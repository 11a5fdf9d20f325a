"""Loading a pair of models, and the pairs that are refused."""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
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
    T5Config,
)
from transformers.utils import is_flash_attn_2_available

from vocagnolm.models.source import (
    NO_LIMIT,
    ModelSource,
    check_distinct,
    check_vocabulary,
    context_length,
    tensor_parallel_size,
)
from vocagnolm.run import memory

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


def edit_weights(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def error_of(call: Callable[..., Any], *args: Any) -> str:
    with pytest.raises(ValueError, match=r"\S") as caught:
        call(*args)
    message = str(caught.value)
    assert "\n" not in message
    return message


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


@pytest.mark.parametrize("role", ["student", "teacher"])
def test_missing_weights_are_rejected_in_one_line(
    copied: Path, role: Any, caplog: pytest.LogCaptureFixture
) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    edit_weights(copied, lambda weights: weights.pop(name))
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addHandler(caplog.handler)  # its own logs do not reach the root
    message = error_of(ModelSource(str(copied), role).load, torch.float32)
    logger.removeHandler(caplog.handler)
    assert message == (
        f"--{role} {copied}: 1 weights of LlamaForCausalLM are not in the checkpoint, or have "
        f"another shape there ({name}): they would be random; use the complete checkpoint"
    )
    assert caplog.messages == []


def test_load_refuses_when_a_weight_has_another_shape(copied: Path) -> None:
    name = "model.norm.weight"
    edit_weights(copied, lambda weights: weights.update({name: torch.zeros(5)}))
    assert name in error_of(ModelSource(str(copied), "student").load, torch.float32)


def test_load_accepts_when_tied_weights_are_stored_once(
    tiny_llama: Callable[..., Any], tmp_path: Path
) -> None:
    tiny_llama(VOCABULARY, tie_word_embeddings=True).save_pretrained(tmp_path)
    model: Any = ModelSource(str(tmp_path), "student").load(torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:5000]), "deserializing header"),
        (lambda path: path.write_bytes(b""), "deserializing header|[Hh]eader"),
        (Path.unlink, "no file named model.safetensors"),
    ],
)
def test_unreadable_weights_name_role_and_model(
    copied: Path, damage: Callable[[Path], Any], reason: str
) -> None:
    damage(copied / "model.safetensors")
    message = error_of(ModelSource(str(copied), "teacher").load, torch.float32)
    assert message.startswith(f"--teacher {copied} cannot be loaded: ")
    assert re.search(reason, message)


class _Evil:
    """Makes a directory where it is unpickled."""

    def __init__(self, canary: Path):
        self._canary = canary

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._canary),)


PICKLES: dict[str, Callable[[Any], bytes]] = {
    "bare": lambda evil: pickle.dumps({"lm_head.weight": evil}),
    "of torch": lambda evil: torch_bytes({"lm_head.weight": evil}),
    "of old torch": lambda evil: torch_bytes({"lm_head.weight": evil}, False),
    "no weights": lambda _: torch_bytes(["lm_head.weight"]),
    "a number": lambda _: torch_bytes({"lm_head.weight": 3}),
    "cut off": lambda _: torch_bytes({"lm_head.weight": torch.zeros(99)})[:200],
    "empty": lambda _: b"",
    "text": lambda _: b"version https://git-lfs.github.com/spec/v1",
}


REFUSED_PICKLES = {"bare", "of torch", "of old torch", "text"}


def test_weights_that_may_not_be_read_are_named(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path.name != "model.safetensors")
    said = error_of(ModelSource(str(copied), "student").check_weights)
    assert said == f"--student {copied}: model.safetensors may not be read"


def torch_bytes(content: object, new: bool = True) -> bytes:
    file = io.BytesIO()
    torch.save(content, file, _use_new_zipfile_serialization=new)
    return file.getvalue()


@pytest.mark.parametrize("name", PICKLES)
def test_pickled_weights_are_refused_and_never_run(copied: Path, tmp_path: Path, name: str) -> None:
    (copied / "model.safetensors").unlink()
    canary = tmp_path / "canary"
    (copied / "pytorch_model.bin").write_bytes(PICKLES[name](_Evil(canary)))
    message = error_of(ModelSource(str(copied), "student").load, torch.float32)
    assert message.startswith(f"--student {copied}")
    assert not canary.exists()
    assert ("get its weights as safetensors" in message) == (name in REFUSED_PICKLES)
    assert "weights_only" not in message


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "Unrecognized model"),
        ("{oops", "not a valid JSON file"),
        ("{}", "Unrecognized model"),
        ('{"model_type": "no_such_model"}', "no_such_model"),
    ],
)
def test_missing_config_names_role_and_model(
    tmp_path: Path, content: str | None, reason: str
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    message = error_of(ModelSource(str(tmp_path), "student").config)
    assert message.startswith(f"--student {tmp_path} cannot be loaded: ")
    assert reason in message


def test_model_that_is_not_causal_is_rejected(tmp_path: Path) -> None:
    T5Config(d_model=8).save_pretrained(tmp_path)
    assert error_of(ModelSource(str(tmp_path), "teacher").config) == (
        f"--teacher {tmp_path} is a t5 model, which is no causal language model: give one that "
        "predicts the next token"
    )


def test_name_that_is_nowhere_is_rejected() -> None:
    source = ModelSource("no-such/model", "teacher")
    for call, args in ((source.config, ()), (source.load, (torch.float32,))):
        assert error_of(call, *args).startswith("--teacher no-such/model cannot be loaded: ")


# Facts of a configuration


def parameters_of(source: ModelSource, config: Any) -> int:
    return memory.sizes_of(source.skeleton(config)).parameters


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_skeleton_has_the_parameters_of_the_real_model(config: Any) -> None:
    model = AutoModelForCausalLM.from_config(config)
    counted = parameters_of(ModelSource("any", "student"), config)
    assert counted == sum(p.numel() for p in model.parameters())


def test_skeleton_makes_no_weights() -> None:
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=11008, num_hidden_layers=2, vocab_size=32000
    )
    # 2 embeddings, 2 layers of 4 attention and 3 MLP matrices and 2 norms, a last norm
    expected = 2 * 32000 * 4096 + 2 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096) + 4096
    assert parameters_of(ModelSource("any", "teacher"), config) == expected


@pytest.mark.skipif(is_flash_attn_2_available(), reason="flash_attn is here")
def test_skeleton_rejects_attention_not_installed(
    saved: Path,
) -> None:
    source = ModelSource(str(saved), "teacher", attn_implementation="flash_attention_2")
    for call, argument in (
        (source.skeleton, source.config()),
        (source.load, torch.float32),
    ):
        message = error_of(call, argument)
        assert message.startswith(f"--teacher {saved} cannot be loaded: ")
        assert "FlashAttention2" in message


def test_skeleton_rejects_unknown_attention(saved: Path) -> None:
    source = ModelSource(str(saved), "student", attn_implementation="flash")
    for call, argument in (
        (source.skeleton, source.config()),
        (source.load, torch.float32),
    ):
        message = error_of(call, argument)
        assert message.startswith(f"--student {saved} cannot be loaded: ")
        assert 'attn_implementation="flash"' in message


def test_skeleton_uses_the_models_attention(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    from_config = AutoModelForCausalLM.from_config

    def spy(*args: Any, **kwargs: Any) -> Any:
        made.append(from_config(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(AutoModelForCausalLM, "from_config", spy)
    source = ModelSource(str(saved), "student", "main", attn_implementation="eager")
    assert parameters_of(source, LlamaConfig(**SMALL)) > 0
    assert made[0].config._attn_implementation == "eager"
    assert {parameter.device.type for parameter in made[0].parameters()} == {"meta"}


REMOTE_CODE = """
import torch
from transformers import PreTrainedConfig, PreTrainedModel


class OwnConfig(PreTrainedConfig):
    model_type = "own_of_the_tests"


class OwnModel(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.layer = torch.nn.Linear(3, 4)
        self.post_init()
"""


def test_skeleton_asks_nothing_when_remote_code_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it prompts"))
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    content = {"model_type": "own_of_the_tests", "auto_map": auto_map}
    (tmp_path / "config.json").write_text(json.dumps(content))
    (tmp_path / "own.py").write_text(REMOTE_CODE)
    source = ModelSource(str(tmp_path), "student", trust_remote_code=True)
    assert parameters_of(source, source.config()) == 3 * 4 + 4
    refused = error_of(ModelSource(str(tmp_path), "student").config)
    assert refused.startswith(f"--student {tmp_path} cannot be loaded: ")


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


@pytest.mark.parametrize(
    ("heads", "groups", "gpus", "expected"),
    [
        (28, 4, 8, 4),  # Qwen2.5-Math-7B: 7 of 8 would leave one idle
        (32, 8, 8, 8),
        (32, 4, 8, 8),  # groups are repeated
        (24, 8, 6, 2),  # 3 and 6 cannot share 8 groups
        (28, 4, 0, 1),
        (28, 4, 1, 1),
    ],
)
def test_gpus_share_heads_evenly(heads: int, groups: int, gpus: int, expected: int) -> None:
    config = LlamaConfig(
        num_attention_heads=heads, num_key_value_heads=groups, hidden_size=8 * heads
    )
    assert tensor_parallel_size(config, gpus) == expected


def test_one_gpu_holds_a_model_without_heads() -> None:
    assert tensor_parallel_size(MambaConfig(), 8) == 1


# Pairs


def test_check_vocabulary_refuses_when_ids_exceed_the_embeddings(
    tokenizers_by_family: Tokenizers, tokenizer_dirs: dict[str, Path]
) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_dirs["nfc_digits"])
    largest = max(tokenizer.get_vocab().values())
    assert error_of(
        check_vocabulary, LlamaConfig(**SMALL | {"vocab_size": largest}), tokenizer, "teacher"
    ) == (
        f"teacher tokenizer {tokenizer_dirs['nfc_digits']} has ids up to {largest}, but the "
        f"teacher has embeddings for {largest}: it belongs to another model; give the right one "
        "with --teacher_tokenizer"
    )
    for rows in (largest + 1, largest + 64):  # exact, and padded
        check_vocabulary(LlamaConfig(**SMALL | {"vocab_size": rows}), tokenizer, "teacher")


def test_check_vocabulary_counts_added_tokens(
    tokenizer_dirs: dict[str, Path],
) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_dirs["metaspace"])
    config = LlamaConfig(**SMALL | {"vocab_size": len(tokenizer)})
    check_vocabulary(config, tokenizer, "student")
    tokenizer.add_tokens(["<one-more>"])
    assert "has ids up to 600" in error_of(check_vocabulary, config, tokenizer, "student")


def test_one_model_with_two_tokenizers_is_rejected(
    tiny_llama: Callable[..., Any], tokenizers_by_family: Tokenizers
) -> None:
    ours, theirs = tokenizers_by_family["metaspace"], tokenizers_by_family["trimmed"]
    student, same = tiny_llama(VOCABULARY), tiny_llama(VOCABULARY)
    message = error_of(check_distinct, student, same, ours, theirs)
    assert "are the same model, but their tokenizers differ" in message
    assert "--student_tokenizer, --teacher_tokenizer" in message
    check_distinct(student, same, ours, ours)
    check_distinct(student, tiny_llama(VOCABULARY, seed=1), ours, theirs)
    check_distinct(student, tiny_llama(VOCABULARY + 1), ours, theirs)


def test_copy_in_another_dtype_is_rejected(
    tiny_llama: Callable[..., Any], tokenizers_by_family: Tokenizers
) -> None:
    ours, theirs = tokenizers_by_family["metaspace"], tokenizers_by_family["trimmed"]
    student, same = tiny_llama(VOCABULARY), tiny_llama(VOCABULARY).to(torch.bfloat16)
    message = error_of(check_distinct, student, same, ours, theirs)
    assert "are the same model, but their tokenizers differ" in message
