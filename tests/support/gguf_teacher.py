"""Write a Llama with a byte-level tokenizer as a GGUF file, which llama.cpp reads.

    python tests/support/gguf_teacher.py vocagnolm/assets/demo_teacher teacher.gguf

Needs the package `gguf`. Weights are float16, norms float32. It puts no start token of its own
before a text. The pre-tokenizer is that of the demo's teacher: single digits, then GPT-2's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from transformers import AutoModelForCausalLM, AutoTokenizer

_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def main(directory: Path, path: Path) -> None:
    """Write the file."""
    model = AutoModelForCausalLM.from_pretrained(directory)
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer, directory)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        weight = tensor.float().numpy()
        for end, count in heads.items():
            if name.endswith(f"{end}.weight"):
                weight = _interleaved(weight, count)
        dtype = np.float32 if weight.ndim == 1 else np.float16
        if (renamed := _renamed(name)) is not None:
            writer.add_tensor(renamed, weight.astype(dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _renamed(name: str) -> str | None:
    name = name.removesuffix(".weight").removeprefix("model.")
    if name.startswith("layers."):
        _, number, part = name.split(".", 2)
        return f"blk.{number}.{_PARTS[part]}.weight"
    # Tied weights are written once.
    whole = {"embed_tokens": "token_embd", "norm": "output_norm"}
    return f"{whole[name]}.weight" if name in whole else None


def _interleaved(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Order a head's rows as llama.cpp rotates them: pairs side by side, not half a head apart."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def _add_tokenizer(writer: gguf.GGUFWriter, directory: Path) -> None:
    content = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = AutoTokenizer.from_pretrained(directory).get_vocab()
    special = {token["content"] for token in content["added_tokens"]}
    kinds = gguf.TokenType
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    merges = content["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([kinds.CONTROL if t in special else kinds.NORMAL for t in tokens])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
