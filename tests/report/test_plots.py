"""What the plot of accuracies draws."""

from __future__ import annotations

import pandas as pd
import pytest
from matplotlib.container import BarContainer

from vocagnolm.report.plots import draw_bars


def test_bars_stand_around_their_column_and_the_papers_have_no_interval() -> None:
    bars = pd.DataFrame({"value": 50.0, "low": 40.0, "high": 60.0}, index=["gsm8k"])
    figure = draw_bars({"ours": bars, "reported: x": bars[["value"]]})
    (axes,) = figure.axes
    drawn = [place for place in axes.containers if isinstance(place, BarContainer)]
    ours, reported = drawn
    assert ours.errorbar is not None
    assert reported.errorbar is None
    assert reported[0].get_facecolor() == (1, 1, 1, 1)
    middles = [bar[0].get_x() + bar[0].get_width() / 2 for bar in drawn]
    assert middles[0] < 0 < middles[1]
    assert sum(middles) == pytest.approx(0)
