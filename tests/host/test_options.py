"""Kinds and ranges of options and arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest
import torch

from vocagnolm import Method, PackedCollator, add_token_losses
from vocagnolm.host.options import REFUSED, checked
from vocagnolm.report.audit import AuditSettings
from vocagnolm.teacher import StoredTeacher


@checked
def look(
    chunks: int = 1,
    share: float | None = None,
    names: Sequence[str] = (),
    how: Literal["a", "b"] | None = None,
    *rest: object,
    **others: Any,
) -> object:
    return chunks, share, names, how, rest, others


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"chunks": np.int64(2), "share": np.float32(0.5)},
        {"share": 1, "names": ["x"], "how": "a", "other": object()},
        {"names": ("x", "y"), "how": None},
    ],
)
def test_arguments_of_their_kinds_pass(given: dict[str, Any]) -> None:
    assert look(**given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"chunks": None}, r"^chunks must be int, got None \(NoneType\)$"),
        ({"chunks": True}, r"^chunks must be int, got True \(bool\)$"),
        ({"chunks": 0}, "^--chunks must be at least 1, got 0$"),
        ({"share": "0.5"}, r"^share must be float or None, got 0.5 \(str\)$"),
        ({"share": torch.ones(2)}, r"^share must be float or None, got tensor\(\[1., 1.\]\) \(Te"),
        ({"names": "x"}, r"^names must be Sequence\[str\], got x \(str\)$"),
        ({"names": ["x", 5]}, r"^names must be Sequence\[str\], got \['x', 5\] \(list\)$"),
        ({"how": "c"}, r"^how must be one of a, b or None, got c \(str\)$"),
        ({"how": np.ones(2)}, r"^how must be one of a, b or None, got \[1. 1.\] \(ndarray\)$"),
    ],
)
def test_arguments_of_other_kinds_are_one_line(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        look(**given)


def test_unknown_arguments_are_python_s_own_error() -> None:
    @checked
    @dataclass(frozen=True)
    class Pair:
        one: int

    assert Pair(1) == Pair(one=1) != Pair(2)
    for given in ({}, {"two": 2}):
        with pytest.raises(TypeError, match="argument"):
            Pair(**given)


@pytest.mark.parametrize(
    ("make", "given", "said"),
    [
        (Method, {"top_k": None}, r"^--top_k must be float, got None \(NoneType\)$"),
        (Method, {"method": "chunk", "chunks": 1.5}, r"^--chunks must be int, got 1.5 \(float\)$"),
        (Method, {"teacher_weights": (1, 2)}, r"^--teacher_weights must be list\[float\] or None"),
        (PackedCollator, {"max_length": "8"}, r"^max_length must be int, got 8 \(str\)$"),
        (PackedCollator, {"max_length": 8, "chunks": 0}, "^--chunks must be at least 1, got 0$"),
        (StoredTeacher, {"teachers": 0}, "^--teachers must be at least 1, got 0$"),
        (AuditSettings, {"sequence_length": 9 * 10**18}, "^--sequence_length must be from 1 to 4"),
        (AuditSettings, {"worst": -1}, "^--worst must not be negative, got -1$"),
        (add_token_losses, {"model": "x"}, "cannot be computed for str: it is no transformers.Pre"),
    ],
)
def test_library_refuses_other_kinds_and_ranges(make: Any, given: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make(**given)


def test_an_option_has_one_range() -> None:
    names = " ".join(REFUSED["ranges"].values()).split()
    assert len(names) == len({*names}) > 30
