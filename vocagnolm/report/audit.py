"""Audit the tokenizers of a student and of teachers, before any model is loaded.

    vocagnolm audit --student S --teacher T [T2 ...] --dataset D [--output_dir DIR]

Tokens in common, the make-up of the token-level map on every document, and the overlap of chunks of
equal token count (Figure 3 of the paper). docs/audit.md explains every number. Exit status: 0 done,
2 a wrong argument or file.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from vocagnolm.cli import Parser, shell
from vocagnolm.fields import corpora_of
from vocagnolm.io import (
    JsonObject,
    check_writable,
    count_reasons,
    markdown_table,
    write_json,
    write_text,
)
from vocagnolm.printing import print_main
from vocagnolm.report.mapping import CHUNKS, audit
from vocagnolm.report.plots import add_legend, dashes, new_plot, series_style
from vocagnolm.tokenizer import load_tokenizer

# Shares of the student's tokens from which a verdict warns.
_MANY_UNMAPPED, _MANY_STRADDLING = 0.01, 0.1


def audit_markdown(content: JsonObject) -> str:
    """Lay out an audit as tables: a column per teacher, in percent."""
    teachers, names = content["teachers"], labels(content)
    read = f"{content['documents']:,} documents ({content['skipped']:,} left out)"
    lines = [f"- {name}: {verdict(x['mapping'])}" for name, x in zip(names, teachers, strict=True)]
    lines.append("- No model was loaded: vocagnolm inspect shows what a teacher knows of a text")
    lines += ["", f"student: {content['student']}"]
    lines += [f"teacher: {teacher['teacher']}" for teacher in teachers]
    lines.append(f"corpus: {content['dataset']}, {read}")
    if content.get("files"):
        lines.append(f"files: {content['files']}")
    if content.get("skip_reasons"):
        lines.append(f"skipped: {content['skip_reasons']}")
    rows = [["shared tokens, of", *names]]
    for kind, how in (("raw", "as written"), ("bytes", "as bytes")):
        for whose in ("teacher", "student", "union"):
            shares = [teacher["vocabulary_overlap"][kind][whose] for teacher in teachers]
            rows.append([f"{whose}, {how}", *map(_percent, shares)])
    lines += ["", "## Vocabulary overlap (%)", "", markdown_table(rows)]
    rows = [["student tokens", *names]]
    found = [teacher["mapping"] | teacher["token_level"] for teacher in teachers]
    for key in found[0]:
        # Ratios are no shares.
        write = "{:.4f}".format if "_per_" in key else _percent
        rows.append([key.replace("_", " "), *(write(shares[key]) for shares in found)])
    lines += ["", "## Token-level map (% of the student's tokens)", "", markdown_table(rows)]
    if content["sequences"]:
        rows = [["chunks", *names]]
        for points in zip(*(teacher["chunks"] for teacher in teachers), strict=True):
            cells = [f"{_percent(x['iou'])} / {_percent(x['ios'])}" for x in points]
            rows.append([str(points[0]["chunks"]), *cells])
        sizes = f"{content['sequences']} x {content['settings']['sequence_length']:,}"
        title = f"## Chunks of {sizes} student tokens, IoU / IoS (%)"
        lines += ["", title, "", markdown_table(rows)]
    return "\n".join(lines) + "\n"


def verdict(mapping: Mapping[str, float]) -> str:
    """Say what the `map_shares` of a pair mean for a run."""
    unmapped, straddling = mapping["unmapped"], mapping["straddling"]
    shares = f"{mapping['mapped']:.2%} of the student's tokens have teacher tokens, "
    shares += f"{mapping['one_to_one']:.0%} exactly one with the same characters"
    if unmapped > _MANY_UNMAPPED:
        return f"a poor pair: {shares}; {unmapped:.1%} have none and are always trained"
    if straddling > _MANY_STRADDLING:
        shares += f"; {straddling:.0%} share a teacher token with text beside them: consider"
        shares += " --aggregation share"
    return f"a good pair: {shares}"


def labels(content: JsonObject) -> list[str]:
    """Shorten the names of the teachers to their last parts, unless two have the same."""
    names = [teacher["teacher"] for teacher in content["teachers"]]
    short = [PurePosixPath(name).name for name in names]
    return short if len(set(short)) == len(short) else names


def _percent(share: float) -> str:
    return f"{100 * share:.2f}"


def draw_audit(content: JsonObject, path: Path) -> None:
    """Draw IoU and IoS against the number of chunks, and beside them the token level."""
    figure, places = new_plot(10.4, 4.2, columns=2)
    handles = {}
    for axes, key, name in zip(places, ("iou", "ios"), ("IoU", "IoS"), strict=True):
        ticks = [*map(str, content["settings"]["chunks"]), "token level"]
        axes.set_xticks(range(len(ticks)), ticks)
        for index, teacher in enumerate(content["teachers"]):
            look, points = series_style(index), teacher["chunks"]
            # Bars: 95 % intervals over sequences.
            handles[labels(content)[index]] = axes.errorbar(
                range(len(points)),
                [100 * point[key] for point in points],
                yerr=[196 * point.get(f"{key}_standard_error", 0.0) for point in points],
                linestyle=dashes(index),
                capsize=2.5,
                **look,
            )
            axes.plot(len(ticks) - 1, 100 * teacher["token_level"][key], linestyle="none", **look)
        axes.set(xlabel="chunks of a sequence", ylabel=f"{name} (% of characters)")
    add_legend(figure, handles)
    figure.savefig(path)


def _read_corpus(arguments: Namespace) -> tuple[Any, JsonObject]:
    """Read the documents to audit, and say which files and documents are left out."""
    from vocagnolm import corpus as documents
    from vocagnolm import texts

    ((name, options),) = corpora_of(arguments)
    if arguments.documents is None:
        corpus = documents.load_corpus(name, **options)
    else:
        # Without downloading the rest.
        corpus, _ = documents.load_sample(name, arguments.documents, **options)
    if texts.is_conversations(corpus):
        raise ValueError("--dataset has conversations: audit documents, as with --text_column")
    files = documents.files_of(name, split=options["split"], config_name=options["config_name"])
    reasons = count_reasons(texts.reasons_in(corpus))
    about = {"files": files.describe() if files else "", "skip_reasons": reasons}
    return corpus, {"dataset": name, **options, **about}


@shell("vocagnolm audit")
def main(argv: Sequence[str] | None = None) -> None:
    """Audit the tokenizers, and print what was found."""
    parser = Parser("vocagnolm audit", __doc__)
    add = parser.add_argument
    cut = "Student tokens of a sequence that is cut into chunks; default: 2048."
    add("--student", required=True, help="Its tokenizer: a directory or a hub name.")
    add("--teacher", required=True, nargs="+", help="Their tokenizers, likewise.")
    parser.add_dataset(required=True)
    add("--documents", type=int, help="Only the first ones; default: all.")
    add("--sequence_length", type=int, default=2048, help=cut)
    add("--sequences", type=int, default=150, help="How many, at most; default: 150.")
    add("--chunks", type=int, nargs="+", default=CHUNKS, help="Default: 2 4 8 ... 512.")
    add("--seed", type=int, default=0, help="Of the documents' order in sequences; default: 0.")
    add("--output_dir", type=Path, help="Gets audit.json, audit.md and audit.png.")
    add("--trust_remote_code", action="store_true")
    arguments = parser.parse_args(argv)
    if arguments.documents == 0:
        raise ValueError("--documents needs at least 1, got 0: leave it out for all")
    # Before the work, which may take minutes.
    if out := arguments.output_dir:
        check_writable(out)
    if (most := max(arguments.chunks)) > arguments.sequence_length:
        raise ValueError(f"--chunks {most} exceeds --sequence_length: a chunk needs a token")
    load = partial(load_tokenizer, trust_remote_code=arguments.trust_remote_code)
    student = load(arguments.student, "student")
    teachers = {name: load(name, "teacher") for name in arguments.teacher}
    corpus, content = _read_corpus(arguments)
    sizes = {x: vars(arguments)[x] for x in ("sequence_length", "sequences", "chunks", "seed")}
    content |= {"student": arguments.student, "settings": sizes}
    content |= audit(student, teachers, corpus, **sizes)
    text = audit_markdown(content)
    if out:
        write_text(out / "audit.md", text)
        write_json(out / "audit.json", content)
        draw_audit(content, out / "audit.png")
    print_main(text.rstrip("\n"))
