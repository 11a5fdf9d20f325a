"""Print the measures of the house that the design limits: `make shape`.

    python tests/support/shape.py            the table
    python tests/support/shape.py --rooms    the same by room

Read off the source by `ast` and `tokenize`; nothing is imported or run, but for the row of the
training step, which `tests/project/test_architecture.py` counts by tracing one.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "vocagnolm"
SCRIPTS = (ROOT / "train.py", ROOT / "evaluate_math.py")
METHOD, SCRIPT = "method", "scripts"
# A flat file below everything: it imports nothing, and every room may import it.
BASE = "conventions"
# Each room and the rooms below it. An arrow that is not here is wrong, and so is one that is here
# and in no file.
ROOMS = {
    BASE: "",
    "host": "conventions",
    "training": "conventions host",
    "texts": "",
    "chat": "texts",
    METHOD: "conventions host training texts chat",
    "models": "conventions host texts method",
    "store": "conventions host training texts chat method models",
    "views": "conventions host texts chat method",
    "run": "conventions host training texts chat method models store views",
    "evaluation": "host chat models",
    "analysis": "conventions host texts chat method evaluation views",
    "demo": "conventions host method run evaluation",
    "cli": "host texts chat method store views run analysis demo",
    SCRIPT: "host run cli",
}
# A file of the method imports only those before it.
READING_ORDER = (
    "corpus",
    "spans",
    "readers",
    "alignment",
    "data",
    "packing",
    "row_segments",
    "collator",
    "output_head",
    "token_loss",
    "guidance",
    "distillation",
    "teacher",
    "objective",
    "trainer",
)
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60
_ASKING = re.compile(r"(What|How|Whether|Where|Which|Who)\b")
_NOT_OURS = {"main", "logger"}  # every command has the one, every module may have the other


@dataclass(frozen=True)
class Source:
    """One file of the package, or a script.

    Attributes:
        path: relative to the repository.
        module: its dotted name.
        room: the name of its room.
        text: its content.
        tree: its content, parsed.
    """

    path: Path
    module: str
    room: str
    text: str
    tree: ast.Module

    @property
    def lines(self) -> int:
        return self.text.count("\n")


@cache
def sources() -> tuple[Source, ...]:
    """Read all files, in the order of their paths."""
    found = []
    for path in [*SCRIPTS, *sorted(PACKAGE.rglob("*.py"))]:
        text = path.read_text(encoding="utf-8")
        parts = path.relative_to(ROOT).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        relative = path.relative_to(ROOT)
        found.append(Source(relative, module, _room(relative), text, ast.parse(text)))
    return tuple(found)


def _room(path: Path) -> str:
    if path.parts[0] != PACKAGE.name:
        return SCRIPT
    if len(path.parts) > 2:
        return path.parts[1]
    return BASE if path.stem == BASE else METHOD


def imported_modules(tree: ast.AST) -> set[str]:
    """Modules of the package that some code imports, anywhere and for whatever purpose."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    modules = {source.module for source in sources()}
    return {found for name in names if (found := _module_of(name, modules))}


def _module_of(name: str, modules: set[str]) -> str:
    """The longest beginning of a dotted name that is a module of the package, or ""."""
    while name and (name not in modules or name == PACKAGE.name):
        name = name.rpartition(".")[0]
    return name


@cache
def module_arrows() -> dict[str, set[str]]:
    """Modules that each module imports, types included."""
    return {s.module: imported_modules(s.tree) - {s.module} for s in sources()}


@cache
def room_arrows() -> dict[str, set[str]]:
    """Rooms that each room imports, itself left out."""
    rooms = {source.module: source.room for source in sources()}
    arrows: dict[str, set[str]] = {room: set() for room in ROOMS}
    for module, found in module_arrows().items():
        if module != PACKAGE.name:  # its names are lazy
            arrows[rooms[module]] |= {rooms[name] for name in found} - {rooms[module]}
    return arrows


def has_circle(arrows: dict[str, set[str]]) -> str:
    """A circle of arrows in words, or ""."""
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        return " -> ".join(error.args[1])
    return ""


def arrows_up() -> list[str]:
    """Arrows between rooms that point to no room below, and imports against the reading order."""
    wrong = [
        f"{room} -> {other}"
        for room, found in room_arrows().items()
        for other in sorted(found - set(ROOMS[room].split()))
    ]
    place = {f"{PACKAGE.name}.{name}": number for number, name in enumerate(READING_ORDER)}
    for module, number in place.items():
        later = [m for m in module_arrows().get(module, ()) if place.get(m, -1) > number]
        wrong += [f"{module} -> {name}" for name in sorted(later)]
    return wrong


def functions(source: Source) -> Iterator[tuple[str, int]]:
    """Name and lines of every function of a file."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{source.path}: {node.name}", (node.end_lineno or 0) - node.lineno + 1


def public_names(source: Source) -> set[str]:
    """Names that a file defines at its top level without an underscore."""
    names: set[str] = set()
    for node in source.tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return {name for name in names if not name.startswith("_")} - _NOT_OURS


def twice_named(found: Iterable[Source]) -> dict[str, list[str]]:
    """Public names that several modules define, with the modules."""
    by_name: dict[str, list[str]] = defaultdict(list)
    for source in found:
        for name in public_names(source):
            by_name[name].append(source.module)
    return {name: modules for name, modules in by_name.items() if len(modules) > 1}


def docstrings(source: Source) -> list[str]:
    """Docstrings of a file, its classes and its functions."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (node for node in ast.walk(source.tree) if isinstance(node, kinds))
    return [text for node in nodes if (text := ast.get_docstring(node))]


