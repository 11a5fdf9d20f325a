"""The plan of a run: what it reads, and its memory against hand counts.

tests/cuda compares the memory with what steps take, in one process or sharded.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
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
from vocagnolm.run.plan import device_memory, fill_device, student_layout
from vocagnolm.training import packed
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


# Of 4 bytes for all weights and 12 for the trained; gradients to send, weights in 16 bits, gathered
# weights, whole gradients; what 2 layers keep, 28 x 10 + 18 x 30 each in float32; a tile of 7
# logits, the head's gradient and 3 rows of 10.
PARTS = (STUDENT, "gradients to send", "weights in 16 bits", "gathered weights", "whole gradients")
STUDENTS: list[tuple[Layout, list[float]]] = [
    (Layout(), [5200, 0, 0, 0, 0, 2 * 820, 4 * (7 + 70 + 30)]),
    # With adapters and "mixed" a layer keeps 22 x 10 + 9 x 30. The head's gradient is there twice,
    # and in 16 bits.
    (
        Layout(2, precision="mixed", accumulates=True),
        [5200, 400, 1200, 0, 0, 2 * 490, 7 * 6 + 70 * (8 + 2) + 120],
    ),
    # A mask of 4 columns in 16 bits, and keys and values of 5 more numbers, twice.
    (Layout(precision="mixed", mask=4), [5200, 0, 1200, 0, 0, 2 * (490 + 8 + 20), 862]),
    # The inputs of 2 layers, and a layer made again.
    (Layout(precision="mixed", recomputes=True), [5200, 0, 0, 0, 0, 2 * 40 + 490, 862]),
    (
        Layout(8, 4, "16 bits", accumulates=True),
        [1300, 0, 0, 2000, 400, 2 * 450, 7 * 6 + 70 * 8 + 80],
    ),
    (
        Layout(4, 4, "16 bits", recomputes=True, reshards=True),
        [1300, 0, 0, 1800, 0, 2 * 20 + 450, 682],
    ),
    (Layout(4, 4), [1300, 0, 0, 4000, 0, 2 * 820, 428]),
]


@pytest.mark.parametrize(("layout", "expected"), STUDENTS)
def test_student_takes_what_a_hand_count_gives(layout: Layout, expected: list[float]) -> None:
    found = student_memory(SIZES, layout, tokens=1)
    assert [found.pop(name, 0) for name in (*PARTS, "activations", HEAD)] == expected
    assert not found
    assert student_memory(SIZES, layout, tokens=7)["activations"] == 7 * expected[-2]


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


def plan(world: World, *options: str, **changes: Sequence[str]) -> tuple[Any, dict[str, float]]:
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
    _, parts = plan(world, teacher=[str(world.teacher)] * 3)
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
    whole, linear, kept = 4 * teacher.parameters, teacher.linear, micro_batch * (28 * 32 + 18 * 64)
    for option, part, expected in (
        ("teacher_dtype=bfloat16", "teacher", whole / 2),
        ("teacher_quantization=nf4", "teacher", whole - 55 / 16 * linear),
        ("teacher_quantization=int8", "teacher", whole - 3 * linear),
        ("teacher_sharding=node", "teacher", whole / 8),
        ("per_device_train_batch_size=2", "activations", 2 * kept / 4),
        ("gradient_checkpointing=true", "activations", micro_batch * 2 * 4 * 32 + kept),
        ("bf16=true", "activations", micro_batch * 2 * (28 * 32 + 9 * 64)),
    ):
        assert plan(world, f"--{option}")[1][part] == expected, option
    (_, teachers), found = plan(world, teacher=[str(world.teacher), str(world.student)])
    assert found["teacher"] == 4 * sum(sizes.parameters for sizes in teachers)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert plan(world, "--teacher_sharding=node")[1]["teacher"] == 2 * teacher.parameters


@pytest.mark.parametrize(
    ("options", "room", "expected"),
    [
        ([], 16, (16, 1)),
        ([], 11, (8, 2)),
        ([], 0, (1, 16)),
        (["--per_device_train_batch_size=2"], 16, (2, 8)),
        (["--gradient_accumulation_steps=4"], 16, (4, 4)),
        # Tokens compete within a micro-batch, so the device must not choose it.
        (["--unmapped=mean"], 16, (8, 2)),
    ],
)
def test_micro_batches_fill_a_device(
    options: list[str], room: int, expected: tuple[int, int], world: World
) -> None:
    """`room` is the number of sequences for which a device has memory."""
    argv = world.argv("plan", use_cpu="True", global_batch_tokens="1024")
    job = parser.parse([*argv, *options, "--dry_run"])
    models = read_models(job.model, job.args, job.args.device)
    found = job.args.per_device_train_batch_size, job.args.gradient_accumulation_steps
    job.args.per_device_train_batch_size = room
    job.args.gradient_accumulation_steps = 1 if room >= 16 else 2
    needed = sum(device_memory(job, models).values())
    job.args.per_device_train_batch_size, job.args.gradient_accumulation_steps = found
    fill_device(job, models, int(needed / 0.9) + 1)
    found = job.args.per_device_train_batch_size, job.args.gradient_accumulation_steps
    assert found == expected


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
    run.is_sharded = True
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


def plan_of(capfd: pytest.CaptureFixture[str], argv: list[str]) -> dict[str, str]:
    """The lines of a plan by their first word."""
    capfd.readouterr()
    assert parser.main([*argv, "--dry_run"]) == 0
    lines = capfd.readouterr().out.splitlines()
    return {line[:11].strip(): line[11:] for line in lines}


def test_plan_of_a_large_corpus_is_extrapolated(
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    steps = {"max_steps": "-1", "num_train_epochs": "3"}
    argv = world.argv(str(tmp_path / "out"), eval_fraction=None, use_cpu="True", **steps)
    whole = plan_of(capfd, argv)
    monkeypatch.setattr(packed, "_SMALL_DOCUMENTS", 20)
    monkeypatch.setattr(packed, "_SAMPLE_DOCUMENTS", 40)
    part = plan_of(capfd, argv)
    assert part["corpus"].startswith("pages.jsonl: ")
    assert " 40 documents, " in part["corpus"]
    assert part["steps"].endswith(" (from 40 of 60 documents)")
    counts = [int(plan["steps"].removeprefix("about ").split(",")[0]) for plan in (whole, part)]
    assert counts[1] == pytest.approx(counts[0], rel=0.2)
    for word in ("student", "teacher", "method", "batch", "memory", "output"):
        assert part[word] == whole[word]
    # Where the sample is too small for a step, the corpus is read whole.
    monkeypatch.setattr(packed, "_SMALL_DOCUMENTS", 3)
    monkeypatch.setattr(packed, "_SAMPLE_DOCUMENTS", 3)
    assert parser.main([*argv, "--global_batch_tokens=640000", "--dry_run"]) == 2
    assert "needs 10,000" in capfd.readouterr().err


def test_step_suits_a_small_corpus(
    world: World, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Unless a step is asked for: then the error proposes one."""
    default: dict[str, Any] = {"global_batch_tokens": None, "max_steps": None}
    argv = world.argv(str(tmp_path / "a"), eval_fraction=None, use_cpu="True", **default)
    shown = plan_of(capfd, argv)
    sequences = int(shown["packed"].split()[0])
    steps, tokens = (int(shown["steps"].replace(",", "").split()[i]) for i in (0, 1))
    assert steps == sequences * 64 * steps // tokens
    assert 20 <= steps < 40
    # More epochs need no more steps each. A number of steps that is asked for lowers nothing.
    assert int(plan_of(capfd, [*argv, "--num_train_epochs=8"])["steps"].split(",")[0]) >= 20
    assert parser.main([*argv, "--global_batch_tokens=640000", "--dry_run"]) == 2
    proposed = re.search(r"global_batch_tokens (\d+), an epoch has (\d+)", capfd.readouterr().err)
    assert proposed
    obeyed = plan_of(capfd, [*argv, f"--global_batch_tokens={proposed[1]}"])
    assert int(obeyed["steps"].split(",")[0]) == int(proposed[2]) == steps
    # A run that has begun keeps its step, and one that has saved nothing chooses again.
    (tmp_path / "a").mkdir()
    (tmp_path / "a/run.json").write_text('{"global_batch_tokens": 640}')
    assert plan_of(capfd, argv)["batch"] == shown["batch"]
    assert "short epoch" in shown["batch"]
    (tmp_path / "a/checkpoint-1").mkdir()
    args = parser.parse(argv).args
    assert args.global_batch_tokens == 640
    assert "run began" in args.batch_arithmetic()


