"""What holds for all tests; their fixtures are in `tests/support/`."""

from __future__ import annotations

import gc
import os
import platform
import tempfile
from collections import Counter

# No test may reach for the hub; set before transformers reads it.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Bars of less than a minute are no output; tqdm reads it when it is imported.
os.environ["TQDM_DELAY"] = "60"

import pytest
from hypothesis import settings

# Read when datasets is imported, which nothing above does.
_CACHE = tempfile.TemporaryDirectory(prefix="vocagnolm-tests-")  # goes when the tests end
os.environ["HF_DATASETS_CACHE"] = _CACHE.name

# No deadline: a busy machine is no fault. `--hypothesis-profile` chooses another one.
settings.register_profile("default", deadline=None)
settings.register_profile("fast", deadline=None, max_examples=20)
settings.load_profile("default")


def pytest_configure(config: pytest.Config) -> None:
    """Set the CPU's instructions, and offer the fixtures where tests are run."""
    # Tests compare float32, on processors that multiply in bfloat16, too. PyTorch reads this when
    # it first computes, and the processes that tests start inherit it. Tests of a GPU compare it
    # with the CPU's bfloat16: PyTorch 2.11 needs all instructions of the CPU for that.
    if platform.machine() in ("x86_64", "AMD64") and config.option.markexpr != "gpu":
        os.environ["ATEN_CPU_CAPABILITY"] = "avx2"
    # Workers have the tests; the process that hands them out does not.
    if config.getoption("dist", "no") == "no":
        gc.disable()  # until all is imported: it stays
        for name in ("families", "world", "adapter_world", "wandb_files"):
            config.pluginmanager.import_plugin(name)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the files that take long first: `make` gives each to one of several processes."""
    long = Counter(item.path for item in items if {"slow", "processes"} & set(item.keywords))
    items.sort(key=lambda item: -long[item.path])


def pytest_collection_finish() -> None:
    """Keep all that was imported out of the garbage collections that every Trainer asks for."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """The same for what the tests of a file have imported and left in caches."""
    if nextitem and nextitem.path != item.path:
        gc.collect()
        gc.freeze()
