"""Record the losses of a resident teacher during training, as a teacher-loss store.

Every process writes the losses of its own blocks as a shard before a checkpoint is saved, so that a
run that is killed loses only those that it computes again.
"""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import datasets
from accelerate import PartialState
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from vocagnolm.alignment import widen_spans
from vocagnolm.packing import Blocks
from vocagnolm.store.format import (
    LossArray,
    LossDtype,
    StoredSegment,
    document_key,
    finish_store,
    write_shard,
)
from vocagnolm.texts.column import TEXT

# Losses in memory, padding counted.
MOST_HELD = 2**25
# More than a job ever has: process p writes shard step * PROCESSES + p.
PROCESSES = 10_000


class LossRecorder(TrainerCallback):
    """Collects losses and writes them; see `VocAgnoTrainer(recorder=...)`.

    The blocks are packed from the segments, and those cut from the corpus; the description goes
    into the manifest.
    """

    def __init__(
        self,
        directory: Path,
        corpus: datasets.Dataset,
        segments: datasets.Dataset,
        blocks: Blocks,
        loss_dtype: LossDtype,
        description: Mapping[str, object],
    ):
        self._directory, self._corpus, self._blocks = directory, corpus, blocks
        self._segments = segments.select_columns(
            ["document", "start", "end", "teacher_tokens", "teacher_steps", "teacher_jumps"]
        )
        self._loss_dtype, self._description = loss_dtype, description
        self._recorded: list[tuple[Tensor, Tensor]] = []
        self._written: set[int] = set()

    def add(self, block_B: Tensor, loss_BT: Tensor) -> None:
        """Keep the teacher's losses [B, T] of some blocks, on their device until written."""
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
            segments = list(self._stored_segments())
            keys = b"".join(key for key, _ in segments)
            source = hashlib.sha256(keys).hexdigest()
            write_shard(self._directory, number, segments, self._loss_dtype, source)
            self._recorded = []

    def _stored_segments(self) -> Iterator[tuple[bytes, StoredSegment]]:
        for block_B, loss_BT in self._recorded:
            rows = loss_BT.float().cpu().numpy()
            for block, row in zip(block_B.tolist(), rows, strict=True):
                # An earlier epoch may have shown the block already.
                if block in self._written:
                    continue
                self._written.add(block)
                # A row holds the segments of a block, one behind the other, each after its start
                # token, which has no loss:
                #
                #     row       s a b c s d e f g s h . .
                #     segment   |--0---||---1----||-2|
                at = 0
                for number in self._blocks.segments(block):
                    segment = self._segments[int(number)]
                    end = at + segment["teacher_tokens"]
                    yield self._stored(segment, row[at + 1 : end])
                    at = end

    def _stored(self, segment: Mapping[str, Any], losses: LossArray) -> tuple[bytes, StoredSegment]:
        text = self._corpus[segment["document"]][TEXT]
        start, end = segment["start"], segment["end"]
        spans = widen_spans(segment["teacher_steps"], segment["teacher_jumps"]) + start
        return document_key(text), StoredSegment(start, end, spans, losses)
