"""A worker of the demo that trains nothing: its metrics are its seed."""

from __future__ import annotations

import time
from argparse import Namespace
from multiprocessing.connection import Connection

METRICS = ("accuracy", "clean_loss", "answer_loss", "seconds")


def work(sender: Connection, arguments: Namespace, seed: int) -> None:
    """Make a seed's directory, wait for the other seeds, and send results."""
    (arguments.output_dir / f"seed{seed}" / "base").mkdir(parents=True)
    homes = [arguments.output_dir / f"seed{other}" for other in arguments.seeds]
    for _ in range(300):
        if all(home.exists() for home in homes):
            break
        time.sleep(0.1)
    else:
        sender.send("the seeds do not run at the same time")
    sender.send({method: dict.fromkeys(METRICS, seed) for method in arguments.methods})
