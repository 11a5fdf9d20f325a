"""Generate inputs: mathematical prose, tokenizers trained on it, and packed blocks of random ids.

Everything follows from a seed, so that a clone needs no other files.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from vocagnolm.collator import PackedCollator
from vocagnolm.packing import pack

TOKEN_RATIO = 0.943  # Qwen2.5's tokens per token of TinyLlama's (NOTEBOOK.md)
DOCUMENT_TOKENS = 2333  # 14.7 B tokens in 6.3 M documents (OpenWebMath, arXiv 2310.06786)
DOCUMENT_SIGMA = 1.0  # standard deviation of the logarithm of the lengths: an assumption

# -- Texts ---------------------------------------------------------------------------------------

_WORDS = 100_000
_ONSETS = "b c d f g h j k l m n p r s t v w z br cl cr dr fl gr pl pr sh sp st th tr ch qu".split()
_VOWELS = "a e i o u a e i o ea ou ie".split()
_CODAS = ["", "", *"n r s t l m nd st ng x ct ss".split()]
_FORMULAS = (
    *(r"\frac{{{x}}}{{{y}}}", "{x}_{{{n}}}", "{x}^{{{n}}}", r"\sum_{{{x}=1}}^{{{n}}} {y}"),
    *("{x}({y})", r"\alpha + {n}{x}", "{n} = {n}{n}", r"\int_0^{n} {x}\,d{x}", r"\sqrt{{{n}}}"),
    *(r"\mathbb{{R}}^{n}", r"\{{{x} \in {y}\}}"),
)
_RELATIONS = (" + ", " = ", r" \leq ", ", ")


class _Writer:
    """Writes sentences of formulas and of invented words, whose frequencies follow Zipf's law."""

    def __init__(self, seed: str):
        words = random.Random("words")
        syllables = words.choices((1, 2, 3, 4), (2, 5, 4, 2), k=_WORDS)
        found = ["".join(self._syllable(words) for _ in range(count)) for count in syllables]
        # Short words tend to be frequent.
        self._words = sorted(dict.fromkeys(found), key=lambda word: len(word) + 6 * words.random())
        self._weights = list(accumulate(1 / (rank + 3) for rank in range(len(self._words))))
        self._rng = random.Random(seed)

    @staticmethod
    def _syllable(rng: random.Random) -> str:
        return rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS)

    def text(self, characters: float) -> str:
        """Write paragraphs with at least this many characters in all."""
        paragraphs, written = [], 0
        while written < characters:
            sentences = " ".join(self._sentence() for _ in range(self._rng.randint(1, 5)))
            paragraphs.append(sentences)
            written += len(sentences)
        return "\n\n".join(paragraphs)

    def _sentence(self) -> str:
        rng = self._rng
        words = rng.choices(self._words, cum_weights=self._weights, k=rng.randint(5, 16))
        for _ in range(rng.choice((0, 1, 1, 2))):
            words.insert(rng.randint(1, len(words)), f"${self._formula()}$")
        if rng.random() < 0.3:
            words.insert(2, str(rng.randint(2, 5000)))
        return f"{words[0].capitalize()} {' '.join(words[1:])}."

    def _formula(self) -> str:
        rng = self._rng
        parts = []
        for _ in range(rng.randint(1, 3)):
            x, y = rng.choices("abcfgknxyzABGX", k=2)
            parts.append(rng.choice(_FORMULAS).format(x=x, y=y, n=rng.randint(0, 99)))
        return rng.choice(_RELATIONS).join(parts)


def make_texts(count: int, characters: int = 1500, seed: str = "texts") -> list[str]:
    """Write documents with a median of `characters`; most have half to twice as many."""
    writer, rng = _Writer(seed), random.Random(f"lengths of {seed}")
    return [writer.text(characters * rng.lognormvariate(0, 0.7)) for _ in range(count)]


def read_texts(corpus: str, count: int) -> list[str]:
    """Read the first `text` fields of a JSON Lines file, or write as many texts without a file."""
    if not corpus:
        return make_texts(count)
    with Path(corpus).open(encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in islice(lines, count)]


# -- Tokenizers ----------------------------------------------------------------------------------


class _Kind(NamedTuple):
    """How a tokenizer splits text, how many tokens it learns, and the size of its vocabulary.

    The other tokens fill up the vocabulary, like those of other languages: no text here has them.
    """

    like: str
    learned: int
    vocabulary: int


