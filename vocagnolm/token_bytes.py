"""The bytes that tokens stand for, where they tell characters faster than offsets do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from vocagnolm.conventions import IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Bytes that stand for themselves in byte-level vocabularies; the others are U+0100 and following.
_PRINTABLE = list(range(0x21, 0x7F)) + list(range(0xA1, 0xAD)) + list(range(0xAE, 0x100))
_UNPRINTABLE = [byte for byte in range(0x100) if byte not in _PRINTABLE]
_BYTE_LEVEL = {chr(byte): byte for byte in _PRINTABLE}
_BYTE_LEVEL |= {chr(0x100 + index): byte for index, byte in enumerate(_UNPRINTABLE)}
_FALLBACK = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(0x100)}


def byte_level(token: str) -> bytes:
    """Return the bytes of a token of letters for bytes; a KeyError where one is another."""
    return bytes(_BYTE_LEVEL[letter] for letter in token)


def sentencepiece(token: str) -> bytes:
    """Return the bytes of a token, in which `▁` is a space; `<0xAB>` is a byte."""
    return _FALLBACK.get(token) or token.replace("▁", " ").encode()


class TokenBytes:
    """The bytes of all tokens of a vocabulary, concatenated by id."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, spell: Callable[[str], bytes]):
        vocabulary = tokenizer.get_vocab()
        spelt = [b""] * (max(vocabulary.values(), default=-1) + 1)
        for token, index in vocabulary.items():
            with suppress(KeyError):
                spelt[index] = spell(token)
        # These are literal, however the others are spelt.
        for index, added in tokenizer.added_tokens_decoder.items():
            spelt[index] = added.content.encode()
        self._content = np.frombuffer(b"".join(spelt), np.uint8)
        self._sizes = np.fromiter(map(len, spelt), np.int64, len(spelt))
        self._starts = np.cumsum(self._sizes) - self._sizes

    def find(
        self,
        ids: npt.NDArray[np.int32],
        edges: IntArray,
        texts: Sequence[str],
        contents: Sequence[bytes],
    ) -> tuple[IntArray, list[int]]:
        """Find the spans of texts' tokens, and the indices of the texts that they do not spell.

        Text t, in UTF-8 contents[t], has the tokens from edges[t] up to edges[t + 1]. A token has
        every character of which it has a byte; a token for the space alone that a tokenizer puts
        before a text has the first one.
        """
        sizes = self._sizes[ids]
        ends = np.cumsum(sizes)
        starts = ends - sizes
        at = np.repeat(self._starts[ids] - starts, sizes)
        at += np.arange(len(at))
        spelt = self._content[at].tobytes()
        # Where each text begins: in the bytes of the tokens, and in the bytes of the texts.
        begins = np.append(0, ends)[edges]
        text_begins = np.cumsum([0] + [len(content) for content in contents])
        wrong = []
        for text, content in enumerate(contents):
            spelt_text = spelt[begins[text] : begins[text + 1]]
            if spelt_text != content and spelt_text != b" " + content:
                wrong.append(text)
        # From bytes of the tokens to bytes of the texts, concatenated too: without that space.
        #
        #   tokens   _ a | b   b c | _ d       two of three texts have a space in front
        #   texts      a | b   b c |   d
        counts = np.diff(edges)
        move = text_begins[1:] - begins[1:]
        starts = np.maximum(starts + np.repeat(move, counts), np.repeat(text_begins[:-1], counts))
        ends = np.maximum(ends + np.repeat(move, counts), starts + 1)
        spans = np.stack((starts, ends - 1), axis=1)
        lengths = np.fromiter(map(len, texts), np.int64, len(texts))
        if lengths.sum() < text_begins[-1]:
            # Index of the character that has a byte. The first byte of each is not 10xxxxxx.
            first = np.frombuffer(b"".join(contents), np.uint8) & 0xC0 != 0x80
            spans = np.take(np.cumsum(first) - 1, spans, mode="clip")
        spans[:, 1] += 1
        spans -= np.repeat(np.cumsum(lengths) - lengths, counts)[:, None]
        return spans, wrong
