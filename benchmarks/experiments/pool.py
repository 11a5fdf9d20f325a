r"""Choose pages from a pool of four times what is trained on, with a pretrained student.

    python -m benchmarks.experiments.pool --output_dir DIR --student smollm2-135m \
        --teacher qwen2.5-coder-0.5b --corpora DIRECTORY

Run in the repository's root. Half or three quarters of a pool is junk, in equal parts: Python code,
pages between boilerplate, shuffled words, French, and one page repeated. The others are pages of
`real_pages`, a quarter each: GSM8K, MATH, PlanetMath, textbooks. A seed draws its pool, its random
choices and the order of its pages. All arms train on as many tokens.

    random     a random part of the pool
    oracle     mathematics only
    again      the random part in another order, and oracle_again the oracle's: the noise of packing
    excess ... what `vocagnolm rank --keep` keeps by a score, best first, or by its other end
    const ...  a rule for tokens on the random part, packed as guided runs pack

Models are judged by nats per character on held-out clean text of the four kinds, and on four kinds
of general text that nobody trains on (`pool_texts.json`, with sources). AUC of each score is
measured before any training. A finished run is a line of DIR/pool.jsonl. The same command resumes.

The learning rate is picked on seed 9, which is not reported, by the ceiling over the noise.

Written before the runs, and what would falsify it:

1. Choosing pages pays: the oracle is ahead of random by five times the noise of packing. If not,
   no scores are compared.
2. The difference of the two losses is what helps: `excess` keeps more of the ceiling than the
   teacher's loss alone and than the student's loss alone, in every seed. If one of these does as
   well, it does not.
3. The best score of `rank` closes at least half of the ceiling in every seed. If not, rank does not
   replace labels here.
4. AUC tells beforehand: the order of the scores by AUC is their order by loss. Falsified by a score
   with an AUC that is higher by .05 and a loss that is higher by more than twice the noise.
5. A teacher trained on code likes code: `excess` and `weight` keep more code than other junk. If
   they do not, the failure that we expect of this teacher is not one.
6. No rule for tokens closes a fifth of the ceiling on the random part.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, redirect_stdout
from itertools import repeat
from pathlib import Path
from random import Random
from typing import Any

import pandas as pd
import torch
from transformers import AutoTokenizer

from benchmarks.experiments import real_pages
from benchmarks.experiments.rank import area_under_curve
from benchmarks.experiments.real import (
    RULES,
    TEXTS,
    logged,
    make_parser,
    nats_per_character,
    run,
    shuffled_weights,
)
from vocagnolm.store.format import SHARDS, read_manifest
from vocagnolm.store.rank import SCORES

JUNK = ("code", "boilerplate", "shuffled", "french", "repeated")
POOL = 4  # times the tokens of a run
# Tokens of the pages from which pools are drawn, in runs: so many are right, so many are junk.
UNION_RIGHT, UNION_JUNK = 2.5, 3.5
HELD_OUT = 16  # documents of each kind, of the 60 that no page has
STEP_TOKENS = 2048
# Shorter sequences are a sixth empty, because pages have up to 600 tokens.
MAX_LENGTH = 1024
AGAIN, ORACLES = ("again", "oracle_again"), ("oracle", "oracle_again")
PAGE_ARMS = ("random", "oracle", *AGAIN, *SCORES, "excess_reversed", "student_reversed")
TOKEN_ARMS = ("const", "accept", "shuffled", "share", "paper", "dft", "stm")
NO_TEACHER = ("start", "random", "oracle", *AGAIN, "student", "student_reversed", "dft", "stm")
Page = dict[str, Any]


class Pools:
    """The pages, their losses and the runs.

    Args:
        arguments: the parsed command line.
    """

    def __init__(self, arguments: argparse.Namespace):
        self.student: Path = arguments.student
        self.teacher: Path = arguments.teacher
        self.tokens: int = arguments.tokens
        self.learning_rate: float = arguments.learning_rate
        self.root: Path = arguments.output_dir
        self.documents = real_pages.read_documents(arguments.corpora)
        self.texts = json.loads(TEXTS.read_text(encoding="utf-8"))
        tokenizer = AutoTokenizer.from_pretrained(self.student)
        # With the token that ends a document.
        self.count: Callable[[str], int] = lambda text: (
            1 + len(tokenizer.encode(text, add_special_tokens=False))
        )
        self.union = self._right() + self._junk()

    def _right(self) -> list[Page]:
        pages = []
        for kind, texts in self.documents.items():
            made = (self._page(text, kind, good=True) for text in texts[real_pages.HELD_OUT :])
            pages += take(made, UNION_RIGHT * self.tokens / len(real_pages.KINDS))
        return pages

    def _junk(self) -> list[Page]:
        rng = Random("junk")
        # What is spoilt comes from the ends of the lists, which no right page reaches.
        spoilt = [texts[-200:] for texts in self.documents.values()]
        originals = [text for texts in zip(*spoilt, strict=False) for text in texts]
        makers: dict[str, Iterator[str]] = {
            "code": iter(real_pages.source_code()),
            "boilerplate": (real_pages.between_boilerplate(text, rng) for text in originals[::2]),
            "shuffled": (shuffled_words(text, rng) for text in originals[1::2]),
            "french": iter(self.texts["french"]),
            # The licence of this repository, as many sites have it.
            "repeated": repeat(" ".join(Path("LICENSE").read_text().split())[:1500]),
        }
        pages = []
        for kind in JUNK:
            made = (self._page(text, kind, good=False) for text in makers[kind])
            pages += take(made, UNION_JUNK * self.tokens / len(JUNK))
        return pages

    def _page(self, text: str, kind: str, *, good: bool) -> Page:
        return {"text": text, "source": kind, "good": good, "tokens": self.count(text)}

    def pool(self, junk: int, seed: int) -> list[Page]:
        """Return a pool in a random order. Junk is its percentage of tokens."""
        rng = Random(f"pool {junk} {seed}")
        pages = []
        for kinds, percent in ((real_pages.KINDS, 100 - junk), (JUNK, junk)):
            for kind in kinds:
                found = [page for page in self.union if page["source"] == kind]
                rng.shuffle(found)
                pages += take(iter(found), POOL * self.tokens * percent / 100 / len(kinds))
        rng.shuffle(pages)
        return pages

    def losses(self, model: Path) -> Path:
        """Return a model's losses of every page of any pool."""
        store = self.root / f"losses-{model.name}"
        pages = self.root / "union.jsonl"
        if not pages.exists():
            write_pages(pages, list({page["text"]: page for page in self.union}.values()))
        # A finished store does not need its model. An unfinished one is resumed.
        if SHARDS not in read_manifest(store):
            options = [f"--teacher={model}", f"--dataset={pages}", f"--output_dir={store}"]
            options += ["--dtype=bfloat16", "--batch_tokens=1024", "--shard_documents=32"]
            run(["score", *options])
        return store

    def rank(self, junk: int, seed: int, name: str, *options: str) -> tuple[pd.DataFrame, str]:
        """Rank a pool, and return its rows and what the command printed."""
        directory = self.root / f"rank-{junk}-{seed}-{self.teacher.name}"
        pages = directory / "pool.jsonl"
        if not pages.exists():
            directory.mkdir(exist_ok=True)
            write_pages(pages, self.pool(junk, seed))
        stores = [f"--student_losses={self.losses(self.student)}"]
        stores += [f"--teacher_losses={self.losses(self.teacher)}"]
        printed = io.StringIO()
        with redirect_stdout(printed):
            command = ["rank", *stores, f"--dataset={pages}", f"--output_dir={directory / name}"]
            run([*command, "--label_column=good", *options])
        ranks = pd.read_json(directory / name / "ranks.jsonl", lines=True)
        return ranks, printed.getvalue()

    def kept(self, junk: int, seed: int, arm: str) -> list[Page]:
        """Return the best pages by a score, as many as fill a run."""
        score, _, reverse = arm.partition("_")
        ends = ["--reverse"] if reverse else []
        ranks, _ = self.rank(junk, seed, arm, f"--by={score}", "--sort", *ends)
        enough = int((ranks["tokens"] + 1).cumsum().searchsorted(self.tokens)) + 1
        share = min(1.0, enough / len(ranks))
        keep = [f"--by={score}", f"--keep={share:.6f}", "--group_column=source", *ends]
        self.rank(junk, seed, f"{arm}-kept", *keep)
        pool = self.pool(junk, seed)
        path = self.root / f"rank-{junk}-{seed}-{self.teacher.name}" / f"{arm}-kept" / "kept.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines()
        return [pool[json.loads(line)["document"]] for line in lines]

    def part(self, junk: int, seed: int, arm: str) -> list[Page]:
        """Return the pages that an arm trains on."""
        if arm in SCORES or arm.endswith("_reversed"):
            return self.kept(junk, seed, arm)
        # The pool's order is random, so its first pages are a random part.
        pool = self.pool(junk, seed)
        return take(iter(p for p in pool if p["good"] or arm not in ORACLES), self.tokens)

    def train(
        self, pages: Path, rule: str, seed: int, directory: Path, rate: float, *more: str
    ) -> None:
        """Train the student on pages by a rule of `real`, or `shuffled`."""
        options = RULES[rule]
        if "{losses}" in options:
            options = options.format(losses=self.losses(self.teacher))
        command = [f"--student={self.student}", f"--dataset={pages}", f"--output_dir={directory}"]
        command += [f"--max_length={MAX_LENGTH}", "--per_device_train_batch_size=2", "--bf16=true"]
        command += [f"--global_batch_tokens={STEP_TOKENS}", f"--learning_rate={rate}"]
        command += [f"--seed={seed}", "--warmup_steps=0.1", "--use_cpu", "--logging_steps=1"]
        with shuffled_weights() if rule == "shuffled" else nullcontext():
            run(["train", *command, *more, *options.split()])

    def judge(self, model: Path) -> dict[str, Any]:
        """Return nats per character of held-out text of the pages' kinds, and of general text."""
        held_out = real_pages.held_out_texts(self.documents)
        clean = {kind: texts[:HELD_OUT] for kind, texts in held_out.items()}
        general = nats_per_character(model, self.texts["general"])
        return {"nats": nats_per_character(model, clean), "general": general}

    def auc(self, junk: int, seed: int) -> dict[str, Any]:
        """Return the AUC of all scores as the command prints it, and against each kind of junk."""
        ranks, printed = self.rank(junk, seed, "all")
        pages = pd.DataFrame(self.pool(junk, seed))
        areas: dict[str, Any] = {"auc": {}, "auc_by_kind": {}}
        for line in printed.splitlines():
            words = line.replace("[", " ").replace("]", " ").replace(",", " ").split()
            if words[1:2] in (["largest"], ["smallest"]):
                areas["auc"][words[0]] = [float(word) for word in words[2:5]]
        for name, largest in SCORES.items():
            values = ranks[name] if largest else -ranks[name]
            by_kind = {}
            for kind in JUNK:
                chosen = (pages["good"] | (pages["source"] == kind)).to_numpy()
                good = pages["good"].to_numpy()[chosen]
                by_kind[kind] = round(area_under_curve(values.to_numpy()[chosen], good), 3)
            areas["auc_by_kind"][name] = by_kind
        return areas

    def result(self, junk: int, seed: int, arm: str) -> dict[str, Any]:
        """Make a run, and judge its model."""
        if arm == "auc":
            return self.auc(junk, seed)
        if arm == "start":
            return self.judge(self.student)
        started = time.time()
        pages = self.part(junk, seed, arm)
        counted = pd.DataFrame(pages).groupby("source")["tokens"].sum()
        result: dict[str, Any] = {"shares": (counted / counted.sum()).round(3).to_dict()}
        directory = self.root / "-".join([str(junk), str(seed), arm, self.teacher.name])
        corpus = directory.with_name(f"{directory.name}.jsonl")
        write_pages(corpus, pages)
        more = [f"--max_steps={self.tokens // STEP_TOKENS}", "--save_steps=0.5"]
        rule, order = arm if arm in TOKEN_ARMS else "cpt", seed + 100 * (arm in AGAIN)
        rate = self.learning_rate
        self.train(corpus, rule, order, directory, rate, *more, "--save_total_limit=1")
        result["seconds"] = round(time.time() - started)
        result |= self.judge(directory) | logged(directory)
        # It takes half a gigabyte, and nothing reads it any more.
        shutil.rmtree(directory)
        return result

    def finish(self, junk: int, seed: int, arm: str) -> None:
        """Make a run and keep its result, unless that is done."""
        row: dict[str, Any] = {"junk": junk, "seed": seed, "arm": arm, "tokens": self.tokens}
        row |= {"learning_rate": self.learning_rate, "student": self.student.name}
        # A run without a teacher is a run of every teacher.
        row |= {"teacher": "" if arm in NO_TEACHER else self.teacher.name}
        once(self.root / "pool.jsonl", row, lambda: self.result(junk, seed, arm))


