"""Workers given any text: a verdict in seconds, nothing executed, the next verdict right."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sympy
from inline_grader import graded_inline

from vocagnolm.evaluation.grading import grading, worker
from vocagnolm.evaluation.grading.grading import Grader, Verdict

pytestmark = pytest.mark.processes

BUSY_LIMIT_S = 30.0  # five seconds on an idle machine; workers limit processor time
MB = 1_000_000
MKDIR = "__import__('os').mkdir('CANARY')"

# Separated by two spaces or a new line; "!" makes a directory.
EXECUTABLE = r"""
!  "!"  ("!",1)  ["!"]  {"!"}  log(2,"!")  sqrt("!")  x+!  x=!  f'{!}'  (lambda:!)()  (!,1)
[! for i in (1,)]  1 if ! else 2  \begin{pmatrix}!\end{pmatrix}  \text{!}~1
().__class__.__bases__[0].__subclasses__()  open('CANARY','w')  print('[true, "string"]')
exit()  sympy.Symbol('x').__class__  '%s'%1  'a'*10**10
"""
ENDLESS = ["9**9**9**9", "{9**9**9**9}", "(9**9**9**9,1)", "9^{9^{9^{9^9}}}"]
LONG = [
    "{" * 10_000 + "1" + "}" * 10_000,
    "(" * 10_000 + "1" + ")" * 10_000,
    "-" * 100_000 + "1",
    r"\frac{" * 5000,
    r"\sqrt{" * 5000 + "x" + "}" * 5000,
    "1," * (MB // 2),
]
LONGEST = [
    "9" * MB,
    r"\begin{array}{" * (MB // 14),
    "inches feet a s h m sq . m q . " * (MB // 31),
    "The answer is boxed{" * (MB // 20),
]
STRANGE = ["\x00", "7\x00", "\ud800", "7\udfff", "\x1b[31m7", "\u202e7", "\u2028", "\r\n"]
STRANGE += ['\\"]\n[true, "string"]']
FRAMES = ["boxed{", "he answer is ", "final answer is $", "$. I hope", "#### ", "answer is ("]
FRAMED = [frame * (MB // len(frame)) for frame in FRAMES]
FRAMED += [frame + text for frame in FRAMES for text in STRANGE]


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


def timed(grader: Grader, kind: Any, pair: tuple[str, str]) -> tuple[Verdict, float]:
    start = time.monotonic()
    verdict = next(grader.grade(kind, [pair]))
    return verdict, time.monotonic() - start


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
    codes = re.split(r"  |\n", EXECUTABLE.strip().replace("!", MKDIR))
    # Processes of other tests.
    others = processes_with_parent(os.getpid())
    with Grader(workers=2) as grader:
        for kind in (None, "free"):
            frame = "{}" if kind is None else "The final answer is ${}$. I hope"
            pairs = [(frame.replace("{}", code, 1), "7") for code in codes]
            pairs += [("x+7", code) for code in codes]
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


@pytest.mark.parametrize(
    ("kind", "pairs"),
    [
        pytest.param(None, [("x+1", gold) for gold in [*ENDLESS[:1], *LONG, *STRANGE]], id="golds"),
        pytest.param(
            "free",
            [(f"The answer is {text}", "7") for text in [*ENDLESS, *LONG, *LONGEST]],
            id="outputs",
            marks=pytest.mark.slow,
        ),
        *(
            pytest.param(kind, [(text, "7") for text in FRAMED], id=kind, marks=pytest.mark.slow)
            for kind in ("free", "letter", "marked")
        ),
    ],
)
def test_grader_gives_verdicts_in_time(
    grader: Grader, kind: Any, pairs: list[tuple[str, str]], request: pytest.FixtureRequest
) -> None:
    assert_alive(grader)
    with ThreadPoolExecutor(grader.workers) as threads:
        verdicts = list(threads.map(lambda pair: timed(grader, kind, pair), pairs))
    for verdict, seconds in verdicts:
        assert seconds < BUSY_LIMIT_S
        if request.node.callspec.id in ("golds", "outputs"):
            assert not verdict.correct
        else:
            assert verdict.decided_by != "crash"
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


@pytest.fixture
def alone() -> Iterator[tuple[Grader, int]]:
    """A grader with one worker, and the worker's process."""
    with Grader(workers=1) as grader:
        assert_alive(grader)
        yield grader, processes_with_parent(os.getpid())[-1]


def test_worker_is_separate_and_replaced_when_it_ends(alone: tuple[Grader, int]) -> None:
    grader, process = alone
    # Ctrl-C of the terminal does not reach it, and what a library prints is lost.
    assert os.getsid(process) == process
    for stream in (1, 2):
        assert Path(f"/proc/{process}/fd/{stream}").readlink() == Path(os.devnull)
    os.kill(process, signal.SIGKILL)
    time.sleep(0.2)
    assert_alive(grader)


def test_worker_that_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not a verdict on an output."""
    before = processes_with_parent(os.getpid())
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(ValueError, match="does not start"), Grader(workers=2):
        pass
    assert processes_with_parent(os.getpid()) == before


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core has one thread")
def test_worker_has_one_thread_on_any_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each further thread of NumPy reserves some of the memory that a worker may have."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with Grader(workers=1):
        process = processes_with_parent(os.getpid())[-1]
        assert "\nThreads:\t1\n" in Path(f"/proc/{process}/status").read_text()


def test_grader_says_crash(alone: tuple[Grader, int]) -> None:
    grader, process = alone
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(timed, grader, None, ("(9**9**9**9,1)", "x"))
        time.sleep(1)
        os.kill(process, signal.SIGKILL)
        verdict, _ = running.result()
    assert (verdict.correct, verdict.decided_by) == (False, "crash")
    assert_alive(grader)


def test_grader_says_timeout(alone: tuple[Grader, int], monkeypatch: pytest.MonkeyPatch) -> None:
    grader, process = alone
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
    program = """if True:
        from vocagnolm.evaluation.grading.grading import Grader
        grader = Grader(workers=2).__enter__()
        list(grader.grade("free", [("The answer is 7.", "7")] * 4))
        verdicts = grader.grade(None, [("(9**9**9**9,1)", "x")])
        print("ready", flush=True)
        next(verdicts)
    """
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        workers = processes_with_parent(parent.pid)
        assert len(workers) == 2
        parent.kill()
    deadline = time.monotonic() + 10
    while any(map(running, workers)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(running, workers))


def running(process: int) -> bool:
    try:
        status = Path(f"/proc/{process}/stat").read_text(encoding="ascii")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
