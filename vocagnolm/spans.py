"""From text to token ids and character spans, for any fast tokenizer.

A span is a half-open range of Unicode code points of the original text. Spans are all that student
and teacher share: characters that a tokenizer leaves out (Unicode normalisation, trimmed white
space) are given to the tokens beside them. Loads neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from vocagnolm.texts.offsets import encode_raw, tokenizer_name
from vocagnolm.texts.token_bytes import SPELLINGS, TokenBytes
from vocagnolm.texts.tokens import Encoding, Spans, Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# White space of all kinds and lengths, and characters of one to four bytes.
_PROBE = "Let  $x_1 = 2$,\n\t\tthen   3.14\r\n\n\n für   \n  Fälle. 😀 数学 \n\n \t  Q.E.D.  "


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> Encoding:
    """Tokenize one text; see `encode_batch`."""
    return encode_texts(tokenizer, [text]).encoding(0)


def encode_batch(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[Encoding]:
    """Tokenize texts as `encode_texts` does, and give each its own tokens."""
    return [*map(encode_texts(tokenizer, texts).encoding, range(len(texts)))]


def encode_texts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> Tokens:
    """Tokenize texts, many at once; spans cover every character (`fill_gaps`).

    Texts are taken literally and whole: no special tokens are added, strings such as `</s>` stay
    text, and a truncation or padding saved with the tokenizer is ignored. A ValueError where a text
    holds a lone surrogate, or the tokenizer gives no usable offsets.

    Where the concatenated bytes of a text's tokens are the text, they give each token's place.
    The tokenizer is asked for offsets only of other texts (Unicode normalisation, trimmed or
    unknown characters): it takes half as long again with them.
    """
    contents = [text.encode() for text in texts]
    has_backend = texts and getattr(tokenizer, "backend_tokenizer", None)
    table = _token_bytes(tokenizer, len(tokenizer)) if has_backend else None
    if table is None:
        raw = _by_offsets(tokenizer, texts)
        return Tokens.join([one.ids for one in raw], [one.spans for one in raw], "int32")
    found, others = _by_bytes(tokenizer, table, texts, contents)
    for index, one in zip(others, _by_offsets(tokenizer, [texts[t] for t in others]), strict=True):
        found.encoding(index).spans[:] = one.spans
    return found


def _by_bytes(
    tokenizer: PreTrainedTokenizerBase,
    table: TokenBytes,
    texts: Sequence[str],
    contents: Sequence[bytes],
) -> tuple[Tokens, list[int]]:
    """Tokenize texts without offsets; also gives the texts of which the spans are not known."""
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    batch = backend.encode_batch_fast(list(texts), add_special_tokens=False)
    lists = [one.ids for one in batch]
    edges = np.cumsum([0, *map(len, lists)])
    ids = np.fromiter(chain.from_iterable(lists), np.int32, edges[-1])
    spans, others = table.find(ids, edges, texts, contents)
    return Tokens(ids, spans, edges), others


@lru_cache(maxsize=8)
def _token_bytes(tokenizer: PreTrainedTokenizerBase, size: int) -> TokenBytes | None:
    """Return the bytes of a tokenizer's tokens; None if its offsets follow another rule.

    Some trim white space. A vocabulary to which tokens were added has another `size`.
    """
    # Llama's tokenizers do not spell a text that begins with a space.
    probes = (_PROBE, " " + _PROBE)
    wanted = _by_offsets(tokenizer, probes)
    for spell in SPELLINGS:
        table = TokenBytes(tokenizer, spell)
        found, others = _by_bytes(tokenizer, table, probes, [probe.encode() for probe in probes])
        same = [np.array_equal(found.encoding(t).spans, one.spans) for t, one in enumerate(wanted)]
        if 0 not in others and all(is_same or t in others for t, is_same in enumerate(same)):
            return table
    return None


def _by_offsets(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[Encoding]:
    return [*map(_filled, encode_raw(tokenizer, texts, tokenizer_name(tokenizer)), texts)]


def _filled(raw: Encoding, text: str) -> Encoding:
    return Encoding(raw.ids, fill_gaps(raw.spans, text))


def encode_rendered(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[Encoding]:
    """Tokenize rendered conversations as `apply_chat_template` does; spans cover all of it."""
    found = encode_raw(tokenizer, texts, tokenizer_name(tokenizer), literal=False)
    added = tokenizer.added_tokens_decoder.items()
    # These take the white space of contents beside them: it is for other tokens.
    greedy = {index: token.content for index, token in added if token.lstrip or token.rstrip}
    for one, text in zip(found, texts, strict=True):
        for at in np.flatnonzero(np.isin(one.ids, [*greedy])).tolist():
            (start, end), name = one.spans[at].tolist(), greedy[int(one.ids[at])]
            if (place := text.find(name, start, end)) >= 0:
                one.spans[at] = place, place + len(name)
    return [*map(_filled, found, texts)]


def fill_gaps(spans: Spans, text: str) -> Spans:
    """Give every character of the text to at least one token, and every token a character.

    In a gap between two tokens, the white space at its end goes to the token that follows, and what
    stands before that (as a rule an accent that was composed with its letter) to the token before.
    A token without characters, as some tokenizers make of white space, gets the one at its place.
    Takes and returns int64 [N, 2], starts and ends each non-decreasing.

    >>> fill_gaps(np.array([[0, 1], [3, 4]]), "e\u0301 x").tolist()  # an accent, then a space
    [[0, 2], [2, 4]]
    >>> fill_gaps(np.array([[0, 1], [3, 3], [3, 4]]), "a  b").tolist()  # trimmed white space
    [[0, 1], [1, 3], [3, 4]]
    """
    if not len(spans) or not text or _tiles(spans, len(text)):
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
    edges = zip(before[gaps].tolist(), after[gaps].tolist(), strict=True)
    before[gaps] = after[gaps] = [a + len(text[a:b].rstrip()) for a, b in edges]
    # No token is before the first gap, none after the last.
    before[-1], after[0] = len(text), 0
    filled = np.stack((after[:-1], before[1:]), axis=1)
    empty = filled[:, 0] == filled[:, 1]
    filled[empty, 1] = np.minimum(filled[empty, 0] + 1, len(text))
    filled[empty, 0] = filled[empty, 1] - 1
    return filled


def _tiles(spans: Spans, length: int) -> bool:
    """Test that the spans cover the characters 0..length, none of them empty."""
    starts, ends = spans[:, 0], spans[:, 1]
    if starts.item(0) or ends.item(-1) != length:
        return False
    return not (np.count_nonzero(starts[1:] > ends[:-1]) or np.count_nonzero(starts >= ends))
