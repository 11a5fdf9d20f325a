r"""Teach a pretrained student from questions of which 60 % have wrong answers.

    python -m benchmarks.experiments.labels --output_dir runs/labels --corpora DIRECTORY \
        --student SmolLM2-135M --teacher Qwen2.5-Coder-1.5B
    python -m benchmarks.experiments.labels --table
    python -m benchmarks.experiments.labels --write    # into README, results and notebook

Run in the repository's root, with OMP_NUM_THREADS=1. Answers are short, and only they are learnt.
A case is a world and a kind of mistake. The worlds:

    names    which of two or three people in a text bought something
    records  one of three facts about each of three people
    units    a count in another unit
    reviews  whether a review is positive, neutral or negative

A `systematic` mistake is the same for a question each time: the other person, the next person's
fact, a wrong factor, the next label. A `random` one is drawn from all wrong candidates. A model is
judged on held-out questions with other contents, by the share of which the right answer is the
likeliest of the candidates, and by its loss on biographies, which are general text.

The arms of a seed have equal questions and as many steps:

    clean              all answers right
    oracle             the rows with right answers
    random             a random choice of as many rows as the oracle has
    equal              plain training on all rows
    repacked1, 2       the same on the same rows in another order, for the noise of packing
    accept, paper, share        the rules with a teacher's losses; the last two keep 40 % of tokens
    shuffled           the weights of `accept` in a random order within each micro-batch
    dft, stm, eaft     the rules without a teacher
    rank_excess, rank_teacher, rank_student     as many rows as the oracle has, the best by a score
                       of `vocagnolm rank`; the last needs no teacher
    relabelled         all rows, each with the candidate that the teacher finds likeliest
    start, teacher     are judged as they are

The arms of `GATE` come first, with the first seed. The other arms are run only if the teacher has
more than .70, the student less than .50, the oracle .10 more than equal weights, and `ceiling`
allows the world. Seed 9 chose the steps and the rate and is not reported.

These sentences were written before the reported runs. Each is false in a case if the mean over
three seeds says otherwise:

1.  `accept` closes at least a fifth of the ceiling, in every usable case.
2.  `accept` closes more than `shuffled` and `random`, in every usable case: it is what the weights
    are tied to that helps, and not that there are fewer of them.
3.  `share` closes at least a fifth of the ceiling, in every usable case.
4.  `paper` closes at least a fifth of the ceiling, in every usable case.
5.  No rule without a teacher closes a fifth where mistakes are systematic.
6.  Equal weights close more of the way from `start` to `clean` where mistakes are random.
7.  The loss on general text of `accept` is not above that of equal weights.

Three more, on the choice of rows, were written after seeds 3 and 4 of the arms above and before any
run of `rank_...`, when the scores of 300 rows were known (names, systematic, seed 3: AUC of the
teacher's loss .997, of the excess .922, of the student's loss .499):

8.  `rank_teacher` closes more of the ceiling than every rule for tokens, in every usable case.
9.  `rank_excess` closes at least half of the ceiling, and less than `rank_teacher`, in every usable
    case: these students know nothing yet that would make a difference of losses better than one.
10. The order of the three scores by AUC is their order by right answers, in every usable case.

One more was written when two cases had `rank_...`, and before any run of `relabelled`:

11. `relabelled` closes as much of the ceiling as `rank_teacher`, less the noise, or more, in every
    usable case: a teacher that can tell which answers are right can as well give them.

A finished run is a line of the results and is not repeated, so the command can be interrupted.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from benchmarks.experiments.ceiling import first_line, is_usable, packing_noise
from benchmarks.experiments.label_worlds import KINDS, Question, questions, rows
from benchmarks.experiments.plots import NOTEBOOK, PAGE, markdown_table, write_between
from benchmarks.experiments.rank import area_under_curve
from benchmarks.experiments.real import logged, nats_per_character, run, shuffled_weights
from vocagnolm.evaluation.engines.generation import Chat
from vocagnolm.evaluation.engines.hf_engine import cache_argument
from vocagnolm.store.format import SHARDS, read_manifest
from vocagnolm.store.rank import SCORES

RESULTS = Path(__file__).with_suffix(".jsonl")
CASES = (
    *("names-systematic", "records-systematic", "names-random", "reviews-systematic"),
    *("units-systematic", "records-random", "reviews-random", "units-random"),
)
STEPS, LEARNING_RATE = 40, 2e-4
AS_THEY_ARE = ("start", "teacher")
# Arms with rows that `rank` chooses, and the options of those that are not plain training.
RANKED = ("rank_excess", "rank_teacher", "rank_student")
STORED = "--teacher_losses={losses}"
OPTIONS = {
    "accept": f"--selection=accept {STORED}",
    "shuffled": f"--selection=accept {STORED}",
    "paper": STORED,
    "share": f"--aggregation=share {STORED}",
    "dft": "--selection=dft",
    "stm": "--selection=stm",
    "eaft": "--selection=eaft",
}
GATE = ("clean", "oracle", "equal", "start", "teacher", "repacked1", "repacked2")
ARMS = ("clean", "oracle", "equal", "start", "teacher", "accept", "random", "share", "shuffled")
ARMS += ("paper", *RANKED, "stm", "dft", "eaft", "relabelled")

# What the tables call the arms, in their order: the rows that are trained on, or a rule.
TITLES = {
    "start": "before training",
    "equal": "all rows",
    "random": "a random 40 %",
    "oracle": "rows with right answers: the ceiling",
    "clean": "all rows, corrected",
    "rank_teacher": "`rank --by teacher`, 40 %",
    "rank_excess": "`rank --by excess`, 40 %",
    "rank_student": "`rank --by student`, 40 %",
    "relabelled": "all rows, answered by the teacher",
    "share": "share, top 40 %",
    "paper": "the paper's: max, top 40 %",
    "accept": "acceptance",
    "shuffled": "acceptance, shuffled",
    "eaft": "EAFT",
    "dft": "DFT",
    "stm": "STM",
    "teacher": "the teacher",
}
# What README leaves out.
DETAILS = ("clean", "shuffled", "eaft", "stm", "teacher")


# -- Runs -----------------------------------------------------------------------------------------


class Experiment:
    """What runs share: two models, a directory, and the file of the results."""

    def __init__(self, arguments: argparse.Namespace):
        self.student: Path = arguments.student
        self.teacher: Path = arguments.teacher
        self.root: Path = arguments.output_dir.resolve()
        self.results: Path = arguments.results
        self.steps = arguments.steps
        self.general = {"general": general_text(arguments.corpora)}

    def corpus(self, world: str, noise: str, kind: str, seed: int) -> Path:
        """Return a corpus. The first process that asks for it writes it."""
        if kind in RANKED:
            return self.ranked(world, noise, kind, seed)
        directory = self.root / f"{world}-{noise}-{seed}" / kind
        directory.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{directory}.lock"):
            if not directory.exists():
                found = rows(world, noise, kind, seed)
                if kind == "relabelled":
                    asked = questions(world, 0, seed)
                    chosen = likeliest(self.teacher, asked)
                    for row, question, at in zip(found, asked, chosen, strict=True):
                        row |= {"completion": question.answers[at], "right": at == 0}
                lines = [json.dumps(row) + "\n" for row in found]
                directory.mkdir()
                (directory / "rows.jsonl").write_text("".join(lines), encoding="utf-8")
        return directory

    def losses(self, world: str, noise: str, seed: int, model: Path | None = None) -> Path:
        """Return the losses of all rows by the teacher, or by another model."""
        corpus = self.corpus(world, noise, "all", seed)
        store = corpus.with_name("student-losses" if model else "losses")
        with FileLock(f"{store}.lock"):
            if SHARDS not in read_manifest(store):
                options = [f"--teacher={model or self.teacher}", f"--dataset={corpus}"]
                options += [f"--output_dir={store}", "--dtype=bfloat16", "--batch_tokens=1024"]
                run(["score", *options])
        return store

    def ranked(self, world: str, noise: str, arm: str, seed: int) -> Path:
        """Return the best rows by a score, as a corpus."""
        labelled = self.root / f"{world}-{noise}-{seed}" / "labelled.jsonl"
        found = rows(world, noise, "all", seed)
        lines = [json.dumps(row) + "\n" for row in found]
        labelled.write_text("".join(lines), encoding="utf-8")
        right = sum(row["right"] for row in found)
        out = labelled.with_name(arm)
        options = [f"--student_losses={self.losses(world, noise, seed, self.student)}"]
        options += [f"--teacher_losses={self.losses(world, noise, seed)}", "--label_column=right"]
        options += [f"--dataset={labelled}", f"--output_dir={out}", f"--by={arm[5:]}"]
        run(["rank", *options, f"--keep={right / len(found)}"])
        return out / "kept.jsonl"

    def judged(self, world: str, noise: str, arm: str, seed: int) -> dict[str, float]:
        """Return how well a score finds the right rows, and the share of them among the kept."""
        directory = self.root / f"{world}-{noise}-{seed}" / arm
        ranks = pd.read_json(directory / "ranks.jsonl", lines=True)
        found = rows(world, noise, "all", seed)
        is_right = np.array([found[index]["right"] for index in ranks["document"]])
        scores = ranks[arm[5:]].to_numpy() * (1 if SCORES[arm[5:]] else -1)
        kept = pd.read_json(directory / "kept.jsonl", lines=True)["document"]
        shares = {"auc": area_under_curve(scores, is_right)}
        shares["kept_right"] = np.mean([found[index]["right"] for index in kept])
        return {name: round(float(value), 4) for name, value in shares.items()}

    def train(self, world: str, noise: str, arm: str, seed: int) -> Path:
        """Train the student by an arm's rule on its rows."""
        rule = OPTIONS.get(arm, "--method=cpt")
        if STORED in rule:
            rule = rule.format(losses=self.losses(world, noise, seed))
        kind = arm if arm in (*KINDS, *RANKED, "clean", "relabelled") else "all"
        corpus = self.corpus(world, noise, kind, seed)
        directory = self.root / f"{world}-{noise}-{seed}" / f"model-{arm}"
        shutil.rmtree(directory, ignore_errors=True)  # of an interrupted run
        options = [f"--student={self.student}", f"--dataset={corpus}", f"--output_dir={directory}"]
        options += ["--max_length=512", "--per_device_train_batch_size=1", f"--seed={seed}"]
        options += ["--gradient_accumulation_steps=2", f"--max_steps={self.steps}"]
        options += [f"--learning_rate={LEARNING_RATE}", "--warmup_steps=0.1"]
        options += ["--lr_scheduler_type=constant_with_warmup", "--logging_steps=1"]
        options += ["--bf16=true", "--use_cpu", "--save_strategy=no"]
        with shuffled_weights() if arm == "shuffled" else nullcontext():
            run(["train", *options, *rule.split()])
        return directory

    def finish(self, world: str, noise: str, arm: str, seed: int) -> dict[str, Any]:
        """Make a run and judge its model, unless that is done, and return its results."""
        row: dict[str, Any] = {"student": self.student.name, "teacher": self.teacher.name}
        row |= {"world": world, "noise": noise, "arm": arm, "seed": seed}
        if arm in AS_THEY_ARE:
            row |= {"noise": "", "seed": 0}  # All seeds have the same held-out questions.
        if arm in ("clean", "relabelled"):
            row["noise"] = ""  # Their rows are the same whatever the mistakes are.
        row |= {"steps": self.steps, "learning_rate": LEARNING_RATE, "dtype": "bfloat16"}
        for done in read_results(self.results):
            if row.items() <= done.items():
                return done
        started = time.time()
        mistakes = row["noise"] or "none"
        if arm in AS_THEY_ARE:
            model = self.student if arm == "start" else self.teacher
        else:
            model = self.train(world, mistakes, arm, seed)
            row |= logged(model)
        if arm in RANKED:
            row |= self.judged(world, noise, arm, seed)
        if arm == "relabelled":
            corpus = self.corpus(world, mistakes, arm, seed) / "rows.jsonl"
            row["kept_right"] = round(float(pd.read_json(corpus, lines=True)["right"].mean()), 4)
        held_out = likeliest(model, questions(world, 1, 0))
        row["right"] = round(held_out.count(0) / len(held_out), 4)
        if arm != "teacher":
            row |= nats_per_character(model, self.general)
        row["seconds"] = round(time.time() - started)
        command = ["git", "rev-parse", "--short", "HEAD"]
        row["commit"] = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        with self.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        if arm not in AS_THEY_ARE:
            shutil.rmtree(model)  # half a gigabyte
        return row


