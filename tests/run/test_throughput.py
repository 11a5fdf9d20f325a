"""Throughput against FLOPs that torch counts, tokens counted by hand, and a clock that ticks."""

from __future__ import annotations

import copy
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import launch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MambaConfig,
    MixtralConfig,
    Qwen2Config,
    TrainerCallback,
)
from world import make_blocks, make_trainer

from vocagnolm.conventions import IGNORED_LABEL
from vocagnolm.packing import Blocks
from vocagnolm.run import flops, overlap, throughput
from vocagnolm.run.flops import ModelWork, model_work, peak_tflops
from vocagnolm.run.throughput import SHARES, TIMING_KEYS, Phases
from vocagnolm.token_loss import add_token_losses

SIZES: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, num_key_value_heads=2),
    "llama tied": LlamaConfig(**SIZES, num_key_value_heads=4, tie_word_embeddings=True),
    "llama wide heads": LlamaConfig(**SIZES, num_key_value_heads=2, head_dim=32),
    "qwen2": Qwen2Config(**SIZES, num_key_value_heads=2),
    "gpt neox": GPTNeoXConfig(**SIZES),
    "gpt2": GPT2Config(
        vocab_size=120, n_embd=64, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0
    ),
}
# Entries of a log that come from `Throughput`, and not from Trainer or the other metrics.
MEASURED = [k for k in TIMING_KEYS if k.endswith(("_device", "_mfu", "_gib", "_time_fraction"))]


def build(config: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


class Reader(TrainerCallback):
    """Notes what is logged, and what a reader would count by hand."""

    def __init__(self, trainer: Any):
        self.reports: list[dict[str, float]] = []
        self.batches: list[dict[str, Any]] = []
        self.elapsed_s: list[float] = []
        trainer.add_callback(self)
        step = trainer.training_step

        def training_step(model: Any, inputs: Any, *args: Any) -> Any:
            self.batches.append(inputs)
            return step(model, inputs, *args)

        trainer.training_step = training_step

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._since = time.perf_counter()

    def on_log(self, *args: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if "loss" in logs:
            self.reports.append({name: logs[name] for name in MEASURED if name in logs})
            now = time.perf_counter()
            self.elapsed_s.append(now - self._since)
            self._since = now

    def tokens(self, prefix: str = "") -> int:
        return sum(int((b[f"{prefix}labels"] != IGNORED_LABEL).sum()) for b in self.batches)


def tick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every change of phase is one second after the last one."""
    seconds = itertools.count()
    monkeypatch.setattr(Phases, "_now", lambda self: float(next(seconds)))


def keys_by_hand(batch: dict[str, Any], prefix: str = "") -> int:
    """A document's token at place p, from 0, is predicted from the p tokens before it."""
    keys = 0
    for labels, positions in zip(
        batch[f"{prefix}labels"].tolist(), batch[f"{prefix}position_ids"].tolist(), strict=True
    ):
        at = 0
        for label, position in zip(labels, positions, strict=True):
            at = 0 if position == 0 else at + 1
            keys += at if label != IGNORED_LABEL else 0
    return keys


@pytest.mark.parametrize("name", CONFIGS)
def test_work_equals_torchs_count_when_training(name: str) -> None:
    model, (rows, length) = build(CONFIGS[name]), (2, 48)
    ids = torch.randint(120, (rows, length))
    tokens, keys = rows * length, rows * length**2  # eager attention computes what it masks, too
    with FlopCounterMode(display=False) as forward:
        logits = model(input_ids=ids, use_cache=False).logits
    with FlopCounterMode(display=False) as backward:
        logits.square().sum().backward()
    work = model_work(model)
    assert forward.get_total_flops() == pytest.approx(
        work.forward_flops(tokens, keys, tokens), rel=0.01
    )
    assert forward.get_total_flops() + backward.get_total_flops() == pytest.approx(
        work.training_flops(tokens, keys, tokens), rel=0.01
    )
    assert work.training_flops(tokens, keys, tokens) == 3 * work.forward_flops(tokens, keys, tokens)


def test_work_equals_torchs_count_with_frozen_weights() -> None:
    model = build(CONFIGS["llama"])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp.down_proj" in name or "embed" in name)
    ids = torch.randint(120, (2, 48))
    with FlopCounterMode(display=False) as counted:
        model(input_ids=ids, use_cache=False).logits.square().sum().backward()
    work = model_work(model)
    assert (work.trained_head, work.trained_body) == (0, 3 * 160 * 64)
    expected = work.training_flops(96, 2 * 48**2, 96)
    assert counted.get_total_flops() == pytest.approx(expected, rel=0.01)


def test_work_is_near_torchs_count_with_adapters() -> None:
    peft = pytest.importorskip("peft")
    config = LlamaConfig(**{**SIZES, "num_hidden_layers": 10}, num_key_value_heads=2)
    settings = peft.LoraConfig(r=8, target_modules="all-linear")
    model = peft.get_peft_model(build(config), settings)
    ids = torch.randint(120, (2, 48))
    with FlopCounterMode(display=False) as counted:
        model(input_ids=ids, use_cache=False).logits.square().sum().backward()
    expected = model_work(model).training_flops(96, 2 * 48**2, 96)
    assert 0.99 < counted.get_total_flops() / expected <= 1


def test_work_counts_a_layer_trained_beside_adapters_once() -> None:
    peft = pytest.importorskip("peft")
    plain = model_work(build(CONFIGS["llama"]))
    settings = peft.LoraConfig(r=8, target_modules=["q_proj"], modules_to_save=["down_proj"])
    work = model_work(peft.get_peft_model(build(CONFIGS["llama"]), settings))
    whole = [m for name, m in build(CONFIGS["llama"]).named_modules() if "down_proj" in name]
    adapters = work.body - plain.body
    assert adapters == len(whole) * 8 * (64 + 64)
    assert work.trained_body == adapters + sum(module.weight.numel() for module in whole)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float8_e4m3fn])
