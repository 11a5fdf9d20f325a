"""Reads the numbers of the paper's tables, and its names for models."""

from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from vocagnolm.fields import OptionError
from vocagnolm.shell.io import ASSETS, read_json

REPORTED_FILE = ASSETS / "reported.json"


class Reported(TypedDict):
    """A number of the paper."""

    row: str
    table: str
    # The id of a benchmark, or the name of an average.
    column: str
    reported: float


def read_reported(names: Sequence[str]) -> list[Reported]:
    """Return the numbers in rows of the paper's tables. "Table 2" means all of its rows."""
    # A cell is found by the name of its row, and also by that of its table.
    cells_of: dict[str, list[Reported]] = {}
    for table in read_json(REPORTED_FILE)["tables"]:
        for row, values in table["rows"].items():
            for column, value in zip(table["columns"], values, strict=True):
                # Some of the paper's cells are empty.
                if value is None:
                    continue
                cell: Reported = {
                    "row": row,
                    "table": table["table"],
                    "column": column,
                    "reported": value,
                }
                cells_of.setdefault(row, []).append(cell)
                cells_of.setdefault(table["table"], []).append(cell)
    cells: list[Reported] = []
    for name in names:
        if name not in cells_of:
            expected = ", ".join(map(repr, cells_of))
            raise OptionError(
                "reported", f"{name!r} is not a row or table of the paper: {expected}"
            )
        for cell in cells_of[name]:
            if cell not in cells:
                cells.append(cell)
    return cells


def teacher_name(reference: str) -> str:
    """Return the paper's name for a model, or else the last part of its own name.

    >>> teacher_name("Qwen/Qwen2.5-Math-7B-Instruct"), teacher_name("runs/TinyLlama-CPT")
    ('Qwen2.5-Math-Instruct', 'TinyLlama-CPT')
    """
    model = Path(reference).name
    for name, aliases in read_json(REPORTED_FILE)["models"].items():
        spellings = [spelling.casefold() for spelling in [name, *aliases]]
        if model.casefold() in spellings:
            return str(name)
    return model
