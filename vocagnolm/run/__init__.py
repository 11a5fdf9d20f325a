"""One training job: from the command line to a finished directory."""

from pathlib import Path

# Written by `vocagnolm.run.options`, as importing what knows the options takes seconds.
HELP_PAGE = Path(__file__).parents[1] / "assets" / "train_help.txt"
