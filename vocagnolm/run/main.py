"""One training job, from the command line to a finished directory; `train.py` tells its use."""

import math
import sys
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import LocalTokenNotFoundError

from vocagnolm.cli import Exit, is_main, note, say, stop
from vocagnolm.collator import PackedCollator
from vocagnolm.conventions import NonFiniteLoss
from vocagnolm.dist import in_agreement, rank0
from vocagnolm.host.cards import push
from vocagnolm.host.options import raise_first
from vocagnolm.host.trackers import offline_reason
from vocagnolm.io import JsonObject, check_writable, write_text
from vocagnolm.models.layers import leave_teachers_alone
from vocagnolm.models.probes import check_longest, check_packing
from vocagnolm.models.source import model_files
from vocagnolm.run import checkpoints, failures
from vocagnolm.run.documents import Documents, load_documents
from vocagnolm.run.estimates import disk_uses
from vocagnolm.run.job import Job
from vocagnolm.run.model_card import model_card
from vocagnolm.run.pair import Pair, load_models, load_pair
from vocagnolm.run.plan import (
    describe_documents,
    describe_mixture,
    describe_run,
    fitted,
    show_example,
)
from vocagnolm.run.recipe import parse
from vocagnolm.run.watchers import (
    describe_store,
    describe_tracking,
    load_guidance_table,
    load_recorder,
)
from vocagnolm.trainer import VocAgnoTrainer

