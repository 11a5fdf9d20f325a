"""Continually pretrain a student with the token losses of a teacher, whatever its vocabulary.

    accelerate launch train.py --teacher Qwen/Qwen2.5-Math-7B-Instruct
    accelerate launch train.py --config recipes/demo.yaml --student DIR --dataset pages.jsonl
    python train.py --teacher T --dry_run          # print the plan and exit

Every field of transformers.TrainingArguments is an option too, but for those that docs/options.md
lists as rejected. The same command resumes a run that ended early. Exit status: 0 done, 2 a wrong
argument or file, 3 losses became NaN or infinite, 4 out of memory, a full disk or another process
lost, 75 (EX_TEMPFAIL) stopped by a signal with all saved, so that a scheduler may start it again.
docs/running.md has the details.
"""

from vocagnolm.host.command import run_script
from vocagnolm.run.main import main

if __name__ == "__main__":
    run_script(main)
