"""Compare times with and without each kernel, and show how much it changes the numbers."""

from __future__ import annotations

import copy
import importlib.util
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.generated import make_batches
from benchmarks.gpu_first.report import Report, free_memory, timed
from benchmarks.harness import Skipped
from benchmarks.models import backward, has_cuda
from benchmarks.steps import CPT, ONLINE, TEACHER, Steps
from vocagnolm import output_head
from vocagnolm.attention import TORCH_VARLEN, check_attention
from vocagnolm.models.load import fp8_products
from vocagnolm.training.models import compile_layers

_TURNS = 3  # the first one warms up
_KEPT_MINUTES = 1.5
_FLASH = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
Switch = Callable[[bool], object]


def measure_kernels(report: Report, steps: Steps) -> None:
    """Compare every kernel with the plain way, while time is left."""
    for name, make, ways in KERNELS:
        if report.minutes_left < (0.0 if report.is_tiny else _KEPT_MINUTES):
            report.say(f"{name}: skipped", "the time left is for the stages behind")
            continue
        with report.trial(name):
            try:
                switch = make(steps)
            except (Skipped, ValueError, ImportError) as error:
                report.say(f"{name}: skipped", str(error)[:300])
                continue
            try:
                _compare(report, steps, name, ways, switch)
            finally:
                switch(False)
                steps.trainer.model.zero_grad()
        free_memory()


def _compare(report: Report, steps: Steps, name: str, ways: Sequence[str], switch: Switch) -> None:
    switch(False)
    plain_losses, plain_loss, plain_norm = _numbers(steps)
    switch(True)
    start_s = time.perf_counter()
    losses, loss, norm = _numbers(steps)
    report.say(
        f"{name}: numbers",
        "",
        teacher_loss=float((losses - plain_losses).abs().max()),
        loss=loss - plain_loss,
        grad_norm_ratio=norm / plain_norm,
        first_use_s=time.perf_counter() - start_s,
    )
    turns: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    for turn in range(_TURNS):
        for is_on in (turn % 2 == 0, turn % 2 == 1):
            switch(is_on)
            for way in ways:
                took = timed(lambda way=way: steps.ways[way].run(0))
                if turn:
                    turns.setdefault((way, is_on), []).append(took)
    for way in ways:
        with_s, gib = min(turns[way, True])
        without_s, plain_gib = min(turns[way, False])
        report.say(
            f"{name}: time of {way}, with / without",
            with_s / without_s,
            s=with_s,
            gib=gib,
            gib_without=plain_gib,
        )


def _numbers(steps: Steps) -> tuple[torch.Tensor, float, float]:
    """Return the teacher's losses, and the loss and gradient norm of a CPT micro-batch."""
    trainer = steps.trainer
    trainer.token_objective = steps.cpt
    batch: Any = trainer._prepare_inputs(steps.first)
    loss = float(backward(trainer, [batch]))
    gradients = [p.grad for p in trainer.model.parameters() if p.grad is not None]
    norm = float(torch.nn.utils.get_total_norm(gradients))
    trainer.model.zero_grad()
    return steps.online_teachers.losses(batch).loss_BT, loss, norm


def _tiles(factor: float, _: Steps) -> Switch:
    plain = output_head.TILE_LOGITS_CUDA, output_head.TILE_LOGITS

    def switch(is_on: bool) -> None:
        sizes = (int(size * (factor if is_on else 1)) for size in plain)
        output_head.TILE_LOGITS_CUDA, output_head.TILE_LOGITS = sizes

    return switch


def _checkpointing(steps: Steps) -> Switch:
    model: Any = steps.student
    options = {"use_reentrant": False}
    return lambda is_on: (
        model.gradient_checkpointing_enable(options)
        if is_on
        else model.gradient_checkpointing_disable()
    )


def _attention(name: str, steps: Steps) -> Switch:
    models, plain = (steps.student, steps.teacher), steps.size.attention
    if name == plain:
        raise Skipped("it is what all else is measured with")
    if "flash" in name and not has_cuda():
        raise Skipped("no CUDA")
    if name in _FLASH and importlib.util.find_spec(_FLASH[name]) is None:
        raise Skipped(f"{_FLASH[name]} is not installed")

    def switch(is_on: bool) -> None:
        for model in models:
            model.config._attn_implementation = name if is_on else plain

    switch(True)
    try:
        for model in models:
            check_attention(model)
    finally:
        switch(False)
    return switch


def _micro_batch(factor: int, steps: Steps) -> Switch:
    plain, size = steps.batches, steps.size
    larger = make_batches(steps.blocks, size.max_length, factor * size.batch_size, stored=False)
    return lambda is_on: setattr(steps, "batches", larger if is_on else plain)


def _compiled(steps: Steps) -> Switch:
    # As with --torch_compile, except on a CPU, where inductor takes minutes.
    args: Any = steps.trainer.args
    args.torch_compile_backend = "inductor" if has_cuda() else "aot_eager"
    compiled = {}
    for model in (steps.student, steps.teacher):
        compile_layers(model, args)
        for module in model.modules():
            if module._compiled_call_impl is not None:
                compiled[module] = module._compiled_call_impl

    def switch(is_on: bool) -> None:
        for module, call in compiled.items():
            module._compiled_call_impl = call if is_on else None

    return switch


def _fp8(steps: Steps) -> Switch:
    if not has_cuda():
        raise Skipped("no CUDA")
    products, teacher = fp8_products(), steps.teacher
    from torchao.quantization import quantize_

    model: Any = copy.deepcopy(teacher)
    head = model.get_output_embeddings()
    quantize_(
        model,
        products,
        filter_fn=lambda module, name: isinstance(module, nn.Linear) and module is not head,
    )

    def switch(is_on: bool) -> None:
        steps.online_teachers.models = [model if is_on else teacher]

    return switch


# Kernels that take minutes to compile come last.
_EVERY = (TEACHER, CPT, ONLINE)
KERNELS: Sequence[tuple[str, Callable[[Steps], Switch], Sequence[str]]] = (
    *((f"tiles of the losses x {x:g}", partial(_tiles, x), _EVERY) for x in (0.25, 4.0)),
    ("gradient checkpointing", _checkpointing, [CPT]),
    *((name, partial(_attention, name), _EVERY) for name in ("sdpa", TORCH_VARLEN, *_FLASH)),
    *((f"micro-batch x {x}", partial(_micro_batch, x), [CPT, ONLINE]) for x in (2, 4)),
    ("fp8 teacher", _fp8, [TEACHER, ONLINE]),
    ("compiled layers", _compiled, _EVERY),
)
