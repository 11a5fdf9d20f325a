"""Strings that have gone wrong somewhere in a tokenizer."""

# What tokenizers treat specially, what changes its length when it is normalised, and what Python
# and Rust might count differently.
FUZZ_PIECES = (
    *("Let", " the", "number", " of", "apples ", "Solve", "x", " y", "n", "A", "é", "ß", "naïve"),
    *("1", "12", " 2025", "3.14", "1,000", "007", "½", "²", "٣", "१"),
    *("+", " = ", "<=", "(", ")", "[", "{", "}", "^2", "_i", "!", "...", "%", "#", "---", "====="),
    *(r"\frac{1}{2}", r"\alpha", r" \sum_{i=1}^n", r"\begin{aligned}", "$$", r"\\", "&", "~"),
    *(" ", "  ", "   ", "        ", "\n", "\n\n", "\r\n", "\r", "\t", "\n\t", "\u00a0", "\u3000"),
    *("😀", "👩\u200d👩\u200d👧\u200d👦", "🇩🇪", "👍🏽", "\u2764\ufe0f", "∑", "≤", "→", "√2"),
    *("\U0001d538", "\U0001d465"),
    *("数学", "日本語", "。", "한국어", "שלום", "مرحبا", "Привет", "नमस्ते", "ไทย"),
    *("e\u0301", "cafe\u0301", "=\u0338", "a\u0315\u0300", "\u0301", "\u0344", "o\u0302\u0323"),
    *("\u1112\u1161\u11ab", "\u1100\u1161", "\u0958", "\u2126", "\u212b", "\ufb01", "\ufb02"),
    *("\u200b", "\u200d", "\u200e", "\u202e", "\ufeff", "\ufffd", "\u2028", "\u0085", "\U0001d15e"),
    *("\x00", "\x01", "\x1b", "\x1c", "\x7f", "\x0b", "\x0c", "\u2581", "Ġ", "Ċ"),
    *("</s>", "<s>", "<unk>", "<|endoftext|>", "<|im_end|>", "[MASK]", "<0x0A>", "<pad>"),
)
