"""One training job: check its directory, read, plan, train, save."""

import math
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from vocagnolm.cli import Exit
from vocagnolm.conventions import NonFiniteLoss
from vocagnolm.models.load import model_files
from vocagnolm.run import tracked_run
from vocagnolm.run.card import model_card, push
from vocagnolm.run.plan import device_bytes, fill_device, plan
from vocagnolm.shell.dist import rank0
from vocagnolm.shell.io import explain_full_disk, print_main, write_text
from vocagnolm.trainer import VocAgnoTrainer
from vocagnolm.training import run_directory
from vocagnolm.training.job import Job, check_launch, settings_of
from vocagnolm.training.models import read_models
from vocagnolm.training.packed import pack_documents, read_corpora
from vocagnolm.training.tracking import check_trackers


def train(job: Job) -> int:
    """Run one training job to its end, or until a signal. Returns the exit status."""
    args, output_dir = job.args, Path(str(job.args.output_dir))

    # Errors end the run here, within seconds and not after hours of alignment.
    settings = settings_of(job)
    documents = list(job.data.dataset)
    if job.data.eval_dataset:
        documents.append(job.data.eval_dataset)
    # Only rank 0 looks, so that all processes begin in the same way.
    conflict, is_finished, checkpoint = rank0(
        lambda: run_directory.find_start(
            output_dir, settings, args.resume_from_checkpoint, documents
        )
    )
    # A plan for other settings is worth showing. Only the run itself cannot start.
    if conflict and not args.dry_run:
        raise ValueError(conflict)
    if is_finished:
        # The corpus is not read again, so the user must know that it was not compared.
        print_main(
            f"{output_dir} holds the finished run: nothing to do. If documents or models have "
            "changed since then, give another --output_dir"
        )
        return Exit.DONE
    if args.report_to:
        # One process asks for the key, because only it talks to the trackers.
        rank0(lambda: check_trackers(args.report_to))

    check_launch(job, evaluates=bool(job.data.eval_dataset or job.data.eval_fraction))
    models = read_models(job.model, args, args.device)
    # The plan is made from the first documents, which are enough for a large corpus.
    corpora = read_corpora(job)
    packed = pack_documents(job, models, corpora, sample=True)
    # A small corpus may have lowered the step.
    fill_device(job, models, rank0(lambda: device_bytes(args.device)))
    print_main(plan(job, models, packed, checkpoint))
    if args.dry_run:
        print_main(f"note       {conflict}" if conflict else None)
        return Exit.DONE
    if not packed.is_whole:
        packed = pack_documents(job, models, corpora)

    # The trainer comes last, so that a wrong command leaves no trace in the directory.
    trainer = VocAgnoTrainer(prepared=(job, models, packed))
    is_resumed = checkpoint is not None
    # No other run may write there until the model is saved.
    tracking: AbstractContextManager[None] = nullcontext()
    if args.report_to:
        about = tracked_run.about(job, models, packed, trainer.settings)
        tracking = tracked_run.running(trainer, job, about, is_resumed=is_resumed)
    with trainer.owning_directory(), tracking:
        trained = trainer.train(resume_from_checkpoint=checkpoint)
        if trainer.preemption.is_agreed:
            step, steps = trainer.state.global_step, trainer.state.max_steps
            print_main(f"stopped after step {step} of {steps}; the same command resumes")
            return Exit.STOPPED
        # The mean is over the steps that made an update. NaN means that there was none.
        if math.isnan(trained.training_loss):
            raise NonFiniteLoss(
                f"none of {trained.global_step} steps made an update (--max_bad_steps "
                f"{args.max_bad_steps}): no model is saved"
            )
        with explain_full_disk(output_dir, trainer.discard_partial_save):
            save(trainer, output_dir)
        # A run that was stopped is not finished here, because it will be resumed.
        tracked_run.finish()
    print_main(f"saved {output_dir}")
    return Exit.DONE


def save(trainer: VocAgnoTrainer, output_dir: Path) -> None:
    """Save the model, then evaluate it, because an evaluation may leave it in another precision."""
    # Checkpoints are sharded, which is fast. The final model is gathered into one.
    if trainer.is_fsdp_enabled:
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    # As an internal call this does not push. `finish` pushes the model together with its card.
    trainer.save_model(str(output_dir), _internal_call=True)
    # The last step may already have been evaluated. If the best checkpoint was loaded, that was
    # another model.
    evaluated = [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry]
    is_evaluated = (
        trainer.state.global_step in evaluated and not trainer.args.load_best_model_at_end
    )
    if trainer.eval_dataset is not None and not is_evaluated:
        trainer.evaluate()
    trainer.save_state()
    rank0(lambda: finish(trainer))


def finish(trainer: VocAgnoTrainer) -> None:
    """Mark the run as finished, on rank 0. The card comes last and is the mark."""
    args, directory = trainer.args, Path(str(trainer.args.output_dir))
    names = model_files(directory)
    names += [path.name for path in directory.glob("chat_template*")]
    # If a kill comes after this line, the card is missing, and the same command saves again.
    run_directory.finish_run(directory, names)
    repository = str(trainer.hub_model_id) if args.push_to_hub else ""
    card = model_card(Path(repository or directory).name, trainer.settings)
    if repository:
        push(directory, names, card, repository, revision=args.hub_revision, token=args.hub_token)
    write_text(directory / "README.md", card)
