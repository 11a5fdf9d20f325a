r"""Weigh what a rule learns against what it forgets, and noisy epochs against stopping early.

    python -m benchmarks.experiments.forgetting --output_dir DIR --student smollm2-135m \
        --teacher qwen2.5-coder-1.5b --corpora DIRECTORY

Run in the repository's root, after `pool`, whose judge and training it uses. A finished run is a
line of DIR/forgetting.jsonl. The same command resumes. `pool_results` prints the tables.

    curves    one pass over pages of mathematics, clean or with the solutions of other problems in
              40 % of the problems, at three learning rates
    epochs    six epochs of 10,000 tokens of problems, half of them with the solution of another
              one, at a constant rate, judged after each epoch

In both, `again` is equal weights in another order, the noise of packing. In `epochs`, `oracle` is
equal weights on the right solutions of the same problems.

Written before the runs, and what would falsify it:

1. At equal domain loss, acceptance forgets less than equal weights at a lower rate: against the
   line through equal weights at three rates, its general loss is lower by more than twice the noise
   of packing in each seed. Otherwise acceptance is equal weights at a lower rate.
2. If it does forget less, shuffled weights do not. If they do, the weights' places do not matter.
3. If it does forget less, DFT, which needs no teacher, does not do as well.
4. Acceptance at its best epoch is ahead of equal weights at their best epoch by more than twice the
   noise in each seed. Otherwise stopping early does as well, and costs no teacher.
"""

from __future__ import annotations

import argparse
import shutil
import time
from random import Random
from typing import Any

import torch

from benchmarks.experiments import real_pages
from benchmarks.experiments.pool import STEP_TOKENS, Page, Pools, once, take, write_pages
from benchmarks.experiments.real import logged, make_parser

RATES = (1e-4, 2e-4, 4e-4)
RULES_OF_CURVES = (
    "const",
    "again",
    "accept",
    "share",
    "paper",
    "shuffled",
    "random",
    "dft",
    "stm",
)
RULES_OF_EPOCHS = ("const", "accept", "again", "dft", "shuffled", "oracle")
# From so many pages of problems each seed draws its own.
UNION = 1.3
EPOCHS, EPOCH_TOKENS, EPOCHS_WRONG = 6, 10000, 0.5


class Forgetting(Pools):
    """The same student and judge, with clean pages and pages with wrong solutions."""

    def __init__(self, arguments: argparse.Namespace):
        super().__init__(arguments)
        # The right pages of pools are more than enough.
        right = [page for page in self.union if page["good"]]
        Random("clean").shuffle(right)
        clean = take(iter(right), UNION * self.tokens)
        self.clean, self.noisy = clean, self._with_wrong_solutions(clean)
        self.union = [*clean, *self.noisy]

    def _with_wrong_solutions(self, clean: list[Page]) -> list[Page]:
        """Return the pages, with the solution of another problem in each problem."""
        others = {kind: reversed(self.documents[kind]) for kind in real_pages.PROBLEMS}
        pages = []
        for page in clean:
            kind = page["source"]
            if kind in real_pages.PROBLEMS:
                separator = real_pages.PROBLEMS[kind][1]
                text = real_pages.with_solution_of(page["text"], next(others[kind]), separator)
                page = self._page(text, kind, good=False)
            pages.append(page)
        return pages

    def pages(self, world: str, seed: int) -> list[Page]:
        """Return the pages of a run in a random order: of a seed, the same problems in any world.

        Args:
            world: clean, noisy, epochs, or epochs-clean.
            seed: draws the problems, and which of them are wrong.
        """
        rng = Random(f"forgetting {seed}")
        chosen = list(range(len(self.clean)))
        rng.shuffle(chosen)
        tokens, wrong_share = self.tokens, real_pages.WRONG_SHARE
        if world.startswith("epochs"):
            tokens, wrong_share = EPOCH_TOKENS, EPOCHS_WRONG
            chosen = [at for at in chosen if self.clean[at]["source"] in real_pages.PROBLEMS]
        # A page's place decides, so that the same problems are wrong in every order.
        wrong = {at for at in chosen if rng.random() < wrong_share}
        if world in ("clean", "epochs-clean"):
            wrong = set()
        return take((self.noisy[at] if at in wrong else self.clean[at] for at in chosen), tokens)

    def run_once(self, world: str, rule: str, seed: int, rate: float) -> None:
        """Train and judge, after every epoch if there are several, unless that is done."""
        row: dict[str, Any] = {"pages": world, "rule": rule, "seed": seed, "learning_rate": rate}
        row |= {"tokens": self.tokens, "teacher": self.teacher.name}
        once(self.root / "forgetting.jsonl", row, lambda: self.trained(world, rule, seed, rate))

    def trained(self, world: str, rule: str, seed: int, rate: float) -> dict[str, Any]:
        """Return what a run gives."""
        started = time.time()
        directory = self.root / f"{world}-{rule}-{seed}-{rate:g}"
        corpus = directory.with_name(f"{directory.name}.jsonl")
        pages = self.pages(f"{world}-clean" if rule == "oracle" else world, seed)
        write_pages(corpus, pages)
        if world == "epochs":
            more = [f"--num_train_epochs={EPOCHS}", "--save_strategy=epoch", "--save_total_limit=0"]
            more += ["--lr_scheduler_type=constant_with_warmup"]
        else:
            more = [f"--max_steps={self.tokens // STEP_TOKENS}", "--save_strategy=no"]
        seeds = {"again": seed + 100}
        trained = {"again": "const", "oracle": "const"}.get(rule, rule)
        self.train(corpus, trained, seeds.get(rule, seed), directory, rate, *more)
        result: dict[str, Any] = {"seconds": round(time.time() - started)} | logged(directory)
        if world == "epochs":
            steps = sorted(int(path.name[11:]) for path in directory.glob("checkpoint-*"))
            result["epochs"] = [self.judge(directory / f"checkpoint-{step}") for step in steps]
        else:
            result |= self.judge(directory)
        shutil.rmtree(directory)
        return result


def main() -> None:
    """Do the runs that are missing."""
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--pages", nargs="+", choices=("clean", "noisy", "epochs"), default=("clean", "epochs"))
    add("--seeds", type=int, nargs="+", default=[3, 4, 5])
    rules = list(dict.fromkeys([*RULES_OF_CURVES, *RULES_OF_EPOCHS]))
    add("--rules", nargs="+", choices=rules, default=rules)
    add("--rates", type=float, nargs="+", default=RATES, help="of the curves")
    add("--tokens", type=int, default=12 * STEP_TOKENS, help="of a run of the curves")
    arguments = parser.parse_args()
    arguments.learning_rate = RATES[1]  # of epochs
    torch.set_num_threads(1)
    forgetting = Forgetting(arguments)
    for seed in arguments.seeds:
        for world in arguments.pages:
            if world == "epochs":
                for rule in RULES_OF_EPOCHS:
                    if rule in arguments.rules:
                        forgetting.run_once(world, rule, seed, arguments.learning_rate)
                continue
            for rate in arguments.rates:
                for rule in RULES_OF_CURVES:
                    # The noise of packing is measured at the middle rate.
                    is_wanted = rule != "again" or rate == RATES[1]
                    if is_wanted and rule in arguments.rules:
                        forgetting.run_once(world, rule, seed, rate)


if __name__ == "__main__":
    main()
