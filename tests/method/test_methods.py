"""The paper's baselines and several teachers, against slow references and under every split."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from methods_world import METHODS, World, make_world
from references import (
    LOSS_TOLERANCE,
    PARAMETER_TOLERANCE,
    full_losses,
    largest_difference,
    slow_distance,
)
from world import Tokenizers

from vocagnolm.conventions import IGNORED_LABEL


@pytest.fixture(scope="module")
def world(
    training_texts: list[str], tokenizers: Tokenizers, tiny_llama: Callable[..., Any]
) -> World:
    return make_world(tiny_llama, tokenizers, [*training_texts[:59], "😀 数学 ½ x́"])


WEIGHTS = [1.0, -0.5, 0.0, 2.5, 0.25, 1.5, -1.0]


@pytest.fixture(scope="module")
def weighted(world: World) -> World:
    """The same with weights of the corpus, and with a document of several segments."""
    return with_weights(world, WEIGHTS)


def with_weights(world: World, weights: list[float]) -> World:
    texts = [*world.texts[:40], " ".join(world.texts[40:45])]
    found = World(
        texts, (world.ours, world.theirs), (world.student, world.teacher, world.reference)
    )
    found.weights = [weights[number % len(weights)] for number in range(len(texts))]
    return found


def weights_of(world: World, trainer: Any, rows: int) -> torch.Tensor:
    """The weight of every token of the first packed sequences, token by token."""
    blocks = trainer.train_dataset
    (segments,) = [each for each in world.segments.values() if len(each.rows) == len(blocks._order)]
    found = torch.ones(rows, blocks.max_length, dtype=torch.float64)
    for row in range(rows):
        place = 0
        for segment in blocks.segments(row).tolist():
            one = segments.rows[segment]
            for _ in one["student_ids"]:
                found[row, place] = world.weights[one["document"]]
                place += 1
    return found


def weigh_tokens(batch: dict[str, Any]) -> torch.Tensor:
    """Give every token a weight of its own, as messages have them. Documents have one for all."""
    random = torch.Generator().manual_seed(0)
    batch["weights"] = torch.randn(batch["labels"].shape, generator=random)
    return batch["weights"].double()


def batch_of(trainer: Any, rows: int = 4) -> dict[str, Any]:
    return trainer.data_collator([trainer.train_dataset[i] for i in range(rows)])


def logits_of(model: Any, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Full logits [B, T, V], one document at a time."""
    rows = []
    for row, places in zip(ids, positions, strict=True):
        starts = [t for t in range(len(row)) if places[t] == 0]
        parts = [
            model(row[None, a:b], use_cache=False).logits[0]
            if b - a > 1  # not padding
            else torch.zeros(1, model.config.vocab_size, dtype=model.dtype)
            for a, b in itertools.pairwise([*starts, len(row)])
        ]
        rows.append(torch.cat(parts))
    return torch.stack(rows)


def assert_same(trainer: Any, batch: dict[str, Any], expected: torch.Tensor) -> None:
    """Check that the trainer's loss and gradients are those of a sum of losses."""
    divided = torch.tensor(100)
    loss = trainer.compute_loss(trainer.model, batch, num_items_in_batch=divided)
    expected = expected / 100
    assert abs((loss - expected).item()) < LOSS_TOLERANCE * max(1.0, abs(expected.item()))
    ours, theirs = (
        torch.autograd.grad(x, list(trainer.model.parameters())) for x in (loss, expected)
    )
    for a, b in zip(ours, theirs, strict=True):
        assert float((a - b).norm()) <= LOSS_TOLERANCE * float(b.norm())


@pytest.mark.slow
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("name", ["kld", "kld forward", "uld", "uld last"])
def test_distilled_loss_equals_full_logits_pair_by_pair(
    name: str, is_weighted: bool, world: World, weighted: World, tmp_path: Path
) -> None:
    """Eq. 5 and Eq. 6, with loops."""
    corpus = copy.copy(weighted if is_weighted else world)
    corpus.segments = {}
    trainer = corpus.trainer(tmp_path, name)
    batch = batch_of(trainer)
    of_corpus = weigh_tokens(batch) if is_weighted else torch.ones(batch["labels"].shape)
    student = logits_of(trainer.model, batch["input_ids"], batch["position_ids"])
    (teacher_model,) = trainer.token_objective.teacher.models
    prefix = "" if name.startswith("kld") else "teacher_"
    rows = batch[f"{prefix}input_ids"], batch[f"{prefix}position_ids"]
    with torch.no_grad():
        teacher = logits_of(teacher_model, *rows)
    method = trainer.token_objective.method
    weight = method.uld_weight if method.method == "uld" else 1.0
    total, pairs = torch.zeros((), dtype=torch.float64), 0
    for row, t in (batch["labels"] != IGNORED_LABEL).nonzero().tolist():
        label = batch["labels"][row, t]
        total = total - of_corpus[row, t] * torch.log_softmax(student[row, t - 1], -1)[label]
        first, last = (t, t + 1) if not prefix else batch["teacher_ranges"][row, t].tolist()
        if first >= 0:
            pair = student[row, t - 1], teacher[row, last - 2]
            distance = slow_distance(method.distance, *pair)
            total = total + of_corpus[row, t] * weight * distance
            pairs += 1
    assert pairs > 100
    if prefix:  # </s> has no counterpart
        assert pairs < int((batch["labels"] != IGNORED_LABEL).sum())
    assert_same(trainer, batch, total)
    trainer.metrics.keep_step()
    log = trainer.metrics.read()
    assert log["distance_from_teacher"] > 0
    assert log["selected_fraction"] == 1.0


