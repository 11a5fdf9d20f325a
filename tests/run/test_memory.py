"""The memory that a plan shows, against hand counts.

tests/cuda compares it with what steps take, in one process or sharded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from world import World

from vocagnolm.models.cost import (
    GATHERED,
    Layout,
    Precision,
    Sizes,
    sizes_of,
    student_memory,
    teacher_memory,
)
from vocagnolm.run import parser
from vocagnolm.run import plan as plan_module
from vocagnolm.run.plan import device_memory, student_layout
from vocagnolm.training.models import read_models

#     parameters, trained, linear, gathered, layers, hidden, inner, keys, words, trained_head
SIZES = Sizes(1000, 100, 600, 900, 2, 10, 30, 5, 7, 70)
STUDENT, HEAD, VARLEN = "student with AdamW", "output head", "torch_varlen"


def layers_keep(width: int, inner: int, dtype: torch.dtype, tokens: int = 64) -> float:
    """Bytes per token that autograd keeps for a layer's backward pass."""
    found = []
    for layers in (1, 2):
        heads = {"num_attention_heads": width // 64, "num_key_value_heads": width // 256}
        sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=8, **sizes, **heads)).to(dtype).train()
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        kept: dict[int, torch.Tensor] = {}

        def keep(tensor: torch.Tensor, kept: Any = kept, weights: Any = weights) -> torch.Tensor:
            place = tensor.untyped_storage().data_ptr()
            if place not in weights:
                kept[place] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model.model(torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
        found.append(sum(tensor.untyped_storage().nbytes() for tensor in kept.values()))
    return (found[1] - found[0]) / tokens


@pytest.mark.parametrize(
    ("precision", "dtype"), [("float32", torch.float32), ("16 bits", torch.bfloat16)]
)
def test_activations_are_what_autograd_keeps(precision: Precision, dtype: torch.dtype) -> None:
    measured = layers_keep(512, 1408, dtype)
    sizes = Sizes(0, 0, 0, 0, 1, hidden=512, inner=1408, keys=128, words=8, trained_head=0)
    planned = student_memory(sizes, Layout(precision=precision), tokens=1)["activations"]
    assert planned == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        # 4 bytes of all, 12 of the trained; 2 layers x (28 x 10 + 18 x 30)
        # With adapters and "mixed" a layer keeps 22 x 10 + 9 x 30
        # A tile of 7 logits, the head's gradient, 3 rows of 10: float32
        (Layout(), {STUDENT: 5200, "activations": 2 * 820, HEAD: 4 * (7 + 70 + 30)}),
        (
            Layout(devices=2, precision="mixed", accumulates=True),
            {
                STUDENT: 5200,
                "gradients to send": 400,
                "weights in 16 bits": 1200,
                "activations": 2 * 490,
                # 7 logits and their gradient, the head's twice and in 16 bits, 3 rows of 10
                HEAD: 7 * 6 + 70 * (8 + 2) + 120,
            },
        ),
        (  # a mask of 4 columns in 16 bits, and keys and values of 5 more numbers, twice
            Layout(precision="mixed", mask=4),
            {
                STUDENT: 5200,
                "weights in 16 bits": 1200,
                "activations": 2 * (490 + 8 + 20),
                HEAD: 862,
            },
        ),
        (  # the inputs of 2 layers, and a layer made again
            Layout(precision="mixed", recomputes=True),
            {STUDENT: 5200, "activations": 2 * 40 + 490, HEAD: 862},
        ),
        (
            Layout(devices=8, shards=4, precision="16 bits", accumulates=True),
            {
                STUDENT: 1300,
                "gathered weights": 2000,
                "whole gradients": 400,
                "activations": 2 * 450,
                HEAD: 7 * 6 + 70 * 8 + 80,
            },
        ),
        (
            Layout(devices=4, shards=4, precision="16 bits", recomputes=True, reshards=True),
            {STUDENT: 1300, "gathered weights": 1800, "activations": 2 * 20 + 450, HEAD: 682},
        ),
        (
            Layout(devices=4, shards=4),
            {STUDENT: 1300, "gathered weights": 4000, "activations": 2 * 820, HEAD: 428},
        ),
    ],
)
def test_student_takes_what_a_hand_count_gives(layout: Layout, expected: dict[str, float]) -> None:
    assert student_memory(SIZES, layout, tokens=1) == expected
    more = student_memory(SIZES, layout, tokens=7)["activations"]
    assert more == 7 * expected["activations"]


