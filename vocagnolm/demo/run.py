"""The demo: three ways to continue a student's pretraining, on text that makes itself.

    python -m vocagnolm.demo.run            # what `make demo` runs

Several students, each with its own seed, are continually pretrained with an equal number of tokens
by VocAgnoLM, on every token (cpt) and on a random 40 % of them, through the same `train.py` as any
other run, and judged on held-out problems. Every number that is printed comes from these runs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vocagnolm.demo import world as demo_world
from vocagnolm.demo.worker import (
    BASE,
    CURVE_FILE,
    CURVE_PROBLEMS,
    METHODS,
    PLAN_FILE,
    RESULT_FILE,
    Plan,
    seed_dir,
)

SEEDS = (0, 1, 2, 3)
MAX_WORKERS = 4  # a container may show cores that it may not use
REPOSITORY = Path(__file__).parents[2]
METRICS = ("accuracy", "clean_loss", "answer_loss", "seconds")
LABELS = {"vocagnolm": "VocAgnoLM", "cpt": "CPT", "random": "random 40 %"}
# Told apart without colour: by dash and shade.
STYLES: dict[str, dict[str, Any]] = {
    "vocagnolm": {"color": "black", "linestyle": "-", "marker": "o"},
    "cpt": {"color": "0.35", "linestyle": "--", "marker": "s"},
    "random": {"color": "0.6", "linestyle": ":", "marker": "^"},
}

Results = dict[str, dict[str, list[float]]]


def run_demo(output_dir: str | Path, seeds: Sequence[int] = SEEDS, **settings: Any) -> Results:
    """Run the demo and write `results.json` and `curves.png`.

    Args:
        output_dir: gets everything; the runs of an earlier demo in it are replaced.
        seeds: one student per method and seed.
        **settings: other settings of `demo_worker.Plan`.

    Returns:
        `{method: {metric: [one value per seed]}}`; losses in nats per token.

    Raises:
        RuntimeError: a run failed; the message names its log.
    """
    output_dir = Path(output_dir).resolve()
    started = time.perf_counter()
    plan = Plan(tuple(seeds), **settings)
    _prepare(output_dir, plan)
    with _workers(output_dir, plan) as workers:
        _follow(output_dir, plan, workers)
        for worker in workers.values():
            worker.wait()
    results = _collect(output_dir, plan)
    (output_dir / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    draw(output_dir, seeds, results)
    print(f"\n{table(results)}\n")
    print(f"{time.perf_counter() - started:.0f} s; written: {output_dir}/results.json, curves.png")
    return results


def _prepare(output_dir: Path, plan: Plan) -> None:
    """Make room for the runs, and write what the workers share."""
    output_dir.mkdir(parents=True, exist_ok=True)
    for old in [*output_dir.glob("seed*"), output_dir / "cache"]:
        shutil.rmtree(old, ignore_errors=True)
    for seed in plan.seeds:
        seed_dir(output_dir, seed).mkdir()
    (output_dir / PLAN_FILE).write_text(json.dumps(vars(plan)))
    problems = demo_world.held_out_problems()[:CURVE_PROBLEMS]
    texts = ("".join(demo_world.render(item)) for item in problems)
    demo_world.write_jsonl(output_dir / CURVE_FILE, texts)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def _workers(output_dir: Path, plan: Plan) -> Iterator[dict[Path, subprocess.Popen[bytes]]]:
    """Processes that do the runs, one per core, and their logs. None outlives the block."""
    count = min(_cores(), MAX_WORKERS, len(plan.methods) * len(plan.seeds))
    launch = [sys.executable, "-m", "accelerate.commands.launch"]
    config = ["--config_file", str(REPOSITORY / "accelerate_configs" / "cpu.yaml")]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",  # two runs side by side beat one run on two cores
        "HF_DATASETS_CACHE": str(output_dir / "cache"),
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    workers: dict[Path, subprocess.Popen[bytes]] = {}
    try:
        for index in range(count):
            log = output_dir / f"worker{index}.log"
            with log.open("wb") as file:
                workers[log] = subprocess.Popen(
                    [*launch, *config, "-m", "vocagnolm.demo.worker", str(output_dir)],
                    cwd=REPOSITORY,
                    env=environment,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # so that the launcher's child ends with it
                )
        yield workers
    finally:
        for worker in workers.values():
            if worker.poll() is None:
                os.killpg(worker.pid, signal.SIGTERM)
                worker.wait()


def _follow(output_dir: Path, plan: Plan, workers: Mapping[Path, subprocess.Popen[bytes]]) -> None:
    """Print a line for every finished run, until all are or one failed."""
    started = time.perf_counter()
    files = {(seed, method): _finished(output_dir, seed, method) for seed, method in plan.tasks()}
    total = len(files)
    print(f"{total} runs by {len(workers)} processes; their logs: {output_dir}/worker*.log")
    while files:
        ended = {log: worker.poll() for log, worker in workers.items()}
        for (seed, method), file in list(files.items()):
            if not file.exists():
                continue
            del files[seed, method]
            text = "pretrained on noise and prose"
            if method != BASE:
                result = json.loads(file.read_text())
                text = (
                    f"accuracy {result['accuracy']:.3f}, loss on clean text "
                    f"{result['clean_loss']:.3f}, on answers {result['answer_loss']:.3f} nats"
                )
            elapsed = f"{time.perf_counter() - started:4.0f} s"
            print(f"{elapsed}  [{total - len(files):2}/{total}]  seed {seed}  {method:9}  {text}")
        for log, status in ended.items():
            if status:
                raise RuntimeError(f"a run of the demo failed with status {status}: see {log}")
        if files and None not in ended.values():
            raise RuntimeError(f"the demo's processes ended early: see {output_dir}/worker*.log")
        sys.stdout.flush()
        time.sleep(0.2)


def _finished(output_dir: Path, seed: int, method: str) -> Path:
    """The file that a run leaves when it is done."""
    directory = seed_dir(output_dir, seed)
    return directory / f"{BASE}.done" if method == BASE else directory / method / RESULT_FILE


def _collect(output_dir: Path, plan: Plan) -> Results:
    results: Results = {}
    for method in plan.methods:
        files = [_finished(output_dir, seed, method) for seed in plan.seeds]
        rows = [json.loads(file.read_text()) for file in files]
        results[method] = {metric: [row[metric] for row in rows] for metric in METRICS}
    return results


def table(results: Results) -> str:
    """Mean and standard deviation over the seeds, as a Markdown table.

    >>> print(table({"cpt": {"accuracy": [0.5, 0.6], "seconds": [9.0, 9.0]}}))
    | method | accuracy       | seconds    |
    |--------|----------------|------------|
    | CPT    | 0.550 +- 0.071 | 9.0 +- 0.0 |
    """
    names = {"clean_loss": "clean loss", "answer_loss": "answer loss"}
    rows = [["method", *(names.get(metric, metric) for metric in next(iter(results.values())))]]
    for method, metrics in results.items():
        cells = [_spread(values, 1 if name == "seconds" else 3) for name, values in metrics.items()]
        rows.append([LABELS[method], *cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| " + " | ".join(x.ljust(width) for x, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def _spread(values: Sequence[float], digits: int) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else float("nan")
    return f"{statistics.mean(values):.{digits}f} +- {deviation:.{digits}f}"


def draw(output_dir: Path, seeds: Sequence[int], results: Results) -> None:
    """Draw the loss on held-out clean text along the runs, and the accuracies, to `curves.png`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (curves, dots) = pyplot.subplots(1, 2, figsize=(9, 3.6), width_ratios=(2, 1))
    for position, method in enumerate(results):
        style = STYLES[method]
        histories = [_curve(seed_dir(output_dir, seed) / method) for seed in seeds]
        steps = [step for step, _ in histories[0]]
        rows = list(zip(*([loss for _, loss in history] for history in histories), strict=True))
        if rows:
            means = [statistics.mean(row) for row in rows]
            curves.plot(steps, means, label=LABELS[method], markersize=4, **style)
            lows, highs = [min(row) for row in rows], [max(row) for row in rows]
            curves.fill_between(steps, lows, highs, color=style["color"], alpha=0.15, linewidth=0)
        accuracy = results[method]["accuracy"]
        dots.plot([position] * len(accuracy), accuracy, style["marker"], color=style["color"])
        mean = statistics.mean(accuracy)
        dots.plot([position - 0.25, position + 0.25], [mean, mean], color=style["color"])
    curves.set(xlabel="steps", ylabel="loss on clean text (nats per token)")
    curves.legend(frameon=False)
    dots.set(ylabel="accuracy on held-out problems", ylim=(0, 1), xlim=(-0.5, len(results) - 0.5))
    dots.set_xticks(range(len(results)), [LABELS[method] for method in results])
    figure.suptitle(f"{len(seeds)} seeds; band: lowest to highest, bar: mean", fontsize=9)
    figure.tight_layout()
    figure.savefig(output_dir / "curves.png", dpi=150)
    pyplot.close(figure)


def _curve(run: Path) -> list[tuple[int, float]]:
    history = json.loads((run / "trainer_state.json").read_text())["log_history"]
    return [(row["step"], row["eval_loss"]) for row in history if "eval_loss" in row]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo from the command line and return its exit status."""
    parser = argparse.ArgumentParser(description="CPT, VocAgnoLM and random tokens compared.")
    parser.add_argument("--output_dir", default="runs/demo")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument(
        "--wrong_share", type=float, default=0.4, help="Pages with wrong solutions."
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument(
        "--options", nargs="+", default=(), metavar="NAME=VALUE", help="For train.py: all runs."
    )
    parser.add_argument(
        "--guidance", nargs="+", default=(), metavar="NAME=VALUE", help="For train.py: VocAgnoLM's."
    )
    arguments = vars(parser.parse_args(argv))
    arguments["methods"] = tuple(arguments["methods"])
    for name in ("options", "guidance"):
        arguments[name] = tuple(f"--{option}" for option in arguments[name])
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends the workers too
    try:
        run_demo(**arguments)
    except RuntimeError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
