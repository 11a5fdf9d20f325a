"""From the options of `vocagnolm weights` to a data set, in any number of processes.

Packed sequences are those of training, and so are their numbers. A shard has the rows of some of
them. Every process has the same job, and writes every n-th missing shard.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from accelerate import PartialState
from tqdm.auto import tqdm

from vocagnolm.chat.formats import Conversation
from vocagnolm.conventions import TEXT, NonFiniteLoss
from vocagnolm.fields import OptionError, named
from vocagnolm.models.load import weight_hashes
from vocagnolm.packing import Block, segment_rows
from vocagnolm.record import Record, check_output_directory, differences, output_directory
from vocagnolm.shell.dist import machine_first, meet, rank0
from vocagnolm.shell.io import TEMPORARY, json_or_empty, print_main, write_file, write_json
from vocagnolm.texts import is_conversations, usable_in
from vocagnolm.trainer import VocAgnoTrainer
from vocagnolm.training.job import Job, check_launch, settings_of
from vocagnolm.training.models import Models, read_models
from vocagnolm.training.packed import Packed, pack_training, read_corpora, settings_of_data

# `datasets` reads neither YAML, of which JSON is a part, nor hidden directories. So no run trains
# on a part of the corpus.
RECORD, DATA, _UNFINISHED = "weights.yaml", "data", ".data"
# Packed sequences of a shard: what a kill loses at most.
SHARD_SEQUENCES = 256


def weigh(job: Job) -> None:
    """Weigh a corpus, or what is left of it."""
    out = Path(str(job.args.output_dir))
    check_output_directory(out, RECORD, job.data.dataset)
    check_launch(job, evaluates=False)
    models = read_models(job.model, job.args, job.args.device)
    texts, _, _ = read_corpora(job)
    with machine_first():
        packed = pack_training(job, models, texts, named("dataset"))
    with ExitStack() as stack:
        # The first process owns the directory for all of them.
        rank0(lambda: stack.enter_context(output_directory(out, RECORD)))
        if not rank0(lambda: begin(out, settings_of_weights(job, models, packed))):
            print_main(f"{out} is finished: nothing to do")
            return
        trainer = VocAgnoTrainer(prepared=(job, models, packed))
        # As for an evaluation: in the precision of training, and without other processes.
        student = trainer.accelerator.prepare_model(trainer.model, evaluation_mode=True)
        trainer.model_wrapped = student
        write_shards(out, trainer, packed)
        meet()
        rank0(lambda: finish(out))
    print_main(summary(out, packed.blocks.student_tokens))


def settings_of_weights(job: Job, models: Models, packed: Packed) -> Record:
    """Return what the weights are made from. The number of processes is not among it."""
    settings = settings_of(job) | settings_of_data(job, models, packed)
    settings["shard_sequences"] = SHARD_SEQUENCES
    # Unlike a run, weights are those of the student as it is now.
    settings["student_hashes"] = weight_hashes(models.student.source.name)
    del settings["global_batch_tokens"]
    return settings


def begin(out: Path, settings: Record) -> bool:
    """Begin or continue a directory. Return whether anything is left to do.

    Raises:
        ValueError: it has weights that were made from something else.
    """
    before = json_or_empty(out / RECORD)
    changes = differences(before, settings) if before else []
    if changes:
        raise OptionError(
            "output_dir",
            f"{out} holds other weights ({'; '.join(changes)}): give another directory, or delete "
            "this one",
        )
    if (out / DATA).exists():
        return False
    write_json(out / RECORD, settings)
    (out / _UNFINISHED).mkdir(exist_ok=True)
    return True


def finish(out: Path) -> None:
    """Give a directory with all shards its name."""
    for path in (out / _UNFINISHED).glob(f".*{TEMPORARY}"):
        path.unlink()
    (out / _UNFINISHED).rename(out / DATA)


def summary(out: Path, tokens: int) -> str:
    """Say what a finished directory holds, and what a token takes."""
    rows = size = 0
    for path in (out / DATA).iterdir():
        rows += pq.read_metadata(path).num_rows
        size += path.stat().st_size
    return f"{out}: {rows:,} rows, {tokens:,} tokens, {size / tokens:.1f} bytes per token"


# -- Numbers --------------------------------------------------------------------------------------


def write_shards(out: Path, trainer: VocAgnoTrainer, packed: Packed) -> None:
    """Write the missing shards of this process, each completely or not at all."""
    state = PartialState()
    shards = {}
    for number, first in enumerate(range(0, len(packed.blocks), SHARD_SEQUENCES)):
        path = out / _UNFINISHED / f"train-{number:05}.parquet"
        shards[path] = range(len(packed.blocks))[first : first + SHARD_SEQUENCES]
    # One process looks for all. Every process takes every n-th shard.
    missing = rank0(lambda: [path for path in shards if not path.exists()])
    own = missing[state.process_index :: state.num_processes]
    hidden = not state.is_main_process
    for path in tqdm(own, "shards of this process", unit="shard", disable=hidden):
        rows = list(rows_of(trainer, packed, shards[path]))
        rows.sort(key=lambda row: (row["dataset"], row["document"], row["start"]))
        table = pa.Table.from_pylist(rows, _schema(packed))
        write_file(path, partial(pq.write_table, table, compression="zstd"))


def _schema(packed: Packed) -> pa.Schema:
    """Return the columns of a row."""
    message = pa.struct({"role": pa.string(), "content": pa.string()})
    columns = {"dataset": pa.string(), "document": pa.int64()}
    columns |= {"start": pa.int64(), "end": pa.int64()}
    # Of several corpora, some may have documents and others conversations.
    for corpus in packed.texts.values():
        if is_conversations(corpus):
            columns["messages"] = pa.list_(message)
        else:
            columns[TEXT] = pa.string()
    columns |= dict.fromkeys(("input_ids", "labels"), pa.list_(pa.int32()))
    losses = ("student_loss", "teacher_loss", "weight")
    return pa.schema(columns | dict.fromkeys(losses, pa.list_(pa.float32())))


def rows_of(trainer: VocAgnoTrainer, packed: Packed, sequences: range) -> Iterator[dict[str, Any]]:
    """Compute the rows of some packed sequences, which are those of their segments.

    Raises:
        NonFiniteLoss: a loss is NaN or infinite.
    """
    assert packed.segments is not None
    columns = ["document", "start", "end", "student_tokens", "left_out_messages"]
    places = packed.segments.rows.select_columns(columns).with_format(None)
    names = list(packed.texts)
    texts = []
    for corpus in packed.texts.values():
        texts.append(corpus.with_format("arrow"))
    # The sequences of several corpora stand one after the other, and end here.
    ends = np.cumsum(list(packed.blocks.parts.values()))
    size = trainer.args.per_device_train_batch_size
    for first in range(0, len(sequences), size):
        part = sequences[first : first + size]
        tokens = _tokens(trainer, [packed.blocks[sequence] for sequence in part])
        for index, sequence in enumerate(part):
            number = int(ends.searchsorted(sequence, side="right"))
            segments = places[packed.blocks.segments(sequence)]
            contents, _ = usable_in(texts[number][segments["document"]], segments["document"])
            last = 0
            for segment in segment_rows(segments):
                row = _place(segment, contents[segment["document"]])
                first_token, last = last, last + segment["student_tokens"]
                for name, values_BS in tokens.items():
                    row[name] = values_BS[index, first_token:last]
                yield {"dataset": names[number]} | row


def _place(segment: dict[str, Any], content: str | Conversation) -> dict[str, Any]:
    """Say where a segment is, and what it says."""
    start, end = segment["start"], segment["end"]
    row = {"document": segment["document"], "start": start, "end": end}
    if isinstance(content, str):
        return row | {TEXT: content[start:end]}
    # A conversation that exceeds a context ends with the last answer that fits.
    kept = len(content.roles) - segment["left_out_messages"]
    return row | {"messages": content.messages[:kept]}


def _tokens(trainer: VocAgnoTrainer, blocks: list[Block]) -> dict[str, npt.NDArray[Any]]:
    """Compute what the rows have of every token, [B, S], as in the first step of a training."""
    collator: Any = trainer.data_collator
    batch = collator(blocks)
    guidance = trainer.token_guidance(batch)
    valid_BS, mapped_BS = guidance.valid_BS, guidance.valid_BS & guidance.mapped_BS
    losses = {"student_loss": (guidance.student_loss_BS, valid_BS)}
    losses["teacher_loss"] = (guidance.teacher_loss_BS, mapped_BS)
    tokens = {"input_ids": batch["input_ids"].numpy(), "labels": batch["labels"].numpy()}
    for name, (loss_BS, has_loss_BS) in losses.items():
        # In a row, NaN means that a token has no loss.
        if not loss_BS[has_loss_BS].isfinite().all():
            raise NonFiniteLoss(f"{name} is NaN or infinite: use --bf16 false, or check the model")
        tokens[name] = loss_BS.where(has_loss_BS, torch.nan).cpu().numpy()
    weight_BS = trainer.token_objective.weights(guidance) * valid_BS
    tokens["weight"] = weight_BS.float().cpu().numpy()
    if "weights" in batch:
        tokens["weight"] = tokens["weight"] * batch["weights"].numpy()
    return tokens
