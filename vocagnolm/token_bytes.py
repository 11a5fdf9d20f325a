"""The bytes of tokens, from which spans follow faster than from offsets, if tokens have bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from vocagnolm.conventions import IntArray

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Bytes that stand for themselves in byte-level vocabularies: the printable characters of Latin-1.
_PRINTABLE = set(range(0x21, 0x7F)) | set(range(0xA1, 0xAD)) | set(range(0xAE, 0x100))


def _bytes_of_letters() -> dict[str, int]:
    """Return the byte that each letter of a byte-level vocabulary stands for."""
    byte_of = {}
    unprintable = 0
    for byte in range(0x100):
        if byte in _PRINTABLE:
            byte_of[chr(byte)] = byte
        else:
            # The other bytes, in order, have the letters from U+0100 on, so a space is U+0120.
            # GPT-2 began this, and all byte-level vocabularies follow.
            byte_of[chr(0x100 + unprintable)] = byte
            unprintable += 1
    return byte_of


_BYTE_LEVEL = _bytes_of_letters()
_FALLBACK = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(0x100)}


def byte_level(token: str) -> bytes:
    """Return the bytes of a token that is spelt in letters for bytes.

    Raises:
        KeyError: a letter stands for no byte.
    """
    return bytes(map(_BYTE_LEVEL.__getitem__, token))


def sentencepiece(token: str) -> bytes:
    """Return the bytes of a token, in which `▁` is a space and `<0xAB>` a byte."""
    return _FALLBACK.get(token) or token.replace("▁", " ").encode()


class TokenBytes:
    """The bytes of all tokens of a vocabulary, concatenated by id."""

    def __init__(self, tokenizer: Tokenizer, spell: Callable[[str], bytes]):
        vocabulary = tokenizer.get_vocab()
        # A vocabulary may skip ids, so the list is as long as the largest id requires.
        spelt = [b""] * (max(vocabulary.values(), default=-1) + 1)
        for token, index in vocabulary.items():
            # A token that cannot be spelt has no bytes. Texts with that token then do not match
            # their bytes, and get their spans from offsets.
            with suppress(KeyError):
                spelt[index] = spell(token)
        # Added tokens are literal text, however the vocabulary spells others.
        for index, added in tokenizer.get_added_tokens_decoder().items():
            spelt[index] = added.content.encode()
        # The bytes of token i are content[starts[i] : starts[i] + sizes[i]]. With flat arrays,
        # `find` can gather the bytes of all tokens of a batch at once.
        self._content = np.frombuffer(b"".join(spelt), np.uint8)
        self._sizes = np.fromiter(map(len, spelt), np.int64, len(spelt))
        self._starts = np.cumsum(self._sizes) - self._sizes

    @property
    def size(self) -> int:
        """The number of ids, all of which are below it."""
        return len(self._sizes)

    def find(
        self,
        ids: npt.NDArray[np.int32],
        edges: IntArray,
        texts: Sequence[str],
        contents: Sequence[bytes],
    ) -> tuple[IntArray, list[int]]:
        """Find the spans of texts' tokens, and the indices of texts that their tokens do not spell.

        Text t, in UTF-8 contents[t], has the tokens from edges[t] to edges[t + 1]. A token has
        every character of which it has a byte. If a tokenizer puts a space before a text, and a
        token is only that space, it has the first character.
        """
        sizes = self._sizes[ids]
        # Token n has the bytes [starts[n], ends[n]) of everything that the tokens spell.
        ends = np.cumsum(sizes)
        starts = ends - sizes
        # Each of these bytes is copied from the table. Within a token, both indices grow by one, so
        # their difference is the same for all of its bytes.
        places = np.repeat(self._starts[ids] - starts, sizes)
        places += np.arange(len(places))
        spelt = self._content[places].tobytes()
        # Where each text begins, in the bytes of the tokens and in the bytes of the texts.
        begins = np.append(0, ends)[edges]
        text_sizes = np.fromiter(map(len, contents), np.int64, len(contents))
        text_begins = np.append(0, np.cumsum(text_sizes))
        wrong = []
        for text, content in enumerate(contents):
            spelt_text = spelt[begins[text] : begins[text + 1]]
            # An empty text has no first character for the space before it.
            with_space = b" " + content if content else b""
            if spelt_text not in (content, with_space):
                wrong.append(text)
        # Map bytes of the tokens to bytes of the concatenated texts, without that space.
        #
        #   tokens   _ a | b   b c | _ d       two of three texts have a space in front
        #   texts      a | b   b c |   d
        # A text and its tokens end at the same byte, so the ends show by how much to move. The
        # space in front would then be before the text, so its start is clipped to the text's, and a
        # token that is only the space gets the first byte.
        counts = np.diff(edges)
        token_moves = np.repeat(text_begins[1:] - begins[1:], counts)
        starts = np.maximum(starts + token_moves, np.repeat(text_begins[:-1], counts))
        ends = np.maximum(ends + token_moves, starts + 1)
        # For now, a span is the first and the last byte of a token, because each is looked up as a
        # character below.
        spans = np.stack((starts, ends - 1), axis=1)
        lengths = np.fromiter(map(len, texts), np.int64, len(texts))
        # If all texts are ASCII, bytes are characters.
        if lengths.sum() < text_begins[-1]:
            # The index of the character that each byte belongs to. A character's first byte is not
            # 10xxxxxx.
            is_first = np.frombuffer(b"".join(contents), np.uint8) & 0xC0 != 0x80
            # A token without bytes at the end of the last text has an index beyond the end.
            spans = np.take(np.cumsum(is_first) - 1, spans, mode="clip")
        # Make spans half-open, and count from the first character of the token's own text.
        spans[:, 1] += 1
        spans -= np.repeat(np.cumsum(lengths) - lengths, counts)[:, None]
        return spans, wrong
