"""Tables and plots, as every report writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from vocagnolm import io as tables
from vocagnolm.report import plots


def test_unpadded_table_is_as_wide_as_its_cells() -> None:
    text = tables.markdown_table([["a", "long"], ["1", "2"]], padded=False)
    assert text == "| a | long |\n|---|---|\n| 1 | 2 |"


def test_rows_of_unequal_length_are_rejected() -> None:
    with pytest.raises(ValueError, match="argument 2"):
        tables.markdown_table([["a", "b"], ["1"]])


def test_plot_is_written_in_every_format(tmp_path: Path) -> None:
    figure, axes = plots.new_plot(4, 2, (2, 1), share_y=True)
    for number, place in enumerate(axes):
        place.plot([0, 1], [1, 0], linestyle=plots.dashes(number), **plots.series_style(number))
    plots.save_plot(figure, tmp_path / "a.png", ".pdf")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")


def test_series_differ_in_marker_or_shade() -> None:
    styles = [tuple(plots.series_style(number).values()) for number in range(21)]
    assert len(set(styles)) == 21
