"""Generated inputs: word problems, two tokenizers that learn them, and packed blocks of ids."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from vocagnolm.collator import PackedCollator
from vocagnolm.packing import pack

TOKEN_RATIO = 0.943  # Qwen2.5's tokens per token of TinyLlama's (docs/results.md)
DOCUMENT_TOKENS = 2333  # 14.7 B tokens in 6.3 M documents (OpenWebMath, arXiv 2310.06786)
DOCUMENT_SIGMA = 1.0  # of the lengths' logarithm: an assumption


def generate_texts(count: int) -> list[str]:
    """Word problems with numbers and formulas, about 1,000 characters each."""
    rng = random.Random(0)
    texts = []
    for _ in range(count):
        lines = []
        for _ in range(10):
            a, b = rng.randint(2, 999), rng.randint(2, 999)
            lines.append(f"Anna has {a} apples and buys {b} more. Now there are {a + b} apples.")
            lines.append(f"$\\frac{{{a}}}{{{b}}} + x_{{{a % 7}}} = {a * b}$")
        texts.append("\n".join(lines))
    return texts


def train_student(texts: list[str]) -> PreTrainedTokenizerFast:
    """A Metaspace BPE, like TinyLlama's."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(
        vocab_size=1000, special_tokens=["<unk>", "<s>"], show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>")


def train_teacher(
    texts: list[str], words: int = 2000, single_digits: bool = True
) -> PreTrainedTokenizerFast:
    """A byte-level BPE with NFC and single digits, like Qwen's, or with whole numbers."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=single_digits),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=words,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def make_segment(
    rng: np.random.Generator, length: int, vocabularies: tuple[int, int]
) -> dict[str, Any]:
    """A segment's columns: the teacher's tokens spread evenly over `length` of the student's."""
    theirs = max(1, round(length * TOKEN_RATIO))
    at = np.arange(length)
    shares = np.ones(3 * length, np.float32)
    shares[rng.choice(3 * length, length // 5, replace=False)] = 0.5
    losses = rng.exponential(2, theirs).astype(np.float32)
    losses[0] = np.nan  # nothing predicts it
    return {
        "student_ids": rng.integers(vocabularies[0], size=length),
        "teacher_ids": rng.integers(vocabularies[1], size=theirs),
        "teacher_losses": losses,
        "ranges": np.stack([at * theirs // length, -(-(at + 1) * theirs // length)], 1)[None],
        "shares": shares.reshape(1, -1, 3),
        "teacher_counts": [theirs],
        **dict.fromkeys(("student_labelled", "teacher_labelled"), ()),
    }


def make_blocks(count: int, max_length: int, vocabularies: tuple[int, int]) -> list[dict[str, Any]]:
    """Blocks drawn from those that some documents fill, cut and packed as in training.

    Args:
        count: how many.
        max_length: tokens of a block; documents are shorter in proportion, if it is below 2,048.
        vocabularies: of the student and the teacher.
    """
    rng = np.random.default_rng(0)
    mean = DOCUMENT_TOKENS * max_length / 2048
    lengths: list[int] = []
    packed: list[list[int]] = []
    while len(packed) < count:
        for document in rng.lognormal(np.log(mean) - DOCUMENT_SIGMA**2 / 2, DOCUMENT_SIGMA, 100):
            full, rest = divmod(int(document), max_length)
            lengths += [max_length] * full + [rest] * (rest > 1)
        theirs = [max(1, round(length * TOKEN_RATIO)) for length in lengths]
        packed = pack(lengths, theirs, max_length, max_length)
    blocks = []
    for number, members in enumerate(random.Random(0).sample(packed, count)):
        segments = [make_segment(rng, lengths[member], vocabularies) for member in members]
        columns = {name: [segment[name] for segment in segments] for name in segments[0]}
        blocks.append({"block": number, **columns})
    return blocks


def make_batches(
    blocks: Sequence[dict[str, Any]], max_length: int, batch_size: int, stored: bool
) -> list[dict[str, Any]]:
    """Micro-batches of blocks, with the teacher's ids or, as from a store, with its losses."""
    dropped = "teacher_ids" if stored else "teacher_losses"
    blocks = [{**block, dropped: [[] for _ in block[dropped]]} for block in blocks]
    collate = PackedCollator(max_length, teacher_max_length=max_length)
    starts = range(0, len(blocks), batch_size)
    return [collate(blocks[start : start + batch_size]) for start in starts]
