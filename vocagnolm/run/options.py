"""All options of training by subject: the page of `--help`, and one with the rejected options.

python -m vocagnolm.run.options     # writes docs/options.md, and the page that --help shows
"""

import argparse
import re
import textwrap
from collections import ChainMap
from dataclasses import dataclass, fields
from pathlib import Path

from transformers import TrainingArguments
from transformers.hf_argparser import string_to_bool

from vocagnolm.io import markdown_table, read_asset, write_text
from vocagnolm.models.adapters import AdapterArguments
from vocagnolm.objective import Method
from vocagnolm.run import HELP_PAGE
from vocagnolm.run.arguments import DataArguments, GuidanceArguments, ModelArguments
from vocagnolm.run.parse import make_parser
from vocagnolm.run.rejected import REJECTED
from vocagnolm.run.training_arguments import RunArguments

_PAGE = Path(__file__).resolve().parents[2] / "docs" / "options.md"
# What is said around the tables, and the sections of the fields of `RunArguments`.
_TEXTS = read_asset("train_options.yaml")
# Sections of one class each.
_CLASSES = {
    "Models": ModelArguments,
    "Adapters": AdapterArguments,
    "Data": DataArguments,
    "Method": GuidanceArguments,
}
_OTHERS = "Other fields of transformers.TrainingArguments"
_WIDTH, _INDENT, _MOST_CHOICES = 80, 26, 8


@dataclass(frozen=True)
class _Option:
    name: str
    default: str
    meaning: str
    # What is typed behind it, "" for a switch.
    value: str


def sections(*, everything: bool = False) -> dict[str, list[str]]:
    """Return the names of the options by subject; Trainer's other fields only if asked for.

    Another version of transformers may lack one.
    """
    found = {title: _own(arguments) for title, arguments in _CLASSES.items()}
    found |= {title: list(meanings) for title, meanings in _TEXTS["sections"].items()}
    shown = {name for names in found.values() for name in names}
    rest = [each.name for each in fields(RunArguments) if each.name not in shown | REJECTED.keys()]
    ours = set(_own(RunArguments))
    # A new option of ours is shown, even if nobody has chosen a section.
    found["Hardware"] += [name for name in rest if name in ours]
    if everything:
        found[_OTHERS] = sorted(set(rest) - ours)
    return found


def help_page(*, everything: bool = False) -> str:
    """Return the text of `--help`, or of `--help_all`."""
    options = _options()
    usage = "usage: train.py [--config RECIPE.yaml] --teacher TEACHER [OPTION ...]"
    lines = [usage, "", _TEXTS["about"]]
    for title, names in sections(everything=everything).items():
        lines += ["", f"{title}:"]
        lines += [line for name in names if name in options for line in _help_lines(options[name])]
    if not everything:
        lines += ["", f"{_OTHERS}: --help_all"]
    return "\n".join(lines) + "\n"


def options_page() -> str:
    """Return the page as Markdown, with a table for each subject."""
    options, parts = _options(), [_TEXTS["head"]]
    for title, names in sections().items():
        rows = [["option", "default", "meaning"]]
        for option in (options[name] for name in names if name in options):
            default = f"`{option.default}`" if option.default else "none"
            rows.append([f"`--{option.name}`", default, option.meaning])
        parts += [f"## {title}", markdown_table(rows, padded=False)]
    rows = [["option", "only", "any other value"]]
    for name, (value, reason) in REJECTED.items():
        rows.append([f"`--{name}`", f"`{_shown(value)}`", f"{reason[0].upper()}{reason[1:]}."])
    parts += [_TEXTS["foot"], markdown_table(rows, padded=False)]
    return "\n\n".join(parts) + "\n"


def _own(arguments: type) -> list[str]:
    """Return the options that a class itself declares, in its order."""
    names = list(vars(arguments)["__annotations__"])
    # The method's settings belong to training, too.
    return [*vars(Method)["__annotations__"], *names] if issubclass(arguments, Method) else names


def _options() -> dict[str, _Option]:
    theirs = {each.name: each.metadata.get("help", "") for each in fields(TrainingArguments)}
    sentences = ChainMap(*_TEXTS["sections"].values())
    options = {}
    # The first action of a name sets it, a second one takes it back.
    for action in reversed(make_parser()._actions):
        name = action.dest
        text = sentences.get(name) or action.help or ""
        if text == theirs.get(name):
            # A sentence of theirs is enough.
            first = re.split(r"(?<=[.]) (?=[A-Z])", " ".join(text.split()))[0]
            text = first.replace("%%", "%")
        choices = list(action.choices or ())
        if 0 < len(choices) <= _MOST_CHOICES:
            text += f" One of {', '.join(f'`{choice}`' for choice in choices)}."
        options[name] = _Option(name, _shown(action.default), text, _typed(action))
    return options


def _typed(action: argparse.Action) -> str:
    if action.const is True:
        return ""
    value = {int: "N", float: "X", string_to_bool: "BOOL"}.get(action.type, "NAME")
    return f"{value} ..." if action.nargs in ("+", "*") else value


def _shown(default: object) -> str:
    """Write a default as it is typed; "" for none."""
    if default is None or default == "":
        return ""
    if isinstance(default, list):
        return " ".join(map(str, default))
    return str(default).lower() if isinstance(default, bool) else str(default)


def _help_lines(option: _Option) -> list[str]:
    name = f"  --{option.name} {option.value}".rstrip()
    text = option.meaning.replace("`", "")
    if option.default not in ("", "false"):
        text += f" [{option.default}]"
    lines = textwrap.wrap(text, _WIDTH - _INDENT, break_on_hyphens=False) or [""]
    # A long name has a line of its own.
    if len(name) >= _INDENT:
        lines.insert(0, "")
    first, *others = lines
    return [f"{name:{_INDENT}}{first}".rstrip(), *(" " * _INDENT + line for line in others)]


if __name__ == "__main__":
    write_text(_PAGE, options_page())
    write_text(HELP_PAGE, help_page())
