"""CPT, VocAgnoLM and random tokens compared, in an embedded world that needs no download.

    vocagnolm demo                                 # six minutes on two CPU cores
    vocagnolm demo --seeds 0 --methods cpt --options max_steps=2

Several students, each with its own seed, are continually pretrained with an equal number of tokens,
by the same code as train.py, and judged on held-out problems. Exit status: 0 done, 2 a wrong
argument, 3 a run failed.
"""

import json
import multiprocessing
import os
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from vocagnolm.cli import Exit, Parser, print_main, shell, stop
from vocagnolm.io import markdown_table

_NAME = "vocagnolm demo"
# Names of runs: their labels, and what they add to the recipe.
METHODS = {
    "vocagnolm": ("VocAgnoLM", "--method=vocagnolm"),
    "share": ("VocAgnoLM, share", "--method=vocagnolm", "--aggregation=share"),
    "accept": ("VocAgnoLM, accept", "--method=vocagnolm", "--selection=accept"),
    "cpt": ("CPT", "--method=cpt"),
    "random": ("random 40 %", "--method=random"),
}
# Digits shown of each metric; losses are in nats per token.
_METRICS = {"accuracy": 3, "clean_loss": 3, "answer_loss": 3, "seconds": 1}


@shell(_NAME)
def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo, print its table, and write `results.json`; return the exit status."""
    # As an exception, so that the demo's processes end with it.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    parser = Parser(_NAME, __doc__)
    add = parser.add_argument
    add("--output_dir", type=Path, default=Path("runs/demo"))
    add("--seeds", type=int, nargs="+", default=[0, 1, 2, 3], help="A student for each.")
    add("--wrong_share", type=float, default=0.4, help="Pages with wrong solutions.")
    shown = f"Of {', '.join(METHODS)}; default: all."
    add("--methods", nargs="+", choices=METHODS, default=[*METHODS], metavar="NAME", help=shown)
    add("--options", nargs="+", default=(), metavar="NAME=VALUE", help="For train.py.")
    arguments = parser.parse_args(argv)
    from vocagnolm.demo.run import leave_for_the_docs, run_seed
    from vocagnolm.dist import cores

    started = time.perf_counter()
    arguments.output_dir = directory = arguments.output_dir.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    for seed in arguments.seeds:
        shutil.rmtree(directory / f"seed{seed}", ignore_errors=True)
    print_main(f"logs of the runs: {directory}/seed*/train.log")
    # Spawned processes read it as they import; two runs side by side beat one run on two cores.
    os.environ |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(directory / "cache")}
    spawn, workers = multiprocessing.get_context("spawn"), min(cores(), len(arguments.seeds))
    try:
        with ProcessPoolExecutor(workers, spawn) as pool:
            found = list(pool.map(partial(run_seed, arguments), arguments.seeds))
    except RuntimeError as error:
        return stop(_NAME, error, Exit.BAD_NUMBERS)
    leave_for_the_docs(directory, arguments.seeds[0])
    results = {
        method: {metric: [one[method][metric] for one in found] for metric in _METRICS}
        for method in arguments.methods
    }
    (directory / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    print_main(f"\n{results_table(results)}\n")
    print_main(f"{time.perf_counter() - started:.0f} s; written: {directory}/results.json")
    return Exit.DONE


def results_table(results: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """Lay out mean and standard deviation over the seeds, as a Markdown table.

    >>> print(results_table({"cpt": dict.fromkeys(_METRICS, [0.5, 0.6])}))
    | method | accuracy       | clean loss     | answer loss    | seconds    |
    |--------|----------------|----------------|----------------|------------|
    | CPT    | 0.550 +- 0.071 | 0.550 +- 0.071 | 0.550 +- 0.071 | 0.6 +- 0.1 |
    """
    rows = [["method", *(metric.replace("_", " ") for metric in _METRICS)]]
    for method, values in results.items():
        row = [METHODS[method][0]]
        for metric, digits in _METRICS.items():
            found = values[metric]
            deviation = statistics.stdev(found) if len(found) > 1 else float("nan")
            row.append(f"{statistics.mean(found):.{digits}f} +- {deviation:.{digits}f}")
        rows.append(row)
    return markdown_table(rows)
