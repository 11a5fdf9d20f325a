"""A tiny world for trainer tests: aligned blocks and two random models, made the same anywhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

# Every test loads this file. Slow imports are where they are used, so that a single test starts at
# once.
if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from vocagnolm.data import Segments
    from vocagnolm.packing import Blocks
    from vocagnolm.trainer import VocAgnoTrainer

MAX_LENGTH = 48
TEACHER_CONTEXT = 128
# Values of a log that depend on the clock and the machine.
TIMING_KEYS = (
    "tokens_per_s student_mfu teacher_mfu teacher_time_fraction memory_allocated_gib "
    "memory_reserved_gib memory_resident_gib train_runtime train_samples_per_second "
    "train_steps_per_second eval_runtime eval_samples_per_second eval_steps_per_second "
    "eval_model_preparation_time"
).split()
# The student's tokenizer and the teacher's, as transformers has them.
Tokenizers = tuple[Any, Any]


def make_segments(
    texts: list[str], student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase
) -> Segments:
    """Align texts, and cut long ones."""
    import datasets

    from vocagnolm.data import align_corpus
    from vocagnolm.readers import student_reader, teacher_reader

    corpus = datasets.Dataset.from_dict({"text": texts})
    return align_corpus(
        corpus, student_reader(student, MAX_LENGTH), teacher_reader(teacher, TEACHER_CONTEXT)
    )


def make_blocks(
    texts: list[str], student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase
) -> Blocks:
    """Blocks of `MAX_LENGTH` student tokens."""
    from vocagnolm.packing import Blocks

    return Blocks(make_segments(texts, student, teacher).rows, MAX_LENGTH, TEACHER_CONTEXT)


def make_models(
    tiny_llama: Callable[..., Any],
    student: PreTrainedTokenizerBase,
    teacher: PreTrainedTokenizerBase,
) -> tuple[Any, Any]:
    """A student and a teacher in float64, so that only mistakes are larger than rounding."""
    import torch

    models = [tiny_llama(len(tok), seed=seed) for seed, tok in enumerate((student, teacher))]
    for model in models:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(5)  # losses far from uniform
        model.double()
    return models[0], models[1]


@pytest.fixture(scope="session")
def tokenizers(
    student_tokenizer: PreTrainedTokenizerBase, teacher_tokenizer: PreTrainedTokenizerBase
) -> Tokenizers:
    """The student's and the teacher's."""
    return student_tokenizer, teacher_tokenizer


@pytest.fixture(scope="session")
def blocks(training_texts: list[str], tokenizers: Tokenizers) -> Blocks:
    """Blocks of 59 texts: no whole number of batches of 8."""
    return make_blocks(training_texts[:59], *tokenizers)


@pytest.fixture
def pair(tiny_llama: Callable[..., Any], tokenizers: Tokenizers) -> tuple[Any, Any]:
    """A student and a teacher."""
    return make_models(tiny_llama, *tokenizers)


def make_trainer(
    output_dir: Path | str,
    blocks: Blocks,
    student: Any,
    teacher: Any = None,
    *,
    options: dict[str, Any] | None = None,
    **training: Any,
) -> VocAgnoTrainer:
    """A trainer that runs 3 steps of 8 blocks on the CPU, unless told otherwise."""
    from vocagnolm.collator import PackedCollator
    from vocagnolm.trainer import VocAgnoTrainer
    from vocagnolm.training.config import VocAgnoConfig

    settings = {
        "max_length": MAX_LENGTH,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "max_steps": 3,
        # Adam and clipping would hide a wrongly scaled loss.
        "optim": "sgd",
        "learning_rate": 3e-3,
        "max_grad_norm": 0.0,
        "weight_decay": 0.0,
        "lr_scheduler_type": "linear",
        "logging_first_step": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "save_total_limit": None,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_nan_inf_filter": False,
        "ddp_find_unused_parameters": False,
        "use_cpu": True,
        "seed": 3,
        **training,
    }
    shares = getattr((options or {}).get("method"), "aggregation_in_effect", "") == "share"
    collator = PackedCollator(MAX_LENGTH, shares=shares)
    return VocAgnoTrainer(
        model=student,
        args=VocAgnoConfig(output_dir=str(output_dir), **settings),
        train_dataset=blocks,
        **{"teacher": teacher, "data_collator": collator, **(options or {})},
    )


def outcome(trainer: Any) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """The weights of a run, and its log without times."""
    weights = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    logs = [
        {name: value for name, value in entry.items() if name not in TIMING_KEYS}
        for entry in trainer.state.log_history
    ]
    return weights, logs


def assert_same(one: Any, other: Any) -> None:
    """Check that two outcomes are equal, bit for bit."""
    import torch

    assert one[1] == other[1]
    for name, weight in one[0].items():
        assert torch.equal(weight, other[0][name]), name
