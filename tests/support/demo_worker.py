"""Run the demo with a worker that only writes its process id and then sleeps."""

import os
import sys
import time
from argparse import Namespace

from vocagnolm.demo import main as demo


def work(arguments: Namespace, seed: int) -> None:
    """Stand in for the demo's own worker."""
    (arguments.output_dir / "worker").write_text(str(os.getpid()))
    time.sleep(600)


if __name__ == "__main__":
    from demo_worker import work as work_by_name

    # The worker's process must find the function by its name, too.
    demo._work = work_by_name
    sys.exit(demo.main(sys.argv[1:]))
