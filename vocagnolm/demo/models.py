"""The two tokenizers of the embedded world, and the shapes of its two models."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from vocagnolm.demo.world import general_text, held_out_questions, page

# Shipped with the package; benchmarks/make_demo_teacher.py makes them.
ASSETS = Path(__file__).parents[1] / "assets"
TEACHER, STUDENT_TOKENIZER = "demo_teacher", "demo_student"

STUDENT_VOCABULARY_TOKENS = 1024
TEACHER_VOCABULARY_TOKENS = 2048
TOKENIZER_TEXTS = 4000


def student_tokenizer() -> PreTrainedTokenizerFast:
    """Metaspace BPE with byte fallback, as Llama's: numbers of several digits are one token."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            # A number keeps its token at the end of a sentence.
            pre_tokenizers.Split(Regex(r"[.?]|\n"), "isolated"),
            pre_tokenizers.Metaspace(prepend_scheme="first"),
        ]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=STUDENT_VOCABULARY_TOKENS,
        special_tokens=special + [f"<0x{byte:02X}>" for byte in range(256)],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_tokenizer_texts(), trainer)
    # The trainer can only reserve byte tokens as special ones, which a decoder would then drop.
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = state["added_tokens"][: len(special)]
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer.from_str(json.dumps(state)),
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        add_bos_token=True,
    )


def teacher_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with single digits, as Qwen2.5's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TEACHER_VOCABULARY_TOKENS,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_tokenizer_texts(), trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token="<|endoftext|>"
    )


def _tokenizer_texts() -> Iterator[str]:
    rng, excluded = random.Random("tokenizer"), held_out_questions()
    for _ in range(TOKENIZER_TEXTS):
        yield page(rng, 0.4, excluded)
        yield general_text(rng, excluded=excluded)


def student_config() -> LlamaConfig:
    """One wide layer: the shape that learned the most arithmetic per second of a CPU core."""
    config = _llama(STUDENT_VOCABULARY_TOKENS, hidden=128, inner=384, layers=1)
    config.bos_token_id, config.eos_token_id = 1, 2
    return config


def teacher_config() -> LlamaConfig:
    """About half a million parameters."""
    config = _llama(TEACHER_VOCABULARY_TOKENS, hidden=96, inner=256, layers=3)
    config.bos_token_id = config.eos_token_id = 0
    return config


def _llama(vocabulary_tokens: int, hidden: int, inner: int, layers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocabulary_tokens,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.04,
    )
