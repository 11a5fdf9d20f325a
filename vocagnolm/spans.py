"""Turns text into token ids and character spans, with any fast tokenizer.

A span is a half-open range of Unicode code points of the original text. Spans are all that student
and teacher have in common. Characters that a tokenizer drops (Unicode normalisation, stripped white
space) are given to the tokens next to them. This module imports neither torch nor transformers.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from vocagnolm.conventions import IntArray, Spans
from vocagnolm.token_bytes import TokenBytes, byte_level, sentencepiece

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, eq=False)
class Encoding:
    """N tokens of one text, without special tokens."""

    ids: npt.NDArray[np.int32]
    spans: Spans


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of one model in T texts, concatenated.

    Text t has the tokens from edges[t] to edges[t + 1]. Spans count characters of their text.
    `values` are ids or, for a stored teacher, losses in nats. `start` is the value of the token
    before each segment (NaN for a loss), one for all or one for each. `end` is the id of the token
    after the last segment of a text, if there is one.
    """

    values: npt.NDArray[Any]
    spans: Spans
    edges: IntArray
    start: float | npt.NDArray[Any] = math.nan
    end: int | None = None

    @classmethod
    def join(cls, values: Sequence[npt.ArrayLike], spans: Sequence[Spans], dtype: str) -> Tokens:
        """Concatenate the tokens of texts."""
        # The empty list allows concatenating the tokens of no texts. It is an array of floats,
        # hence the unsafe cast. All values are cast directly to `dtype`.
        flat = np.concatenate([[], *values], dtype=dtype, casting="unsafe")
        none = np.empty((0, 2), np.int64)
        return cls(flat, np.concatenate([none, *spans]), np.cumsum([0, *map(len, spans)]))

    def encoding(self, text: int) -> Encoding:
        """Return the tokens of one text."""
        part = slice(self.edges[text], self.edges[text + 1])
        return Encoding(self.values[part], self.spans[part])


# -- Spans from offsets --------------------------------------------------------------------------


