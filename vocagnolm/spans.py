"""From text to token ids and character spans, for any fast tokenizer.

A span is a half-open range of Unicode code points of the original text. Spans are all that
student and teacher share, so this module makes sure of them: tokenizers are tested when they are
loaded, and characters that a tokenizer leaves out (Unicode normalisation, trimmed white space) are
given to the tokens beside them. No torch here; transformers is imported by the loader only.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Role = Literal["student", "teacher"]
Spans = npt.NDArray[np.int64]

# What a tokenizer must get right in web mathematics. It does not begin with a space: transformers
# rebuilds the Llama tokenizers in a way that differs there, which is worth no more than a warning.
PROBE = (
    "Let $x_1 = \\frac{22}{7}$,\n\tthen 3.14 < x_1 für alle 2025 Fälle. 😀 数学\n\nQ.E.D. = 100%"
)
MAX_LOST_FRACTION = 0.01
DOCUMENT_SEPARATOR = "<|endoftext|>"


@dataclass(frozen=True, eq=False)
class Encoding:
    """The tokens of one text, without special tokens.

    Attributes:
        ids: int32 [N], token ids.
        spans: int64 [N, 2], the characters of each token; see `fill_gaps` for what holds of them.
    """

    ids: npt.NDArray[np.int32]
    spans: Spans


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> Encoding:
    """Tokenize one text; see `encode_batch`."""
    _check_text(text, "text")
    return encode_batch(tokenizer, [text])[0]


def encode_batch(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[Encoding]:
    """Tokenize texts with one call of the tokenizer.

    Texts are taken literally and whole: no special tokens are added, strings such as `</s>` stay
    text, and a truncation or padding saved with the tokenizer is ignored. An empty text has no
    tokens; a text of which the tokenizer drops every character has none either.

    Args:
        tokenizer: a fast tokenizer.
        texts: N texts.

    Returns:
        N encodings, whose spans cover every character of the text (`fill_gaps`).

    Raises:
        ValueError: a text is not a `str` or holds a lone surrogate, or the tokenizer gives no
            usable offsets.
    """
    for index, text in enumerate(texts):
        _check_text(text, f"texts[{index}]")
    raw = _encode_raw(tokenizer, texts, _describe(tokenizer))
    return [
        Encoding(ids, fill_gaps(spans, text)) for text, (ids, spans) in zip(texts, raw, strict=True)
    ]


def fill_gaps(spans: Spans, text: str) -> Spans:
    """Give every character of the text to at least one token.

    In a gap between two tokens, the white space at its end goes to the token that follows, and what
    stands before that (as a rule an accent that was composed with its letter) to the token before.
    A token without characters, as some tokenizers make of white space, gets the one at its place.

    Args:
        spans: int64 [N, 2], starts and ends each non-decreasing, clamped to the text.
        text: the text.

    Returns:
        int64 [N, 2], starts and ends each non-decreasing, no span empty, every character covered
        (where N > 0). The argument itself where this already holds.

    >>> fill_gaps(np.array([[0, 1], [3, 4]]), "e\u0301 x").tolist()  # an accent, then a space
    [[0, 2], [2, 4]]
    >>> fill_gaps(np.array([[0, 1], [3, 3], [3, 4]]), "a  b").tolist()  # trimmed white space
    [[0, 1], [1, 3], [3, 4]]
    """
    if not len(spans) or not text or _tiles(spans, len(text)):
        return spans
    starts, ends = np.clip(spans, 0, len(text)).T
    # Gap i lies between token i - 1 and token i: [before[i], after[i]).
    before, after = np.append(0, ends), np.append(starts, len(text))
    gaps = np.flatnonzero(before < after)
    borders = [
        start + len(text[start:end].rstrip())
        for start, end in zip(before[gaps].tolist(), after[gaps].tolist(), strict=True)
    ]
    before[gaps] = after[gaps] = borders
    before[-1], after[0] = len(text), 0  # no token before the first gap, none after the last
    filled = np.stack((after[:-1], before[1:]), axis=1)
    empty = filled[:, 0] == filled[:, 1]
    filled[empty, 1] = np.minimum(filled[empty, 0] + 1, len(text))
    filled[empty, 0] = filled[empty, 1] - 1
    return filled


def find_disorder(spans: Spans) -> int | None:
    """Find the first span that ends before it starts, or starts or ends before the one before."""
    wrong, falling = spans[:, 0] > spans[:, 1], spans[1:] < spans[:-1]
    # count_nonzero: several times faster than any() on the spans of one text.
    if not np.count_nonzero(wrong) and not np.count_nonzero(falling):
        return None
    wrong[1:] |= falling.any(axis=1)
    return int(wrong.argmax())


def load_tokenizer(
    name: str, role: Role, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load a tokenizer and test that it can be trusted with ids and offsets.

    Args:
        name: a directory or a name on the hub.
        role: named in errors.
        revision: branch, tag or commit on the hub.
        trust_remote_code: allow code that comes with the tokenizer.

    Returns:
        The tokenizer of `AutoTokenizer`, tested by `check_tokenizer` and against its own files.

    Raises:
        ValueError: it cannot be loaded, or fails a test; the message says what to do.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            name, revision=revision, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # a broken file can raise anything, even a bare Exception
        reason = f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0]
        raise ValueError(
            f"{role} tokenizer {name} cannot be loaded ({reason}): give a directory with a"
            " tokenizer.json, or a name on the Hugging Face hub"
        ) from error
    check_tokenizer(tokenizer, role)
    _check_against_files(tokenizer, name, role, revision)
    return tokenizer


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, role: Role) -> None:
    """Test on a probe text that a tokenizer gives offsets, in order, and loses no characters.

    Raises:
        ValueError: expected, found, which tokenizer, and what to do.
    """
    name = _describe(tokenizer, role)
    if not getattr(tokenizer, "is_fast", False):
        raise _no_offsets(name)
    ((_, spans),) = _encode_raw(tokenizer, [PROBE], name)
    covered = np.zeros(len(PROBE), dtype=bool)
    for start, end in spans:
        covered[start:end] = True
    visible = np.array([not character.isspace() for character in PROBE])
    lost = visible & ~covered
    if lost.sum() > MAX_LOST_FRACTION * visible.sum():
        examples = "".join(np.array(list(PROBE))[lost][:10])
        raise ValueError(
            f"{name} loses {lost.sum() / visible.sum():.1%} of a probe text (first characters lost:"
            f" {examples!r}), at most {MAX_LOST_FRACTION:.0%} is expected: use a tokenizer that"
            " represents every character (byte-level, or with byte fallback), and check that its"
            " directory holds all of its files"
        )


def tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """What changes when a tokenizer does: the hash of its serialised backend."""
    return hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()


def start_id(tokenizer: PreTrainedTokenizerBase, role: Role) -> int:
    """Id of the token to put before a text, so that the text's first token has a loss.

    Not specified in the paper. The BOS token where there is one; else `<|endoftext|>`, which
    separates documents in pretraining (the EOS token of a chat model ends a turn); else EOS.

    Raises:
        ValueError: the tokenizer has none of these.
    """
    separator = tokenizer.get_vocab().get(DOCUMENT_SEPARATOR)
    for candidate in (tokenizer.bos_token_id, separator, tokenizer.eos_token_id):
        if candidate is not None:
            return int(candidate)
    raise ValueError(
        f"{_describe(tokenizer, role)} has no BOS token, no {DOCUMENT_SEPARATOR} and no EOS"
        " token, so that the first token of a text would have no loss: name the token that its"
        " model saw between documents as bos_token in tokenizer_config.json"
    )


def _describe(tokenizer: PreTrainedTokenizerBase, role: str = "") -> str:
    where = getattr(tokenizer, "name_or_path", "") or "in memory"
    return f"{role} tokenizer {where} ({type(tokenizer).__name__})".lstrip()


def _no_offsets(name: str) -> ValueError:
    return ValueError(
        f"{name} gives no character offsets, by which student and teacher tokens are aligned: use a"
        " fast tokenizer, that is a directory or hub name with a tokenizer.json"
    )


def _check_text(text: object, name: str) -> None:
    if not isinstance(text, str):
        raise ValueError(f"{name} must be a str, found {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} has a lone surrogate (U+{ord(text[error.start]):04X}) at character"
            f" {error.start}, which is not valid Unicode: drop the text, or decode its source with"
            " errors='replace'"
        ) from None


def _tiles(spans: Spans, length: int) -> bool:
    """Whether the spans cover the characters 0..length, none of them empty."""
    starts, ends = spans[:, 0], spans[:, 1]
    return (
        starts.item(0) == 0
        and ends.item(-1) == length
        and not np.count_nonzero(starts[1:] > ends[:-1])
        and not np.count_nonzero(starts >= ends)
    )


def _encode_raw(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], name: str
) -> list[tuple[npt.NDArray[np.int32], Spans]]:
    """Ids and spans as the tokenizer gives them, tested for order and limits."""
    if not texts:
        return []  # the tokenizer itself fails on an empty list
    output = tokenizer(
        list(texts),
        add_special_tokens=False,
        split_special_tokens=True,
        return_offsets_mapping=True,
        truncation=False,
        padding=False,
        verbose=False,  # a text longer than the context is no news: it is cut into segments later
    )
    if "offset_mapping" not in output:
        raise _no_offsets(name)
    encodings = []
    for text, id_list, offsets in zip(
        texts, output["input_ids"], output["offset_mapping"], strict=True
    ):
        count = len(id_list) if text else 0
        ids = np.array(id_list[:count], dtype=np.int32)
        spans = np.fromiter(chain.from_iterable(offsets), np.int64, 2 * count).reshape(count, 2)
        wrong = find_disorder(spans)
        if wrong is not None:
            found = spans[max(wrong - 1, 0) : wrong + 1].tolist()
            raise ValueError(
                f"{name} gives offsets that are not in the order of the text ({found} at token"
                f" {wrong}), so that they cannot be searched: use the tokenizer that the model was"
                " published with, as a tokenizer.json"
            )
        if count and (spans[0, 0] < 0 or spans[-1, 1] > len(text)):
            raise ValueError(
                f"{name} gives offsets from {spans[0, 0]} to {spans[-1, 1]} for a text of"
                f" {len(text)} characters: use a tokenizer whose offsets count the characters of"
                " the text itself"
            )
        encodings.append((ids, spans))
    return encodings


def _check_against_files(
    tokenizer: PreTrainedTokenizerBase, name: str, role: Role, revision: str | None
) -> None:
    """Compare the tokenizer with the tokenizer.json that it should have come from.

    transformers rebuilds some tokenizers from their class instead of reading the file, and may then
    give other ids than the model was trained with.
    """
    from tokenizers import Tokenizer

    described = _describe(tokenizer, role)
    path = _find_file(name, "tokenizer.json", revision)
    if path is None:
        # Only a class of its own knows how to read a SentencePiece model: the generic one forgets
        # the space before the text.
        generic = type(tokenizer).__name__ in ("TokenizersBackend", "PreTrainedTokenizerFast")
        if generic and _find_file(name, "tokenizer.model", revision) is not None:
            raise ValueError(
                f"{described} has a tokenizer.model but no tokenizer.json, and transformers builds"
                " a generic tokenizer with wrong ids from that: convert it once with its own"
                f" class, as in LlamaTokenizer.from_pretrained({name!r}).save_pretrained(DIR), and"
                " give DIR"
            )
        return
    reference = Tokenizer.from_file(path)
    reference.no_truncation()
    reference.no_padding()
    for probe in (PROBE, " " + PROBE):
        expected = reference.encode(probe, add_special_tokens=False).ids
        found = encode(tokenizer, probe).ids.tolist()
        if found == expected:
            continue
        if probe != PROBE:
            logger.warning(
                "%s encodes text that begins with a space differently from its tokenizer.json,"
                " since transformers rebuilds it from its class; other text is not affected",
                described,
            )
            continue
        first = next(
            (i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b),
            min(len(found), len(expected)),
        )
        raise ValueError(
            f"{described} does not give the ids of its own tokenizer.json: token {first} of a probe"
            f" text is {found[first : first + 3]}, expected {expected[first : first + 3]}: set"
            ' "tokenizer_class": "PreTrainedTokenizerFast" in its tokenizer_config.json'
        )


def _find_file(name: str, filename: str, revision: str | None) -> str | None:
    from transformers.utils.hub import cached_file

    try:
        path: str | None = cached_file(name, filename, revision=revision)
    except OSError:  # transformers' one error for a missing file and for a hub out of reach
        return None
    return path


def check_same_tokens(
    student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, method: str
) -> None:
    """Refuse a teacher whose ids mean other tokens than the student's, or that cuts otherwise.

    Ids that the teacher has beyond the student's are allowed, such as the 16 of Llemma.

    Raises:
        ValueError: with the first tokens that differ.
    """
    ours, theirs = student.get_vocab(), teacher.get_vocab()
    differing = sorted(token for token, number in ours.items() if theirs.get(token) != number)
    largest = max(ours.values())
    between = sorted(t for t, number in theirs.items() if t not in ours and number <= largest)
    if differing or between:
        shown = ", ".join(map(repr, (differing or between)[:3]))
        raise ValueError(
            f"--method {method} needs a teacher with the student's vocabulary of {len(ours):,} "
            f"tokens, found {len(differing or between):,} that are not the same in "
            f"{teacher.name_or_path} ({shown}): use --method uld or vocagnolm, which take any"
        )
    if encode(student, PROBE).ids.tolist() != encode(teacher, PROBE).ids.tolist():
        raise ValueError(
            f"--method {method}: the tokenizer of {teacher.name_or_path} has the student's "
            "vocabulary, but cuts a text into other tokens: use --method uld or vocagnolm, which "
            "take any tokenizer"
        )
