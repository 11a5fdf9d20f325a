"""Workers given any text: a verdict in seconds, nothing executed, the next verdict right."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sympy
from inline_grader import graded_inline

from vocagnolm.evaluation.extraction import AnswerKind
from vocagnolm.evaluation.grading import grading, worker
from vocagnolm.evaluation.grading.grading import Grader, Verdict

pytestmark = pytest.mark.processes

BUSY_LIMIT_S = 30.0  # five seconds on an idle machine; workers limit processor time
MB = 1_000_000
MKDIR = "__import__('os').mkdir('CANARY')"

Job = tuple[AnswerKind | None, tuple[str, str]]

EXECUTABLE = [
    MKDIR,
    f'"{MKDIR}"',
    f'("{MKDIR}",1)',
    f'["{MKDIR}"]',
    f'{{"{MKDIR}"}}',
    f'log(2,"{MKDIR}")',
    f'sqrt("{MKDIR}")',
    f"x+{MKDIR}",
    f"x={MKDIR}",
    f"f'{{{MKDIR}}}'",
    f"(lambda:{MKDIR})()",
    f"[{MKDIR} for i in (1,)]",
    f"({MKDIR},1)",
    f"1 if {MKDIR} else 2",
    rf"\begin{{pmatrix}}{MKDIR}\end{{pmatrix}}",
    rf"\text{{{MKDIR}}}~1",
    "().__class__.__bases__[0].__subclasses__()",
    "open('CANARY','w')",
    "print('[true, \"string\"]')",
    "exit()",
    "sympy.Symbol('x').__class__",
    "'%s'%1",
    "'a'*10**10",
]
ENDLESS = [
    "9**9**9**9",
    "{9**9**9**9}",
    "(9**9**9**9,1)",
    "9^{9^{9^{9^9}}}",
    "10^9!",
    r"\binom{10^{9}}{10^{8}}",
    r"\sum_{n=1}^{10^{9}} n^n",
    r"\int_0^1 e^{-x^2}\sin(x^{x^x}) dx",
    r"\prod_{k=1}^{10^9} k",
]
LONG = [
    "{" * 10_000 + "1" + "}" * 10_000,
    "(" * 10_000 + "1" + ")" * 10_000,
    "9" * MB,
    "-" * 100_000 + "1",
    "1+" * 100_000 + "1",
    r"\frac{" * 5000,
    r"\sqrt{" * 5000 + "x" + "}" * 5000,
    r"\begin{pmatrix}" + r"\\".join(["&".join("1" * 500)] * 500) + r"\end{pmatrix}",
    r"\text{" * (MB // 6),
    r"\mbox{" * (MB // 6),
    r"\begin{array}{" * (MB // 14),
    "inches feet a s h m sq . m q . " * (MB // 31),
    "1," * (MB // 2),
    "The answer is boxed{" * (MB // 20),
]
STRANGE = [
    "\x00",
    "7\x00",
    "\ud800",
    "7\udfff",
    "\x1b[31m7",
    "\u202e7",
    "\u2028",
    '\\"]\n[true, "string"]',
    "\r\n",
]


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with Grader(workers=2) as grader:
        yield grader


@pytest.fixture
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty directory that must stay empty; the workers' directory must get no canary."""
    monkeypatch.chdir(tmp_path)
    yield
    assert list(tmp_path.iterdir()) == []
    assert list(grading._ROOT.glob("CANARY*")) == []


def timed(grader: Grader, kind: AnswerKind | None, pair: tuple[str, str]) -> tuple[Verdict, float]:
    start = time.monotonic()
    verdict = next(grader.grade(kind, [pair]))
    return verdict, time.monotonic() - start


def timed_all(grader: Grader, jobs: Sequence[Job]) -> list[tuple[Verdict, float]]:
    """Grade all jobs, as many at a time as there are workers."""
    with ThreadPoolExecutor(grader.workers) as threads:
        return list(threads.map(lambda job: timed(grader, *job), jobs))


def assert_alive(grader: Grader) -> None:
    answers = [("The answer is $x+1$.", "1+x"), ("The answer is 8.", "9")] * grader.workers
    verdicts = list(grader.grade("free", answers))
    assert [verdict.correct for verdict in verdicts] == [True, False] * grader.workers
    assert {verdict.decided_by for verdict in verdicts} == {"symbolic", "numeric"}


def processes_with_parent(parent: int) -> list[int]:
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text(encoding="ascii")
    return list(map(int, children.split()))


# Hostile texts


@pytest.mark.usefixtures("canary")
def test_grader_executes_nothing_when_the_answer_is_code() -> None:
    # Processes of other tests.
    others = processes_with_parent(os.getpid())
    with Grader(workers=2) as grader:
        for kind in (None, "free"):
            frame = "{}" if kind is None else "The final answer is ${}$. I hope"
            texts = [frame.replace("{}", text, 1) for text in EXECUTABLE]
            pairs = [*((text, "7") for text in texts), *(("x+7", text) for text in EXECUTABLE)]
            assert not any(verdict.correct for verdict in grader.grade(kind, pairs))
        workers = set(processes_with_parent(os.getpid())) - {*others}
        assert workers
        assert not any(map(processes_with_parent, workers))
        assert_alive(grader)


@pytest.mark.usefixtures("canary")
@pytest.mark.parametrize("code", [MKDIR, "x.name", "(lambda: 1)()", "sin(1)", "eval(1)"])
@pytest.mark.parametrize("evaluate", [True, False])
def test_restricted_sympy_rejects_code(code: str, evaluate: bool) -> None:
    with graded_inline():
        assert sympy.Number("7") == 7
        assert sympy.sympify("x").is_Symbol
        with pytest.raises((ValueError, AttributeError)):
            sympy.sympify(code, evaluate=evaluate)


