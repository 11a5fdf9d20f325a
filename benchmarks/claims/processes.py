"""Train, score and evaluate with eight gloo processes and with one, and compare what they write.

The processes play two machines, each with half of them. A tiny student trains with its teacher in
memory under DDP, DDP with the teacher sharded within each machine, FSDP2, and HSDP (sharded within
a machine, replicated across machines). The optimizer is SGD, because Adam would hide a wrongly
scaled loss. The processes are forked from one that has imported everything.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from accelerate import ParallelismConfig
from torch import Tensor

from benchmarks.generated import make_texts, tokenizer
from benchmarks.harness import Claim, Measured, alone, one_thread
from benchmarks.models import allow_fsdp_on_cpu, llama
from vocagnolm import Blocks, VocAgnoConfig, VocAgnoTrainer, prepare_dataset
from vocagnolm.__main__ import main as vocagnolm
from vocagnolm.models.sharding import shard_inside_machine

CLAIMS = (
    Claim("weights", "eight processes end with the weights of one", at_most=1e-5, unit="apart"),
    Claim("files", "and write the store and the answers of one", at_most=0, unit="others"),
)
CONTEXT, BATCH, ACCUMULATION = 128, 2, 2
LAYOUTS = ("DDP", "DDP, teacher sharded", "FSDP2", "HSDP")


@dataclass(frozen=True)
class Size:
    """The number of processes, which must be even, and what they train."""

    processes: int = 8
    steps: int = 2
    hidden: int = 128


FULL, TINY = Size(), Size(processes=2, hidden=64)


@dataclass
class World:
    """Inputs of all processes, which are made once."""

    directory: Path
    size: Size
    blocks: Blocks
    vocabularies: tuple[int, int]


def measure(size: Size) -> Measured:
    """Return how far the weights differ, and how many files do."""
    return alone(compare, size)  # a process that has computed anything cannot be forked


def compare(size: Size) -> Measured:
    """Run everything with one process and with several, and compare the results."""
    one_thread()
    transformers.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as directory:
        world = make_world(Path(directory), size)
        apart = compare_weights(world)
        others = compare_files(world)
    details = [f"{layout:22}{largest:.1e} apart" for layout, largest in apart.items()]
    details += [f"{name:22}{count} files differ" for name, count in others.items()]
    values = {"weights": max(apart.values()), "files": float(sum(others.values()))}
    return Measured(values, details)


def make_world(directory: Path, size: Size) -> World:
    """Write the model and the corpus for scoring and evaluation, and pack the training data."""
    texts = make_texts(60, characters=1000)
    tokenizers = tokenizer("tiny-llama"), tokenizer("tiny-qwen")
    blocks = prepare_dataset(
        datasets.Dataset.from_dict({"text": texts}),
        *tokenizers,
        max_length=CONTEXT,
        teacher_context=2 * CONTEXT,
    )
    lines = (json.dumps({"text": text}) + "\n" for text in texts)
    (directory / "corpus.jsonl").write_text("".join(lines), encoding="utf-8")
    make_model(len(tokenizers[1]), 64, 2048).save_pretrained(directory / "model")
    tokenizers[1].save_pretrained(directory / "model")
    return World(directory, size, blocks, (len(tokenizers[0]), len(tokenizers[1])))


def make_model(vocabulary: int, hidden: int, context: int = 2 * CONTEXT) -> Any:
    """Make a random model with two layers."""
    torch.manual_seed(0)
    options = {"max_position_embeddings": context, "initializer_range": 0.1}
    return llama(-(-vocabulary // 64) * 64, hidden, 2, hidden // 32, **options)


def compare_weights(world: World) -> dict[str, float]:
    """Train in every layout, and return its largest difference from one process's weights."""
    processes = world.size.processes
    one = launch(partial(train, world, "alone", ACCUMULATION * processes), world, 1)
    reference = torch.load(one / "weights.pt")
    start = dict(make_model(world.vocabularies[0], world.size.hidden).named_parameters())
    assert _apart(start, reference) > 1e-3, "nothing is learned"
    found = {}
    for layout in LAYOUTS if processes > 2 else LAYOUTS[::2]:
        out = launch(partial(train, world, layout, ACCUMULATION), world, processes)
        found[layout] = _apart(torch.load(out / "weights.pt"), reference)
    return found


