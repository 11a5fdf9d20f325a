"""VocAgnoTrainer against slow references, and against itself under every split of a batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from references import LOSS_TOLERANCE, both_losses, largest_difference, slow_weights
from transformers import PreTrainedTokenizerBase
from world import MAX_LENGTH, Tokenizers, assert_equal_weights, make_blocks, make_trainer, outcome

from vocagnolm import trainer as trainer_module
from vocagnolm.collator import PackedCollator
from vocagnolm.conventions import IGNORED_LABEL, NonFiniteLoss
from vocagnolm.method import Aggregation, Method
from vocagnolm.objective import StoredTeacher, TeacherLosses
from vocagnolm.packing import Blocks

Make = Callable[..., Any]


@pytest.fixture
def make(blocks: Blocks, pair: tuple[Any, Any], tmp_path: Path) -> Make:
    """`make(**training)`: a trainer of the blocks."""
    return partial(make_trainer, tmp_path, blocks, *pair)


@pytest.mark.parametrize(
    "settings",
    [
        *({"aggregation": how} for how in get_args(Aggregation)),
        {"aggregation": "share", "unmapped": "exclude", "unselected_weight": 0.3},
        {"unmapped": "exclude"},
        {"selection": "accept", "unselected_weight": 0.3},
    ],
    ids=str,
)
def test_loss_equals_slow_reference(
    settings: dict[str, Any], make: Make, pair: tuple[Any, Any]
) -> None:
    method = Method(top_k=0.3, loss_divisor="selected", **settings)
    trainer = make(options={"method": method})
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(4)])
    loss = trainer.compute_loss(trainer.model, batch, num_items_in_batch=torch.tensor(100))
    student, teacher = both_losses(batch, *pair)
    weights = slow_weights(batch, student.detach(), teacher, method)
    valid = batch["labels"] != IGNORED_LABEL
    if method.accepts:  # reads no floor and no divisor
        assert trainer.token_objective.divisor_tokens(batch) == valid.sum()
        trainer.metrics.keep_step()
        log = trainer.metrics.read()
        assert log["mean_weight"] == pytest.approx(float(weights.sum() / valid.sum()))
        assert 0.1 < log["mean_weight"] < 0.9
        assert "selected_fraction" not in log
    else:
        weights = weights.maximum(method.unselected_weight * valid)
        assert trainer.token_objective.divisor_tokens(batch) == pytest.approx(float(weights.sum()))
    assert trainer.token_objective.weighted_tokens(batch) == (weights > 0).sum()
    expected = (weights * student).sum() / 100
    assert abs((loss - expected).item()) < LOSS_TOLERANCE
    ours, theirs = (torch.autograd.grad(x, list(pair[0].parameters())) for x in (loss, expected))
    for a, b in zip(ours, theirs, strict=True):
        assert float((a - b).norm()) <= LOSS_TOLERANCE * float(b.norm())


def test_self_guided_full_selection_is_plain_language_modelling(
    training_texts: list[str],
    student_tokenizer: PreTrainedTokenizerBase,
    tiny_llama: Callable[..., Any],
    tmp_path: Path,
) -> None:
    blocks = make_blocks(training_texts[:40], student_tokenizer, student_tokenizer)
    student = tiny_llama(len(student_tokenizer))
    found = []
    for teacher, method in ((student, Method(top_k=1.0)), (None, "cpt")):
        models = copy.deepcopy(student), copy.deepcopy(teacher)
        trainer = make_trainer(tmp_path, blocks, *models, options={"method": method})
        trainer.train()
        found.append(outcome(trainer)[0])
    # One makes the head's gradient backward, the other forward, so the last digits differ.
    assert largest_difference(*found) < 1e-8


def test_teacher_is_neither_trained_nor_saved(
    make: Make, pair: tuple[Any, Any], tmp_path: Path
) -> None:
    student, teacher = pair
    # `from_config` returns it so, and it would score with dropout.
    teacher.train()
    before = copy.deepcopy(teacher.state_dict())
    trainer = make()
    trainer.train()
    trainer.save_model()
    assert not teacher.training
    assert not any(p.requires_grad or p.grad is not None for p in teacher.parameters())
    assert_equal_weights(before, teacher.state_dict())
    optimized = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert optimized == {id(p) for p in student.parameters()}
    loaded = type(student).from_pretrained(tmp_path, dtype=torch.float64)
    assert_equal_weights(loaded.state_dict(), student.state_dict())


def test_attention_is_checked_for_the_longest_segment_of_an_evaluation(
    training_texts: list[str],
    tokenizers: Tokenizers,
    pair: tuple[Any, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths = []
    monkeypatch.setattr(
        trainer_module, "check_packing", lambda *_, longest, **__: lengths.append(longest)
    )
    short = make_blocks([text[:20] for text in training_texts[:20]], *tokenizers)
    long = make_blocks(training_texts[:20], *tokenizers)
    longest = [blocks.longest_segments[0] for blocks in (short, long)]
    assert longest[0] < longest[1]
    make_trainer(tmp_path, short, *pair, options={"eval_dataset": long})
    assert lengths[0] == longest[1]


@pytest.mark.parametrize("trains", [True, False])
def test_guidance_of_a_batch_leaves_the_students_mode(trains: bool, make: Make) -> None:
    trainer = make()
    trainer.model.train(trains)
    # It reads the batch without dropout.
    modes = []
    trainer.model.register_forward_pre_hook(lambda model, _: modes.append(model.training))
    trainer.token_guidance(next(iter(trainer.get_train_dataloader())))
    assert modes == [False]
    assert trainer.model.training == trains


def test_run_stops_before_updating_with_a_nan_teacher(
    make: Make, pair: tuple[Any, Any], tmp_path: Path
) -> None:
    trainer = make(gradient_accumulation_steps=2)
    calls, losses = [], trainer.token_objective.teacher.losses

    def break_third(batch: dict[str, Any], **kwargs: Any) -> TeacherLosses:
        found = losses(batch, **kwargs)
        calls.append(batch["block"])
        if len(calls) == 3:  # the first micro-batch of the second step
            found.loss_BT[1, 5] = torch.nan
        return found

    trainer.token_objective.teacher.losses = break_third
    with pytest.raises(NonFiniteLoss, match=r"step 2: the teacher's .*NaN.*\(teacher_dt"):
        trainer.train()
    saved = type(pair[0]).from_pretrained(tmp_path / "checkpoint-1", dtype=torch.float64)
    assert all(p.isfinite().all() for p in trainer.model.parameters())
    assert_equal_weights(dict(saved.named_parameters()), outcome(trainer)[0])


def test_model_made_by_model_init_is_trained(
    make: Make, blocks: Blocks, pair: tuple[Any, Any], tmp_path: Path
) -> None:
    student, teacher = copy.deepcopy(pair)
    made = make_trainer(tmp_path, blocks, None, teacher, options={"model_init": lambda: student})
    direct = make()
    for trainer in (direct, made):
        trainer.train()
    assert_equal_weights(outcome(direct)[0], outcome(made)[0])


def test_resumed_run_equals_uninterrupted_run(
    blocks: Blocks, pair: tuple[Any, Any], tmp_path: Path
) -> None:
    runs = []
    for name, resume in (("whole", None), ("resumed", str(tmp_path / "whole" / "checkpoint-2"))):
        trainer = make_trainer(
            tmp_path / name,
            blocks,
            *copy.deepcopy(pair),
            options={"method": Method(top_k_warmup_steps=0.8)},
            max_steps=5,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            save_strategy="steps",
            save_steps=2,
        )
        trainer.train(resume_from_checkpoint=resume)
        runs.append(outcome(trainer))
    (whole, log), (resumed, entries) = runs
    assert_equal_weights(whole, resumed)
    assert [entry["loss"] for entry in entries[:-1]] == [entry["loss"] for entry in log[:-1]]
    shares = [entry["selected_fraction"] for entry in entries[:-1]]
    assert shares == pytest.approx([1.0, 0.85, 0.7, 0.55, 0.4], abs=0.04)


def test_log_reports_what_a_slow_count_finds(make: Make, pair: tuple[Any, Any]) -> None:
    reference = copy.deepcopy(pair)
    trainer = make(max_steps=1, gradient_accumulation_steps=2)
    trainer.train()
    log = trainer.state.log_history[0]
    student_sum = teacher_sum = selected_sum = 0.0
    tokens = teacher_tokens = selected = unmapped = 0
    excess: list[float] = []
    for _, batch in zip(range(2), trainer.get_train_dataloader(), strict=False):
        with torch.no_grad():
            student, teacher = both_losses(batch, *reference)
        weights = slow_weights(batch, student, teacher, Method())
        valid = batch["labels"] != IGNORED_LABEL
        tokens += int(valid.sum())
        teacher_tokens += int((batch["teacher_labels"] != IGNORED_LABEL).sum())
        selected += int(weights.sum())
        unmapped += int((valid & (batch["teacher_ranges"][..., 0] == -1)).sum())
        student_sum += float(student.sum())
        teacher_sum += float(teacher.sum())
        selected_sum += float((weights * student).sum())
        for row, t in (valid & (batch["teacher_ranges"][..., 0] != -1)).nonzero().tolist():
            first, last = batch["teacher_ranges"][row, t].tolist()
            excess.append(float(student[row, t] - teacher[row, first:last].max()))
    assert log["loss"] == pytest.approx(selected_sum / tokens, rel=1e-5)
    assert log["student_loss_nats"] == pytest.approx(student_sum / tokens, rel=1e-5)
    assert log["selected_loss_nats"] == pytest.approx(selected_sum / selected, rel=1e-5)
    assert log["selected_fraction"] == pytest.approx(selected / tokens)
    assert log["unmapped_fraction"] == pytest.approx(unmapped / tokens)
    assert log["teacher_loss_nats"] == pytest.approx(teacher_sum / teacher_tokens, rel=1e-5)
    ratio = log["teacher_tokens_per_student_token"]
    assert ratio == pytest.approx(teacher_tokens / tokens)
    ahead = sum(value > 0 for value in excess) / len(excess)
    assert log["teacher_ahead_fraction"] == pytest.approx(ahead)
    assert log["tokens_per_s"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"teacher": None}, "method vocagnolm needs a teacher"),
        ({"teacher": []}, "method vocagnolm needs a teacher"),
        ({"method": "kld", "teacher": StoredTeacher()}, "method kld compares distrib"),
        (
            {"method": Method("chunk", chunks=8), "data_collator": PackedCollator(MAX_LENGTH)},
            "chunks=8",
        ),
        ({"data_collator": PackedCollator(MAX_LENGTH, chunks=8)}, "chunks=None"),
        ({"data_collator": PackedCollator(MAX_LENGTH // 2)}, f"max_length={MAX_LENGTH}"),
        ({"data_collator": PackedCollator(MAX_LENGTH, True)}, "across_documents=False"),
        ({"data_collator": print}, "data_collator must be"),
        ({"compute_metrics": print}, "compute_metrics has no effect"),
        ({"compute_loss_func": print}, "compute_loss_func has no effect"),
    ],
)
def test_trainer_rejects_contradictions(options: dict[str, Any], message: str, make: Make) -> None:
    with pytest.raises(ValueError, match=message):
        make(options=options)


def test_collator_is_that_of_the_blocks_by_default(make: Make, blocks: Blocks) -> None:
    trainer = make(options={"data_collator": None, "method": Method(selection="accept")})
    expected = PackedCollator(MAX_LENGTH, False, blocks.teacher_max_length, shares=True)
    assert trainer.data_collator == expected
