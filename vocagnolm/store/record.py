"""Record the losses of an online teacher during training, as a teacher-loss store.

Every process writes the losses of its own packed sequences as a shard before a checkpoint is saved,
so that a run that is killed loses only those that it computes again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate import PartialState
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from vocagnolm.alignment import widen_spans
from vocagnolm.cli import is_main
from vocagnolm.conventions import TEXT
from vocagnolm.io import versions
from vocagnolm.models.load import revision_of
from vocagnolm.readers import tokenizer_sha256
from vocagnolm.store.format import (
    SHARDS,
    LossDtype,
    StoredSegment,
    begin_store,
    document_key,
    finish_store,
    read_manifest,
    write_shard,
)
from vocagnolm.store.scoring import PACKAGES, check_plan

if TYPE_CHECKING:
    from vocagnolm.run.job import Documents, Job, Models

# Of the losses that --save_store keeps.
_DTYPE: LossDtype = "float16"
# Losses in memory, padding counted.
MOST_HELD = 2**25
# More than a job ever has: process p writes shard step * PROCESSES + p.
PROCESSES = 10_000


class LossRecorder(TrainerCallback):
    """Collects losses and writes them; see `VocAgnoTrainer(recorder=...)`.

    The description goes into the manifest.
    """

    def __init__(self, directory: Path, documents: Documents, description: Mapping[str, object]):
        self._directory, self._documents, self._description = directory, documents, description
        self._segments = documents.segments.rows.select_columns(
            ["document", "start", "end", "teacher_tokens", "teacher_codes", "teacher_exceptions"]
        )
        self._recorded: list[tuple[Tensor, Tensor]] = []
        self._written: set[int] = set()

    def add(self, block_B: Tensor, loss_BT: Tensor) -> None:
        """Keep the teacher's losses [B, T] of packed sequences, on their device until written."""
        self._recorded.append((block_B, loss_BT.detach()))

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Move the losses off the device, and write them before they fill the memory."""
        self._recorded = [(blocks.cpu(), losses.cpu()) for blocks, losses in self._recorded]
        held = sum(losses.numel() for _, losses in self._recorded)
        if held > MOST_HELD:
            self.write(state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Write the rest and, unless the run was stopped before its end, the manifest."""
        process = PartialState()
        self.write(state.global_step)
        process.wait_for_everyone()
        if process.is_main_process and state.global_step >= state.max_steps:
            finish_store(self._directory, self._description)
        process.wait_for_everyone()

    def write(self, step: int) -> None:
        """Write this process's losses since the last time, as a shard of the store."""
        if self._recorded:
            number = step * PROCESSES + PartialState().process_index
            write_shard(self._directory, number, list(self._stored_segments()), _DTYPE)
            self._recorded = []

    def _stored_segments(self) -> Iterator[tuple[bytes, StoredSegment]]:
        for block_B, loss_BT in self._recorded:
            rows = loss_BT.float().cpu().numpy()
            for block, row in zip(block_B.tolist(), rows, strict=True):
                # An earlier epoch may have shown the sequence already.
                if block in self._written:
                    continue
                self._written.add(block)
                # A row holds the segments of a packed sequence, concatenated, each after its start
                # token, which has no loss:
                #
                #     row       s a b c s d e f g s h . .
                #     segment   |--0---||---1----||-2|
                at = 0
                for number in self._documents.blocks.segments(block):
                    segment = self._segments[int(number)]
                    start, behind = segment["start"], at + segment["teacher_tokens"]
                    encoded = segment["teacher_codes"], segment["teacher_exceptions"]
                    spans = start + widen_spans(*encoded)
                    losses = row[at + 1 : behind]
                    key = document_key(self._documents.texts[segment["document"]][TEXT])
                    yield key, StoredSegment(start, segment["end"], spans, losses)
                    at = behind


def load_recorder(job: Job, models: Models, documents: Documents) -> LossRecorder | None:
    """Make the recorder of `--save_store`; None for a run that has finished its store already.

    Raises:
        ValueError: the directory holds another store.
    """
    assert models.guide
    ((reader,), (teacher,)) = models.guide.readers, models.teachers
    directory, student, length = Path(str(job.model.save_store)), job.model.student, job.args
    # The same keys as `vocagnolm score` writes, so that both kinds of stores are read alike.
    about = {
        "teacher": teacher.source.name,
        "teacher_revision": revision_of(teacher.source.name, teacher.config),
        "tokenizer_sha256": tokenizer_sha256(reader.tokenizer),
        "special_tokens": {"before": reader.start, "behind": None},
        "segmentation": f"segments of a run of {student} with {length.max_length} tokens",
        "context": reader.limit,
        "engine": "training",
        "dtype": models.teacher_dtype,
        "quantization": models.teacher_quantization,
        "loss_dtype": _DTYPE,
        "dataset": job.data.dataset,
        "dataset_documents": sum(len(each.texts) for each in documents.corpora),
    }
    check_plan(directory, about)
    if SHARDS in read_manifest(directory):
        return None
    # Each process writes what it has read; the plan is written once.
    if is_main():
        begin_store(directory, about, replace=True)
    return LossRecorder(directory, documents, about | {"versions": versions(PACKAGES)})
