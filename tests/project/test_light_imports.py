"""Imports that must not load heavy packages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# These import at the top only what their commands' help needs.
COMMANDS = (
    "vocagnolm.readers, vocagnolm.run.launch, vocagnolm.run.prepare, vocagnolm.run.weights, "
    "vocagnolm.demo.main, "
    "vocagnolm.evaluation.evaluate, vocagnolm.report.audit, vocagnolm.store.score, "
    "vocagnolm.store.rank"
)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        (f"import {COMMANDS}; from vocagnolm import encode", "torch transformers datasets"),
        ("import vocagnolm.report.compare", "torch transformers datasets sympy matplotlib wandb"),
        ("import vocagnolm.report.inspect", "transformers datasets peft"),
    ],
)
def test_import_loads_nothing_heavy(code: str, heavy: str) -> None:
    code = f"{code}; import sys; print([m for m in {heavy.split()} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


# Runs in a Python that can import only NumPy and `tokenizers` besides the standard library.
BARE = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        root = name.partition(".")[0]
        allowed = sys.stdlib_module_names | {"numpy", "tokenizers", "vocagnolm"}
        if root not in allowed and not root.startswith("_"):
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Absent())
import numpy as np
from tokenizers import Tokenizer
from vocagnolm.alignment import (
    add_end, aggregate_losses, align_spans, chunk_credit, covered_shares, encode, encode_ids
)

text = "If 3x + 4 = 19, then x = 5. \\U0001F600"
student, teacher = (Tokenizer.from_file(path) for path in sys.argv[1:])
one, other = encode(student, text), encode(teacher, text)
assert encode_ids(student, one.ids, text).spans.tolist() == one.spans.tolist()
ranges = align_spans(add_end(one.spans, text), add_end(other.spans, text))
shares = covered_shares(add_end(one.spans, text), add_end(other.spans, text), ranges)
losses = np.ones(len(other.ids) + 1)
assert len(aggregate_losses(losses, ranges, "share", shares)) == len(one.ids) + 1
assert chunk_credit(np.ones(len(ranges)), losses, ranges)[-1] == 0.0
print("done")
"""


@pytest.mark.processes
def test_alignment_runs_with_numpy_and_tokenizers_alone(tokenizer_dirs: dict[str, Path]) -> None:
    paths = [tokenizer_dirs[name] / "tokenizer.json" for name in ("byte_level", "metaspace")]
    run = subprocess.run([sys.executable, "-c", BARE, *paths], capture_output=True, check=False)
    assert run.stdout == b"done\n", run.stderr.decode()
