"""Settings for all tests; the fixtures are in `tests/support/`."""

from __future__ import annotations

import gc
import os
import platform
import tempfile
from collections import Counter

# No test may ask the hub; transformers reads this on import.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# No progress bar in the first minute; tqdm reads this on import.
os.environ["TQDM_DELAY"] = "60"

import pytest
from hypothesis import settings

# `datasets` reads this on import, and nothing above imports it.
_CACHE = tempfile.TemporaryDirectory(prefix="vocagnolm-tests-")  # removed when the tests end
os.environ["HF_DATASETS_CACHE"] = _CACHE.name

# No deadline: a busy machine is not a fault. `--hypothesis-profile` selects another.
settings.register_profile("default", deadline=None)
settings.register_profile("fast", deadline=None, max_examples=20)
settings.load_profile("default")


def pytest_configure(config: pytest.Config) -> None:
    """Limit the CPU's instructions, and load the fixtures where tests run."""
    # Tests compare float32 numbers, even on processors that multiply in bfloat16. PyTorch reads
    # this when it first computes, and child processes inherit it. Tests of a GPU compare it with
    # bfloat16 on the CPU, for which PyTorch 2.11 needs all of the CPU's instructions.
    if platform.machine() in ("x86_64", "AMD64") and config.option.markexpr != "gpu":
        os.environ["ATEN_CPU_CAPABILITY"] = "avx2"
    # Under xdist the workers run the tests; the process that distributes them runs none.
    if config.getoption("dist", "no") == "no":
        gc.disable()  # until all is imported: none of it is garbage
        for name in ("families", "world", "wandb_files"):
            config.pluginmanager.import_plugin(name)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run slow files first: `make` gives each file to one of several processes."""
    long = Counter(item.path for item in items if {"slow", "processes"} & set(item.keywords))
    items.sort(key=lambda item: -long[item.path])


def pytest_collection_finish() -> None:
    """Exclude all imports from the garbage collection that every Trainer triggers."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Do the same for what a file's tests have imported and cached."""
    if nextitem and nextitem.path != item.path:
        gc.collect()
        gc.freeze()
