"""A process that grades answers and may be killed: `python -m vocagnolm.evaluation.grading.worker`.

Its standard input is a connection. Each request, `[kind, output, gold]` or `[null, prediction,
gold]`, gets three replies with fields of `Verdict`: the prediction, the harness's verdict, and
math-verify's opinion. A limit of processor time ends the process. Replies that it has sent still
count.
"""

import json
import resource
import signal
from multiprocessing.connection import Connection
from types import CodeType

from sympy.parsing import sympy_parser
from sympy.parsing.latex import parse_latex

from vocagnolm.evaluation.extraction import AnswerKind, extract
from vocagnolm.evaluation.grading import symbolic

# These limit processor time, so verdicts do not depend on how busy the machine is.
HARNESS_LIMIT_S = 3.0
OPINION_LIMIT_S = 1.0
# This limits the address space. The reference cases need 160 MB.
MEMORY_LIMIT_BYTES = 2**30
# sympy's parser puts these names around the numbers and symbols of a text.
_EVALUATED = frozenset({"Integer", "Float", "Rational", "Symbol", "Add", "Mul", "Pow"})


def _judge(kind: AnswerKind | None, prediction: str | None, gold: str) -> tuple[bool, str]:
    if kind in ("letter", "boxed_letter", "marked"):
        return prediction == gold, "string" if kind == "marked" else "choice"
    if kind == "integer":
        # A number must equal the reference. The harness would accept 500 for 5.
        number = symbolic.parse_number(str(prediction))
        if number is not None:
            return number == int(gold), "numeric"
    verdict = symbolic.decide(prediction, gold)
    if verdict:
        return verdict
    return symbolic.algebraically_equal(str(prediction), gold), "symbolic"


def _opinion(kind: AnswerKind | None, output: str, gold: str) -> bool | None:
    # Math-verify reads the whole output. It is not asked about letters.
    if kind not in ("free", "integer"):
        return None
    try:
        return symbolic.verify(output, gold)
    except Exception:  # noqa: BLE001 - a failure of the library is not a right answer
        return False


def restrict_sympy() -> None:
    """Restrict sympy, which evaluates the strings that it gets, to numbers and symbols."""
    # Texts are read before sympy gets them (`read_answer`), but it makes its own strings, for
    # example from numbers. `eval_expr` is the only function that evaluates them.
    evaluate = sympy_parser.eval_expr

    def evaluate_numbers(code: str | CodeType, local: object, names: object) -> object:
        if not (isinstance(code, str) and code.strip().isidentifier()):
            compiled = compile(code, "<string>", "eval") if isinstance(code, str) else code
            # The body of a lambda or comprehension is a code object among the constants, with its
            # own names.
            functions = any(isinstance(constant, CodeType) for constant in compiled.co_consts)
            if functions or not _EVALUATED.issuperset(compiled.co_names):
                raise ValueError("expected numbers and symbols, found code")
        return evaluate(code, local, names)

    sympy_parser.eval_expr = evaluate_numbers


def main() -> None:
    """Answer requests until the other end is closed."""
    connection = Connection(0)

    def reply(**fields: object) -> None:
        connection.send_bytes(json.dumps(fields).encode())

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    # Grading writes no files: no text can make it fill the disk, and a crash leaves no dump.
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    restrict_sympy()
    # Grammars are built when they are first used, and no output should pay for that. With another
    # antlr4 than sympy's this fails here. Later, the failure would silently change verdicts.
    parse_latex("x+1")
    symbolic.algebraically_equal("x+1", "1+x")
    symbolic.verify("$x+1$", "1+x")
    # The other end waits for this reply, which tells it that the worker has started.
    reply(ready=True)
    while True:
        try:
            kind, text, gold = json.loads(connection.recv_bytes())
        except EOFError:
            return
        # The signal of this timer kills the process even inside C code.
        signal.setitimer(signal.ITIMER_PROF, HARNESS_LIMIT_S)
        prediction = text if kind is None else extract(kind, text)
        reply(prediction=prediction)
        correct, decided_by = _judge(kind, prediction, gold)
        reply(correct=correct, decided_by=decided_by)
        signal.setitimer(signal.ITIMER_PROF, OPINION_LIMIT_S)
        second = _opinion(kind, text, gold)
        # Stop the timer before the last reply, because the next request may follow at once.
        signal.setitimer(signal.ITIMER_PROF, 0)
        reply(math_verify=second)


if __name__ == "__main__":
    main()
