"""Compare training steps of pretrained models with TRL's, on the same texts with the same teacher.

    python -m benchmarks real --set teacher=qwen2.5-coder-1.5b

The student is SmolLM2-135M; `Size` gives the teacher, texts and sizes. The models come from the
directory in VOCAGNOLM_TEST_MODELS, and GSM8K's solved training problems from the one in
VOCAGNOLM_TEST_DATA. A step includes collating, forward passes, backward pass and AdamW, in float32,
without clipping or checkpointing. Every way gets the same rows, which are as full as whole words
allow. So there is almost no padding, and no way reads more tokens than another. The stored losses
are random, because only their number matters.

Ways take turns in a random order, and in every round each has a new process. Ratios compare the
shortest times. With one thread, time is processor time. With two threads it is wall-clock time,
which needs an otherwise idle machine. Memory is the most that a step adds to the weights and
AdamW's state.

GOLD is TRL's experimental trainer, here with cross-entropy and the ULD loss. It compares whole
distributions, while an online step needs one number per teacher token, so that ratio compares
methods. Our ULD is the same method as GOLD's. GOLD aligns tokens only if the tokenizers are
byte-level, and Gemma's is not. With Gemma it compares tokens with the same index, as our ULD does;
with Qwen it compares aligned tokens.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.harness import Claim, Measured, Skipped, Way, one_thread, take_turns_alone
from benchmarks.peers import (
    GOLD_ULD,
    SFT,
    arguments_of_steps,
    make_gold,
    make_sft,
    require_trl,
    take_step,
)
from vocagnolm import Blocks, Method, VocAgnoConfig, VocAgnoTrainer, prepare_dataset
from vocagnolm.conventions import IGNORED_LABEL
from vocagnolm.objective import Objective, StoredTeacher

TIME, MEMORY, TWO_THREADS = "time", "memory", "time, two threads"
CPT, STORED, ONLINE, ACCEPT, ULD = "CPT", "stored", "online", "accept", "ULD"
METHODS = {
    CPT: Method("cpt"),
    STORED: Method(),
    ONLINE: Method(),
    ACCEPT: Method(selection="accept"),
    ULD: Method("uld", uld_pairing="last"),
}
WAYS = (*METHODS, SFT, GOLD_ULD)
WITHOUT_TEACHER = (CPT, STORED, SFT)
# Our way, its peer, and the largest ratios of time and of memory.
PEERS = (
    (ONLINE, GOLD_ULD, 0.6, 0.4),
    (ACCEPT, GOLD_ULD, 0.7, 0.4),
    (ULD, GOLD_ULD, 1.0, 0.6),
    (STORED, SFT, 1.0, 1.0),
    (CPT, SFT, 1.05, 1.0),
)


def _claims() -> Iterator[Claim]:
    for ours, theirs, time, memory in PEERS:
        beside = f"pretrained: {ours} step / {theirs}"
        yield Claim(f"{ours} {TIME}", f"{beside}, time", at_most=time)
        yield Claim(f"{ours} {TWO_THREADS}", f"{beside}, time with two threads", at_most=time)
        yield Claim(f"{ours} {MEMORY}", f"{beside}, memory", at_most=memory)


CLAIMS = tuple(_claims())


@dataclass(frozen=True)
class Size:
    """Models and rows.

    Attributes:
        models: the directory of both; by default VOCAGNOLM_TEST_MODELS.
        corpus: JSON Lines with a `text`; by default GSM8K's in VOCAGNOLM_TEST_DATA.
        rows: rows per step.
        max_length: student tokens per row.
        rounds: rounds with one thread; there are as many with two.
    """

    models: str = ""
    student: str = "smollm2-135m"
    teacher: str = "gemma-3-270m"
    corpus: str = ""
    rows: int = 2
    max_length: int = 256
    rounds: int = 2


FULL, TINY = Size(), Size(rows=1, max_length=64, rounds=1)


def measure(size: Size) -> Measured:
    """Return the ratios of the shortest times, and of memory.

    Raises:
        Skipped: TRL, the models or the texts are missing.
    """
    directories = [find_model(size.models, name) for name in (size.student, size.teacher)]
    corpus = find_corpus(size.corpus)
    require_trl()
    one_thread()
    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as name:
        pair = Pair(size, directories, corpus, Path(name))
        makers = {way: partial(make_way, way, pair) for way in WAYS}
        one = take_turns_alone(makers, size.rounds, threads=1, memory=True)
        two = take_turns_alone(makers, size.rounds, threads=2, memory=False)
    values: dict[str, float] = {}
    for ours, theirs, *_ in PEERS:
        values[f"{ours} {TIME}"] = min(one[ours].seconds) / min(one[theirs].seconds)
        values[f"{ours} {TWO_THREADS}"] = min(two[ours].seconds) / min(two[theirs].seconds)
        values[f"{ours} {MEMORY}"] = one[ours].added_bytes[0] / one[theirs].added_bytes[0]
    details = [
        f"{way:10}{min(one[way].seconds):8.2f} s, with two threads {min(two[way].seconds):8.2f} s"
        f"{one[way].added}"
        for way in WAYS
    ]
    online, gold = min(one[ONLINE].seconds), min(one[GOLD_ULD].seconds)
    note = (
        f"{size.student} with the teacher {size.teacher}, rows of {pair.tokens} tokens; one "
        f"thread takes {online:.1f} s for an online step, and {gold / online:.1f} times as long "
        f"for {GOLD_ULD}"
    )
    return Measured(values, details, note=note)


def find_model(directory: str, name: str) -> Path:
    """Return the directory of a pretrained model.

    Raises:
        Skipped: the model is missing.
    """
    place = directory or os.environ.get("VOCAGNOLM_TEST_MODELS", "")
    path = Path(place, name)
    if not place or not (path / "config.json").exists():
        raise Skipped(f"set VOCAGNOLM_TEST_MODELS to a directory that has {name}")
    return path


def find_corpus(file: str) -> Path:
    """Return the file of the texts.

    Raises:
        Skipped: the file is missing.
    """
    place = os.environ.get("VOCAGNOLM_TEST_DATA", "")
    path = Path(file) if file else Path(place, "data", "corpora", "gsm8k_train.jsonl")
    if not (file or place) or not path.exists():
        raise Skipped("set VOCAGNOLM_TEST_DATA to a directory that has data/corpora")
    return path


class Pair:
    """Both models, loaded once for all forked processes, and the texts of each turn."""

    def __init__(self, size: Size, directories: Sequence[Path], corpus: Path, output: Path):
        self.size, self.directories, self.output = size, directories, output
        self.tokenizers = [AutoTokenizer.from_pretrained(path) for path in directories]
        self.models = [
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in directories
        ]
        with corpus.open(encoding="utf-8") as file:
            texts = [json.loads(next(file))["text"] for _ in range(500)]
        self.turns = make_turns(texts, self.tokenizers[0], size)
        self.tokens = [len(ids) for ids in self.tokenizers[0](self.turns[1])["input_ids"]]
        # The packed sequences of each turn, without a teacher and with one.
        self.plain = [self._pack(texts, self.tokenizers[:1]) for texts in self.turns]
        self.guided = [self._pack(texts, self.tokenizers) for texts in self.turns]

    def _pack(self, texts: Sequence[str], tokenizers: Sequence[Any]) -> Blocks:
        width = self.size.max_length
        dataset = datasets.Dataset.from_dict({"text": texts})
        blocks = prepare_dataset(dataset, *tokenizers, max_length=width, teacher_context=2 * width)
        assert len(blocks) == len(texts), "a text is a packed sequence"
        return blocks


def make_turns(texts: Sequence[str], tokenizer: Any, size: Size) -> list[list[str]]:
    """Make the longest rows of whole words that fit: one short warm-up row, `rows` per round."""
    rest = "\n\n".join(texts)
    # The number of tokens of each row of each turn.
    lengths = [[size.max_length // 4]] + [[size.max_length] * size.rows] * size.rounds
    turns: list[list[str]] = []
    for turn in lengths:
        turns.append([])
        for length in turn:
            spans = tokenizer(rest[: 20 * length], return_offsets_mapping=True)["offset_mapping"]
            # Leave room for a start token and an end token.
            end = spans[length - 3][1]
            row = rest[:end].rpartition(" ")[0]
            turns[-1].append(row)
            rest = rest[len(row) :].lstrip()
    return turns


def make_way(way: str, pair: Pair) -> Way:
    """Make one way in its own process."""
    trainer, rows = (ours if way in METHODS else theirs)(way, pair)
    trainer.create_optimizer()
    read = [sum(map(len, pair.tokenizers[0](texts)["input_ids"])) for texts in pair.turns]

    def step(given: Any) -> None:
        rows, expected = given
        batch = trainer.data_collator(rows)
        # A row's first token has no loss. GOLD's prompt has none either; it is one word.
        trained = int((batch["labels"][:, 1:] != IGNORED_LABEL).sum())
        assert abs(trained - expected) <= 8 * len(rows), "all ways train the same tokens"
        assert batch["input_ids"].shape[1] <= pair.size.max_length, "no way pads more"
        take_step(trainer, batch)

    return Way(step, lambda turn: (rows[turn], read[turn]))


def ours(way: str, pair: Pair) -> tuple[VocAgnoTrainer, list[Any]]:
    """Make our trainer, and the packed sequences of each turn."""
    turns = pair.plain if way == CPT else pair.guided
    rows: list[list[Any]] = [list(blocks) for blocks in turns]
    if way == STORED:
        rows = [[stored(block) for block in blocks] for blocks in rows]
    trainer = VocAgnoTrainer(
        model=pair.models[0],
        teacher=None if way in WITHOUT_TEACHER else pair.models[1],
        method=METHODS[CPT if way == STORED else way],
        args=VocAgnoConfig(
            max_length=pair.size.max_length,
            per_device_train_batch_size=pair.size.rows,
            gradient_accumulation_steps=1,
            **arguments_of_steps(str(pair.output / way)),
        ),
        train_dataset=turns[0],
    )
    if way == STORED:
        trainer.token_objective = Objective(METHODS[STORED], StoredTeacher())
    return trainer, rows


def stored(block: dict[str, Any]) -> dict[str, Any]:
    """Replace the teacher tokens of a packed sequence by random losses, as from a store."""
    rng, losses = np.random.default_rng(0), []
    for ids in block["teacher_ids"]:
        losses.append(rng.exponential(2, len(ids)).astype(np.float32))
        losses[-1][0] = np.nan  # nothing predicts it
    return {**block, "teacher_ids": [[] for _ in losses], "teacher_losses": losses}


def theirs(way: str, pair: Pair) -> tuple[Any, list[Any]]:
    """Make TRL's trainer, and the rows of each turn."""
    texts = [text for turn in pair.turns for text in turn]
    arguments = arguments_of_steps(str(pair.output / way))
    if way == SFT:
        trainer = make_sft(pair.models[0], texts, pair.tokenizers[0], arguments, False)
    else:
        trainer = make_gold(
            way,
            *pair.models,
            texts,
            pair.tokenizers[0],
            str(pair.directories[1]),
            pair.size.max_length,
            arguments,
        )
    left, rows = iter(range(len(texts))), []
    for turn in pair.turns:
        rows.append([trainer.train_dataset[next(left)] for _ in turn])
    return trainer, rows
