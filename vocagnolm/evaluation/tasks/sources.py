"""From a file, the hub or the embedded world to the items of a benchmark.

Every way leads through the same raw rows and `Benchmark.item`, and ends in a digest of the items:
whatever they came from, it tells whether they are the ones behind the published numbers.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from vocagnolm.evaluation.tasks.benchmarks import HARNESS_COMMIT, Benchmark, HubSource, Item

HARNESS = "ZubinGou/math-evaluation-harness"
_HARNESS_DATA = f"https://raw.githubusercontent.com/{HARNESS}/{HARNESS_COMMIT}/data"

PlacedRow = tuple[str, Any]
"""Where a row stands, for errors, and what stands there."""


@dataclass(frozen=True)
class LoadedItems:
    """The items of a benchmark, and where they come from.

    Attributes:
        items: sorted by `idx`.
        origin: "demo_world", a file relative to `--data_dir`, or what was downloaded.
        digest: `items_digest` of them.
        verified: they are, question by question and gold by gold, those of the harness.
    """

    items: tuple[Item, ...]
    origin: str
    digest: str
    verified: bool


def load_items(benchmark: Benchmark, data_dir: Path | None) -> LoadedItems:
    """Read all items of a benchmark.

    Args:
        benchmark: whose items.
        data_dir: a directory in the harness's layout; None to download. The demo needs neither.

    Raises:
        ValueError: there is no such file or download, or it does not hold what the benchmark's
            record says. The message is one line and says what to do.
    """
    if benchmark.file is None:
        origin, rows = "demo_world", _demo_rows()
    elif data_dir is not None:
        origin, rows = benchmark.file, _file_rows(benchmark, data_dir)
    elif benchmark.hub is not None:
        origin = f"{benchmark.hub.name}@{benchmark.hub.revision}"
        rows = _hub_rows(benchmark.hub)
    else:
        origin = f"{HARNESS}@{HARNESS_COMMIT[:7]}/data/{benchmark.file}"
        rows = _harness_rows(benchmark)
    items = _build(benchmark, rows)
    if len(items) != benchmark.item_count:
        raise ValueError(
            f"{origin}: expected {benchmark.item_count} items of {benchmark.id}, found "
            f"{len(items)}; {_where_to_get(benchmark)}"
        )
    digest = items_digest(items)
    return LoadedItems(items, origin, digest, digest == benchmark.items_sha256)


def items_digest(items: Iterable[Item]) -> str:
    """The sha256 over index, question and gold of each item, one JSON list per line."""
    digest = hashlib.sha256()
    for item in items:
        line = json.dumps([item.idx, item.question, item.gold], separators=(",", ":"))
        digest.update(f"{line}\n".encode())
    return digest.hexdigest()


def _build(benchmark: Benchmark, rows: Iterable[PlacedRow]) -> tuple[Item, ...]:
    """The items of the rows, sorted; a row without an `idx` has its number as one."""
    items: dict[int, Item] = {}
    for number, (where, row) in enumerate(rows):
        item = _item(benchmark, number, where, row)
        if item.idx in items:
            raise _bad_row(
                benchmark, where, f"expected an `idx` of its own, found {item.idx} again"
            )
        items[item.idx] = item
    return tuple(items[idx] for idx in sorted(items))


def _item(benchmark: Benchmark, number: int, where: str, row: Any) -> Item:
    if not isinstance(row, dict):
        raise _bad_row(benchmark, where, f"expected a JSON object, found {type(row).__name__}")
    idx = row.get("idx", number)
    if type(idx) is not int:
        raise _bad_row(benchmark, where, f"expected `idx` to be int, found {type(idx).__name__}")
    try:
        return benchmark.item(idx, row)
    except (ValueError, ZeroDivisionError) as error:
        raise _bad_row(benchmark, where, str(error)) from error


def _bad_row(benchmark: Benchmark, where: str, why: str) -> ValueError:
    return ValueError(f"{where}: {why}; {_where_to_get(benchmark)}")


def _where_to_get(benchmark: Benchmark) -> str:
    """What a message about bad or missing data ends with: the file, its sha256, and its places."""
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


def _demo_rows() -> Iterator[PlacedRow]:
    """The rows of the package's own file, which `tests/demo` compares with the embedded world."""
    for line in (resources.files(__package__) / "demo.jsonl").read_bytes().splitlines():
        yield "demo_world", json.loads(line)


def _file_rows(benchmark: Benchmark, data_dir: Path) -> Iterator[PlacedRow]:
    assert benchmark.file is not None
    path = data_dir / benchmark.file
    if not path.is_file():
        raise ValueError(
            f"--data_dir {data_dir} has no {benchmark.file} with the {benchmark.item_count} items "
            f"of {benchmark.id}: {_where_to_get(benchmark)}, or leave --data_dir out to download"
        )
    with path.open("rb") as file:
        yield from _json_rows(benchmark, str(path), file)


def _json_rows(benchmark: Benchmark, name: str, lines: Iterable[bytes]) -> Iterator[PlacedRow]:
    """The rows of JSON lines; empty lines hold none."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"{name}, line {number}"
            yield where, _parse(benchmark, where, line)


def _parse(benchmark: Benchmark, where: str, line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:  # bad UTF-8 too
        raise _bad_row(benchmark, where, f"expected a JSON object, found {error}") from error


def _hub_rows(hub: HubSource) -> Iterator[PlacedRow]:
    """The rows of a dataset of the hub: its columns are named as the fields of the harness's."""
    number = 0
    for config, split in hub.parts:
        part = _download(hub.name, name=config, split=split, revision=hub.revision)
        for row in part:
            if hub.keep(row):
                yield f"{hub.name}, {config or 'default'}/{split}, item {number}", row
                number += 1


def _harness_rows(benchmark: Benchmark) -> Iterator[PlacedRow]:
    """The rows of the harness's own file, at its pinned commit.

    Read as text: the JSON reader of `datasets` infers one type per column, which fails on columns
    that are null for the first megabytes, and would be another parser than the one for files.
    """
    url = f"{_HARNESS_DATA}/{benchmark.file}"
    lines = _download("text", data_files=url, split="train")
    return _json_rows(benchmark, url, (row["text"].encode() for row in lines))


def _download(path: str, **options: Any) -> Iterable[Any]:
    """`datasets.load_dataset`, whose failures come back as one line."""
    import datasets
    from datasets.exceptions import DatasetsError

    logging.getLogger("datasets").setLevel(logging.CRITICAL)
    try:
        rows: Iterable[Any] = datasets.load_dataset(path, **options)
    except (DatasetsError, OSError, ValueError, RuntimeError) as error:
        what = options.get("data_files", path)
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{what} cannot be downloaded ({why}): check the network, or give the files with "
            "--data_dir"
        ) from error
    return rows
