"""The files of the package that one training step passes through."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from shape import PACKAGE, ROOT
from transformers import PreTrainedTokenizerBase, TrainerCallback
from world import make_blocks, make_models, make_trainer

MAX_FILES, MAX_LINES = 13, 3_000


class StepTracer(TrainerCallback):
    """Notes the files whose functions run from the end of one step to the end of the next."""

    def __init__(self) -> None:
        self.files: set[Path] = set()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        sys.setprofile(self._note if state.global_step == 1 else None)

    def _note(self, frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            self.files.add(Path(frame.f_code.co_filename))


def test_step_passes_through_few_files(
    tmp_path: Path,
    tiny_llama: Callable[..., Any],
    training_texts: list[str],
    student_tokenizer: PreTrainedTokenizerBase,
    teacher_tokenizer: PreTrainedTokenizerBase,
) -> None:
    tokenizers = student_tokenizer, teacher_tokenizer
    blocks = make_blocks(training_texts[:59], *tokenizers)
    tracer = StepTracer()
    options = {"callbacks": [tracer]}
    models = make_models(tiny_llama, *tokenizers)
    make_trainer(tmp_path, blocks, *models, options=options, max_steps=2, logging_steps=9).train()
    lines = {str(path.relative_to(ROOT)): path.read_text().count("\n") for path in tracer.files}
    assert {"vocagnolm/trainer.py", "vocagnolm/guidance.py", "vocagnolm/packing.py"} <= set(lines)
    assert len(lines) <= MAX_FILES, sorted(lines)
    assert sum(lines.values()) <= MAX_LINES, lines
