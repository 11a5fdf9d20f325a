"""What is written is the same after kills at any points, however they follow each other."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kills import Killed, kill_at
from store_world import ABOUT, FakeScorer, contents, make_job
from transformers import PreTrainedTokenizerBase

from vocagnolm.store import scoring
from vocagnolm.training.run_directory import finish_checkpoint, newest_checkpoint, rotate, sizes

# The operation that is the last one of each process, and whether it is still done.
KILLS = st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=5)
STEPS = 4


def write_with_kills(write: Callable[[], None], kills: list[tuple[int, bool]]) -> None:
    """Write again and again, with a kill each time, and at last to the end."""
    for at, before in kills:
        with pytest.MonkeyPatch.context() as patch:
            kill_at(patch, at, before=before)
            try:
                write()
            except Killed:
                continue
    write()


@given(kills=KILLS)
def test_store_is_the_same_after_any_kills(
    kills: list[tuple[int, bool]], teacher_tokenizer: PreTrainedTokenizerBase
) -> None:
    def score(directory: Path) -> None:
        job = make_job(directory, ["a", "b", "c 😀", "d", "e", "f"], teacher_tokenizer)
        if scoring.begin(job, ABOUT):
            scoring.score_corpus(job, FakeScorer(), ABOUT)

    with tempfile.TemporaryDirectory() as root, tempfile.TemporaryDirectory() as other:
        whole, killed = Path(root), Path(other)
        score(whole)
        write_with_kills(lambda: score(killed), kills)
        assert contents(killed) == contents(whole)


@given(kills=KILLS)
def test_no_saved_step_is_lost_by_any_kills(kills: list[tuple[int, bool]]) -> None:
    reached = [0]

    def newest_step(run: Path) -> int:
        newest = newest_checkpoint(run)
        return int(newest.rpartition("-")[2]) if newest else 0

    def train(run: Path) -> None:
        """Save each step from the newest one on, as a run that is resumed does."""
        begin = newest_step(run)
        assert begin >= reached[0]
        shutil.rmtree(run / ".saving", ignore_errors=True)
        for step in range(begin + 1, STEPS + 1):
            staged, final = run / ".saving" / f"checkpoint-{step}", run / f"checkpoint-{step}"
            staged.mkdir(parents=True)
            (staged / "model.safetensors").write_bytes(bytes([step]) * 1000)
            (staged / "trainer_state.json").write_text(json.dumps({"global_step": step}))
            finish_checkpoint(staged, final, {"world_size": 1, "run": {}}, sizes(staged))
            reached[0] = step
            rotate(final, 2, None)

    with tempfile.TemporaryDirectory() as root:
        run = Path(root)
        write_with_kills(lambda: train(run), kills)
        assert newest_step(run) == STEPS
        model = run / f"checkpoint-{STEPS}/model.safetensors"
        assert model.read_bytes() == bytes([STEPS]) * 1000
