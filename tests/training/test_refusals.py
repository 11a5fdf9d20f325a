"""What a trainer refuses in Python: the arguments, which of them is at fault, and a word of why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from world import World

from vocagnolm import Method, VocAgnoConfig, VocAgnoTrainer, prepare_dataset

ROW = {"text": "a"}
CPT = {"method": "cpt", "teacher": None}
# Settings that are no fields: other programs' names, and a slip.
OTHER_NAMES = ("max_seq_length", "block_size", "topk")


class OtherRows(torch.utils.data.Dataset[object]):
    """Neither documents nor packed sequences."""

    def __getitem__(self, index: int) -> object:
        return {"input_ids": [index]}


def packed(world: World, *roles: str, max_length: int = 64) -> Any:
    """Pack the pages with the tokenizers of some models."""
    tokenizers = [AutoTokenizer.from_pretrained(getattr(world, role)) for role in roles]
    rows = datasets.Dataset.from_list(world.rows())
    return prepare_dataset(rows, *tokenizers, max_length=max_length)


def adapted(world: World) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"])
    return peft.get_peft_model(AutoModelForCausalLM.from_pretrained(world.student), config)


def lora(world: World) -> Any:
    return pytest.importorskip("peft").LoraConfig(target_modules=["q_proj"])


def store_and_model(world: World) -> list[str]:
    store = world.root / "unfinished"
    store.mkdir(exist_ok=True)
    (store / "manifest.json").write_text('{"format": 1}')
    return [str(store), str(world.teacher)]


# Values that are functions are called with a world.
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    # Options.
    ({"top_k": 2}, "top_k", "(0, 1]"),
    ({"train_on": "All"}, "train_on", "completions"),
    ({"lr_scheduler_kwargs": [1]}, "lr_scheduler_kwargs", "TypeError"),
    ({"model_init_kwargs": {"dtype": "auto"}}, "dtype", "option"),
    (
        {"missing_losses": "plain", "method": Method(unmapped="exclude")},
        "missing_losses",
        "every token",
    ),
    # Evaluations.
    ({"eval_strategy": "steps"}, "eval_strategy", "eval_dataset"),
    # Models.
    ({"model": adapted, "peft_config": lora, **CPT}, "peft_config", "already"),
    ({"teacher": store_and_model}, "teacher", "only one"),
    (
        {"optimizers": (torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), None)},
        "optimizer",
        "none of",
    ),
    # Documents.
    ({"train_dataset": None}, "train_dataset", "NoneType"),
    ({"train_dataset": []}, "train_dataset", "list"),
    ({"train_dataset": ["a"]}, "train_dataset", "must be a datasets.Dataset"),
    ({"train_dataset": OtherRows()}, "train_dataset", "Blocks"),
    ({"train_dataset": [{"id": 1}, {"text": 5}]}, "train_dataset", "1 null, 1 not text"),
    (
        {"train_dataset": datasets.Dataset.from_dict({"body": ["a"]})},
        "train_dataset",
        "not a column",
    ),
    (
        {"train_dataset": datasets.DatasetDict(train=datasets.Dataset.from_list([ROW]))},
        "train_dataset",
        "DatasetDict",
    ),
    (
        {"eval_dataset": datasets.Dataset.from_list([ROW]).to_iterable_dataset()},
        "eval_dataset",
        "IterableDataset",
    ),
    ({"eval_dataset": [{"text": ""}]}, "eval_dataset", "no usable"),
    ({"train_dataset": [ROW]}, "train_dataset", "1 sequence"),
    # Packed sequences.
    (
        {"train_dataset": lambda world: packed(world, "student", max_length=32), **CPT},
        "train_dataset",
        "32 tokens",
    ),
    (
        {"train_dataset": lambda world: packed(world, "teacher", "teacher")},
        "train_dataset",
        "other tokenizers",
    ),
    (
        {"train_dataset": lambda world: packed(world, "student", "student")},
        "train_dataset",
        "other tokenizers",
    ),
    ({"train_dataset": lambda world: packed(world, "student")}, "train_dataset", "tokenizers"),
]


@pytest.mark.parametrize(
    ("given", "fault", "word"), REFUSED, ids=[f"{fault} {word}" for _, fault, word in REFUSED]
)
def test_fault_is_named(
    given: dict[str, Any], fault: str, word: str, world: World, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"max_length": 64, "global_batch_tokens": 512, "max_steps": 3}
    settings |= {"use_cpu": True, "report_to": ["none"]}
    arguments: dict[str, Any] = {
        "model": str(world.student),
        "teacher": str(world.teacher),
        "train_dataset": world.rows(),
    }
    for name, value in given.items():
        is_setting = hasattr(VocAgnoConfig, name) and not isinstance(value, Method)
        found = value(world) if callable(value) else value
        (settings if is_setting or name in OTHER_NAMES else arguments)[name] = found
    with pytest.raises((ValueError, TypeError), match=rf"\b{fault}\b") as caught:
        VocAgnoTrainer(**{"args": VocAgnoConfig(str(tmp_path), **settings), **arguments})
    assert word in str(caught.value)
    assert "--" not in str(caught.value)
