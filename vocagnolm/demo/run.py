"""The demo: four ways to continue a student's pretraining, on text that makes itself.

Several students, each with its own seed, are continually pretrained with an equal number of tokens
by VocAgnoLM as the paper has it, by VocAgnoLM with `--aggregation share`, on every token (cpt) and
on a random 40 % of them, by the same code as `train.py`, and judged on held-out problems. Every
number that is printed comes from these runs.
"""

import json
import multiprocessing
import os
import re
import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

from vocagnolm.cli import say
from vocagnolm.demo import METHODS, worker, world
from vocagnolm.demo.worker import BASE, Plan, Result
from vocagnolm.dist import cores
from vocagnolm.io import check_writable, markdown_table
from vocagnolm.report.plots import dashes, new_plot, save_plot, series_style

# All that a demo writes, and the next one replaces.
_MADE_HERE = re.compile(r"seed-?\d+|cache|clean\.jsonl|results\.json|curves\.png")
# A container may show cores that it may not use.
_MAX_WORKERS = 4
# Digits shown of each metric.
_METRICS = {"accuracy": 3, "clean_loss": 3, "answer_loss": 3, "seconds": 1}
_SHOWN = (
    "accuracy {accuracy:.3f}, loss on clean text {clean_loss:.3f}, on answers "
    "{answer_loss:.3f} nats"
)

# {method: {metric: [one value per seed]}}; losses in nats per token.
Results = dict[str, dict[str, list[float]]]


def run_demo(plan: Plan) -> Results:
    """Run the demo and write `results.json` and `curves.png`; an earlier demo's runs are replaced.

    Raises:
        RuntimeError: a run failed; the message names its log.
        ValueError: the directory holds something else than a demo.
    """
    started = time.perf_counter()
    check_writable(plan.output_dir)
    plan.output_dir.mkdir(parents=True, exist_ok=True)
    earlier = list(plan.output_dir.iterdir())
    if others := sorted(old.name for old in earlier if not _MADE_HERE.fullmatch(old.name)):
        raise ValueError(
            f"--output_dir {plan.output_dir} holds {others[0]}, which is no part of a demo: give a "
            "new directory"
        )
    for old in filter(Path.is_dir, earlier):
        shutil.rmtree(old, ignore_errors=True)
    for seed in plan.seeds:
        plan.directory(seed).mkdir()
    # Evaluated on in all runs.
    problems = world.held_out_problems()[: worker.CURVE_PROBLEMS]
    texts = ("".join(world.render(item)) for item in problems)
    world.write_jsonl(plan.output_dir / worker.CURVE_FILE, texts)
    found: dict[tuple[str, int], Result] = {}
    total = (1 + len(plan.methods)) * len(plan.seeds)
    workers = min(cores(), _MAX_WORKERS, len(plan.methods) * len(plan.seeds))
    say(f"{total} runs by {workers} processes; their logs: {plan.output_dir}/seed*/*.log")
    for seed, method, result in _runs(plan, workers):
        found[method, seed] = result
        text = _SHOWN.format(**result) if result else "pretrained on noise and prose"
        elapsed = f"{time.perf_counter() - started:4.0f} s"
        say(f"{elapsed}  [{len(found):2}/{total}]  seed {seed}  {method:9}  {text}")
    results = {
        method: {name: [found[method, seed][name] for seed in plan.seeds] for name in _METRICS}
        for method in plan.methods
    }
    (plan.output_dir / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    _draw_curves(plan, results)
    say(f"\n{results_table(results)}\n")
    elapsed = f"{time.perf_counter() - started:.0f} s"
    say(f"{elapsed}; written: {plan.output_dir}/results.json, curves.png")
    return results


def _runs(plan: Plan, workers: int) -> Iterator[tuple[int, str, Result]]:
    """Do all runs, as many at a time as there are workers, and yield each one that is done."""
    with _pool(plan, workers) as pool:
        # A student's base comes before all else of its seed.
        waiting: dict[Future[Result], tuple[str, int]] = {
            pool.submit(worker.do_run, plan, seed, BASE): (BASE, seed) for seed in plan.seeds
        }
        while waiting:
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                method, seed = waiting.pop(future)
                try:
                    result = future.result()
                except (Exception, SystemExit) as error:
                    raise RuntimeError(
                        f"a run of the demo failed ({type(error).__name__} {error}): see "
                        f"{plan.log(seed, method)}"
                    ) from error
                yield seed, method, result
                if method == BASE:
                    # The longest first, so that no long run is left alone at the end.
                    for following in plan.methods:
                        waiting[pool.submit(worker.do_run, plan, seed, following)] = following, seed


@contextmanager
def _pool(plan: Plan, workers: int) -> Iterator[ProcessPoolExecutor]:
    """Start processes, one per core, that see no GPU and no network; none outlives the block."""
    before, others = dict(os.environ), set(multiprocessing.active_children())
    # Spawned processes read it as they import.
    os.environ |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    os.environ["HF_DATASETS_CACHE"] = str(plan.output_dir / "cache")
    # Two runs side by side beat one run on two cores.
    os.environ["OMP_NUM_THREADS"] = "1"
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))
    try:
        yield pool
    except BaseException:  # a run has failed, or the demo was stopped: no other run is of use
        for process in set(multiprocessing.active_children()) - others:
            process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        os.environ.clear()
        os.environ.update(before)


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
        rows.append([METHODS[method][0], *(_spread(values[m], _METRICS[m]) for m in metrics)])
    return markdown_table(rows)


def _spread(values: Sequence[float], digits: int) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else float("nan")
    return f"{statistics.mean(values):.{digits}f} +- {deviation:.{digits}f}"


def _draw_curves(plan: Plan, results: Results) -> None:
    """Draw the loss on held-out clean text along the runs, and the accuracies, to `curves.png`."""
    figure, (curves, dots) = new_plot(9, 3.6, columns=2, width_ratios=(2, 1))
    for position, (method, metrics) in enumerate(results.items()):
        style = series_style(position)
        color, marker = style["color"], style["marker"]
        histories = [_curve(plan.directory(seed) / method) for seed in plan.seeds]
        # A row for each evaluation, with a loss for each seed.
        rows = list(zip(*(history.values() for history in histories), strict=True))
        if rows:
            steps, means = list(histories[0]), [statistics.mean(row) for row in rows]
            (curve,) = curves.plot(steps, means, dashes(position), marker=marker, color=color)
            curve.set(label=METHODS[method][0], markersize=4)
            lows, highs = [min(row) for row in rows], [max(row) for row in rows]
            curves.fill_between(steps, lows, highs, color=color, alpha=0.15, linewidth=0)
        accuracy = metrics["accuracy"]
        dots.plot([position] * len(accuracy), accuracy, marker, color=color)
        mean = statistics.mean(accuracy)
        dots.plot([position - 0.25, position + 0.25], [mean, mean], color=color)
    curves.set(xlabel="steps", ylabel="loss on clean text (nats per token)")
    curves.legend(frameon=False)
    dots.set(ylabel="accuracy on held-out problems", ylim=(0, 1), xlim=(-0.5, len(results) - 0.5))
    dots.set_xticks(range(len(results)), [METHODS[method][0] for method in results])
    figure.suptitle(f"{len(plan.seeds)} seeds; band: lowest to highest, bar: mean", fontsize=9)
    save_plot(figure, plan.output_dir / "curves.png")


def _curve(run: Path) -> dict[int, float]:
    history = json.loads((run / "trainer_state.json").read_text())["log_history"]
    return {row["step"]: row["eval_loss"] for row in history if "eval_loss" in row}
