"""A directory with two teachers, a student and pages, and the commands to run there."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from vocagnolm.run import main
from vocagnolm.store import score

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Place:
    """Inputs for `train.py` and `vocagnolm score`; all documents fit both."""

    root: Path

    def score(self, output: str = "store", **changes: str) -> Path:
        options = {
            "teacher": str(self.root / "teacher"),
            "dataset": str(self.root / "pages.jsonl"),
            "min_context": "16",
            "shard_documents": "16",
            "loss_dtype": "float32",
            **changes,
        }
        directory = self.root / output
        if not directory.exists():
            flags = [f"--{name}={value}" for name, value in options.items()]
            assert score.main([*flags, f"--output_dir={directory}"]) == 0
        return directory

    def argv(self, output: Path, **changes: str | None) -> list[str]:
        options: dict[str, str | None] = {
            "student": str(self.root / "student"),
            "teacher": None if "teacher_losses" in changes else str(self.root / "teacher"),
            "dataset": str(self.root / "pages.jsonl"),
            "max_length": "128",
            "global_batch_tokens": "512",
            "max_steps": "3",
            "learning_rate": "1e-2",
            "use_cpu": "True",
            "report_to": "none",
            "output_dir": str(output),
            **changes,
        }
        flags = [[f"--{k}", *v.split(" ")] for k, v in options.items() if v is not None]
        return [word for flag in flags for word in flag]

    def train(self, output: Path, **changes: str | None) -> Tensors:
        assert main.main(self.argv(output, **changes)) == 0
        return load_file(output / "model.safetensors")


def save_model(directory: Path, tokenizer: Path, model: Any) -> None:
    model.save_pretrained(directory)
    for file in tokenizer.glob("*token*.json"):
        shutil.copy(file, directory)


def write_pages(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def assert_equal(ours: Tensors, theirs: Tensors) -> None:
    assert ours.keys() == theirs.keys()
    for name, parameter in ours.items():
        assert torch.equal(parameter, theirs[name]), name
