"""What each of several gloo processes of one machine does: training, a command, or what is ours."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from accelerate import ParallelismConfig, PartialState
from accelerate.utils import DistributedType
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    TrainerCallback,
    TrainingArguments,
)

from benchmarks.estimates.cost_model import sent_bytes
from benchmarks.generated import generate_texts, train_student, train_teacher
from benchmarks.messages import Messages
from vocagnolm.collator import PackedCollator
from vocagnolm.data import align_corpus
from vocagnolm.dist import in_agreement
from vocagnolm.evaluation import main as evaluate_math
from vocagnolm.models.sharding import shard_inside_machine
from vocagnolm.packing import Blocks
from vocagnolm.readers import student_reader, teacher_reader
from vocagnolm.store import score
from vocagnolm.trainer import VocAgnoTrainer

CONTEXT, BLOCKS = 128, 2
SINGLE = "one process"
TEACHER = "in each machine"
REPETITIONS = 20


@dataclass(frozen=True)
class Job:
    """A training run: layout of student and teacher, processes, and micro-batches of a step."""

    layout: str = SINGLE
    teacher: str = "whole"
    processes: int = 1
    bf16: bool = False
    steps: int = 4
    accumulation: int = 2
    hidden: int = 128

    @property
    def node(self) -> int:
        """Processes of each of the two machines."""
        return max(1, self.processes // 2)

    @property
    def name(self) -> str:
        """What a row is called."""
        teacher = ", teacher sharded" if self.teacher == TEACHER else ""
        return f"{self.layout}{', bfloat16' if self.bf16 else ''}{teacher}"

    def expected_bytes(self, student: int, teacher: int) -> float:
        """Bytes that each process sends in a step by the formulas."""
        where = self.processes, self.node, self.accumulation
        sent = sum(sent_bytes(self.layout, student, 2 if self.bf16 else 4, *where))
        if self.teacher == TEACHER:
            sent += sum(sent_bytes(TEACHER, teacher, 4, *where))
        return sent


class PerStep(TrainerCallback):
    """Keep what was sent until the end of each step."""

    def __init__(self, messages: Messages):
        self.messages, self.sent = messages, list[float]()

    def on_step_end(self, *args: object, **kwargs: object) -> None:
        """Note the sum."""
        self.sent.append(self.messages.count.sent)


@dataclass
class World:
    """Blocks and tokenizers, made once and the same in every process."""

    directory: Path
    blocks: Blocks
    vocabularies: tuple[int, int]

    @staticmethod
    def make(directory: Path) -> World:
        """Write the models and the corpus of scoring and evaluation, and pack the blocks."""
        texts = list(dict.fromkeys(generate_texts(60)))
        tokenizers = train_student(texts), train_teacher(texts)
        for tokenizer in tokenizers:
            tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
        readers = student_reader(tokenizers[0], CONTEXT), teacher_reader(tokenizers[1], 2 * CONTEXT)
        aligned = align_corpus(datasets.Dataset.from_dict({"text": texts}), *readers)
        lines = (json.dumps({"text": text}) + "\n" for text in texts)
        (directory / "corpus.jsonl").write_text("".join(lines), encoding="utf-8")
        llama(len(tokenizers[1]), 64, 2048).save_pretrained(directory / "model")
        tokenizers[1].save_pretrained(directory / "model")
        sizes = len(tokenizers[0]), len(tokenizers[1])
        return World(directory, Blocks(aligned.rows, CONTEXT, 2 * CONTEXT), sizes)


def llama(vocabulary: int, hidden: int, context: int = 2 * CONTEXT) -> LlamaForCausalLM:
    """Make a random model of two layers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=-(-vocabulary // 64) * 64,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=2,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        max_position_embeddings=context,
        initializer_range=0.1,
    )
    return LlamaForCausalLM(config)


def make_trainer(world: World, job: Job, out: Path, callbacks: Sequence[Any] = ()) -> Any:
    """Make the trainer of a job in this process."""
    sharding: dict[str, Any] = {"use_cpu": True}
    if job.layout in ("FSDP2", "HSDP"):
        _let_fsdp_run_on_a_cpu()
        config = {"version": 2, "reshard_after_forward": False}
        sharding = {"fsdp": True, "fsdp_config": config, "bf16": job.bf16}
    if job.layout == "HSDP":
        sharding["parallelism_config"] = ParallelismConfig(
            dp_replicate_size=job.processes // job.node, dp_shard_size=job.node
        )
    arguments = TrainingArguments(
        output_dir=str(out),
        per_device_train_batch_size=BLOCKS,
        gradient_accumulation_steps=job.accumulation,
        max_steps=job.steps,
        # Adam would hide a loss that is scaled wrongly, and so would clipping.
        optim="sgd",
        learning_rate=0.1,
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        ddp_find_unused_parameters=False,
        seed=3,
        **sharding,
    )
    teacher: PreTrainedModel = llama(world.vocabularies[1], 2 * job.hidden)
    if job.teacher == TEACHER:
        teacher = shard_inside_machine(teacher, torch.device("cpu"))
    return VocAgnoTrainer(
        model=llama(world.vocabularies[0], job.hidden),
        teacher=teacher,
        args=arguments,
        train_dataset=world.blocks,
        data_collator=PackedCollator(CONTEXT, teacher_max_length=2 * CONTEXT),
        callbacks=list(callbacks),
    )