@pytest.mark.parametrize("method", ["vocagnolm", "floor", "selected", "accept", "cpt", "uld"])
def test_weights_of_a_corpus_multiply_losses_alone(
    method: str, world: World, tmp_path: Path
) -> None:
    corpus, ones = with_weights(world, WEIGHTS), with_weights(world, [1.0])
    trainer, plain = corpus.trainer(tmp_path / "a", method), ones.trainer(tmp_path / "b", method)
    batch, other = batch_of(trainer, 16), batch_of(plain, 16)
    of_corpus = weights_of(corpus, trainer, 16)
    is_label = batch["labels"] != IGNORED_LABEL
    assert torch.equal(batch["weights"].double()[is_label], of_corpus[is_label])
    assert len(of_corpus[is_label].unique()) > 3
    of_corpus = weigh_tokens(batch)
    # Choices, divisor and metrics stay, and the loss changes.
    one, two = trainer.token_objective, plain.token_objective
    assert one.divisor_tokens(batch) == two.divisor_tokens(other)
    hundred = torch.tensor(100)
    plain_loss = plain.compute_loss(plain.model, other, num_items_in_batch=hundred)
    if method != "uld":
        student = full_losses(
            trainer.model, *(batch[k] for k in ("input_ids", "position_ids", "labels"))
        )
        weights = one.weights(trainer.token_guidance(batch))
        assert torch.equal(weights, two.weights(plain.token_guidance(other)))
        assert_same(trainer, batch, (weights.double() * of_corpus * student).sum())
    else:
        loss = trainer.compute_loss(trainer.model, batch, num_items_in_batch=hundred)
        assert loss != plain_loss
    logs = []
    for each in (trainer, plain):
        each.metrics.keep_step()
        logs.append(each.metrics.read())
    assert logs[0] == pytest.approx(logs[1], rel=1e-9)
    assert trainer.evaluate(trainer.train_dataset)["eval_loss"] == pytest.approx(
        plain.evaluate(plain.train_dataset)["eval_loss"], rel=1e-6
    )


@pytest.mark.parametrize("method", ["vocagnolm", "accept", "kld"])
def test_weights_of_one_change_nothing(method: str, world: World, tmp_path: Path) -> None:
    ones = with_weights(world, [1.0])
    none = copy.copy(ones)
    none.segments, none.weights = {}, None
    results = []
    for corpus in (ones, none):
        trainer = corpus.trainer(tmp_path, method)
        assert ("weights" in batch_of(trainer)) == (corpus is ones)
        trainer.train()
        results.append(dict(trainer.model.named_parameters()))
    assert all(torch.equal(one, results[1][name]) for name, one in results[0].items())


def slow_selection(
    trainer: Any, batch: dict[str, Any], criteria: list[list[dict[int, Any]]]
) -> torch.Tensor:
    """Weight 1 for a row's largest scores by every criterion, and for labels without a score."""
    weights = torch.zeros(batch["labels"].shape)
    for row, scores in enumerate(criteria):
        for t in range(weights.shape[1]):
            if batch["labels"][row, t] != IGNORED_LABEL and t not in scores[0]:
                weights[row, t] = 1.0
        count = math.ceil(round(trainer.token_objective.method.top_k * len(scores[0]), 9))
        best = [sorted(by, key=lambda t, by=by: (-by[t], t))[:count] for by in scores]
        for t in set.intersection(*map(set, best)):
            weights[row, t] = 1.0
    return weights


@pytest.mark.parametrize(
    "method", [m for m in METHODS if m.startswith(("rho1", "chunk", "several"))]
)
def test_selected_loss_equals_a_slow_reference(method: str, world: World, tmp_path: Path) -> None:
    trainer = world.trainer(tmp_path, method)
    batch = batch_of(trainer)
    student = full_losses(
        trainer.model, *(batch[k] for k in ("input_ids", "position_ids", "labels"))
    )
    if method == "chunk random":
        weights = slow_random_chunks(trainer, batch)
    else:
        weights = slow_selection(trainer, batch, slow_scores(method, trainer, batch, student))
    assert 0 < weights.sum() < (batch["labels"] != IGNORED_LABEL).sum()
    bound = trainer.token_objective.weighted_tokens(batch)
    assert bound > weights.sum() if "entropy" in method else bound == weights.sum()
    assert_same(trainer, batch, (weights * student).sum())


