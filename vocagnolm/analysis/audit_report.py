"""The tables and the figure of an audit, from the content of its `audit.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import getitem
from pathlib import Path, PurePosixPath
from typing import Any

from vocagnolm.host.tables import markdown_table

Content = Mapping[str, Any]

# Told apart without colour: by marker and shade.
_MARKERS, _SHADES = "os^DvPX", ("black", "0.35", "0.6")
_OVERLAPS = (("raw", "as written"), ("bytes", "as bytes"))
_SIZES = (("teacher", "teacher's"), ("student", "student's"), ("union", "either's"))
_PER_TOKEN = (
    ("mapped", "mapped"),
    ("unmapped", "unmapped"),
    ("range_of_1", "range of 1 teacher token"),
    ("range_of_2", "range of 2"),
    ("range_of_3_or_more", "range of 3 or more"),
    ("one_to_one", "one-to-one (same characters)"),
    ("one_to_many", "one-to-many"),
    ("many_to_one", "many-to-one"),
    ("straddling", "straddling"),
)
_RATIOS = (
    ("teacher_tokens_per_student_token", "teacher tokens per student token"),
    ("student_tokens_per_character", "student tokens per character"),
    ("teacher_tokens_per_character", "teacher tokens per character"),
)


def markdown(content: Content) -> str:
    """The audit as tables: a column per teacher, in percent."""
    lines = [
        f"student: {content['student']}",
        *(f"teacher: {teacher['teacher']}" for teacher in content["teachers"]),
        f"corpus: {content['dataset']}, {content['documents']:,} documents"
        f" ({content['skipped']:,} left out)",
        *("", "## Vocabulary overlap (%)", "", _vocabulary_table(content)),
        *("", "## Token-level map (% of the student's tokens)", "", _map_table(content)),
    ]
    if content["sequences"]:
        length = content["settings"]["sequence_length"]
        title = f"## Chunks of {content['sequences']} x {length:,} student tokens, IoU / IoS (%)"
        lines += ["", title, "", _chunk_table(content)]
    for label, teacher in zip(labels(content), content["teachers"], strict=True):
        if teacher["worst"]:
            title = f"## Documents that fit {label} worst, numbered from 0"
            lines += ["", title, "", _worst_table(teacher["worst"])]
    return "\n".join(lines) + "\n"


def labels(content: Content) -> list[str]:
    """A short name of each teacher: the last part of its name, unless two have the same."""
    names = [teacher["teacher"] for teacher in content["teachers"]]
    short = [PurePosixPath(name).name or name for name in names]
    return short if len(set(short)) == len(short) else names


def _vocabulary_table(content: Content) -> str:
    return markdown_table(
        [
            ["shared, of the words", *labels(content)],
            *(
                _row(content, f"{size}, {how}", "vocabulary_overlap", key, of)
                for key, how in _OVERLAPS
                for of, size in _SIZES
            ),
        ]
    )


def _map_table(content: Content) -> str:
    lines = [_row(content, name, "mapping", key) for key, name in _PER_TOKEN]
    lines += [
        _row(content, name, "token_level", key) for key, name in (("iou", "IoU"), ("ios", "IoS"))
    ]
    lines += [
        [name, *(f"{teacher['mapping'][key]:.4f}" for teacher in content["teachers"])]
        for key, name in _RATIOS
    ]
    return markdown_table([["", *labels(content)], *lines])


def _chunk_table(content: Content) -> str:
    lines = []
    for place, chunks in enumerate(content["settings"]["chunks"]):
        found = [teacher["chunks"][place] for teacher in content["teachers"]]
        cells = [f"{100 * point['iou']:.2f} / {100 * point['ios']:.2f}" for point in found]
        lines.append([str(chunks), *cells])
    return markdown_table([["chunks", *labels(content)], *lines])


def _worst_table(worst: Sequence[Content]) -> str:
    header = ["document", "IoU", "IoS", "mapped", "student tokens", "teacher tokens", "begins"]
    lines = [
        [
            str(document["document"]),
            *(f"{100 * document[key]:.2f}" for key in ("iou", "ios", "mapped")),
            *(str(document[key]) for key in ("student_tokens", "teacher_tokens")),
            json.dumps(document["beginning"], ensure_ascii=False),
        ]
        for document in worst
    ]
    return markdown_table([header, *lines])


def _row(content: Content, name: str, *keys: str) -> list[str]:
    """A line with what lies behind these keys for each teacher, in percent."""
    shares = [reduce(getitem, keys, teacher) for teacher in content["teachers"]]
    return [name, *(f"{100 * share:.2f}" for share in shares)]


def draw(content: Content, path: Path) -> None:
    """Draw IoU and IoS against the number of chunks; dashed lines are the token level."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, both = pyplot.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    for axes, key, title in zip(both, ("iou", "ios"), ("IoU (%)", "IoS (%)"), strict=True):
        for number, (label, teacher) in enumerate(
            zip(labels(content), content["teachers"], strict=True)
        ):
            marker, shade = _MARKERS[number % len(_MARKERS)], _SHADES[number % len(_SHADES)]
            points = teacher["chunks"]
            axes.errorbar(
                [point["chunks"] for point in points],
                [100 * point[key] for point in points],
                [196 * point.get(f"{key}_standard_error", 0.0) for point in points],
                label=label,
                **{"marker": marker, "color": shade, "markersize": 4, "capsize": 2},
            )
            level = 100 * teacher["token_level"][key]
            axes.axhline(level, linestyle="--", linewidth=0.8, color=shade)
            at_right = {"transform": axes.get_yaxis_transform(), "clip_on": False}
            hollow = {"marker": marker, "color": shade, "markersize": 6, "fillstyle": "none"}
            axes.plot(1, level, **hollow, **at_right)
        axes.set(title=title, xlabel="chunks of equal token count", ylim=(0, 103))
        if content["sequences"]:
            axes.set_xscale("log", base=2)
            axes.set_xticks(content["settings"]["chunks"], map(str, content["settings"]["chunks"]))
    both[0].legend(frameon=False, fontsize=8, loc="lower left")
    note = "dashed, hollow marks: token level; bars: 95 % intervals over sequences"
    figure.suptitle(note, fontsize=8)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
