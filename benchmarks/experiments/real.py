r"""Compare the rules on pretrained models and pages of mathematics.

    python -m benchmarks.experiments.real --output_dir runs/real --student SmolLM2-135M \
        --teacher Qwen2.5-Coder-1.5B --corpora DIRECTORY

Run in the repository's root. A pretrained student continues its pretraining on the pages of
`real_pages`. All runs of a seed have the same pages in the same order. The teacher reads every page
only once, even if several worlds have it. A finished run is a line of
`benchmarks/experiments/real.jsonl` and is not repeated. The same command resumes an interrupted
run, also of the teacher. Processes with different seeds, worlds or rules may run side by side.
`real_results` makes the tables.

Models are judged by nats per character on held-out clean text, on four kinds of general text
(`pool_texts.json`) and, with `--answers N`, by their answers to the first N items of benchmarks
(`--data_dir` as for vocagnolm evaluate). With `--keep_models`, you can ask for answers later
without training again.

    const     weights all tokens equally, on the packed sequences of the guided runs
    shuffled  has the weights of `accept` in a random order within each micro-batch
    rho1      its reference is the student, trained on as many tokens of clean pages
    start, teacher, reference    are judged as they are
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.experiments import real_pages
from benchmarks.experiments.acceptance import selecting, shuffle_weights
from benchmarks.experiments.worlds import write_corpus
from vocagnolm.__main__ import main as vocagnolm
from vocagnolm.objective import Objective
from vocagnolm.store.format import SHARDS, read_manifest
from vocagnolm.tokenizer import start_id

RESULTS = Path(__file__).with_suffix(".jsonl")
# Texts of other repositories, with their sources.
TEXTS = Path(__file__).with_name("pool_texts.json")
STORED = "--teacher_losses={losses}"
RULES = {
    "const": f"--top_k=1 {STORED}",
    "paper": STORED,
    "accept": f"--selection=accept {STORED}",
    "share": f"--aggregation=share {STORED}",
    "shuffled": f"--selection=accept {STORED}",
    "random": "--method=random",
    "rho1": "--method=rho1 --teacher_losses={reference_losses}",
    "cpt": "--method=cpt",
    "dft": "--selection=dft",
    "stm": "--selection=stm",
    "eaft": "--selection=eaft",
}
MODELS = ("start", "teacher", "reference")
BENCHMARKS = ("svamp", "asdiv", "mawps", "tabmwp", "gsm8k")
HELD_OUT_CHARACTERS, JUDGED_TOGETHER = 600, 8
# These numbers of a run's log are kept: the value of the first step, and the mean of all steps.
LOGGED = ("teacher_ahead_fraction", "mean_weight", "student_loss_nats", "teacher_loss_nats")


class Experiment:
    """Everything that runs share.

    Args:
        arguments: the parsed command line.
    """

    def __init__(self, arguments: argparse.Namespace):
        self.student: Path = arguments.student
        self.teacher: Path = arguments.teacher
        self.tokens = arguments.tokens
        self.root: Path = arguments.output_dir
        self.answers = arguments.answers
        self.data_dir = arguments.data_dir
        self.learning_rate = arguments.learning_rate
        self.dtype = arguments.dtype
        self.keep_models = arguments.keep_models
        self.documents = real_pages.read_documents(arguments.corpora)
        self.held_out = real_pages.held_out_texts(self.documents)
        self.general = json.loads(TEXTS.read_text(encoding="utf-8"))["general"]

    def pages(self, world: str) -> Path:
        """Return the corpus of a world, and write it when it is first asked for."""

        def make() -> list[str]:
            tokenizer = AutoTokenizer.from_pretrained(self.student)

            def count(text: str) -> int:
                return len(tokenizer.encode(text, add_special_tokens=False))

            return real_pages.make_pages(world, self.documents, self.tokens, count)

        return self._corpus(f"{world}/pages", make)

    def pages_of_all_worlds(self) -> Path:
        """Return the corpus that models score. It has each page of any world once."""

        def make() -> list[str]:
            pages: dict[str, None] = {}
            for world in real_pages.WORLDS:
                for file in sorted(self.pages(world).iterdir()):
                    lines = file.read_text(encoding="utf-8").splitlines()
                    pages |= dict.fromkeys(json.loads(line)["text"] for line in lines)
            return list(pages)

        return self._corpus("all/pages", make)

    def _corpus(self, name: str, make: Callable[[], list[str]]) -> Path:
        """Return a corpus. The first process that asks for it writes it."""
        directory = self.root / name
        directory.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{directory}.lock"):
            if not directory.exists():
                write_corpus(directory, make())
        return directory

    def losses(self) -> Path:
        """Return the teacher's losses of all pages."""
        return self._score(self.teacher, f"losses-{self.teacher.name}")

    def reference_losses(self) -> Path:
        """Return the losses of Rho-1's reference."""
        return self._score(self.reference(), "losses-reference")

    def reference(self) -> Path:
        """Return the student after as many tokens of clean pages as a run has."""
        directory = self.root / "reference" / "model"
        pages = self.pages("reference")
        with FileLock(f"{directory}.lock"):
            if not (directory / "model.safetensors").exists():
                self._train("--method=cpt", pages, directory, seed=0)
        return directory

    def _score(self, model: Path, name: str) -> Path:
        store = self.root / name
        # A finished store does not need its model. An unfinished one is resumed.
        if SHARDS not in read_manifest(store):
            options = [f"--teacher={model}", f"--dataset={self.pages_of_all_worlds()}"]
            options += ["--shard_documents=32", f"--output_dir={store}", f"--dtype={self.dtype}"]
            options += ["--batch_tokens=1024"]
            run(["score", *options])
        return store

    def _train(self, rule: str, pages: Path, directory: Path, seed: int) -> None:
        options = [f"--student={self.student}", f"--dataset={pages}", f"--output_dir={directory}"]
        # A GPU computes a whole step at once.
        rows = 8 if torch.cuda.is_available() else 4
        options += ["--max_length=512", f"--per_device_train_batch_size={rows}", f"--seed={seed}"]
        options += ["--global_batch_tokens=4096", f"--learning_rate={self.learning_rate}"]
        options += [f"--max_steps={self.tokens // 4096}", "--warmup_steps=0.1"]
        options += ["--logging_steps=1"]
        options += [f"--bf16={str(self.dtype == 'bfloat16').lower()}"]
        if torch.cuda.is_available():
            # A run takes less than a minute, so save no checkpoints.
            options += ["--save_strategy=no"]
        else:
            options += ["--use_cpu", "--save_steps=0.25", "--save_total_limit=1"]
        run(["train", *options, *rule.split()])

    def train(self, world: str, rule: str, seed: int) -> Path:
        """Train the student by a rule."""
        directory = self.root / world / f"{rule}-{seed}-{self.learning_rate:g}-{self.teacher.name}"
        if (directory / "model.safetensors").exists():
            return directory  # kept
        options = RULES[rule]
        if "{losses}" in options:
            options = options.format(losses=self.losses())
        if "{reference_losses}" in options:
            options = options.format(reference_losses=self.reference_losses())
        with shuffled_weights() if rule == "shuffled" else nullcontext():
            self._train(options, self.pages(world), directory, seed)
        return directory

    def model(self, world: str, rule: str, seed: int) -> Path:
        """Return the directory of the model that a line of results is about."""
        if rule == "start":
            return self.student
        if rule == "teacher":
            return self.teacher
        return self.reference() if rule == "reference" else self.train(world, rule, seed)

    def judge(self, model: Path, name: str) -> dict[str, Any]:
        """Return nats per character by kind of text and, if asked for, which answers are right."""
        judged: dict[str, Any] = {"nats": nats_per_character(model, self.held_out)}
        judged["general"] = nats_per_character(model, self.general)
        if self.answers:
            output = self.root / "evaluations" / name
            options = [f"--model={model}", f"--data_dir={self.data_dir}", f"--dtype={self.dtype}"]
            options += [f"--limit={self.answers}", f"--output_dir={output}"]
            run(["evaluate", *options, "--benchmarks", *BENCHMARKS])
            judged["right"] = {name: right_answers(output, name) for name in BENCHMARKS}
        return judged


