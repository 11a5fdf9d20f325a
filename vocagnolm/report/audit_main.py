"""Audit the tokenizers of a student and of teachers, before any model is loaded.

    vocagnolm audit --student S --teacher T [T2 ...] --dataset D [--output_dir DIR]

Words in common, the make-up of the token-level map on every document, the overlap of chunks of
equal token count (Figure 3 of the paper), and the documents that fit worst. docs/audit.md explains
every number. Exit status: 0 done, 2 a wrong argument or file.
"""

import argparse
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from vocagnolm.cli import (
    Parser,
    corpora_of,
    one_for_each,
    say,
    shell,
)
from vocagnolm.host.options import refuse_idle
from vocagnolm.io import JsonObject, check_writable

_OF_CONVERSATIONS = ("student_chat_template", "teacher_chat_template")


def _parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser("vocagnolm audit", __doc__)
    add = parser.add_argument
    add("--student", required=True, help="Its tokenizer: a directory or a hub name.")
    add("--teacher", required=True, nargs="+", help="Their tokenizers, likewise.")
    parser.add_dataset(required=True)
    add("--student_chat_template", help="plain, chatml or a file; default: its tokenizer's.")
    add("--teacher_chat_template", nargs="+", help="Likewise: one for all, or one for each.")
    add("--documents", type=int, help="Only the first ones; default: all.")
    # Chunks of equal token count, Figure 3 of the paper.
    cut = "Student tokens of a sequence that is cut into chunks; default: 2048."
    add("--sequence_length", type=int, help=cut)
    add("--sequences", type=int, help="How many, at most; default: 150.")
    chunks = "Numbers of chunks of a sequence; default: 2 4 8 ... 512."
    add("--chunks", type=int, nargs="+", help=chunks)
    add("--seed", type=int, help="Of the documents' order in sequences; default: 0.")
    add("--worst", type=int, help="Documents to name per teacher; default: 10.")
    add("--output_dir", type=Path, help="Gets audit.json, audit.md and audit.png.")
    add("--trust_remote_code", action="store_true")
    arguments = parser.parse_args(argv)
    return arguments


@shell("vocagnolm audit")
def main(argv: Sequence[str] | None = None) -> None:
    """Audit the tokenizers, and tell what was found."""
    arguments = _parse(argv)
    from vocagnolm.report.audit import write_audit
    from vocagnolm.report.audit_report import audit_markdown

    # Before the work, which may take minutes.
    output_dir = arguments.output_dir
    if output_dir:
        check_writable(output_dir)
    content = _content(arguments)
    if output_dir:
        write_audit(content, output_dir)
    say(audit_markdown(content).rstrip("\n"))


def _content(arguments: argparse.Namespace) -> JsonObject:
    from vocagnolm.chat.columns import is_conversations
    from vocagnolm.corpus import load_corpus, load_sample
    from vocagnolm.report.audit import AuditSettings, Named, audit
    from vocagnolm.texts.tokenizers import load_tokenizer

    given = {each.name: vars(arguments)[each.name] for each in fields(AuditSettings)}
    settings = AuditSettings(**{name: value for name, value in given.items() if value is not None})
    trust = arguments.trust_remote_code
    tokenizer = load_tokenizer(arguments.student, "student", trust_remote_code=trust)
    student = Named(arguments.student, tokenizer, arguments.student_chat_template)
    names, option = arguments.teacher, "teacher_chat_template"
    templates = one_for_each(option, vars(arguments)[option], len(names), "teachers")
    teachers = [
        Named(name, load_tokenizer(name, "teacher", trust_remote_code=trust), template)
        for name, template in zip(names, templates, strict=True)
    ]
    ((_, options),) = corpora_of(arguments)
    # A sample is read without downloading the rest.
    if arguments.documents is None:
        corpus = load_corpus(arguments.dataset, **options)
    else:
        corpus, _ = load_sample(arguments.dataset, arguments.documents, **options)
    if not is_conversations(corpus):
        idle = {name for name in _OF_CONVERSATIONS if vars(arguments)[name]}
        refuse_idle(idle, idle, "where there are no conversations")
    return {"dataset": arguments.dataset, **options, **audit(student, teachers, corpus, settings)}
