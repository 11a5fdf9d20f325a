"""The demo: four ways to continue a student's pretraining, on text that makes itself.

Several students, each with its own seed, are continually pretrained with an equal number of tokens
by VocAgnoLM as the paper has it, by VocAgnoLM with `--aggregation share`, on every token (cpt) and
on a random 40 % of them, by the same code as `train.py`, and judged on held-out problems. Every
number that is printed comes from these runs.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from vocagnolm.cli import print_main
from vocagnolm.demo import world
from vocagnolm.demo.main import METHODS
from vocagnolm.demo.models import STUDENT_TOKENIZER, TEACHER, judge, student_config
from vocagnolm.dist import cores
from vocagnolm.io import ASSETS, markdown_table
from vocagnolm.run.options import main as run_training

BASE = "base"
# Lies in the package, so that an installed demo has it; recipes/demo.yaml is a link to it.
RECIPE = Path(__file__).with_name("recipe.yaml")
CURVE_FILE = "clean.jsonl"
# Problems read during training; the verdict rests on all of them.
CURVE_PROBLEMS = 100
# Fewer tokens than a packed text takes, so that no text comes twice.
GENERAL_TOKENS, PAGE_TOKENS = 48, 46
# The first pretraining: noise, prose and questions without answers.
BASE_OPTIONS = ("--max_steps=150", "--global_batch_tokens=1024", "--per_device_train_batch_size=8")
# Digits shown of each metric.
_METRICS = {"accuracy": 3, "clean_loss": 3, "answer_loss": 3, "seconds": 1}

# {method: {metric: [one value per seed]}}; losses in nats per token.
Results = dict[str, dict[str, list[float]]]


def run_demo(arguments: argparse.Namespace) -> Results:
    """Run the demo, print its table and write `results.json`; runs of the same seeds are replaced.

    Raises:
        RuntimeError: a run failed; the message names its log.
    """
    started = time.perf_counter()
    arguments.output_dir = directory = arguments.output_dir.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    for seed in arguments.seeds:
        shutil.rmtree(directory / f"seed{seed}", ignore_errors=True)
    problems = world.held_out_problems()[:CURVE_PROBLEMS]
    world.write_jsonl(directory / CURVE_FILE, ("".join(world.render(item)) for item in problems))
    print_main(f"logs of the runs: {directory}/seed*/train.log")
    # Spawned processes read it as they import; two runs side by side beat one run on two cores.
    os.environ |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(directory / "cache")}
    spawn, workers = multiprocessing.get_context("spawn"), min(cores(), len(arguments.seeds))
    with ProcessPoolExecutor(workers, spawn) as pool:
        found = list(pool.map(partial(_run_seed, arguments), arguments.seeds))
    results = {
        method: {metric: [one[method][metric] for one in found] for metric in _METRICS}
        for method in arguments.methods
    }
    (directory / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    print_main(f"\n{results_table(results)}\n")
    print_main(f"{time.perf_counter() - started:.0f} s; written: {directory}/results.json")
    return results


def _run_seed(arguments: argparse.Namespace, seed: int) -> dict[str, dict[str, float]]:
    """Make a student, continue its pretraining by each method, and judge what comes of it."""
    # The same sums on every machine, and faster at this size.
    torch.set_num_threads(1)
    directory = arguments.output_dir / f"seed{seed}"
    directory.mkdir()
    # All that the runs print goes to a file, by descriptor: libraries written in C print too.
    screen, log = os.fdopen(os.dup(1), "w"), directory / "train.log"
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    results = {}
    try:
        make_base(directory, seed, BASE_OPTIONS)
        given = [f"--{option}" for option in arguments.options]
        count = _tokens(given) // PAGE_TOKENS
        texts = world.corpus(count, seed, arguments.wrong_share, world.held_out_questions())
        pages, curve = directory / "pages.jsonl", arguments.output_dir / CURVE_FILE
        world.write_jsonl(pages, texts)
        for method in arguments.methods:
            _, *added = METHODS[method]
            options = [f"--seed={seed}", "--eval_steps=100", f"--eval_dataset={curve}", *given]
            if "--method=vocagnolm" in added:
                options.append(f"--teacher={ASSETS / TEACHER}")
                options += [f"--{option}" for option in arguments.guidance]
            started = time.perf_counter()
            train(directory / BASE, pages, directory / method, *options, *added)
            seconds = time.perf_counter() - started
            # Judged as it was saved, not as it lies in memory.
            model = AutoModelForCausalLM.from_pretrained(directory / method, dtype=torch.float32)
            found = judge(model, AutoTokenizer.from_pretrained(directory / method))
            print_main(
                f"seed {seed}  {method:9}  accuracy {found.accuracy:.3f}, loss on clean text "
                f"{found.clean_loss:.3f}, on answers {found.answer_loss:.3f} nats",
                screen,
            )
            results[method] = asdict(found) | {"seconds": seconds}
    except Exception as error:
        raise RuntimeError(f"a run of the demo failed: see {log}") from error
    finally:
        sys.stdout.flush()
        os.dup2(screen.fileno(), 1)
    return results


def make_base(directory: Path, seed: int, options: Sequence[str]) -> None:
    """Pretrain a student on noise, prose and questions."""
    untrained, texts = directory / "untrained", directory / "general.jsonl"
    torch.manual_seed(seed)
    LlamaForCausalLM(student_config()).save_pretrained(untrained)
    AutoTokenizer.from_pretrained(ASSETS / STUDENT_TOKENIZER).save_pretrained(untrained)
    count = _tokens(options) // GENERAL_TOKENS
    world.write_jsonl(texts, world.general_corpus(count, seed, world.held_out_questions()))
    train(untrained, texts, directory / BASE, "--method=cpt", f"--seed={seed}", *options)


def train(model: Path, corpus: Path, output_dir: Path, *options: str) -> None:
    """Run `train.py` with the demo's recipe, in this process."""
    paths = (f"--student={model}", f"--dataset={corpus}", f"--output_dir={output_dir}")
    if status := run_training([f"--config={RECIPE}", *paths, *options]):
        raise RuntimeError(f"train.py ended with status {status}")


def _tokens(options: Sequence[str]) -> int:
    """Return the student tokens of a run: the recipe's, unless the options say otherwise."""
    settings = yaml.safe_load(RECIPE.read_text())
    settings |= dict(option.removeprefix("--").partition("=")[::2] for option in options)
    return int(settings["max_steps"]) * int(settings["global_batch_tokens"])


def results_table(results: Results) -> str:
    """Lay out mean and standard deviation over the seeds, as a Markdown table.

    >>> print(results_table({"cpt": {"accuracy": [0.5, 0.6], "seconds": [9.0, 9.0]}}))
    | method | accuracy       | seconds    |
    |--------|----------------|------------|
    | CPT    | 0.550 +- 0.071 | 9.0 +- 0.0 |
    """
    metrics = list(next(iter(results.values())))
    rows = [["method", *(metric.replace("_", " ") for metric in metrics)]]
    for method, values in results.items():
        row = [METHODS[method][0]]
        for metric in metrics:
            found, digits = values[metric], _METRICS[metric]
            deviation = statistics.stdev(found) if len(found) > 1 else float("nan")
            row.append(f"{statistics.mean(found):.{digits}f} +- {deviation:.{digits}f}")
        rows.append(row)
    return markdown_table(rows)
