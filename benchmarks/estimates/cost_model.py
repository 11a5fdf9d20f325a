"""What the paper's runs cost: FLOPs, bytes and messages from models' sizes and assumptions.

docs/scaling.md has the formulas; `scaling.py` prints the tables.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from vocagnolm.run import memory

NODE = 8  # GPUs of a machine
GIB = 2**30
GRADIENT, GATHERED = 4, 2  # bytes per parameter: reduced in float32, gathered in bfloat16
SHARDINGS = ("DDP", "FSDP2", "HSDP")
WITHIN = ("HSDP", "in each machine")  # gathered within a machine
TILES_GIB = 0.5  # two tiles of logits


@dataclass(frozen=True)
class Architecture:
    """A decoder with a gated MLP and a head of its own (Llama, Mistral, Qwen2)."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    head_dim: int
    vocabulary: int


STUDENT = Architecture(2048, 5632, 22, 32, 4, 64, 32000)  # TinyLlama 1.1B
TEACHERS = {
    "Llemma 7B": Architecture(4096, 11008, 32, 32, 32, 128, 32016),
    "Mistral-ProXMath 7B": Architecture(4096, 14336, 32, 32, 8, 128, 32000),
    "DeepSeekMath 7B": Architecture(4096, 11008, 30, 32, 32, 128, 102400),
    "Qwen2.5-Math 7B": Architecture(3584, 18944, 28, 28, 4, 128, 152064),
}
LARGEST = "Qwen2.5-Math 7B"  # by parameters: the teacher of the tables of memory and messages
TOKEN_RATIO = {  # teacher tokens per student token, measured
    "Llemma 7B": 0.997,
    "Mistral-ProXMath 7B": 0.994,
    "DeepSeekMath 7B": 0.978,
    "Qwen2.5-Math 7B": 0.943,
}


def _option(default: float, meaning: str) -> Any:
    return field(default=default, metadata={"help": meaning})


@dataclass(frozen=True)
class Setup:
    """The assumptions; each is an option, with what it means."""

    student_tokens: float = _option(15e9, "tokens of the corpus (OpenWebMath)")
    context: int = _option(2048, "tokens of a block, of student and teacher")
    global_batch_tokens: int = _option(2**21, "tokens of an optimizer step")
    micro_batch: int = _option(8, "blocks that a GPU holds at once, at most")
    bytes_per_token: float = _option(3.05, "bytes of the store per teacher token")
    reread: float = _option(0.0, "share of tokens that scoring reads twice")
    peak_tflops: float = _option(989.0, "peak of a GPU, dense bfloat16")
    training_mfu: float = _option(0.4, "share of the peak in the student's step")
    forward_mfu: float = _option(0.6, "share of the peak in the teacher's forward pass")
    memory_tb_s: float = _option(3.35, "TB/s of a GPU's memory")
    memory_gib: float = _option(79.6, "GiB of a GPU's memory")
    overhead_gib: float = _option(1.5, "GiB that CUDA, NCCL and cuBLAS take")
    nvlink_gb_s: float = _option(450.0, "GB/s of a GPU within its machine, each way")
    nic_gb_s: float = _option(50.0, "GB/s of a network card, each way")
    nics: int = _option(8, "network cards of a machine")
    link_efficiency: float = _option(0.8, "share of these rates that is reached")
    price: float = _option(2.5, "dollars per GPU hour")


def layer_parameters(model: Architecture) -> int:
    """Weights of a layer's projections and MLP.

    >>> layer_parameters(Architecture(10, 20, 2, 2, 1, 5, 100))  # 100 + 100 + 100 + 600
    900
    """
    query_and_output = 2 * model.hidden * model.heads * model.head_dim
    key_and_value = 2 * model.hidden * model.key_value_heads * model.head_dim
    return query_and_output + key_and_value + 3 * model.hidden * model.intermediate


def matmul_parameters(model: Architecture) -> int:
    """Weights that a token is multiplied with: layers and head, no embedding.

    >>> matmul_parameters(Architecture(10, 20, 2, 2, 1, 5, 100))
    2800
    """
    return model.layers * layer_parameters(model) + model.hidden * model.vocabulary


