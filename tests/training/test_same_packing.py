"""Documents become the same packed sequences at every door, whatever they are."""

from __future__ import annotations

import json
from typing import Any

import datasets
import numpy as np
from fuzz import FUZZ_PIECES
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer
from world import World

from vocagnolm import VocAgnoConfig, VocAgnoTrainer, prepare_dataset
from vocagnolm.packing import Blocks
from vocagnolm.run.parser import parse
from vocagnolm.training.models import read_models
from vocagnolm.training.packed import pack_documents, read_corpora

LENGTH, CONTEXT = 32, 128
# Some documents have no text, or only white space; others do not fit and are cut.
TEXTS = st.one_of(
    st.none(),
    st.lists(st.sampled_from([*FUZZ_PIECES, " ", "\n\n"]), max_size=40).map("".join),
)


def of_prepare_dataset(world: World, texts: list[str | None]) -> Any:
    tokenizers = [AutoTokenizer.from_pretrained(place) for place in (world.student, world.teacher)]
    rows = datasets.Dataset.from_dict({"text": texts})
    return prepare_dataset(rows, *tokenizers, max_length=LENGTH, teacher_context=CONTEXT)


def of_trainer(world: World, texts: list[str | None]) -> Any:
    batch: dict[str, Any] = {"per_device_train_batch_size": 1, "max_steps": 1}
    out = str(world.root / "python")
    args = VocAgnoConfig(out, max_length=LENGTH, use_cpu=True, report_to=["none"], **batch)
    rows = [{"text": text} for text in texts]
    trainer = VocAgnoTrainer(str(world.student), args, None, rows, teacher=str(world.teacher))
    return trainer.train_dataset


def of_command(world: World, texts: list[str | None]) -> Any:
    pages = world.root / "random.jsonl"
    pages.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    sizes = {"max_length": str(LENGTH), "global_batch_tokens": str(LENGTH), "eval_fraction": None}
    job = parse(world.argv("command", dataset=str(pages), use_cpu="True", **sizes))
    models = read_models(job.model, job.args, job.args.device)
    return pack_documents(job, models, read_corpora(job)).blocks


def sequences(blocks: Blocks) -> list[dict[str, Any]]:
    """Return the columns of each packed sequence as lists."""
    found = []
    for number in range(len(blocks)):
        columns: dict[str, Any] = dict(blocks[number])
        for name, rows in columns.items():
            if name != "block":
                columns[name] = [np.asarray(row).tolist() for row in rows]
        found.append(columns)
    return found


@given(texts=st.lists(TEXTS, max_size=8))
@settings(max_examples=15)
def test_packed_sequences_are_those_of_every_door(world: World, texts: list[str | None]) -> None:
    texts = [*texts, "1 + 1 = 2"]
    expected = of_prepare_dataset(world, texts)
    assert len(expected)
    for blocks in (of_trainer(world, texts), of_command(world, texts)):
        assert blocks.corpus_digest == expected.corpus_digest
        assert sequences(blocks) == sequences(expected)
