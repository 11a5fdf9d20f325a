"""Training steps with stored losses, with a co-resident teacher, and without one, side by side.

    python -m benchmarks stored_step_time    # prints all ways

A step is all of it: reading and collating blocks, forward, backward, AdamW. The ways take turns on
the same blocks. Memory is what a way holds (weights, optimizer) and the most that a step adds to
it. Models and losses are random. The claims `stored_step_time`, `stored_step_memory` and
`online_step_time` are ratios of one measurement. A guided step computes no gradient of the losses
that it does not select, which CPT has to: `--set top_k=1` shows what guidance costs without that.
With `--unselected_weight` it computes all of them, too; the way of that name has share as well.

The floor of a way is the time of the FLOPs that it needs (`vocagnolm.run.flops`) at the rate
of the largest product in it, that of the student's hidden states with its head, measured beside it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from benchmarks.generated import generate_texts, train_student, train_teacher
from benchmarks.gpu_first.steps import count_tokens
from benchmarks.harness import Measured, Way, take_turns, take_turns_apart
from vocagnolm.collator import PackedCollator
from vocagnolm.data import align_corpus
from vocagnolm.objective import Method
from vocagnolm.packing import Blocks
from vocagnolm.readers import Reader, student_reader, teacher_reader
from vocagnolm.run.flops import model_work
from vocagnolm.spans import encode
from vocagnolm.store import store
from vocagnolm.store.reader import StoredReader
from vocagnolm.teacher import StoredTeacher
from vocagnolm.trainer import VocAgnoTrainer

CPT, STORED, TEACHER, ONLINE = "CPT step", "stored step", "teacher forward", "online step"
WEIGHTED, PRODUCT = "stored, all weigh", "the head's product"


@dataclass(frozen=True)
class Size:
    """Models and blocks.

    Attributes:
        vocabulary: the student's; the teacher's is twice that.
        teacher_scale: how much wider the teacher is.
        top_k: 1 trains all tokens, as CPT does.
    """

    documents: int = 200
    max_length: int = 512
    batch_size: int = 2
    hidden: int = 128
    layers: int = 2
    vocabulary: int = 8192
    teacher_scale: int = 2
    top_k: float = 0.4
    repetitions: int = 15
    device: str = "cpu"

    @staticmethod
    def tiny() -> Size:
        """The same code with nothing to learn from it."""
        return Size(8, max_length=64, hidden=64, layers=1, vocabulary=1100, repetitions=2)


def make_store(directory: Path, texts: list[str], teacher: Reader) -> store.Store:
    """A store with random losses."""
    rng = np.random.default_rng(0)
    segments = []
    for text in texts:
        spans = encode(teacher.tokenizer, text).spans
        losses = rng.exponential(2, len(spans)).astype(np.float32)
        segments.append(
            (store.document_key(text), store.StoredSegment(0, len(text), spans, losses))
        )
    store.write_shard(directory, 0, segments, "float16", "generated")
    about = {"teacher": "random", "tokenizer_sha256": "", "context": teacher.limit}
    store.finish_store(directory, [0], about)
    return store.Store(directory)


def make_model(size: Size, vocabulary: int, scale: int) -> LlamaForCausalLM:
    """A random model, `scale` times as wide."""
    hidden = size.hidden * scale
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=2 * size.max_length,
    )
    return LlamaForCausalLM(config)


def make_trainer(
    size: Size, directory: Path, blocks: Blocks, teacher: Any, method: Method
) -> VocAgnoTrainer:
    """A trainer with a student of its own."""
    torch.manual_seed(0)
    trainer = VocAgnoTrainer(
        model=make_model(size, size.vocabulary, 1),
        teacher=teacher,
        method=method,
        args=TrainingArguments(
            output_dir=str(directory),
            use_cpu=size.device == "cpu",
            bf16=size.device == "cuda",
            per_device_train_batch_size=size.batch_size,
            report_to="none",
        ),
        train_dataset=blocks,
        data_collator=PackedCollator(size.max_length, teacher_max_length=2 * size.max_length),
    )
    trainer.model.to(trainer.args.device)
    trainer.create_optimizer()
    return trainer


def step(trainer: VocAgnoTrainer, numbers: list[int]) -> None:
    """Everything that a training step does."""
    assert trainer.train_dataset is not None
    assert trainer.optimizer is not None
    batch = trainer.data_collator([trainer.train_dataset[number] for number in numbers])
    tokens = sum(batch["mapped_tokens"]) + sum(batch["unmapped_tokens"])
    trainer.training_step(trainer.model, batch, torch.tensor(tokens, device=trainer.args.device))
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()


def make_ways(
    size: Size, directory: Path
) -> tuple[dict[str, Way], dict[str, int], dict[str, float]]:
    """The ways, the bytes of weights and optimizer state that each holds, and its FLOPs."""
    texts = list(dict.fromkeys(generate_texts(size.documents)))
    student = student_reader(_with_end(train_student(texts)), size.max_length)
    teacher = teacher_reader(_with_end(train_teacher(texts)), 2 * size.max_length)
    corpus = datasets.Dataset.from_dict({"text": texts})
    (directory / "store").mkdir()
    stored = StoredReader([make_store(directory / "store", texts, teacher)])
    online_blocks, stored_blocks = (
        Blocks(align_corpus(corpus, student, reader).rows, size.max_length, teacher.limit)
        for reader in (teacher, stored)
    )
    paper = Method("vocagnolm", size.top_k)
    all_weigh = replace(paper, aggregation="share", unselected_weight=0.3)
    cpt = make_trainer(size, directory, online_blocks, None, Method("cpt"))
    guided, weighted = (
        make_trainer(size, directory, stored_blocks, StoredTeacher(), method)
        for method in (paper, all_weigh)
    )
    teacher_model = make_model(size, 2 * size.vocabulary, size.teacher_scale)
    if size.device == "cuda":
        teacher_model.to(torch.bfloat16)
    online = make_trainer(size, directory, online_blocks, teacher_model, paper)
    weights, frozen = (sum(p.nbytes for p in m.parameters()) for m in (cpt.model, teacher_model))

    def blocks_of(turn: int) -> list[int]:
        first = turn * size.batch_size
        return [(first + row) % len(online_blocks) for row in range(size.batch_size)]

    def collate(turn: int) -> Any:
        batch = online.data_collator([online_blocks[number] for number in blocks_of(turn)])
        return online._prepare_inputs(batch)

    def forward(batch: Any) -> None:
        assert online.teacher is not None
        online.teacher.losses(batch)

    trainers = {CPT: cpt, STORED: guided, WEIGHTED: weighted, ONLINE: online}
    ways = {
        name: Way(lambda numbers, t=trainer: step(t, numbers), blocks_of)
        for name, trainer in trainers.items()
    }
    trained = 3 * weights  # AdamW keeps two more of each
    held = dict.fromkeys((CPT, STORED, WEIGHTED), trained)
    held |= {PRODUCT: 0, TEACHER: frozen, ONLINE: trained + frozen}
    batches = [collate(1 + turn) for turn in range(size.repetitions)]
    ours, theirs = count_tokens(batches), count_tokens(batches, "teacher_")
    work = {TEACHER: model_work(teacher_model).forward_flops(*theirs, theirs[0])}
    for name, trainer in trainers.items():
        used = sum(map(trainer.objective.weighted_tokens, batches))
        work[name] = model_work(cpt.model).training_flops(*ours, used)
    work[ONLINE] += work[TEACHER]
    work = {name: flops / size.repetitions for name, flops in work.items()}
    rows = size.batch_size * size.max_length
    product = make_product(size.device, rows, size.hidden, size.vocabulary)
    work[PRODUCT] = 2.0 * rows * size.hidden * size.vocabulary
    return ways | {TEACHER: Way(forward, collate), PRODUCT: Way(product)}, held, work


def make_product(device: str, *sizes: int) -> Callable[[object], object]:
    """Make the product of two random matrices, into memory that is there."""
    n, k, m = sizes
    a, b, out = (torch.randn(shape, device=device) for shape in ((n, k), (k, m), (n, m)))
    return lambda _: torch.mm(a, b, out=out)


def _with_end(tokenizer: Any) -> Any:
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    return tokenizer


def ratio(size: Size, name: str) -> Measured:
    """Return one of the ratios, and the table of all ways."""
    found, table = ratios(size)
    return Measured(found[name], table)


@cache
def ratios(size: Size) -> tuple[dict[str, float], tuple[str, ...]]:
    """Measure all ways; once for each size, whatever claims ask."""
    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as directory:
        ways, held, work = make_ways(size, Path(directory))
        if size.device == "cpu":
            made = {name: lambda way=way: way for name, way in ways.items()}
            ways = take_turns_apart(made, size.repetitions, memory=3)
        else:  # a GPU's memory is no process's own
            take_turns(ways, size.repetitions, size.device, memory=True)
    total = {name: held[name] + max(way.added_bytes) for name, way in ways.items()}
    seconds = {name: way.median_s for name, way in ways.items()}
    rate = work[PRODUCT] / seconds[PRODUCT]
    table = [f"{'':18}{'median':>10}{'quartiles':>22}{'memory':>12}{'GFLOP':>9}{'floor':>10}"]
    table += [
        f"{name:18}{ways[name].spread}{total[name] / 2**20:8,.0f} MiB{work[name] / 1e9:9.2f}"
        f"{work[name] / rate:8.3f} s, {work[name] / rate / seconds[name]:.0%}"
        for name in (CPT, STORED, WEIGHTED, TEACHER, ONLINE, PRODUCT)
    ]
    found = {
        "stored_time": seconds[STORED] / seconds[CPT],
        "stored_memory": total[STORED] / total[CPT],
        "online_time": seconds[ONLINE] / (seconds[TEACHER] + seconds[CPT]),
    }
    return found, tuple(table)
