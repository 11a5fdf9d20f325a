"""Audit the tokenizers of a student and of teachers, before any model is loaded.

    vocagnolm audit --student S --teacher T [T2 ...] --dataset D [--output_dir DIR]

Words in common, the make-up of the token-level map on every document, the overlap of chunks of
equal token count (Figure 3 of the paper), and the documents that fit worst. docs/audit.md explains
every number. Exit status: 0 done, 2 a wrong argument or file.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from vocagnolm.analysis.audit import CHUNKS, AuditSettings, Named, audit, write_audit
from vocagnolm.analysis.audit_report import audit_markdown
from vocagnolm.corpus import load_corpus, load_sample
from vocagnolm.host.command import Parser, check_at_least, corpora_of, run_command, say
from vocagnolm.host.files import JsonObject, check_writable
from vocagnolm.tokenizers import load_tokenizer

_NAME = "vocagnolm audit"


def main(argv: Sequence[str] | None = None) -> int:
    """Audit, and return the exit status."""
    return run_command(_NAME, lambda: _audit(_parse(argv)))


def _parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser, defaults = Parser(_NAME, __doc__), AuditSettings()
    add = parser.add_argument
    add("--student", required=True, help="Its tokenizer: a directory or a hub name.")
    add("--teacher", required=True, nargs="+", help="Their tokenizers, likewise.")
    parser.add_dataset(required=True)
    add("--documents", type=int, help="Only the first ones; default: all.")
    # Chunks of equal token count, Figure 3 of the paper.
    length, cut = defaults.sequence_length, "Student tokens of a sequence that is cut into chunks."
    add("--sequence_length", type=int, default=length, help=cut)
    add("--sequences", type=int, default=defaults.sequences, help="How many, at most.")
    add("--chunks", type=int, nargs="+", default=CHUNKS, help="Numbers of chunks of a sequence.")
    add("--seed", type=int, default=defaults.seed, help="Of the documents' order in sequences.")
    add("--worst", type=int, default=defaults.worst, help="Documents to name per teacher.")
    add("--output_dir", type=Path, help="Gets audit.json, audit.md and audit.png.")
    add("--trust_remote_code", action="store_true")
    arguments = parser.parse_args(argv)
    check_at_least(arguments, 1, "documents")
    return arguments


def _audit(arguments: argparse.Namespace) -> None:
    # Before the work, which may take minutes.
    output_dir = arguments.output_dir
    if output_dir:
        check_writable(output_dir)
    content = _content(arguments)
    if output_dir:
        write_audit(content, output_dir)
    say(audit_markdown(content).rstrip("\n"))


def _content(arguments: argparse.Namespace) -> JsonObject:
    settings = AuditSettings(
        arguments.sequence_length,
        arguments.sequences,
        arguments.chunks,
        arguments.worst,
        arguments.seed,
    )
    trust = arguments.trust_remote_code
    tokenizer = load_tokenizer(arguments.student, "student", trust_remote_code=trust)
    student = Named(arguments.student, tokenizer)
    teachers = [
        Named(name, load_tokenizer(name, "teacher", trust_remote_code=trust))
        for name in arguments.teacher
    ]
    ((_, options),) = corpora_of(arguments)
    # A sample is read without downloading the rest.
    if arguments.documents is None:
        corpus = load_corpus(arguments.dataset, **options)
    else:
        corpus, _ = load_sample(arguments.dataset, arguments.documents, **options)
    return {"dataset": arguments.dataset, **options, **audit(student, teachers, corpus, settings)}