KINDS = {
    "llama": _Kind("llama", 12_000, 32_000),
    "gpt2": _Kind("gpt2", 30_000, 50_256),
    "qwen": _Kind("qwen", 50_000, 151_643),
    "tiny-llama": _Kind("llama", 1000, 1100),
    "tiny-gpt2": _Kind("gpt2", 1200, 1200),
    "tiny-qwen": _Kind("qwen", 2000, 2000),
}
# Qwen2.5's pattern: each digit is a token. A word takes the character before it.
_QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LEARNED_FROM = 2000  # documents


def tokenizer(name: str) -> Any:
    """Load a tokenizer from a directory, or make one of `KINDS`."""
    return AutoTokenizer.from_pretrained(_trained(name) if name in KINDS else name)


@cache
def _trained(name: str) -> str:
    """Train a tokenizer once. Processes that are forked later share it."""
    kind, path = KINDS[name], f"{_kept().name}/{name}"
    count = _LEARNED_FROM if kind.learned > 2000 else 100
    learned = _learn(kind, make_texts(count, seed="what tokenizers learn"))
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    if kind.like != "llama":
        special = {"eos_token": "<|endoftext|>"}
    made = PreTrainedTokenizerFast(
        tokenizer_object=learned, pad_token=special["eos_token"], **special
    )
    made.save_pretrained(path)
    return path


@cache
def _kept() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="tokenizers-")  # until the process ends


def _learn(kind: _Kind, texts: Sequence[str]) -> Tokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = {"vocab_size": kind.learned, "show_progress": False}
    trained = Tokenizer(models.BPE())
    if kind.like == "llama":
        # With Llama's `byte_fallback`, a character that was never seen becomes bytes.
        by_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
        trainer["special_tokens"] = ["<unk>", "<s>", "</s>", *by_bytes]
        trained.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.Split(Regex(r" ?[^\p{L}\p{N}\s]+"), "isolated"),
                pre_tokenizers.Metaspace(prepend_scheme="first"),
            ]
        )
    else:
        trainer["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
        trained.pre_tokenizer = byte_level
        if kind.like == "qwen":
            trained.normalizer = normalizers.NFC()
            split = pre_tokenizers.Split(Regex(_QWEN_PATTERN), "isolated")
            byte_level.use_regex = False
            trained.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    trained.train_from_iterator(texts, trainers.BpeTrainer(**trainer))
    return _as_published(kind, trained)


def _as_published(kind: _Kind, trained: Tokenizer) -> Tokenizer:
    """Fill up the vocabulary. As published, a Llama tokenizer reads a whole text as one word."""
    state = json.loads(trained.to_str())
    words = state["model"]["vocab"]
    words |= {f"\u2581other{index}": index for index in range(len(words), kind.vocabulary)}
    if kind.like == "llama":
        state["model"] |= {"byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>"}
        state["added_tokens"] = state["added_tokens"][:3]
    made = Tokenizer.from_str(json.dumps(state))
    made.decoder = decoders.ByteLevel()
    if kind.like == "llama":
        made.decoder = llama_decoder()
        made.pre_tokenizer = None
        spaces = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        made.normalizer = normalizers.Sequence(spaces)
    return made


def llama_decoder() -> Any:
    """Return the decoder of a Llama tokenizer."""
    return decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )


# -- Blocks --------------------------------------------------------------------------------------


def make_segment(
    rng: np.random.Generator, length: int, vocabularies: tuple[int, int]
) -> dict[str, Any]:
    """Make a segment, with the teacher's tokens spread evenly over `length` student tokens."""
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
    """Make a random sample of blocks, cut and packed from random documents as in training.

    Args:
        count: number of blocks.
        max_length: tokens of a block. Document lengths are proportional to it: 2,333 tokens on
            average at 2,048.
        vocabularies: vocabulary sizes of the student and the teacher.
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
    """Make micro-batches of blocks with the teacher's ids or, if `stored`, with its losses."""
    dropped = "teacher_ids" if stored else "teacher_losses"
    blocks = [{**block, dropped: [[] for _ in block[dropped]]} for block in blocks]
    collate = PackedCollator(max_length, teacher_max_length=max_length)
    starts = range(0, len(blocks), batch_size)
    return [collate(blocks[start : start + batch_size]) for start in starts]
