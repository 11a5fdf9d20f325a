"""Grading in this process, for tests of its callers: nothing limits time or memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
from sympy.parsing import sympy_parser

from vocagnolm.evaluation.extraction import AnswerKind, extract
from vocagnolm.evaluation.grading import worker
from vocagnolm.evaluation.grading.grading import Verdict


class InlineGrader:
    """Gives the verdicts of a worker."""

    def grade(
        self, kind: AnswerKind | None, answers: Iterable[tuple[str, str]]
    ) -> Iterator[Verdict]:
        for text, gold in answers:
            prediction = text if kind is None else extract(kind, text)
            correct, decided_by = worker._judge(kind, prediction, gold)
            yield Verdict(prediction, correct, decided_by, worker._opinion(kind, text, gold))


@contextmanager
def graded_inline(*modules: Any) -> Iterator[InlineGrader]:
    """Let modules grade in this process, with sympy restricted as in a worker."""
    grader = InlineGrader()

    def start(
        workers: int | None = None, processes: int = 1
    ) -> AbstractContextManager[InlineGrader]:
        return nullcontext(grader)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sympy_parser, "eval_expr", sympy_parser.eval_expr)  # restored at the end
        worker.restrict_sympy()
        for module in modules:
            patch.setattr(module, "Grader", start)
        yield grader
