"""The arrows between modules, what a light import loads, and the proportions of the code."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "vocagnolm"
SCRIPTS = ("train", "evaluate_math")
MAX_FUNCTION_LINES, MAX_FILE_LINES = 60, 400

# What each module may import of the package; a subpackage is one module. Everything else is wrong.
ALLOWED = {
    "spans": set(),
    "alignment": {"spans"},
    "corpus": set(),
    "data": {"alignment", "corpus", "spans", "stored_reader"},
    "packed_attention": set(),
    "output_head": {"packed_attention"},
    "token_loss": {"output_head", "packed_attention"},
    "guidance": set(),
    "distillation": {"output_head"},
    "packing": {"alignment", "packed_attention", "token_loss"},
    "teacher": {"guidance", "output_head", "distillation", "packed_attention", "token_loss"},
    "speed": set(),
    "files": set(),
    "store": {"files", "spans"},
    "stored_reader": {"spans", "store"},
    "scorer": {"packed_attention", "store", "token_loss"},
    "vllm_scorer": {"scorer", "store"},
    "scoring_job": {
        *("corpus", "data", "files", "processes", "scorer", "spans", "store", "token_loss"),
    },
    "metrics": {"token_loss"},
    "callbacks": {"bad_batch", "metrics", "token_loss", "trainer"},  # the trainer as a type only
    "objective": {"distillation", "guidance", "packed_attention", "teacher", "token_loss"},
    "flops": set(),
    "throughput": {"flops", "token_loss", "trainer"},  # the trainer as a type only
    "trainer": {
        *("callbacks", "distillation", "guidance", "metrics", "objective", "teacher", "token_loss"),
        *("bad_batch", "packed_attention", "resumable", "throughput"),
    },
    "manifest": {"files"},
    "bad_batch": {"files"},
    "failures": {"processes"},
    "preemption": set(),
    "resumable": {"checkpoints", "manifest", "metrics", "preemption", "processes", "relayout"},
    "pieces": set(),
    "relayout": {"pieces"},
    "lock": set(),
    "run_record": {"files", "manifest"},
    "checkpoints": {"files", "manifest", "run_record"},
    "model_card": set(),
    "models": set(),
    "memory": {"speed"},
    "adapters": set(),
    "sharding": {"speed", "token_loss"},
    "arguments": {"adapters", "distillation", "guidance"},
    "config": {
        *(
            "arguments",
            "packed_attention",
            "recipe",
            "run_arguments",
            "sharding",
            "speed",
            "teacher",
        ),
    },
    "export": {
        *("adapters", "checkpoints", "files", "identity", "manifest", "models", "pieces"),
        *("run_record", "spans"),
    },
    "run_arguments": {"checkpoints", "global_batch", "speed"},
    "global_batch": set(),
    "recipe": set(),
    "plan": {"alignment", "data", "packing", "spans"},
    "identity": {"files"},
    "processes": set(),
    "loss_recorder": {"callbacks", "corpus", "data", "packing", "scoring_job", "spans", "store"},
    "evaluation": {"demo_world", "evaluation"},
    "paired_tests": set(),
    "evaluated_runs": {"evaluation"},
    "differences": {"evaluated_runs", "evaluation", "paired_tests"},
    "comparison": {"differences", "evaluated_runs", "evaluation", "figures", "files"},
    "figures": {"figure_data", "figure_panels", "figure_plans", "guidance_figure"},
    "figure_plans": {"evaluated_runs", "figure_data", "figure_panels"},
    "figure_panels": {"evaluated_runs", "figure_data"},
    "guidance_figure": {"figure_data", "inspection"},
    "figure_data": {
        *("differences", "evaluated_runs", "files", "inspection", "paired_tests", "recipe"),
    },
    "overlap": {"alignment", "spans"},
    "audit": {"alignment", "audit_plots", "corpus", "data", "files", "overlap", "spans"},
    "audit_plots": set(),
    "inspection": {
        *("alignment", "corpus", "data", "guidance", "packing", "spans", "teacher", "token_loss"),
    },
    "inspection_page": {"files", "inspection"},
    "inspect": {
        *("corpus", "data", "files", "guidance", "inspection", "inspection_page", "models"),
        *("packed_attention", "packing", "processes", "spans", "teacher", "token_loss"),
    },
    "guidance_table": {"files", "guidance", "inspection", "inspection_page", "trainer"},
}
READERS_OF_CONFIG = {"job", "pair", "run_plan", "cli", *SCRIPTS}
TOKENIZER_SIDE = {"spans", "alignment", "corpus", "data", "store", "stored_reader"}
TRAINING_SIDE = {"trainer", "callbacks", "metrics", "guidance", "teacher", "packing", "job"}


def module_name(path: Path) -> str:
    """`spans` of vocagnolm/spans.py; `evaluation` of whatever lies in vocagnolm/evaluation."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_modules(tree: ast.AST) -> set[str]:
    """Modules of the package that a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("vocagnolm.")}


def runtime_tree(path: Path) -> ast.AST:
    """The code of a file without its `if TYPE_CHECKING:` blocks."""

    class Remover(ast.NodeTransformer):
        def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
            if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
                return node.orelse
            return node

    return Remover().visit(ast.parse(path.read_text(encoding="utf-8")))


def files() -> dict[Path, str]:
    found = {path: module_name(path) for path in sorted(PACKAGE.rglob("*.py"))}
    found |= {path: name for name in SCRIPTS if (path := ROOT / f"{name}.py").exists()}
    return {path: name for path, name in found.items() if name != "__init__"}


@cache
def graph(*, runtime: bool) -> dict[str, set[str]]:
    edges: dict[str, set[str]] = {}
    for path, name in files().items():
        tree = runtime_tree(path) if runtime else ast.parse(path.read_text(encoding="utf-8"))
        edges.setdefault(name, set()).update(imported_modules(tree))
    return edges


def reachable(edges: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    todo = [start]
    while todo:
        new = edges.get(todo.pop(), set()) - seen
        seen |= new
        todo += new
    return seen


def test_import_parser_sees_every_form_when_modules_are_imported() -> None:
    source = (
        "import vocagnolm.spans as s\nfrom vocagnolm import data, job\n"
        "def f():\n    from vocagnolm.evaluation.answers import x\nimport torch.nn\n"
    )
    assert imported_modules(ast.parse(source)) == {"spans", "data", "job", "evaluation"}


@pytest.mark.parametrize("name", sorted(graph(runtime=False)))
def test_module_imports_only_what_it_may_when_parsed(name: str) -> None:
    found = graph(runtime=False)[name]
    assert found <= ALLOWED.get(name, found), f"{name}: {sorted(found - ALLOWED.get(name, found))}"
    assert "config" not in found or name in READERS_OF_CONFIG


def test_modules_import_each_other_in_one_direction_when_run() -> None:
    edges = graph(runtime=True)
    edges = {name: found - {name} for name, found in edges.items()}  # inside a subpackage
    try:
        order = list(TopologicalSorter(edges).static_order())
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")
    assert order.index("spans") < order.index("alignment") < order.index("data")


@pytest.mark.parametrize("name", ["trainer", "token_loss", "guidance", "models"])
def test_module_knows_no_tokenizer_when_it_is_on_the_tensor_side(name: str) -> None:
    assert not reachable(graph(runtime=False), name) & TOKENIZER_SIDE


@pytest.mark.parametrize("name", ["spans", "alignment", "corpus", "data"])
def test_module_knows_no_model_when_it_is_on_the_text_side(name: str) -> None:
    assert reachable(graph(runtime=False), name) <= TOKENIZER_SIDE | {"files"}


def test_evaluation_and_training_never_meet_when_imports_are_followed() -> None:
    edges = graph(runtime=False)
    assert not reachable(edges, "evaluation") & (TRAINING_SIDE | TOKENIZER_SIDE)
    for name in TRAINING_SIDE | {"train"}:
        assert "evaluation" not in reachable(edges, name)


@pytest.mark.parametrize("module", ["spans", "alignment"])
def test_module_loads_no_torch_when_imported(module: str) -> None:
    code = (
        f"import sys, vocagnolm.{module}; "
        "print([m for m in ('torch', 'transformers', 'datasets') if m in sys.modules])"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert output.stdout == "[]\n"


@pytest.mark.parametrize("path", files(), ids=lambda path: path.stem)
def test_code_keeps_its_proportions_when_measured(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert source.count("\n") <= MAX_FILE_LINES
    long = {
        f"{node.name}: {length} lines"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and (length := node.end_lineno - node.lineno + 1) > MAX_FUNCTION_LINES
    }
    assert long == set()
