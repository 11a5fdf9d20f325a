"""Losses and shares along training runs, averaged over the seeds of a setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from vocagnolm.report.runs import TrainingRun

# Titles, and entries of the log: the value, and the ends of its band, if it has some.
CURVES = {
    "loss on all tokens (nats)": ["student_loss_nats"],
    "loss on selected tokens (nats)": ["selected_loss_nats"],
    "held-out loss (nats)": ["eval_loss"],
    "excess, median (nats)": [
        "excess_loss_p50_nats",
        "excess_loss_p10_nats",
        "excess_loss_p90_nats",
    ],
    "selected share of the tokens": ["selected_fraction"],
    "unmapped share of the tokens": ["unmapped_fraction"],
}


def read_curves(
    settings: Mapping[str, Sequence[TrainingRun]],
) -> dict[str, dict[str, pd.DataFrame]]:
    """Return the curves by title and setting, with columns tokens, mean, low and high."""
    curves: dict[str, dict[str, pd.DataFrame]] = {}
    for label, runs in settings.items():
        log = _log(runs)
        for title, entries in CURVES.items():
            if set(entries) <= set(log.columns):
                curves.setdefault(title, {})[label] = _curve(log, entries)
    return {title: curves[title] for title in CURVES if title in curves}


def _log(runs: Sequence[TrainingRun]) -> pd.DataFrame:
    """Return the logs of a setting's runs: a row for each entry, with its run and tokens."""
    rows = []
    for run in runs:
        for entry in run.state.get("log_history", ()):
            tokens = entry["step"] * run.batch_tokens
            rows.append({**entry, "run": run.label, "tokens": tokens})
    return pd.DataFrame(rows)


def _curve(log: pd.DataFrame, entries: Sequence[str]) -> pd.DataFrame:
    main, *ends = entries
    log = log.dropna(subset=[main])
    points = log.groupby("tokens")[main].agg(mean="mean", low="min", high="max", runs="count")
    if ends:
        points[["low", "high"]] = log.groupby("tokens")[ends].mean()
    # Where all of the runs are.
    points = points[points.runs >= log.run.nunique()].reset_index()
    return points[["tokens", "mean", "low", "high"]]
