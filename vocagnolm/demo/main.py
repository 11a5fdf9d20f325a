"""Train and judge small students with and without a teacher. Needs no download.

    vocagnolm demo                                           # two minutes on two CPU cores
    vocagnolm demo --seeds 0 1 2 3 --methods all             # all methods: ten minutes
    vocagnolm demo --seeds 0 --methods cpt --max_steps 2

For each seed, every method trains the same student on the same number of tokens, like `vocagnolm
train`. Students are judged on held-out problems. Exit status: 0 done, 1 a run failed, 2 a wrong
argument, 130 interrupted.
"""

import multiprocessing
import os
import shutil
import signal
import statistics
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing.connection import wait
from pathlib import Path

from vocagnolm.cli import Exit, Parser, shell, stop
from vocagnolm.demo.methods import METHODS
from vocagnolm.fields import in_range
from vocagnolm.record import output_directory
from vocagnolm.shell.io import markdown_table, print_main, write_json

_NAME = "vocagnolm demo"
# Next to the directories of the seeds: the table, and the libraries' caches.
RESULTS, CACHE = "results.json", "cache"
# With two seeds, they take two minutes on two cores. All methods with four seeds take ten.
_DEFAULT_METHODS = ["vocagnolm", "cpt"]
# {metric: digits after the point}. Losses are in nats per token.
_METRICS = {"accuracy": 3, "clean_loss": 3, "answer_loss": 3, "seconds": 1}


@shell(_NAME)
def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo, print its table, and write `results.json`; return the exit status."""
    # Signals raise SystemExit, so that `run_seeds` ends the demo's processes on its way out.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    arguments = _read_arguments(argv)
    directory = arguments.output_dir = arguments.output_dir.resolve()
    with output_directory(directory, RESULTS):
        # The demo starts over. It resumes no earlier runs, and keeps none of their results.
        for name in [CACHE] + [f"seed{seed}" for seed in arguments.seeds]:
            shutil.rmtree(directory / name, ignore_errors=True)
        (directory / RESULTS).unlink(missing_ok=True)
        return _run(arguments)


def _run(arguments: Namespace) -> int:
    """Run all seeds and summarize them, in a directory of the demo."""
    started = time.perf_counter()
    directory = arguments.output_dir
    methods = ", ".join(arguments.methods)
    seeds = ", ".join(str(seed) for seed in arguments.seeds)
    print_main(f"training students by {methods} with seeds {seeds}; the first row takes a minute")
    print_main(f"logs: {directory}/seed*/train.log")
    # The seeds' processes inherit these variables, which libraries read when they are imported.
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["HF_DATASETS_CACHE"] = str(directory / CACHE)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    # Two runs at once with one thread each are faster than one after the other with two.
    os.environ["OMP_NUM_THREADS"] = "1"
    # Python's resource tracker would complain about what a killed worker leaves behind.
    os.environ["PYTHONWARNINGS"] = "ignore:resource_tracker:UserWarning"
    try:
        by_seed = run_seeds(arguments)
    except RuntimeError as error:
        return stop(_NAME, error, Exit.FAULTS)
    # {method: {metric: a value for each seed}}
    results: dict[str, dict[str, list[float]]] = {}
    for method in arguments.methods:
        results[method] = {}
        for metric in _METRICS:
            results[method][metric] = [by_seed[seed][method][metric] for seed in arguments.seeds]
    write_json(directory / RESULTS, results)
    print_main(f"\n{results_table(results)}\n")
    print_main(
        "mean +- standard deviation over the seeds. Rounding differs between processors, and moves "
        "the accuracy of a seed by a few points."
    )
    print_main(f"{time.perf_counter() - started:.0f} s; written: {directory / RESULTS}")
    return Exit.DONE


def _read_arguments(argv: Sequence[str] | None) -> Namespace:
    """Parse the command line."""
    parser = Parser(_NAME, __doc__)
    add = parser.add_argument
    add("--output_dir", type=Path, default=Path("runs/demo"))
    choices = [*METHODS, "all"]
    methods = f"Any of {', '.join(METHODS)}, or all; default: {' '.join(_DEFAULT_METHODS)}."
    share = "Share of the pages that have a wrong solution."
    add("--seeds", type=int, nargs="+", default=[0, 1], help="One student per seed.")
    add("--wrong_share", type=float, default=0.4, help=share)
    default = _DEFAULT_METHODS
    add("--methods", nargs="+", choices=choices, default=default, metavar="NAME", help=methods)
    add("--max_steps", type=int, help="Steps of each run; default: those of the recipe.")
    arguments = parser.parse_args(argv)
    in_range(arguments, "[0, 1]", "wrong_share")
    in_range(arguments, "[1, inf)", "max_steps")
    if "all" in arguments.methods:
        arguments.methods = list(METHODS)
    return arguments


# -- Processes -----------------------------------------------------------------------------------


def run_seeds(arguments: Namespace) -> dict[int, dict[str, dict[str, float]]]:
    """Run every seed in its own process, as many at a time as there are cores.

    Raises:
        RuntimeError: a run failed. The others are stopped.
    """
    # This imports torch, which --help does not need.
    from vocagnolm.shell.dist import cores

    # A forked process would share the threads and locks of libraries that are already loaded.
    spawn = multiprocessing.get_context("spawn")
    results = {}
    # In Python, the caller may have its own processes.
    already_running = multiprocessing.active_children()
    with ProcessPoolExecutor(min(cores(), len(arguments.seeds)), spawn, _begin_process) as pool:
        try:
            seeds = {pool.submit(_work, arguments, seed): seed for seed in arguments.seeds}
            for ended in as_completed(seeds):
                results[seeds[ended]] = ended.result()
        finally:
            # After SIGTERM a run would finish its step and save, so send SIGKILL.
            for process in multiprocessing.active_children():
                if process not in already_running:
                    process.kill()
    return results


def _work(arguments: Namespace, seed: int) -> dict[str, dict[str, float]]:
    """Run one seed. This is a function of this module, so that the demo itself imports no torch."""
    from vocagnolm.demo.run import run_seed

    return run_seed(arguments, seed)


def _begin_process() -> None:
    """Prepare a process of the pool."""
    # The demo itself handles Ctrl-C, and ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Exit when the parent process is gone, however it ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def results_table(results: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """Format mean and standard deviation over the seeds as a Markdown table.

    >>> print(results_table({"cpt": dict.fromkeys(_METRICS, [0.5, 0.6])}))
    | method | accuracy       | clean loss     | answer loss    | seconds    |
    |--------|----------------|----------------|----------------|------------|
    | CPT    | 0.550 +- 0.071 | 0.550 +- 0.071 | 0.550 +- 0.071 | 0.6 +- 0.1 |
    """
    rows = [["method"] + [metric.replace("_", " ") for metric in _METRICS]]
    for method, values in results.items():
        row = [METHODS[method][0]]
        for metric, digits in _METRICS.items():
            by_seed = values[metric]
            cell = f"{statistics.mean(by_seed):.{digits}f}"
            if len(by_seed) > 1:
                cell += f" +- {statistics.stdev(by_seed):.{digits}f}"
            row.append(cell)
        rows.append(row)
    return markdown_table(rows)
