"""Kinds and ranges of options and arguments: one rule for the command line and the library."""

import inspect
import math
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, fields
from functools import wraps
from numbers import Integral, Real
from types import MappingProxyType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from vocagnolm.io import read_asset

_T = TypeVar("_T")
REFUSED = read_asset("refused.yaml")
# By the words of the error.
_RANGES: dict[str, Callable[[float], bool]] = {
    "be in [0, 1]": lambda value: 0 <= value <= 1,
    "be in (0, 1]": lambda value: 0 < value <= 1,
    "be in [0, 1)": lambda value: 0 <= value < 1,
    "be positive and finite": lambda value: 0 < value < math.inf,
    "be finite and not negative": lambda value: 0 <= value < math.inf,
    "not be negative": lambda value: value >= 0,
    "be at least 1": lambda value: value >= 1,
    "be from 0 to 2^32 - 1": lambda value: 0 <= value < 2**32,
    # More than any corpus has documents, and any model places.
    "be from 1 to 4294967296": lambda value: 1 <= value <= 2**32,
    "be from 4 to 16777216": lambda value: 4 <= value <= 2**24,
}
_RANGE_OF = {name: must for must, names in REFUSED["ranges"].items() for name in names.split()}


def option(default: _T, help: str = "") -> _T:
    """Return the field of a dataclass of options: its default, and its line in `--help`."""
    made: Any = {"default_factory": default.copy} if isinstance(default, list) else {}
    return cast(_T, field(**made or {"default": default}, metadata={"help": help}))


def listed(value: Any) -> list[Any]:
    """Return a list of what a list or a tuple holds, and of anything else a list of one."""
    return [*value] if isinstance(value, list | tuple) else [value]


def raise_first(faults: Iterable[str]) -> None:
    """Raise a ValueError with the first of the messages, if there is one."""
    for message in faults:
        raise ValueError(message)


def refuse_idle(given: Collection[str], idle: Collection[str], condition: str) -> None:
    """Reject options that were given but have no effect under a condition: "with --engine vllm"."""
    if useless := set(given) & set(idle):
        raise ValueError(f"--{min(useless)} has no effect {condition}: leave it out")


def faults_of(options: Any) -> Iterator[str]:
    """Yield a message for each `option` of another kind, or outside of its range."""
    given = {each.name: vars(options)[each.name] for each in fields(options)}
    return wrong_values(given, get_type_hints(type(options)), "--")


def wrong_values(
    given: Mapping[str, Any], kinds: Mapping[str, Any] = MappingProxyType({}), dashes: str = ""
) -> Iterator[str]:
    """Yield a message for each value that is not what its annotation says, or is out of range."""
    for name, value in given.items():
        must = _RANGE_OF.get(name)
        if not _is_a(value, kinds.get(name, Any)):
            found = f"{' '.join(str(value).split())[:60]} ({type(value).__name__})"
            remedy = REFUSED["remedies"].get(name, "")
            yield f"{dashes}{name} must be {_in_words(kinds[name])}, got {found}{remedy}"
        elif must and value is not None and not all(map(_RANGES[must], listed(value))):
            yield f"--{name} must {must}, got {value}"


def _is_a(value: object, kind: Any) -> bool:
    origin, of = get_origin(kind), get_args(kind)
    if kind is Any:
        return True
    if origin in (Union, UnionType):
        return any(_is_a(value, one) for one in of)
    if origin is Literal:
        return isinstance(value, Hashable) and value in of
    if isinstance(value, bool):
        return kind in (bool, object)
    # Those of NumPy are numbers too.
    known = {int: Integral, float: Real}.get(kind, origin or kind)
    if not isinstance(value, known) or origin not in (list, Sequence):
        return isinstance(value, known)
    return not isinstance(value, str) and all(_is_a(one, of[0]) for one in cast(Any, value))


def _in_words(kind: Any) -> str:
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(map(_in_words, get_args(kind)))
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    return re.sub(r"\w+\.|Type$", "", inspect.formatannotation(kind))


def checked(call: _T) -> _T:
    """Check the arguments of a function, or those that make a class, as options are checked."""
    target: Any = call
    if isinstance(call, type):
        target.__init__ = checked(target.__init__)
        return call
    signature = inspect.signature(target)

    @wraps(target)
    def work(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        raise_first(wrong_values(given, get_type_hints(target)))
        return target(*args, **kwargs)

    return cast(_T, work)
