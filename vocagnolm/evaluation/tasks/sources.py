"""From a file, the hub or the package to the items of a benchmark.

A digest tells, wherever they came from, whether they are the ones behind the published numbers.
"""

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TypeAlias

from vocagnolm.evaluation.records import check_fields, parse_object
from vocagnolm.evaluation.tasks.benchmarks import HARNESS_COMMIT, Benchmark, HubSource, Item
from vocagnolm.evaluation.tasks.questions import RawRow, is_asked

HARNESS = "ZubinGou/math-evaluation-harness"
_HARNESS_DATA = f"https://raw.githubusercontent.com/{HARNESS}/{HARNESS_COMMIT}/data"
# The place of a row, for errors, and the row, or its line.
PlacedRow: TypeAlias = tuple[str, RawRow | bytes]


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
    if benchmark.file is None:
        name = f"{benchmark.id}.jsonl"
        lines = (resources.files(__package__) / name).read_bytes().splitlines()
        origin, rows = "demo_world", _lines(name, lines)
    elif data_dir is not None:
        path = data_dir / benchmark.file
        if not path.is_file():
            missing = f"{benchmark.file} with the {benchmark.item_count} items of {benchmark.id}"
            remedy = f"{_where_to_get(benchmark)}, or leave --data_dir out to download"
            raise ValueError(f"--data_dir {data_dir} has no {missing}: {remedy}")
        origin, rows = benchmark.file, _lines(str(path), path.read_bytes().split(b"\n"))
    elif benchmark.hub is not None:
        origin = f"{benchmark.hub.name}@main"
        rows = _hub_rows(benchmark.id, benchmark.hub)
    else:
        origin = f"{HARNESS}@{HARNESS_COMMIT[:7]}/data/{benchmark.file}"
        # As text: the JSON reader of `datasets` infers one type per column, which fails on columns
        # that are null for the first megabytes, and would be another parser than that of files.
        url = f"{_HARNESS_DATA}/{benchmark.file}"
        texts = _download("text", data_files=url, split="train")
        rows = _lines(url, (row["text"].encode() for row in texts))
    items = _build(benchmark, rows)
    if len(items) != benchmark.item_count:
        expected = f"expected {benchmark.item_count} items of {benchmark.id}"
        where = _where_to_get(benchmark)
        raise ValueError(f"{origin}: {expected}, found {len(items)}; {where}")
    digest = items_digest(items)
    return LoadedItems(items, origin, digest, digest == benchmark.items_sha256)


def items_digest(items: Iterable[Item]) -> str:
    """Hash index, question and gold of each item, one JSON list per line."""
    rows = ([item.idx, item.question, item.gold] for item in items)
    lines = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    return hashlib.sha256(lines.encode()).hexdigest()


def _build(benchmark: Benchmark, rows: Iterable[PlacedRow]) -> tuple[Item, ...]:
    items: dict[int, Item] = {}
    for number, (where, content) in enumerate(rows):
        try:
            row = parse_object(content) if isinstance(content, bytes) else content
            # A row without an `idx` has its number as one.
            idx = row.get("idx", number)
            check_fields({"idx": idx}, {"idx": (int,)})
            if idx in items:
                raise ValueError(f"expected an `idx` of its own, found {idx} again")
            item = benchmark.item(idx, row)
            item.question.encode()  # no lone surrogates, which no tokenizer takes
        except (ValueError, ArithmeticError) as error:
            raise ValueError(f"{where}: {error}; {_where_to_get(benchmark)}") from error
        items[idx] = item
    return tuple(items[idx] for idx in sorted(items))


def _where_to_get(benchmark: Benchmark) -> str:
    places = []
    if benchmark.file_sha256 is not None:
        whose = ", of a reconstruction" if benchmark.is_reconstruction else ""
        places.append(
            f"get data/{benchmark.file} (sha256 {benchmark.file_sha256}{whose}) from "
            f"https://github.com/{HARNESS} at {HARNESS_COMMIT}"
        )
    if benchmark.hub is not None:
        places.append(f"see https://huggingface.co/datasets/{benchmark.hub.name}")
    return ", or ".join(places)


def _lines(name: str, lines: Iterable[bytes]) -> Iterator[PlacedRow]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield f"{name}, line {number}", line


def _hub_rows(benchmark_id: str, hub: HubSource) -> Iterator[PlacedRow]:
    # Its columns are named as the fields of the harness's; the digest tells which rows these are.
    number = 0
    for config, split in hub.parts:
        for row in _download(hub.name, name=config, split=split, revision="main"):
            if is_asked(benchmark_id, row):
                yield f"{hub.name}, {config or 'default'}/{split}, item {number}", row
                number += 1


def _download(path: str, **options: str | None) -> Iterable[RawRow]:
    import datasets
    from datasets.exceptions import DatasetsError

    logging.getLogger("datasets").setLevel(logging.CRITICAL)
    try:
        rows: Iterable[RawRow] = datasets.load_dataset(path, **options)
    except (DatasetsError, OSError, ValueError, RuntimeError) as error:
        what = options.get("data_files", path)
        why = (str(error).splitlines() or [type(error).__name__])[0]
        remedy = "check the network, or give the files with --data_dir"
        raise ValueError(f"{what} cannot be downloaded ({why}): {remedy}") from error
    return rows
