"""`vocagnolm prepare`: align the corpus of a run ahead of it, on machines that need no GPU."""

import sys
import time
from collections.abc import Sequence

from vocagnolm.cli import Exit, say, shell
from vocagnolm.io import duration

_HELP = """\
usage: vocagnolm prepare [--config RECIPE] [the options of vocagnolm train]

Aligns the corpus of a run and keeps it where the run will look: give the options of the run. A
command that was killed continues where it was, and machines that share the cache share the work.
The cache is that of datasets: set HF_DATASETS_CACHE to a disk that the GPU job sees too."""


@shell("vocagnolm prepare", resumable=True)
def main(argv: Sequence[str] | None = None) -> None:
    """Prepare the corpus of a run."""
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(argv):
        say(_HELP)
        raise SystemExit(Exit.DONE)
    # Only now: a page of help does not wait for them.
    from vocagnolm.run.documents import load_documents
    from vocagnolm.run.estimates import aligned_use, describe_preparation
    from vocagnolm.run.pair import load_pair
    from vocagnolm.run.plan import describe_documents, fitted
    from vocagnolm.run.recipe import parse

    job = parse(argv)
    pair = load_pair(job.model, job.load, job.pack, job.method, job.run.device)
    began = time.perf_counter()
    documents = load_documents(job, pair, sample=True)
    if not documents.is_whole:
        use = aligned_use(documents)
        say(fitted(f"{describe_preparation(job, documents)}\ndisk       about {use}"))
        if use.fault:
            raise ValueError(use.fault)
        began = time.perf_counter()
        documents = load_documents(job, pair)
    took, use = time.perf_counter() - began, aligned_use(documents)
    tokens = documents.segments.total("student_tokens")
    if documents.held_out and not job.data.eval_dataset:
        tokens += documents.held_out.total("student_tokens")
    lines = describe_documents(documents, pair)
    lines.append(
        f"prepared   {use.needed / 1e9:.3g} GB ({use.needed / tokens:.2f} bytes per student token) "
        f"in {use.directory}, {duration(took)}, {tokens / took:,.0f} student tokens per second"
    )
    say(fitted("\n".join(lines)))
