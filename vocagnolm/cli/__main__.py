"""Start a command in several processes: `accelerate launch -m vocagnolm.cli score ...`."""

from vocagnolm.cli import main
from vocagnolm.host.command import run_script

if __name__ == "__main__":
    run_script(main)