# The beginning of an error's line, whichever command was typed.
_NAME = "train.py"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one training job and return its exit status."""
    trainer: VocAgnoTrainer | None = None
    try:
        argv = sys.argv[1:] if argv is None else argv
        job = parse(argv)
        built = build(job)
        if built is None:
            return Exit.DONE
        trainer, checkpoint = built
        return train_and_save(trainer, checkpoint, job)
    except NonFiniteLoss as error:
        return stop(_NAME, error, Exit.BAD_NUMBERS)
    except KeyboardInterrupt:
        note(f"{_NAME}: interrupted: give the same command again to continue")
        return Exit.INTERRUPTED
    except Exception as error:
        wrong = ValueError if trainer else (ValueError, ImportError, OSError)
        if isinstance(error, wrong):
            return stop(_NAME, error, Exit.WRONG)
        doing = f"training ({trainer.state.global_step} steps done)" if trainer else "preparation"
        # Something that this process alone has met, or a fault of the program.
        if explanation := failures.explain(error, doing):
            return stop(_NAME, explanation, Exit.OUT_OF_MEMORY)
        raise


def build(job: Job) -> tuple[VocAgnoTrainer, str | None] | None:
    """Do all that can go wrong before the first step; None after a dry run and a finished run.

    Returns:
        The trainer, and the checkpoint that it resumes from, if any.
    """
    run = job.run
    rank0(lambda: checkpoints.check_settings(run.output_dir, job.settings))
    if rank0(lambda: checkpoints.is_finished(run.output_dir)):
        say(f"{run.output_dir} holds the finished run: nothing to do")
        return None
    start = run.resume_from_checkpoint, run.output_dir, job.settings
    checkpoint = rank0(lambda: checkpoints.resolve(*start))
    pair = load_pair(job.model, job.load, job.pack, job.method, run.device)
    if isinstance(run.liger_kernel_config, dict):
        configs = [teacher.config for teacher in pair.teachers]
        run.liger_kernel_config = leave_teachers_alone(
            run.liger_kernel_config, pair.student.config, configs
        )
    _check_before_work(job, pair)
    # The first documents of a large corpus are enough for a plan, which comes before the hours.
    documents = load_documents(job, pair, sample=True)
    if is_main():
        say(fitted(describe_run(job, pair, documents, checkpoints.step_of(checkpoint or ""))))
    _check_room(job, pair, documents)
    store = describe_store(job, pair, documents)
    if checkpoint:
        say(f"resuming from {checkpoint}")
    if run.dry_run:
        say(show_example(pair, documents))
        return None
    if not documents.is_whole:
        documents = load_documents(job, pair)
        lines = describe_documents(documents, pair) + describe_mixture(job, documents)
        say(fitted("\n".join(lines)))
    # Known only now: a checkpoint's place in the corpus is the number of a block.
    settings = job.settings | documents.settings(pair)
    rank0(lambda: checkpoints.check_settings(run.output_dir, settings, checkpoint))
    trainer = _make_trainer(job, pair, documents, store)
    trainer.settings = settings
    _check_models(trainer, job, documents)
    # Taken last, so that a wrong command leaves no trace in the directory.
    rank0(lambda: checkpoints.claim(run.output_dir, settings))
    if is_main():
        documents.write_skipped(run.output_dir)
    return trainer, checkpoint


def _check_before_work(job: Job, pair: Pair) -> None:
    """Check places, the hub, weights and stores, from the cheapest to the dearest.

    Raises:
        ValueError: the run would end in an error, in one line.
    """
    with in_agreement():
        # What they may refuse, such as a wrong key.
        if is_main() and "wandb" in (job.run.report_to or ()):
            offline_reason()
    # One process looks: they share the disks and the hub, and what one says all raise.
    with in_agreement(takes_long=True):
        if job.run.process_index == 0:
            if job.model.save_store:
                check_writable(Path(job.model.save_store), "--save_store")
            for model in (pair.student, *pair.teachers):
                model.source.check_weights()
            if job.run.push_to_hub:
                _check_hub(job.run.hub_token)


def _check_room(job: Job, pair: Pair, documents: Documents) -> None:
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


def _make_trainer(
    job: Job, pair: Pair, documents: Documents, store: JsonObject | None
) -> VocAgnoTrainer:
    """Load the models, and make the trainer with all that watches the run."""
    pack, method, run = job.pack, job.method, job.run
    recorder = load_recorder(job, documents, store)
    student, teacher = load_models(pair, seed=run.seed)
    chunks = method.chunks if method.method == "chunk" else None
    crosses = pack.attend_across_documents
    trainer = VocAgnoTrainer(
        model=student,
        teacher=teacher,
        args=run,
        method=method,
        recorder=recorder,
        max_bad_steps=run.max_bad_steps,
        device_peak_tflops=run.device_peak_tflops,
        train_dataset=documents.blocks,
        eval_dataset=documents.eval_blocks,
        data_collator=PackedCollator(
            pack.max_length,
            attend_across_documents=crosses,
            teacher_max_length=pair.teacher_rows,
            chunks=chunks,
            shares=method.aggregation == "share",
        ),
        processing_class=pair.student_reader.tokenizer,
    )
    if run.report_to and is_main():
        trainer.tracking = describe_tracking(job, pair, documents)
    if table := load_guidance_table(job, pair, documents, trainer):
        trainer.add_callback(table)
    return trainer


def _check_models(trainer: VocAgnoTrainer, job: Job, documents: Documents) -> None:
    """Check that all models keep documents apart."""
    crosses, device = job.pack.attend_across_documents, job.run.device
    teachers = trainer.resident
    ours, *theirs = documents.blocks.longest_segments(crosses)
    if documents.eval_blocks is not None:
        ours = max(ours, documents.eval_blocks.longest_segments(crosses)[0])
    # A teacher that shares the student's tokens reads the student's rows.
    theirs = theirs or [ours] * len(teachers)
    readers = list(zip((trainer.model, *teachers), (ours, *theirs), strict=False))
    for reader, longest in readers:
        check_longest(reader, device, longest=longest)
        if not crosses:
            check_packing(reader, device)


def train_and_save(trainer: VocAgnoTrainer, checkpoint: str | None, job: Job) -> int:
    """Train, evaluate, save a model that `from_pretrained` loads, and return the exit status."""
    run = job.run
    trained = trainer.train(resume_from_checkpoint=checkpoint)
    if trainer.preemption.is_agreed:
        step, steps = trainer.state.global_step, trainer.state.max_steps
        say(f"stopped after step {step} of {steps}, saved in {run.output_dir}: start it again")
        return Exit.STOPPED
    # The mean over the steps that made an update.
    if math.isnan(trained.training_loss):
        raise NonFiniteLoss(
            f"none of {trained.global_step} steps made an update (--max_bad_steps "
            f"{run.max_bad_steps}): no model is saved"
        )
    _finish(trainer, job)
    return Exit.DONE


def _finish(trainer: VocAgnoTrainer, job: Job) -> None:
    """Save and evaluate the trained model; its card comes last and marks the run as finished."""
    run = job.run
    # Training turned the cache off; generation needs it.
    trainer.model.config.use_cache = True
    # Checkpoints are sharded, the final model is whole.
    if trainer.is_fsdp_enabled:
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    # Pushed below, with its card.
    trainer.save_model(run.output_dir, _internal_call=True)
    # After the model is saved: under --bf16_full_eval an evaluation casts it in place.
    evaluated = {entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry}
    is_known = trainer.state.global_step in evaluated and not run.load_best_model_at_end
    if trainer.eval_dataset is not None and not is_known:
        trainer.evaluate()
    trainer.save_state()
    if is_main():
        directory = Path(run.output_dir)
        templates = (path.name for path in directory.glob("chat_template*"))
        names = [*model_files(directory), *templates]
        checkpoints.finish_run(directory, names)
        repository = str(trainer.hub_model_id) if run.push_to_hub else None
        card = model_card(directory, job.settings, trainer.state, repository)
        if repository:
            options = {"revision": run.hub_revision, "token": run.hub_token}
            push(directory, names, card, repository, "End of training", **options)
        write_text(directory / "README.md", card)
        checkpoints.release(directory)
    trainer.finish_reports()
    say(f"saved {run.output_dir}")