@contextmanager
def shuffled_weights() -> Iterator[None]:
    """Let runs shuffle the weights of the tokens within each micro-batch."""
    select = Objective.select

    def selected(objective: Objective, student: Any, batch: Any, teacher: Any = None) -> Any:
        return shuffle_weights(select(objective, student, batch, teacher), batch["block"])

    with selecting(selected):
        yield


def run(argv: list[str]) -> None:
    """Run a command of vocagnolm in this process."""
    if status := vocagnolm(argv):
        raise SystemExit(status)


def cut(texts: list[str]) -> list[str]:
    """Return the beginnings of texts that models are judged by."""
    return [text[:HELD_OUT_CHARACTERS] for text in texts]


@torch.no_grad()
def nats_per_character(directory: Path, texts: dict[str, list[str]]) -> dict[str, float]:
    """Return the loss of texts per character, by kind, in float32 and without packing."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).to(device)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    start = start_id(tokenizer, "student")
    nats_by_kind = {}
    for kind, documents in texts.items():
        nats = 0.0
        for first in range(0, len(documents), JUDGED_TOGETHER):
            ids = [
                torch.tensor([start, *tokenizer.encode(text, add_special_tokens=False)])
                for text in cut(documents[first : first + JUDGED_TOGETHER])
            ]
            # Padding comes after all tokens, and is never a label.
            ids_BS = pad_sequence(ids, batch_first=True).to(device)
            labels_BS = pad_sequence(ids, batch_first=True, padding_value=-100).to(device)
            logits_BSV = model(ids_BS).logits[:, :-1]
            labels = labels_BS[:, 1:].flatten()
            nats += float(F.cross_entropy(logits_BSV.flatten(0, 1), labels, reduction="sum"))
        nats_by_kind[kind] = round(nats / sum(map(len, cut(documents))), 5)
    return nats_by_kind


def right_answers(evaluation: Path, benchmark: str) -> str:
    """Return a 1 for each right answer and a 0 for each other one, in the order of the items."""
    lines = (evaluation / f"{benchmark}.jsonl").read_text(encoding="utf-8").splitlines()
    return "".join(str(int(json.loads(line)["correct"])) for line in lines)


def logged(directory: Path) -> dict[str, Any]:
    """Return a run's logged numbers, first and mean."""
    entries = [json.loads(line) for line in (directory / "log.jsonl").read_text().splitlines()]
    numbers: dict[str, Any] = {}
    for name in LOGGED:
        values = [entry[name] for entry in entries if name in entry]
        if values:
            numbers[name] = [round(values[0], 4), round(sum(values) / len(values), 4)]
    return numbers


