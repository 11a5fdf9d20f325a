"""The table of options: what a field of a dataclass of options declares, and who reads it.

A field says once what an option is for: its default, help and other names; the values that it
takes; what it is to a run (its role); what it needs and excludes; what it is called in Python. The
command line, recipes, the settings of a run and error messages read it from there.

The module does not import torch.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

_T = TypeVar("_T")

# What an option is to a run. "numbers": what training computes depends on it. "place": the same,
# and it names a file, a directory or a model. "words": anything else.
Role = Literal["numbers", "place", "words"]
Kind = Literal["model", "dataset"]

# True inside a command. A context variable, so that a thread that trains from Python does not get
# the words of a command in another thread.
at_shell: ContextVar[bool] = ContextVar("at_shell", default=False)
# Options that have another name in Python: {option: argument}. `declare` adds to it.
_python_names: dict[str, str] = {}


# -- Errors --------------------------------------------------------------------------------------


def named(option: str) -> str:
    """Return an option as its user spells it: `--top_k` in a command, `top_k` in Python."""
    if at_shell.get():
        return f"--{option}"
    return _python_names.get(option, option)


class OptionError(ValueError):
    """What a user typed or passed is wrong. The message begins with the option.

    >>> raise OptionError("top_k", "must be in (0, 1], got 1.4")
    Traceback (most recent call last):
    vocagnolm.fields.OptionError: top_k must be in (0, 1], got 1.4
    """

    def __init__(self, option: str, fault: str):
        # Both are arguments of the exception, so that it can be sent between processes.
        super().__init__(option, fault)
        self.option = option
        self._message = f"{named(option)} {fault}"

    def __str__(self) -> str:
        return self._message


def suggestion(name: str, known_names: Iterable[str]) -> str:
    """Return " (did you mean X?)" for the known name that is most like one, or nothing.

    >>> suggestion("--teachr", ["--teacher", "--student"])
    ' (did you mean --teacher?)'
    """
    names = list(known_names)
    # Prefer a completion over the nearest spelling.
    completions = [completion for completion in names if completion.startswith(name)]
    nearest = completions or difflib.get_close_matches(name, names, 1, cutoff=0.8)
    return f" (did you mean {nearest[0]}?)" if nearest else ""


# -- Declarations --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Option:
    """What a field declares.

    Attributes:
        name: its name, without dashes.
        default: its value if it is not given.
        help: its help text.
        role: what it is to a run.
        interval: its least and greatest value, such as "(0, 1]".
        choices: its values, if its type is no `Literal`.
        needs: options without all of which it has no effect.
        excludes: options that it cannot be combined with. They replace each other over a recipe.
        hub: the kind of repository on the hub that it may name.
        may_be_empty: an empty value means that this corpus has none, where others have one.
        python: what it is called in Python, if that is another name.
        first: show it at the top of the help.
        aliases: other names on a command line.
    """

    name: str = ""
    default: Any = None
    help: str = ""
    role: Role = "numbers"
    interval: str = ""
    choices: Sequence[str] = ()
    needs: Sequence[str] = ()
    excludes: Sequence[str] = ()
    hub: Kind | None = None
    may_be_empty: bool = False
    python: str = ""
    first: bool = False
    aliases: Sequence[str] = ()


class _Help(str):
    """A help text that carries its option. HfArgumentParser passes all metadata to argparse."""

    option: Option


def option(default: _T, help: str = "", **declaration: Any) -> _T:
    """Return a dataclass field for an option. `Option` describes what it may declare."""
    text = _Help(help)
    text.option = Option(help=help, **declaration)
    metadata: dict[str, Any] = {"help": text}
    if text.option.aliases:
        metadata["aliases"] = [f"--{alias}" for alias in text.option.aliases]
    # A dataclass rejects a list as a default, because all instances would share it.
    if isinstance(default, list):
        return cast(_T, field(default_factory=default.copy, metadata=metadata))
    return field(default=default, metadata=metadata)


def options_of(*classes: Any) -> Iterator[Option]:
    """Yield the options that dataclasses, or their bases, declare. Other fields are left out."""
    for dataclass_or_instance in classes:
        for declared in fields(dataclass_or_instance):
            text = declared.metadata.get("help")
            if isinstance(text, _Help):
                default = declared.default
                if declared.default_factory is not MISSING:
                    default = declared.default_factory()
                yield replace(text.option, name=declared.name, default=default)


def declare(*classes: Any) -> None:
    """Note what the options of dataclasses are called in Python."""
    for declared in options_of(*classes):
        if declared.python:
            _python_names[declared.name] = declared.python


def aliases_of(*classes: Any) -> dict[str, str]:
    """Return {alias: option}."""
    aliases = {}
    for declared in options_of(*classes):
        for alias in declared.aliases:
            aliases[alias] = declared.name
    return aliases


@cache
def kinds_of(cls: type) -> dict[str, tuple[Any, bool]]:
    """Return for each option of a dataclass the type of a value, and whether it is a list."""
    hints = get_type_hints(cls)
    kinds: dict[str, tuple[Any, bool]] = {}
    for declared in options_of(cls):
        hint = hints[declared.name]
        if get_origin(hint) in (Union, UnionType):
            # Of several types, such as dict and str, the last is what a command line gives.
            hint = [kind for kind in get_args(hint) if kind is not NoneType][-1]
        is_list = get_origin(hint) is list
        kinds[declared.name] = (get_args(hint)[0] if is_list else hint, is_list)
    return kinds


# -- Checks --------------------------------------------------------------------------------------


class Names(tuple[str, ...]):
    """The names that an option knows. Any `package.module:name` is allowed, too."""

    __slots__ = ()

    def __contains__(self, name: object) -> bool:
        return ":" in str(name) or super().__contains__(name)


def check_options(options: object) -> None:
    """Check the values of a dataclass of options against what its fields declare.

    Raises:
        OptionError: a switch is neither True nor False, a value is empty, not among the choices or
            outside the interval, or two options exclude each other.
    """
    cls: Any = type(options)
    kinds = kinds_of(cls)
    for declared in options_of(options):
        name, value = declared.name, getattr(options, declared.name)
        # None stands for a default that is filled in later.
        if value is None:
            continue
        if value != declared.default and not declared.may_be_empty:
            check_not_empty(name, value)
        kind, is_list = kinds[name]
        for item in listed(value) if is_list else [value]:
            # Python may give the string "false", which is true.
            if kind is bool and not isinstance(item, bool):
                raise OptionError(name, f"must be True or False, got {item!r}")
            choices = get_args(kind) if get_origin(kind) is Literal else declared.choices
            if choices:
                check_choice(name, item, choices)
            if declared.interval:
                check_interval(name, item, declared.interval)
        for other in declared.excludes:
            if value and getattr(options, other):
                raise OptionError(name, f"and {named(other)} cannot be combined: give one")


def check_not_empty(name: str, value: object) -> None:
    """Reject an empty text, such as the value of a variable that is not set."""
    if "" in listed(value):
        raise OptionError(name, "is empty: give a value, or leave it out")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Reject a value that is not among the choices."""
    if value not in choices:
        hint = suggestion(str(value), choices)
        raise OptionError(name, f"must be one of {', '.join(choices)}, got {value}{hint}")


