"""Lay out an audit as tables and a figure, from the content of its `audit.json`."""

import json
from pathlib import Path, PurePosixPath

import pandas as pd

from vocagnolm.analysis.panels import Figure, draw_figure, overlap_panels
from vocagnolm.analysis.runs import teacher_rows
from vocagnolm.host.files import JsonObject
from vocagnolm.host.tables import markdown_table

# Lines of the first two tables: what they are called, and where a teacher has their numbers.
_VOCABULARY = {
    f"{size}, {how}": f"vocabulary_overlap.{key}.{of}"
    for key, how in (("raw", "as written"), ("bytes", "as bytes"))
    for of, size in (("teacher", "teacher's"), ("student", "student's"), ("union", "either's"))
}
_PER_TOKEN = {
    "mapped": "mapping.mapped",
    "unmapped": "mapping.unmapped",
    "range of 1 teacher token": "mapping.range_of_1",
    "range of 2": "mapping.range_of_2",
    "range of 3 or more": "mapping.range_of_3_or_more",
    "one-to-one (same characters)": "mapping.one_to_one",
    "one-to-many": "mapping.one_to_many",
    "many-to-one": "mapping.many_to_one",
    "straddling": "mapping.straddling",
    "IoU": "token_level.iou",
    "IoS": "token_level.ios",
}
_RATIOS = {
    "teacher tokens per student token": "mapping.teacher_tokens_per_student_token",
    "student tokens per character": "mapping.student_tokens_per_character",
    "teacher tokens per character": "mapping.teacher_tokens_per_character",
}


def audit_markdown(content: JsonObject) -> str:
    """Lay out an audit as tables: a column per teacher, in percent."""
    teachers, names = content["teachers"], labels(content)
    # A row for each number, as "mapping.one_to_one", and a column for each teacher.
    numbers = pd.json_normalize(teachers).T
    ratios = [[title, *map("{:.4f}".format, numbers.loc[key])] for title, key in _RATIOS.items()]
    vocabulary, per_token = (
        [[title, *map(_percent, numbers.loc[key])] for title, key in keys.items()]
        for keys in (_VOCABULARY, _PER_TOKEN)
    )
    tables = {
        "Vocabulary overlap (%)": [["shared, of the words", *names], *vocabulary],
        "Token-level map (% of the student's tokens)": [["", *names], *per_token, *ratios],
    }
    if content["sequences"]:
        sizes = f"{content['sequences']} x {content['settings']['sequence_length']:,}"
        both = [
            [f"{_percent(x['iou'])} / {_percent(x['ios'])}" for x in t["chunks"]] for t in teachers
        ]
        counts = map(str, content["settings"]["chunks"])
        chunks = [list(row) for row in zip(counts, *both, strict=True)]
        tables[f"Chunks of {sizes} student tokens, IoU / IoS (%)"] = [["chunks", *names], *chunks]
    for name, teacher in zip(names, teachers, strict=True):
        if teacher["worst"]:
            tables[f"Documents that fit {name} worst, numbered from 0"] = _worst(teacher)
    lines = [
        f"student: {content['student']}",
        *(f"teacher: {teacher['teacher']}" for teacher in teachers),
        f"corpus: {content['dataset']}, {content['documents']:,} documents"
        f" ({content['skipped']:,} left out)",
    ]
    for title, rows in tables.items():
        lines += ["", f"## {title}", "", markdown_table(rows)]
    return "\n".join(lines) + "\n"


def labels(content: JsonObject) -> list[str]:
    """Shorten the names of the teachers to their last parts, unless two have the same."""
    names = [teacher["teacher"] for teacher in content["teachers"]]
    short = [PurePosixPath(name).name or name for name in names]
    return short if len(set(short)) == len(short) else names


def _percent(share: float) -> str:
    return f"{100 * share:.2f}"


def _worst(teacher: JsonObject) -> list[list[str]]:
    rows = [["document", "IoU", "IoS", "mapped", "student tokens", "teacher tokens", "begins"]]
    for one in teacher["worst"]:
        shares = (_percent(one[key]) for key in ("iou", "ios", "mapped"))
        tokens = (str(one[key]) for key in ("student_tokens", "teacher_tokens"))
        beginning = json.dumps(one["beginning"], ensure_ascii=False)
        rows.append([str(one["document"]), *shares, *tokens, beginning])
    return rows


def draw_audit(content: JsonObject, path: Path) -> None:
    """Draw IoU and IoS against the number of chunks, and beside them the token level."""
    named = zip(labels(content), content["teachers"], strict=True)
    rows = ({"label": label, **row} for label, teacher in named for row in teacher_rows(teacher))
    title = "Characters that chunks share; bars: 95 % intervals over sequences"
    draw_figure(Figure(3, title, overlap_panels(pd.DataFrame(rows))), path)
