"""Fixtures shared by all tests: tiny tokenizers of every family, tiny models, fuzz text."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fuzz import FUZZ_PIECES
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
SINGLE_DIGITS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.fixture(scope="session")
def fuzz_texts() -> Callable[..., list[str]]:
    """`fuzz_texts(count, seed=0, pieces=12)`: texts of at most `pieces` pieces."""

    def generate(count: int, seed: int = 0, pieces: int = 12) -> list[str]:
        rng = random.Random(seed)
        texts = []
        for _ in range(count):
            parts = rng.choices(FUZZ_PIECES, k=rng.randint(0, pieces))
            if rng.random() < 0.2:
                code = rng.choice((rng.randrange(0x3000), rng.randrange(0xE000, 0x110000)))
                parts.insert(rng.randint(0, len(parts)), chr(code))
            text = "".join(parts)
            if rng.random() < 0.2:  # cut inside a piece
                text = text[rng.randint(0, 3) : len(text) - rng.randint(0, 3)]
            texts.append(text)
        return texts

    return generate


@cache
def mathematics() -> list[str]:
    """A few hundred lines of mathematics to train tokenizers and models on."""
    rng = random.Random(0)
    names, things = ("Anna", "Ben", "Chloé", "Dmitri"), ("apples", "books", "coins", "marbles")
    texts = []
    for _ in range(300):
        a, b = rng.randint(2, 99), rng.randint(2, 99)
        name, thing = rng.choice(names), rng.choice(things)
        texts += [
            f"{name} has {a} {thing} and buys {b} more {thing}. How many {thing} does"
            f" {name} have?\n{name} has {a} + {b} = {a + b} {thing}.\nThe answer is {a + b}.",
            f"Let $x_{a % 10} = \\frac{{{a}}}{{{b}}}$ and $y^2 = {a * b}$.\n\n\\begin{{proof}} The"
            f" number of the solutions of the equation is $\\sum_{{i=1}}^{{n}} \\alpha_i \\le {b}$."
            " \\end{proof}",
        ]
    return [*texts, "naïve café über é ü ß 数学 日本 한국 Привет мир 😀 ≤ ∑ → √ π β"]


@pytest.fixture(scope="session")
def training_texts() -> list[str]:
    """A few hundred lines of mathematics to train tokenizers and models on."""
    return mathematics()


def _wrap(tokenizer: Tokenizer, **special: str) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def _train_metaspace(texts: list[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[*special, *BYTE_TOKENS], show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    # The byte tokens had to be "special" to enter the vocabulary; as in Llama, they must not match
    # the string "<0x0A>" in a text.
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [
        token for token in state["added_tokens"] if token["content"] in special
    ]
    return Tokenizer.from_str(json.dumps(state))


def _train_byte_level(
    texts: list[str], vocab_size: int, special: list[str], digits: bool = False, trim: bool = False
) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    if digits:
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(SINGLE_DIGITS), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _train_unigram(texts: list[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    )
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size,
        special_tokens=["<pad>", "</s>", "<unk>"],
        unk_token="<unk>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


@cache
def tiny_tokenizers() -> dict[str, PreTrainedTokenizerFast]:
    """Train a tiny tokenizer of each family."""
    training_texts = mathematics()
    llama_special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    metaspace = _train_metaspace(training_texts, 600)
    prepend = Tokenizer.from_str(metaspace.to_str())
    prepend.pre_tokenizer = None
    prepend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    byte_level = _train_byte_level(training_texts, 500, ["<|endoftext|>"])
    chat = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    nfc_digits = _train_byte_level(training_texts, 700, chat, digits=True)
    trimmed = _train_byte_level(training_texts, 400, ["<s>", "</s>"], trim=True)
    unigram = _train_unigram(training_texts, 300)
    end = "<|endoftext|>"
    return {
        "metaspace": _wrap(metaspace, **llama_special),
        "prepend": _wrap(prepend, **llama_special),
        "byte_level": _wrap(byte_level, bos_token=end, eos_token=end),
        "nfc_digits": _wrap(nfc_digits, eos_token="<|im_end|>", pad_token=end),
        "trimmed": _wrap(trimmed, bos_token="<s>", eos_token="</s>"),
        "unigram": _wrap(unigram, unk_token="<unk>", eos_token="</s>", pad_token="<pad>"),
    }


@pytest.fixture(scope="session")
def tokenizers_by_family() -> dict[str, PreTrainedTokenizerFast]:
    """Tiny tokenizers: metaspace, prepend, byte_level, nfc_digits, trimmed, unigram.

    Do not change them: all tests share them. Load fresh copies from `tokenizer_dirs`.
    """
    return tiny_tokenizers()


@pytest.fixture(scope="session")
def tokenizer_dirs(
    tokenizers_by_family: dict[str, PreTrainedTokenizerFast],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Path]:
    """The tiny tokenizers saved, one directory each; read-only by convention."""
    root = tmp_path_factory.mktemp("tokenizers")
    for family, tokenizer in tokenizers_by_family.items():
        tokenizer.save_pretrained(root / family)
    return {family: root / family for family in tokenizers_by_family}


@pytest.fixture(scope="session")
def student_tokenizer(
    tokenizers_by_family: dict[str, PreTrainedTokenizerFast],
) -> PreTrainedTokenizerBase:
    """The usual student: Metaspace BPE with byte fallback, as TinyLlama's."""
    return tokenizers_by_family["metaspace"]


@pytest.fixture(scope="session")
def teacher_tokenizer(
    tokenizers_by_family: dict[str, PreTrainedTokenizerFast],
) -> PreTrainedTokenizerBase:
    """The usual teacher: byte-level BPE with NFC and single digits, as Qwen's."""
    return tokenizers_by_family["nfc_digits"]


@pytest.fixture(scope="session")
def tiny_llama() -> Callable[..., Any]:
    """`tiny_llama(vocab_size, seed=0, **config)`: a random LlamaForCausalLM, eval mode, float32."""

    def build(vocab_size: int, seed: int = 0, **config: Any) -> Any:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        settings = {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            **config,
        }
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, **settings))
        return model.eval()

    return build
