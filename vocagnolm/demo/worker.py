"""One of the processes that do the runs of the demo; `demo` starts it with Accelerate.

    accelerate launch -m vocagnolm.demo.worker OUTPUT_DIR

A process does several runs in turn, because importing everything takes as long as a third of a
run. All of them take the runs from one list, so that none is idle while another has a queue.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from vocagnolm.demo import models as demo_models
from vocagnolm.demo import world as demo_world
from vocagnolm.demo.judge import judge
from vocagnolm.demo.models import ASSETS, STUDENT_TOKENIZER, TEACHER

METHODS = ("vocagnolm", "cpt", "random")
BASE = "base"
RECIPE = Path(__file__).parents[2] / "recipes" / "demo.yaml"
PLAN_FILE, CURVE_FILE, RESULT_FILE = "plan.json", "clean.jsonl", "result.json"
CURVE_PROBLEMS = 100  # read during training; the verdict rests on all of them
# The first pretraining: noise, prose and questions without answers.
BASE_OPTIONS = ("--max_steps=150", "--global_batch_tokens=1024", "--per_device_train_batch_size=8")
GENERAL_TOKENS, PAGE_TOKENS = 48, 46  # fewer than a packed text takes: no text comes twice


@dataclass(frozen=True)
class Plan:
    """What a demo does.

    Attributes:
        seeds: of the students, their texts and the order in which they read them.
        wrong_share: share of the pages with a wrong solution.
        options: options of `train.py` for every continual pretraining.
        guidance: options of `train.py` for those with VocAgnoLM.
        base: options of `train.py` for the students' first pretraining.
        methods: what is compared.
    """

    seeds: tuple[int, ...]
    wrong_share: float = 0.4
    options: tuple[str, ...] = ()
    guidance: tuple[str, ...] = ()
    base: tuple[str, ...] = BASE_OPTIONS
    methods: tuple[str, ...] = METHODS

    def tasks(self) -> list[tuple[int, str]]:
        """Seed and method of every run; first what others wait for, then the longest."""
        return [(seed, method) for method in (BASE, *self.methods) for seed in self.seeds]


def seed_dir(output_dir: Path, seed: int) -> Path:
    """Where everything of a seed lies."""
    return output_dir / f"seed{seed}"


def work(output_dir: Path) -> None:
    """Do the runs of a plan that no other process has taken."""
    plan = Plan(**json.loads((output_dir / PLAN_FILE).read_text()))
    for seed, method in plan.tasks():
        directory = seed_dir(output_dir, seed)
        try:
            (directory / f"{method}.taken").touch(exist_ok=False)
        except FileExistsError:
            continue
        if method == BASE:
            make_base(directory, seed, plan.base)
        else:
            continue_training(output_dir, plan, seed, method)


def make_base(directory: Path, seed: int, options: Sequence[str]) -> None:
    """Pretrain a student on noise, prose and questions."""
    untrained = directory / "untrained"
    torch.manual_seed(seed)
    LlamaForCausalLM(demo_models.student_config()).save_pretrained(untrained)
    AutoTokenizer.from_pretrained(ASSETS / STUDENT_TOKENIZER).save_pretrained(untrained)
    texts = directory / "general.jsonl"
    count = _tokens(options) // GENERAL_TOKENS
    excluded = demo_world.held_out_questions()
    demo_world.write_jsonl(texts, demo_world.general_corpus(count, seed, excluded))
    train(untrained, texts, directory / BASE, "--method=cpt", f"--seed={seed}", *options)
    (directory / f"{BASE}.done").touch()


def continue_training(output_dir: Path, plan: Plan, seed: int, method: str) -> None:
    """Continually pretrain a student on pages, judge it, and write the result."""
    directory = seed_dir(output_dir, seed)
    pages = directory / "pages.jsonl"
    if not pages.exists():
        count = _tokens(plan.options) // PAGE_TOKENS
        texts = demo_world.corpus(count, seed, plan.wrong_share, demo_world.held_out_questions())
        partial = directory / f"pages.{method}"
        demo_world.write_jsonl(partial, texts)
        partial.replace(pages)  # another process may have the same idea
    while not (directory / f"{BASE}.done").exists():
        time.sleep(0.2)
    options = [f"--method={method}", f"--seed={seed}", *plan.options]
    options.append(f"--eval_dataset={output_dir / CURVE_FILE}")
    if method == "vocagnolm":
        options += [f"--teacher={ASSETS / TEACHER}", *plan.guidance]
    started = time.perf_counter()
    train(directory / BASE, pages, directory / method, *options)
    seconds = time.perf_counter() - started
    model = AutoModelForCausalLM.from_pretrained(directory / method, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(directory / method)
    verdict = judge(model, tokenizer)
    result = asdict(verdict) | {"seconds": seconds}
    partial = directory / f"{method}.result"
    partial.write_text(json.dumps(result))
    partial.replace(directory / method / RESULT_FILE)


def train(model: Path, corpus: Path, output_dir: Path, *options: str) -> None:
    """Run `train.py` with the demo's recipe, in this process.

    Raises:
        SystemExit: with its exit status, where that is not 0.
    """
    from vocagnolm.run.main import main as run

    paths = (f"--student={model}", f"--dataset={corpus}", f"--output_dir={output_dir}")
    if status := run([f"--config={RECIPE}", *paths, *options]):
        raise SystemExit(status)


def _tokens(options: Sequence[str]) -> int:
    """Student tokens of a run: the recipe's, unless the options say otherwise."""
    settings = yaml.safe_load(RECIPE.read_text())
    settings |= dict(option.removeprefix("--").split("=", 1) for option in options)
    return int(settings["max_steps"]) * int(settings["global_batch_tokens"])


if __name__ == "__main__":
    torch.set_num_threads(1)
    work(Path(sys.argv[1]))
