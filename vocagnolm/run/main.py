"""One training job, from the command line to a finished directory; `train.py` tells its use."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from vocagnolm.collator import PackedCollator
from vocagnolm.conventions import NonFiniteLoss
from vocagnolm.host import lock
from vocagnolm.host import settings as run_record
from vocagnolm.host.command import Exit, is_main, quiet_logs, say, stop
from vocagnolm.host.processes import decided_by_one, in_agreement
from vocagnolm.models.layers import compile_layers
from vocagnolm.models.probes import check_longest, check_packing
from vocagnolm.run import failures, job
from vocagnolm.run import parse as config
from vocagnolm.run import plan as run_plan
from vocagnolm.run.model_card import write_model_card
from vocagnolm.run.pair import load_models, load_pair, trainer_options
from vocagnolm.trainer import VocAgnoTrainer
from vocagnolm.training import checkpoints, preemption
from vocagnolm.training.relayout import LayoutError, change_of_layout

NAME = "train.py"  # begins the line of an error


def main(argv: Sequence[str] | None = None) -> int:
    """Run one training job and return its exit status."""
    quiet_logs()
    with preemption.handling(preemption.SCHEDULERS, preemption.leave_at_once):
        try:
            arguments = config.parse(sys.argv[1:] if argv is None else argv)
            built = build(arguments)
        except NonFiniteLoss as error:
            return stop(NAME, error, Exit.BAD_NUMBERS)
        except RuntimeError as error:
            return stop_if_known(error, "the preparation")
        except (ValueError, ImportError, OSError) as error:
            return stop(NAME, error, Exit.WRONG)
        if built is None:
            return 0
        trainer, checkpoint = built
        try:
            return train(trainer, checkpoint, arguments)
        except NonFiniteLoss as error:
            return stop(NAME, error, Exit.BAD_NUMBERS)
        except LayoutError as error:
            return stop(NAME, error, Exit.WRONG)
        except (RuntimeError, OSError, SafetensorError, CheckpointException) as error:
            return stop_if_known(error, f"{trainer.doing} ({trainer.state.global_step} steps done)")


def build(arguments: config.Arguments) -> tuple[VocAgnoTrainer, str | None] | None:
    """Everything that can go wrong before the first step: the trainer and where it resumes.

    None after a dry run, and where the run is finished.
    """
    model, data, guidance, run = arguments
    settings, defaults = job.settings(arguments), job.defaults()
    run_record.check_settings(run.output_dir, settings, defaults)
    origin = partial(run_record.origin_fault, settings=settings, defaults=defaults)
    checkpoint = None
    if not run.dry_run:
        if decided_by_one(lambda: checkpoints.is_finished(run.output_dir)):
            say(f"{run.output_dir} holds the finished run: nothing to do")
            return None
        checkpoint = decided_by_one(
            lambda: checkpoints.resolve(run.resume_from_checkpoint, run.output_dir, say, origin)
        )
    pair = load_pair(model, guidance, data.max_length)
    documents = job.load_documents(pair, data, run)
    blocks, eval_blocks = job.load_blocks(pair, data, run, documents)
    if is_main():
        say(run_plan.describe(pair, arguments, documents, blocks))
    if run.dry_run:
        say(run_plan.example(pair, documents))
        return None
    settings |= job.corpus_settings(pair, documents, blocks)
    run_record.check_settings(run.output_dir, settings, defaults, checkpoint)
    recorder = job.load_recorder(pair, arguments, documents, blocks)
    student, teacher = load_models(pair, model, run.device, seed=run.seed)
    trainer = VocAgnoTrainer(
        model=student,
        teacher=teacher,
        args=run,
        **trainer_options(arguments, teacher),
        recorder=recorder,
        max_bad_steps=run.max_bad_steps,
        device_peak_tflops=run.device_peak_tflops,
        train_dataset=blocks,
        eval_dataset=eval_blocks,
        data_collator=PackedCollator(
            data.max_length,
            data.attend_across_documents,
            teacher_max_length=pair.teacher_rows,
            chunks=guidance.chunks if guidance.method == "chunk" else None,
        ),
        processing_class=pair.student_reader.tokenizer,
    )
    if table := job.load_guidance_table(trainer, pair, arguments, documents, blocks):
        trainer.add_callback(table)
    check_and_compile(trainer, model, data)
    with in_agreement(takes_long=True):
        if is_main():
            lock.take(Path(run.output_dir))
            run_record.write_settings(run.output_dir, settings)
            documents.write_skipped(run.output_dir)
    return trainer, checkpoint


def check_and_compile(
    trainer: VocAgnoTrainer, model: config.ModelArguments, data: config.DataArguments
) -> None:
    """See that all models keep documents apart, before their layers are compiled for speed."""
    crosses, device = data.attend_across_documents, trainer.args.device
    blocks: tuple[Any, Any] = (trainer.train_dataset, trainer.eval_dataset)
    teachers = getattr(trainer.teacher, "models", ())
    ours, *theirs = blocks[0].longest_segments(crosses)
    if blocks[1] is not None:
        ours = max(ours, blocks[1].longest_segments(crosses)[0])
    theirs = theirs or [ours] * len(teachers)  # one that shares the tokens reads the student's rows
    readers = list(zip((trainer.model, *teachers), (ours, *theirs), strict=False))
    for reader, longest in readers:
        check_longest(reader, device, longest=longest)
        if not crosses:
            check_packing(reader, device)
    if model.compile_layers:  # behind the probes, which would be compiled too
        for reader, _ in readers:
            compile_layers(reader)


def train(trainer: VocAgnoTrainer, checkpoint: str | None, arguments: config.Arguments) -> int:
    """Train, evaluate, save a model that `from_pretrained` loads, and return the exit status."""
    run = arguments[-1]
    if checkpoint:
        say(f"resuming from {checkpoint}")
        say(checkpoints.change_of_processes(Path(checkpoint), run.world_size))
        say(change_of_layout(Path(checkpoint), trainer.is_fsdp_enabled))
    trainer.train(resume_from_checkpoint=checkpoint)
    if trainer.preemption.is_agreed:
        step, steps = trainer.state.global_step, trainer.state.max_steps
        say(f"stopped after step {step} of {steps}, saved in {run.output_dir}: start it again")
        return Exit.STOPPED
    with preemption.handling(preemption.SCHEDULERS, preemption.finish_first):
        finish(trainer, arguments)
    return 0


def finish(trainer: VocAgnoTrainer, arguments: config.Arguments) -> None:
    """Evaluate and save the trained model; its card comes last, which makes the run a finished."""
    run = arguments[-1]
    if trainer.eval_dataset is not None and not trainer.evaluated_last_step:
        trainer.evaluate()
    trainer.doing = "the saving of the model"
    trainer.model.config.use_cache = True  # training turned it off; generation needs it
    if trainer.is_fsdp_enabled:  # checkpoints are sharded, the final model is whole
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model()
    trainer.save_state()
    if is_main():
        run_record.write_tracker(run.output_dir, run.report_to)
        write_model_card(run.output_dir, job.settings(arguments), trainer.state)
        lock.release(Path(run.output_dir))
    say(f"saved {run.output_dir}")


def stop_if_known(error: BaseException, doing: str) -> int:
    """One line on what one process alone met, or the error as it is."""
    explanation = failures.explain(error, doing)
    if explanation is None:
        raise error
    return stop(NAME, explanation, Exit.LOST)
