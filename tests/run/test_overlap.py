"""A teacher's pass begun one micro-batch early: the same numbers, in a safe order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from world import (
    Tokenizers,
    assert_same,
    make_blocks,
    make_models,
    make_trainer,
    outcome,
)

from vocagnolm.objective import Method
from vocagnolm.packing import Blocks
from vocagnolm.run import overlap
from vocagnolm.run.overlap import Overlap, overlap_faults

Make = Callable[..., Any]
BY_ONE = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}


@pytest.fixture
def with_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU, on which torch's streams do nothing, is let in."""
    monkeypatch.setattr(overlap, "WITH_STREAMS", ("cuda", "cpu"))


@pytest.fixture
def make(
    training_texts: list[str],
    tokenizers: Tokenizers,
    tiny_llama: Callable[..., Any],
    tmp_path: Path,
) -> Make:
    """`make(overlaps, method, **training)`: a trainer of a few micro-batches of 2 blocks."""

    def trainer(overlaps: bool, method: Method | None = None, **training: Any) -> Any:
        method = method or Method()
        own, theirs = tokenizers
        read = own, own if method.method == "rho1" else theirs
        blocks = make_blocks(training_texts[:25], *read)
        options = {"overlap_teacher": overlaps, "method": method}
        pair = make_models(tiny_llama, *read)
        return make_trainer(
            tmp_path / str(overlaps), blocks, *pair, options=options, **(BY_ONE | training)
        )

    return trainer


@pytest.mark.usefixtures("with_streams")
@pytest.mark.parametrize(
    ("method", "training"),
    [
        (Method(), {"max_steps": 7}),  # more than an epoch
        (Method(), {"max_steps": 4, "gradient_accumulation_steps": 1}),
        pytest.param(
            *(Method(), {"max_steps": -1, "num_train_epochs": 2, "dataloader_num_workers": 1}),
            marks=pytest.mark.processes,
        ),
        (Method(top_k_warmup_steps=3), {"max_steps": 4}),
        (Method("rho1", rho1_score="loss_and_entropy"), {"max_steps": 2}),
    ],
    ids=["epochs", "no accumulation", "workers", "warmup", "entropies"],
)
def test_overlapping_run_is_the_same_bit_for_bit(
    make: Make, method: Method, training: dict[str, Any]
) -> None:
    runs = []
    for overlaps in (False, True):
        trainer = make(overlaps, method, **training)
        trainer.train()
        runs.append(outcome(trainer))
    assert training["max_steps"] < 7 or trainer.state.epoch > 1
    assert_same(*runs)


@pytest.mark.usefixtures("with_streams")
def test_overlapping_run_resumes_bit_equal(make: Make) -> None:
    saving = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1}
    whole, again = make(False, **saving), make(True, **saving)
    whole.train()
    again.train(resume_from_checkpoint=f"{whole.args.output_dir}/checkpoint-2")
    assert_same(outcome(whole), outcome(again))


@pytest.mark.usefixtures("with_streams")
def test_teacher_is_one_batch_ahead_within_an_epoch(make: Make) -> None:
    trainer = make(True, max_steps=2)
    order: list[tuple[str, int]] = []
    losses, student = trainer.objective.teacher.losses, trainer._student_losses

    def watch(role: str, call: Callable[..., Any], place: int) -> Callable[..., Any]:
        def watched(*args: Any, **options: Any) -> Any:
            order.append((role, int(args[place]["block"][0])))
            return call(*args, **options)

        return watched

    trainer.objective.teacher.losses = watch("teacher", losses, 0)
    trainer._student_losses = watch("student", student, 1)
    trainer.train()
    seen = [block for role, block in order if role == "student"]
    assert len(seen) == 6
    teachers, students = (
        [place for place, (role, _) in enumerate(order) if role == wanted]
        for wanted in ("teacher", "student")
    )
    # Before the first student two passes, one between two students from then on.
    assert teachers[:2] == [0, 1]
    assert students[:5] == [2, 4, 6, 8, 10]
    assert [block for role, block in order if role == "teacher"][:6] == seen


