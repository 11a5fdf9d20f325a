"""Models and tokenizers from GGUF files: what is read, trained and saved is the ordinary model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import build
from transformers import AutoModelForCausalLM, AutoTokenizer

from vocagnolm.models.load import ModelSource, revision_of
from vocagnolm.shell.hub import check_name, split_name
from vocagnolm.tokenizer import load_tokenizer

TEXT = "If 3x + 4 = 19, then x = 5. 😀 數學\n\nDone."


def write_gguf(path: Path, model: Any, tokenizer: Any) -> None:
    """Write a Qwen2 and its byte-level tokenizer as llama.cpp does, in float32."""
    gguf = pytest.importorskip("gguf")
    config = model.config
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = tokenizer.get_vocab()
    special_ids = set(tokenizer.all_special_ids)
    token_types = []
    for token_id in sorted(vocabulary.values()):
        kind = gguf.TokenType.CONTROL if token_id in special_ids else gguf.TokenType.NORMAL
        token_types.append(kind)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(sorted(vocabulary, key=vocabulary.__getitem__))
    writer.add_token_types(token_types)
    writer.add_token_merges([" ".join(pair) for pair in backend["model"]["merges"]])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def model(teacher_tokenizer: Any) -> Any:
    return build("qwen2", vocab_size=len(teacher_tokenizer))


@pytest.fixture(scope="module")
def gguf_file(model: Any, teacher_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, model, teacher_tokenizer)
    return path


def test_a_name_is_a_file_of_a_directory_or_of_a_repository(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    assert split_name(str(path)) == (str(tmp_path), "model.gguf")
    assert split_name("model.gguf") == (".", "model.gguf")
    assert split_name("org/name/model.gguf") == ("org/name", "model.gguf")
    assert split_name("org/name/Q4/model.gguf") == ("org/name", "Q4/model.gguf")
    assert split_name("org/name") == ("org/name", None)


def test_a_file_that_is_not_there_is_rejected(tmp_path: Path) -> None:
    for name in (str(tmp_path / "model.gguf"), "model.gguf", "a/model.gguf"):
        with pytest.raises(ValueError, match="no such file"):
            check_name("--teacher", name)


def test_what_is_loaded_and_saved_is_the_ordinary_model(
    gguf_file: Path, model: Any, tmp_path: Path
) -> None:
    source = ModelSource(str(gguf_file), "student")
    loaded: Any = source.load(torch.float32)
    # Adapters name the model that they belong to.
    assert loaded.name_or_path == str(gguf_file)
    loaded.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    expected = model.state_dict()
    for found in (loaded, AutoModelForCausalLM.from_pretrained(tmp_path)):
        assert found.state_dict().keys() == expected.keys()
        for name, weight in found.state_dict().items():
            assert torch.equal(weight, expected[name])
    skeleton = source.skeleton(source.config())
    assert sum(p.numel() for p in skeleton.parameters()) == model.num_parameters()
    ids = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits)


def test_tokenizer_is_the_one_that_was_written(
    gguf_file: Path, teacher_tokenizer: Any, tmp_path: Path
) -> None:
    loaded = load_tokenizer(str(gguf_file), "teacher")
    expected = teacher_tokenizer(TEXT, add_special_tokens=False).input_ids
    assert loaded(TEXT, add_special_tokens=False).input_ids == expected
    loaded.save_pretrained(tmp_path)
    saved = AutoTokenizer.from_pretrained(tmp_path)
    assert saved(TEXT, add_special_tokens=False).input_ids == expected


def test_revision_changes_with_the_file(gguf_file: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(gguf_file.read_bytes())
    assert revision_of(str(copy), None) == revision_of(str(gguf_file), None)
    with copy.open("ab") as file:
        file.write(b"1")
    assert revision_of(str(copy), None) != revision_of(str(gguf_file), None)


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.9])
def test_a_file_that_is_cut_off_is_one_line(gguf_file: Path, tmp_path: Path, share: float) -> None:
    content = gguf_file.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(content[: int(share * len(content))])
    source = ModelSource(str(cut), "student")
    with pytest.raises(ValueError, match=r"student .*cut\.gguf"):
        source.load(torch.float32)
    if share < 0.1:
        with pytest.raises(ValueError, match=r"student .*cut\.gguf"):
            source.config()
