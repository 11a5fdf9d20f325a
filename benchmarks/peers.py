"""Training steps of ours and of TRL's, on the same documents, models and student tokens.

    python -m benchmarks gold_uld_time    # prints all ways

A step is all of it: collating, both models' forward passes, backward, AdamW. Every way is a process
of its own; one runs at a time, on documents of a length that changes from turn to turn. Time is
processor time of one thread; memory is the most that a step adds to what is resident before it, in
turns of its own.
Models and stored losses are random, float32, with no clipping and no checkpointing.

TRL's GOLD takes byte-level tokenizers alone (it refuses those of Llama-2, TinyLlama and Mistral
v0.1: `NotImplementedError`), at least one word of prompt, and one document a row; ours and TRL's
SFT take the same documents as one packed row. ULD there is `cross-entropy + 0.5 ULD` as ours (Eq.
6), with `uld_token_merge_strategy="bayesian"`, whose logits predict the tokens that are compared;
its JSD is `beta=1`, the reverse KL of ours, without the cross-entropy that ours has.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, TrainingArguments
from transformers.utils import logging as transformers_logging

from benchmarks.experiments.training_steps import make_store
from benchmarks.generated import generate_texts, train_teacher
from benchmarks.harness import Measured, Skipped, Way, quartiles, take_turns_apart
from vocagnolm.collator import PackedCollator
from vocagnolm.conventions import IGNORED_LABEL
from vocagnolm.data import align_corpus
from vocagnolm.packing import Blocks
from vocagnolm.readers import student_reader, teacher_reader
from vocagnolm.store.reader import StoredReader
from vocagnolm.teacher import StoredTeacher
from vocagnolm.trainer import VocAgnoTrainer

SHARED = Path(__file__).resolve().parents[2] / "shared"
OURS = {"CPT": "cpt", "stored": "vocagnolm", "online": "vocagnolm", "ULD": "uld", "KLD": "kld"}
GOLD: dict[str, dict[str, Any]] = {
    "GOLD ULD": {
        "use_uld_loss": True,
        "uld_crossentropy_weight": 1.0,
        "uld_distillation_weight": 0.5,
        "uld_token_merge_strategy": "bayesian",
    },
    "GOLD JSD": {"use_uld_loss": False, "beta": 1.0},
}
SFT = "TRL SFT"
ROLES = ("student", "teacher")
WAYS = (*OURS, SFT, *GOLD)
ONE_VOCABULARY = ("KLD", "GOLD JSD")
RATIOS = {
    "online": ("online", "GOLD ULD"),
    "uld": ("ULD", "GOLD ULD"),
    "kld": ("KLD", "GOLD JSD"),
    "cpt": ("CPT", SFT),
}


@dataclass(frozen=True)
class Size:
    """Models, tokenizers and documents.

    Attributes:
        student: a directory of a byte-level tokenizer; "" trains one on the texts.
        teacher: as `student`.
        corpus: a JSON lines file with a `text`; "" generates texts.
        words: of the student's head, where its tokenizer has fewer.
        teacher_words: of the teacher's.
        lengths: student tokens of the documents of a turn, and `+-` a quarter.
        max_length: student tokens of a step.
        hidden: of the student; the teacher is twice as wide.
        turns: of each length.
    """

    student: str = str(SHARED / "tokenizers/gpt2")
    teacher: str = str(SHARED / "tokenizers/qwen2.5")
    corpus: str = str(SHARED / "data/corpora/math_train.jsonl")
    words: int = 0
    teacher_words: int = 152_064
    lengths: str = "80 200 480"
    max_length: int = 512
    hidden: int = 128
    layers: int = 4
    turns: int = 4

    @staticmethod
    def trained(words: int = 32_000, **others: Any) -> Size:
        """Tokenizers that are trained on the corpus, and heads of one size."""
        return Size(student="", teacher="", words=words, teacher_words=words, **others)

    @staticmethod
    def small() -> Size:
        """Short documents and two turns, in some minutes."""
        return Size(lengths="80 160", turns=2)

    @staticmethod
    def tiny() -> Size:
        """The same code with nothing to learn from it."""
        small = {"lengths": "40", "max_length": 64, "hidden": 64, "layers": 1, "turns": 1}
        return Size.trained(2000, corpus="", **small)

    @property
    def kinds(self) -> list[int]:
        """The lengths of documents."""
        return [int(length) for length in self.lengths.split()]


def need_trl() -> None:
    """Import TRL, for the processes that are forked from this one.

    Raises:
        Skipped: it is not installed.
    """
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    transformers_logging.set_verbosity_error()
    try:
        importlib.import_module("trl.experimental.gold")
        importlib.import_module("trl").SFTTrainer  # noqa: B018 - imported where it is asked for
    except ImportError:
        raise Skipped("it needs TRL: pip install -e '.[bench]'") from None


class Job:
    """The documents, read for every way; made anew in each way's process."""

    def __init__(self, size: Size, directory: Path):
        self.size, self.directory = size, directory
        self.tokenizers = [AutoTokenizer.from_pretrained(directory / role) for role in ROLES]
        self.turns: list[list[str]] = json.loads((directory / "turns.json").read_text())

    def model(self, words: int, scale: int) -> LlamaForCausalLM:
        """A random model, `scale` times as wide, with heads of 64."""
        hidden = self.size.hidden * scale
        torch.manual_seed(scale)
        config = LlamaConfig(
            vocab_size=words,
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=self.size.layers,
            num_attention_heads=hidden // 64,
            num_key_value_heads=hidden // 64,
            max_position_embeddings=8 * self.size.max_length,
        )
        return LlamaForCausalLM(config)

    def models(self, way: str) -> tuple[LlamaForCausalLM, LlamaForCausalLM | None]:
        """Student and, if there is one in the step, teacher."""
        words = self.size.words or len(self.tokenizers[0])
        if way in ("CPT", "stored", SFT):
            return self.model(words, 1), None
        theirs = words if way in ONE_VOCABULARY else self.size.teacher_words
        return self.model(words, 1), self.model(theirs, 2)

    def ours(self, way: str, **options: Any) -> VocAgnoTrainer:
        """Our trainer, with a block for each turn."""
        width = self.size.max_length
        student = student_reader(self.tokenizers[0], width)
        teacher: Any = teacher_reader(self.tokenizers[1], 3 * width)
        if way == "stored":
            store = Path(tempfile.mkdtemp(dir=self.directory))
            teacher = StoredReader([make_store(store, list(chain(*self.turns)), teacher)])
        guide = teacher if way in ("online", "stored", "ULD") else None
        theirs = 3 * width if guide else ()
        blocks = []
        for texts in self.turns:
            rows = align_corpus(datasets.Dataset.from_dict({"text": texts}), student, guide).rows
            (block,) = Blocks(rows, width, theirs)
            blocks.append(block)
        model, resident = self.models(way)
        return VocAgnoTrainer(
            model=model,
            teacher=StoredTeacher() if way == "stored" else resident,
            method=OURS[way],
            args=TrainingArguments(**self.arguments(**options)),
            train_dataset=blocks,
            data_collator=PackedCollator(width, teacher_max_length=theirs),
        )

    def theirs(self, way: str, **options: Any) -> Any:
        """TRL's trainer, with a row for each document."""
        import trl
        from trl.experimental import gold

        model, teacher = self.models(way)
        texts = list(chain(*self.turns))
        columns: dict[str, Any] = {"text": texts}
        given = self.arguments(bf16=False, gradient_checkpointing=False, **options)
        if way == SFT:
            # The documents of a step in one row, as ours; positions tell attention where they end.
            make, given = trl.SFTTrainer, given | {"padding_free": True, "max_length": None}
            arguments = trl.SFTConfig(**given)
        else:
            parts = [text.partition(" ") for text in texts]
            columns = {"prompt": [p[0] for p in parts], "completion": [p[1] + p[2] for p in parts]}
            given |= {"lmbda": 0.0, "max_length": self.size.max_length, "max_completion_length": 8}
            if way not in ONE_VOCABULARY:
                given["teacher_tokenizer_name_or_path"] = str(self.directory / "teacher")
            make = partial(gold.GOLDTrainer, teacher_model=teacher)
            arguments = gold.GOLDConfig(**given, **GOLD[way])
        return make(
            model=model,
            args=arguments,
            train_dataset=datasets.Dataset.from_dict(columns),
            processing_class=self.tokenizers[0],
        )

    def arguments(self, **options: Any) -> dict[str, Any]:
        """Settings that all trainers share."""
        given = {"output_dir": str(self.directory / "run"), "use_cpu": True, "report_to": "none"}
        return given | {"disable_tqdm": True, "save_strategy": "no", **options}


