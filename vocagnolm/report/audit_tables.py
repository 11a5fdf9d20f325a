"""Shows an audit: a verdict on each pair, tables, and a picture of the chunks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from vocagnolm.report.plot_style import add_legend, dashes, new_plot, series_style
from vocagnolm.shell.io import JsonObject, markdown_table

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
    documents = f"{content['documents']:,} documents ({content['skipped']:,} skipped)"
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
