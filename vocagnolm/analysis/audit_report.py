"""Lay out an audit as tables and a figure, from the content of its `audit.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from vocagnolm.host.plots import SMALL, new_plot, save_plot, series_style
from vocagnolm.host.tables import markdown_table

Content = Mapping[str, Any]

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
_RATIOS = {
    "teacher tokens per student token": "teacher_tokens_per_student_token",
    "student tokens per character": "student_tokens_per_character",
    "teacher tokens per character": "teacher_tokens_per_character",
}


def audit_markdown(content: Content) -> str:
    """Lay out an audit as tables: a column per teacher, in percent."""
    teachers, names = content["teachers"], labels(content)
    ratios = [
        [name, *(f"{teacher['mapping'][key]:.4f}" for teacher in teachers)]
        for name, key in _RATIOS.items()
    ]
    vocabulary = [["shared, of the words", *names], *_percent(teachers, _VOCABULARY)]
    per_token = [["", *names], *_percent(teachers, _PER_TOKEN), *ratios]
    lines = [
        f"student: {content['student']}",
        *(f"teacher: {teacher['teacher']}" for teacher in teachers),
        f"corpus: {content['dataset']}, {content['documents']:,} documents"
        f" ({content['skipped']:,} left out)",
    ]
    lines += _section("Vocabulary overlap (%)", vocabulary)
    lines += _section("Token-level map (% of the student's tokens)", per_token)
    if content["sequences"]:
        length = content["settings"]["sequence_length"]
        rows = [["chunks", *names]]
        for place, chunks in enumerate(content["settings"]["chunks"]):
            points = [teacher["chunks"][place] for teacher in teachers]
            cells = (f"{100 * point['iou']:.2f} / {100 * point['ios']:.2f}" for point in points)
            rows.append([str(chunks), *cells])
        lines += _section(
            f"Chunks of {content['sequences']} x {length:,} student tokens, IoU / IoS (%)", rows
        )
    for name, teacher in zip(names, teachers, strict=True):
        if teacher["worst"]:
            title = f"Documents that fit {name} worst, numbered from 0"
            lines += _section(title, _worst(teacher["worst"]))
    return "\n".join(lines) + "\n"


def labels(content: Content) -> list[str]:
    """Shorten the names of the teachers to their last parts, unless two have the same."""
    names = [teacher["teacher"] for teacher in content["teachers"]]
    short = [PurePosixPath(name).name or name for name in names]
    return short if len(set(short)) == len(short) else names


def _section(title: str, rows: Sequence[Sequence[str]]) -> list[str]:
    return ["", f"## {title}", "", markdown_table(rows)]


def _percent(teachers: Sequence[Content], lines: Mapping[str, tuple[str, ...]]) -> list[list[str]]:
    return [
        [name, *(f"{100 * _share(teacher, *keys):.2f}" for teacher in teachers)]
        for name, keys in lines.items()
    ]


def _share(part: Content, *keys: str) -> float:
    for key in keys[:-1]:
        part = part[key]
    return float(part[keys[-1]])


def _worst(documents: Sequence[Content]) -> list[list[str]]:
    rows = [["document", "IoU", "IoS", "mapped", "student tokens", "teacher tokens", "begins"]]
    for document in documents:
        shares = (f"{100 * document[key]:.2f}" for key in ("iou", "ios", "mapped"))
        tokens = (str(document[key]) for key in ("student_tokens", "teacher_tokens"))
        beginning = json.dumps(document["beginning"], ensure_ascii=False)
        rows.append([str(document["document"]), *shares, *tokens, beginning])
    return rows


def draw_audit(content: Content, path: Path) -> None:
    """Draw IoU and IoS against the number of chunks; dashed lines are the token level."""
    figure, both = new_plot(9, 3.6, (1, 1), share_y=True)
    counts, names = content["settings"]["chunks"], labels(content)
    for axes, key, title in zip(both, ("iou", "ios"), ("IoU (%)", "IoS (%)"), strict=True):
        for number, (label, teacher) in enumerate(zip(names, content["teachers"], strict=True)):
            style, points = series_style(number), teacher["chunks"]
            axes.errorbar(
                [point["chunks"] for point in points],
                [100 * point[key] for point in points],
                [196 * point.get(f"{key}_standard_error", 0.0) for point in points],
                label=label,
                markersize=4,
                capsize=2,
                **style,
            )
            # The token level: a dashed line, and a hollow mark at its right end.
            level = 100 * teacher["token_level"][key]
            axes.axhline(level, linestyle="--", linewidth=0.8, color=style["color"])
            style |= {"transform": axes.get_yaxis_transform(), "clip_on": False}
            axes.plot(1, level, markersize=6, fillstyle="none", **style)
        axes.set(title=title, xlabel="chunks of equal token count", ylim=(0, 103))
        if content["sequences"]:
            axes.set_xscale("log", base=2)
            axes.set_xticks(counts, map(str, counts))
    both[0].legend(frameon=False, fontsize=SMALL, loc="lower left")
    note = "dashed, hollow marks: token level; bars: 95 % intervals over sequences"
    figure.suptitle(note, fontsize=SMALL)
    save_plot(figure, path)
