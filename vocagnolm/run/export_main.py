"""Write the student of a checkpoint, whole, for `from_pretrained`.

    vocagnolm export runs/my-student/checkpoint-500
    vocagnolm export runs/my-adapters --merge --dtype bfloat16 --output_dir my-student

What FSDP has saved in pieces is put together by one process, without a GPU. Exit status: 0 done, 2
a wrong argument or file.
"""

from collections.abc import Sequence
from pathlib import Path

from vocagnolm.cli import Parser, say, shell


@shell("vocagnolm export")
def main(argv: Sequence[str] | None = None) -> None:
    """Export one checkpoint."""
    parser = Parser("vocagnolm export", __doc__)
    add = parser.add_argument
    add("checkpoint", type=Path, help="A checkpoint of a run, or the directory of a finished run.")
    add("--output_dir", type=Path, help="Default: beside the checkpoint, export-500 for step 500.")
    add("--merge", action="store_true", help="Add adapters to the weights that they belong to.")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="Precision written.")
    add("--trust_remote_code", action="store_true", help="Run model code from the hub.")
    arguments = vars(parser.parse_args(argv))
    from vocagnolm.run.export import export

    done = export(**arguments)
    say(f"{done.directory}: {done.parameters:,} parameters in {done.dtype}, {done.revision}")
