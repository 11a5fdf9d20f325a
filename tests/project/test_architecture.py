"""The arrows between rooms and modules, what a light import loads, and the proportions."""

from __future__ import annotations

import ast

import pytest
import shape
from shape import READING_ORDER, ROOMS

# What a side of the house may never reach, however many imports lie between.
NEVER_REACHED = {
    "vocagnolm.trainer": ("vocagnolm.corpus", "vocagnolm.readers", "vocagnolm.data"),
    "vocagnolm.token_loss": ("vocagnolm.spans", "vocagnolm.readers", "vocagnolm.data"),
    "vocagnolm.guidance": ("vocagnolm.spans", "vocagnolm.collator", "vocagnolm.token_loss"),
    "vocagnolm.data": ("vocagnolm.token_loss", "vocagnolm.models", "vocagnolm.store"),
    "vocagnolm.evaluation.main": ("vocagnolm.trainer", "vocagnolm.guidance", "vocagnolm.data"),
    "vocagnolm.run.main": ("vocagnolm.evaluation",),
}


def reachable(start: str) -> set[str]:
    """Modules that one loads, by way of others."""
    seen: set[str] = set()
    todo = [start]
    while todo:
        new = shape.module_arrows()[todo.pop()] - seen
        seen |= new
        todo += new
    return seen


def test_import_parser_sees_every_form() -> None:
    code = (
        "import vocagnolm.spans as s\nfrom vocagnolm import data, run\n"
        "def f():\n    from vocagnolm.evaluation.answers import x\nimport torch.nn\n"
    )
    expected = {"spans", "data", "run", "evaluation.answers"}
    assert shape.imported_modules(ast.parse(code)) == {f"vocagnolm.{name}" for name in expected}


@pytest.mark.parametrize("room", ROOMS)
def test_room_imports_only_the_rooms_below(room: str) -> None:
    # An arrow that is allowed and does not exist is wrong too: the table is the map.
    assert shape.room_arrows()[room] == set(ROOMS[room].split())


def test_rooms_hold_every_module() -> None:
    assert {source.room for source in shape.sources()} == set(ROOMS)


def test_arrows_make_no_circle() -> None:
    assert shape.has_circle(shape.module_arrows()) == ""
    assert shape.has_circle({room: set(below.split()) for room, below in ROOMS.items()}) == ""


def test_method_imports_in_reading_order() -> None:
    assert shape.arrows_up() == []
    flat = {s.module for s in shape.sources() if s.room == shape.METHOD} - {"vocagnolm"}
    assert flat == {f"vocagnolm.{name}" for name in READING_ORDER}


@pytest.mark.parametrize("module", NEVER_REACHED)
def test_sides_of_the_house_never_meet(module: str) -> None:
    found = reachable(module)
    beyond = NEVER_REACHED[module]
    assert not [name for name in found if name.startswith(beyond)]


def test_files_keep_their_proportions() -> None:
    long = [(s.module, s.lines) for s in shape.sources() if s.lines > shape.MAX_FILE_LINES]
    assert long == []
    found = ((s.module, *function) for s in shape.sources() for function in shape.functions(s))
    assert [function for function in found if function[2] > shape.MAX_FUNCTION_LINES] == []
    assert [s.module for s in shape.sources() if not ast.get_docstring(s.tree)] == []


def test_house_keeps_its_measures() -> None:
    wrong = [row for row in shape.table() if not row.holds]
    assert wrong == [], "\n".join(f"{r.measure}: {r.measured:g}, limit {r.limit:g}" for r in wrong)
