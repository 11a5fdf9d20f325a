"""Continual pretraining guided by a teacher: `vocagnolm train` as a script.

accelerate launch train.py --teacher Qwen/Qwen2.5-Math-7B-Instruct
python train.py --teacher T --dry_run          # print the plan and exit
python train.py --help                         # all options by subject
"""

import sys

from vocagnolm.__main__ import main
from vocagnolm.cli import run_script

if __name__ == "__main__":
    run_script(lambda: main(["train", *sys.argv[1:]]))
