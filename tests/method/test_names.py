"""Names that are not paths: quick errors if the hub cannot have them."""

from __future__ import annotations

from pathlib import Path

import pytest

from vocagnolm.shell.hub import check_name


@pytest.mark.parametrize(
    "name", ["./foo/bar/baz", "foo/bar/baz", "a b", "/no/model", "~/m", "../m"]
)
def test_name_that_the_hub_cannot_have_is_rejected(name: str) -> None:
    with pytest.raises(ValueError, match=f"teacher {name}: no such file"):
        check_name("teacher", name)


def test_names_of_files_and_of_repositories_pass(tmp_path: Path) -> None:
    for name in (str(tmp_path), "gpt2", "org/model"):
        check_name("student", name)
