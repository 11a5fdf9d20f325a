"""The settings record, and Eq. 2 with Eq. 4 put together, against the functions it calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from vocagnolm.conventions import IGNORED_LABEL
from vocagnolm.guidance import TokenGuidance, select_top
from vocagnolm.method import Method
from vocagnolm.objective import Objective, TeacherLosses


def least(loss_BSW: torch.Tensor, held_BSW: torch.Tensor) -> torch.Tensor:
    """A user's own aggregation."""
    return loss_BSW.masked_fill(~held_BSW, torch.inf).amin(-1)


class Hardest(Objective):
    """A user's own method, which has no teacher."""

    needs_teacher = False

    def select(self, student_loss_BS: Any, batch: Any, teacher: Any = None) -> Any:
        found = super().select(student_loss_BS, batch)
        scores = found.student_loss_BS, found.valid_BS
        weight_BS = select_top(*scores, self.method.top_k, self.method.selection_scope)
        return found._replace(weight_BS=weight_BS.float())


class Halved(Objective):
    """A user's own method on top of acceptance."""

    def select(self, student_loss_BS: Any, batch: Any, teacher: Any = None) -> Any:
        found = super().select(student_loss_BS, batch, teacher)
        return found._replace(weight_BS=found.weight_BS / 2)


# Intervals and choices of all options are in tests/training/test_config.py.
WRONG: list[dict[str, Any]] = [
    {"method": "ppo"},
    {"method": "nothing:Here"},
    {"method": "math:sqrt"},
    {"method": ":Class"},
    {"aggregation": "math:nothing"},
    {"aggregation": "math:pi"},
    {"aggregation": lambda loss_BSW, held_BSW: loss_BSW},
    {"loss_divisor": "selected", "method": Hardest},
    {"aggregation": "median"},
    {"aggregation": "share", "method": "chunk"},
    {"selection": "accept", "method": "chunk"},
    {"rho1_score": "loss_and_entropy", "method": "rho1", "unmapped": "mean"},
    {"rho1_score": "loss_and_entropy", "method": "rho1", "loss_divisor": "selected"},
]


@pytest.mark.parametrize("settings", WRONG, ids=" ".join)
def test_method_names_the_option_that_is_wrong(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"^{next(iter(settings))}\b"):
        Method(**settings)


def test_splits_are_alike_where_no_micro_batch_is_read() -> None:
    assert Method().splits_alike
    assert not Method(selection_scope="batch").splits_alike
    assert not Method(unmapped="mean").splits_alike
    assert Method("cpt", selection_scope="batch").splits_alike
    assert Method("random", unmapped="mean").splits_alike
    assert not Method("rho1", rho1_score="loss_and_entropy", selection_scope="batch").splits_alike
    assert not Method("cpt", rho1_score="loss_and_entropy").with_entropies


def test_defaults_are_the_papers() -> None:
    assert Method() == Method("vocagnolm", 0.4, "max", "include", "sequence", "all")
    assert (Method("uld").distance, Method("uld").uld_weight) == ("sorted_l1", 0.5)
    assert Method("kld").distance == "reverse_kl"
    assert Method("kld", kld_direction="forward").distance == "forward_kl"


@pytest.mark.parametrize(
    ("method", "choice", "needs_teacher", "compares"),
    [
        (Method(), "guided", True, False),
        (Method("cpt"), "all", False, False),
        (Method("random"), "random", False, False),
        (Method("kld"), "all", True, True),
        (Method("uld"), "all", True, True),
        (Method("rho1"), "guided", True, False),
        (Method("rho1", rho1_score="loss_and_entropy"), "guided", True, True),
        (Method("chunk"), "guided", True, False),
        (Method("chunk", chunk_guidance="random"), "random", False, False),
    ],
)
def test_method_tells_what_it_needs(
    method: Method, choice: str, needs_teacher: bool, compares: bool
) -> None:
    assert method.choice == choice
    assert method.needs_teacher == needs_teacher
    message = "does not use" if not needs_teacher else "needs a teacher"
    with pytest.raises(ValueError, match=f"method {method.method}.* {message}"):
        method.check_teacher(0 if needs_teacher else 1)
    if compares:
        with pytest.raises(ValueError, match="distributions"):
            method.check_teacher(1, is_stored=True)
    elif needs_teacher:
        method.check_teacher(1, is_stored=True)
        method.check_teacher(2)


@pytest.mark.parametrize(
    ("warmup", "shares"),
    [
        (0, [0.4] * 5),
        (1, [1, 0.4, 0.4, 0.4, 0.4]),
        (2, [1, 0.7, 0.4, 0.4, 0.4]),
        (0.5, [1, 0.8, 0.6, 0.4, 0.4]),
        (7, [1, 0.914286, 0.828571, 0.742857, 0.657143]),
    ],
)
def test_share_falls_during_its_warmup(warmup: float, shares: list[float]) -> None:
    method = Method(top_k_warmup_steps=warmup, selection_scope="batch")
    assert [method.at_step(step, 5).top_k for step in range(5)] == shares
    assert (method.at_step(4, 5) is method) == (shares[4] == 0.4)
    assert method.at_step(0, 5).selection_scope == "batch"


