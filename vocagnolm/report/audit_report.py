"""Lay out an audit as tables and a figure, from the content of its `audit.json`."""

import json
from pathlib import Path, PurePosixPath

import pandas as pd

from vocagnolm.io import JsonObject, markdown_table
from vocagnolm.report.panels import Figure, draw_figure, overlap_panels
from vocagnolm.report.runs import TEXTS, teacher_rows


def audit_markdown(content: JsonObject) -> str:
    """Lay out an audit as tables: a column per teacher, in percent."""
    teachers, names = content["teachers"], labels(content)
    # A row for each number, as "mapping.one_to_one", and a column for each teacher.
    numbers = pd.json_normalize(teachers).T
    tables = {}
    for table in TEXTS["audit"]:
        rows = [[table["head"], *names]]
        rows += [[x, *map(_percent, numbers.loc[key])] for x, key in table["shares"].items()]
        rows += [[x, *map("{:.4f}".format, numbers.loc[key])] for x, key in table["ratios"].items()]
        tables[table["title"]] = rows
    if content["sequences"]:
        sizes = f"{content['sequences']} x {content['settings']['sequence_length']:,}"
        both = [
            [f"{_percent(x['iou'])} / {_percent(x['ios'])}" for x in t["chunks"]] for t in teachers
        ]
        counts = map(str, content["settings"]["chunks"])
        rows = [["chunks", *names], *map(list, zip(counts, *both, strict=True))]
        tables[f"Chunks of {sizes} student tokens, IoU / IoS (%)"] = rows
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