def test_work_is_refused_when_weights_are_in_buffers(dtype: torch.dtype) -> None:
    """As those of GPTQ, AWQ and others are."""
    model = build(CONFIGS["llama"])
    layer = torch.nn.Module()
    layer.register_buffer("qweight", torch.zeros(8, 160).to(dtype))
    model.model.layers[1].mlp.up_proj = layer
    with pytest.raises(ValueError, match="cannot be counted"):
        model_work(model)
    other = torch.nn.Module()  # a mask, a table of positions, an order of columns
    for name, buffer in (
        ("mask", torch.ones(8, 8, dtype=torch.bool)),
        ("table", torch.ones(8, 8)),
        ("order", torch.ones(8, dtype=torch.int32)),
    ):
        other.register_buffer(name, buffer)
    model.model.layers[1].mlp.up_proj = other
    model_work(model)


def test_work_counts_the_heads_backward_for_used_tokens() -> None:
    """The token losses make the used logits once more, which no MFU counts."""
    model = add_token_losses(build(CONFIGS["llama"]))
    ids = torch.randint(120, (2, 48))
    with FlopCounterMode(display=False) as counted:
        losses = model(input_ids=ids, labels=ids, token_losses=True, weighted_tokens=30)
        losses[:, 1:16].sum().backward()
    work = model_work(model)
    expected = work.training_flops(96, 2 * 48**2, 30) + 2 * work.head * 30
    assert counted.get_total_flops() == pytest.approx(expected, rel=0.01)


def test_work_of_unloaded_models_matches_the_papers() -> None:
    sizes = {
        "student": (2048, 5632, 22, 32, 4, 32000),
        "teacher": (3584, 18944, 28, 28, 4, 152064),
    }
    works = []
    for hidden, inner, layers, heads, groups, vocabulary in sizes.values():
        config = LlamaConfig(
            hidden_size=hidden,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=groups,
            vocab_size=vocabulary,
        )
        with torch.device("meta"):
            works.append(model_work(AutoModelForCausalLM.from_config(config)))
    assert [round((w.body + w.head) / 1e6) for w in works] == [1034, 7070]
    # A full causal context of 2,048 tokens has 1,024 keys per token on average: 0.185 GFLOP.
    assert 4 * works[0].attention * 1024 == pytest.approx(0.185e9, rel=0.01)


@pytest.mark.parametrize(
    "config",
    [
        MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=2),
        MambaConfig(vocab_size=120, hidden_size=32, num_hidden_layers=1),
    ],
    ids=["experts", "no decoder"],
)
def test_work_is_rejected_when_linear_layers_hide_it(config: Any) -> None:
    with torch.device("meta"), pytest.raises(ValueError, match="cannot be counted"):
        model_work(AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L40", None),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA H100", None),
        ("NVIDIA A10G", None),
        ("Tesla V100-SXM2-16GB", None),
        ("AMD Instinct MI300X", None),
    ],
)
def test_peak_is_looked_up_by_chip(name: str, expected: float | None) -> None:
    assert peak_tflops(name) == expected


