"""Several processes as one: the same weights, losses and verdicts, and what they send each other.

    python -m benchmarks.experiments.eight_processes            # 8 gloo processes on this CPU
    python -m benchmarks.experiments.eight_processes --processes 2 --steps 2 --ours 1 2

Processes of one machine play two machines of half of them each. A tiny student is trained online
under DDP, FSDP2 and, from 4 processes on, HSDP (sharded within a machine, replicated between them),
and beside a teacher that is sharded in each machine. Bytes are those of the collective operations
that a process takes part in, sent in a ring; `cost_model.sent_bytes` has the formulas of
docs/scaling.md. gloo itself may send others. Last comes what is ours, by the number of processes.
The exit status is 1 where float32 weights differ by more than 1e-5, bytes by more than 5 %, or a
store or an evaluation at all.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from accelerate import ParallelismConfig, PartialState
from accelerate.utils import DistributedType
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    TrainerCallback,
    TrainingArguments,
)

from benchmarks.estimates.cost_model import sent_bytes
from benchmarks.generated import generate_texts, train_student, train_teacher
from benchmarks.harness import alone, one_thread
from benchmarks.messages import Messages
from vocagnolm.cli import score
from vocagnolm.collator import PackedCollator
from vocagnolm.data import align_corpus
from vocagnolm.evaluation import main as evaluate_math
from vocagnolm.host.processes import in_agreement
from vocagnolm.host.tables import markdown_table
from vocagnolm.models.sharding import shard_inside_machine
from vocagnolm.packing import Blocks
from vocagnolm.readers import student_reader, teacher_reader
from vocagnolm.trainer import VocAgnoTrainer

CONTEXT, BLOCKS = 128, 2
MOST_APART, MOST_OFF = 1e-5, 0.05
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


# -- What a process does -----------------------------------------------------------------------


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


# -- What is compared --------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """Processes, an even number, and what they train; numbers of processes to measure ours with."""

    processes: int = 8
    steps: int = 4
    hidden: int = 256
    ours: tuple[int, ...] = ()


@dataclass
class Compared:
    """Tables, the largest share by which bytes are off, and what differs at all."""

    tables: list[list[list[str]]]
    off: float = 0.0
    broken: str = ""

    @property
    def holds(self) -> bool:
        """True if several processes are as one."""
        return self.off <= MOST_OFF and not self.broken


def compare(size: Size) -> Compared:
    """Run everything, in a process that has computed nothing: one that has cannot be forked."""
    one_thread()
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    datasets.disable_progress_bars()
    base = Job(processes=size.processes, steps=size.steps, hidden=size.hidden)
    found = Compared([])
    with tempfile.TemporaryDirectory() as directory:
        world = World.make(Path(directory))
        compare_training(world, base, found)
        compare_commands(world, size.processes, found)
        if size.ours:
            found.tables.append(ours_by_processes(world, base, size.ours))
    return found


def compare_training(world: World, base: Job, found: Compared) -> None:
    """Train in every layout."""
    accumulation = base.accumulation * base.processes
    single = replace(base, processes=1, accumulation=accumulation)
    reference = torch.load(launch(train, world, single, 1) / "weights.pt")
    start = dict(llama(world.vocabularies[0], base.hidden).named_parameters())
    assert _apart(start, reference) > 100 * MOST_APART, "nothing is learned"
    jobs = [replace(base, layout="DDP")]
    jobs += [replace(base, layout="FSDP2", bf16=bf16) for bf16 in (False, True)]
    if base.node > 1:
        jobs += [replace(base, layout="DDP", teacher=TEACHER)]
        jobs += [replace(base, layout="HSDP", bf16=bf16) for bf16 in (False, True)]
    rows = [["layout", "weights apart", "bytes per step", "by the formula", "off"]]
    for job in jobs:
        out = launch(train, world, job, job.processes)
        apart = _apart(torch.load(out / "weights.pt"), reference)
        if apart > MOST_APART and not job.bf16:
            found.broken += f"({job.name}: weights {apart:.1e} apart)"
        report = json.loads((out / "report.json").read_text())
        parameters = sum(value.numel() for value in reference.values())
        expected = job.expected_bytes(parameters, report["teacher"])
        off = report["bytes"] / expected - 1
        found.off = max(found.off, abs(off))
        cells = (f"{apart:.1e}", f"{report['bytes']:,.0f}", f"{expected:,.0f}", f"{off:+.2%}")
        rows.append([job.name, *cells])
    found.tables.append(rows)


def _apart(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    return max((one[name] - other[name]).abs().max().item() for name in other)


def compare_commands(world: World, processes: int, found: Compared) -> None:
    """Score and evaluate with one process and with several."""
    rows = [["command", "same files", "files", "operations", "bytes"]]
    for name, suffix in (("scoring", ".arrow"), ("evaluation", ".jsonl")):
        written = []
        for count in (1, processes):
            out = launch(run_command, world, name, count)
            files = sorted((out / "result").glob(f"*{suffix}"))
            assert files, f"{name} has written no {suffix}"
            written.append([(file.name, file.read_bytes()) for file in files])
        same = written[0] == written[1]
        if not same:
            found.broken += f"({name}: other files)"
        sent = [json.loads(file.read_text()) for file in out.glob("sent*.json")]
        most = max(each["sent"] for each in sent)
        calls = str(max(each["calls"] for each in sent))
        rows.append([name, "yes" if same else "NO", str(len(written[0])), calls, f"{most:,.0f}"])
    found.tables.append(rows)


def ours_by_processes(world: World, base: Job, counts: Sequence[int]) -> list[list[str]]:
    """Measure what is ours for each number of processes; rows of the table."""
    found = []
    for count in counts:
        layout = "DDP" if count > 1 else SINGLE
        out = launch(measure_ours, world, replace(base, layout=layout, processes=count), count)
        ranks = [json.loads(file.read_text()) for file in out.glob("ours*.json")]
        found.append({p: {k: max(r[p][k] for r in ranks) for k in ranks[0][p]} for p in ranks[0]})
    rows = [["what is ours", *map(str, counts)]]
    for part in found[0]:
        for kind, unit in (("sent", "bytes"), ("ms", "ms")):
            values = [each[part][kind] for each in found]
            if any(values):
                shown = [f"{value:,.0f}" if kind == "sent" else f"{value:.2f}" for value in values]
                rows.append([f"{part}: {unit}", *shown])
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run and compare everything, print the tables, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--processes", type=int, default=8, help="an even number")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256, help="width of the student")
    parser.add_argument("--ours", type=int, nargs="*", default=[1, 2, 4, 8], metavar="PROCESSES")
    given = parser.parse_args(argv)
    size = Size(given.processes, given.steps, given.hidden, tuple(given.ours))
    compared = alone(compare, size)
    for table in compared.tables:
        sys.stdout.write(markdown_table(table) + "\n\n")
    sys.stdout.write(compared.broken + "\n")
    return int(not compared.holds)


if __name__ == "__main__":
    sys.exit(main())
