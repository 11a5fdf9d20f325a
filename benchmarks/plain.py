r"""Compare steps with a plain loop in transformers, on the same rows.

    python -m benchmarks.plain --student SmolLM2-135M --corpus gsm8k_train.jsonl

The loop is `model(input_ids, labels)`, backward, clipping and fused AdamW. In the online step, the
teacher is a copy of the student, and the loop computes its loss, too. All rows are full, so both
read as many tokens. Both take turns in a random order on one thread, and time is processor time.
Ours includes making the batch, which the loop gets for nothing.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.harness import Way, one_thread, quartiles, take_turns
from benchmarks.peers import arguments_of_steps
from vocagnolm import Blocks, Method, VocAgnoConfig, VocAgnoTrainer, prepare_dataset
from vocagnolm.conventions import IGNORED_LABEL

WARM_UP = 1
PRECISIONS = ("float32", "bfloat16")


def main() -> None:
    """Print the ratios of the times."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--student", type=Path, required=True, help="directory of a pretrained model")
    add("--corpus", type=Path, required=True, help="JSON Lines with the field `text`")
    add("--max_length", type=int, default=256)
    add("--rows", type=int, default=2, help="rows of a step")
    add("--turns", type=int, default=8)
    arguments = parser.parse_args()
    one_thread()
    datasets.disable_progress_bars()
    for method in (Method("cpt"), Method()):
        for precision in PRECISIONS:
            ratios = measure(arguments, method, precision)
            name = f"{method.method} in {precision}: ours / plain"
            sys.stdout.write(f"{name}{quartiles(ratios)}, {len(ratios)} turns\n")


def measure(arguments: argparse.Namespace, method: Method, precision: str) -> list[float]:
    """Return the ratio of the times of each turn."""
    with tempfile.TemporaryDirectory() as output:
        trainer, blocks = make_trainer(arguments, method, precision, output)
        loop = Loop(trainer)
        rows = arguments.rows

        def batch(turn: int) -> list[Any]:
            return [blocks[row] for row in range(turn * rows, (turn + 1) * rows)]

        ways = {
            "ours": Way(lambda given: take_step(trainer, trainer.data_collator(given)), batch),
            "plain": Way(loop.step, lambda turn: trainer.data_collator(batch(turn))),
        }
        take_turns(ways, arguments.turns, warm_up=WARM_UP)
    pairs = zip(ways["ours"].seconds, ways["plain"].seconds, strict=True)
    return [ours / plain for ours, plain in pairs]


def make_trainer(
    arguments: argparse.Namespace, method: Method, precision: str, output: str
) -> tuple[VocAgnoTrainer, Blocks]:
    """Make our trainer and the rows of all turns."""
    tokenizer = AutoTokenizer.from_pretrained(arguments.student)
    has_teacher = method.choice == "guided"
    count = arguments.rows * (arguments.turns + WARM_UP)
    blocks = prepare_dataset(
        datasets.Dataset.from_dict({"text": full_rows(arguments, tokenizer, count)}),
        *[tokenizer] * (1 + has_teacher),
        max_length=arguments.max_length,
        teacher_context=arguments.max_length,
    )
    assert len(blocks) == count, "a text is a row"
    model = AutoModelForCausalLM.from_pretrained(arguments.student, dtype=torch.float32)
    dtype = getattr(torch, precision)
    trainer = VocAgnoTrainer(
        model=model,
        teacher=copy.deepcopy(model).to(dtype) if has_teacher else None,
        method=method,
        args=VocAgnoConfig(
            **arguments_of_steps(output) | {"bf16": precision == "bfloat16"},
            max_length=arguments.max_length,
            per_device_train_batch_size=arguments.rows,
            gradient_accumulation_steps=1,
        ),
        train_dataset=blocks,
    )
    trainer.create_optimizer()
    trainer.model_wrapped = trainer.accelerator.prepare_model(trainer.model)
    return trainer, blocks


def full_rows(arguments: argparse.Namespace, tokenizer: Any, count: int) -> list[str]:
    """Return texts that fill a row each, with a start token and an end token."""
    lines = arguments.corpus.read_text(encoding="utf-8").splitlines()[:1000]
    ids = tokenizer("\n\n".join(json.loads(line)["text"] for line in lines))["input_ids"]
    width = arguments.max_length - 2
    texts: list[str] = []
    for start in range(0, len(ids), width):
        text = tokenizer.decode(ids[start : start + width])
        # A cut between the tokens of a character gives other tokens.
        if len(tokenizer(text)["input_ids"]) == width and len(texts) < count:
            texts.append(text)
    return texts


def take_step(trainer: VocAgnoTrainer, batch: Any) -> None:
    """Take one step of our trainer, as `train` does."""
    trainer.current_gradient_accumulation_steps = 1  # `train` sets it
    trainer.training_step(trainer.model_wrapped, batch, torch.tensor(batch_tokens(batch)))
    torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
    assert trainer.optimizer is not None
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()


def batch_tokens(batch: Any) -> float:
    """Return the tokens with a loss."""
    return float((batch["labels"] != IGNORED_LABEL).sum())


class Loop:
    """The plain loop, with models like a trainer's."""

    def __init__(self, trainer: VocAgnoTrainer):
        # A copy would keep the forward that the trainer has set.
        kind = type(trainer.model)
        self.model: Any = kind.from_pretrained(trainer.model.name_or_path, dtype=torch.float32)
        self.model.train()
        self.teachers = [
            kind.from_pretrained(model.name_or_path, dtype=model.dtype).eval()
            for model in trainer.online_teachers
        ]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True, lr=1e-5)
        is_mixed = trainer.args.bf16
        self.autocast = torch.autocast("cpu", torch.bfloat16) if is_mixed else nullcontext()

    def step(self, batch: Any) -> None:
        """Take one step."""
        rows = {"input_ids": batch["input_ids"], "labels": batch["labels"], "use_cache": False}
        for teacher in self.teachers:
            with torch.no_grad():
                teacher(**rows)
        with self.autocast:
            loss = self.model(**rows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


if __name__ == "__main__":
    main()
