"""The trainer of a command line, as `train.py` makes it."""

from __future__ import annotations

from collections.abc import Sequence

from vocagnolm.run.parser import parse
from vocagnolm.run.train import make_trainer
from vocagnolm.trainer import VocAgnoTrainer
from vocagnolm.training.documents import load_documents
from vocagnolm.training.models import read_models


def build(argv: Sequence[str]) -> VocAgnoTrainer:
    """Load all that a run needs, without a directory for it."""
    job = parse(argv)
    models = read_models(job.model, job.args, job.args.device)
    return make_trainer(job, models, load_documents(job, models))
