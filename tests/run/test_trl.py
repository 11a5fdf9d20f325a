"""The files of docs/trl.md: TRL's SFTTrainer makes our update from the column `weight`."""

from __future__ import annotations

import importlib
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from world import World, make_world, write_pages

from vocagnolm import VocAgnoTrainer, __main__
from vocagnolm.run import weighing
from vocagnolm.run.parser import parse
from vocagnolm.spans import encode
from vocagnolm.training.models import read_models
from vocagnolm.training.packed import pack_documents, read_corpora

trl = pytest.importorskip("trl", reason="make bench has an environment with it")

PAGE = Path(__file__).parents[2] / "docs/trl.md"
# A power of two, so that the divisor of the loss is exact.
LABELS = 512
STEP = {"learning_rate": 1.0, "max_steps": 1, "weight_decay": 0.0, "max_grad_norm": 0.0}
STEP |= {"lr_scheduler_type": "constant", "optim": "sgd", "save_strategy": "no", "use_cpu": True}


def in_float64(prepared: Any) -> VocAgnoTrainer:
    """Make a trainer whose models are in float64."""
    trainer = VocAgnoTrainer(prepared=prepared)
    for model in [trainer.model, *trainer.online_teachers]:
        model.double()
    return trainer


def of_labels(world: World, texts: list[str], count: int) -> list[str]:
    """Choose texts that have so many tokens with a label."""
    tokenizer: Any = AutoTokenizer.from_pretrained(world.student)
    # The texts of each sum. A text of n tokens has n labels, and one for its end.
    chosen: dict[int, list[str]] = {0: []}
    for text in texts:
        labels = len(encode(tokenizer, text).ids) + 1
        for total, earlier in list(chosen.items()):
            chosen.setdefault(total + labels, [*earlier, text])
    return chosen[count]


@pytest.fixture(scope="module")
def short(
    tokenizer_dirs: dict[str, Path],
    tiny_llama: Callable[..., Any],
    training_texts: list[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> World:
    root = tmp_path_factory.mktemp("trl")
    texts = [text[:90] for text in training_texts[:30]]
    return make_world(root, tiny_llama, tokenizer_dirs, texts, initializer_range=0.1)


class InFloat64:
    """Stands in for TRL's head, which adds in float32 whatever the model is in."""

    @staticmethod
    def apply(hidden: Any, weight: Any, bias: Any, targets: Any, *_: object) -> tuple[Any, ...]:
        """Return the log-probabilities of the targets, and none of the other values."""
        log_probs = torch.nn.functional.linear(hidden, weight, bias).log_softmax(-1)
        return log_probs.gather(-1, targets[:, None])[:, 0], None, None, None, None


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The trainer of the page."""
    for name, text in re.findall(
        r"^`([\w.]+)`:\n\n```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S
    ):
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("weighted_sft")
    sys.modules.pop("weighted_sft")


def changes(trainer: Any) -> dict[str, torch.Tensor]:
    """Train one step at rate 1, and return the gradients."""
    before = {name: each.detach().clone() for name, each in trainer.model.named_parameters()}
    trainer.train()
    return {name: before[name] - each.detach() for name, each in trainer.model.named_parameters()}


def load(directory: Path) -> datasets.Dataset:
    return datasets.load_dataset(str(directory), split="train", cache_dir=f"{directory}-cache")


@pytest.fixture(scope="module")
def ours(
    short: World, training_texts: list[str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, torch.Tensor]]:
    """The data set of the command, and the gradient of our trainer on it, in float64."""
    root = tmp_path_factory.mktemp("ours")
    write_pages(short.pages, of_labels(short, [text[:90] for text in training_texts], LABELS))
    options: dict[str, Any] = {name: str(value) for name, value in STEP.items()}
    options |= {"eval_fraction": None, "selection": "accept", "save_steps": None}

    def argv(name: str, tokens: int | None) -> list[str]:
        batch = {"global_batch_tokens": tokens and str(tokens)}
        return short.argv("", **options, **batch, output_dir=str(root / name))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weighing, "VocAgnoTrainer", in_float64)
        assert __main__.main(["weights", *argv("weighed", None)]) == 0
    rows = load(root / "weighed")
    assert sum(label != -100 for labels in rows["labels"] for label in labels) == LABELS
    (root / "student").symlink_to(short.student)
    # All packed sequences are one step.
    job = parse(argv("run", 64))
    models = read_models(job.model, job.args, job.args.device)
    packed = pack_documents(job, models, read_corpora(job))
    job = parse(argv("run", 64 * len(packed.blocks)))
    return root / "weighed", changes(in_float64((job, models, packed)))


@pytest.mark.parametrize("head", ["float64", "TRL's"])
@pytest.mark.parametrize(
    ("packing", "accumulation"), [(False, 1), (False, 4), (True, 1), (True, 4)]
)
def test_gradient_from_the_column_is_that_of_our_trainer(
    packing: bool,
    accumulation: int,
    head: str,
    page: Any,
    short: World,
    ours: tuple[Path, dict[str, torch.Tensor]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory, expected = ours
    rows = load(directory).select_columns(["input_ids", "labels", "weight"])
    if packing:
        rows = trl.pack_dataset(rows, seq_length=64)
    if head == "float64":
        monkeypatch.setattr(trl.trainer.utils, "_ChunkedLogProbFunction", InFloat64)
    args = trl.SFTConfig(
        str(tmp_path / "sft"),
        packing=packing,
        dataset_kwargs={"skip_prepare_dataset": True},
        remove_unused_columns=False,
        per_device_train_batch_size=-(-len(rows) // accumulation),
        gradient_accumulation_steps=accumulation,
        bf16=False,
        report_to="none",
        **STEP,
    )
    student = AutoModelForCausalLM.from_pretrained(short.student, dtype=torch.float64)
    trainer = page.WeightedSFTTrainer(
        student,
        args,
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(short.student),
    )
    found = changes(trainer)
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    assert largest > 1e-3
    # TRL's head adds in float32.
    tolerance = (1e-10 if head == "float64" else 1e-6) * largest
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=tolerance)


@pytest.mark.usefixtures("page")
def test_script_of_the_page_trains(
    ours: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("weighed", "student"):
        (tmp_path / name).symlink_to(ours[0].with_name(name))
    on_cpu = {"use_cpu": True, "bf16": False, "max_steps": 2, "report_to": "none"}
    monkeypatch.setattr(trl, "SFTConfig", partial(trl.SFTConfig, **on_cpu))
    runpy.run_path("train_sft.py")
    assert Path("sft/checkpoint-2/model.safetensors").exists()