@pytest.mark.parametrize(
    ("width", "quantization", "devices", "expected"),
    [
        (4, None, 1, {"teacher": 4000}),
        (2, None, 1, {"teacher": 2000}),
        (2, "fp8", 1, {"teacher": 2 * 400 + 600}),
        (2, "int8", 1, {"teacher": 2 * 400 + 600}),
        (2, "nf4", 1, {"teacher": 2 * 400 + 600 * 36 / 64}),  # 32 bytes and a scale for 64 weights
        (2, "{}", 1, {"teacher (at full width)": 2000}),
        (2, None, 4, {"teacher": 500, "teacher's gathered weights": 2 * 900}),
    ],
)
def test_teacher_takes_what_a_hand_count_gives(
    width: int, quantization: str | None, devices: int, expected: dict[str, float]
) -> None:
    assert teacher_memory(SIZES, width, quantization, devices) == expected


@pytest.mark.parametrize("tied", [False, True])
def test_sizes_are_those_of_a_hand_count(tied: bool, tiny_llama: Callable[..., Any]) -> None:
    model = tiny_llama(100, tie_word_embeddings=tied, num_hidden_layers=3)
    model.model.embed_tokens.requires_grad_(False)
    linear = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 64
    outside = 100 * 32 * (1 if tied else 2) + 32
    total = 3 * (linear + 64) + outside
    gathered = 2 * (linear + 64) + outside
    head = 0 if tied else 3200
    expected = Sizes(total, total - 3200, 3 * linear, gathered, 3, 32, 64, 16, 100, head)
    assert sizes_of(model) == expected
    model.model.layers = model.model.layers[:1]
    assert sizes_of(model).gathered == sizes_of(model).parameters
    model._no_split_modules = None  # no blocks are known, so all is outside of them
    assert sizes_of(model).gathered == sizes_of(model).parameters


# Runs


def plan(world: World, *options: str, **changes: str | None) -> tuple[Any, dict[str, float]]:
    argv = [*world.argv("plan", use_cpu="True", **changes), *options, "--dry_run"]
    job = parser.parse(argv)
    models = read_models(job.model, job.args, job.args.device)
    sizes = models.student.sizes, [teacher.sizes for teacher in models.teachers]
    return sizes, device_memory(job, models)


def test_gathered_weights_of_teachers_are_not_there_together(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered = iter((5e9, 7e9, 6e9))
    monkeypatch.setattr(
        plan_module, "teacher_memory", lambda *_: {"teacher": 1.0, GATHERED: next(gathered)}
    )
    teachers = [str(world.teacher)] * 3
    _, parts = plan(world, "--teacher", *teachers, teacher=None)
    assert parts["teacher"] == 3
    assert parts[GATHERED] == 7e9 - parts["activations"] - parts[HEAD]


def test_plan_says_what_the_options_change(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    (student, (teacher,)), found = plan(world)
    micro_batch = 8 * 64
    assert found == {
        STUDENT: 16 * student.parameters,
        "activations": micro_batch * 2 * (28 * 32 + 18 * 64),
        "teacher": 4 * teacher.parameters,
        HEAD: 4 * (micro_batch * student.words + student.trained_head + 3 * micro_batch * 32),
    }
    for options, part, expected in (
        ("--teacher_dtype=bfloat16", "teacher", 2 * teacher.parameters),
        (
            "--teacher_quantization=nf4",
            "teacher",
            4 * teacher.parameters - 55 / 16 * teacher.linear,
        ),
        ("--teacher_quantization=int8", "teacher", 4 * teacher.parameters - 3 * teacher.linear),
        ("--teacher_sharding=node", "teacher", 4 * teacher.parameters / 8),
        ("--per_device_train_batch_size=2", "activations", found["activations"] / 4),
        (
            "--gradient_checkpointing=true",
            "activations",
            micro_batch * (2 * 4 * 32 + 28 * 32 + 18 * 64),
        ),
        ("--bf16=true", "activations", micro_batch * 2 * (28 * 32 + 9 * 64)),
    ):
        assert plan(world, options)[1][part] == expected, options
    two = plan(world, "--teacher", str(world.teacher), str(world.student), teacher=None)
    (_, teachers), found = two
    assert found["teacher"] == 4 * sum(sizes.parameters for sizes in teachers)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert plan(world, "--teacher_sharding=node")[1]["teacher"] == 2 * teacher.parameters


def test_layout_is_accelerates_when_the_launcher_says_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = parser.parse(world.argv("plan", use_cpu="True")).args
    assert student_layout(run) == Layout()
    monkeypatch.setattr(type(run), "world_size", 32)
    run.gradient_accumulation_steps = 4
    assert student_layout(run) == Layout(32, accumulates=True)
    run.bf16 = run.is_mixed = True
    assert student_layout(run, "sdpa").mask == run.max_length
    assert student_layout(run, VARLEN) == Layout(32, None, "mixed", accumulates=True)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    whole = Layout(32, 32, "16 bits", accumulates=True, reshards=True)
    assert student_layout(run, VARLEN) == whole
    assert student_layout(run).mask == run.max_length
    monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", "false")
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "4")
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "8")
    monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING", "true")
    expected = Layout(32, 8, "16 bits", recomputes=True, accumulates=True)
    assert student_layout(run, VARLEN) == expected
