"""A damaged evaluation is refused in one line, or made again byte for byte."""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from transformers import AutoTokenizer

from vocagnolm.evaluation import main as evaluate_math
from vocagnolm.evaluation.tasks import tasks
from vocagnolm.evaluation.tasks.benchmarks import BENCHMARKS

NAMES = ("gsm8k.jsonl", "svamp.jsonl", "settings.json", "results.json")
ITEMS = NAMES[:2]

Damage = Callable[[bytes, bytes, random.Random], bytes | None]


def flip(data: bytes, other: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def zero(data: bytes, other: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) - 8)
    return data[:at] + bytes(8) + data[at + 8 :]


def without_a_line(data: bytes, other: bytes, rng: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    del lines[rng.randrange(len(lines))]
    return b"".join(lines)


DAMAGES: dict[str, Damage] = {
    "flipped": flip,
    "zeroed": zero,
    "cut off": lambda data, other, rng: data[: rng.randrange(len(data))],
    "emptied": lambda data, other, rng: b"",
    "deleted": lambda data, other, rng: None,
    "another's": lambda data, other, rng: other,
    "with another's": lambda data, other, rng: data + other,
    "twice": lambda data, other, rng: data * 2,
    "without a line": without_a_line,
}


@pytest.fixture(scope="module")
def evaluated(
    shared_dir: Path, tmp_path_factory: pytest.TempPathFactory, tiny_llama: Callable[..., Any]
) -> tuple[list[str], Path]:
    """A finished evaluation of two benchmarks, and the command that made it."""
    tokenizer = AutoTokenizer.from_pretrained(shared_dir / "tokenizers" / "tinyllama")
    root = tmp_path_factory.mktemp("damage")
    size = {"initializer_range": 0.5, "max_position_embeddings": 1200}
    tiny_llama(len(tokenizer), **size).save_pretrained(root / "model")
    tokenizer.save_pretrained(root / "model")
    data, prompts = shared_dir / "data" / "benchmarks", shared_dir / "data" / "prompts" / "cot"
    argv = ["--model", str(root / "model"), "--benchmarks", "gsm8k", "svamp", "--limit", "4"]
    argv += ["--data_dir", str(data), "--prompts_dir", str(prompts), "--output_dir"]
    with pytest.MonkeyPatch.context() as patch:
        shorten(patch)
        assert evaluate_math.main([*argv, str(root / "whole")]) == 0
    return argv, root / "whole"


def shorten(patch: pytest.MonkeyPatch) -> None:
    short = {name: dataclasses.replace(b, max_new_tokens=4) for name, b in BENCHMARKS.items()}
    patch.setattr(tasks, "BENCHMARKS", MappingProxyType(short))


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.mark.stress(
    "evaluations: damaged at random, or another benchmark's",
    "refused in one line, or the same again, bit for bit",
)
@pytest.mark.slow
@pytest.mark.processes
def test_damage_is_refused_or_mended(
    evaluated: tuple[list[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    record_property: Callable[[str, object], None],
) -> None:
    argv, whole = evaluated
    shorten(monkeypatch)
    before, rng = contents(whole), random.Random(int(os.environ.get("VOCAGNOLM_SEED", "0")))
    outcomes: Counter[tuple[str, str]] = Counter()
    times = int(os.environ.get("VOCAGNOLM_DAMAGES", "18"))
    record_property("times", times)
    for number in range(times):
        kind = list(DAMAGES)[number % len(DAMAGES)]
        name = rng.choice(NAMES)
        other = rng.choice([x for x in (ITEMS if name in ITEMS else NAMES) if x != name])
        path = Path(shutil.copytree(whole, tmp_path / str(number)))
        damaged = DAMAGES[kind](before[name], before[other], rng)
        if damaged is None:
            (path / name).unlink()
        else:
            (path / name).write_bytes(damaged)
        unchanged = contents(path)
        status = evaluate_math.main([*argv, str(path)])
        said = capsys.readouterr().err
        where = (kind, name, number, said)
        if status == 2:
            assert (contents(path), said.count("\n")) == (unchanged, 1), where
        else:
            assert (status, contents(path)) == (0, before), where
        outcomes[kind, "refused" if status else "the same again"] += 1
    # Shown with `-rP`.
    sys.stdout.writelines(f"{*key, n}\n" for key, n in sorted(outcomes.items()))
    assert {outcome for _, outcome in outcomes} == {"refused", "the same again"}
