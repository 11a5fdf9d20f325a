"""Makes the fields of dataclasses of options, with default and help, and checks their values.

The module does not import torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import field, fields
from inspect import get_annotations
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

_T = TypeVar("_T")


# argparse keeps a help text as it is, so its class can mark options that come first on the page.
class FirstHelp(str):
    """The help of an option that is shown at the top of the page."""


def option(
    default: _T,
    help: str = "",
    *,
    first: bool = False,
    aliases: Sequence[str] = (),
    **of_argparse: Any,
) -> _T:
    """Return a dataclass field for an option, with its default and its help.

    An option that is `first` is shown at the top of the page. `aliases` are other names, such as
    "--max_seq_length", which are also accepted with dashes between the words.
    """
    # HfArgumentParser passes all of this to argparse.
    metadata: dict[str, Any] = {"help": FirstHelp(help) if first else help, **of_argparse}
    if aliases:
        dashed = [f"--{alias.removeprefix('--').replace('_', '-')}" for alias in aliases]
        # An alias of one word has no other spelling, and argparse rejects a repeated name.
        metadata["aliases"] = list(dict.fromkeys([*aliases, *dashed]))
    # A dataclass rejects a list as a default, because all instances would share it.
    if isinstance(default, list):
        return cast(_T, field(default_factory=default.copy, metadata=metadata))
    return field(default=default, metadata=metadata)


def aliases_of(*dataclasses: Any) -> dict[str, str]:
    """Return {alias: option}, without dashes."""
    aliases = {}
    for dataclass in dataclasses:
        for one_field in fields(dataclass):
            # Arguments in Python and keys in a file have underscores.
            for alias in one_field.metadata.get("aliases", ()):
                aliases[alias.removeprefix("--").replace("-", "_")] = one_field.name
    return aliases


class Names(tuple[str, ...]):
    """The names that an option knows. Any `package.module:name` is allowed, too."""

    __slots__ = ()

    def __contains__(self, name: object) -> bool:
        return ":" in str(name) or super().__contains__(name)


def check_types(options: object) -> None:
    """Raise a ValueError for the first switch, number or choice that is not of its field's type.

    A command line is checked by its parser, but Python may give anything, such as the string
    "false", which is true.
    """
    cls = type(options)
    # transformers' own fields take more than their types say. Only their switches are checked, and
    # that numbers are not None.
    own_names: set[str] = set()
    for base in cls.__mro__:
        if base.__module__.startswith("vocagnolm."):
            own_names |= get_annotations(base).keys()
    for name, hint in get_type_hints(cls).items():
        kinds = list(get_args(hint)) if get_origin(hint) in (Union, UnionType) else [hint]
        value = vars(options).get(name)
        # A default may be None though its type is not. It is filled in later.
        if value is None and (NoneType in kinds or getattr(cls, name, None) is None):
            continue
        kinds = [kind for kind in kinds if kind is not NoneType]
        if len(kinds) == 1 and (name in own_names or kinds == [bool]):
            _check_type(name, value, kinds[0])
        elif value is None and name in vars(options) and kinds[0] in (int, float):
            raise ValueError(f"--{name} must be a number, got None")


def _check_type(name: str, value: Any, kind: Any) -> None:
    """Raise a ValueError for a switch, a number, a choice or a list of them of another type."""
    if get_origin(kind) is list:
        for item in listed(value):
            _check_type(name, item, get_args(kind)[0])
    elif get_origin(kind) is Literal:
        check_choice(name, value, kind)
    # Python treats True as the number 1, so a switch given by mistake would pass as a number.
    elif kind is bool and not isinstance(value, bool):
        raise ValueError(f"--{name} must be True or False, got {value!r}")
    elif kind is int and (isinstance(value, bool) or not isinstance(value, int)):
        raise ValueError(f"--{name} must be a whole number, got {value!r}")
    elif kind is float and (
        isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value)
    ):
        raise ValueError(f"--{name} must be a number, got {value!r}")


def in_range(options: object, interval: str, *names: str) -> None:
    """Raise a ValueError for the first option outside an interval such as "(0, 1]"."""
    low, high = map(float, interval[1:-1].split(","))
    for name in names:
        for value in listed(getattr(options, name)):
            if value is None:
                continue
            # Python treats True as the number 1, so a switch given by mistake would pass.
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"--{name} must be a number in {interval}, got {value!r}")
            is_above = value > low if interval[0] == "(" else value >= low
            is_below = value < high if interval[-1] == ")" else value <= high
            # NaN is neither above nor below anything, so it is rejected, too.
            if not (is_above and is_below):
                raise ValueError(f"--{name} must be in {interval}, got {value}")


def check_choice(name: str, value: str, kind: Any) -> None:
    """Raise a ValueError for a value that is not in its `Literal` or its `Names`."""
    choices = kind if isinstance(kind, Names) else get_args(kind)
    if value not in choices:
        raise ValueError(f"--{name} must be one of {', '.join(choices)}, got {value}")


def listed(value: Any) -> list[Any]:
    """Return the items of a list or tuple, or a list with any other value."""
    return list(value) if isinstance(value, list | tuple) else [value]


def one_for_each(option: str, value: Any, count: int, of: str) -> list[Any]:
    """Return `count` values of an option that has one value for all, or one for each."""
    values = listed(value)
    if len(values) not in (1, count):
        raise ValueError(
            f"--{option} needs one value, or one for each of {count} {of}, got {len(values)}"
        )
    return values if len(values) > 1 else values * count


def json_settings(option: str, text: str) -> dict[str, object]:
    """Parse an option that is a JSON object of settings. Anything else is a ValueError."""
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{option}: {text} is not JSON: {error}") from error
    # An empty object would set nothing, so giving one is a mistake, too.
    if not (content and isinstance(content, dict)):
        raise ValueError(f"{option}: {text} is not a JSON object of settings")
    return content


def corpora_of(options: object) -> list[tuple[str, dict[str, Any]]]:
    """Return the corpora of `Parser.add_dataset` with their options, for `load_corpus`.

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
        # An empty column is that of no name, for a corpus among others with names.
        options = {"split": split, "text_column": column or None, "config_name": config}
        corpora.append((name, options))
    return corpora
