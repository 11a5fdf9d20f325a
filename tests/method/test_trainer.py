"""VocAgnoTrainer against slow references, and against itself under every split of a batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from references import (
    LOSS_TOLERANCE,
    full_losses,
    largest_difference,
    slow_weights,
)
from transformers import PreTrainedTokenizerBase
from world import MAX_LENGTH, Tokenizers, make_blocks, make_trainer

from vocagnolm import trainer as trainer_module
from vocagnolm.collator import PackedCollator
from vocagnolm.conventions import IGNORED_LABEL, NonFiniteLoss
from vocagnolm.method import Aggregation, Method
from vocagnolm.objective import StoredTeacher, TeacherLosses
from vocagnolm.packing import Blocks


def parameters(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


@pytest.mark.parametrize(
    ("aggregation", "unmapped", "selection", "floor"),
    [
        *((how, "include", "top_k", 0.0) for how in get_args(Aggregation)),
        ("share", "exclude", "top_k", 0.3),
        ("max", "exclude", "top_k", 0.0),
        ("max", "include", "accept", 0.3),
    ],
)
def test_loss_equals_slow_reference(
    aggregation: str,
    unmapped: str,
    selection: str,
    floor: float,
    blocks: Blocks,
    pair: tuple[Any, Any],
    tmp_path: Path,
) -> None:
    method = Method(
        "vocagnolm",
        0.3,
        aggregation,
        unmapped,
        loss_divisor="selected",
        selection=selection,
        unselected_weight=floor,
    )
    trainer = make_trainer(tmp_path, blocks, *pair, options={"method": method})
    batch = trainer.data_collator([blocks[i] for i in range(4)])
    loss = trainer.compute_loss(trainer.model, batch, num_items_in_batch=torch.tensor(100))

    student = full_losses(pair[0], batch["input_ids"], batch["position_ids"], batch["labels"])
    with torch.no_grad():
        teacher = full_losses(
            pair[1],
            *(batch[f"teacher_{key}"] for key in ("input_ids", "position_ids", "labels")),
        )
    weights = slow_weights(batch, student.detach(), teacher, method)
    valid = batch["labels"] != IGNORED_LABEL
    if selection == "accept":  # reads no floor and no divisor
        assert trainer.token_objective.divisor_tokens(batch) == valid.sum()
        trainer.metrics.keep_step()
        log = trainer.metrics.read()
        assert log["mean_weight"] == pytest.approx(float(weights.sum() / valid.sum()))
        assert 0.1 < log["mean_weight"] < 0.9
        assert "selected_fraction" not in log
    else:
        weights = weights.maximum(floor * valid)
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
    guided = make_trainer(
        tmp_path,
        blocks,
        copy.deepcopy(student),
        copy.deepcopy(student),
        options={"method": Method(top_k=1.0)},
    )
    plain = make_trainer(tmp_path, blocks, copy.deepcopy(student), options={"method": "cpt"})
    for trainer in (guided, plain):
        trainer.train()
    # One makes the head's gradient backward, the other forward, so the last digits differ.
    ours = parameters(guided)
    assert largest_difference(ours, parameters(plain)) < 1e-8


def test_teacher_is_neither_trained_nor_saved(
    blocks: Blocks, pair: tuple[Any, Any], tmp_path: Path
) -> None:
    student, teacher = pair
    # `from_config` returns it so, and it would score with dropout.
    teacher.train()
    before = copy.deepcopy(teacher.state_dict())
    names = set(student.state_dict())
    trainer = make_trainer(tmp_path, blocks, student, teacher)
    trainer.train()
    trainer.save_model()
    assert not teacher.training
    assert not any(p.requires_grad or p.grad is not None for p in teacher.parameters())
    assert all(torch.equal(before[name], value) for name, value in teacher.state_dict().items())
    optimized = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert optimized == {id(p) for p in student.parameters()}
    loaded = type(student).from_pretrained(tmp_path, dtype=torch.float64)
    assert set(loaded.state_dict()) == names
    assert all(
        torch.equal(a, b) for a, b in zip(loaded.parameters(), student.parameters(), strict=True)
    )


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
def test_guidance_of_a_batch_leaves_the_students_mode(
    trains: bool, blocks: Blocks, pair: tuple[Any, Any], tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path, blocks, *pair)
    trainer.model.train(trains)
    trainer.token_guidance(next(iter(trainer.get_train_dataloader())))
    assert trainer.model.training == trains


def test_run_stops_before_updating_with_a_nan_teacher(
    blocks: Blocks, pair: tuple[Any, Any], tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path, blocks, *pair, gradient_accumulation_steps=2)
    calls, losses = [], trainer.token_objective.teacher.losses

    def break_third(batch: dict[str, Any], **kwargs: Any) -> TeacherLosses:
        found = losses(batch, **kwargs)
        calls.append(batch["block"])
        if len(calls) == 3:  # the first micro-batch of the second step
            found.loss_BT[1, 5] = torch.nan
        return found

    trainer.token_objective.teacher.losses = break_third
    with pytest.raises(NonFiniteLoss, match=r"step 2: the teacher's losses are NaN.*--teacher_dt"):
        trainer.train()
    saved = type(pair[0]).from_pretrained(tmp_path / "checkpoint-1", dtype=torch.float64)
    assert all(p.isfinite().all() for p in trainer.model.parameters())
    for a, b in zip(saved.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_model_made_by_model_init_is_trained(
    blocks: Blocks, pair: tuple[Any, Any], tmp_path: Path
) -> None:
    direct = make_trainer(tmp_path, blocks, copy.deepcopy(pair[0]), copy.deepcopy(pair[1]))
    options = {"model_init": lambda: copy.deepcopy(pair[0])}
    made = make_trainer(tmp_path, blocks, None, pair[1], options=options)
    for trainer in (direct, made):
        trainer.train()
    assert largest_difference(parameters(direct), parameters(made)) == 0.0


def test_resumed_run_equals_uninterrupted_run(
    blocks: Blocks, pair: tuple[Any, Any], tmp_path: Path
) -> None:
    def run(name: str, resume: str | None = None) -> Any:
        student, teacher = (copy.deepcopy(model) for model in pair)
        trainer = make_trainer(
            tmp_path / name,
            blocks,
            student,
            teacher,
            options={"method": Method(top_k_warmup_steps=0.8)},
            max_steps=5,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            save_strategy="steps",
            save_steps=2,
        )
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = run("whole")
    resumed = run("resumed", str(tmp_path / "whole" / "checkpoint-2"))
    assert resumed.state.global_step == 5
    for (name, a), b in zip(
        whole.model.named_parameters(), resumed.model.parameters(), strict=True
    ):
        assert torch.equal(a, b), name
    assert [entry["loss"] for entry in whole.state.log_history[:-1]] == [
        entry["loss"] for entry in resumed.state.log_history[:-1]
    ]
    shares = [entry["selected_fraction"] for entry in resumed.state.log_history[:-1]]
    assert shares == pytest.approx([1.0, 0.85, 0.7, 0.55, 0.4], abs=0.04)


def test_log_reports_what_a_slow_count_finds(
    blocks: Blocks, pair: tuple[Any, Any], tmp_path: Path
) -> None:
    reference = copy.deepcopy(pair)
    trainer = make_trainer(tmp_path, blocks, *pair, max_steps=1, gradient_accumulation_steps=2)
    trainer.train()
    log = trainer.state.log_history[0]
    student_sum = teacher_sum = selected_sum = 0.0
    tokens = teacher_tokens = selected = unmapped = 0
    excess: list[float] = []
    for _, batch in zip(range(2), trainer.get_train_dataloader(), strict=False):
        with torch.no_grad():
            student = full_losses(
                reference[0], batch["input_ids"], batch["position_ids"], batch["labels"]
            )
            teacher = full_losses(
                reference[1],
                *(batch[f"teacher_{key}"] for key in ("input_ids", "position_ids", "labels")),
            )
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
    ("options", "with_teacher", "message"),
    [
        ({}, False, "method vocagnolm needs a teacher"),
        ({"method": "cpt"}, True, "method cpt does not use a teacher"),
        ({"method": "kld", "teacher": StoredTeacher()}, False, "method kld compares distrib"),
        ({"method": Method("chunk", chunks=8)}, True, r"PackedCollator\(..., chunks=8\)"),
        ({"data_collator": PackedCollator(MAX_LENGTH, chunks=8)}, True, "chunks=None"),
        ({"data_collator": PackedCollator(MAX_LENGTH // 2)}, True, f"max_length={MAX_LENGTH}"),
        ({"data_collator": PackedCollator(MAX_LENGTH, True)}, True, "across_documents=False"),
        ({"compute_metrics": print}, True, "compute_metrics has no effect"),
        ({"compute_loss_func": print}, True, "compute_loss_func has no effect"),
        ({"data_collator": print}, True, "data_collator must be a PackedCollator"),
        ({"teacher": []}, False, "method vocagnolm needs a teacher"),
    ],
)
def test_trainer_rejects_contradictions(
    options: dict[str, Any],
    with_teacher: bool,
    message: str,
    blocks: Blocks,
    pair: tuple[Any, Any],
    tmp_path: Path,
) -> None:
    teacher = pair[1] if with_teacher else None
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, blocks, pair[0], teacher, options=options)


def test_collator_is_that_of_the_blocks_by_default(
    blocks: Blocks, pair: tuple[Any, Any], tmp_path: Path
) -> None:
    options = {"data_collator": None, "method": Method(selection="accept")}
    trainer = make_trainer(tmp_path, blocks, *pair, options=options)
    expected = PackedCollator(MAX_LENGTH, False, blocks.teacher_max_length, shares=True)
    assert trainer.data_collator == expected
