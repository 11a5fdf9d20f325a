"""What a choice of documents keeps, and how well scores find documents that are labelled good.

The input is columns with one value per document; the output is the lines of tables.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from vocagnolm.conventions import IntArray
from vocagnolm.fields import OptionError, named

_Floats = npt.NDArray[np.float64]
_Numbers = npt.NDArray[Any]
RESAMPLES = 1_000
# A table of sources has the largest ones, and one row for the others.
_LARGEST = 12
# Characters of the name of a source.
_NAME_WIDTH = 40
# Groups of neighbouring scores in a resample.
_GROUPS = 1_000
# What a table has in the place of a label that is missing.
_NO_LABEL = {"", "NaN"}


def best_first(values: _Floats, *, largest: bool) -> IntArray:
    """Return the indices of scores, best first. Equal ones keep their order.

    >>> best_first(np.array([0.5, 2.0, 0.5]), largest=True).tolist()
    [1, 0, 2]
    """
    if largest:
        values = -values
    return np.argsort(values, kind="stable")


def kept_count(count: int, share: float) -> int:
    """Return the smallest number that is at least this share of a count, exactly.

    >>> kept_count(100, 0.07), kept_count(3, 0.5)
    (7, 2)
    """
    # In floats, 0.07 * 100 is above 7. Printed, a float is the number that was typed.
    return math.ceil(Fraction(str(share)) * count)


# -- What is kept ---------------------------------------------------------------------------------


def kept_by_source(sources: Sequence[str], tokens: IntArray, kept: _Numbers) -> Iterator[str]:
    """Yield a table of the documents and tokens of each source, and of the shares that are kept."""
    names, source_of = np.unique(sources, return_inverse=True)
    totals = np.zeros((len(names), 4))
    # A source may have many documents, so += would lose some.
    np.add.at(totals, source_of, np.stack([np.ones_like(tokens), kept, tokens, tokens * kept], 1))
    order = np.argsort(-totals[:, 0], kind="stable")
    rows = []
    for index in order[:_LARGEST]:
        rows.append((one_line(names[index], _NAME_WIDTH), totals[index]))
    others = order[_LARGEST:]
    if len(others):
        rows.append((f"{len(others):,} others", totals[others].sum(axis=0)))
    if len(order) > 1:
        rows.append(("all", totals.sum(axis=0)))
    width = len("source")
    for name, _ in rows:
        width = max(width, len(name))
    yield f"{'source':{width}} {'documents':>12} {'kept':>8} {'tokens':>16} {'kept':>8}"
    for name, (documents, documents_kept, size, size_kept) in rows:
        shares = documents_kept / documents, size_kept / size
        yield f"{name:{width}} {documents:12,.0f} {shares[0]:8.1%} {size:16,.0f} {shares[1]:8.1%}"


def one_line(text: str, width: int = 76) -> str:
    """Cut a text to a line. What would control a terminal becomes a space."""
    shown = ""
    for character in text[: 4 * width]:
        shown += character if character.isprintable() else " "
    line = " ".join(shown.split())
    if len(line) > width:
        return f"{line[: width - 1]}…"
    return line


# -- Labels ---------------------------------------------------------------------------------------


def good_labels(labels: Sequence[str | None], good: str | None) -> _Floats:
    """Return 1 for each good document, 0 for each other one, and NaN for one without a label.

    A table without nulls has empty cells, or floats with NaN, for documents without a label.

    Raises:
        OptionError: there are no good documents or no others, or `good` is needed.
    """
    found = {label for label in labels if label is not None} - _NO_LABEL
    goods, others = {"true", "True", "TRUE", "1", "1.0"}, {"false", "False", "FALSE", "0", "0.0"}
    if good:
        goods, others = {good}, found - {good}
    # Any other value would count as bad.
    if not found & goods or not found & others or found - goods - others:
        some = ", ".join(sorted(found)[:5]) or "no values"
        raise OptionError(
            "label_column", f"has {some}: expected true and false, 1 and 0, or {named('good')}"
        )
    values = np.full(len(labels), math.nan)
    for index, label in enumerate(labels):
        if label in found:
            values[index] = label in goods
    return values


def auc_and_precision(good: _Numbers, others: _Numbers, kept: int) -> _Numbers:
    """Measure orders of documents by their labels, best first.

    Args:
        good: how many documents of each group of equal scores are good [..., G].
        others: how many are not [..., G].
        kept: how many of the first documents are kept. Of a group that is cut, each document is as
            likely to be kept.

    Returns:
        The probability that a good document comes before another one, where equal ones count half;
        and the share of the kept documents that is good [..., 2].
    """
    all_others = others.sum(axis=-1)
    behind = all_others[..., None] - others.cumsum(axis=-1)
    # A resample may lack one kind. Its AUC is NaN, and is left out.
    with np.errstate(invalid="ignore"):
        auc = (good * (behind + others / 2)).sum(axis=-1) / (good.sum(axis=-1) * all_others)
    sizes = good + others
    before = sizes.cumsum(axis=-1) - sizes
    taken = np.clip(kept - before, 0, sizes)
    good_kept = (taken * good / np.maximum(sizes, 1)).sum(axis=-1)
    return np.stack([auc, good_kept / kept], axis=-1)


def judged(values: _Floats, good: _Floats, kept: int) -> list[tuple[float, float, float]]:
    """Return AUC and precision of scores of which the largest are best, with their 95 % intervals.

    The intervals are percentiles of a bootstrap over documents.
    """
    levels, group = np.unique(-values, return_inverse=True)
    measured = auc_and_precision(np.bincount(group, good), np.bincount(group, 1 - good), kept)
    # Drawing documents with replacement is one multinomial draw of how many there are of each group
    # and label. Neighbours share a group, which moves an AUC by less than one in a thousand.
    group //= math.ceil(len(levels) / _GROUPS)
    cells = np.bincount(2 * group + (good > 0), minlength=2 * group.max() + 2)
    rng = np.random.default_rng(0)
    drawn = rng.multinomial(len(good), cells / len(good), size=RESAMPLES)
    samples = auc_and_precision(drawn[:, 1::2], drawn[:, 0::2], kept)
    low, high = np.nanquantile(samples, (0.025, 0.975), axis=0)
    return list(zip(measured.tolist(), low.tolist(), high.tolist(), strict=True))


def judgement(
    columns: Mapping[str, _Floats], largest: Mapping[str, bool], good: _Floats, share: float | None
) -> Iterator[str]:
    """Yield a table of how well each score finds good documents, with 95 % intervals.

    Documents without a label are left out, also of the share that is kept.
    """
    labelled = ~np.isnan(good)
    good = good[labelled]
    if not 0 < good.sum() < len(good):
        yield "labels: the scored documents are not of both kinds"
        return
    kept = kept_count(len(good), share or 1)
    yield f"{len(good):,} labelled documents, {int(good.sum()):,} good; in brackets: 95 %"
    heading = f"{'score':8} {'best':9} {'AUC':22}"
    if share:
        heading += f" precision of the best {kept:,}"
    yield heading.rstrip()
    for name, is_largest in largest.items():
        values, best = columns[name][labelled], "largest"
        if not is_largest:
            values, best = -values, "smallest"
        measured = judged(values, good, kept)
        # Precision is of the documents that are kept.
        if not share:
            measured.pop()
        line = f"{name:8} {best:9}"
        for value, low, high in measured:
            line += f" {value:.3f} [{low:.3f}, {high:.3f}]  "
        yield line.rstrip()
