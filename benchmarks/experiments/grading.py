"""Speed of the graders, and the inputs of the claims about them: hostile outputs, stored cases.

    python -m benchmarks.experiments.grading --data_dir ../shared/data/benchmarks

Outputs per second on worked solutions of GSM8K and MATH as a model spoils them: numbers changed,
the end repeated, one in ten with a formula to compare. `python -m benchmarks harness_parity
hostile_outputs` grades the reference's cases, and outputs made of LaTeX, code, digits, Unicode and
nesting.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import random
import re
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import psutil  # type: ignore[import-untyped]  # accelerate needs it too

from vocagnolm.evaluation.extraction import AnswerKind
from vocagnolm.evaluation.grading.grading import Grader, Verdict
from vocagnolm.evaluation.tasks.benchmarks import BENCHMARKS

REFERENCE_IDS = {"minerva_math": "math", "sat_math": "sat"}
Pair = tuple[str, str]


class Graded(NamedTuple):
    """A hostile output with its verdict, and the processor time that it took a worker."""

    kind: AnswerKind
    output: str
    gold: str
    verdict: Verdict
    seconds: float


_OPENINGS = (
    *("(", "[", "{", "|", r"\frac{", r"\sqrt{", r"\sqrt[3]{", r"\text{", r"\mbox{", r"\left("),
    *("^{", "_{", r"\begin{pmatrix}", r"\begin{array}{", r"\begin{bmatrix}", r"\boxed{", "-", "~"),
    *(r"\sum_{n=1}^{10^9}", r"\prod_{k=1}^{99999}", r"\lim_{x\to0}", r"\log_{", r"\binom{10^6}{"),
    *(r"\int_0^1 ", "sqrt(", "exp(", "abs(", "print(", "eval(", "lambda x:", "not ", "$"),
)
_CLOSINGS = (")", "]", "}", "|", r"\right)", r"\end{pmatrix}", r"\end{array}", "!", "$", "}}", "'")
_PIECES = (
    *("0", "1", "9", "12", "3.50", ".5", "1,000", "1e999", "nan", "inf", "0x1F", "1_000", "٣", "½"),
    *("x", "y", "n", "E", "I", "S", "N", "pi", r"\pi", r"\infty", "oo", "e", "i", "j", "__x__"),
    *("+", "-", "*", "/", "**", "^", "%", "//", "!", "=", "<", r"\le", r"\cdot", "&", r"\\", "\\"),
    *(",", ".", ":", ";", "~", " ", "\n", "\t", "%", r"\%", r"\$", r"\!", r"\in", "'", '"', '"""'),
    *("**9**9", "^{9^{9^9}}", "10^{10^{10}}", "99999!", "(9**9**9,1)", "{9**9**9}", "x=", "k="),
    *("__import__('os').system('touch CANARY')", "__import__('os').mkdir('CANARY')", "exit()"),
    *("(\"__import__('os').mkdir('CANARY')\",1)", "[\"open('CANARY','w')\"]", "f'{open(0)}'"),
    *("log(2,\"__import__('os').mkdir('CANARY')\")", "().__class__.__bases__[0]", "a.b()", "x(1)"),
    *("[i for i in range(10**9)]", "(lambda f:f(f))(lambda f:f(f))", "x if x else y", "x:=1"),
    *("\x00", "\ud800", "\udfff", "\x1b[31m", "\u202e", "\u200b", "\ufeff", "\u2028", "é", "数"),
    *("inches", " degrees ", " and ", " ft ", "dollars", "thousand", "twenty-five", "point", "a"),
    *(r"\frac12", r"\sqrt3", r"\text{ m}", r"^\circ", r"^{\circ}", r"\emptyset", r"\mathbf", "1&2"),
    *(r"\sum_{n=1}^{\infty}\frac{1}{n^2}", r"\int e^{-x^2}dx", r"\frac{d}{dx}", r"\sin", "|x|"),
    *("The answer is ", "the final answer is $", "$. I hope it is correct.", "boxed", "####"),
)
_FRAMES = (
    *("{}", "The answer is {}", "So the answer is {}.", r"Thus $\boxed{{{}}}$", "boxed {}$"),
    *("Final Answer: The final answer is ${}$. I hope it is correct.", "final answer is {}/"),
    *("#### {}", "The answer is (B). {}", "answer is ({}", "the choice is {}"),
)


def hostile_text(rng: random.Random) -> str:
    """Fragments in a row, nested, or many times over; 0 to 20,000 characters."""
    shape = rng.random()
    if shape < 0.7:
        return "".join(rng.choice(_PIECES) for _ in range(rng.randint(0, 12)))
    if shape < 0.92:
        every = (*_OPENINGS, *_PIECES, *_CLOSINGS)
        return "".join(rng.choice(every) for _ in range(rng.randint(1, 40)))
    depth = int(10 ** rng.uniform(0, 3))
    inner, repeat = rng.choice(_PIECES), rng.choice((_OPENINGS, _PIECES))
    closing_piece = rng.choice(("", rng.choice(_CLOSINGS)))
    return (rng.choice(repeat) * depth + inner + closing_piece * depth)[:20_000]


