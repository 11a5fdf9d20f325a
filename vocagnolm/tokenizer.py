"""Tokenizers: loaded, tested, compared, and identified by their content."""

from __future__ import annotations

import hashlib
import logging
from typing import TYPE_CHECKING, Literal

from vocagnolm.fields import OptionError, named
from vocagnolm.shell.hub import split_name
from vocagnolm.spans import encode, encode_raw, tokenizer_name, without_limits

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Role = Literal["student", "teacher"]
# What a tokenizer must get right in web mathematics. It does not begin with a space, because
# transformers rebuilds the Llama tokenizers in a way that differs there, which deserves only a
# warning.
PROBE = (
    "Let $x_1 = \\frac{22}{7}$,\n\tthen 3.14 < x_1 für alle 2025 Fälle. 😀 数学\n\nQ.E.D. = 100%"
)


def load_tokenizer(
    name: str, role: Role, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a directory or the hub. Test its offsets, and its ids by its files."""
    from transformers import AutoTokenizer

    place, gguf_file = split_name(name)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            place, gguf_file=gguf_file, revision=revision, trust_remote_code=trust_remote_code
        )
    # A broken file can raise anything, even a bare Exception.
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0]
        raise ValueError(f"{role} tokenizer {name} cannot be loaded ({reason})") from error
    # Compare the files first. If a rebuilt tokenizer also loses characters, that error has the
    # better remedy. A GGUF file has none to compare with.
    if gguf_file is None and hasattr(tokenizer, "backend_tokenizer"):
        _check_against_files(tokenizer, name, role, revision)
    check_tokenizer(tokenizer, role)
    return tokenizer


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, role: Role) -> None:
    """Reject a tokenizer without sorted offsets, or one that loses characters of `PROBE`."""
    # Read the raw offsets, because `encode` fills the gaps that this looks for.
    (raw,) = encode_raw(tokenizer, [PROBE], role)
    covered: set[int] = set()
    for start, end in raw.spans.tolist():
        covered.update(range(start, end))
    lost = ""
    for index, character in enumerate(PROBE):
        # Many tokenizers strip white space, which does no harm.
        if index not in covered and not character.isspace():
            lost += character
    if lost:
        raise ValueError(
            f"{tokenizer_name(tokenizer, role)} loses the characters {lost!r} of a probe text: "
            "check that its directory holds all of its files, or use one that is byte-level or "
            "has byte fallback"
        )


def _check_against_files(
    tokenizer: PreTrainedTokenizerBase, name: str, role: Role, revision: str | None
) -> None:
    """Compare the tokenizer with the tokenizer.json that it should come from.

    transformers rebuilds some from their class instead, and may then give other ids.
    """
    from tokenizers import Tokenizer

    described = tokenizer_name(tokenizer, role)
    path = _find_file(name, "tokenizer.json", revision)
    if path is None:
        # Only a class of its own can read a SentencePiece model. The generic class forgets the
        # space before the text.
        generic = type(tokenizer).__name__ in ("TokenizersBackend", "PreTrainedTokenizerFast")
        if generic and _find_file(name, "tokenizer.model", revision):
            raise ValueError(
                f"{described} has a tokenizer.model but no tokenizer.json: convert it with its own"
                f" class, as in LlamaTokenizer.from_pretrained({name!r}).save_pretrained(DIR)"
            )
        return
    reference = Tokenizer.from_file(path)
    reference.no_truncation()
    reference.no_padding()
    # Only the probe itself decides. With a space in front, Llama's rebuilt tokenizers differ, and a
    # warning is enough.
    for space in ("", " "):
        expected = reference.encode(space + PROBE, add_special_tokens=False).ids
        if encode(tokenizer, space + PROBE).ids.tolist() == expected:
            continue
        if not space:
            raise ValueError(
                f"{described} does not give the ids of its own tokenizer.json: set"
                ' "tokenizer_class": "PreTrainedTokenizerFast" in its tokenizer_config.json'
            )
        logger.warning(
            "%s encodes text that begins with a space differently from its tokenizer.json, since "
            "transformers rebuilds it from its class",
            described,
        )


def _find_file(name: str, filename: str, revision: str | None) -> str | None:
    from transformers.utils.hub import cached_file

    try:
        path: str | None = cached_file(name, filename, revision=revision)
    # transformers raises this for a missing file, and for an unreachable hub, too.
    except OSError:
        return None
    return path


def check_same_tokens(
    student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, method: str
) -> None:
    """Reject a teacher whose ids mean other tokens than the student's, or that splits differently.

    The teacher may have ids beyond the student's, such as Llemma's 16.
    """
    student_ids = student.get_vocab()
    largest_id = max(student_ids.values())
    # Every student token must have the same id in the teacher, and no other teacher token may have
    # an id in the student's range.
    teacher_ids = {}
    for token, index in teacher.get_vocab().items():
        if token in student_ids or index <= largest_id:
            teacher_ids[token] = index
    # Vocabularies have any order, but a message must be the same each time.
    wrong = sorted(dict(student_ids.items() ^ teacher_ids.items()))
    if wrong:
        raise OptionError(
            "method",
            f"{method} needs a teacher with the student's vocabulary of "
            f"{len(student_ids):,} tokens, found {len(wrong):,} that are not the same in "
            f"{teacher.name_or_path} ({', '.join(map(repr, wrong[:3]))}): use "
            f"{named('method')} uld or vocagnolm",
        )
    # Equal vocabularies may have other merges, or another normalisation.
    if encode(student, PROBE).ids.tolist() != encode(teacher, PROBE).ids.tolist():
        raise OptionError(
            "method",
            f"{method} needs a teacher that splits texts like the student, not only one with its "
            f"vocabulary, as {teacher.name_or_path}: use {named('method')} uld or vocagnolm",
        )


def tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """Identify a tokenizer by the hash of its serialised backend."""
    return hashlib.sha256(serialised(tokenizer).encode()).hexdigest()


def serialised(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the backend as JSON, without the truncation and padding that a call leaves behind."""
    with without_limits(tokenizer) as backend:
        return backend.to_str()


def start_id(tokenizer: PreTrainedTokenizerBase, role: Role) -> int:
    """Return the id to put before a text, so that its first token has a loss.

    This is BOS if there is one. Otherwise it is `<|endoftext|>`, which separates documents in
    pretraining (a chat model's EOS ends a turn), or EOS.
    """
    separator = tokenizer.get_vocab().get("<|endoftext|>")
    for candidate in (tokenizer.bos_token_id, separator, tokenizer.eos_token_id):
        if candidate is not None:
            return int(candidate)
    raise ValueError(
        f"{tokenizer_name(tokenizer, role)} has no BOS token, no <|endoftext|> and no EOS"
        " token: set bos_token in its tokenizer_config.json"
    )
