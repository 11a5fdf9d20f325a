"""Break modules one node at a time, and see whether their own tests notice.

    python tests/support/mutants.py [MODULE ...] [--each N] [--seed S]

In every mutant one operator, number, name or statement of a module is another one. It is killed
when a test file of its module fails or hangs; tests marked `slow` or `processes` are left out. The
status is 1 where a survivor is not judged in `JUDGED`, which names those that mean the same, where
a judgement is of no mutant that there is, or where fewer than 90 % of the others are killed.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LEAST_KILLED = 0.9
TESTS = {
    "alignment": "method/test_alignment method/test_data",
    "guidance": "method/test_guidance",
    "spans": "method/test_spans",
    "texts/token_bytes": "method/test_spans",
    "texts/layout": "method/test_alignment method/test_data method/test_turns",
    "texts/cutting": "texts/test_cutting method/test_data",
    "texts/pieces": "texts/test_pieces",
    "packing": "method/test_packing",
    "objective": "method/test_objective",
    "token_loss": "method/test_token_loss",
    "data": "method/test_data method/test_turns store/test_reader",
    "store/store": "store/test_store store/test_forged_store",
    "store/codec": "store/test_store store/test_forged_store",
    "store/recorder": "store/test_recorder",
    "training/overlap": "training/test_overlap",
}
# Survivors that no test can or should kill: what a line has, what it has instead, and why.
JUDGED: dict[str, tuple[tuple[str, str, str], ...]] = {
    "alignment": (
        ("is_part & (", "is_part | (", "the same shares, with more work"),
        ("1] > student_spans[:, 1]", "1] >= student_spans[:, 1]", "the same, with more work"),
        ("ranges[:, 0] != UNMAPPED", "ranges[:, -1] != UNMAPPED", "both are -1 there"),
        ("1] > student_spans[:, 1]", "1] > student_spans[:, 0]", "the same, with more work"),
        ("max(student_spans[-1", "min(student_spans[-1", "filled spans of one text end alike"),
        ("1]) + 1", "1]) + 2", "one position that is never read"),
    ),
    "guidance": (("values_BT.shape[-1])", "values_BT.shape[1])", "of two dimensions"),),
    "spans": (
        ("np.append(0, ends)", "np.append(1, ends)", "the first gap is the first token's"),
        ("np.append(0, ends)", "np.append(-1, ends)", "the first gap is the first token's"),
    ),
    "texts/token_bytes": (
        ("default=-1) + 1", "default=-1) + 2", "a number that no token has"),
        ("default=-1)", "default=1)", "of a vocabulary that has no token"),
        ("lengths.sum() < own", "lengths.mean() < own", "the same, with more work"),
    ),
    "texts/layout": (
        ("copy=False", "copy=True", "a copy of the same"),
        ("teachers[0].values", "teachers[-1].values", "all teachers are models, or all stores"),
        ("0 * rows", "0 // rows", "zeros too"),
        ("read, strict=True", "read, strict=False", "one of each teacher"),
        ("largest_ids, strict=True", "largest_ids, strict=False", "one for each column"),
    ),
    "texts/cutting": (
        ("len(text) + 1), np.bool_", "len(text) + 2), np.bool_", "a place behind the text"),
        ("limits, strict=True", "limits, strict=False", "one limit of each model"),
    ),
    "texts/pieces": (
        ("> AT_ONCE + SHARED", ">= AT_ONCE + SHARED", "one piece is the whole text"),
        ("found[0] if len(found) == 1 else ", "", "the same, with a copy"),
        ("len(found) == 1", "len(found) == 0", "the same, with a copy"),
        ("found[0] if", "found[-1] if", "of one"),
        ("SHARED // 4", "SHARED // 5", "other places that both pieces have"),
    ),
    "packing": (
        ("range(max_length + 1)", "range(max_length + 2)", "one list that is never used"),
        ("rooms = 0", "rooms = 1", "a room of 0, which no segment takes"),
        ("strict=True", "strict=False", "both have as many"),
        ("rows.max(0, initial=0)", "rows.max(0, initial=-1)", "a width where there is no block"),
    ),
    "objective": (
        ("seed: int = 0", "seed: int = 1", "runs give their own"),
        ("seed: int = 0", "seed: int = -1", "runs give their own"),
        ("len(teacher or [0])", "len(teacher or [-1])", "one, if the method needs none"),
        ("ranges_BS2[..., 0] != UN", "ranges_BS2[..., -1] != UN", "both are -1 there"),
    ),
    "token_loss": (
        ("device.type != home", "device.type == home", "moves on a machine with a GPU only"),
        ("if moves:", "if not moves:", "moves on a machine with a GPU only"),
        ("model.to(home)", "pass", "moves on a machine with a GPU only"),
        *(("(2, 8)", shape, "any few tokens will do") for shape in ("(2, 7)", "(3, 8)")),
        ("nonzero()[:, 0]", "nonzero()[:, -1]", "of one dimension"),
        ("gives_token_losses=True", "gives_token_losses=False", "looked for, and not read"),
        ("use_cache=False", "use_cache=True", "the same logits, and a cache that nobody reads"),
        (" if is_exact(model, logits.dtype, weight_VD.dtype) else 0.02", "", "a CPU's bfloat16"),
    ),
    "data": (
        ("counts <= np", "counts < np", "cut into one part, with more work"),
        ("numbers), 6)", "numbers), 7)", "both are finer than any share"),
        ("strict=True", "strict=False", "columns of one table"),
    ),
    "store/store": (("=1024)", "=1025)", "any size will do"),),
    "store/codec": (
        ("axis=-1)", "axis=1)", "of two dimensions"),
        ("min(initial=0)", "min(initial=1)", "compared with 0"),
    ),
    "store/recorder": (
        *(("2 ** 25", n, "any size will do") for n in ("1 ** 25", "2 ** 24", "2 ** 26", "3 ** 25")),
        *(("10000", many, "more than a job has") for many in ("10001", "9999")),
        ("strict=True", "strict=False", "a loss for each block"),
    ),
    "training/overlap": (
        ("self._following.clear()", "pass", "one batch of an epoch that was left stays in memory"),
    ),
}

PAIRS = (
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot)),
    *((ast.In, ast.NotIn), (ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv), (ast.And, ast.Or)),
    *((ast.BitAnd, ast.BitOr), ("min", "max"), ("any", "all"), ("minimum", "maximum")),
    *(("amin", "amax"), ("ceil", "floor"), ("argmax", "argmin"), ("left", "right")),
    *(("mean", "sum"), ("cumsum", "cumprod"), ("append", "extend"), ("startswith", "endswith")),
)
OTHER = {a: b for pair in PAIRS for a, b in (pair, pair[::-1])}
OTHER |= {ast.Div: ast.Mult, ast.Mod: ast.FloorDiv}
NO_PLACES = ("annotation", "returns", "decorator_list", "exc", "msg", "bases")
MESSAGES = ("info", "debug", "warning", "warning_once")


@dataclass(frozen=True)
class Mutant:
    """The source of a module with one node replaced."""

    line: int
    before: str
    after: str
    source: str


def replacements(node: ast.AST) -> Iterator[ast.AST]:
    """Wrong versions of a node."""
    for name, value in [*_other_values(node), *_other_flow(node)]:
        new = copy.copy(node)
        setattr(new, name, value)
        yield new
    if isinstance(node, ast.UnaryOp):
        yield node.operand
    elif isinstance(node, ast.IfExp):
        yield from (node.body, node.orelse)
    elif isinstance(node, ast.Continue):
        yield ast.Break()
    elif isinstance(node, ast.AugAssign | ast.Raise) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ):
        yield ast.Pass()


def _other_values(node: ast.AST) -> Iterator[tuple[str, object]]:
    """Fields that give another operator, number or name."""
    match node:
        case ast.Compare() if type(node.ops[0]) in OTHER:
            yield "ops", [OTHER[type(node.ops[0])](), *node.ops[1:]]
        case ast.BinOp() | ast.BoolOp() | ast.AugAssign() if type(node.op) in OTHER:
            yield "op", OTHER[type(node.op)]()
        case ast.Constant(value=bool()):
            yield "value", not node.value
        case ast.Constant(value=int()):
            yield from (("value", node.value + step) for step in (1, -1))
        case ast.Constant() if node.value in OTHER:
            yield "value", OTHER[node.value]
        case ast.Name() if node.id in OTHER:
            yield "id", OTHER[node.id]
        case ast.Attribute() if node.attr in OTHER:
            yield "attr", OTHER[node.attr]


def _other_flow(node: ast.AST) -> Iterator[tuple[str, object]]:
    """Fields that lead elsewhere."""
    if isinstance(node, ast.If | ast.While):
        yield "test", ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.comprehension) and node.ifs:
        yield "ifs", []
    elif isinstance(node, ast.Return) and getattr(node.value, "value", node.value) is not None:
        yield "value", None


def _put(parent: ast.AST, name: str, index: int | None, node: ast.AST) -> None:
    if index is None:
        setattr(parent, name, node)
    else:
        getattr(parent, name)[index] = node


def places(parent: ast.AST) -> Iterator[tuple[ast.AST, Callable[[ast.AST], None]]]:
    """Every node that may be replaced, and how: no type, no import, no message."""
    for name, value in ast.iter_fields(parent):
        for index, node in enumerate(value if isinstance(value, list) else [value]):
            if (
                name in NO_PLACES
                or not isinstance(node, ast.AST)
                or isinstance(node, ast.Import | ast.ImportFrom | ast.JoinedStr)
                or (isinstance(node, ast.Call) and getattr(node.func, "attr", "") in MESSAGES)
                or (isinstance(node, ast.Subscript) and getattr(node.value, "id", "") == "Literal")
            ):
                continue
            yield node, partial(_put, parent, name, index if isinstance(value, list) else None)
            yield from places(node)


def mutants_of(text: str) -> list[Mutant]:
    """All mutants of a module, from its source."""
    tree = ast.parse(text)
    whole, found, line = ast.unparse(tree), [], 0
    for node, put in places(tree):
        line = getattr(node, "lineno", line)
        for new in replacements(node):
            put(new)
            source = ast.unparse(tree)
            put(node)
            if source != whole:
                lines = zip(whole.split("\n"), source.split("\n"), strict=False)
                before, after = next((a.strip(), b.strip()) for a, b in lines if a != b)
                found.append(Mutant(line, before, after, source))
    return found


def choose(found: list[Mutant], count: int, rng: random.Random) -> list[Mutant]:
    """Draw mutants, of as many lines as there are."""
    drawn = rng.sample(found, len(found))
    seen: dict[int, int] = {}
    turns = []
    for number, mutant in enumerate(drawn):
        seen[mutant.line] = turn = seen.get(mutant.line, 0) + 1
        turns.append((turn, number))
    return sorted((drawn[number] for _, number in sorted(turns)[:count]), key=lambda m: m.line)


def run_tests(tree: Path, tests: str, limit: float) -> tuple[str, float]:
    """Run test files in a fork of this process: what failed ("" if nothing did), and seconds."""
    log, began = tree.parent / "log", time.monotonic()
    child = os.fork()
    if not child:
        _be_pytest(tree, tests, log)
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() - began < limit:
        time.sleep(0.02)
    if not ended[0]:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return f"not ended after {limit:.0f} s", limit
    status, said = os.waitstatus_to_exitcode(ended[1]), log.read_text(errors="replace")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", said, flags=re.MULTILINE)
    what = failed[1] if failed else f"status {status}: {said[-300:]}"
    return what if status else "", time.monotonic() - began


def _be_pytest(tree: Path, tests: str, log: Path) -> None:
    import pytest
    from hypothesis import Phase, settings

    os.setsid()
    os.chdir(tree)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.path.insert(0, str(tree))
    sys.dont_write_bytecode = True
    # The same examples every time, and no shrinking: a failure is all that is asked for.
    phases = (Phase.explicit, Phase.generate)
    settings.register_profile(
        "mutants", phases=phases, database=None, derandomize=True, deadline=None
    )
    marks = ("-m", "not slow and not processes", "--hypothesis-profile=mutants")
    plain = ("--assert=plain", "--tb=no", "-p", "no:cacheprovider")
    status = pytest.main(
        ["-x", "-q", *plain, *marks, *(f"tests/{name}.py" for name in tests.split())]
    )
    place = getattr(sys.modules.get("vocagnolm"), "__file__", None) or ""
    if not status and not place.startswith(str(tree)):
        sys.stderr.write(f"the tests are of {place}, not of {tree}\n")
        status = 99
    os._exit(int(status))


def judgements(module: str, mutants: list[Mutant]) -> Iterator[tuple[str, str, str]]:
    """The entries of `JUDGED` that are of some mutants."""
    for old, new, why in JUDGED.get(module, ()):
        if any(m.before != m.after == m.before.replace(old, new) for m in mutants):
            yield old, new, why


def hunt(modules: list[str], each: int, seed: int) -> int:
    """Run the tests on mutants of some modules, and print who survives; the exit status."""
    # What all tests load, before they are forked.
    import datasets
    from transformers import LlamaForCausalLM, Trainer

    del datasets, LlamaForCausalLM, Trainer
    say = partial(print, flush=True)
    killed = total = unjudged = 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as base:
        tree = Path(base) / "tree"
        left_out = shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", ".*_cache")
        shutil.copytree(ROOT, tree, ignore=left_out)
        (Path(base) / "shared").symlink_to(ROOT.parent / "shared")
        for module in modules:
            failed, seconds = run_tests(tree, TESTS[module], 600)
            if failed:
                say(f"{module}: {failed} without any mutant")
                return 1
            path = tree / "vocagnolm" / f"{module}.py"
            own, alive = path.read_text(encoding="utf-8"), []
            found = mutants_of(own)
            chosen = choose(found, each, random.Random(f"{seed} {module}"))
            for mutant in chosen:
                path.write_text(mutant.source, encoding="utf-8")
                if not run_tests(tree, TESTS[module], 30 + 5 * seconds)[0]:
                    alive.append(mutant)
            path.write_text(own, encoding="utf-8")
            say(f"{module:12} {len(chosen) - len(alive)} of {len(chosen)} killed ({len(found)})")
            for m in alive:
                why = next(judgements(module, [m]), ("", "", ""))[-1]
                unjudged += not why
                say(f"    line {m.line}: {m.before}\n        -> {m.after}\n        {why}")
            for one in sorted({*JUDGED.get(module, ())} - {*judgements(module, found)}):
                unjudged += 1
                say(f"    judged, but no mutant: {one[0]} -> {one[1]}")
            killed += len(chosen) - len(alive)
            total += len(chosen)
    say(f"{killed} of {total} killed ({100 * killed / total:.0f} %), {unjudged} survivors unjudged")
    return int(unjudged > 0 or killed < LEAST_KILLED * (killed + unjudged))


def main() -> int:
    """Read the command line and hunt."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("modules", nargs="*", help=f"of {', '.join(TESTS)}")
    parser.add_argument("--each", type=int, default=12, help="mutants of a module")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for name in given.modules:
        if name not in TESTS:
            parser.error(f"{name} is none of {', '.join(TESTS)}")
    return hunt(given.modules or list(TESTS), given.each, given.seed)


if __name__ == "__main__":
    sys.exit(main())
