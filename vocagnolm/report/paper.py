"""The paper's numbers as printed, by table and row, and its names of models."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pandas as pd

from vocagnolm.io import ASSETS, JsonObject, read_json

REPORTED_FILE = ASSETS / "reported.json"


@cache
def _paper() -> JsonObject:
    return read_json(REPORTED_FILE)


def read_reported(names: Sequence[str]) -> pd.DataFrame:
    """Read rows of the paper's tables: row, table, column, reported; "Table 2" names all of one."""
    tables = {table["table"]: table for table in _paper()["tables"]}
    table_of = {row: table for table in tables.values() for row in table["rows"]}
    rows: list[str] = []
    for name in names:
        if name not in tables and name not in table_of:
            known = ", ".join(map(repr, [*tables, *table_of]))
            expected = "expected --reported to name a row or a table of the paper"
            raise ValueError(f"{expected}, found {name!r}: give one of {known}")
        rows += tables[name]["rows"] if name in tables else [name]
    lines = []
    for row in dict.fromkeys(rows):
        table = table_of[row]
        for column, value in zip(table["columns"], table["rows"][row], strict=True):
            if value is not None:
                lines.append((row, table["table"], column, value))
    return pd.DataFrame(lines, columns=["row", "table", "column", "reported"])


def teacher_name(reference: str) -> str:
    """Return the paper's name of a model, or else the last part of its own.

    >>> teacher_name("Qwen/Qwen2.5-Math-7B-Instruct"), teacher_name("runs/TinyLlama-CPT")
    ('Qwen2.5-Math-Instruct', 'TinyLlama-CPT')
    """
    own = Path(reference).name
    for name, others in _paper()["models"].items():
        if own.casefold() in (name.casefold(), *map(str.casefold, others)):
            return str(name)
    return own
