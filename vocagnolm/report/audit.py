"""Measure how well teachers' tokens align with a student's. Loads no model.

    vocagnolm audit --student S --teacher T [T2 ...] --dataset D [--output_dir DIR]

An audit has the shared tokens, and how the teacher's tokens cover each student token. docs/audit.md
explains every number.
Exit status: 0 done, 2 a wrong argument or file.
"""

from __future__ import annotations

import itertools
import json
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from tqdm.auto import tqdm

from vocagnolm.alignment import align_spans
from vocagnolm.cli import Parser, shell
from vocagnolm.conventions import UNMAPPED, Spans
from vocagnolm.fields import OptionError, corpora_of, in_range, listed
from vocagnolm.record import check_output_directory, output_directory
from vocagnolm.shell.hub import public_name
from vocagnolm.shell.io import (
    JsonObject,
    count_reasons,
    markdown_table,
    print_main,
    write_json,
    write_text,
)
from vocagnolm.spans import encode_batch
from vocagnolm.token_bytes import byte_level, sentencepiece
from vocagnolm.tokenizer import load_tokenizer

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

_RECORD = "audit.json"
# How many documents are in memory at once.
_BATCH = 128
# A verdict warns if a larger share of the student's tokens is unmapped, or straddles.
_MANY_UNMAPPED = 0.01
_MANY_STRADDLING = 0.1
Shares = npt.NDArray[np.float64]


# -- Measuring -----------------------------------------------------------------------------------

# A student part A and a teacher part B of a text, as sets of characters, have IoU = |A n B| / |A u
# B| and IoS = |A n B| / |A| (Sections 2 and 6.1 of the paper).
#
# Spans are those of `spans.encode_batch`: without gaps, and not empty. So consecutive tokens cover
# everything from the start of the first to the end of the last.


def vocabulary_overlap(
    student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase
) -> dict[str, float]:
    """Return the shares of the teacher's tokens that the student has, as written and as bytes."""
    words, decoded = set(teacher.get_vocab()), decoded_vocabulary(teacher)
    shared_words = words.intersection(student.get_vocab())
    shared_decoded = decoded & decoded_vocabulary(student)
    return {
        "raw": len(shared_words) / len(words),
        "bytes": len(shared_decoded) / len(decoded),
    }


def decoded_vocabulary(tokenizer: PreTrainedTokenizerBase) -> set[bytes]:
    """Decode the tokens of a vocabulary to bytes. Added tokens stand for themselves."""
    # Tokenizers spell the same token differently: " a" is "Ġa" for byte-level ones and "▁a" for
    # SentencePiece.
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    is_byte_level = '"ByteLevel"' in json.dumps([backend["pre_tokenizer"], backend["decoder"]])
    spell = byte_level if is_byte_level else sentencepiece
    # Added tokens are stored separately from the model's vocabulary, and are written as they are.
    added = {token["content"] for token in backend["added_tokens"]}

    def decode(word: str) -> bytes:
        try:
            return word.encode() if word in added else spell(word)
        # The token has a letter that stands for no byte.
        except KeyError:
            return word.encode()

    return {decode(word) for word in tokenizer.get_vocab()}


def overlaps(student_spans: Spans, teacher_spans: Spans, ranges: Spans) -> tuple[Shares, Shares]:
    """Return IoU and IoS [N] of every student token with the teacher tokens of its range.

    Spans are of one text, [N, 2] and [M, 2]. Ranges [N, 2] are half-open, or (-1, -1), for which
    both are 0.

    >>> student = np.array([[0, 3], [3, 5]])  # "a+b", "=c"
    >>> teacher = np.array([[0, 1], [1, 4], [4, 5]])  # "a", "+b=", "c"
    >>> iou, ios = overlaps(student, teacher, np.array([[0, 2], [1, 3]]))
    >>> iou.tolist(), ios.tolist()
    ([0.75, 0.5], [1.0, 1.0])
    """
    # A token without a range keeps 0 for both.
    iou, ios = np.zeros((2, len(student_spans)))
    mapped = ranges[:, 0] != UNMAPPED
    mapped_spans = student_spans[mapped]
    hulls = hull(teacher_spans, ranges[mapped])
    starts = np.maximum(mapped_spans[:, 0], hulls[:, 0])
    ends = np.minimum(mapped_spans[:, 1], hulls[:, 1])
    # Spans that do not meet share no character, and have a negative difference.
    shared = np.maximum(ends - starts, 0)
    student_lengths = mapped_spans[:, 1] - mapped_spans[:, 0]
    teacher_lengths = hulls[:, 1] - hulls[:, 0]
    iou[mapped] = shared / (student_lengths + teacher_lengths - shared)
    ios[mapped] = shared / student_lengths
    return iou, ios


