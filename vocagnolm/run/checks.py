"""Checks of all that can be known before the corpus is aligned, which may take hours."""

from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import LocalTokenNotFoundError

from vocagnolm.host.command import raise_first
from vocagnolm.host.files import check_writable
from vocagnolm.host.processes import in_agreement
from vocagnolm.run.documents import Documents
from vocagnolm.run.estimates import disk_uses
from vocagnolm.run.job import Job
from vocagnolm.run.pair import Pair
from vocagnolm.run.tracking import check_trackers


def check_before_work(job: Job, pair: Pair) -> None:
    """Check places, the hub, weights and stores, from the cheapest to the dearest.

    Raises:
        ValueError: the run would end in an error, in one line.
    """
    check_trackers(job.run)
    # One process looks: they share the disks and the hub, and what one says all raise.
    with in_agreement(takes_long=True):
        if job.run.process_index == 0:
            if job.model.save_store:
                check_writable(Path(job.model.save_store), "--save_store")
            for model in (pair.student, *pair.teachers):
                model.source.check_weights()
            if job.run.push_to_hub:
                _check_hub(job.run.hub_token)
        # Nobody may align what is damaged, and cache it.
        if pair.guide and job.run.local_process_index == 0:
            pair.guide.check()


def check_room(job: Job, pair: Pair, documents: Documents) -> None:
    """Reject a run that its disks have no room for, in one line (ValueError)."""
    with in_agreement():
        if job.run.process_index == 0:
            raise_first(filter(None, (use.fault for use in disk_uses(job, pair, documents))))


def _check_hub(token: str | None) -> None:
    """Reject a push that nobody is logged in for, or that does not reach the hub."""
    remedy = "run `hf auth login` or set HF_TOKEN, or leave --push_to_hub out"
    try:
        HfApi(token=token).whoami()
    except LocalTokenNotFoundError as error:
        raise ValueError(f"--push_to_hub: nobody is logged in to the hub: {remedy}") from error
    # Those of the network are of no common kind.
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"--push_to_hub: the hub cannot be reached: {reason}: {remedy}") from error
