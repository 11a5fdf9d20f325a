"""The files of docs/library.md, copied as they are, work with the commands next to them."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from inline_grader import graded_inline
from safetensors.torch import load_file
from world import World

from vocagnolm import VocAgnoConfig, VocAgnoTrainer, __main__
from vocagnolm.collator import PackedCollator
from vocagnolm.evaluation import runner

PAGE = (Path(__file__).resolve().parents[2] / "docs/library.md").read_text(encoding="utf-8")
FILES = re.findall(r"^`([\w.]+)`[^\n]*:\n\n```\w+\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^```\n(vocagnolm .*)\n```", PAGE, re.MULTILINE)
# Smaller than the paper's run.
SHORT: dict[str, Any] = {
    **{"max_length": 64, "global_batch_tokens": 512, "per_device_train_batch_size": 8},
    **{"max_steps": 2, "learning_rate": 1e-2, "report_to": ["none"]},
}
SMALL = ["--use_cpu", *(f"--{k}={v[0] if k == 'report_to' else v}" for k, v in SHORT.items())]


@pytest.fixture
def place(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with the page's files, and models and a corpus under the page's names."""
    for name, text in FILES:
        (tmp_path / name).write_text(text, encoding="utf-8")
    for name, target in (("STUDENT", world.student), ("TEACHER", world.teacher)):
        (tmp_path / name).symlink_to(target, target_is_directory=True)
    (tmp_path / "pages.jsonl").symlink_to(world.pages)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name, _ in FILES:
        sys.modules.pop(name.removesuffix(".py"), None)


def run(start: str, *more: str) -> None:
    """Run the page's command that begins with `vocagnolm START`, in this process."""
    (line,) = (line for line in COMMANDS if line.startswith(f"vocagnolm {start}"))
    assert __main__.main([*shlex.split(line)[1:], *more]) == 0


def test_method_of_the_page_is_the_objective_of_a_trainer(place: Path) -> None:
    run("train --method", *SMALL, "--output_dir=command", "--save_steps=1")
    # Resumed by its name.
    for path in ("command/model.safetensors", "command/README.md"):
        Path(path).unlink()
    shutil.rmtree("command/checkpoint-2")
    run("train --method", *SMALL, "--output_dir=command", "--save_steps=1")
    settings = json.loads(Path("command/run.json").read_text())
    assert settings["method"] == "soft:Soft"
    assert "`soft:Soft`" in Path("command/README.md").read_text()

    from soft import Soft  # type: ignore[import-not-found]

    args = VocAgnoConfig(output_dir="trainer", save_strategy="no", use_cpu=True, **SHORT)
    rows = [json.loads(line) for line in Path("pages.jsonl").read_text().splitlines()]
    trainer = VocAgnoTrainer("STUDENT", args, None, rows, teacher="TEACHER", objective=Soft)
    batch = PackedCollator(64)([trainer.train_dataset[0], trainer.train_dataset[1]])
    found = trainer.token_guidance(batch)
    lag = torch.sigmoid(found.student_loss_BS - found.teacher_loss_BS)
    assert torch.equal(found.weight_BS[found.mapped_BS], lag[found.mapped_BS])
    assert (found.weight_BS[found.valid_BS & ~found.mapped_BS] == 1).all()
    assert ((found.weight_BS > 0) == found.valid_BS).all()
    trainer.train()
    for name, weight in load_file("command/model.safetensors").items():
        assert torch.equal(trainer.model.state_dict()[name], weight), name
    args = trainer.args
    assert args.to_dict()["method"] == "soft:Soft"
    assert VocAgnoConfig(output_dir="again", use_cpu=True, method="soft:Soft").method == args.method


def test_aggregation_of_the_page_is_the_least_loss(place: Path) -> None:
    run("train --aggregation", *SMALL, "--output_dir=command")
    assert json.loads(Path("command/run.json").read_text())["aggregation"] == "least:least"

    from least import least  # type: ignore[import-not-found]

    args = VocAgnoConfig(output_dir="trainer", aggregation=least, use_cpu=True, **SHORT)
    assert args.to_dict()["aggregation"] == "least:least"
    rows = [json.loads(line) for line in Path("pages.jsonl").read_text().splitlines()]
    trainer = VocAgnoTrainer("STUDENT", args, None, rows, teacher="TEACHER")
    batch = PackedCollator(64)([trainer.train_dataset[0], trainer.train_dataset[1]])
    found, several = trainer.token_guidance(batch), 0
    for row, ranges in enumerate(batch["teacher_ranges"].tolist()):
        for token, (first, last) in enumerate(ranges):
            if found.mapped_BS[row, token]:
                losses = found.teacher_loss_BT[row, first:last]
                assert found.teacher_loss_BS[row, token] == losses.min()
                several += last - first > 1
    assert several > 10
    trainer.train()
    for name, weight in load_file("command/model.safetensors").items():
        assert torch.equal(trainer.model.state_dict()[name], weight), name


def test_benchmark_of_the_page_is_asked(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("evaluate", "--dry_run")
    shown = capsys.readouterr().out
    assert shown.startswith("=== halves (halves): 2 items, 0 shots\n--- prompt tokens")
    assert shown.endswith("The answer is 3.\n\nQuestion: What is half of 8?\nAnswer:\n\n")
    with graded_inline(runner):
        run("evaluate", "--output_dir=found")
    records = [json.loads(line) for line in Path("found/halves.jsonl").read_text().splitlines()]
    assert [record["gold"] for record in records] == ["4", "15"]
    assert json.loads(Path("found/results.json").read_text())["benchmarks"]["halves"]["n"] == 2


def test_teacher_source_of_the_page_gives_its_losses(place: Path) -> None:
    trainer = runpy.run_path("words.py")["trainer"]
    assert trainer.state.global_step == 10
    batch = PackedCollator(64)([trainer.train_dataset[0]])
    found = trainer.token_guidance(batch)
    losses = {round(loss, 3) for loss in found.teacher_loss_BS[found.mapped_BS].tolist()}
    assert losses == {0.1, 0.5, 9.0}
