"""Continually pretrain a student with the token losses of a teacher, whatever its vocabulary.

    accelerate launch train.py --teacher Qwen/Qwen2.5-Math-7B-Instruct
    accelerate launch train.py --config recipes/demo.yaml --student DIR --dataset pages.jsonl
    python train.py --teacher T --dry_run          # print the plan and exit

Every field of transformers.TrainingArguments is an option too. Exit status: 0 done, 2 a wrong
argument or file, 3 stopped because the numbers went bad.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import datasets
import torch
from transformers.utils import logging as transformers_logging

from vocagnolm import checkpoints, config, job
from vocagnolm.model_card import write_model_card
from vocagnolm.packing import PackedCollator
from vocagnolm.pair import load_models, load_pair, trainer_options
from vocagnolm.token_loss import NonFiniteLoss, check_packing
from vocagnolm.trainer import VocAgnoTrainer

IS_MAIN = os.environ.get("RANK", "0") == "0"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one training job and return its exit status."""
    if not sys.stderr.isatty():  # a log file wants no progress bars, and an error stays one line
        datasets.disable_progress_bars()
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        arguments = config.parse(sys.argv[1:] if argv is None else argv)
        built = build(arguments)
    except (ValueError, ImportError, OSError) as error:
        return stop(error, 2)
    except NonFiniteLoss as error:
        return stop(error, 3)
    if built is None:
        return 0
    try:
        train(*built, arguments)
    except NonFiniteLoss as error:
        return stop(error, 3)
    return 0


def build(arguments: config.Arguments) -> tuple[VocAgnoTrainer, str | None] | None:
    """Everything that can go wrong before the first step: the trainer and where it resumes.

    None after a dry run, and where the run is finished.
    """
    model, data, guidance, run = arguments
    settings = job.settings(arguments)
    checkpoints.check_settings(run.output_dir, settings)
    checkpoint = checkpoints.resolve(run.resume_from_checkpoint, run.output_dir)
    if checkpoints.is_finished(run.output_dir) and not run.dry_run:
        say(f"{run.output_dir} holds the finished run: nothing to do")
        return None
    pair = load_pair(model, guidance, data.max_length)
    documents = job.load_documents(pair, data, run)
    blocks, eval_blocks = job.load_blocks(pair, data, run, documents)
    if IS_MAIN:
        say(job.describe(pair, arguments, documents, blocks))
    if run.dry_run:
        say(job.example(pair, documents))
        return None
    settings |= job.corpus_settings(pair, documents, blocks)
    checkpoints.check_settings(run.output_dir, settings)
    recorder = job.load_recorder(pair, arguments, documents, blocks)
    student, teacher = load_models(pair, model, run.device)
    trainer = VocAgnoTrainer(
        model=student,
        teacher=teacher,
        args=run,
        **trainer_options(arguments, teacher),
        on_teacher_losses=recorder.add if recorder else None,
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
    table = job.load_guidance_table(trainer, pair, arguments, documents, blocks)
    for callback in filter(None, (recorder, table)):
        trainer.add_callback(callback)
    if not data.attend_across_documents:
        for reader in (trainer.model, *getattr(trainer.teacher, "models", ())):
            check_packing(reader)
    if IS_MAIN:
        checkpoints.write_settings(run.output_dir, settings)
        documents.write_skipped(run.output_dir)
    return trainer, checkpoint


def train(trainer: VocAgnoTrainer, checkpoint: str | None, arguments: config.Arguments) -> None:
    """Train, evaluate, and save a model that `from_pretrained` loads with its tokenizer."""
    if checkpoint:
        say(f"resuming from {checkpoint}")
    trainer.train(resume_from_checkpoint=checkpoint)
    if trainer.eval_dataset is not None and not trainer.evaluated_last_step:
        trainer.evaluate()
    trainer.model.config.use_cache = True  # training turned it off; generation needs it
    if trainer.is_fsdp_enabled:  # checkpoints are sharded, the final model is whole
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model()
    trainer.save_state()
    if IS_MAIN:
        checkpoints.write_tracker(arguments[-1].output_dir, arguments[-1].report_to)
        write_model_card(arguments[-1].output_dir, job.settings(arguments), trainer.state)
    say(f"saved {arguments[-1].output_dir}")


def say(text: str) -> None:
    """Print once, whatever the number of processes."""
    if IS_MAIN:
        print(text, flush=True)


def stop(error: Exception, status: int) -> int:
    """One line that says what to do, once for each machine, and the exit status."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        name = "train.py" if IS_MAIN else f"train.py (process {os.environ['RANK']})"
        print(f"{name}: error:", " ".join(str(error).split()), file=sys.stderr, flush=True)
    return status


if __name__ == "__main__":
    status = main()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    sys.exit(status)