def general_text(corpora: Path) -> list[str]:
    """Return the beginnings of biographies of logicians, in two pieces each, without LaTeX."""
    pieces = []
    for line in (corpora / "openlogic.jsonl").read_text(encoding="utf-8").splitlines():
        document = json.loads(line)
        if "/biographies/" in document["source"]:
            prose = [text for text in document["text"].splitlines() if not text.startswith("\\")]
            text = "\n".join(prose).strip()
            pieces += [text[:600], text[600:1200]]
    return pieces


@torch.inference_mode()
def likeliest(directory: Path, asked: Sequence[Question]) -> list[int]:
    """Return which candidate of each question a model finds likeliest; 0 is the right one."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    chat = Chat(tokenizer, tokenizer.chat_template)
    found = []
    for question in asked:
        prompt = tokenizer.encode(chat.prompt(question.text), add_special_tokens=False)
        answers = []
        for answer in question.answers:
            ids = tokenizer.encode(answer, add_special_tokens=False)
            answers.append(torch.tensor([*ids, *chat.end_ids]))
        nats = candidate_nats(model, torch.tensor([prompt]), answers)
        found.append(int(nats.argmin().item()))
    return found


def candidate_nats(
    model: Any, prompt_1S: torch.Tensor, answers: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return the summed loss of each answer after a prompt, which the model reads once."""
    cache = DynamicCache(config=model.config)
    reading = {cache_argument(): cache, "use_cache": True}
    last_1V = model(prompt_1S, logits_to_keep=1, **reading).logits[:, -1]
    cache.batch_repeat_interleave(len(answers))
    # Padding comes after all tokens of an answer, so none of them sees it.
    ids_BS = torch.nn.utils.rnn.pad_sequence(list(answers), batch_first=True)
    later_BSV = model(ids_BS[:, :-1], **reading).logits
    nats = []
    for answer, later_SV in zip(answers, later_BSV, strict=True):
        logits_SV = torch.cat([last_1V, later_SV[: len(answer) - 1]]).float()
        nats.append(torch.nn.functional.cross_entropy(logits_SV, answer, reduction="sum"))
    return torch.stack(nats)


