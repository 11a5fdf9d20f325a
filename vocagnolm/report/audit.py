"""Measure how well teachers' tokens align with a student's. Loads no model.

    vocagnolm audit --student S --teacher T [T2 ...] --dataset D [--output_dir DIR]

An audit has the shared tokens, the number of teacher tokens that cover each student token, and the
overlap of chunks of equal token count (Figure 3 of the paper). docs/audit.md explains every number.
Exit status: 0 done, 2 a wrong argument or file.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from vocagnolm.cli import Parser, shell
from vocagnolm.fields import corpora_of, listed
from vocagnolm.report.mapping import CHUNKS, audit
from vocagnolm.report.plots import add_legend, dashes, new_plot, series_style
from vocagnolm.shell.io import (
    JsonObject,
    check_outside,
    check_writable,
    claim_names,
    count_reasons,
    markdown_table,
    write_json,
    write_text,
)
from vocagnolm.shell.printing import print_main
from vocagnolm.tokenizer import load_tokenizer

# A verdict warns if a larger share of the student's tokens is unmapped, or straddles.
_MANY_UNMAPPED = 0.01
_MANY_STRADDLING = 0.1


def audit_markdown(content: JsonObject) -> str:
    """Write an audit as tables with a column per teacher, in percent."""
    teachers = content["teachers"]
    names = labels(content)
    lines = []
    # The verdicts come first, because many readers need nothing else.
    for name, teacher in zip(names, teachers, strict=True):
        lines.append(f"- {name}: {verdict(teacher['mapping'])}")
    lines.append("- No model was loaded: vocagnolm inspect shows what a teacher knows of a text")
    lines.append("")
    lines.append(f"student: {content['student']}")
    for teacher in teachers:
        lines.append(f"teacher: {teacher['teacher']}")
    documents = f"{content['documents']:,} documents ({content['skipped']:,} left out)"
    lines.append(f"corpus: {content['dataset']}, {documents}")
    if content.get("files"):
        lines.append(f"files: {content['files']}")
    if content.get("skip_reasons"):
        lines.append(f"skipped: {content['skip_reasons']}")
    lines += ["", "## Vocabulary overlap (%)", "", markdown_table(_vocabulary_rows(content))]
    table = markdown_table(_token_level_rows(content))
    lines += ["", "## Token-level map (% of the student's tokens)", "", table]
    if content["sequences"]:
        sizes = f"{content['sequences']} x {content['settings']['sequence_length']:,}"
        title = f"## Chunks of {sizes} student tokens, IoU / IoS (%)"
        lines += ["", title, "", markdown_table(_chunk_rows(content))]
    return "\n".join(lines) + "\n"


def _vocabulary_rows(content: JsonObject) -> list[list[str]]:
    """Return rows with the shares of common tokens."""
    # Compare tokens as the vocabularies write them, and by the bytes that they stand for, because a
    # space has several spellings.
    rows = [["shared tokens, of"] + labels(content)]
    for kind, spelling in (("raw", "as written"), ("bytes", "as bytes")):
        for whole in ("teacher", "student", "union"):
            row = [f"{whole}, {spelling}"]
            for teacher in content["teachers"]:
                row.append(_percent(teacher["vocabulary_overlap"][kind][whole]))
            rows.append(row)
    return rows


def _token_level_rows(content: JsonObject) -> list[list[str]]:
    """Return rows with the ratios and shares of the token-level map."""
    # All teachers have the same keys, which become the rows of the table.
    rows = [["student tokens"] + labels(content)]
    columns = [teacher["mapping"] | teacher["token_level"] for teacher in content["teachers"]]
    for key in columns[0]:
        row = [key.replace("_", " ")]
        for shares in columns:
            # A ratio of tokens to tokens or characters is not a share.
            is_ratio = "_per_" in key
            row.append(f"{shares[key]:.4f}" if is_ratio else _percent(shares[key]))
        rows.append(row)
    return rows


def _chunk_rows(content: JsonObject) -> list[list[str]]:
    """Return rows with IoU and IoS by the number of chunks."""
    teachers = content["teachers"]
    rows = [["chunks"] + labels(content)]
    for place, chunks in enumerate(content["settings"]["chunks"]):
        row = [str(chunks)]
        for teacher in teachers:
            point = teacher["chunks"][place]
            row.append(f"{_percent(point['iou'])} / {_percent(point['ios'])}")
        rows.append(row)
    return rows


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


def labels(content: JsonObject) -> list[str]:
    """Shorten the teachers' names to their last parts, unless two are the same."""
    names = [teacher["teacher"] for teacher in content["teachers"]]
    short = [PurePosixPath(name).name for name in names]
    return short if len(set(short)) == len(short) else names


def _percent(share: float) -> str:
    return f"{100 * share:.2f}"