@pytest.mark.slow
def test_grader_gives_verdicts_in_time(grader: Grader) -> None:
    texts = [*ENDLESS[:4], *LONG[:4], LONG[5], LONG[6], *LONG[10:]]
    assert_alive(grader)
    for verdict, seconds in timed_all(
        grader, [("free", (f"The answer is {t}", "7")) for t in texts]
    ):
        assert not verdict.correct
        assert seconds < BUSY_LIMIT_S
    assert_alive(grader)


def test_grader_survives_hostile_golds_in_time(grader: Grader) -> None:
    golds = [ENDLESS[0], *LONG[:2], LONG[3], LONG[5], LONG[6], LONG[12], *STRANGE]
    for verdict, seconds in timed_all(grader, [(None, ("x+1", gold)) for gold in golds]):
        assert not verdict.correct
        assert seconds < BUSY_LIMIT_S
    assert_alive(grader)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["free", "letter", "marked"])
def test_grader_gives_verdicts(grader: Grader, kind: AnswerKind) -> None:
    frames = ["boxed{", "he answer is ", "final answer is $", "$. I hope", "#### ", "answer is ("]
    pairs = [(frame * (MB // len(frame)), "7") for frame in frames]
    pairs += [(frame + text, "7") for frame in frames for text in STRANGE]
    for verdict, seconds in timed_all(grader, [(kind, pair) for pair in pairs]):
        assert verdict.decided_by != "crash"
        assert seconds < BUSY_LIMIT_S
    assert_alive(grader)


# Limits


@pytest.mark.slow
def test_grader_says_timeout_when_algebra_takes_forever(grader: Grader) -> None:
    assert_alive(grader)
    verdict, seconds = timed(grader, None, ("(9**9**9**9,1)", "x"))
    assert (verdict.correct, verdict.decided_by) == (False, "timeout")
    assert worker.HARNESS_LIMIT_S - 0.5 < seconds < BUSY_LIMIT_S


def test_grader_keeps_the_verdict(grader: Grader) -> None:
    """The harness takes the first of two answers, math-verify the last."""
    output = "final answer is $7$. I hope. The final answer is $9^{9^{9^9}}$. I hope."
    verdict, _ = timed(grader, "free", (output, "7"))
    assert verdict == Verdict("7", correct=True, decided_by="string", math_verify=None)
    assert_alive(grader)


def test_worker_runs_out_of_memory_alone(grader: Grader) -> None:
    """A list of 16 GB is rejected where the limit is 1 GB, and the answer cannot be read."""
    verdict, seconds = timed(grader, None, ("[1,2]*10**9", "x"))
    assert (verdict.correct, verdict.decided_by) == (False, "symbolic")
    assert seconds < worker.HARNESS_LIMIT_S
    assert_alive(grader)


# The life of workers


def test_grader_grades_right() -> None:
    with Grader(workers=1) as grader:
        assert_alive(grader)
        (process,) = processes_with_parent(os.getpid())[-1:]
        # Ctrl-C of the terminal does not reach it, and what a library prints is lost.
        assert os.getsid(process) == process
        for stream in (1, 2):
            assert Path(f"/proc/{process}/fd/{stream}").readlink() == Path(os.devnull)
        os.kill(process, signal.SIGKILL)
        time.sleep(0.2)
        assert_alive(grader)


def test_worker_that_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not a verdict on an output."""
    monkeypatch.setattr(sys, "executable", "false")
    with Grader(workers=1) as grader, pytest.raises(ValueError, match="worker does not start: run"):
        next(grader.grade("free", [("8", "8")]))


def test_grader_says_crash() -> None:
    with Grader(workers=1) as grader, ThreadPoolExecutor(1) as threads:
        assert_alive(grader)
        (process,) = processes_with_parent(os.getpid())[-1:]
        running = threads.submit(timed, grader, None, ("(9**9**9**9,1)", "x"))
        time.sleep(1)
        os.kill(process, signal.SIGKILL)
        verdict, _ = running.result()
        assert (verdict.correct, verdict.decided_by) == (False, "crash")
        assert_alive(grader)


def test_grader_says_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    with Grader(workers=1) as grader:
        assert_alive(grader)
        (process,) = processes_with_parent(os.getpid())[-1:]
        os.kill(process, signal.SIGSTOP)
        with monkeypatch.context() as patch:
            patch.setattr(grading, "WALL_LIMIT_S", 1.0)
            verdict, seconds = timed(grader, None, ("x", "y"))
        assert (verdict.correct, verdict.decided_by) == (False, "timeout")
        assert seconds < BUSY_LIMIT_S
        assert_alive(grader)


def test_grader_leaves_no_process() -> None:
    before = processes_with_parent(os.getpid())

    def interrupted() -> None:
        with Grader(workers=2) as grader:
            next(grader.grade("free", [("The answer is 7.", "7")] * 100))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert processes_with_parent(os.getpid()) == before


def test_workers_end_when_their_parent_is_killed() -> None:
    program = (
        "import sys\n"
        "from vocagnolm.evaluation.grading.grading import Grader\n"
        "grader = Grader(workers=2).__enter__()\n"
        "list(grader.grade('free', [('The answer is 7.', '7')] * 4))\n"
        "verdicts = grader.grade(None, [('(9**9**9**9,1)', 'x')])\n"
        "print('ready', flush=True)\n"
        "next(verdicts)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        workers = processes_with_parent(parent.pid)
        assert len(workers) == 2
        parent.kill()
    deadline = time.monotonic() + 10
    while any(running(process) for process in workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(running(process) for process in workers)


def running(process: int) -> bool:
    try:
        status = Path(f"/proc/{process}/stat").read_text(encoding="ascii")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