def read_results(path: Path) -> list[dict[str, Any]]:
    """Return all finished runs."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


class Case:
    """The results of a world with a kind of mistake, by arm and seed.

    Args:
        name: as in `CASES`.
        found: rows of the results.
        repacked_seed: the seed of the runs that show the noise of packing.
    """

    def __init__(self, name: str, found: Sequence[dict[str, Any]], repacked_seed: int):
        world, _, noise = name.partition("-")
        self.arms: dict[str, dict[int, dict[str, Any]]] = {}
        for row in found:
            if row["world"] == world and row["noise"] in ("", noise):
                self.arms.setdefault(row["arm"], {})[row["seed"]] = row
        self.repacked_seed = repacked_seed

    @property
    def noise(self) -> float:
        """The standard deviation over orders of the same rows."""
        packed = ("equal", "repacked1", "repacked2")
        return packing_noise([self.arms[arm][self.repacked_seed]["right"] for arm in packed])

    def mean(self, arm: str, number: str = "right") -> float:
        """Return the mean of an arm over its seeds."""
        return statistics.mean(row[number] for row in self.arms[arm].values())

    def gain(self, arm: str, over: str = "equal") -> float:
        """Return what an arm gains over another, on average over the seeds that have both."""
        rows, others = self.arms[arm], self.arms[over]
        seeds = rows.keys() & others.keys()
        return statistics.mean(rows[seed]["right"] - others[seed]["right"] for seed in seeds)

    def ceiling(self) -> float:
        """Return what the oracle gains over equal weights."""
        return self.gain("oracle")

    def line(self) -> str:
        """Return the ceiling in words."""
        return first_line(self.ceiling(), self.noise, "of the answers")

    def is_whole(self, arm: str) -> bool:
        """Tell whether an arm has been run with every seed, or needs none."""
        seeds = self.arms.get(arm, {}).keys()
        return bool(seeds) and (arm in AS_THEY_ARE or seeds >= self.arms["equal"].keys())

    def cells(self, arm: str) -> list[str]:
        """Return right answers, their mean and each seed, the part of the ceiling, other loss."""
        rows = self.arms.get(arm)
        if rows is None:
            return [""] * 4
        each = " ".join(f"{rows[seed]['right']:.3f}" for seed in sorted(rows))
        closed = ""
        if arm not in AS_THEY_ARE:
            # The sum has no negative zero.
            closed = f"{round(self.gain(arm) / self.ceiling(), 2) + 0:.2f}"
        general = "" if arm == "teacher" else f"{self.mean(arm, 'general'):.3f}"
        return [f"{self.mean(arm):.3f}", each, closed, general]

    def table(self) -> str:
        """Return the arms, the mean and each seed of right answers, and the loss of other text."""
        lines = []
        for arm, title in TITLES.items():
            if arm in self.arms:
                lines.append([f"{title} ({len(self.arms[arm])})", *self.cells(arm)])
        head = ["rows or rule (seeds)", "right answers"]
        head += ["each seed", "of the ceiling", "general text"]
        return markdown_table(head, lines)

    def fault(self) -> str:
        """Return why the case compares no rules, or nothing."""
        if self.mean("teacher") <= 0.7:
            return f"the teacher has only {self.mean('teacher'):.3f}"
        if self.mean("start") >= 0.5:
            return f"the student has {self.mean('start'):.3f} before it is trained"
        if self.ceiling() < 0.1 or not is_usable(self.ceiling(), self.noise):
            return f"the ceiling is {self.ceiling():.3f}, and the noise {self.noise:.3f}"
        return ""


def read_cases(path: Path, seeds: Sequence[int]) -> dict[str, Case]:
    """Return the cases of which the runs of `GATE` are finished."""
    found = [row for row in read_results(path) if row["seed"] in (0, *seeds)]
    cases = {}
    for name in CASES:
        case = Case(name, found, seeds[0])
        if case.arms.keys() >= set(GATE):
            cases[name] = case
    return cases


def side_by_side(cases: dict[str, Case], *, short: bool) -> str:
    """Return the ceilings of cases and one table of them, as pages have it.

    Args:
        cases: by their names, with other worlds.
        short: without the arms of `DETAILS` and without the loss of other text.
    """
    ceilings, lines = [], []
    head = ["rows or rule"]
    for name, case in cases.items():
        world = name.partition("-")[0]
        ceilings.append(f"{world.capitalize()}. {case.line()}")
        head += [f"{world}: right", "of the ceiling"] + ["general text"] * (not short)
    for arm, title in TITLES.items():
        # What some seeds lack is in the notebook only.
        is_whole = all(case.is_whole(arm) for case in cases.values())
        if not is_whole or (short and arm in DETAILS):
            continue
        row = [title]
        for case in cases.values():
            right, _, closed, general = case.cells(arm)
            row += [right, closed] + [general] * (not short)
        lines.append(row)
    return "\n".join([*ceilings, "", markdown_table(head, lines)])


def table(path: Path, seeds: Sequence[int]) -> str:
    """Return a table for each case that has the runs of `GATE`, with its ceiling first."""
    lines = []
    for name, case in read_cases(path, seeds).items():
        lines += ["", f"{name.replace('-', ', ')}: {case.line()}"]
        fault = case.fault()
        lines += [f"Not used to compare rules: {fault}." if fault else f"\n{case.table()}"]
    return "\n".join(lines)


def main() -> None:
    """Do the runs that are missing, and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--output_dir", type=Path)
    add("--student", type=Path, help="directory of a pretrained model")
    add("--teacher", type=Path, help="directory of another one")
    add("--corpora", type=Path, help="directory of openlogic.jsonl, as in `real_pages`")
    add("--cases", nargs="+", choices=CASES, default=CASES)
    add("--seeds", type=int, nargs="+", default=(3, 4, 5), help="the first has the gate")
    add("--arms", nargs="+", choices=ARMS, default=ARMS)
    add("--steps", type=int, default=STEPS)
    add("--results", type=Path, default=RESULTS)
    add("--table", action="store_true", help="run nothing")
    add("--write", action="store_true", help="run nothing, and write the tables into the pages")
    arguments = parser.parse_args()
    if arguments.write:
        cases = read_cases(arguments.results, arguments.seeds)
        # Pages have a table of systematic mistakes, and name the others in a sentence.
        names = [name for name in cases if name.endswith("systematic")]
        usable = {name: cases[name] for name in names if not cases[name].fault()}
        for page in (Path("README.md"), PAGE):
            short = page.name == "README.md"
            write_between("labels", page, side_by_side(usable, short=short))
        write_between("labels", NOTEBOOK, table(arguments.results, arguments.seeds).strip())
    elif not arguments.table:
        torch.set_num_threads(1)
        experiment = Experiment(arguments)
        for name in arguments.cases:
            world, _, noise = name.partition("-")
            first = arguments.seeds[0]
            gate = [experiment.finish(world, noise, arm, first) for arm in GATE]
            if Case(name, gate, first).fault():
                continue
            for seed in arguments.seeds:
                for arm in arguments.arms:
                    experiment.finish(world, noise, arm, seed)
    sys.stdout.write(f"{table(arguments.results, arguments.seeds)}\n")


if __name__ == "__main__":
    main()
