"""Measure how well teachers' tokens align with a student's. Loads no model.

    vocagnolm audit --student S --teacher T [T2 ...] --dataset D [--output_dir DIR]

An audit has the shared tokens, and how the teacher's tokens cover each student token. docs/audit.md
explains every number.
Exit status: 0 done, 2 a wrong argument or file.
"""

from __future__ import annotations

import itertools
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from vocagnolm.alignment import align_spans
from vocagnolm.cli import Parser, shell
from vocagnolm.fields import OptionError, corpora_of, in_range, listed
from vocagnolm.record import check_output_directory, output_directory
from vocagnolm.report.mapping import count_map, map_shares, vocabulary_overlap
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


# -- Measuring -----------------------------------------------------------------------------------


def audit(
    student: PreTrainedTokenizerBase,
    teachers: Mapping[str, PreTrainedTokenizerBase],
    corpus: datasets.Dataset,
) -> JsonObject:
    """Measure how a student's tokens overlap each teacher's on the documents of a corpus.

    Documents that are not text, or in which a tokenizer finds no token, are skipped for all.
    Returns what `audit.json` has of the pairs. All shares are in [0, 1].
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
