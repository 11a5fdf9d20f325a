"""From a file, the hub or the package to the items of a benchmark.

A digest shows, wherever they came from, whether they are the ones behind the published numbers.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from vocagnolm.evaluation.records import read_lines
from vocagnolm.evaluation.tasks.benchmarks import HARNESS_COMMIT, Benchmark, Item
from vocagnolm.evaluation.tasks.questions import RawRow, is_asked

HARNESS = "ZubinGou/math-evaluation-harness"
_HARNESS_DATA = f"https://raw.githubusercontent.com/{HARNESS}/{HARNESS_COMMIT}/data"


@dataclass(frozen=True)
class LoadedItems:
    """All items of a benchmark, sorted by `idx`, and their origin."""

    items: tuple[Item, ...]
    # "demo_world", a file relative to `--data_dir`, or the name of a download.
    origin: str
    digest: str
    # They are those of the harness, to the letter.
    verified: bool


def load_items(benchmark: Benchmark, data_dir: Path | None) -> LoadedItems:
    """Read all items of a benchmark from `data_dir`, or download them; the demo needs neither."""
    rows: Iterable[RawRow]
    if benchmark.file is None:
        content = (resources.files(__package__) / f"{benchmark.id}.jsonl").read_bytes()
        origin, rows = "demo_world", read_lines(content)
    elif data_dir is not None:
        origin, rows = benchmark.file, read_lines((data_dir / benchmark.file).read_bytes())
    elif benchmark.hub is not None:
        origin, rows = f"{benchmark.hub}@main", _hub_rows(benchmark, benchmark.hub)
    else:
        origin = f"{HARNESS}@{HARNESS_COMMIT[:7]}/data/{benchmark.file}"
        rows = _harness_rows(f"{_HARNESS_DATA}/{benchmark.file}")
    built = [benchmark.item(row.get("idx", index), row) for index, row in enumerate(rows)]
    items = tuple(sorted(built, key=lambda item: item.idx))
    if (found := len({item.idx for item in items})) != benchmark.item_count or found < len(items):
        expected = f"expected {benchmark.item_count} items of {benchmark.id}"
        raise ValueError(f"{origin}: {expected}, found {len(items)} with {found} indices")
    digest = items_digest(items)
    return LoadedItems(items, origin, digest, digest == benchmark.items_sha256)


def items_digest(items: Iterable[Item]) -> str:
    """Hash index, question and gold of each item, one JSON list per line."""
    rows = ([item.idx, item.question, item.gold] for item in items)
    lines = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    return hashlib.sha256(lines.encode()).hexdigest()


def _harness_rows(url: str) -> Iterator[RawRow]:
    import datasets

    # As text: the JSON reader of `datasets` infers one type per column, which fails on columns
    # that are null for the first megabytes.
    for row in datasets.load_dataset("text", data_files=url, split="train"):
        yield json.loads(row["text"])


def _hub_rows(benchmark: Benchmark, name: str) -> Iterator[RawRow]:
    import datasets

    # Columns are named as the fields of the harness's; the digest identifies the rows.
    for config, split in benchmark.hub_parts:
        for row in datasets.load_dataset(name, name=config, split=split, revision="main"):
            if is_asked(benchmark.id, row):
                yield row
