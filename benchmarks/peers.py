"""TRL's trainers as the claims use them, and a training step for any trainer."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import datasets
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from benchmarks.harness import Skipped
from vocagnolm.conventions import IGNORED_LABEL

SFT = "TRL SFT"
# GOLD is an experimental trainer of TRL that compares whole distributions.
GOLD_ULD, GOLD_JSD = "GOLD ULD", "GOLD JSD"
GOLD: dict[str, dict[str, Any]] = {
    GOLD_ULD: {
        "use_uld_loss": True,
        "uld_crossentropy_weight": 1.0,
        "uld_distillation_weight": 0.5,
        "uld_token_merge_strategy": "bayesian",
    },
    GOLD_JSD: {"use_uld_loss": False, "beta": 1.0},
}


def require_trl() -> None:
    """Import TRL for the processes that are forked from this one.

    Raises:
        Skipped: TRL is not installed.
    """
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    transformers_logging.set_verbosity_error()
    try:
        importlib.import_module("trl.experimental.gold")
        importlib.import_module("trl").SFTTrainer  # noqa: B018 - TRL imports it on first access
    except ImportError:
        raise Skipped("it needs TRL: pip install -e '.[bench]'") from None


def arguments_of_steps(output_dir: str) -> dict[str, Any]:
    """Return the arguments that our trainer and TRL's have in common."""
    return {
        "output_dir": output_dir,
        "use_cpu": True,
        # TRL defaults to bfloat16 on any machine. Our default depends on the processor.
        "bf16": False,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
    }


def make_sft(
    model: Any, texts: Sequence[str], tokenizer: Any, arguments: dict[str, Any], padding_free: bool
) -> Any:
    """Make TRL's SFT trainer, with one row per text or, if `padding_free`, one row for all."""
    import trl

    config = trl.SFTConfig(
        **arguments,
        gradient_checkpointing=False,
        padding_free=padding_free,
        max_length=None,
    )
    return _trainer(trl.SFTTrainer, config, model, {"text": list(texts)}, tokenizer)


def make_gold(
    way: str,
    model: Any,
    teacher: Any,
    texts: Sequence[str],
    tokenizer: Any,
    teacher_tokenizer: str | None,
    max_length: int,
    arguments: dict[str, Any],
) -> Any:
    """Make TRL's GOLD trainer, with one row per text. The first word of a text is the prompt.

    `teacher_tokenizer` is a directory, or None if both models have one vocabulary. GOLD aligns
    tokens only if the tokenizer is byte-level. Otherwise it compares tokens with the same index.
    """
    from trl.experimental import gold
    from trl.experimental.utils import is_byte_level_tokenizer

    parts = [text.partition(" ") for text in texts]
    columns = {"prompt": [p[0] for p in parts], "completion": [p[1] + p[2] for p in parts]}
    more: dict[str, Any] = {}
    if teacher_tokenizer:
        more["teacher_tokenizer_name_or_path"] = teacher_tokenizer
        backend = AutoTokenizer.from_pretrained(teacher_tokenizer).backend_tokenizer
        more["use_extended_uld"] = is_byte_level_tokenizer(backend)
    config = gold.GOLDConfig(
        **arguments,
        gradient_checkpointing=False,
        lmbda=0.0,
        max_length=max_length,
        max_completion_length=8,
        **more,
        **GOLD[way],
    )
    make = partial(gold.GOLDTrainer, teacher_model=teacher)
    return _trainer(make, config, model, columns, tokenizer)


def _trainer(make: Any, config: Any, model: Any, columns: dict[str, list[str]], reader: Any) -> Any:
    dataset = datasets.Dataset.from_dict(columns)
    return make(model=model, args=config, train_dataset=dataset, processing_class=reader)


def take_step(trainer: Any, batch: Any) -> None:
    """Take an optimizer step on one micro-batch, as `train` does, but without clipping."""
    trainer.current_gradient_accumulation_steps = 1  # `train` sets it
    trainer.training_step(trainer.model, batch, (batch["labels"] != IGNORED_LABEL).sum())
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