def take(pages: Iterator[Page], tokens: float) -> list[Page]:
    """Return the first pages, as many as have this number of tokens."""
    taken: list[Page] = []
    total = 0
    for page in pages:
        if total >= tokens:
            return taken
        taken.append(page)
        total += page["tokens"]
    if total < 0.9 * tokens:
        raise ValueError(f"{total:,} tokens, expected {tokens:,.0f}: fewer --tokens")
    return taken


def shuffled_words(text: str, rng: Random) -> str:
    """Return a text's words in a random order."""
    words = text.split()
    rng.shuffle(words)
    return " ".join(words)


def write_pages(path: Path, pages: list[Page]) -> None:
    """Write a corpus as one file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(page) + "\n" for page in pages), encoding="utf-8")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return all finished runs."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def once(results: Path, row: dict[str, Any], make: Callable[[], dict[str, Any]]) -> None:
    """Add a row with the result of a run to a file, and the commit, unless the file has it."""
    if any(row.items() <= done.items() for done in read_rows(results)):
        return
    row = row | make()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row | {"commit": commit.stdout.strip()}) + "\n")


def main() -> None:
    """Do the runs that are missing."""
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--junk", type=int, nargs="+", default=[50, 75], help="percent of the pool's tokens")
    add("--seeds", type=int, nargs="+", default=[3, 4, 5])
    arms = ["start", *PAGE_ARMS, "auc", *TOKEN_ARMS]
    add("--arms", nargs="+", choices=arms, default=arms[: -len(TOKEN_ARMS)])
    add("--tokens", type=int, default=12 * STEP_TOKENS, help="of a run")
    add("--learning_rate", type=float, default=2e-4)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pools = Pools(arguments)
    for seed in arguments.seeds:
        for junk in arguments.junk:
            for arm in arguments.arms:
                # The student is judged once.
                if arm != "start" or (seed, junk) == (arguments.seeds[0], arguments.junk[0]):
                    pools.finish(junk, seed, arm)


if __name__ == "__main__":
    main()