def hostile_pairs(count: int, seed: int) -> Iterator[tuple[AnswerKind, Pair]]:
    """Outputs and golds; one gold in five is hostile too."""
    rng = random.Random(seed)
    golds = ("7", "0.5", r"\frac{1}{2}", "x+1", "(1,2)", r"\begin{pmatrix}1\\2\end{pmatrix}", "B")
    kinds: tuple[AnswerKind, ...] = ("free", "free", "free", "free", "letter", "marked")
    for _ in range(count):
        output = rng.choice(_FRAMES).format(hostile_text(rng))
        gold = hostile_text(rng)[:500] if rng.random() < 0.2 else rng.choice(golds)
        yield rng.choice(kinds), (output, gold)


def realistic_pairs(data_dir: Path, count: int, seed: int) -> list[Pair]:
    """Worked solutions as a weak model writes them, with golds; one in ten needs algebra."""
    rng = random.Random(seed)
    words, formulas = [], []
    for line in (data_dir / "gsm8k/test.jsonl").read_text(encoding="utf-8").splitlines():
        solution, gold = json.loads(line)["answer"].split("\n#### ")
        words.append((re.sub("<<.*?>>", "", solution), gold.replace(",", "")))
    for line in (data_dir / "math_oai/test.jsonl").read_text(encoding="utf-8").splitlines():
        item = json.loads(line)
        formulas.append((item["solution"], item["answer"]))
    pairs = []
    for _ in range(count):
        if rng.random() < 0.1:
            solution, gold = rng.choice(formulas)
            other = rng.choice(formulas)[1]
            pairs.append((f"{solution}\nThe answer is {other}. $\\boxed{{{other}}}$", gold))
            continue
        solution, gold = rng.choice(words)
        if rng.random() < 0.5:
            solution = re.sub(r"\d+", lambda _: str(rng.randint(1, 500)), solution)
        answer = gold if rng.random() < 0.3 else str(rng.randint(1, 5000))
        ending = f"\nThe answer is {answer}."
        pairs.append((solution + ending * (60 if rng.random() < 0.1 else 1), gold))
    return pairs


def read_cases(path: Path) -> list[dict[str, Any]]:
    """The reference's cases, their benchmarks under our names."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        cases = [json.loads(line) for line in lines]
    for case in cases:
        case["benchmark"] = REFERENCE_IDS.get(case["benchmark"], case["benchmark"])
    return cases


def grade_cases(grader: Grader, cases: list[dict[str, Any]]) -> Iterator[tuple[Any, Verdict]]:
    """Every case with its verdict, those of one kind of answer together."""
    for kind in ("free", "letter"):
        chosen = [case for case in cases if BENCHMARKS[case["benchmark"]].answer_kind == kind]
        answers = [(case["raw_output"], case["gold"]) for case in chosen]
        yield from zip(chosen, grader.grade(kind, answers), strict=True)


class Fuzzed(NamedTuple):
    """Hostile outputs that were graded, and the largest resident memory of a worker, in bytes."""

    graded: list[Graded]
    memory: int


def fuzz(count: int, seed: int, shards: int) -> Fuzzed:
    """Grade hostile outputs one by one, with a worker for each of some processes."""
    with ProcessPoolExecutor(shards, multiprocessing.get_context("spawn")) as pool:
        parts = list(pool.map(partial(_fuzz_shard, count, seed, shards), range(shards)))
    return Fuzzed([one for part in parts for one in part.graded], max(x.memory for x in parts))


def _fuzz_shard(count: int, seed: int, shards: int, shard: int) -> Fuzzed:
    graded = []
    with Grader(1) as grader:
        for kind, pair in islice(hostile_pairs(count, seed), shard, None, shards):
            # A worker that is new has started when it has graded this.
            next(grader.grade("free", [("The answer is $x+1$.", "1+x")]))
            (worker,) = psutil.Process().children()
            before, ended_before = _processor_time(worker), _processor_time()
            verdict = next(grader.grade(kind, [pair]))
            if worker.is_running():
                seconds = _processor_time(worker) - before
            else:
                seconds = _processor_time() - ended_before - before
            graded.append(Graded(kind, *pair, verdict, seconds))
    # In KiB; every worker has ended by now.
    return Fuzzed(graded, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)


def _processor_time(worker: psutil.Process | None = None) -> float:
    """Seconds of a worker, or of all that have ended."""
    if worker:
        times = worker.cpu_times()
        return float(times.user + times.system)
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended.ru_utime + ended.ru_stime


def report_speed(data_dir: Path, count: int, seed: int, workers: int | None) -> str:
    """Outputs per second, and what decided them."""
    pairs = realistic_pairs(data_dir, count, seed)
    start = time.monotonic()
    with Grader(workers) as grader:
        decided = Counter(verdict.decided_by for verdict in grader.grade("free", pairs))
    seconds = time.monotonic() - start
    return f"{count} outputs, {seconds:.0f} s, {count / seconds:.0f} per second, {dict(decided)}\n"


def main() -> None:
    """Measure the speed and print it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data_dir", type=Path, required=True, help="in the harness's layout")
    parser.add_argument("--outputs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, help="default: one per core, at most 8")
    args = parser.parse_args()
    sys.stdout.write(report_speed(args.data_dir, args.outputs, args.seed, args.workers))


if __name__ == "__main__":
    main()