def hull(spans: Spans, ranges: Spans) -> Spans:
    """Return the characters from the first token of each range to its last."""
    return np.stack((spans[ranges[:, 0], 0], spans[ranges[:, 1] - 1, 1]), axis=1)


def count_map(student_spans: Spans, teacher_spans: Spans, ranges: Spans) -> dict[str, float]:
    """Count the kinds of student tokens in one text; spans and ranges as in `overlaps`.

    All are sums over tokens, so the counts of texts can be added.
    """
    iou, ios = overlaps(student_spans, teacher_spans, ranges)
    is_mapped = ranges[:, 0] != UNMAPPED
    # An unmapped range is (-1, -1), whose size is 0.
    sizes = ranges[:, 1] - ranges[:, 0]
    mapped = ranges[is_mapped]
    # How many characters later than its range each token starts and ends, [mapped, 2].
    differences = student_spans[is_mapped] - hull(teacher_spans, mapped)
    same_span = (sizes[is_mapped] == 1) & ~differences.any(axis=1)
    straddling = (differences[:, 0] > 0) | (differences[:, 1] < 0)
    return {
        "student_tokens": len(student_spans),
        "teacher_tokens": len(teacher_spans),
        "unmapped": len(ranges) - len(mapped),
        # The range has two or more teacher tokens (one-to-many).
        "several": int((sizes > 1).sum()),
        # The range is one teacher token with the same characters (one-to-one).
        "same_span": int(same_span.sum()),
        # The first teacher token also belongs to the token before (many-to-one).
        "shared": int((mapped[1:, 0] < mapped[:-1, 1]).sum()),
        # The range begins before the token or ends after it.
        "straddling": int(straddling.sum()),
        "iou_sum": float(iou.sum()),
        "ios_sum": float(ios.sum()),
    }


def map_shares(counts: Mapping[str, float]) -> dict[str, float]:
    """Return the ratio of tokens, and the shares of the kinds, which overlap."""
    tokens = counts["student_tokens"]
    return {
        "teacher_tokens_per_student_token": counts["teacher_tokens"] / tokens,
        "mapped": 1 - counts["unmapped"] / tokens,
        "unmapped": counts["unmapped"] / tokens,
        "one_to_one": counts["same_span"] / tokens,
        "one_to_many": counts["several"] / tokens,
        "many_to_one": counts["shared"] / tokens,
        "straddling": counts["straddling"] / tokens,
        "iou": counts["iou_sum"] / tokens,
        "ios": counts["ios_sum"] / tokens,
    }


def audit(
    student: PreTrainedTokenizerBase,
    teachers: Mapping[str, PreTrainedTokenizerBase],
    corpus: datasets.Dataset,
) -> JsonObject:
    """Measure how a student's tokens overlap each teacher's on the documents of a corpus.

    Documents that are not text, or in which a tokenizer finds no token, are skipped for all.
    Returns what `audit.json` has of the pairs: `documents`, `skipped`, and in `teachers` for each
    its name, its `vocabulary_overlap`, and as `mapping` the shares of `map_shares`, in [0, 1].
    """
    # This imports datasets, which --help does not need.
    from vocagnolm.texts import read_texts

    tokenizers = [student] + list(teachers.values())
    counts = {name: Counter[str]() for name in teachers}
    usable = 0
    read = read_texts(corpus, range(len(corpus)))
    documents = iter(tqdm(read, desc="documents", total=len(corpus), disable=None))
    while batch := list(itertools.islice(documents, _BATCH)):
        texts = [text for _, text in batch]
        encoded = [encode_batch(tokenizer, texts) for tokenizer in tokenizers]
        for encodings in zip(*encoded, strict=True):
            spans = [encoding.spans for encoding in encodings]
            # Measure all teachers on the same documents.
            if not all(map(len, spans)):
                continue
            usable += 1
            for name, teacher_spans in zip(teachers, spans[1:], strict=True):
                ranges = align_spans(spans[0], teacher_spans)
                counts[name].update(count_map(spans[0], teacher_spans, ranges))
    if not usable:
        raise OptionError("dataset", f"has no usable document: {len(corpus):,} read, all skipped")
    audited = []
    for name, teacher in teachers.items():
        overlap = vocabulary_overlap(student, teacher)
        audited.append(
            {"teacher": name, "vocabulary_overlap": overlap, "mapping": map_shares(counts[name])}
        )
    return {"documents": usable, "skipped": len(corpus) - usable, "teachers": audited}


# -- Showing -------------------------------------------------------------------------------------


