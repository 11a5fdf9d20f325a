"""Write the losses and the weight of every token of a corpus, for any trainer.

    vocagnolm weights --student S --teacher T --dataset D --output_dir OUT
    vocagnolm weights --student S --teacher_losses STORE --dataset D --output_dir OUT
    accelerate launch -m vocagnolm weights ...     # processes share the work

The options are those of vocagnolm train, and the numbers those of its first step, as if without
--top_k_warmup_steps. --learning_rate and others that only steer updates change nothing.
`datasets.load_dataset("OUT")` reads the result. A row is a document or a conversation, or a part of
a document that exceeds --max_length:

    dataset, document, start, end   where it is: the corpus, an index, characters
    text or messages                what it says
    input_ids, labels               the student's tokens; -100 where a token has no label
    student_loss, teacher_loss      of each token, in nats; NaN where it has none
    weight                          of each token; 0 without a label

If the command is interrupted, even killed, give it again: it continues after the last shard. Exit
status: 0 done, 2 a wrong argument or file, 3 a loss is not finite, 4 out of memory, 130
interrupted.
"""

import sys
from collections.abc import Sequence

from vocagnolm.cli import Exit, shell
from vocagnolm.fields import OptionError
from vocagnolm.run import parser
from vocagnolm.shell.io import print_main


def check(argv: Sequence[str]) -> None:
    """Check the command line without importing torch.

    Raises:
        ValueError: an argument is wrong, in one line.
    """
    if {"-h", "--help"} & set(argv):
        print_main(f"usage: vocagnolm weights [OPTION ...]\n\n{__doc__}")
        raise SystemExit(Exit.DONE)
    _, values, _ = parser.check(argv)
    if values.get("method") in ("kld", "uld"):
        raise OptionError(
            "method", f"{values['method']} adds a distance to the loss, and weighs no token"
        )
    if values.get("teacher_sharding") == "node":
        raise OptionError("teacher_sharding", "needs all processes at once: leave it out")
    if values.get("dry_run"):
        raise OptionError("dry_run", "is for vocagnolm train: leave it out")
    if not values.get("output_dir"):
        raise OptionError("output_dir", "is required")


@shell("vocagnolm weights", out_of_memory="lower --per_device_train_batch_size", resumable=True)
def main(argv: Sequence[str] | None = None) -> None:
    """Weigh a corpus, or what is left of it."""
    argv = sys.argv[1:] if argv is None else argv
    check(argv)
    job = parser.parse(argv, on_hub=True, updates=False)
    # This imports the trainer, which takes seconds.
    from vocagnolm.run.weighing import weigh

    weigh(job)
