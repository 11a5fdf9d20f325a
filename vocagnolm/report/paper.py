"""Reads the numbers of the paper's tables, and its names for models."""

from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from vocagnolm.fields import check_choice
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
    cells: list[Reported] = []
    choices = []
    for table in read_json(REPORTED_FILE)["tables"]:
        title = table["table"]
        choices.append(title)
        for row, values in table["rows"].items():
            choices.append(row)
            if row not in names and title not in names:
                continue
            for column, value in zip(table["columns"], values, strict=True):
                # Some of the paper's cells are empty.
                if value is not None:
                    cells.append({"row": row, "table": title, "column": column, "reported": value})
    for name in names:
        check_choice("reported", name, choices)
    return cells


def teacher_name(reference: str) -> str:
    """Return the paper's name for a model, or else the last part of its own name.

    >>> teacher_name("Qwen/Qwen2.5-Math-7B-Instruct"), teacher_name("runs/TinyLlama-CPT")
    ('Qwen2.5-Math-Instruct', 'TinyLlama-CPT')
    """
    model = Path(reference).name
    for name, aliases in read_json(REPORTED_FILE)["models"].items():
        if model.casefold() in [spelling.casefold() for spelling in [name] + aliases]:
            return str(name)
    return model
