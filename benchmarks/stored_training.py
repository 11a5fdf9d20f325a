"""The cost of a training step with teacher losses from a store, beside a step without a teacher.

    python benchmarks/stored_training.py
    python benchmarks/stored_training.py --device cuda --hidden 2048 --layers 22 --batch_size 4

Two claims, each a ratio within one run: a step with stored losses costs at most 1.05 times a step
of plain continual pretraining (CPT), in time and memory; and a step with the teacher at hand at
most 1.05 times the teacher's forward pass and a CPT step together. A step is all of it: reading
and collating blocks, forward, backward, AdamW. The four ways take turns on the same blocks, in an
order that is drawn anew for each turn, with one thread; the ratios are of medians. On a CPU the
time is processor time. Memory is what a way holds (weights, optimizer) and the most that a step
adds to it. Models and losses are random. A guided step computes no gradient of the losses that it
does not select, which CPT has to; `--top_k 1` shows what guidance costs without that.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from alignment import generate_texts, train_student, train_teacher
from token_loss_memory import resident_bytes
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from vocagnolm.collator import PackedCollator
from vocagnolm.data import Reader, align_corpus, student_reader, teacher_reader
from vocagnolm.guidance import Guidance
from vocagnolm.packing import Blocks
from vocagnolm.spans import encode
from vocagnolm.store import store
from vocagnolm.store.reader import StoredReader
from vocagnolm.teacher import StoredTeacher
from vocagnolm.trainer import VocAgnoTrainer

CPT, STORED, TEACHER, ONLINE = "CPT step", "stored step", "teacher forward", "online step"
TARGET = 1.05


@dataclass
class Way:
    """One of the four ways.

    Attributes:
        prepare: makes what `run` is given, from block numbers; its time does not count.
        run: what is measured.
        held_bytes: weights and optimizer state.
        seconds, added_bytes: of every turn.
    """

    prepare: Callable[[list[int]], Any]
    run: Callable[[Any], None]
    held_bytes: int
    seconds: list[float] = field(default_factory=list)
    added_bytes: list[int] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """The most memory that the way takes."""
        return self.held_bytes + max(self.added_bytes)


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
    store.finish(directory, [0], {"teacher": "random", "context": teacher.limit})
    return store.Store(directory)


def make_model(args: argparse.Namespace, vocabulary: int, scale: int) -> LlamaForCausalLM:
    """A random model, `scale` times as wide."""
    hidden = args.hidden * scale
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=2 * args.max_length,
    )
    return LlamaForCausalLM(config)


def make_trainer(
    args: argparse.Namespace, directory: Path, blocks: Blocks, teacher: Any
) -> VocAgnoTrainer:
    """A trainer with a student of its own; without a teacher it is CPT."""
    torch.manual_seed(0)
    trainer = VocAgnoTrainer(
        model=make_model(args, args.vocabulary, 1),
        teacher=teacher,
        method="vocagnolm" if teacher else "cpt",
        guidance=Guidance(args.top_k) if teacher else None,
        args=TrainingArguments(
            output_dir=str(directory),
            use_cpu=args.device == "cpu",
            bf16=args.device == "cuda",
            per_device_train_batch_size=args.batch_size,
            report_to="none",
        ),
        train_dataset=blocks,
        data_collator=PackedCollator(args.max_length, teacher_max_length=2 * args.max_length),
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


def make_ways(args: argparse.Namespace, directory: Path) -> tuple[dict[str, Way], int]:
    """The four ways, and the number of blocks."""
    texts = list(dict.fromkeys(generate_texts(args.documents)))
    student = student_reader(_with_end(train_student(texts)), args.max_length)
    teacher = teacher_reader(_with_end(train_teacher(texts)), 2 * args.max_length)
    corpus = datasets.Dataset.from_dict({"text": texts})
    (directory / "store").mkdir()
    stored = StoredReader([make_store(directory / "store", texts, teacher)])
    online_blocks, stored_blocks = (
        Blocks(align_corpus(corpus, student, reader).rows, args.max_length, teacher.limit)
        for reader in (teacher, stored)
    )
    cpt = make_trainer(args, directory, online_blocks, None)
    guided = make_trainer(args, directory, stored_blocks, StoredTeacher())
    teacher_model = make_model(args, 2 * args.vocabulary, args.teacher_scale)
    if args.device == "cuda":
        teacher_model.to(torch.bfloat16)
    online = make_trainer(args, directory, online_blocks, teacher_model)
    weights, frozen = (sum(p.nbytes for p in m.parameters()) for m in (cpt.model, teacher_model))

    def collate(numbers: list[int]) -> Any:
        batch = online.data_collator([online_blocks[number] for number in numbers])
        return online._prepare_inputs(batch)

    def forward(batch: Any) -> None:
        assert online.teacher is not None
        online.teacher.losses(batch)

    ways = {
        name: Way(lambda numbers: numbers, lambda numbers, t=trainer: step(t, numbers), held)
        for name, trainer, held in (
            (CPT, cpt, 3 * weights),  # AdamW keeps two more of each
            (STORED, guided, 3 * weights),
            (ONLINE, online, 3 * weights + frozen),
        )
    }
    return ways | {TEACHER: Way(collate, forward, frozen)}, len(online_blocks)


def _with_end(tokenizer: Any) -> Any:
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    return tokenizer


def measure(way: Way, numbers: list[int], device: str) -> None:
    """Run a way once."""
    given = way.prepare(numbers)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, start = torch.cuda.memory_allocated(), time.perf_counter()
        way.run(given)
        torch.cuda.synchronize()
        way.seconds.append(time.perf_counter() - start)
        way.added_bytes.append(torch.cuda.max_memory_allocated() - before)
        return
    Path("/proc/self/clear_refs").write_text("5")  # forget the maximum
    before, start = resident_bytes("VmRSS"), time.process_time()
    way.run(given)
    way.seconds.append(time.process_time() - start)
    way.added_bytes.append(resident_bytes("VmHWM") - before)


def report(ways: dict[str, Way]) -> list[str]:
    """One table, and the claims."""
    seconds = {name: statistics.median(way.seconds) for name, way in ways.items()}
    lines = [f"{'':16}{'median':>10}{'quartiles':>22}{'memory':>12}"]
    for name in (CPT, STORED, TEACHER, ONLINE):
        low, _, high = statistics.quantiles(ways[name].seconds, n=4)
        lines.append(
            f"{name:16}{seconds[name]:8.3f} s{f'{low:.3f} to {high:.3f} s':>22}"
            f"{ways[name].bytes / 2**20:8,.0f} MiB"
        )
    ratios = {
        "time, stored step / CPT step": seconds[STORED] / seconds[CPT],
        "memory, stored step / CPT step": ways[STORED].bytes / ways[CPT].bytes,
        "time, online step / (teacher forward + CPT step)": (
            seconds[ONLINE] / (seconds[TEACHER] + seconds[CPT])
        ),
    }
    for name, ratio in ratios.items():
        verdict = "holds" if ratio <= TARGET else "DOES NOT HOLD"
        lines.append(f"{name}: {ratio:.3f} (at most {TARGET}: {verdict})")
    return lines


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--documents", type=int, default=200)
    parser.add_argument("--max_length", type=int, default=512)
    parser.add_argument("--batch_size", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=8192, help="the teacher's is twice that")
    parser.add_argument(
        "--teacher_scale", type=int, default=2, help="how much wider the teacher is"
    )
    parser.add_argument("--top_k", type=float, default=0.4, help="1 trains all tokens, as CPT does")
    parser.add_argument("--repetitions", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        ways, blocks = make_ways(args, Path(directory))
        rng = random.Random(0)
        for turn in range(args.repetitions + 2):
            first = turn * args.batch_size
            numbers = [(first + row) % blocks for row in range(args.batch_size)]
            for name in rng.sample(list(ways), len(ways)):
                measure(ways[name], numbers, args.device)
    for way in ways.values():  # the first turns allocate what stays
        del way.seconds[:2], way.added_bytes[:2]
    sys.stdout.write("\n".join(report(ways)) + "\n")


if __name__ == "__main__":
    main()