def comment_lines(source: Source) -> int:
    """Lines that hold nothing but a comment."""
    tokens = tokenize.generate_tokens(io.StringIO(source.text).readline)
    return sum(
        token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip()
        for token in tokens
    )


def words(found: Iterable[Source], pattern: str) -> int:
    """Occurrences of a pattern in some files."""
    return sum(len(re.findall(pattern, source.text)) for source in found)


def longest_sentence(markdown: str) -> int:
    """Words of the longest sentence outside of code, tables and headings."""
    prose = re.sub(r"```.*?```", "\n\n", markdown, flags=re.S)
    prose = "\n".join(line for line in prose.splitlines() if not line.startswith(("|", "#")))
    paragraphs = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", prose)
    sentences = (s for paragraph in paragraphs for s in re.split(r"(?<=[.:!?])\s", paragraph))
    return max((len(sentence.split()) for sentence in sentences), default=0)


def measures(found: tuple[Source, ...]) -> dict[str, float]:
    """Figures of some files, by name."""
    lines = sum(source.lines for source in found)
    return {
        "files": len(found),
        "lines": lines,
        "functions over 60 lines": sum(
            length > MAX_FUNCTION_LINES for source in found for _, length in functions(source)
        ),
        "files over 400 lines": sum(source.lines > MAX_FILE_LINES for source in found),
        "Any per 1,000 lines": 1000 * words(found, r"\bAny\b") / lines,
        "getattr per 1,000 lines": 1000 * words(found, r"\b(?:getattr|hasattr)\b") / lines,
        "docstrings that ask": sum(
            bool(_ASKING.match(text)) for source in found for text in docstrings(source)
        ),
        "comment lines, %": 100 * sum(map(comment_lines, found)) / lines,
        "names defined twice": len(twice_named(found)),
    }


@dataclass(frozen=True)
class Row:
    """A measure of the house and its limit, the least or the most allowed.

    `ceiling` holds a measure that has not reached its limit yet: it may not grow further.
    """

    measure: str
    limit: float
    measured: float
    is_least: bool = False
    ceiling: float = 0

    @property
    def holds(self) -> bool:
        if self.is_least:
            return self.measured >= self.limit
        return self.measured <= max(self.limit, self.ceiling)


def table() -> list[Row]:
    """Measure the house."""
    found = sources()
    flat = [source for source in found if source.room in (METHOD, BASE)]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    whole = measures(found)
    return [
        Row("files flat in vocagnolm/", 17, len(flat)),
        Row("lines of these", 3400, sum(source.lines for source in flat)),
        # 17,045 before checks, shares, trackers, the report page, cards and estimates.
        Row("package and scripts, lines", 15_500, whole["lines"], ceiling=23_778),
        Row("import circles", 0, bool(has_circle(module_arrows()))),
        Row("arrows that point up", 0, len(arrows_up())),
        Row("functions over 60 lines", 0, whole["functions over 60 lines"]),
        Row("files over 400 lines", 0, whole["files over 400 lines"]),
        Row("public names defined in two modules", 5, whole["names defined twice"]),
        Row("`Any` per 1,000 lines", 10, whole["Any per 1,000 lines"]),
        Row("`getattr`, `hasattr` per 1,000 lines", 1.5, whole["getattr per 1,000 lines"]),
        Row("docstrings that begin with a question word", 15, whole["docstrings that ask"]),
        Row("whole-line comments, %", 4, whole["comment lines, %"], is_least=True),
        Row("README, lines", 140, readme.count("\n")),
        Row("README, words of the longest sentence", 30, longest_sentence(readme)),
    ]


def _print_rooms() -> None:
    for room in ROOMS:
        found = tuple(source for source in sources() if source.room == room)
        if found:
            figures = ", ".join(f"{n} {value:.4g}" for n, value in measures(found).items())
            sys.stdout.write(f"{room:12} {figures}\n")
    for wrong in filter(None, [has_circle(module_arrows()), *arrows_up()]):
        sys.stdout.write(f"arrow: {wrong}\n")
    for name, modules in sorted(twice_named(sources()).items()):
        sys.stdout.write(f"twice: {name} in {', '.join(modules)}\n")
    unwanted = Counter(s.module for s in sources() for t in docstrings(s) if _ASKING.match(t))
    for module, count in unwanted.most_common(12):
        sys.stdout.write(f"docstrings that ask: {count} in {module}\n")


def main() -> int:
    """Print the table, or the figures of every room."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rooms", action="store_true", help="print the figures of every room")
    if parser.parse_args().rooms:
        _print_rooms()
        return 0
    sys.stdout.write("| measure | limit | measured |\n|---|---|---|\n")
    for row in table():
        limit = f"{'>=' if row.is_least else '<='} {row.limit:,g}"
        sys.stdout.write(f"| {row.measure} | {limit} | {row.measured:,.6g} |\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
