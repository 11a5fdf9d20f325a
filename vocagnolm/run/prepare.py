"""Align a run's corpus in advance, on machines that need no GPU.

    vocagnolm prepare [--config RECIPE] [the options of vocagnolm train]

The aligned corpus goes to the cache of `datasets`, where the run looks for it. Set
HF_DATASETS_CACHE to a disk that the GPU machines share. If the command is killed, give it again to
resume. Machines that share the cache share the work.
"""

import sys
from collections.abc import Sequence

from vocagnolm.cli import Exit, shell
from vocagnolm.shell.io import print_main


@shell("vocagnolm prepare", resumable=True)
def main(argv: Sequence[str] | None = None) -> None:
    """Prepare the corpus of a run."""
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(argv):
        print_main(f"usage: vocagnolm prepare [OPTION ...]\n\n{__doc__.strip()}")
        raise SystemExit(Exit.DONE)
    # These imports take seconds, which neither help nor a wrong option needs.
    from vocagnolm.run.parser import parse

    job = parse(argv, on_hub=True)
    from vocagnolm.run.plan import describe_documents
    from vocagnolm.training.models import read_models
    from vocagnolm.training.packed import pack_documents, read_corpora

    # Read only configurations and tokenizers, because aligning needs no weights.
    models = read_models(job.model, job.args, job.args.device)
    packed = pack_documents(job, models, read_corpora(job))
    print_main("\n".join(describe_documents(packed, models)))