def test_settings_in_effect_leave_out_what_is_idle() -> None:
    assert Method("kld").in_effect() == {"method": "kld", "kld_direction": "reverse"}
    assert set(Method("chunk", chunk_guidance="random").in_effect()) == {
        *("method", "top_k", "unselected_weight", "selection_scope", "loss_divisor"),
        *("top_k_warmup_steps", "chunks", "chunk_guidance"),
    }
    settings = {"top_k": 0.7, "rho1_score": "loss_and_entropy", "selection_scope": "batch"}
    accepts = Method("rho1", **settings, unmapped="mean", selection="accept")
    assert accepts.in_effect() == {"method": "rho1", "selection": "accept"}
    assert accepts.splits_alike
    assert not accepts.with_entropies
    assert "selection" not in Method("random", selection="accept").in_effect()
    assert "teacher_reduction" not in Method().in_effect()
    assert Method(teacher_reduction="min").in_effect()["teacher_reduction"] == "min"


def random_batch(teachers: int) -> tuple[dict[str, Any], torch.Tensor, TeacherLosses]:
    generator = torch.Generator().manual_seed(teachers)
    rows, positions, columns = 3, 40, 50 * teachers
    first = torch.randint(columns - 4, (rows, teachers * positions), generator=generator)
    width = torch.randint(1, 4, first.shape, generator=generator)
    ranges = torch.stack([first, first + width], -1)
    ranges[torch.rand(first.shape, generator=generator) < 0.1] = -1
    labels = torch.randint(99, (rows, positions), generator=generator)
    labels[:, ::7] = IGNORED_LABEL
    loss, entropy = (torch.rand(rows, columns, generator=generator) for _ in range(2))
    batch: dict[str, Any] = {"labels": labels, "teacher_ranges": ranges}
    batch |= {"block": torch.arange(rows), "teacher_shares": torch.ones(*ranges.shape[:2], 3)}
    valid = labels != IGNORED_LABEL
    mapped = valid & (ranges[..., 0] >= 0).view(rows, teachers, -1).all(1)
    batch["mapped_tokens"] = mapped.sum(-1).tolist()
    batch["unmapped_tokens"] = (valid & ~mapped).sum(-1).tolist()
    losses = TeacherLosses(loss, torch.rand(loss.shape, generator=generator) < 0.95, entropy)
    return batch, torch.rand(rows, positions, generator=generator), losses