@pytest.mark.parametrize(("accumulation", "overlaps"), [(1, False), (3, False), (3, True)])
def test_report_equals_a_hand_count_with_accumulated_steps(
    accumulation: int,
    overlaps: bool,
    blocks: Blocks,
    pair: tuple[Any, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tick(monkeypatch)
    monkeypatch.setattr(overlap, "WITH_STREAMS", ("cpu",))
    training = {"gradient_accumulation_steps": accumulation, "per_device_train_batch_size": 2}
    student, teacher = model_work(pair[0]), model_work(pair[1])
    trainer = make_trainer(
        tmp_path,
        blocks,
        *pair,
        max_steps=2,
        logging_steps=2,
        **training,
        options={"device_peak_tflops": 1e-3, "overlap_teacher": overlaps},
    )
    reader = Reader(trainer)
    trainer.train()
    (report,) = reader.reports
    assert len(reader.batches) == 2 * accumulation
    # Phases of a step: the data; the student before, between and behind the teacher's passes, one
    # for each micro-batch; the update; the rest, where the run begins, too.
    seconds = {
        "data": 2,
        "teacher": 2 * accumulation,
        "student": 2 * (accumulation + 1),
        "optimizer": 2,
        "other": 1 + 2,
    }
    elapsed_s = sum(seconds.values())
    shares = {phase: report[f"{phase}_time_fraction"] for phase in SHARES}
    assert shares == pytest.approx({p: s / elapsed_s for p, s in seconds.items()})
    per_s = {role: report[f"{role}_tokens_per_s_per_device"] for role in ("student", "teacher")}
    assert per_s["student"] * elapsed_s == pytest.approx(reader.tokens())
    assert per_s["teacher"] * elapsed_s == pytest.approx(reader.tokens("teacher_"))
    used = sum(map(trainer.objective.weighted_tokens, reader.batches))
    assert 0 < used < reader.tokens()
    keys = sum(map(keys_by_hand, reader.batches))
    counted = student.training_flops(reader.tokens(), keys, used)
    busy_s, teacher_s = seconds["student"] + seconds["optimizer"], seconds["teacher"]
    if overlaps:
        busy_s = teacher_s = busy_s + teacher_s
    assert report["student_mfu"] == pytest.approx(counted / (busy_s * 1e9))
    keys = sum(keys_by_hand(batch, "teacher_") for batch in reader.batches)
    tokens = reader.tokens("teacher_")
    counted = teacher.forward_flops(tokens, keys, tokens)
    assert report["teacher_mfu"] == pytest.approx(counted / (teacher_s * 1e9))
    assert report["memory_resident_gib"] > 0.05
    assert set(report) == set(MEASURED) - {"memory_allocated_gib", "memory_reserved_gib"}


def test_phases_make_up_the_elapsed_time(
    blocks: Blocks, pair: tuple[Any, Any], tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path, blocks, *pair, logging_steps=3)
    reader = Reader(trainer)
    trainer.train()
    (report,) = reader.reports
    assert sum(report[f"{phase}_time_fraction"] for phase in SHARES) == pytest.approx(1)
    elapsed_s = reader.tokens() / report["student_tokens_per_s_per_device"]
    # Between the two clocks another process may have run.
    assert elapsed_s == pytest.approx(reader.elapsed_s[0], rel=0.1, abs=0.3)
    assert all(report[f"{phase}_time_fraction"] > 0 for phase in SHARES)
    assert "student_mfu" not in report, "a CPU has no known peak"


@pytest.mark.slow
def test_report_leaves_out_evaluating_and_saving(
    blocks: Blocks, pair: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(Phases, "_now", lambda self: now[0])

    def taking(seconds: float, call: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*args: Any, **kwargs: Any) -> Any:
            now[0] += seconds
            return call(*args, **kwargs)

        return slow

    reports = []
    for extra in ({}, {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps"}):
        trainer = make_trainer(
            tmp_path,
            blocks,
            copy.deepcopy(pair[0]),
            copy.deepcopy(pair[1]),
            options={"eval_dataset": blocks} if extra else {},
            logging_steps=2,
            max_steps=4,
            **extra,
        )
        step: Any = trainer
        step.training_step = taking(1, trainer.training_step)
        step.prediction_step = taking(100, trainer.prediction_step)
        step.metrics.save = taking(100, trainer.metrics.save)
        reader = Reader(trainer)
        trainer.train()
        reports.append(reader.reports)
    assert now[0] > 400
    for plain, evaluated in zip(*reports, strict=True):
        del plain["memory_resident_gib"], evaluated["memory_resident_gib"]
        assert evaluated == plain


def test_report_names_no_teacher_when_none_is_resident(
    blocks: Blocks, pair: tuple[Any, Any], tmp_path: Path
) -> None:
    trainer = make_trainer(
        tmp_path, blocks, pair[0], options={"method": "cpt", "device_peak_tflops": 1.0}, max_steps=1
    )
    reader = Reader(trainer)
    trainer.train()
    (report,) = reader.reports
    assert not [name for name in report if "teacher" in name]
    assert sum(v for k, v in report.items() if k.endswith("_time_fraction")) == pytest.approx(1)
    assert report["student_mfu"] > 0


def test_teachers_body_is_timed_without_its_head(
    blocks: Blocks, pair: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tick(monkeypatch)
    work = model_work(pair[1])
    options = {"method": "uld", "device_peak_tflops": 1e-3}
    trainer = make_trainer(tmp_path, blocks, *pair, options=options, max_steps=1)
    reader = Reader(trainer)
    trainer.train()
    (report,) = reader.reports
    keys = keys_by_hand(reader.batches[0], "teacher_")
    counted = work.forward_flops(reader.tokens("teacher_"), keys, 0)
    assert report["teacher_mfu"] == pytest.approx(counted / 1e9)  # in one tick of the clock


def test_clock_stops_when_training_has_ended(
    blocks: Blocks, pair: tuple[Any, Any], tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path, blocks, *pair, max_steps=1)
    hooks = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in pair]
    trainer.train()
    assert [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in pair] == hooks
    assert trainer.throughput.read() == {}
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    trainer.compute_loss(trainer.model, batch, num_items_in_batch=torch.tensor(9))
    assert trainer.throughput._counters[0].read() == [0, 0, 0]


def test_report_says_why_it_has_no_mfu(
    blocks: Blocks,
    pair: tuple[Any, Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(model: Any) -> ModelWork:
        raise ValueError("it has experts")

    monkeypatch.setattr(throughput, "model_work", refuse)
    trainer = make_trainer(
        tmp_path, blocks, *pair, max_steps=1, options={"device_peak_tflops": 1.0}
    )
    reader = Reader(trainer)
    trainer.train()
    (report,) = reader.reports
    assert report["student_tokens_per_s_per_device"] > 0
    assert not {"student_mfu", "teacher_mfu"} & report.keys()
    assert "no MFU is reported: it has experts" in caplog.text


class FakeEvent:
    """A CUDA event whose stream finishes the n-th one after n squared milliseconds."""

    recorded = 0
    waits = 0

    def __init__(self, *, enable_timing: bool):
        assert enable_timing

    def record(self) -> None:
        FakeEvent.recorded += 1
        self.at_ms = float(FakeEvent.recorded**2)

    def synchronize(self) -> None:
        FakeEvent.waits += 1

    def elapsed_time(self, later: FakeEvent) -> float:
        return later.at_ms - self.at_ms


def test_cuda_timeline_waits_once_for_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    FakeEvent.recorded = FakeEvent.waits = 0
    phases = Phases(torch.device("cuda"))
    phases.begin("data")
    phases.start()  # at 1 ms
    phases.begin("student")  # at 4 ms
    with phases.within("evaluation"):  # at 9 and 16 ms
        phases.begin("evaluation")
    phases.begin("backward")  # the same share: no event
    phases.begin("other")  # at 25 ms
    assert FakeEvent.waits == 0
    seconds = {"teacher": 0, "student": 5 + 9, "optimizer": 0, "data": 3, "other": 11}
    assert phases.read() == pytest.approx({p: ms / 1000 for p, ms in seconds.items()})
    assert phases.read()["other"] == pytest.approx(0.013)
    assert FakeEvent.waits == 2


def test_phase_stays_where_an_error_ends_it() -> None:
    phases = Phases(torch.device("cpu"))
    assert phases.doing == "the preparation"
    phases.begin("update")
    with phases.within("checkpoint"):
        assert phases.doing == "the saving of a checkpoint"
    assert phases.doing == "the update"
    with pytest.raises(OSError, match="disk"), phases.within("checkpoint"):
        raise OSError("disk")
    assert phases.doing == "the saving of a checkpoint"


def test_gpu_reports_its_own_peaks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu, names = torch.device("cuda"), iter(["NVIDIA H200", "NVIDIA Z9"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: next(names))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 4 * 2**30)
    resets: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", resets.append)
    assert throughput._memory_gib(gpu) == {"memory_allocated_gib": 3, "memory_reserved_gib": 4}
    assert resets == [gpu]
    assert flops.peak_flops(gpu, None) == 989.4e12
    assert flops.peak_flops(gpu, 50.0) == 50e12
    assert not caplog.text
    assert flops.peak_flops(gpu, None) is None
    assert "the peak of NVIDIA Z9 is unknown; give it with --device_peak_tflops" in caplog.text


class Waits(TorchDispatchMode):
    """Counts what a GPU's host would wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "nonzero", "_to_copy", "is_nonzero", "equal"):
            self.found.append(name)
        return func(*args, **kwargs or {})


def test_counting_micro_batches_waits_for_nothing(
    blocks: Blocks, pair: tuple[Any, Any], tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path, blocks, *pair)
    meter = trainer.throughput
    meter.on_train_begin(trainer.args, trainer.state, trainer.control, model=trainer.model)
    batch = next(iter(trainer.get_train_dataloader()))
    with Waits() as waits:
        trainer._count_tokens(batch)
    assert waits.found == []
    student, teacher = meter._counters
    assert student.read()[0] == sum(batch["mapped_tokens"]) + sum(batch["unmapped_tokens"])
    assert teacher.read()[0] == int((batch["teacher_labels"] != IGNORED_LABEL).sum())


def test_padding_counts_for_nothing_when_attention_crosses_documents(pair: tuple[Any, Any]) -> None:
    counter = throughput._Counter(pair[0], torch.device("cpu"))
    labels = torch.tensor([[-100, 5, 6, -100, 7, -100, -100]])  # two documents, and padding
    counter.add(torch.arange(7)[None], labels, head_tokens=2)
    assert counter.read() == [3, 1 + 2 + 4, 2]
    assert counter.read() == [0, 0, 0]


@pytest.mark.processes
@pytest.mark.slow
def test_report_covers_all_processes_when_there_are_two(
    blocks: Blocks,
    pair: tuple[Any, Any],
    tmp_path: Path,
    tokenizer_dirs: dict[str, Path],
    training_texts: list[str],
) -> None:
    for role, model in zip(("student", "teacher"), pair, strict=True):
        model.save_pretrained(tmp_path / role)
    tokenizers = [str(tokenizer_dirs[name]) for name in ("metaspace", "nfc_digits")]
    job = {"texts": training_texts[:59], "tokenizers": tokenizers}
    (tmp_path / "job.json").write_text(json.dumps(job))
    launch(__file__, tmp_path, 2)
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    (report, one), (other_report, other) = results
    assert report == other_report
    assert one["teacher_tokens"] != other["teacher_tokens"]
    # As in one process: 3 steps of 2 micro-batches, logged once, make 25 ticks of the clock.
    for role in ("student", "teacher"):
        tokens = one[f"{role}_tokens"] + other[f"{role}_tokens"]
        assert report[f"{role}_tokens_per_s_per_device"] == pytest.approx(tokens / (2 * 25))
    assert report["teacher_time_fraction"] == pytest.approx(6 / 25)
    assert report["student_mfu"] == pytest.approx(one["flops"] + other["flops"])


def work_of_one_process(directory: Path) -> None:
    """Write this process's report, and its own tokens and utilisation by hand."""
    from transformers import AutoTokenizer

    job = json.loads((directory / "job.json").read_text())
    blocks = make_blocks(job["texts"], *map(AutoTokenizer.from_pretrained, job["tokenizers"]))
    models = [
        AutoModelForCausalLM.from_pretrained(directory / role, dtype=torch.float64)
        for role in ("student", "teacher")
    ]
    work = model_work(models[0])
    with pytest.MonkeyPatch.context() as monkeypatch:
        tick(monkeypatch)
        training = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
        trainer = make_trainer(
            directory / "out",
            blocks,
            *models,
            logging_steps=3,
            **training,
            options={"device_peak_tflops": 1e-6},
        )
        reader = Reader(trainer)
        trainer.train()
    keys, used = (
        sum(map(count, reader.batches))
        for count in (keys_by_hand, trainer.objective.weighted_tokens)
    )
    counted = {
        "student_tokens": reader.tokens(),
        "teacher_tokens": reader.tokens("teacher_"),
        "flops": work.training_flops(reader.tokens(), keys, used) / (1e6 * 2 * (9 + 3)),
    }
    (report,) = reader.reports
    del report["memory_resident_gib"]
    path = directory / f"{trainer.args.process_index}.json"
    path.write_text(json.dumps([report, counted]))


if __name__ == "__main__":
    work_of_one_process(Path(sys.argv[1]))
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads abort some exits, with all the work done
