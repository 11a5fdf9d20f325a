"""The runs of the demo, as the processes of its pool do them: several in turn."""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from vocagnolm.demo import METHODS, world
from vocagnolm.demo.judge import judge
from vocagnolm.demo.models import STUDENT_TOKENIZER, TEACHER, student_config
from vocagnolm.host.options import checked
from vocagnolm.io import ASSETS
from vocagnolm.run.main import main as run_training

BASE = "base"
# Lies in the package, so that an installed demo has it; recipes/demo.yaml is a link to it.
RECIPE = Path(__file__).with_name("recipe.yaml")
CURVE_FILE, _PAGES_FILE = "clean.jsonl", "pages.jsonl"
# Problems read during training; the verdict rests on all of them.
CURVE_PROBLEMS = 100
_CURVE_STEPS = 100
# The first pretraining: noise, prose and questions without answers.
BASE_OPTIONS = ("--max_steps=150", "--global_batch_tokens=1024", "--per_device_train_batch_size=8")
# Fewer tokens than a packed text takes, so that no text comes twice.
GENERAL_TOKENS, PAGE_TOKENS = 48, 46

Result = dict[str, float]


@checked
@dataclass(frozen=True)
class Plan:
    """Settings of a demo; a seed is a student, its texts and their order."""

    output_dir: Path
    seeds: tuple[int, ...]
    # The share of the pages with a wrong solution.
    wrong_share: float = 0.4
    # Options of train.py: for continual pretraining, with VocAgnoLM only, for the first one.
    options: tuple[str, ...] = ()
    guidance: tuple[str, ...] = ()
    base: tuple[str, ...] = BASE_OPTIONS
    methods: tuple[str, ...] = tuple(METHODS)

    def __post_init__(self) -> None:
        for name, values in (("seeds", self.seeds), ("methods", self.methods)):
            if len(set(values)) < len(values):
                raise ValueError(f"--{name} must differ, got {' '.join(map(str, values))}")

    def directory(self, seed: int) -> Path:
        """Return the directory with all of a seed."""
        return self.output_dir / f"seed{seed}"

    def log(self, seed: int, method: str) -> Path:
        """Return the file that a run prints to."""
        return self.directory(seed) / f"{method}.log"


def do_run(plan: Plan, seed: int, method: str) -> Result:
    """Do one run in a process of the pool; the first pretraining of a student has no result."""
    # The same sums on every machine, and faster at this size.
    torch.set_num_threads(1)
    log = os.open(plan.log(seed, method), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    # Descriptors, not sys.stdout: libraries written in C print too.
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    directory = plan.directory(seed)
    if method != BASE:
        return _continue_training(plan, directory, seed, method)
    make_base(directory, seed, plan.base)
    count = _tokens(plan.options) // PAGE_TOKENS
    pages = world.corpus(count, seed, plan.wrong_share, world.held_out_questions())
    world.write_jsonl(directory / _PAGES_FILE, pages)
    return {}


def make_base(directory: Path, seed: int, options: Sequence[str]) -> None:
    """Pretrain a student on noise, prose and questions."""
    untrained, texts = directory / "untrained", directory / "general.jsonl"
    torch.manual_seed(seed)
    LlamaForCausalLM(student_config()).save_pretrained(untrained)
    AutoTokenizer.from_pretrained(ASSETS / STUDENT_TOKENIZER).save_pretrained(untrained)
    count = _tokens(options) // GENERAL_TOKENS
    world.write_jsonl(texts, world.general_corpus(count, seed, world.held_out_questions()))
    train(untrained, texts, directory / BASE, "--method=cpt", f"--seed={seed}", *options)


def _continue_training(plan: Plan, directory: Path, seed: int, method: str) -> Result:
    """Continually pretrain a student on pages, and judge it."""
    trained, curve = directory / method, plan.output_dir / CURVE_FILE
    options = [f"--seed={seed}", f"--eval_steps={_CURVE_STEPS}", f"--eval_dataset={curve}"]
    options += plan.options
    _, *added = METHODS[method]
    if "--method=vocagnolm" in added:
        options += [f"--teacher={ASSETS / TEACHER}", *plan.guidance]
    options += added
    started = time.perf_counter()
    train(directory / BASE, directory / _PAGES_FILE, trained, *options)
    seconds = time.perf_counter() - started
    # Judged as it was saved, not as it lies in memory.
    model = AutoModelForCausalLM.from_pretrained(trained, dtype=torch.float32)
    result = asdict(judge(model, AutoTokenizer.from_pretrained(trained))) | {"seconds": seconds}
    (trained / "result.json").write_text(json.dumps(result))
    return result


def train(model: Path, corpus: Path, output_dir: Path, *options: str) -> None:
    """Run `train.py` with the demo's recipe, in this process; SystemExit unless it ends with 0."""
    paths = (f"--student={model}", f"--dataset={corpus}", f"--output_dir={output_dir}")
    if status := run_training([f"--config={RECIPE}", *paths, *options]):
        raise SystemExit(status)


def _tokens(options: Sequence[str]) -> int:
    """Return the student tokens of a run: the recipe's, unless the options say otherwise."""
    settings = yaml.safe_load(RECIPE.read_text())
    settings |= dict(option.removeprefix("--").partition("=")[::2] for option in options)
    return int(settings["max_steps"]) * int(settings["global_batch_tokens"])