def make_way(way: str, size: Size, directory: Path) -> Way:
    """Make one way, in its process."""
    datasets.disable_progress_bars()
    job = Job(size, directory)
    trainer: Any = job.ours(way) if way in OURS else job.theirs(way)
    trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = 1  # set by `train`
    ends = list(accumulate(map(len, job.turns), initial=0))

    def rows(turn: int) -> list[Any]:
        numbers = [turn] if way in OURS else range(ends[turn], ends[turn + 1])
        return [trainer.train_dataset[number] for number in numbers]

    def step(rows: Any) -> None:
        batch = trainer.data_collator(rows)
        trainer.training_step(trainer.model, batch, (batch["labels"] != IGNORED_LABEL).sum())
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()

    return Way(step, rows)


def prepare(size: Size, directory: Path) -> None:
    """Write what every process reads: tokenizers, and the documents of each turn.

    Raises:
        Skipped: a file is missing, or TRL.
    """
    need_trl()
    given = (size.student, size.teacher, size.corpus)
    if missing := [path for path in given if path and not Path(path).exists()]:
        raise Skipped(f"it needs {missing[0]}: --set student=DIR teacher=DIR corpus=FILE.jsonl")
    if size.corpus:
        with Path(size.corpus).open(encoding="utf-8") as lines:
            texts = [json.loads(line)["text"] for line in lines]
    else:
        texts = [text[: 60 + n % 60] for n, text in enumerate(generate_texts(200))]
    texts = list(dict.fromkeys(text.strip() for text in texts))
    for role, path in zip(ROLES, given, strict=False):
        if path:
            tokenizer = AutoTokenizer.from_pretrained(path)
        else:
            tokenizer = train_teacher(texts, size.words - 2, single_digits=role == "teacher")
            tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
        tokenizer.pad_token = tokenizer.eos_token
        tokenizer.save_pretrained(directory / role)
    student = AutoTokenizer.from_pretrained(directory / "student")
    lengths = [len(ids) for ids in student(texts, verbose=False)["input_ids"]]
    turns: list[list[str]] = []
    waiting = {kind: fitting(texts, lengths, kind) for kind in size.kinds}
    for turn in range(1 + size.turns * len(size.kinds)):
        kind, left = size.kinds[turn % len(size.kinds)], size.max_length
        turns.append([])
        for text, tokens in waiting[kind]:
            left -= tokens + 2  # and its start and end
            turns[-1].append(text)
            if left < 1.06 * kind + 2:
                break
    (directory / "turns.json").write_text(json.dumps(turns))


