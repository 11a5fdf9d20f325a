"""One training job: load, plan, trainer, train, save."""

import math
from pathlib import Path

from vocagnolm.cli import Exit
from vocagnolm.conventions import NonFiniteLoss
from vocagnolm.dist import rank0
from vocagnolm.hub import check_login
from vocagnolm.io import told_of_full_disk, write_text
from vocagnolm.models.load import model_files
from vocagnolm.printing import is_main, print_main
from vocagnolm.run import trackers
from vocagnolm.run.card import model_card, push
from vocagnolm.run.plan import plan
from vocagnolm.trainer import VocAgnoTrainer
from vocagnolm.training import checkpoints, run_directory, tracking
from vocagnolm.training.documents import Documents, load_documents, write_skipped
from vocagnolm.training.models import Models, load_weights, read_models
from vocagnolm.training.settings import Job, settings_of


def train(job: Job) -> int:
    """Run one training job to its end, or to a signal; return the exit status."""
    args, output_dir = job.args, Path(str(job.args.output_dir))

    # Load: configurations and tokenizers, which are cheap. What is wrong ends here, before hours of
    # alignment.
    models = read_models(job.model, job.args, args.device)
    settings = settings_of(job)
    conflict = rank0(lambda: _conflict(output_dir, settings))
    if conflict and not args.dry_run:
        raise ValueError(conflict)
    if not conflict and rank0(lambda: run_directory.is_finished(output_dir)):
        print_main(f"{output_dir} holds the finished run: nothing to do")
        return Exit.DONE
    asked, checkpoint = args.resume_from_checkpoint, None
    if not conflict:
        checkpoint = rank0(lambda: checkpoints.resolve(asked, output_dir, settings))
    rank0(lambda: check_places(job, models))

    # Plan: the first documents of a large corpus are enough.
    documents = load_documents(job, models, sample=True)
    print_main(plan(job, models, documents, checkpoint))
    if args.dry_run:
        print_main(f"note       {conflict}" if conflict else None)
        return Exit.DONE
    if not documents.is_whole:
        documents = load_documents(job, models)
    # Known only now: a checkpoint's place in the corpus is the index of a packed sequence.
    settings |= documents.settings
    rank0(lambda: run_directory.check_settings(output_dir, settings, checkpoint))

    # Trainer.
    trainer = make_trainer(job, models, documents)
    trainer.settings = settings
    # Last, so that a wrong command leaves no trace in the directory.
    rank0(lambda: run_directory.claim(output_dir, settings))
    rank0(lambda: write_skipped(documents, output_dir))
    if args.report_to and is_main():
        about = trackers.about(job, models, documents, settings)
        trackers.begin(trainer, job, about, is_resumed=checkpoint is not None)

    # Train.
    trained = trainer.train(resume_from_checkpoint=checkpoint)
    if trainer.preemption.is_agreed:
        step, steps = trainer.state.global_step, trainer.state.max_steps
        print_main(f"stopped after step {step} of {steps}; the same command resumes")
        return Exit.STOPPED
    # The mean over the steps that made an update.
    if math.isnan(trained.training_loss):
        raise NonFiniteLoss(
            f"none of {trained.global_step} steps made an update (--max_bad_steps "
            f"{args.max_bad_steps}): no model is saved"
        )

    with told_of_full_disk(output_dir, trainer.what_is_safe):
        save(trainer, output_dir)
    trackers.finish()
    print_main(f"saved {output_dir}")
    return Exit.DONE


def _conflict(output_dir: Path, settings: checkpoints.Settings) -> str | None:
    """Say why a directory cannot hold a run with these settings; None if it can."""
    try:
        run_directory.check_settings(output_dir, settings)
    except ValueError as error:
        return str(error)
    return None


def save(trainer: VocAgnoTrainer, output_dir: Path) -> None:
    """Save the model, then evaluate it: an evaluation may leave it in another precision."""
    # Training turned the cache off; generation needs it.
    trainer.model.config.use_cache = True
    # Checkpoints are sharded, the final model is whole.
    if trainer.is_fsdp_enabled:
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    # Pushed by `finish`, with its card.
    trainer.save_model(str(output_dir), _internal_call=True)
    evaluated = [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry]
    is_evaluated = (
        trainer.state.global_step in evaluated and not trainer.args.load_best_model_at_end
    )
    if trainer.eval_dataset is not None and not is_evaluated:
        trainer.evaluate()
    trainer.save_state()
    rank0(lambda: finish(trainer))


def check_places(job: Job, models: Models) -> None:
    """Check what would fail after hours: weights and keys.

    Raises:
        ValueError: one of them is missing or damaged.
    """
    for model in (models.student, *models.teachers):
        model.source.check_weights()
        if not job.args.dry_run:
            model.source.check_packages()
    if job.args.push_to_hub:
        check_login(job.args.hub_token)
    if job.args.report_to:
        tracking.check_trackers(job.args.report_to)


def make_trainer(job: Job, models: Models, documents: Documents) -> VocAgnoTrainer:
    """Load the weights of all models, and make the trainer."""
    args = job.args
    student, teacher = load_weights(models, job.model, args.device, args.seed)
    return VocAgnoTrainer(
        model=student,
        teacher=teacher,
        args=args,
        train_dataset=documents.blocks,
        eval_dataset=documents.eval_blocks,
        processing_class=models.reader.tokenizer,
    )


def finish(trainer: VocAgnoTrainer) -> None:
    """Declare the run finished, on rank 0: the card comes last and marks its end."""
    args, directory = trainer.args, Path(str(trainer.args.output_dir))
    names = [*model_files(directory), *(path.name for path in directory.glob("chat_template*"))]
    run_directory.finish_run(directory, names)
    repository = str(trainer.hub_model_id) if args.push_to_hub else ""
    card = model_card(Path(repository or directory).name, trainer.settings)
    if repository:
        push(directory, names, card, repository, revision=args.hub_revision, token=args.hub_token)
    write_text(directory / "README.md", card)
    run_directory.release(directory)
