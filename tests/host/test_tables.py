"""Tables, as every report writes them."""

from __future__ import annotations

import pytest

from vocagnolm import io as tables


def test_unpadded_table_is_as_wide_as_its_cells() -> None:
    text = tables.markdown_table([["a", "long"], ["1", "2"]], padded=False)
    assert text == "| a | long |\n|---|---|\n| 1 | 2 |"


def test_rows_of_unequal_length_are_rejected() -> None:
    with pytest.raises(ValueError, match="argument 2"):
        tables.markdown_table([["a", "b"], ["1"]])
