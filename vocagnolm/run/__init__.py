"""One training job: from the command line to a finished directory."""

from vocagnolm.io import ASSETS

# Written by `vocagnolm.run.options`, as importing what knows the options takes seconds.
HELP_PAGE = ASSETS / "train_help.txt"
