"""A tiny student, teacher and corpus, in memory for trainers, and on disk for commands."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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
    "tokens_per_s mfu memory_allocated_gib "
    "memory_reserved_gib memory_resident_gib train_runtime train_samples_per_second "
    "train_steps_per_second eval_runtime eval_samples_per_second eval_steps_per_second "
    "eval_model_preparation_time"
).split()
# The student's tokenizer and the teacher's, as transformers has them.
Tokenizers = tuple[Any, Any]


# -- In memory -----------------------------------------------------------------------------------


def make_segments(
    texts: Sequence[str],
    student: PreTrainedTokenizerBase,
    *teachers: PreTrainedTokenizerBase,
    by_position: bool = False,
    max_length: int = MAX_LENGTH,
    context: int = TEACHER_CONTEXT,
    weights: Sequence[float] | None = None,
) -> Segments:
    """Align texts, and cut long ones. The corpus may bring a weight for each."""
    import datasets

    from vocagnolm.data import align_corpus
    from vocagnolm.readers import TeacherReaders, student_reader, teacher_reader

    columns: dict[str, Any] = {"text": list(texts)}
    if weights is not None:
        columns["weight"] = list(weights)
    corpus = datasets.Dataset.from_dict(columns)
    readers = [teacher_reader(teacher, context) for teacher in teachers]
    guide = TeacherReaders(readers, by_position) if readers else None
    return align_corpus(corpus, student_reader(student, max_length), guide)


def make_blocks(texts: Sequence[str], *tokenizers: PreTrainedTokenizerBase) -> Blocks:
    """Blocks of `MAX_LENGTH` student tokens, of the student's tokenizer and a teacher's."""
    from vocagnolm.packing import Blocks

    return Blocks(make_segments(texts, *tokenizers).rows, MAX_LENGTH, TEACHER_CONTEXT)


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

    settings: dict[str, Any] = {
        "max_length": MAX_LENGTH,
        "per_device_train_batch_size": 8,
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
        "disable_tqdm": True,
        "logging_nan_inf_filter": False,
        "use_cpu": True,
        "seed": 3,
        **training,
    }
    method = (options or {}).get("method")
    shares = getattr(method, "aggregation_in_effect", "") == "share"
    chunks = method.chunks if getattr(method, "method", "") == "chunk" else None
    collator = PackedCollator(settings["max_length"], shares=shares, chunks=chunks)
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


# -- On disk -------------------------------------------------------------------------------------


class World(NamedTuple):
    """Where a student, a teacher and pages lie. Runs are made below `root`."""

    root: Path
    student: Path
    teacher: Path
    pages: Path

    def rows(self) -> list[dict[str, Any]]:
        """The pages, as Python has them."""
        return [json.loads(line) for line in self.pages.read_text().splitlines()]

    def argv(self, name: str, **changes: str | Sequence[str] | None) -> list[str]:
        """A command line for 5 steps below `root`, with checkpoints at the 2nd and the 4th."""
        options: dict[str, str | Sequence[str] | None] = {
            "student": str(self.student),
            "teacher": str(self.teacher),
            "dataset": str(self.pages),
            "eval_fraction": "0.2",
            "max_length": "64",
            "global_batch_tokens": "512",
            "max_steps": "5",
            "save_steps": "2",
            "save_total_limit": "5",
            "learning_rate": "3e-3",
            "report_to": "none",
            "output_dir": str(self.root / name),
            **changes,
        }
        if "teacher_losses" in changes:
            options["teacher"] = None
        argv = []
        for option, values in options.items():
            if isinstance(values, str):
                argv.append(f"--{option}={values}")
            elif values is not None:
                argv += [f"--{option}", *values]
        return argv

    def train(self, name: str, **changes: str | Sequence[str] | None) -> dict[str, torch.Tensor]:
        """Run `vocagnolm train` on the CPU, and return the student's weights."""
        from safetensors.torch import load_file

        from vocagnolm.run import parser

        assert parser.main(self.argv(name, use_cpu="True", **changes)) == 0
        return load_file(self.root / name / "model.safetensors")

    def score(self, name: str = "store", **changes: str) -> Path:
        """Score the pages with the teacher, once for each name, and return the store."""
        from vocagnolm import __main__

        store = self.root / name
        options = {
            "teacher": str(self.teacher),
            "dataset": str(self.pages),
            "min_context": "16",
            "shard_documents": "16",
            "loss_dtype": "float32",
            "output_dir": str(store),
            **changes,
        }
        if not store.exists():
            argv = [f"--{option}={value}" for option, value in options.items()]
            assert __main__.main(["score", *argv]) == 0
        return store


def make_world(
    root: Path,
    tiny_llama: Callable[..., Any],
    tokenizer_dirs: dict[str, Path],
    texts: Sequence[str],
    **config: Any,
) -> World:
    """Make models with tokenizers of their own; `config` is the student's."""
    world = World(root, root / "student", root / "teacher", root / "pages.jsonl")
    save_model(world.student, tokenizer_dirs["metaspace"], tiny_llama(700, **config))
    save_model(world.teacher, tokenizer_dirs["nfc_digits"], tiny_llama(700, seed=1))
    write_pages(world.pages, texts)
    return world


def save_model(directory: Path, tokenizer: Path, model: Any) -> None:
    """Save a model with the tokenizer of a directory."""
    model.save_pretrained(directory)
    for file in tokenizer.glob("*token*.json"):
        shutil.copy(file, directory)


def write_pages(path: Path, texts: Sequence[str]) -> None:
    """Write texts as documents."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def assert_equal_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Check that two models have the same weights, bit for bit."""
    import torch

    assert one.keys() == other.keys()
    for name, weight in one.items():
        assert torch.equal(weight, other[name]), name


@pytest.fixture(scope="module")
def world(
    tokenizer_dirs: dict[str, Path],
    tiny_llama: Callable[..., Any],
    training_texts: list[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> World:
    """A world of 60 pages."""
    root = tmp_path_factory.mktemp("world")
    return make_world(root, tiny_llama, tokenizer_dirs, training_texts[:60])


@pytest.fixture(scope="session")
def talker(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_llama: Callable[..., Any],
    student_tokenizer: PreTrainedTokenizerBase,
) -> Path:
    """A saved model that answers every prompt differently; tests must not change it."""
    path = tmp_path_factory.mktemp("models") / "student"
    tiny_llama(len(student_tokenizer), initializer_range=0.5).save_pretrained(path)
    student_tokenizer.save_pretrained(path)
    return path
