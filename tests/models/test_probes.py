"""Probes of a loaded model: packed documents, and where they run."""

from contextlib import nullcontext

import pytest
import torch
import transformers
from architectures import build
from torch.nn import functional as F

from vocagnolm.models.probes import check_packing
from vocagnolm.token_loss import add_token_losses


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        ("llama", "sdpa"),
        ("llama", "eager"),
        ("qwen2", "sdpa"),
        ("gemma2", "eager"),
        ("gpt2", "sdpa"),
        ("llama", "torch_varlen"),
        ("gpt_neox", "torch_varlen"),
    ],
)
def test_check_packing_accepts_models_that_isolate_documents(name, attention):
    model = build(name)
    model.set_attn_implementation(attention)
    check_packing(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check_packing(model)
    check_packing(model.bfloat16())


def test_check_packing_rejects_an_attention_that_crosses_documents():
    def crossing(module, query, key, value, attention_mask, scaling=None, **kwargs):
        key, value = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (key, value))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
        return out.transpose(1, 2).contiguous(), None

    transformers.AttentionInterface.register("crossing", crossing)
    model = build()
    model.set_attn_implementation("crossing")
    add_token_losses(model)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM with .* crossing .*sdpa or eager"):
        check_packing(model)
    with pytest.raises(ValueError, match="attend_across_documents"):
        check_packing(model.bfloat16())


def ignore_positions(model, monkeypatch):
    own = model.model.forward
    monkeypatch.setattr(model.model, "forward", lambda *a, position_ids=None, **k: own(*a, **k))


def test_check_packing_rejects_models_that_ignore_position_ids(monkeypatch):
    model, harmless = build(), build(spread=1e-4)
    for each in (model, harmless):
        ignore_positions(each, monkeypatch)
    with pytest.raises(ValueError, match="LlamaForCausalLM"):
        check_packing(model)
    check_packing(harmless)


@pytest.mark.parametrize("fails", [False, True])
def test_probes_run_on_the_models_future_device(fails, monkeypatch):
    """Without a second device, count the moves and what runs between them."""
    model, places, ran_at = build(), ["cpu"], []
    monkeypatch.setattr(model, "to", lambda device: places.append(device.type))
    model.set_attn_implementation("torch_varlen")
    own = model.model.forward

    def forward(*args, **kwargs):
        ran_at.append(places[-1])
        if fails:
            raise ValueError("as it is")
        return own(*args, **kwargs)

    monkeypatch.setattr(model.model, "forward", forward)
    device = torch.device("cuda", 0)
    for check in (add_token_losses, check_packing):
        places[:], ran_at[:] = ["cpu"], []
        with pytest.raises(ValueError, match="as it is") if fails else nullcontext():
            check(model, device)
        assert set(ran_at) == {"cuda"}
        assert ran_at.count("cuda") >= 1
        assert places == ["cpu", "cuda", "cpu"]


def test_check_packing_accepts_rounding_by_batch(monkeypatch):
    """Products of activations in int8 and float8 round so, whatever the model's dtype."""

    def rounding(module, args):
        scale = args[0].abs().max() / 127
        return ((args[0] / scale).round() * scale,)

    model = build(num_hidden_layers=8)
    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_pre_hook(rounding)
    with pytest.raises(ValueError, match="see each other"):
        check_packing(model)
    model.is_quantized = True
    check_packing(model)
    ignore_positions(model, monkeypatch)
    with pytest.raises(ValueError, match="see each other"):
        check_packing(model)


# Small enough for Mamba's slow path with its default chunks of 256 tokens.
MAMBA = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16}


@pytest.mark.parametrize(
    ("name", "options", "attention"),
    [
        ("Bloom", {"n_layer": 2, "n_head": 4}, "eager"),
        ("GptOss", {}, "eager"),
        ("Qwen3Next", {}, "sdpa"),
        ("FalconH1", MAMBA, "sdpa"),
        ("Jamba", {}, "sdpa"),
        ("RecurrentGemma", {}, "eager"),
        ("OPT", {}, "sdpa"),
    ],
)
def test_check_packing_rejects_kinds_of_models_that_let_documents_meet(name, options, attention):
    model = build(name, **options)
    model.set_attn_implementation(attention)
    with pytest.raises(ValueError, match="attend_across_documents"):
        check_packing(model)