def test_plan_shows_which_files_are_read(
    world: World, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    shutil.copy(world.pages, corpus)
    (corpus / "NOTES.txt").write_text("notes")
    shown = plan_of(capfd, world.argv(str(tmp_path), dataset=str(corpus), use_cpu="True"))
    assert shown["files"] == "corpus: read 1 file of train; left out: NOTES.txt"


def test_plan_tells_the_weights_of_a_corpus(
    world: World, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert "weights" not in plan_of(capfd, world.argv(str(tmp_path), use_cpu="True"))
    rows = world.rows()[:8]
    weighted = tmp_path / "weighted.jsonl"
    weights = [1.0, -0.5, 3.0, 1.0] * 2
    weighted.write_text(
        "".join(
            json.dumps({"text": row["text"][:40], "weight": weight}) + "\n"
            for row, weight in zip(rows, weights, strict=True)
        )
    )
    options = {"global_batch_tokens": "64", "eval_fraction": None}
    # A corpus beside it has weights of 1, which are not counted.
    for corpora in ([str(weighted)], [str(weighted), str(world.pages)]):
        argv = world.argv(str(tmp_path / "out"), dataset=corpora, use_cpu="True", **options)
        assert plan_of(capfd, argv)["weights"] == (
            "column weight: 50.0% of 8 are not 1, smallest -0.5, largest 3, mean 1.125"
        )
