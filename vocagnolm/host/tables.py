"""Markdown tables, written one way everywhere."""

from collections.abc import Sequence


def markdown_table(rows: Sequence[Sequence[str]], *, padded: bool = True) -> str:
    r"""Lay out rows, the first of which is the header; `padded` columns suit a terminal, too.

    >>> print(markdown_table([["method", "loss"], ["a|b", "1.25"]]))
    | method | loss |
    |--------|------|
    | a\|b   | 1.25 |
    """
    cells = [[cell.replace("|", r"\|") for cell in row] for row in rows]
    widths = [max(map(len, column)) if padded else 0 for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in cells]
    rule = "|".join("-" * (width + 2) if padded else "---" for width in widths)
    return "\n".join([lines[0], f"|{rule}|", *lines[1:]])
