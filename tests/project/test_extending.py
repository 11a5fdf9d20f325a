"""What docs/extending.md says to write, taken from the page, works."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import yaml
from transformers import PreTrainedTokenizerBase
from world import MAX_LENGTH, make_trainer

from vocagnolm import objective
from vocagnolm.evaluation.extraction import extract
from vocagnolm.evaluation.tasks import tasks
from vocagnolm.evaluation.tasks.benchmarks import BENCHMARKS, READERS, Benchmark
from vocagnolm.guidance import aggregate_teacher_losses
from vocagnolm.packing import Blocks, PackedCollator
from vocagnolm.readers import student_reader

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/extending.md").read_text(encoding="utf-8")


def blocks_of(section: str, language: str) -> list[str]:
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", PAGE, flags=re.MULTILINE | re.DOTALL)
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def run(section: str, **names: Any) -> dict[str, Any]:
    """Run the Python of a section from top to bottom, and return its names."""
    for block in blocks_of(section, "python"):
        exec(compile(block, "extending.md", "exec"), names)
    return names


def test_fifth_aggregation_guides_a_run(
    blocks: Blocks, pair: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Set as they are, so that they are again when the test ends.
    monkeypatch.setattr(objective, "aggregate_teacher_losses", aggregate_teacher_losses)
    annotations = objective.Method.__annotations__
    monkeypatch.setitem(annotations, "aggregation", annotations["aggregation"])
    method = run("An aggregation")["method"]
    trainer = make_trainer(tmp_path, blocks, *pair, options={"method": method}, max_steps=1)
    batch = PackedCollator(MAX_LENGTH)([blocks[0], blocks[1]])
    found = trainer.token_guidance(batch)
    several = 0
    for row, ranges in enumerate(batch["teacher_ranges"].tolist()):
        for token, (first, last) in enumerate(ranges):
            if found.mapped_BS[row, token]:
                losses = found.teacher_loss_BT[row, first:last]
                valid = batch["teacher_labels"][row, first:last] >= 0
                assert found.teacher_loss_BS[row, token] == losses[valid].min()
                several += int(valid.sum()) > 1
    assert several > 10
    trainer.train()


def test_hardest_tokens_are_trained(blocks: Blocks, pair: Any, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, blocks, pair[0], options={"method": "random"}, max_steps=1)
    mine = run("A method", trainer=trainer)["Hardest"](trainer.objective.method)
    assert trainer.state.global_step == 1
    assert type(trainer.objective).__name__ == "Hardest"
    batch = PackedCollator(MAX_LENGTH)([blocks[0], blocks[1]])
    loss_BS = torch.rand(batch["labels"].shape)
    found = mine.select(loss_BS, batch)
    assert found.weight_BS.sum() == mine.weighted_tokens(batch)
    for loss_S, weight_S, valid_S in zip(loss_BS, found.weight_BS > 0, found.valid_BS, strict=True):
        assert loss_S[weight_S].min() > loss_S[valid_S & ~weight_S].max()


def test_benchmark_of_the_page_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(READERS, "halves", None)
    run("A benchmark")
    (record,), (lines,) = (blocks_of("A benchmark", language) for language in ("yaml", "json"))
    mine = Benchmark("halves", **yaml.safe_load(record)["halves"])
    monkeypatch.setitem(BENCHMARKS, "halves", mine)
    (tmp_path / "halves").mkdir()
    (tmp_path / "halves/test.jsonl").write_text(lines, encoding="utf-8")
    (task,) = tasks.load_tasks(["halves"], tmp_path, None, None)
    items = task.items
    assert [item.gold for item in items] == [
        str(json.loads(line)["answer"]) for line in lines.splitlines()
    ]
    assert task.prompts[items[0].idx] == "Question: What is half of 8?\nAnswer:"
    output = "Half of 30 is 15. The answer is 15."
    assert extract(task.benchmark.answer_kind, output) == items[1].gold


def test_own_guide_gives_its_losses(
    student_tokenizer: PreTrainedTokenizerBase, tiny_llama: Callable[..., Any], tmp_path: Path
) -> None:
    corpus = datasets.Dataset.from_dict({"text": ["one and one is two", "two is what I said"] * 4})
    reader = student_reader(student_tokenizer, MAX_LENGTH)
    names = run("A teacher source", corpus=corpus, reader=reader)
    student, blocks = tiny_llama(len(student_tokenizer)), names["blocks"]
    options = {"method": objective.Method(aggregation="max")}
    trainer = make_trainer(
        tmp_path, blocks, student, names["teacher"], options=options, max_steps=1
    )
    batch = PackedCollator(MAX_LENGTH)([blocks[0]])
    found = trainer.token_guidance(batch)
    losses = {round(loss, 3) for loss in found.teacher_loss_BS[found.mapped_BS].tolist()}
    assert losses == {0.1, 0.5, 9.0}
    trainer.train()
