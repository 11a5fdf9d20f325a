"""`make test-gpu`: the numbers, waits, memory and messages of a GPU.

It needs an Ampere GPU or a newer one, with 16 GB. Without a GPU the tests of numbers compare
bfloat16 and every attention with float32 and sdpa on the CPU, on tiny models, so that on a GPU only
the device is new. Tests of waits, memory and NCCL are not collected then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import TrainingArguments

GPUS = torch.cuda.device_count()
collect_ignore = [] if GPUS else ["test_memory.py", "test_processes.py", "test_waits.py"]


@pytest.fixture(scope="session", autouse=True)
def one_gpu() -> Iterator[None]:
    """Let Trainer use one GPU, as it would spread a batch over all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingArguments, "n_gpu", 1)
        yield


@pytest.fixture(scope="session")
def device() -> torch.device:
    """A GPU if there is one, else the CPU."""
    return torch.device("cuda" if GPUS else "cpu")


@pytest.fixture(scope="session")
def world(
    training_texts: list[str],
    student_tokenizer: Any,
    teacher_tokenizer: Any,
    tiny_llama: Callable[..., Any],
) -> Any:
    """Packed sequences that span several blocks of a GPU kernel; tiny ones on the CPU."""
    from methods_world import World

    sizes = {"hidden_size": 128, "intermediate_size": 352} if GPUS else {"hidden_size": 64}
    # Otherwise all losses would be near log(vocabulary).
    sizes |= {"initializer_range": 0.1, "max_position_embeddings": 1024}
    ours, theirs = student_tokenizer, teacher_tokenizer
    models = [
        tiny_llama(len(tokenizer), seed=seed, **sizes)
        for seed, tokenizer in enumerate((ours, theirs, ours))
    ]
    length, together = (512, 8) if GPUS else (64, 1)
    texts = [
        "\n\n".join(training_texts[n : n + together]) for n in range(0, 16 * together, together)
    ]
    return World(texts, (ours, theirs), models, length, 2 * length)


@pytest.fixture(scope="session")
def make(world: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """`make(method, device, bf16, attention)`: a trainer at its first step, and a micro-batch."""
    from benchmarks.models import prepare

    def build(method: str, device: torch.device, bf16: bool = True, attention: str = "sdpa") -> Any:
        for model in (world.student, world.teacher, world.reference):
            model.config._attn_implementation = attention
        options = {"bf16": bf16, "use_cpu": device.type == "cpu"}
        trainer = prepare(world.trainer(tmp_path_factory.mktemp("out"), method, **options))
        for teacher in trainer.online_teachers:
            teacher.to(torch.bfloat16 if bf16 else torch.float32)
        blocks = trainer.train_dataset
        # Conversations fill only two blocks of a GPU's size, so blocks repeat.
        return trainer, trainer.data_collator([blocks[n % len(blocks)] for n in range(4)])

    return build
