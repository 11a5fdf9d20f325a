"""Workers of the demo that train nothing; as a script, the demo with one that only sleeps."""

from __future__ import annotations

import os
import sys
import time
from argparse import Namespace

METRICS = ("accuracy", "clean_loss", "answer_loss", "seconds")


def work(arguments: Namespace, seed: int) -> dict[str, dict[str, float]]:
    """Wait for the other seeds, and return metrics that are the seed."""
    (arguments.output_dir / f"seed{seed}").mkdir()
    for _ in range(300):
        if all((arguments.output_dir / f"seed{other}").exists() for other in arguments.seeds):
            return {method: dict.fromkeys(METRICS, seed) for method in arguments.methods}
        time.sleep(0.1)
    raise RuntimeError("the seeds do not run at the same time")


def fail(arguments: Namespace, seed: int) -> None:
    """Fail with seed 1, and never end with another."""
    if seed == 1:
        raise RuntimeError("seed 1 is broken")
    time.sleep(600)


def sleep(arguments: Namespace, seed: int) -> None:
    """Write the process id, and never end."""
    (arguments.output_dir / "worker").write_text(str(os.getpid()))
    time.sleep(600)


if __name__ == "__main__":
    import quick_demo  # the worker's process must find the function by its name

    from vocagnolm.demo import main as demo

    demo._work = quick_demo.sleep
    sys.exit(demo.main(sys.argv[1:]))