@contextmanager
def without_limits(
    tokenizer: PreTrainedTokenizerBase | Tokenizer, role: str = ""
) -> Iterator[Tokenizer]:
    """Yield the tokenizer's backend without truncation and padding, and restore them afterwards.

    It keeps these settings from its last call, or from its file. A `tokenizers.Tokenizer` is its
    own backend.
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", tokenizer)
    # Slow tokenizers know no offsets, and some have no backend.
    if not hasattr(backend, "encode_batch_fast"):
        raise ValueError(
            f"{tokenizer_name(tokenizer, role)} gives no character offsets: use a fast tokenizer, "
            "with a tokenizer.json"
        )
    truncation, padding = backend.truncation, backend.padding
    takes_special = backend.encode_special_tokens
    backend.no_truncation()
    backend.no_padding()
    try:
        yield backend
    # Restore the caller's tokenizer after an error, too.
    finally:
        backend.encode_special_tokens = takes_special
        if truncation is not None:
            backend.enable_truncation(**truncation)
        if padding is not None:
            backend.enable_padding(**padding)


def encode_raw(
    tokenizer: PreTrainedTokenizerBase | Tokenizer,
    texts: Sequence[str],
    role: str = "",
    *,
    literal: bool = True,
) -> list[Encoding]:
    """Tokenize texts, with the tokenizer's own spans. Their order and limits are checked.

    Text that is not `literal`, such as a rendered conversation, may name special tokens.
    """
    with without_limits(tokenizer, role) as backend:
        backend.encode_special_tokens = literal
        batch = backend.encode_batch(list(texts), add_special_tokens=False)
    name = tokenizer_name(tokenizer, role)
    encodings = []
    for text, encoding in zip(texts, batch, strict=True):
        # If a tokenizer makes a token of the empty text, it has no character to stand for.
        count = len(encoding.ids) if text else 0
        ids = np.array(encoding.ids[:count], dtype=np.int32)
        flat = chain.from_iterable(encoding.offsets)
        spans = np.fromiter(flat, np.int64, 2 * count).reshape(count, 2)
        # The alignment searches sorted spans, and would silently be wrong for others.
        wrong = find_disorder(spans)
        if wrong is not None:
            around = spans[max(wrong - 1, 0) : wrong + 1]
            part = text[around.min() : around.max()][:40]
            raise ValueError(
                f"{name} gives offsets that are not in the order of this text "
                f"({around.tolist()} at token {wrong}, in {part!r}): leave the text out, or, if "
                "most texts fail, use the tokenizer that the model was published with"
            )
        if count and (spans[0, 0] < 0 or spans[-1, 1] > len(text)):
            raise ValueError(
                f"{name} gives offsets from {spans[0, 0]} to {spans[-1, 1]} for a text of "
                f"{len(text)} characters"
            )
        encodings.append(Encoding(ids, spans))
    return encodings


def find_disorder(spans: Spans) -> int | None:
    """Find the first span that ends before it starts, or starts or ends before the last one."""
    wrong, falling = spans[:, 0] > spans[:, 1], spans[1:] < spans[:-1]
    # Several times faster than any() for the spans of one text.
    if not np.count_nonzero(wrong) and not np.count_nonzero(falling):
        return None
    # Row i of `falling` compares spans i and i + 1. The second is the wrong one.
    wrong[1:] |= falling.any(axis=1)
    return int(wrong.argmax())


def tokenizer_name(tokenizer: PreTrainedTokenizerBase | Tokenizer, role: str = "") -> str:
    """Name a tokenizer in an error: its role, its source and its class."""
    where = getattr(tokenizer, "name_or_path", "") or "in memory"
    return f"{role} tokenizer {where} ({type(tokenizer).__name__})".lstrip()


# -- Spans without gaps --------------------------------------------------------------------------


# White space of all kinds and lengths, and characters of one to four bytes.
_PROBE = "Let  $x_1 = 2$,\n\t\tthen   3.14\r\n\n\n für   \n  Fälle. 😀 数学 \n\n \t  Q.E.D.  "


def encode(tokenizer: PreTrainedTokenizerBase | Tokenizer, text: str) -> Encoding:
    """Tokenize one text, literally and whole. Its tokens' spans cover every character.

    The tokenizer is a fast one of transformers, or a `tokenizers.Tokenizer`.

    Returns:
        `ids` int32 [N], without special tokens; `spans` int64 [N, 2], half-open, in characters.

    Raises:
        ValueError: the text has a lone surrogate, or the tokenizer gives no usable offsets.
    """
    return encode_texts(tokenizer, [text]).encoding(0)


def encode_ids(
    tokenizer: PreTrainedTokenizerBase | Tokenizer, ids: Sequence[int] | IntArray, text: str
) -> Encoding:
    """Return spans for given tokens, such as sampled ones, which `encode` might not return.

    The ids spell the text, without special tokens. Returns the same as `encode`.

    Raises:
        ValueError: the tokens do not spell the text, or the tokenizer's tokens have no bytes of
            their own, for example because it changes white space.
    """
    with without_limits(tokenizer) as backend:
        table = _token_bytes(tokenizer, backend.get_vocab_size())
    name = tokenizer_name(tokenizer)
    if table is None:
        raise ValueError(f"{name} does not give the bytes of its tokens: encode the text instead")
    array = np.asarray(ids, np.int32)
    if len(array) and not 0 <= array.min() <= array.max() < table.size:
        wrong_id = array[(array < 0) | (array >= table.size)][0]
        raise ValueError(f"{name} has {table.size} tokens, and none has the id {wrong_id}")
    spans, unspelt = table.find(array, np.array([0, len(array)]), [text], [text.encode()])
    if unspelt:
        raise ValueError(
            f"{name}: the {len(array)} ids do not spell the text of {len(text)} characters: give "
            "them without special tokens, with the whole text that they were decoded to"
        )
    return Encoding(array, spans)


def encode_batch(
    tokenizer: PreTrainedTokenizerBase | Tokenizer, texts: Sequence[str]
) -> list[Encoding]:
    """Tokenize texts like `encode_texts`, and return each text's own tokens."""
    tokens = encode_texts(tokenizer, texts)
    return [tokens.encoding(text) for text in range(len(texts))]


def encode_texts(tokenizer: PreTrainedTokenizerBase | Tokenizer, texts: Sequence[str]) -> Tokens:
    """Tokenize many texts at once. Spans cover every character (`fill_gaps`).

    Texts are read literally and whole: no special tokens are added, strings such as `</s>` stay
    text, and truncation or padding saved with the tokenizer is ignored.

    If the bytes of a text's tokens concatenate to the text, they give each token's place. The
    tokenizer is asked for offsets only for other texts (Unicode normalisation, stripped or unknown
    characters), because they take it half as long again.

    Raises:
        ValueError: a text has a lone surrogate, or the tokenizer has no usable offsets.
    """
    contents = [text.encode() for text in texts]
    with without_limits(tokenizer) as backend:
        table = _token_bytes(tokenizer, backend.get_vocab_size())
        if table is None:
            encodings = _by_offsets(tokenizer, texts)
            ids = [encoding.ids for encoding in encodings]
            return Tokens.join(ids, [encoding.spans for encoding in encodings], "int32")
        tokens, unspelt = _by_bytes(backend, table, texts, contents)
        encodings = _by_offsets(tokenizer, [texts[index] for index in unspelt])
    # Replace only spans: a text's ids are the same with and without offsets.
    for index, encoding in zip(unspelt, encodings, strict=True):
        tokens.encoding(index).spans[:] = encoding.spans
    return tokens


