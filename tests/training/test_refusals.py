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


def packed_shorter(world: World) -> Any:
    return packed(world, "student", "teacher", max_length=32)


def packed_with_one_tokenizer(world: World) -> Any:
    return packed(world, "student")


def packed_with_two_of_the_student(world: World) -> Any:
    return packed(world, "student", "student")


TABLE = datasets.Dataset.from_list([ROW])
OTHER_OPTIMIZER = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
ALL_TOKENS = {"method": Method(unmapped="exclude")}
# A setting or an argument, its value, a word of the fault, and what else is given. Values that are
# functions are called with a world.
REFUSED: list[tuple[str, Any, str, dict[str, Any]]] = [
    # Options.
    ("top_k", 2, "(0, 1]", {}),
    ("train_on", "All", "completions", {}),
    ("lr_scheduler_kwargs", [1], "TypeError", {}),
    ("model_init_kwargs", {"dtype": "auto"}, "dtype", {}),
    ("missing_losses", "plain", "every token", ALL_TOKENS),
    ("eval_strategy", "steps", "eval_dataset", {}),
    # Models.
    ("peft_config", lora, "already", {"model": adapted}),
    ("teacher", store_and_model, "only one", {}),
    ("optimizers", (OTHER_OPTIMIZER, None), "none of", {}),
    # Documents.
    ("train_dataset", None, "NoneType", {}),
    ("train_dataset", [], "list", {}),
    ("train_dataset", ["a"], "must be a datasets.Dataset", {}),
    ("train_dataset", OtherRows(), "Blocks", {}),
    ("train_dataset", [{"id": 1}, {"text": 5}], "1 null, 1 not text", {}),
    ("train_dataset", TABLE.rename_column("text", "body"), "not a column", {}),
    ("train_dataset", datasets.DatasetDict(train=TABLE), "DatasetDict", {}),
    ("eval_dataset", TABLE.to_iterable_dataset(), "IterableDataset", {}),
    ("eval_dataset", [{"text": ""}], "no usable", {}),
    ("train_dataset", [ROW], "1 sequence", {}),
    # Packed sequences.
    ("train_dataset", packed_shorter, "32 tokens", {}),
    ("train_dataset", packed_with_two_of_the_student, "other tokenizers", {}),
    ("train_dataset", packed_with_one_tokenizer, "tokenizers", {}),
]


@pytest.mark.parametrize(("name", "value", "word", "others"), REFUSED)
def test_fault_is_named(
    name: str, value: Any, word: str, others: dict[str, Any], world: World, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"max_length": 64, "global_batch_tokens": 512, "max_steps": 3}
    settings |= {"use_cpu": True, "report_to": ["none"]}
    arguments: dict[str, Any] = {
        "model": str(world.student),
        "teacher": str(world.teacher),
        "train_dataset": world.rows(),
    }
    for key, given in {name: value, **others}.items():
        is_setting = hasattr(VocAgnoConfig, key) and not isinstance(given, Method)
        found = given(world) if callable(given) else given
        (settings if is_setting else arguments)[key] = found
    with pytest.raises((ValueError, TypeError), match=rf"\b{name.removesuffix('s')}") as caught:
        VocAgnoTrainer(**{"args": VocAgnoConfig(str(tmp_path), **settings), **arguments})
    assert word in str(caught.value)
    assert "--" not in str(caught.value)
