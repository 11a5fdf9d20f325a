"""Recipes: YAML files of options with their bases, and the line of each option for errors."""

import json
import os
import re
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from vocagnolm.cli import OneLineErrors

# As argparse reads them: of any type.
Options = dict[str, Any]


@dataclass(frozen=True)
class Recipe:
    """Options of a file and of the bases that it builds on.

    Attributes:
        options: values by name; those of a file win over its base's.
        places: the file and line of each, as messages name them.
    """

    options: Options
    places: dict[str, str]

    def flags(self, *names: str) -> list[str]:
        """Write all options, or some, as the flags that they stand for."""
        flags: list[str] = []
        for name in names or self.options:
            value = self.options[name]
            if isinstance(value, list):
                flags += [f"--{name}", *map(str, value)]
            elif value is not None:
                flags.append(f"--{name}={json.dumps(value) if isinstance(value, dict) else value}")
        return flags

    def check(self, parser: ArgumentParser) -> None:
        """Let a parser check each option by itself; its errors begin with the place."""
        try:
            for name in self.places:
                parser.parse_args(self.flags(name))
        except ValueError as error:
            raise ValueError(f"{self.places[name]}: {error}") from error


def recipe_of(argv: Sequence[str]) -> Recipe:
    """Read the recipe that a command line names with `--config`, if any."""
    parser = OneLineErrors(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", action="append", default=[])
    paths = parser.parse_known_args(argv)[0].config
    if len(paths) > 1:
        raise ValueError(f"--config names {' and '.join(paths)}: give one, with the other as base")
    recipe = Recipe({}, {})
    for file, options, lines in recipe_files(*paths) if paths else ():
        recipe.options.update(options)
        recipe.places.update({name: f"--config {file}, line {lines[name]}" for name in options})
    return recipe


@contextmanager
def named_in_errors(argv: Sequence[str]) -> Iterator[None]:
    """Put the file and line of a recipe before an error about an option that was set there."""
    try:
        yield
    except ValueError as error:
        # The first option of a message is the one at fault.
        if found := re.search(r"(?<!\w)--(\w+)", str(error)):
            given = {re.split("[ =]", word)[0].replace("-", "_") for word in argv}
            place = recipe_of(argv).places.get(found[1])
            if place and f"__{found[1]}" not in given:
                error.args = (f"{place}: {error}",)
        raise


def recipe_files(path: str) -> list[tuple[str, Options, dict[str, int]]]:
    """Return files, their options and the lines of these, the most general file first."""
    found: dict[str, tuple[Options, dict[str, int]]] = {}
    named_by = ""
    while path not in found:
        options, lines = _read(path, named_by)
        base = options.pop("base", None)
        found[path] = options, lines
        if base is None:
            return [(file, *content) for file, content in reversed(found.items())]
        if not isinstance(base, str):
            place = f"--config {path}, line {lines['base']}"
            raise ValueError(f"{place}: base must name a file beside it, got {base!r}")
        named_by = f", the base of {path}"
        path = os.path.normpath(Path(path).parent / base)
    raise ValueError(f"--config {path} is its own base: {' -> '.join([*found, path])}")


def _read(path: str, named_by: str) -> tuple[Options, dict[str, int]]:
    """Read a file of options, and the line of each."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        # Before names that another part of the file brings with << are put among them.
        named = [*node.value] if isinstance(node, yaml.MappingNode) else []
        options = loader.construct_document(node) if node else None
    # A ValueError of bytes that are no UTF-8, or of a day that no month has.
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
        line = f", line {mark.line + 1}," if mark else ""
        reason = error.problem if isinstance(error, yaml.MarkedYAMLError) else error
        reason = " ".join(str(reason).split())
        raise ValueError(f"--config {path}{line} cannot be read{named_by}: {reason}") from error
    if not isinstance(options, dict):
        raise ValueError(f"--config {path} must be a mapping of options to values")
    options = {str(name): value for name, value in options.items()}
    lines = dict.fromkeys(options, 1) | {key.value: key.start_mark.line + 1 for key, _ in named}
    for key, _ in named:
        if (line := key.start_mark.line + 1) < lines[key.value]:
            again = f"names {key.value}, as line {lines[key.value]} does: leave one out"
            raise ValueError(f"--config {path}, line {line} {again}")
    if "config" in options:
        raise ValueError(
            f"--config {path}, line {lines['config']} names another config: call it base, or leave "
            "it out"
        )
    return options, lines