def _apart(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    return max((one[name] - other[name]).abs().max().item() for name in other)


def train(world: World, layout: str, accumulation: int, out: Path) -> None:
    """Train; the first process writes the weights."""
    size, sharding = world.size, dict[str, Any](use_cpu=True)
    if layout in ("FSDP2", "HSDP"):
        allow_fsdp_on_cpu()
        sharding = {"fsdp": True, "fsdp_config": {"version": 2, "reshard_after_forward": False}}
    if layout == "HSDP":
        sharding["parallelism_config"] = ParallelismConfig(
            dp_replicate_size=2, dp_shard_size=size.processes // 2
        )
    arguments = VocAgnoConfig(
        output_dir=str(out),
        bf16=False,
        max_length=world.blocks.max_length,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=accumulation,
        max_steps=size.steps,
        optim="sgd",
        learning_rate=0.1,
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        ddp_find_unused_parameters=False,
        seed=3,
        **sharding,
    )
    teacher = make_model(world.vocabularies[1], 2 * size.hidden)
    if layout == "DDP, teacher sharded":
        teacher = shard_inside_machine(teacher, torch.device("cpu"))
    trainer = VocAgnoTrainer(
        model=make_model(world.vocabularies[0], size.hidden),
        teacher=teacher,
        args=arguments,
        train_dataset=world.blocks,
    )
    trainer.train()
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if trainer.accelerator.is_main_process:
        weights = {name: value.float().clone() for name, value in state.items()}
        torch.save(weights, out / "weights.pt")


def compare_files(world: World) -> dict[str, int]:
    """Score and evaluate, and return how many files differ from one process's."""
    model, corpus = str(world.directory / "model"), str(world.directory / "corpus.jsonl")
    scoring = ["score", "--teacher", model, "--dataset", corpus, "--context", "256"]
    scoring += ["--min_context", "32", "--shard_documents", "4"]
    # In bfloat16, rounding depends on how many rows a process has, and so do some texts.
    evaluation = ["evaluate", "--model", model, "--benchmarks", "demo", "--limit", "24"]
    evaluation += ["--dtype", "float32"]
    found = {}
    for argv, pattern in ((scoring, "*.arrow"), (evaluation, "*.jsonl")):
        written = []
        for processes in (1, world.size.processes):
            out = launch(partial(run_command, argv), world, processes)
            files = sorted((out / "result").glob(pattern))
            assert files, f"{argv[0]} has written no {pattern}"
            written.append({file.name: file.read_bytes() for file in files})
        one, several = written
        found[argv[0]] = sum(one.get(name) != several.get(name) for name in {*one, *several})
    return found


def run_command(argv: list[str], out: Path) -> None:
    """Run a command of `vocagnolm`."""
    status = vocagnolm([*argv, "--output_dir", str(out / "result")])
    assert not status, f"{argv[0]} ended with {status}"


def launch(work: Callable[[Path], None], world: World, processes: int) -> Path:
    """Run some work in several gloo processes, and return the directory that they wrote to."""
    out = Path(tempfile.mkdtemp(dir=world.directory))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    job["LOCAL_WORLD_SIZE"] = str(max(1, processes // 2))
    torch.multiprocessing.start_processes(
        _be, args=(work, out, job), nprocs=processes, start_method="fork"
    )
    return out


def _be(rank: int, work: Callable[[Path], None], out: Path, job: dict[str, str]) -> None:
    os.environ |= job | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    sys.stdout = (out / f"{rank}.out").open("w")
    work(out)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    sys.stdout.flush()
    # Gloo's threads sometimes abort when a process exits normally.
    os._exit(0)
