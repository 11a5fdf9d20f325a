"""Throughput against FLOPs that torch counts, tokens counted by hand, and a clock that ticks."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM
from world import make_trainer

from vocagnolm.conventions import IGNORED_LABEL
from vocagnolm.models.cost import model_work
from vocagnolm.packing import Blocks
from vocagnolm.token_loss import add_token_losses
from vocagnolm.training import throughput
from vocagnolm.training.throughput import Throughput, peak_tflops

SIZES: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CONFIGS = {
    "llama": AutoConfig.for_model("llama", **SIZES),
    "llama tied": AutoConfig.for_model("llama", **SIZES, tie_word_embeddings=True),
    "llama wide heads": AutoConfig.for_model("llama", **SIZES, head_dim=32),
    "qwen2": AutoConfig.for_model("qwen2", **SIZES),
    "gpt neox": AutoConfig.for_model("gpt_neox", **SIZES),
    "gpt2": AutoConfig.for_model(
        "gpt2", vocab_size=120, n_embd=64, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0
    ),
}
HIDDEN_LAYERS = {
    "experts": AutoConfig.for_model("mixtral", **SIZES, num_local_experts=2),
    "no decoder": AutoConfig.for_model("mamba", vocab_size=120, hidden_size=32),
}


def build(config: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


@pytest.mark.parametrize("name", [*CONFIGS, "frozen weights", "adapters"])
def test_work_equals_torchs_count(name: str) -> None:
    model = build(CONFIGS.get(name, CONFIGS["llama"]))
    if name == "frozen weights":
        for weight, parameter in model.named_parameters():
            parameter.requires_grad_("mlp.down_proj" in weight or "embed" in weight)
    if name == "adapters":
        peft = pytest.importorskip("peft")
        config = AutoConfig.for_model("llama", **SIZES | {"num_hidden_layers": 10})
        settings = peft.LoraConfig(r=8, target_modules="all-linear")
        model = peft.get_peft_model(build(config), settings)
    ids, keys = torch.randint(120, (2, 48)), 2 * 48**2  # eager attention computes what it masks
    with FlopCounterMode(display=False) as forward:
        logits = model(input_ids=ids, use_cache=False).logits
    with FlopCounterMode(display=False) as backward:
        logits.square().sum().backward()
    counts = [forward.get_total_flops(), forward.get_total_flops() + backward.get_total_flops()]
    work = model_work(model)
    expected = [work.forward_flops(96, keys, 96), work.training_flops(96, keys, 96)]
    assert counts == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float8_e4m3fn])
def test_work_is_rejected_when_weights_are_in_buffers(dtype: torch.dtype) -> None:
    """As with GPTQ, AWQ and others."""
    model = build(CONFIGS["llama"])
    layer = torch.nn.Module()
    layer.register_buffer("qweight", torch.zeros(8, 160).to(dtype))
    model.model.layers[1].mlp.up_proj = layer
    with pytest.raises(ValueError, match="cannot be counted"):
        model_work(model)
    layer = torch.nn.Module()
    layer.register_buffer("mask", torch.ones(8, 8, dtype=torch.bool))
    layer.register_buffer("table", torch.ones(8, 8))
    layer.register_buffer("order", torch.ones(8, dtype=torch.int32))
    model.model.layers[1].mlp.up_proj = layer
    model_work(model)


def test_work_counts_the_heads_backward_for_used_tokens() -> None:
    """Token losses compute the used logits once more, which no MFU counts."""
    model = add_token_losses(build(CONFIGS["llama"]))
    ids = torch.randint(120, (2, 48))
    with FlopCounterMode(display=False) as found:
        losses = model(input_ids=ids, labels=ids, token_losses=True, weighted_tokens=30)
        losses[:, 1:16].sum().backward()
    work = model_work(model)
    expected = work.training_flops(96, 2 * 48**2, 30) + 2 * work.head * 30
    assert found.get_total_flops() == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("name", HIDDEN_LAYERS)
def test_work_is_rejected_when_linear_layers_hide_it(name: str) -> None:
    with torch.device("meta"), pytest.raises(ValueError, match="cannot be counted"):
        model_work(AutoModelForCausalLM.from_config(HIDDEN_LAYERS[name]))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
    ],
)
def test_peak_is_looked_up_by_chip(name: str, expected: float | None) -> None:
    assert peak_tflops(name) == expected


def count_by_hand(batches: list[dict[str, Any]], prefix: str = "") -> tuple[int, int]:
    """Count tokens and keys: a token at place p, from 0, is predicted from the p before it."""
    tokens = keys = 0
    for batch in batches:
        labels = batch[f"{prefix}labels"].flatten().tolist()
        positions = batch[f"{prefix}position_ids"].flatten().tolist()
        at = 0
        for label, position in zip(labels, positions, strict=True):
            at = 0 if position == 0 else at + 1
            if label != IGNORED_LABEL:
                tokens, keys = tokens + 1, keys + at
    return tokens, keys


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reading of the clock is a second after the last."""
    seconds = itertools.count()
    clock = SimpleNamespace(monotonic=time.monotonic, perf_counter=lambda: float(next(seconds)))
    monkeypatch.setattr(throughput, "time", clock)