def parameters(model: Architecture) -> int:
    """All weights but norms and biases, which are less than a thousandth."""
    return matmul_parameters(model) + model.hidden * model.vocabulary


def sizes(model: Architecture) -> memory.Sizes:
    """The same as a run's plan counts them."""
    return memory.Sizes(
        parameters=parameters(model),
        trained=parameters(model),
        linear=model.layers * layer_parameters(model),
        layer=layer_parameters(model),
        layers=model.layers,
        rest=2 * model.hidden * model.vocabulary,
        hidden=model.hidden,
        inner=model.intermediate,
    )


def forward_flops(model: Architecture, context: int) -> float:
    """Of a forward pass, per token: attention over half a context of keys on average.

    >>> forward_flops(Architecture(10, 20, 2, 2, 1, 5, 100), context=50)  # 5600 + 2000
    7600
    """
    attention = 2 * model.layers * model.heads * model.head_dim * context
    return 2 * matmul_parameters(model) + attention


def gpu_hours(flops: float, peak_tflops: float, mfu: float) -> float:
    """Hours of one GPU that reaches a share `mfu` of its peak.

    >>> gpu_hours(3.6e18, peak_tflops=1000, mfu=0.5)
    2.0
    """
    return flops / (peak_tflops * 1e12 * mfu) / 3600


def training_flops(setup: Setup) -> float:
    """Of the student per token: a forward pass, and a backward pass of twice that."""
    return 3 * forward_flops(STUDENT, setup.context)


def teacher_flops(setup: Setup, teacher: str) -> float:
    """Of a teacher per student token."""
    return TOKEN_RATIO[teacher] * forward_flops(TEACHERS[teacher], setup.context)


def training_hours(setup: Setup) -> float:
    """GPU hours of the student's steps: a run from a store, or without a teacher."""
    flops = setup.student_tokens * training_flops(setup)
    return gpu_hours(flops, setup.peak_tflops, setup.training_mfu)


def teacher_hours(setup: Setup, teacher: str) -> float:
    """GPU hours of a teacher's forward pass over the corpus, each token once."""
    flops = setup.student_tokens * teacher_flops(setup, teacher)
    return gpu_hours(flops, setup.peak_tflops, setup.forward_mfu)


def online_cost(scoring: float, cpt: float, runs: int) -> float:
    """Of runs that each read the whole corpus with their teacher, in the unit of the others.

    >>> online_cost(scoring=10, cpt=5, runs=3)
    45
    """
    return runs * (scoring + cpt)


def stored_cost(scoring: float, cpt: float, runs: int) -> float:
    """Of scoring once, and runs from the store at the cost of continual pretraining (CPT).

    >>> stored_cost(scoring=10, cpt=5, runs=3)
    25
    """
    return scoring + runs * cpt


def break_even(scoring: float, cpt: float, online: float) -> int:
    """The fewest runs k with scoring + k cpt <= k online.

    >>> break_even(scoring=10, cpt=5, online=15), break_even(scoring=11, cpt=5, online=15)
    (1, 2)
    """
    return math.ceil(scoring / (online - cpt) - 1e-9)  # a rounding error is no further run


def split_step(setup: Setup, devices: int) -> tuple[float, int]:
    """Blocks of a micro-batch, and micro-batches of an optimizer step.

    >>> split_step(Setup(), 32), split_step(Setup(), 256)
    ((8, 4), (4.0, 1))
    """
    blocks = setup.global_batch_tokens / setup.context / devices
    micro_batch = min(setup.micro_batch, blocks)
    return micro_batch, math.ceil(blocks / micro_batch)


