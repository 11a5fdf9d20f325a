"""What the plots of a comparison draw, and what tells their series apart."""

from __future__ import annotations

import pandas as pd
import pytest
from matplotlib.container import BarContainer

from vocagnolm.report.plots import draw_bars, draw_curves


def curve(points: int) -> pd.DataFrame:
    columns = {"tokens": range(points), "mean": 1.0, "low": 0.5, "high": 1.5}
    return pd.DataFrame(columns, index=range(points))


def test_setting_has_one_style_in_all_plots() -> None:
    curves = {f"plot {number}": {"a": curve(2), "b": curve(2)} for number in range(3)}
    curves["last"] = {"b": curve(30)}
    figure = draw_curves(curves)
    # Two rows have room for six plots.
    assert len(figure.axes) == 4
    colors = [[line.get_color() for line in axes.lines] for axes in figure.axes]
    (a, b), *others, last = colors
    assert a != b
    assert others == [[a, b], [a, b]]
    assert last == [b]
    # A curve with many points has no markers.
    assert figure.axes[0].lines[1].get_marker() != ""
    assert figure.axes[3].lines[0].get_marker() == ""


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