@pytest.mark.parametrize("method", [Method("cpt"), Method("random", top_k=0.25), Method("kld")])
def test_selection_maps_no_token_without_a_teacher(method: Method) -> None:
    batch, student, _ = random_batch(1)
    found = Objective(method, seed=3).select(student, batch)
    valid = batch["labels"] != IGNORED_LABEL
    assert torch.equal(found.valid_BS, valid)
    assert not found.mapped_BS.any()
    assert not (found.weight_BS.bool() & ~valid).any()
    if method.method == "random":
        assert found.weight_BS.sum(-1).tolist() == [-(-int(row.sum()) // 4) for row in valid]
        other = Objective(method, seed=4).select(student, batch).weight_BS
        assert not torch.equal(found.weight_BS, other)
    else:
        assert torch.equal(found.weight_BS, valid.float())


def test_own_method_without_a_teacher_weighs_by_its_select() -> None:
    method = Method(Hardest, top_k=0.3)  # type: ignore[arg-type]
    assert method.method == f"{__name__}:Hardest"
    assert method == Method(method.method, top_k=0.3)
    assert {"top_k", "selection_scope"} <= method.in_effect().keys()
    assert "unmapped" not in method.in_effect()
    with pytest.raises(ValueError, match="Hardest does not"):
        method.check_teacher(1)
    batch, student, _ = random_batch(1)
    valid = batch["labels"] != IGNORED_LABEL
    mine = method.own_objective(method)  # type: ignore[misc]
    weights = mine.weights(mine.select(student, batch)) > 0
    assert weights.sum(-1).tolist() == [-(-3 * int(row.sum()) // 10) for row in valid]
    for loss_S, weight_S, valid_S in zip(student, weights, valid, strict=True):
        assert loss_S[weight_S].min() > loss_S[valid_S & ~weight_S].max()
    # An upper bound, as it is unknown which tokens a `select` weighs.
    assert mine.weighted_tokens(batch) == mine.divisor_tokens(batch) == valid.sum()


def test_own_aggregation_is_kept_by_its_name() -> None:
    assert Method(aggregation=least).aggregation == f"{__name__}:least"  # type: ignore[arg-type]


CHOICES = [
    Method("random", top_k=0.3),
    Method("random", top_k=0.3, selection_scope="batch"),
    *(
        Method(top_k=0.3, unmapped=unmapped, selection_scope=scope)
        for unmapped in ("include", "exclude", "mean")
        for scope in ("sequence", "batch")
    ),
]
ACCEPT = [
    Method(selection="accept"),
    Method(selection="accept", loss_divisor="selected", unselected_weight=0.25),  # reads neither
    Method("random", top_k=0.3, selection="accept", loss_divisor="selected"),  # by no teacher
]
COUNTED = [
    replace(method, loss_divisor=divisor, unselected_weight=weight)
    for method in CHOICES
    for divisor in ("all", "selected")
    for weight in (0.0, 0.25)
]


@pytest.mark.parametrize("method", [Method("cpt"), *ACCEPT, *COUNTED], ids=str)
def test_counts_before_a_forward_are_those_after(method: Method) -> None:
    batch, student, losses = random_batch(1)
    losses = losses._replace(entropy_BT=None, valid_BT=torch.ones_like(losses.valid_BT))
    objective = Objective(method, seed=1)
    selection = objective.select(student, batch, losses if method.needs_teacher else None)
    weights = objective.weights(selection)
    assert objective.weighted_tokens(batch) == int((weights > 0).sum())
    by_labels = method.loss_divisor == "all" or method.accepts
    expected = (batch["labels"] != IGNORED_LABEL).sum() if by_labels else weights.sum()
    assert objective.divisor_tokens(batch) == pytest.approx(float(expected))


@pytest.mark.parametrize(
    ("method", "teachers"),
    [
        (Method("cpt"), 0),
        (Method(selection="accept"), 1),
        (Method(selection="accept", unselected_weight=0.3, teacher_reduction="min"), 2),
        (Method("rho1", rho1_score="loss_and_entropy", selection="accept"), 1),
    ],
)
def test_own_weights_are_those_of_select(method: Method, teachers: int) -> None:
    batch, student, losses = random_batch(max(teachers, 1))
    teacher = losses if teachers else None
    expected = Objective(method).select(student, batch, teacher)
    own_weights = Objective(method).own_weights(batch, teacher)
    assert own_weights is not None
    token_M = own_weights.token_M
    assert torch.equal(token_M, expected.valid_BS.flatten().nonzero()[:, 0])
    found = torch.zeros_like(student).flatten()
    for token_K in torch.split(token_M, 10):
        found[token_K] = own_weights.weigh(student.flatten()[token_K], token_K)
    assert torch.equal(found.view_as(student), expected.weight_BS)
    partial = (found > 0) & (found < 1)
    assert partial.any() == bool(teachers)


@pytest.mark.parametrize(
    "objective",
    [
        Objective(Method()),
        Objective(Method(unselected_weight=0.3)),
        Objective(Method("random", selection="accept")),
        Objective(Method("chunk")),
        Objective(Method("rho1")),
        Halved(Method(selection="accept")),
        Hardest(Method("cpt")),
    ],
    ids=lambda objective: f"{type(objective).__name__} {objective.method.as_typed}",
)
def test_weights_that_others_decide_or_a_user_are_not_a_tokens_own(objective: Objective) -> None:
    batch, _, losses = random_batch(1)
    assert objective.own_weights(batch, losses) is None


def test_teacher_rows_are_those_that_teachers_read() -> None:
    names = ("position_ids", "labels", "teacher_position_ids", "teacher_labels")
    batch: dict[str, Any] = {name: torch.rand(2, 7) for name in names}
    (own,) = Objective(Method("kld")).teacher_rows(batch)  # type: ignore[arg-type]
    assert all(a is batch[name] for a, name in zip(own, names[:2], strict=True))
    batch["teacher_widths"] = [3, 4]
    first, second = Objective(Method()).teacher_rows(batch)  # type: ignore[arg-type]
    for a, b, name in zip(first, second, names[2:], strict=True):
        assert torch.equal(a, batch[name][:, :3])
        assert torch.equal(b, batch[name][:, 3:])


@pytest.mark.parametrize("floor", [0.0, 0.3])
def test_weights_of_a_users_own_method_arrive_as_given(floor: float) -> None:
    """Negative ones too; only tokens of weight 0 get `unselected_weight`."""
    weight_BS = torch.tensor([[1.0, -0.5, 0.0, 0.2, 3.0]])
    one_BS = torch.ones_like(weight_BS)
    valid_BS = torch.tensor([[True, True, True, True, True]])
    guidance = TokenGuidance(one_BS, one_BS, valid_BS, valid_BS, weight_BS, one_BS)
    objective = Objective(Method(unselected_weight=floor))
    expected = torch.tensor([[1.0, -0.5, floor, 0.2, 3.0]])
    assert torch.equal(objective.weights(guidance), expected)