def slow_scores(
    method: str, trainer: Any, batch: dict[str, Any], student: torch.Tensor
) -> list[list[dict[int, Any]]]:
    """By row and token, the excess loss of one or two teachers, and certainty where it counts."""
    at, losses, entropies = 0, [], []
    for model, width in zip(
        trainer.token_objective.teacher.models, batch["teacher_widths"], strict=True
    ):
        own = [
            batch[f"teacher_{key}"][:, at : at + width]
            for key in ("input_ids", "position_ids", "labels")
        ]
        with torch.no_grad():
            losses.append(full_losses(model, *own))
            logits = logits_of(model, *own[:2])
        entropy = torch.distributions.Categorical(logits=logits).entropy()
        entropies.append(torch.cat([torch.zeros_like(entropy[:, :1]), entropy[:, :-1]], 1))
        at += width
    loss, entropy = torch.cat(losses, 1), torch.cat(entropies, 1)
    scores: list[list[dict[int, Any]]] = []
    length = batch["labels"].shape[1]
    for row in range(len(student)):
        excess, certainty = {}, {}
        combine = mean if method == "chunk" else max
        for t in range(length):
            ranges = batch["teacher_ranges"][row, t::length].tolist()
            if batch["labels"][row, t] == IGNORED_LABEL or any(a == -1 for a, _ in ranges):
                continue
            guides = [
                combine([float(loss[row, i]) for i in range(a, b) if loss[row, i] > 0])
                for a, b in ranges
            ]
            reduce: dict[str, Callable[[Any], float]] = {
                "min": min,
                "max": max,
                "weighted": lambda x: (x[0] + 3 * x[1]) / 4,
            }
            guide = reduce.get(method.split()[-1], lambda x: sum(x) / len(x))(guides)
            mine = float(student[row, t])
            if method == "chunk":  # the mean of the chunk's label tokens
                chunk, labels = batch["chunk"][row], batch["labels"][row]
                own = (chunk == chunk[t]) & (labels != IGNORED_LABEL)
                mine = mean(student[row, own].tolist())
            excess[t] = mine - guide
            certainty[t] = -max(float(entropy[row, i]) for i in range(*ranges[0]))
        scores.append([excess, certainty] if "entropy" in method else [excess])
    return scores


def slow_random_chunks(trainer: Any, batch: dict[str, Any]) -> torch.Tensor:
    """Whole chunks in a random order, until the share is reached in the middle of one."""
    weights = torch.zeros(batch["labels"].shape)
    for row, labels in enumerate(batch["labels"].tolist()):
        alone = {**batch, **{k: batch[k][row : row + 1] for k in ("labels", "block", "chunk")}}
        found = trainer.token_objective.select(torch.zeros(1, len(labels)), alone).weight_BS[0]
        shares: dict[int, list[Any]] = {}
        for t, label in enumerate(labels):
            if label != IGNORED_LABEL:
                shares.setdefault(int(batch["chunk"][row, t]), []).append(found[t])
        cut = [chosen for chosen in shares.values() if 0 < sum(chosen) < len(chosen)]
        assert len(cut) <= 1
        assert all(chosen == sorted(chosen, reverse=True) for chosen in cut)
        tokens = sum(map(len, shares.values()))
        assert sum(map(sum, shares.values())) == math.ceil(round(0.4 * tokens, 9))
        weights[row] = found
    return weights


# Without methods that differ from these only in the numbers that they compare.
SPLIT = (
    *("vocagnolm", "random", "share", "floor", "selected", "accept"),
    *("kld", "uld", "rho1 entropy", "chunk", "chunk random", "several weighted"),
)
# With the weights of a corpus.
WEIGHTED = ("vocagnolm", "accept", "uld")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "is_weighted"),
    [*((method, False) for method in SPLIT), *((method, True) for method in WEIGHTED)],
)
def test_update_does_not_depend_on_the_batch_split(
    method: str, is_weighted: bool, world: World, weighted: World, tmp_path: Path
) -> None:
    results = []
    corpus = weighted if is_weighted else world
    for number, (rows, steps) in enumerate(((8, 1), (1, 8))):
        trainer = corpus.trainer(
            tmp_path / str(number),
            method,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=steps,
            max_steps=2,
        )
        before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
        trainer.train()
        after = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
        results.append(after)
        assert largest_difference(before, after) > 1e-4  # it learns at all
    assert largest_difference(*results) < PARAMETER_TOLERANCE


def test_nan_teacher_stops_distillation(world: World, tmp_path: Path) -> None:
    trainer = world.trainer(tmp_path, "uld")
    with torch.no_grad():
        trainer.token_objective.teacher.models[0].lm_head.weight[3].fill_(torch.nan)
    with pytest.raises(RuntimeError, match=r"teacher.* NaN"):
        trainer.train()
