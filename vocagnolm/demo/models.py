"""Models of the embedded world: shape of the student, and places of the shipped parts."""

from transformers import LlamaConfig

# Among the package's assets; benchmarks/make_demo_teacher.py makes them.
TEACHER, STUDENT_TOKENIZER = "demo_teacher", "demo_student"
STUDENT_VOCABULARY_TOKENS = 1024


def student_config() -> LlamaConfig:
    """One wide layer: the shape that learned the most arithmetic per second of a CPU core."""
    return llama_config(STUDENT_VOCABULARY_TOKENS, 128, 384, layers=1, start=1, end=2)


def llama_config(
    vocabulary_tokens: int, hidden: int, inner: int, *, layers: int, start: int, end: int
) -> LlamaConfig:
    """Make the configuration of a small model."""
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
        bos_token_id=start,
        eos_token_id=end,
    )