def flops_by_hand(trainer: Any, pair: tuple[Any, Any], batches: list[dict[str, Any]]) -> float:
    """The FLOPs of student and teacher for these micro-batches."""
    student, teacher = map(model_work, pair)
    used = sum(map(trainer.token_objective.weighted_tokens, batches))
    flops = student.training_flops(*count_by_hand(batches), used)
    tokens, keys = count_by_hand(batches, "teacher_")
    # The head is a part of the distance of `uld`, and not of the teacher's pass.
    reads_head = trainer.token_objective.method.distance is None
    return flops + teacher.forward_flops(tokens, keys, tokens if reads_head else 0)


@pytest.mark.usefixtures("ticks")
@pytest.mark.parametrize("method", ["vocagnolm", "uld"])
def test_report_equals_a_hand_count(
    method: str, blocks: Blocks, pair: tuple[Any, Any], tmp_path: Path
) -> None:
    training: dict[str, Any] = {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 2}
    # A save between two logs must not count anything twice.
    training |= {"max_steps": 4, "logging_steps": 2, "save_strategy": "steps", "save_steps": 1}
    training |= {"device_peak_tflops": 1e-3, "options": {"method": method}}
    trainer = make_trainer(tmp_path, blocks, *pair, **training)
    batches, step = [], trainer.training_step

    def training_step(model: Any, inputs: Any, *args: Any) -> Any:
        batches.append(inputs)
        return step(model, inputs, *args)

    trainer.training_step = training_step
    trainer.train()
    assert len(batches) == 12
    for report, logged in zip(trainer.state.log_history, (batches[:6], batches[6:]), strict=False):
        # The clock is read as the first step begins, and at the log.
        assert report["tokens_per_s"] == count_by_hand(logged)[0]
        assert report["mfu"] == pytest.approx(flops_by_hand(trainer, pair, logged) / 1e9)
        assert report["memory_resident_gib"] > 0.05
    assert trainer.throughput.read() == {}
    expected = flops_by_hand(trainer, pair, batches)
    assert trainer.state.total_flos == pytest.approx(expected, rel=1e-9)


@pytest.mark.usefixtures("ticks")
def test_report_covers_all_processes() -> None:
    model = build(CONFIGS["llama"])
    labels = torch.tensor([[-100, 5, 6, -100, 7, -100, -100]])  # two documents, and padding
    counted = model_work(model).training_flops(3, 1 + 2 + 4, 2)
    two_processes: Any = SimpleNamespace(
        device=torch.device("cpu"), gather=lambda row: row.repeat(2, 1)
    )
    measured = Throughput(two_processes, [], 1e-6)
    measured.on_train_begin(model=model)
    measured.on_step_begin()
    measured.count(0, torch.arange(7)[None], labels, head_tokens=2)
    assert measured.new_flops() == counted
    report = measured.read()
    assert report["tokens_per_s"] == 3 * 2
    assert report["mfu"] == pytest.approx(counted / 1e6)
