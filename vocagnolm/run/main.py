"""One training job, from the command line to a finished directory; `train.py` tells its use."""

import math
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import LocalTokenNotFoundError

from vocagnolm.cli import Exit, is_main, note, say, stop
from vocagnolm.collator import PackedCollator
from vocagnolm.conventions import NonFiniteLoss
from vocagnolm.dist import decided_by_one, in_agreement
from vocagnolm.host import lock
from vocagnolm.host.cards import push
from vocagnolm.host.options import raise_first
from vocagnolm.host.settings import check_settings, origin_fault, write_settings
from vocagnolm.host.trackers import offline_reason
from vocagnolm.io import JsonObject, check_writable, json_or_empty, write_text
from vocagnolm.models.layers import leave_teachers_alone
from vocagnolm.models.probes import check_longest, check_packing
from vocagnolm.models.source import model_files
from vocagnolm.run import checkpoints, failures, preemption
from vocagnolm.run.documents import Documents, load_documents
from vocagnolm.run.estimates import disk_uses
from vocagnolm.run.job import Job, default_settings
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
from vocagnolm.run.relayout import LayoutError, change_of_layout, shape_fault
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
    # While this process tells an error, a launcher may end it for another's: line and status stay.
    with preemption.handling(preemption.SCHEDULERS, lambda name: None):
        try:
            with preemption.handling(preemption.SCHEDULERS, preemption.leave_at_once):
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
            wrong = LayoutError if trainer else (ValueError, ImportError, OSError)
            if isinstance(error, wrong):
                return stop(_NAME, error, Exit.WRONG)
            doing = "the preparation"
            if trainer:
                doing = f"{trainer.phases.doing} ({trainer.state.global_step} steps done)"
            # Something that this process alone has met, or a fault of the program.
            if explanation := failures.explain(error, doing):
                return stop(_NAME, explanation, Exit.OUT_OF_MEMORY)
            raise


def build(job: Job) -> tuple[VocAgnoTrainer, str | None] | None:
    """Do all that can go wrong before the first step; None after a dry run and a finished run.

    Returns:
        The trainer, and the checkpoint that it resumes from, if any.
    """
    run, defaults = job.run, default_settings()
    check_settings(run.output_dir, job.settings, defaults)
    # Only the first process looks: the others may see another state of a shared disk.
    fault = partial(origin_fault, settings=job.settings, defaults=defaults)
    if decided_by_one(lambda: _is_done(run.output_dir)):
        say(f"{run.output_dir} holds the finished run: nothing to do")
        return None
    checkpoint = decided_by_one(
        lambda: checkpoints.resolve(run.resume_from_checkpoint, run.output_dir, say, fault)
    )
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
        say(fitted(describe_run(job, pair, documents, _steps_done(checkpoint))))
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
    check_settings(run.output_dir, settings, defaults, checkpoint)
    trainer = _make_trainer(job, pair, documents, store)
    if checkpoint and (wrong := shape_fault(Path(checkpoint), trainer.student)):
        say(f"not resuming from {checkpoint}: {wrong}")
        checkpoint = decided_by_one(
            lambda: checkpoints.resolve(
                *(run.resume_from_checkpoint, run.output_dir, say),
                lambda path: fault(path) or shape_fault(path, trainer.student),
            )
        )
        say(f"resuming from {checkpoint}" if checkpoint else "beginning anew")
    _check_models(trainer, job, documents)
    # Taken last, so that a wrong command leaves no trace in the directory.
    with in_agreement(takes_long=True):
        if is_main():
            lock.take(Path(run.output_dir))
            write_settings(run.output_dir, settings)
            documents.write_skipped(run.output_dir)
    return trainer, checkpoint


def _steps_done(checkpoint: str | None) -> int:
    state = json_or_empty(Path(checkpoint, checkpoints.STATE)) if checkpoint else {}
    return int(state.get("global_step", 0))


def _is_done(output_dir: str) -> bool:
    """Test whether a run is finished and its model as it was written; say so if it is not."""
    if not checkpoints.is_finished(output_dir):
        return False
    if not (fault := checkpoints.final_fault(output_dir)):
        return True
    fault = f"{output_dir} holds a finished run, but {fault}"
    if not checkpoints.find_checkpoint(output_dir):
        raise ValueError(
            f"{fault}, and no checkpoint to write it again from: give another --output_dir"
        )
    say(f"{fault}: writing it again from the newest checkpoint")
    return False


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
        train_dataset=documents.mixture or documents.blocks,
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
    if checkpoint:
        say(checkpoints.change_of_processes(Path(checkpoint), run.world_size))
        say(change_of_layout(Path(checkpoint), trainer.is_fsdp_enabled))
    trained = trainer.train(resume_from_checkpoint=checkpoint)
    if trainer.preemption.is_agreed:
        step, steps = trainer.state.global_step, trainer.state.max_steps
        say(f"stopped after step {step} of {steps}, saved in {run.output_dir}: start it again")
        return Exit.STOPPED
    # The mean over the steps that made an update.
    if math.isnan(trained.training_loss):
        raise NonFiniteLoss(
            f"none of {trained.global_step} steps made an update (--max_bad_steps "
            f"{run.max_bad_steps}): no model is saved; the batches are in "
            f"{run.output_dir}/bad_steps"
        )
    with preemption.handling(preemption.SCHEDULERS, preemption.finish_first):
        _finish(trainer, job)
    return Exit.DONE


def _finish(trainer: VocAgnoTrainer, job: Job) -> None:
    """Evaluate and save the trained model; its card comes last and marks the run as finished."""
    run = job.run
    evaluated = {entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry}
    is_known = trainer.state.global_step in evaluated and not run.load_best_model_at_end
    if trainer.eval_dataset is not None and not is_known:
        trainer.evaluate()
    trainer.phases.begin("model")
    # Training turned the cache off; generation needs it.
    trainer.model.config.use_cache = True
    # Checkpoints are sharded, the final model is whole.
    if trainer.is_fsdp_enabled:
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    # Pushed below, with its card.
    trainer.save_model(run.output_dir, _internal_call=True)
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
        lock.release(directory)
    trainer.finish_reports()
    say(f"saved {run.output_dir}")