def device_gib(
    setup: Setup, sharding: str, devices: int, teacher: str, checkpointed: bool = False
) -> float:
    """Memory of a GPU at its fullest, in the student's backward pass.

    Args:
        setup: the assumptions.
        sharding: of the student, one of `SHARDINGS`.
        devices: how many GPUs.
        teacher: "none", "on each GPU", or "in each machine", over whose GPUs it is sharded.
        checkpointed: whether the student keeps only the inputs of its layers.
    """
    micro_batch, accumulation = split_step(setup, devices)
    layout = memory.Layout(
        devices=devices,
        shards={"DDP": None, "FSDP2": devices, "HSDP": min(devices, NODE)}[sharding],
        precision="mixed" if sharding == "DDP" else "16 bits",
        recomputes=checkpointed,
        accumulates=accumulation > 1,
    )
    parts = memory.student_memory(sizes(STUDENT), layout, micro_batch * setup.context)
    if teacher != "none":
        members = min(devices, NODE) if teacher == "in each machine" else 1
        parts |= memory.teacher_memory(sizes(TEACHERS[LARGEST]), width=2, devices=members)
    return sum(parts.values()) / GIB + TILES_GIB + setup.overhead_gib


def share_s(size: float, members: int, gb_s: float) -> float:
    """Seconds to gather, or to reduce and scatter, `size` bytes over some members of a ring.

    >>> share_s(8e9, members=4, gb_s=2)
    3.0
    """
    return size * (members - 1) / members / (gb_s * 1e9)


def sent_bytes(
    what: str, parameters: int, gathered: int, devices: int, node: int, accumulation: int
) -> tuple[float, float]:
    """Bytes that a GPU sends in an optimizer step: in its ring, and then between machines.

    Args:
        what: a sharding of the student, or of the teacher: "in each machine", "over all GPUs".
        parameters: of the model that is spread.
        gathered: bytes of each where it is gathered; gradients are reduced in `GRADIENT` bytes.
        devices: how many GPUs.
        node: how many of them a machine has.
        accumulation: micro-batches of the step.

    >>> sent_bytes("HSDP", 100, gathered=2, devices=8, node=4, accumulation=3)
    (750.0, 100.0)
    """
    members = node if what in WITHIN else devices
    if what == "DDP":
        return 2 * share_s(GRADIENT * parameters, members, 1e-9), 0.0
    gathering = accumulation * share_s(gathered * parameters, members, 1e-9)
    if what not in SHARDINGS:
        return gathering, 0.0
    between = devices // node if what == "HSDP" else 1
    across = 2 * share_s(GRADIENT * parameters / node, between, 1e-9)
    return gathering + share_s(GRADIENT * parameters, members, 1e-9), across


def step_messages_s(setup: Setup, what: str, devices: int) -> float:
    """Seconds of an optimizer step's messages, one after the other; 0 on one GPU.

    Args:
        setup: the assumptions.
        what: as of `sent_bytes`.
        devices: how many GPUs.
    """
    within, (_, accumulation) = min(devices, NODE), split_step(setup, devices)
    inside = setup.nvlink_gb_s * setup.link_efficiency
    outside = setup.nics * setup.nic_gb_s * setup.link_efficiency  # rings use all cards at once
    ring = inside if devices <= NODE or what in WITHIN else min(inside, outside)
    count = parameters(STUDENT if what in SHARDINGS else TEACHERS[LARGEST])
    sent, across = sent_bytes(what, count, GATHERED, devices, within, accumulation)
    return (sent / ring + across / (outside / within)) / 1e9


def step_compute_s(setup: Setup, devices: int, teacher: str | None) -> float:
    """Seconds that an optimizer step computes, with a teacher at hand or without one."""
    hours = training_hours(setup) + (teacher_hours(setup, teacher) if teacher else 0.0)
    return 3600 * hours * setup.global_batch_tokens / setup.student_tokens / devices


def wall_hours(setup: Setup, devices: int, teacher: str | None) -> tuple[float, float]:
    """Hours of a run under DDP: with its messages behind the computing, and with none there."""
    steps = setup.student_tokens / setup.global_batch_tokens
    compute_s = step_compute_s(setup, devices, teacher)
    messages_s = step_messages_s(setup, "DDP", devices)
    return steps * compute_s / 3600, steps * (compute_s + messages_s) / 3600