def _by_bytes(
    backend: Tokenizer, table: TokenBytes, texts: Sequence[str], contents: Sequence[bytes]
) -> tuple[Tokens, list[int]]:
    """Tokenize texts without offsets. Also returns the texts whose spans are not known."""
    # True means that names of special tokens are read as text. `without_limits` restores it.
    backend.encode_special_tokens = True
    batch = backend.encode_batch_fast(list(texts), add_special_tokens=False)
    id_lists = [encoding.ids for encoding in batch]
    edges = np.cumsum([0] + [len(ids) for ids in id_lists])
    ids = np.fromiter(chain.from_iterable(id_lists), np.int32, edges[-1])
    spans, unspelt = table.find(ids, edges, texts, contents)
    return Tokens(ids, spans, edges), unspelt


@lru_cache(maxsize=8)
def _token_bytes(tokenizer: PreTrainedTokenizerBase | Tokenizer, size: int) -> TokenBytes | None:
    """Return the bytes of a tokenizer's tokens, or None if its offsets follow another rule.

    Some strip white space. A vocabulary to which tokens were added has another `size`.
    """
    # Try both kinds of spelling, and take the first that agrees with the offsets on the probes. The
    # second probe may stay unspelt, because Llama's tokenizers do not spell a text that begins with
    # a space.
    probes = (_PROBE, " " + _PROBE)
    contents = [probe.encode() for probe in probes]
    expected = _by_offsets(tokenizer, probes)
    backend: Any = getattr(tokenizer, "backend_tokenizer", tokenizer)
    for spell in (byte_level, sentencepiece):
        table = TokenBytes(backend, spell)
        tokens, unspelt = _by_bytes(backend, table, probes, contents)
        is_right = 0 not in unspelt
        for index, encoding in enumerate(expected):
            is_same = np.array_equal(tokens.encoding(index).spans, encoding.spans)
            is_right = is_right and (is_same or index in unspelt)
        if is_right:
            return table
    return None


def _by_offsets(
    tokenizer: PreTrainedTokenizerBase | Tokenizer, texts: Sequence[str]
) -> list[Encoding]:
    return _filled(tokenizer, encode_raw(tokenizer, texts), texts)


def _widen_composed(spans: Spans, text: str) -> None:
    """Give every token of a composed character all characters that the composition has.

    The offsets of a token with some of its bytes are those of its first part only:

        text       s  .below  .above     composed to one character of three bytes
        offsets    0..1  0..1  0..3      of three tokens, one for each byte
        widened    0..3  0..3  0..3
    """
    # Both are non-decreasing, so bisection finds the tokens that touch a range.
    starts, ends = spans.T.copy()
    for start, end in composed_ranges(text):
        # A token touches the range if it ends after the range begins and starts before it ends.
        first = ends.searchsorted(start, side="right")
        last = starts.searchsorted(end, side="left")
        spans[first:last, 0] = np.minimum(spans[first:last, 0], start)
        spans[first:last, 1] = np.maximum(spans[first:last, 1], end)


def composed_ranges(text: str) -> list[tuple[int, int]]:
    """Return the ranges of characters that NFC turns into one character.

    >>> composed_ranges("ae\u0301 s\u0323\u0307 \u1112\u1161\u11ab")  # the last is Hangul
    [(1, 3), (4, 7), (8, 11)]
    """
    if unicodedata.is_normalized("NFC", text):
        return []
    # A cluster is a letter with its marks. It grows until another letter begins or the text ends,
    # and is tested then.
    ranges = []
    start = 0
    for index in range(1, len(text) + 1):
        if index < len(text) and not _begins_anew(text[start:index], text[index]):
            continue
        cluster = text[start:index]
        composed = unicodedata.normalize("NFC", cluster)
        if len(composed) < len(cluster):
            # Unchanged marks at the end belong to no other character.
            end = index
            if cluster.endswith(composed[1:]):
                end -= len(composed) - 1
            ranges.append((start, end))
        start = index
    return ranges


