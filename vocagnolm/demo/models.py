"""Models of the embedded world: shapes of both, and places of the shipped parts."""

from __future__ import annotations

from pathlib import Path

from transformers import LlamaConfig

# Shipped with the package; benchmarks/make_demo_teacher.py makes them.
ASSETS = Path(__file__).parents[1] / "assets"
TEACHER, STUDENT_TOKENIZER = "demo_teacher", "demo_student"
STUDENT_VOCABULARY_TOKENS, TEACHER_VOCABULARY_TOKENS = 1024, 2048


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
