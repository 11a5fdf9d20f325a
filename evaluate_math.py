"""Few-shot accuracy on the paper's nine math benchmarks: `vocagnolm evaluate` as a script.

python evaluate_math.py --model runs/my-student
accelerate launch evaluate_math.py --model Qwen/Qwen2.5-Math-7B       # one process per GPU
python evaluate_math.py --model M --dry_run                           # prompts and token counts
python evaluate_math.py --regrade FILE.jsonl.gz --benchmark gsm8k     # grade stored outputs
"""

import sys

from vocagnolm.__main__ import main
from vocagnolm.cli import run_script

if __name__ == "__main__":
    run_script(lambda: main(["evaluate", *sys.argv[1:]]))
