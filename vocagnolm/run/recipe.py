"""Recipes: YAML files of options, the package's own by name, and the command that lists them."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vocagnolm.cli import Parser, shell
from vocagnolm.fields import OptionError, aliases_of, options_of, suggestion
from vocagnolm.shell.io import print_main, read_mapping
from vocagnolm.training.options import DataOptions, GuidanceOptions, ModelOptions, RunOptions

RECIPES = Path(__file__).resolve().parents[1] / "recipes"


def names_in(directory: Path) -> list[str]:
    """Return the names of the package's YAML files: their paths without the ending."""
    paths = directory.rglob("*.yaml")
    return sorted(path.relative_to(directory).with_suffix("").as_posix() for path in paths)


def find_file(option: str, value: str, directory: Path = RECIPES) -> Path:
    """Return the file that an option names: an existing one, or else one of the package."""
    # A user's file comes before a recipe of the package with the same name.
    if Path(value).is_file():
        return Path(value)
    names = names_in(directory)
    if value not in names:
        choices = "`vocagnolm recipes` lists them" if directory == RECIPES else ", ".join(names)
        hint = suggestion(value, names)
        raise OptionError(option, f"{value} is not a file here or in the package{hint}: {choices}")
    return directory / f"{value}.yaml"


def recipe_options(path: str | Path) -> dict[str, Any]:
    """Read a YAML file of options over those of its `base`, a file in the same directory."""
    # Give every option its own name here, so that it overrides the base's, whatever spelling that
    # uses.
    aliases = aliases_of(ModelOptions, DataOptions, GuidanceOptions, RunOptions)
    options = {}
    for spelling, value in read_mapping("config", path).items():
        name = spelling.replace("-", "_")
        options[aliases.get(name, name)] = value
    base = options.pop("base", None)
    if base is None:
        return options
    try:
        # The base may have its own base. On the right side of |, its values would win.
        return without_replaced(recipe_options(Path(path).parent / str(base)), options) | options
    except RecursionError:
        raise OptionError("config", f"{path} is its own base") from None


def without_replaced(options: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Leave out the options of a recipe that options with these names replace.

    They are the excluded ones, and others that only have an effect with an excluded one.

    >>> without_replaced({"teacher": "T", "teacher_dtype": "float32"}, ["teacher_losses"])
    {}
    """
    excluded: set[str] = set()
    table = list(options_of(ModelOptions, DataOptions, GuidanceOptions, RunOptions))
    for declared in table:
        if declared.name in names:
            excluded.update(declared.excludes)
    replaced = set(excluded)
    for declared in table:
        if declared.needs and excluded.issuperset(declared.needs):
            replaced.add(declared.name)
    return {name: value for name, value in options.items() if name not in replaced}


def as_flags(options: Mapping[str, Any]) -> list[str]:
    """Write options as flags, without those that are null."""
    flags: list[str] = []
    for name, value in options.items():
        if isinstance(value, list):
            flags += [f"--{name}", *map(str, value)]
        # The equals sign keeps a value with a leading dash from being read as an option.
        elif value is not None:
            flags.append(f"--{name}={json.dumps(value) if isinstance(value, dict) else value}")
    return flags


@shell("vocagnolm recipes")
def main(argv: Sequence[str] | None = None) -> None:
    """List the recipes that `--config NAME` accepts, each with its file's first line."""
    Parser("vocagnolm recipes", main.__doc__).parse_args(argv)
    names = names_in(RECIPES)
    width = max(map(len, names))
    for name in names:
        with (RECIPES / f"{name}.yaml").open(encoding="utf-8") as file:
            print_main(f"{name:{width}}  {file.readline().removeprefix('#').strip()}")
