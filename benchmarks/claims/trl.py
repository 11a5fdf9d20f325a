"""Compare training steps with TRL's, on the same documents, models and student tokens.

A step includes collating, both models' forward passes, backward pass and AdamW. Every way has its
own process; one runs at a time, with different documents in each turn. Time is processor time of
one thread. Memory is the most that a step adds to resident memory, in a turn of its own. Models are
random, in float32, without clipping or checkpointing.

TRL's GOLD aligns only byte-level tokenizers: those of Llama-2, TinyLlama and Mistral v0.1 raise
`NotImplementedError`. It also needs at least one word of prompt and one document per row, while
ours and TRL's SFT put the same documents into one packed row. Its ULD is `cross-entropy + 0.5 ULD`,
as ours (Eq. 6), with `uld_token_merge_strategy="bayesian"`, so that its logits predict the tokens
that are compared. Its JSD is `beta=1`, the reverse KL of ours, but without our cross-entropy. An
online step needs one number per teacher token, and GOLD whole distributions, so that ratio compares
methods rather than code. Small models are mostly head. At real sizes, ratios are closer to 1.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import AutoTokenizer

from benchmarks.generated import make_texts, tokenizer
from benchmarks.harness import Claim, Measured, Way, quartiles, take_turns_apart
from benchmarks.models import llama
from benchmarks.peers import (
    GOLD,
    GOLD_JSD,
    GOLD_ULD,
    SFT,
    arguments_of_steps,
    make_gold,
    make_sft,
    require_trl,
    take_step,
)
from vocagnolm import Method, VocAgnoConfig, VocAgnoTrainer, prepare_dataset

CLAIMS = (
    Claim("online time", "an online step takes 0.15 of the time of TRL's GOLD", at_most=0.15),
    Claim("online memory", "and 0.08 of its memory", at_most=0.08),
    Claim("ULD time", "a ULD step takes half the time of GOLD's", at_most=0.5),
    Claim("ULD memory", "and 0.15 of its memory", at_most=0.15),
    Claim("KLD time", "a KLD step takes 0.7 of the time of GOLD's JSD", at_most=0.7),
    Claim("KLD memory", "and 0.35 of its memory", at_most=0.35),
    Claim("CPT time", "a step without a teacher takes the time of TRL's SFT", at_most=1.0),
)
CLAIMED = {claim.name for claim in CLAIMS}
OURS = {
    "CPT": Method("cpt"),
    "online": Method(),
    "ULD": Method("uld", uld_pairing="last"),
    "KLD": Method("kld"),
}
WAYS = (*OURS, SFT, *GOLD)
ONE_VOCABULARY = ("KLD", GOLD_JSD)
PEERS = {"online": GOLD_ULD, "ULD": GOLD_ULD, "KLD": GOLD_JSD, "CPT": SFT}
ROLES = ("student", "teacher")


@dataclass(frozen=True)
class Size:
    """Models, tokenizers and documents.

    Attributes:
        student: a kind of tokenizer, or a directory of a byte-level one.
        teacher_vocabulary: size of the teacher's head.
        document: approximate student tokens of a document.
        max_length: student tokens of a step.
        hidden: width of the student; the teacher is twice as wide.
    """

    student: str = "gpt2"
    teacher: str = "qwen"
    teacher_vocabulary: int = 152_064
    document: int = 120
    max_length: int = 512
    hidden: int = 128
    layers: int = 4
    turns: int = 3


FULL = Size()
TINY = Size("tiny-gpt2", "tiny-qwen", 2048, 40, max_length=96, hidden=64, layers=1, turns=1)


def measure(size: Size) -> Measured:
    """Return the median of each claimed ratio.

    Raises:
        Skipped: TRL is not installed.
    """
    require_trl()
    with tempfile.TemporaryDirectory() as name:
        prepare(size, Path(name))
        makers = {way: partial(make_way, way, size, Path(name)) for way in WAYS}
        ways = take_turns_apart(makers, size.turns, memory=1)
    values, details = {}, [f"{way:10}{taken.spread}{taken.added}" for way, taken in ways.items()]
    for ours, theirs in PEERS.items():
        for what, taken in (("time", "seconds"), ("memory", "added_bytes")):
            both = zip(getattr(ways[ours], taken), getattr(ways[theirs], taken), strict=True)
            ratios = [x / y for x, y in both]
            if f"{ours} {what}" in CLAIMED:
                values[f"{ours} {what}"] = statistics.median(ratios)
            details.append(f"{ours} / {theirs}, {what}: {quartiles(ratios)}")
    return Measured(values, details)


def prepare(size: Size, directory: Path) -> None:
    """Write what every process reads: tokenizers, and the documents of each turn."""
    for role, name in zip(ROLES, (size.student, size.teacher), strict=True):
        tokenizer(name).save_pretrained(directory / role)
    texts = make_texts(2000, characters=3 * size.document)
    lengths = map(len, AutoTokenizer.from_pretrained(directory / "student")(texts)["input_ids"])
    fitting = (
        (text, tokens)
        for text, tokens in zip(texts, lengths, strict=True)
        if 0.8 * size.document < tokens < 1.06 * size.document
    )
    turns: list[list[str]] = []
    for _ in range(1 + size.turns):
        turns.append([])
        left = float(size.max_length)
        while left > 1.06 * size.document + 2:
            text, tokens = next(fitting)
            turns[-1].append(text)
            left -= tokens + 2  # with its start and end token
    (directory / "turns.json").write_text(json.dumps(turns))


def make_way(way: str, size: Size, directory: Path) -> Way:
    """Make one way in its own process."""
    datasets.disable_progress_bars()
    job = Job(way, size, directory)
    trainer: Any = job.ours() if way in OURS else job.theirs()
    trainer.create_optimizer()
    ends = list(accumulate(map(len, job.turns), initial=0))

    def rows(turn: int) -> list[Any]:
        indices = [turn] if way in OURS else range(ends[turn], ends[turn + 1])
        return [trainer.train_dataset[index] for index in indices]

    def step(rows: Any) -> None:
        take_step(trainer, trainer.data_collator(rows))

    return Way(step, rows)


class Job:
    """One way's models, tokenizers and documents."""

    def __init__(self, way: str, size: Size, directory: Path):
        self.way, self.size, self.directory = way, size, directory
        self.tokenizers = [AutoTokenizer.from_pretrained(directory / role) for role in ROLES]
        self.turns: list[list[str]] = json.loads((directory / "turns.json").read_text())
        self.arguments = arguments_of_steps(str(directory / "runs" / way))

    def model(self, vocabulary: int, scale: int) -> Any:
        """Make a random model, `scale` times as wide as the student, with heads of size 64."""
        torch.manual_seed(scale)
        hidden = self.size.hidden * scale
        context = 8 * self.size.max_length
        return llama(
            vocabulary, hidden, self.size.layers, hidden // 64, max_position_embeddings=context
        )

    def models(self) -> tuple[Any, Any]:
        """Make the student and, if the step has one, the teacher."""
        vocabulary = len(self.tokenizers[0])
        student = self.model(vocabulary, 1)
        if self.way in ("CPT", SFT):
            return student, None
        is_one = self.way in ONE_VOCABULARY
        return student, self.model(vocabulary if is_one else self.size.teacher_vocabulary, 2)

    def ours(self) -> VocAgnoTrainer:
        """Make our trainer, with one packed sequence per turn."""
        width = self.size.max_length
        tokenizers = self.tokenizers if self.way in ("online", "ULD") else self.tokenizers[:1]
        packed = [
            prepare_dataset(
                datasets.Dataset.from_dict({"text": texts}),
                *tokenizers,
                max_length=width,
                teacher_context=3 * width,
            )
            for texts in self.turns
        ]
        assert all(len(blocks) == 1 for blocks in packed), "a turn is one packed sequence"
        model, teacher = self.models()
        trainer = VocAgnoTrainer(
            model=model,
            teacher=teacher,
            method=OURS[self.way],
            args=VocAgnoConfig(
                max_length=width,
                per_device_train_batch_size=1,
                gradient_accumulation_steps=1,
                **self.arguments,
            ),
            train_dataset=packed[0],
        )
        trainer.train_dataset = [blocks[0] for blocks in packed]
        return trainer

    def theirs(self) -> Any:
        """Make TRL's trainer, with one row per document."""
        model, teacher = self.models()
        texts = list(chain(*self.turns))
        if self.way == SFT:
            # One row has all documents of a step, as ours. Positions tell attention where they end.
            return make_sft(model, texts, self.tokenizers[0], self.arguments, padding_free=True)
        directory = None if self.way in ONE_VOCABULARY else str(self.directory / "teacher")
        return make_gold(
            self.way,
            model,
            teacher,
            texts,
            self.tokenizers[0],
            directory,
            self.size.max_length,
            self.arguments,
        )