def fitting(texts: list[str], lengths: list[int], kind: int) -> Iterator[tuple[str, int]]:
    """The documents of about a length, in an order that is drawn once."""
    pairs = [
        pair for pair in zip(texts, lengths, strict=True) if 0.8 * kind < pair[1] < 1.06 * kind
    ]
    random.Random(0).shuffle(pairs)
    return iter(pairs)


def make_makers(size: Size, directory: Path) -> dict[str, Callable[[], Way]]:
    """Prepare the documents, and a directory of its own for every way."""
    prepare(size, directory)
    found = {}
    for way in WAYS:
        (own := directory / way).mkdir()
        for item in (*ROLES, "turns.json"):
            (own / item).symlink_to(directory / item)
        found[way] = partial(make_way, way, size, own)
    return found


@cache
def measure_ways(size: Size) -> dict[str, Way]:
    """Let all ways take turns; once for each size, whatever claims ask."""
    with tempfile.TemporaryDirectory() as name:
        kinds = len(size.kinds)
        makers = make_makers(size, Path(name))
        return take_turns_apart(makers, size.turns * kinds, memory=kinds)


def ratio(size: Size, name: str, memory: bool = False) -> Measured:
    """Return the largest of a ratio's medians over the lengths of documents, and a table of all."""
    ways = measure_ways(size)
    wanted, found, kinds = "added_bytes" if memory else "seconds", 0.0, len(size.kinds)
    words = f"{size.words or 'its tokenizer'} words of the student, {size.teacher_words:,} of the"
    table = [f"{words} teacher, {size.max_length} tokens in a step"]
    # The first turn warms up, so that those kept begin with the second length.
    for index, kind in enumerate([*size.kinds[1:], size.kinds[0]]):
        table.append(f"documents of about {kind} tokens:")
        turns = {way: taken.every(kinds, index) for way, taken in ways.items()}
        table += [f"  {way:10}{taken.spread}{taken.added}" for way, taken in turns.items()]
        for pair, (a, b) in RATIOS.items():
            for what, title in (("seconds", "time"), ("added_bytes", "memory")):
                both = zip(*(getattr(turns[way], what) for way in (a, b)), strict=True)
                values = [x / y for x, y in both]
                if (pair, what) == (name, wanted):
                    found = max(found, statistics.median(values))
                table.append(f"  {a} / {b}, {title}: {quartiles(values)}")
    return Measured(found, tuple(table))