def _let_fsdp_run_on_a_cpu() -> None:
    # Accelerate would fall back to DDP by itself.
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    module: Any = transformers.training_args
    module.is_torch_bf16_gpu_available = lambda: True
    state: Any = PartialState
    state._prepare_backend = lambda self, *given, **named: ("gloo", DistributedType.MULTI_GPU)


def train(world: World, job: Job, out: Path) -> None:
    """Train; the first process writes the weights, and what it sent in a step."""
    messages = Messages()
    per_step = PerStep(messages)
    with messages:
        trainer = make_trainer(world, job, out, [per_step])
        trainer.train()
    sent = per_step.sent
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if trainer.accelerator.is_main_process:
        weights = {name: value.float().clone() for name, value in state.items()}
        torch.save(weights, out / "weights.pt")
        frozen = sum(p.numel() for p in trainer.teacher.models[0].parameters())
        report = {"bytes": (sent[-1] - sent[0]) / max(1, len(sent) - 1), "teacher": frozen}
        (out / "report.json").write_text(json.dumps(report))


def run_command(world: World, name: str, out: Path) -> None:
    """Score or evaluate; every process writes what it sent."""
    model, result = str(world.directory / "model"), str(out / "result")
    argv = ["--model", model, "--benchmarks", "demo", "--limit", "24", "--output_dir", result]
    main: Callable[[Sequence[str]], int] = evaluate_math.main
    if name == "scoring":
        corpus = str(world.directory / "corpus.jsonl")
        argv = ["--teacher", model, "--dataset", corpus, "--output_dir", result]
        argv += ["--context", "256", "--min_context", "32", "--shard_documents", "4"]
        main = score.main
    with Messages() as messages:
        status = main(argv)
    assert status == 0, f"{name} ended with {status}"
    rank = os.environ["RANK"]
    (out / f"sent{rank}.json").write_text(json.dumps(asdict(messages.count)))


def measure_ours(world: World, job: Job, out: Path) -> None:
    """Measure what every process does beside the model's arithmetic."""
    trainer = make_trainer(world, job, out)
    trainer.train()
    rows = [world.blocks[number] for number in range(BLOCKS)]
    count = torch.tensor(1)
    over = trainer.accelerator.reduce, job.processes
    trainer.state.global_step = 9

    def agree() -> None:
        with in_agreement():
            pass

    parts: dict[str, Callable[[], object]] = {
        "collating a micro-batch": lambda: trainer.data_collator(rows),
        "the divisor of a step": lambda: trainer.accelerator.reduce(count, "sum"),
        "agreement on an update": lambda: trainer.reduce_max(torch.zeros(2)),
        "the metrics of a log": lambda: trainer.metrics.read(*over),
        "the rates of a log": lambda: trainer.throughput._gather(torch.zeros(1, 12)),
        "an agreement on errors": agree,
        "a checkpoint": lambda: trainer._save_checkpoint(trainer.model, None),
    }
    found = {}
    for name, part in parts.items():
        times = 2 if part is parts["a checkpoint"] else REPETITIONS
        part()
        trainer.accelerator.wait_for_everyone()
        start_s = time.process_time()
        with Messages() as messages:
            for _ in range(times):
                part()
        seconds, sent = time.process_time() - start_s, messages.count
        found[name] = {"sent": sent.sent / times, "ms": 1e3 * seconds / times}
    (out / f"ours{os.environ['RANK']}.json").write_text(json.dumps(found))


def launch(work: Callable[..., None], world: World, job: Any, processes: int) -> Path:
    """Do some work in so many processes of a gloo job, to its end; the directory they wrote to."""
    out = Path(tempfile.mkdtemp(dir=world.directory))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Forked, with everything imported and the world made.
    context = multiprocessing.get_context("fork")
    children = [
        context.Process(target=_be, args=(work, world, job, out, rank, processes, port))
        for rank in range(processes)
    ]
    for child in children:
        child.start()
    while any(child.is_alive() for child in children):
        if any(child.exitcode for child in children):
            for child in children:
                child.kill()
        time.sleep(0.05)
    if any(child.exitcode for child in children):
        raise SystemExit(f"{work.__name__} of {job} failed: see above")
    return out


def _be(
    work: Callable[..., None],
    world: World,
    job: Any,
    out: Path,
    rank: int,
    processes: int,
    port: int,
) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank)}
    os.environ |= {"LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
    os.environ["LOCAL_WORLD_SIZE"] = str(max(1, processes // 2))
    sys.stdout = (out / f"out{rank}").open("w")
    work(world, job, out)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    sys.stdout.flush()
    # Gloo's threads sometimes abort at an orderly exit.
    os._exit(0)