def draw_audit(content: JsonObject, path: Path) -> None:
    """Draw IoU and IoS against the number of chunks, with the token level on the right."""
    figure, places = new_plot(10.4, 4.2, columns=2)
    handles = {}
    for axes, key, name in zip(places, ("iou", "ios"), ("IoU", "IoS"), strict=True):
        ticks = [str(chunks) for chunks in content["settings"]["chunks"]] + ["token level"]
        # The numbers of chunks are evenly spaced, and the token level follows after the last.
        axes.set_xticks(range(len(ticks)), ticks)
        for index, teacher in enumerate(content["teachers"]):
            style = series_style(index)
            points = teacher["chunks"]
            # Bars are 95 % intervals over sequences: 1.96 standard errors, in percent.
            errors = [196 * point.get(f"{key}_standard_error", 0.0) for point in points]
            handles[labels(content)[index]] = axes.errorbar(
                range(len(points)),
                [100 * point[key] for point in points],
                yerr=errors,
                linestyle=dashes(index),
                capsize=2.5,
                **style,
            )
            axes.plot(len(ticks) - 1, 100 * teacher["token_level"][key], linestyle="none", **style)
        axes.set(xlabel="chunks of a sequence", ylabel=f"{name} (% of characters)")
    add_legend(figure, handles)
    figure.savefig(path)


def _read_corpus(arguments: Namespace) -> tuple[Any, JsonObject]:
    """Read the documents to audit, and say which files and documents are left out."""
    # This imports datasets, which --help does not need.
    from vocagnolm.corpus import files_of, load_corpus, load_sample
    from vocagnolm.texts import is_conversations, reasons_in

    ((name, options),) = corpora_of(arguments)
    if arguments.documents is None:
        corpus = load_corpus(name, **options)
    else:
        # A sample of a hub dataset does not download the rest of it.
        corpus, _ = load_sample(name, arguments.documents, **options)
    if is_conversations(corpus):
        raise ValueError(
            "--dataset has conversations: audit documents, for example by --text_column"
        )
    files = files_of(name, split=options["split"], config_name=options["config_name"])
    content = {"dataset": name} | options
    content["files"] = files.describe() if files else ""
    content["skip_reasons"] = count_reasons(reasons_in(corpus))
    return corpus, content


def _chunks_up_to(sequence_length: int) -> list[int]:
    """Return the default numbers of chunks, each of which needs a token."""
    return [count for count in CHUNKS if count <= sequence_length] or [1]


@shell("vocagnolm audit")
def main(argv: Sequence[str] | None = None) -> None:
    """Audit the tokenizers and print the result."""
    parser = Parser("vocagnolm audit", __doc__)
    add = parser.add_argument
    cut = "Student tokens per sequence that is cut into chunks; default: 2048."
    add("--student", required=True, help="The student's tokenizer: a hub name or a directory.")
    add("--teacher", required=True, nargs="+", help="The teachers' tokenizers.")
    parser.add_dataset(required=True)
    add("--documents", type=int, help="Read only the first N; default: all.")
    add("--sequence_length", type=int, default=2048, help=cut)
    add(
        "--sequences",
        type=int,
        default=150,
        help="Cut at most this many sequences; default: 150.",
    )
    add("--chunks", type=int, nargs="+", help="Chunks per sequence; default: 2 4 8 ... up to 512.")
    add("--seed", type=int, default=0, help="Seed of the order of documents; default: 0.")
    add("--output_dir", type=Path, help="For audit.json, audit.md and audit.png.")
    add("--trust_remote_code", action="store_true")
    arguments = parser.parse_args(argv)
    arguments.chunks = arguments.chunks or _chunks_up_to(arguments.sequence_length)
    for name in ("sequence_length", "sequences", "chunks", "documents"):
        # Without a number of documents, read all.
        for number in listed(vars(arguments)[name]):
            if number is not None and number < 1:
                raise ValueError(f"--{name} must be at least 1, got {number}")
    out = arguments.output_dir
    # Check the directory before the work, which may take minutes.
    if out:
        check_writable(out)
        check_outside(out, listed(arguments.dataset))
    most_chunks = max(arguments.chunks)
    if most_chunks > arguments.sequence_length:
        raise ValueError(f"--chunks {most_chunks} exceeds --sequence_length: a chunk needs a token")
    # Tokenizers load in a second, so a wrong name shows before the corpus is read.
    load = partial(load_tokenizer, trust_remote_code=arguments.trust_remote_code)
    student = load(arguments.student, "student")
    teachers = {name: load(name, "teacher") for name in arguments.teacher}
    if out:
        claim_names(out, ["audit.json", "audit.md", "audit.png"], "vocagnolm audit")
    corpus, content = _read_corpus(arguments)
    sizes = {
        "sequence_length": arguments.sequence_length,
        "sequences": arguments.sequences,
        "chunks": arguments.chunks,
        "seed": arguments.seed,
    }
    content |= {"student": arguments.student, "settings": sizes}
    content |= audit(student, teachers, corpus, **sizes)
    text = audit_markdown(content)
    if out:
        write_text(out / "audit.md", text)
        write_json(out / "audit.json", content)
        draw_audit(content, out / "audit.png")
    print_main(text.rstrip("\n"))