def check_interval(name: str, value: Any, interval: str) -> None:
    """Reject a number outside an interval such as "(0, 1]", and what is not a number."""
    low, high = map(float, interval[1:-1].split(","))
    is_inside = False
    if isinstance(value, int | float):
        is_above = value > low if interval[0] == "(" else value >= low
        is_below = value < high if interval[-1] == ")" else value <= high
        # NaN is neither above nor below anything.
        is_inside = is_above and is_below
    if not is_inside:
        raise OptionError(name, f"must be in {interval}, got {value!r}")


def in_range(options: object, interval: str, *names: str) -> None:
    """Reject the first option outside an interval. None stands for no value."""
    for name in names:
        for value in listed(getattr(options, name)):
            if value is not None:
                check_interval(name, value, interval)


def without_effect(
    values: Mapping[str, object], options: Iterable[Option]
) -> Iterator[tuple[str, str]]:
    """Yield each option that has another value than its default and lacks all that it needs.

    The second item says what is missing.
    """
    for declared in options:
        if values.get(declared.name, declared.default) == declared.default:
            continue
        if declared.needs and not any(values[need] for need in declared.needs):
            needs = " or ".join(named(need) for need in declared.needs)
            yield declared.name, f"without {needs}"


# -- Values --------------------------------------------------------------------------------------


def listed(value: Any) -> list[Any]:
    """Return the items of a list or tuple, or a list with any other value."""
    return list(value) if isinstance(value, list | tuple) else [value]


def one_for_each(option: str, value: Any, count: int, of: str) -> list[Any]:
    """Return `count` values of an option that has one value for all, or one for each."""
    values = listed(value)
    if len(values) not in (1, count):
        raise OptionError(
            option, f"needs one value, or one for each of {count} {of}, got {len(values)}"
        )
    return values if len(values) > 1 else values * count


def json_settings(option: str, text: str) -> dict[str, object]:
    """Parse an option that is a JSON object of settings.

    Raises:
        OptionError: it is anything else, or empty.
    """
    try:
        content = json.loads(text)
    except ValueError as error:
        raise OptionError(option, f"{text} is not JSON: {error}") from error
    # An empty object would set nothing, so giving one is a mistake, too.
    if not (content and isinstance(content, dict)):
        raise OptionError(option, f"{text} is not a JSON object of settings")
    return content


def corpora_of(options: object) -> list[tuple[str, dict[str, Any]]]:
    """Return the corpora of `DataOptions` or `Parser.add_dataset`, each with its options.

    An option has one value for all corpora, or one for each.
    """
    values = vars(options)
    names = listed(values["dataset"])
    count = len(names)
    splits = one_for_each("dataset_split", values["dataset_split"], count, "corpora")
    columns = one_for_each("text_column", values["text_column"], count, "corpora")
    configs = one_for_each("dataset_config", values["dataset_config"], count, "corpora")
    corpora = []
    for name, split, column, config in zip(names, splits, columns, configs, strict=True):
        # An empty name means that this corpus names no column, where others do.
        corpus_options = {"split": split, "text_column": column or None, "config_name": config}
        corpora.append((name, corpus_options))
    return corpora
