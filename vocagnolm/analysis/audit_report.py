"""Lay out an audit as tables and a figure, from the content of its `audit.json`."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath

from vocagnolm.analysis.panels import Figure, Mark, Panel, draw_figure, line
from vocagnolm.host.files import JsonObject
from vocagnolm.host.tables import markdown_table

# Lines of the two first tables: what they are called, and the keys of a teacher that lead to them.
_VOCABULARY = {
    f"{size}, {how}": ("vocabulary_overlap", key, of)
    for key, how in (("raw", "as written"), ("bytes", "as bytes"))
    for of, size in (("teacher", "teacher's"), ("student", "student's"), ("union", "either's"))
}
_PER_TOKEN = {
    "mapped": ("mapping", "mapped"),
    "unmapped": ("mapping", "unmapped"),
    "range of 1 teacher token": ("mapping", "range_of_1"),
    "range of 2": ("mapping", "range_of_2"),
    "range of 3 or more": ("mapping", "range_of_3_or_more"),
    "one-to-one (same characters)": ("mapping", "one_to_one"),
    "one-to-many": ("mapping", "one_to_many"),
    "many-to-one": ("mapping", "many_to_one"),
    "straddling": ("mapping", "straddling"),
    "IoU": ("token_level", "iou"),
    "IoS": ("token_level", "ios"),
}
_RATIOS = (
    "teacher tokens per student token",
    "student tokens per character",
    "teacher tokens per character",
)


def audit_markdown(content: JsonObject) -> str:
    """Lay out an audit as tables: a column per teacher, in percent."""
    teachers, names = content["teachers"], labels(content)

    def table(corner: str, rows: Mapping[str, Callable[[JsonObject], str]]) -> list[list[str]]:
        lines = [[name, *map(cell, teachers)] for name, cell in rows.items()]
        return [[corner, *names], *lines]

    ratios = {name: _ratio(name.replace(" ", "_")) for name in _RATIOS}
    per_token = {name: _percent(*keys) for name, keys in _PER_TOKEN.items()}
    vocabulary = {name: _percent(*keys) for name, keys in _VOCABULARY.items()}
    tables = {
        "Vocabulary overlap (%)": table("shared, of the words", vocabulary),
        "Token-level map (% of the student's tokens)": table("", per_token | ratios),
    }
    if content["sequences"]:
        sizes = f"{content['sequences']} x {content['settings']['sequence_length']:,}"
        counts = enumerate(content["settings"]["chunks"])
        title = f"Chunks of {sizes} student tokens, IoU / IoS (%)"
        tables[title] = table("chunks", {str(n): _both(place) for place, n in counts})
    for name, teacher in zip(names, teachers, strict=True):
        if teacher["worst"]:
            tables[f"Documents that fit {name} worst, numbered from 0"] = _worst(teacher)
    corpus = f"{content['dataset']}, {content['documents']:,} documents"
    lines = [
        f"student: {content['student']}",
        *(f"teacher: {teacher['teacher']}" for teacher in teachers),
        f"corpus: {corpus} ({content['skipped']:,} left out)",
    ]
    for title, rows in tables.items():
        lines += ["", f"## {title}", "", markdown_table(rows)]
    return "\n".join(lines) + "\n"


def labels(content: JsonObject) -> list[str]:
    """Shorten the names of the teachers to their last parts, unless two have the same."""
    names = [teacher["teacher"] for teacher in content["teachers"]]
    short = [PurePosixPath(name).name or name for name in names]
    return short if len(set(short)) == len(short) else names


def _percent(*keys: str) -> Callable[[JsonObject], str]:
    def cell(part: JsonObject) -> str:
        *path, last = keys
        for key in path:
            part = part[key]
        return f"{100 * part[last]:.2f}"

    return cell


def _ratio(key: str) -> Callable[[JsonObject], str]:
    return lambda teacher: f"{teacher['mapping'][key]:.4f}"


def _both(place: int) -> Callable[[JsonObject], str]:
    return lambda teacher: " / ".join(_percent(x)(teacher["chunks"][place]) for x in ("iou", "ios"))


def _worst(teacher: JsonObject) -> list[list[str]]:
    rows = [["document", "IoU", "IoS", "mapped", "student tokens", "teacher tokens", "begins"]]
    for one in teacher["worst"]:
        shares = (_percent(key)(one) for key in ("iou", "ios", "mapped"))
        tokens = (str(one[key]) for key in ("student_tokens", "teacher_tokens"))
        beginning = json.dumps(one["beginning"], ensure_ascii=False)
        rows.append([str(one["document"]), *shares, *tokens, beginning])
    return rows


def draw_audit(content: JsonObject, path: Path) -> None:
    """Draw IoU and IoS against the number of chunks, and beside them the token level."""
    counts = [str(chunks) for chunks in content["settings"]["chunks"]]
    panels = []
    for key, title in (("iou", "IoU (%)"), ("ios", "IoS (%)")):
        marks: list[Mark] = []
        for style, (label, teacher) in enumerate(
            zip(labels(content), content["teachers"], strict=True)
        ):
            curve = []
            for point in teacher["chunks"]:
                y, half = 100 * point[key], 196 * point.get(f"{key}_standard_error", 0.0)
                curve.append(Mark(str(point["chunks"]), y, (y - half, y + half)))
            marks += line(curve, label, style)
            # The token level is no number of chunks: a mark of its own, on no line.
            level = Mark("token level", 100 * teacher["token_level"][key])
            marks += line([level], "" if curve else label, style, joined=False)
        panels.append(Panel("chunks of equal token count", title, marks, [*counts, "token level"]))
    title = "Characters that chunks share; bars: 95 % intervals over sequences"
    draw_figure(Figure(3, title, panels), path)