def _begins_anew(cluster: str, character: str) -> bool:
    """Test whether a character is neither a mark nor composed with those before."""
    if unicodedata.combining(character):
        return False
    # Hangul letters have no combining class, but are composed.
    together = unicodedata.normalize("NFC", cluster + character)
    apart = unicodedata.normalize("NFC", cluster) + unicodedata.normalize("NFC", character)
    return together == apart


def _filled(
    tokenizer: PreTrainedTokenizerBase | Tokenizer, raw: Sequence[Encoding], texts: Sequence[str]
) -> list[Encoding]:
    """Let the spans of tokens cover everything that the tokens stand for."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", tokenizer)
    # Some tokenizers read a letter and its accent as one character.
    normalizer = backend.normalizer
    composes = normalizer is not None and normalizer.normalize_str("e\u0301") == "\u00e9"
    encodings = []
    for encoding, text in zip(raw, texts, strict=True):
        spans = fill_gaps(encoding.spans, text)
        if composes:
            _widen_composed(spans, text)
        encodings.append(Encoding(encoding.ids, spans))
    return encodings


def encode_rendered(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[Encoding]:
    """Tokenize rendered conversations like `apply_chat_template`. Spans cover all text."""
    encodings = encode_raw(tokenizer, texts, literal=False)
    # Some special tokens include the white space next to them, which belongs to other tokens.
    greedy_names = {}
    for index, token in tokenizer.added_tokens_decoder.items():
        if token.lstrip or token.rstrip:
            greedy_names[index] = token.content
    for encoding, text in zip(encodings, texts, strict=True):
        is_greedy = np.isin(encoding.ids, list(greedy_names))
        for token_index in np.flatnonzero(is_greedy).tolist():
            start, end = encoding.spans[token_index].tolist()
            name = greedy_names[int(encoding.ids[token_index])]
            # A normalizer may have changed the name. Then the span keeps its width.
            place = text.find(name, start, end)
            if place >= 0:
                encoding.spans[token_index] = place, place + len(name)
    return _filled(tokenizer, encodings, texts)


def fill_gaps(spans: Spans, text: str) -> Spans:
    """Give every character of the text to at least one token, and every token a character.

    In a gap between two tokens, the white space at its end goes to the next token. What comes
    before that (usually an accent that was composed with its letter) goes to the token before. A
    token without characters, which some tokenizers make of white space, gets the character at its
    place. Takes and returns int64 [N, 2], with starts and ends each non-decreasing.

    >>> fill_gaps(np.array([[0, 1], [3, 4]]), "e\u0301 x").tolist()  # an accent, then a space
    [[0, 2], [2, 4]]
    >>> fill_gaps(np.array([[0, 1], [3, 3], [3, 4]]), "a  b").tolist()  # trimmed white space
    [[0, 1], [1, 3], [3, 4]]
    """
    if not len(spans) or not text:
        return spans
    # If the spans already cover the text, there is nothing to do. This test is much cheaper than
    # the rest.
    starts, ends = spans[:, 0], spans[:, 1]
    if starts.item(0) == 0 and ends.item(-1) == len(text):
        has_gap, is_empty = starts[1:] > ends[:-1], starts >= ends
        if not np.count_nonzero(has_gap) and not np.count_nonzero(is_empty):
            return spans
    starts, ends = np.clip(spans, 0, len(text)).T
    # Gap i lies between token i - 1 and token i: [before[i], after[i]).
    #
    #   text     . a a . b b .      before   0   3   6      0, and ends
    #   token      0 0   1 1        after    1   4   7      starts, and the end of the text
    #   gap      0     1     2
    #
    # It is parted where its white space begins: at `before` if there is nothing else.
    before, after = np.append(0, ends), np.append(starts, len(text))
    gaps = np.flatnonzero(before < after)
    parted = []
    for begin, end in zip(before[gaps].tolist(), after[gaps].tolist(), strict=True):
        parted.append(begin + len(text[begin:end].rstrip()))
    # The edges of a gap now coincide: the token before ends where the next one starts.
    before[gaps] = after[gaps] = parted
    # No token is before the first gap, and none after the last.
    before[-1], after[0] = len(text), 0
    filled = np.stack((after[:-1], before[1:]), axis=1)
    # An empty token gets the next character, or the one before at the end of the text.
    empty = filled[:, 0] == filled[:, 1]
    filled[empty, 1] = np.minimum(filled[empty, 0] + 1, len(text))
    filled[empty, 0] = filled[empty, 1] - 1
    return filled