def audit_markdown(content: JsonObject) -> str:
    """Write an audit as a verdict on each pair, and tables with a column per teacher."""
    teachers = content["teachers"]
    names = [public_name(teacher["teacher"]) for teacher in teachers]
    # The verdicts come first, because many readers need nothing else.
    lines = []
    for name, teacher in zip(names, teachers, strict=True):
        lines.append(f"- {name}: {verdict(teacher['mapping'])}")
    lines.append("- No model was loaded: vocagnolm inspect shows what a teacher knows of a text")
    lines += ["", f"student: {content['student']}"]
    for teacher in teachers:
        lines.append(f"teacher: {teacher['teacher']}")
    documents = f"{content['documents']:,} documents ({content['skipped']:,} skipped)"
    lines.append(f"corpus: {content['dataset']}, {documents}")
    for key in ("files", "skip_reasons"):
        if content[key]:
            lines.append(f"{key.replace('_', ' ')}: {content[key]}")
    vocabulary = [["shared tokens"] + names]
    for spelling, title in (("raw", "as written"), ("bytes", "as bytes")):
        row = [title]
        for teacher in teachers:
            row.append(f"{100 * teacher['vocabulary_overlap'][spelling]:.2f}")
        vocabulary.append(row)
    lines += ["", "## Vocabulary overlap (% of the teacher's)", "", markdown_table(vocabulary)]
    # All teachers have the same keys, which become the rows of the table.
    mapping = [["student tokens"] + names]
    for key in teachers[0]["mapping"]:
        # A ratio of tokens to tokens is not a share.
        is_ratio = "_per_" in key
        row = [key.replace("_", " ")]
        for teacher in teachers:
            share = teacher["mapping"][key]
            row.append(f"{share:.4f}" if is_ratio else f"{100 * share:.2f}")
        mapping.append(row)
    title = "## Token-level map (% of the student's tokens)"
    lines += ["", title, "", markdown_table(mapping)]
    return "\n".join(lines) + "\n"


def verdict(mapping: Mapping[str, float]) -> str:
    """Say what the `map_shares` of a pair mean for a run."""
    unmapped, straddling = mapping["unmapped"], mapping["straddling"]
    shares = f"{mapping['mapped']:.2%} of the student's tokens have teacher tokens, "
    shares += f"{mapping['one_to_one']:.0%} exactly one with the same characters"
    # Judge unmapped tokens first, because no option gives them a teacher.
    if unmapped > _MANY_UNMAPPED:
        return f"a poor pair: {shares}; {unmapped:.1%} have none and are always trained"
    if straddling > _MANY_STRADDLING:
        shares += f"; {straddling:.0%} share a teacher token with neighbouring text: consider"
        shares += " --aggregation share"
    return f"a good pair: {shares}"


# -- The command ---------------------------------------------------------------------------------


def _read_corpus(arguments: Namespace) -> tuple[Any, JsonObject]:
    """Read the documents to audit, and say which files and documents are skipped."""
    # This imports datasets, which --help does not need.
    from vocagnolm.corpus import load_corpus, load_sample
    from vocagnolm.texts import is_conversations, reasons_in

    ((name, options),) = corpora_of(arguments)
    if arguments.documents is None:
        corpus = load_corpus(name, **options)
    else:
        # A sample of a hub dataset does not download the rest of it.
        corpus, _ = load_sample(name, arguments.documents, **options)
    if is_conversations(corpus):
        raise OptionError(
            "dataset", "has conversations: audit documents, for example by --text_column"
        )
    content = {"dataset": name} | options
    content["files"] = corpus.info.description
    content["skip_reasons"] = count_reasons(reasons_in(corpus))
    return corpus, content


@shell("vocagnolm audit")
def main(argv: Sequence[str] | None = None) -> None:
    """Audit the tokenizers and print the result."""
    parser = Parser("vocagnolm audit", __doc__)
    add = parser.add_argument
    add("--student", required=True, hub="model", help="Tokenizer: a hub name or a directory.")
    add("--teacher", required=True, nargs="+", hub="model", help="The teachers' tokenizers.")
    parser.add_dataset(required=True)
    add("--documents", type=int, help="Read only the first N; default: all.")
    add("--output_dir", type=Path, help="For audit.json and audit.md.")
    add("--trust_remote_code", action="store_true")
    arguments = parser.parse_args(argv)
    in_range(arguments, "[1, inf)", "documents")
    out = arguments.output_dir
    # Check the directory before the work, which may take minutes.
    if out:
        check_output_directory(out, _RECORD, listed(arguments.dataset))
    # Tokenizers load in a second, so a wrong name shows before the corpus is read.
    load = partial(load_tokenizer, trust_remote_code=arguments.trust_remote_code)
    student = load(arguments.student, "student")
    teachers = {name: load(name, "teacher") for name in arguments.teacher}
    corpus, content = _read_corpus(arguments)
    content |= {"student": arguments.student} | audit(student, teachers, corpus)
    text = audit_markdown(content)
    if out:
        with output_directory(out, _RECORD):
            write_json(out / _RECORD, content)
            write_text(out / "audit.md", text)
    print_main(text.rstrip("\n"))
