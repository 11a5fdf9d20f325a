"""Losses and shares along training runs, averaged over the seeds of a setting."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from vocagnolm.report.frame import option_of
from vocagnolm.report.panels import Mark, Panel, line
from vocagnolm.report.runs import TEXTS, read_state, readable

_UNITS = {1e9: "billions", 1e6: "millions", 1e3: "thousands", 1.0: ""}
# More points than a page has room for are averaged.
_MOST_POINTS = 200


def curve_panels(all_settings: Sequence[pd.DataFrame], labels: Sequence[str]) -> list[Panel]:
    """Draw every curve that a run has in its log against the student tokens it has seen."""
    logs = [_log(setting) for setting in all_settings]
    most = max((log.tokens.max() for log in logs if len(log)), default=0)
    scale = next((scale for scale in _UNITS if most >= 2 * scale), 1.0)
    x_label = " of ".join(filter(None, (_UNITS[scale], "student tokens")))
    panels = []
    for title, entries in TEXTS["curves"].items():
        found: list[Mark] = []
        for style, (label, log) in enumerate(zip(labels, logs, strict=True)):
            if {*entries} <= {*log}:
                found += line(_curve(log, entries, scale), label, style)
        if found:
            panels.append(Panel(x_label, title, found))
    return panels


def _log(setting: pd.DataFrame) -> pd.DataFrame:
    """Read the logs of a setting's runs: a row for each entry, with its run and tokens."""
    rows = []
    for run in setting.drop_duplicates("run").itertuples():
        place, batch = Path(run.run), option_of(run, "global_batch_tokens")
        with readable(place / "trainer_state.json", "the log of train.py"):
            history = read_state(place).get("log_history", [])
            rows += [{**x, "run": run.run, "tokens": x["step"] * batch} for x in history]
    return pd.DataFrame(rows)


def _curve(log: pd.DataFrame, entries: Sequence[str], scale: float) -> list[Mark]:
    main, *ends = entries
    log = log.dropna(subset=main)
    runs = tuple(log.run.unique())
    points = log.groupby("tokens")[main].agg(["mean", "min", "max", "count"])
    if ends:
        points[["min", "max"]] = log.groupby("tokens")[ends].mean()
    # Where all of the runs are.
    points = points[points["count"] >= len(runs)].reset_index()
    bins = np.arange(len(points)) * _MOST_POINTS // max(len(points), _MOST_POINTS)
    has_band = len(runs) > 1 or bool(ends)
    return [
        Mark(
            x.tokens / scale,
            x.mean,
            (x.min, x.max) if has_band else None,
            seeds=len(runs),
            runs=runs,
        )
        for x in points.groupby(bins).mean().itertuples(index=False)
    ]
