"""Compare the memory of reading one long line of JSON with the line's size.

Prose with escapes, as a document, compressed, with a letter beyond 16 bits in each line of text, as
the answer of a conversation, and among short documents: each file read into a corpus by a process
of its own, with what is mapped. Beside them is what the builder of `datasets` takes.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import zstandard

from benchmarks.harness import Claim, Measured, Way, alone, take_turns
from vocagnolm.corpus import load_corpus

CLAIM = Claim("a long line of JSON takes 3.5 times its size to read", at_most=3.5, unit="x")
PROSE = 'Let $x^2 + y_1 = \\frac{a}{b}$ be a "line"; then we see that it holds.\n'
OPENERS: dict[str, Callable[..., Any]] = {".jsonl": open, ".gz": gzip.open, ".zst": zstandard.open}


@dataclass(frozen=True)
class Size:
    """Megabytes of long texts; what is no plain document is as long as the first."""

    megabytes: str = "100 200 500"  # glibc keeps what was freed of blocks below 32


FULL, SMALL, TINY = Size(), Size("50"), Size("40")


def measure(size: Size) -> Measured:
    """Return the largest memory as a multiple of the line's bytes."""
    datasets.disable_progress_bars()
    first, *others = map(int, size.megabytes.split())
    cases = [("document", ".jsonl", number) for number in (first, *others)]
    cases += [("document", ending, first) for ending in (".gz", ".zst")]
    cases += [(kind, ".jsonl", first) for kind in ("letters", "conversation", "mixture")]
    shares, details = [], []
    for kind, ending, megabytes in [*cases, ("by datasets", ".jsonl", first)]:
        with tempfile.TemporaryDirectory() as name:
            path = Path(name) / f"long{ending if ending == '.jsonl' else f'.jsonl{ending}'}"
            written = write(path, kind, megabytes)
            seconds, added = alone(read, path, kind)
        shares.append(added / written)
        details.append(
            f"{kind:13}{ending:7}{written / 1e6:6,.0f} MB{added / 1e6:8,.0f} MB"
            f"{shares[-1]:6.2f} x{seconds:6.1f} s"
        )
    return Measured(max(shares[:-1]), tuple(details))


def write(path: Path, kind: str, megabytes: int) -> int:
    """Write a file, and return the bytes of its long line."""
    line = PROSE + "\U0001d538 " * (kind == "letters")
    long = json.dumps(
        row(line * (megabytes * 10**6 // len(line.encode())), kind), ensure_ascii=False
    )
    short = [json.dumps(row(line * 20, kind))] * 3000 * (kind == "mixture")
    with OPENERS[path.suffix](path, "wt") as file:
        file.writelines(f"{one}\n" for one in (*short, long, *short))
    return len(long.encode())


def row(text: str, kind: str) -> dict[str, Any]:
    """Make a document or a conversation of a text."""
    if kind != "conversation":
        return {"text": text, "id": 1}
    turns = {"user": "Why?", "assistant": text}
    return {"messages": [{"role": role, "content": turns[role]} for role in turns]}


def read(path: Path, kind: str) -> tuple[float, int]:
    """Read a file, and return the seconds and the bytes that it added to the memory."""
    datasets.disable_progress_bars()
    datasets.config.HF_DATASETS_CACHE = path.parent / "cache"
    warm_up = path.with_name("short.jsonl")
    warm_up.write_text(json.dumps(row(PROSE, kind)))

    def run(given: object) -> None:
        if kind == "by datasets":
            datasets.load_dataset("json", data_files=str(given), split="train")
        else:
            load_corpus(str(given))

    run(warm_up)
    way = Way(run, lambda turn: path)
    take_turns({"reading": way}, 1, warm_up=0, memory=True)
    return way.median_s, way.added_bytes[0]
