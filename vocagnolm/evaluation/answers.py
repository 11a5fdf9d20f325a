"""The answer of an output, and the equality of two, by the rules of the published numbers."""

import atexit
import os
from functools import cache

from vocagnolm.evaluation.extraction import extract
from vocagnolm.evaluation.grading.equality import decide
from vocagnolm.evaluation.grading.grading import Grader
from vocagnolm.evaluation.tasks.benchmarks import BENCHMARKS


def extract_answer(benchmark: str, output: str) -> str | None:
    """Find the normalised answer of an output; None where there is no output.

    >>> extract_answer("gsm8k", "5 + 3 = 8 eggs. The answer is 8."), extract_answer("gsm8k", "")
    ('8', None)
    """
    if benchmark not in BENCHMARKS:
        raise ValueError(f"expected a benchmark of {', '.join(BENCHMARKS)}, found {benchmark!r}")
    return extract(BENCHMARKS[benchmark].answer_kind, output)


def answers_equal(prediction: str | None, gold: str) -> bool:
    """Compare two normalised answers, whatever they hold, within seconds.

    Sympy compares what differs as string and number, in a process that is killed after three
    seconds; the answer is then False.

    >>> answers_equal("3.50", "3.5"), answers_equal("7", "8")
    (True, False)
    """
    if verdict := decide(prediction, gold):
        return verdict[0]
    return next(_grader_of(os.getpid()).grade(None, [(str(prediction), gold)])).correct


@cache
def _grader_of(process: int) -> Grader:
    # A forked process has none of the threads of its parent's.
    grader = Grader(workers=1).__enter__()
    atexit.register(grader.__exit__)
    return grader