class FakeStream:
    """Notes what it waits for."""

    def __init__(self, log: list[str], name: str):
        self.log, self.name = log, name

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


class FakeDevice:
    """Stands in for `torch.cuda`; its first stream is the current one."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.now = FakeStream(self.log, "first")
        self.Stream = lambda: FakeStream(self.log, "second")

    def current_stream(self) -> FakeStream:
        return self.now

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.now = self.now, stream
        yield
        self.now = before


def batch(number: int) -> dict[str, Any]:
    return {"block": torch.tensor([number])}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    made = FakeDevice()
    monkeypatch.setattr(torch, "get_device_module", lambda _: made)
    return made


def test_streams_wait_for_each_other_at_every_batch(device: FakeDevice) -> None:
    def compute(given: Any) -> int:
        number = int(given["block"])
        device.log.append(f"{number} on {device.now.name}")
        return number

    computed = Overlap(compute, [nn.Module()], torch.device("cuda"))
    source = iter([batch(0), batch(1), batch(2)])
    for number in range(3):
        # One micro-batch at a time, as for every update.
        given = next(computed.ahead(source))
        assert computed(given) == number
        device.log.append(f"student {number}")
    assert device.log == [
        "0 on first",
        "second waits for first",
        "1 on second",
        "student 0",
        "first waits for second",
        "second waits for first",
        "2 on second",
        "student 1",
        "first waits for second",
        "student 2",
    ]


def test_batches_of_others_are_computed_at_once(device: FakeDevice) -> None:
    computed = Overlap(lambda given: int(given["block"]), [nn.Module()], torch.device("cuda"))
    source = iter([batch(0), batch(1)])
    first = next(computed.ahead(source))
    assert computed(first) == 0
    device.log.clear()
    assert computed(batch(7)) == 7
    assert device.log == []
    # What was begun is still there, and another epoch begins anew.
    assert computed(next(computed.ahead(source))) == 1
    assert device.log == ["first waits for second"]
    assert [int(each["block"]) for each in computed.ahead(iter([batch(5)]))] == [5]
    assert list(computed.ahead(iter([]))) == []


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            (False, False, "cuda"),
            "--overlap_teacher has no effect without a --teacher whose losses choose the tokens: "
            "leave it out",
        ),
        (
            (True, True, "cuda"),
            "--overlap_teacher does not go with --teacher_sharding node, which gathers weights on "
            "streams of its own: leave one of them out",
        ),
        ((True, False, "cpu"), "--overlap_teacher needs a GPU, found cpu: leave it out"),
        ((True, False, "mps"), "--overlap_teacher needs a GPU, found mps: leave it out"),
    ],
)
def test_overlap_is_refused_where_it_cannot_help(given: Any, expected: str) -> None:
    assert list(overlap_faults(*given)) == [expected]


def test_overlap_is_refused_when_one_teacher_is_sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "FSDPModule", nn.Linear)
    with pytest.raises(ValueError, match="--overlap_teacher does not go with --teacher_sharding"):
        Overlap(lambda _: 0, [nn.Identity(), nn.Linear(1, 1)], torch.device("cuda"))


@pytest.mark.usefixtures("with_streams")
@pytest.mark.parametrize("method", ["cpt", "kld"])
def test_trainer_refuses_overlap_without_guidance(
    blocks: Blocks, pair: tuple[Any, Any], method: str, tmp_path: Path
) -> None:
    teacher = None if method == "cpt" else pair[1]
    options = {"overlap_teacher": True, "method": method}
    with pytest.raises(ValueError, match="--overlap_teacher has no effect without a --teacher"):
        make_trainer(tmp_path, blocks, pair[0], teacher, options=options)


def test_trainer_refuses_overlap_on_a_cpu(
    blocks: Blocks, pair: tuple[Any, Any], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="--overlap_teacher needs a GPU, found cpu"):
        make_trainer(tmp_path, blocks, *pair, options={"overlap_teacher": True})