def read_results() -> list[dict[str, Any]]:
    """Return all finished runs."""
    if not RESULTS.exists():
        return []
    return [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]


def finish(experiment: Experiment, world: str, rule: str, seed: int) -> None:
    """Make a run, judge its model and keep the results, unless that is done."""
    row: dict[str, Any] = {
        "student": experiment.student.name,
        "teacher": experiment.teacher.name,
        "world": world,
        "rule": rule,
        "seed": seed,
        "tokens": experiment.tokens,
        "learning_rate": experiment.learning_rate,
        "dtype": experiment.dtype,
    }
    for done in read_results():
        is_judged = "general" in done and ("right" in done or not experiment.answers)
        if row.items() <= done.items() and is_judged:
            return
    started = time.time()
    model = experiment.model(world, rule, seed)
    row |= {"seconds": round(time.time() - started)}
    row |= experiment.judge(model, f"{world}-{rule}-{seed}")
    if rule in RULES:
        row |= logged(model)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    row["commit"] = commit.stdout.strip()
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    if rule in RULES and not experiment.keep_models:
        # It takes half a gigabyte, and nothing reads it any more.
        shutil.rmtree(model)


def make_parser(about: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of all experiments on pretrained models."""
    parser = argparse.ArgumentParser(description=(about or "").split("\n")[0])
    add = parser.add_argument
    add("--output_dir", type=Path, required=True)
    add("--student", type=Path, required=True, help="directory of a pretrained model")
    add("--teacher", type=Path, required=True, help="directory of another one")
    add(
        "--corpora", type=Path, required=True, help="directory of the files that `real_pages` names"
    )
    return parser


def main() -> None:
    """Do the runs that are missing."""
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--worlds", nargs="+", choices=real_pages.WORLDS, default=real_pages.WORLDS)
    add("--rules", nargs="+", choices=[*MODELS, *RULES], default=[*MODELS, *RULES])
    add("--seeds", type=int, nargs="+", default=range(3))
    add("--tokens", type=int, default=131072, help="of a run")
    add("--learning_rate", type=float, default=1e-4)
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    add("--keep_models", action="store_true", help="do not delete what was trained")
    add("--answers", type=int, default=0, help="items of each benchmark")
    add("--data_dir", type=Path, help="of the benchmarks")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    experiment = Experiment(arguments)
    for seed in arguments.seeds:
        for rule in arguments.rules:
            for world in arguments.worlds:
                # Models that no rule trains are judged once.
                if rule in RULES or (seed, world) == (0, arguments.worlds[0]):
                    finish(experiment, world, rule, seed)


if __name__ == "__main__":
    main()
