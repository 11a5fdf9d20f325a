"""Here messages have the words of a command line."""

from collections.abc import Iterator

import pytest

from vocagnolm.fields import at_shell


@pytest.fixture(autouse=True)
def _at_shell() -> Iterator[None]:
    token = at_shell.set(True)
    yield
    at_shell.reset(token)
