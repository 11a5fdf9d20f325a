"""The example of docs/alignment.md runs, and the library does without what it does not need."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM
from world import World

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/alignment.md").read_text(encoding="utf-8")
((NAME, EXAMPLE),) = re.findall(r"^`([\w.]+)`:\n\n```python\n(.*?)^```", PAGE, re.M | re.S)


def test_example_of_the_page_trains_the_student(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / NAME).write_text(EXAMPLE, encoding="utf-8")
    (tmp_path / "STUDENT").symlink_to(world.student)
    (tmp_path / "TEACHER").symlink_to(world.teacher)
    monkeypatch.chdir(tmp_path)

    contexts: list[list[int]] = []
    scored: list[list[int]] = []
    forward = LlamaForCausalLM.forward

    def record(model: LlamaForCausalLM, ids: torch.Tensor, **options: object) -> Any:
        scored.append(ids[0].tolist())
        return forward(model, ids, **options)

    def generate(_: object, prompt: torch.Tensor, **options: object) -> torch.Tensor:
        """Sample single letters, which are not the text's usual tokens, and the end."""
        contexts.append(prompt[0].tolist())
        tokenizer: Any = AutoTokenizer.from_pretrained(world.student)
        letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "answer7"]
        sampled = torch.tensor([[*letters, tokenizer.eos_token_id]])
        return torch.cat([prompt, sampled], dim=1)

    monkeypatch.setattr(LlamaForCausalLM, "generate", generate)
    monkeypatch.setattr(LlamaForCausalLM, "forward", record)
    names = runpy.run_path(NAME)
    assert len(names["credit"]) == len(names["student_losses"])
    assert names["has_ended"]
    assert names["text"].endswith("answer7")
    assert names["answer"].abs().max() > 0
    # The student's losses are those of the distribution that was sampled from.
    assert scored[0][: len(contexts[0])] == contexts[0]
    assert all(parameter.grad is not None for parameter in names["student"].parameters())


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
    paths = [
        str(tokenizer_dirs[family] / "tokenizer.json") for family in ("byte_level", "metaspace")
    ]
    done = subprocess.run(
        [sys.executable, "-c", BARE, *paths], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.stdout == "done\n", done.stderr
