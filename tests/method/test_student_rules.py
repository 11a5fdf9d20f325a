"""Weights by the student alone (DFT, STM, EAFT), against loops over full logits in float64."""

from __future__ import annotations

import math

import pytest
import torch
from architectures import assert_same_gradients, build, gradients, labelled_rows
from torch import Tensor

from vocagnolm.guidance import weigh_by_student
from vocagnolm.method import Method
from vocagnolm.objective import Objective
from vocagnolm.record import differences
from vocagnolm.token_loss import add_token_losses

RULES = [
    Method(selection="dft"),
    Method(selection="stm", stm_perplexity=61.0),
    Method(selection="eaft"),
]
pytestmark = pytest.mark.usefixtures("small_tiles")


def slow_weight(probabilities: list[float], label: int, method: Method) -> float:
    """The weight of one token, as its paper has it."""
    if method.selection == "dft":
        return probabilities[label]
    if method.selection == "stm":
        return float(1 / probabilities[label] <= method.stm_perplexity)
    likely = sorted(probabilities)[-20:]
    shares = [probability / sum(likely) for probability in likely]
    return -sum(share * math.log(share) for share in shares) / math.log(20)


def slow_weights(logits_BSV: Tensor, labels_BS: Tensor, method: Method) -> Tensor:
    weights = torch.zeros(labels_BS.shape, dtype=torch.float64)
    for row in range(len(labels_BS)):
        for place in range(1, labels_BS.shape[1]):
            label = int(labels_BS[row, place])
            if label >= 0:
                probabilities = logits_BSV[row, place - 1].softmax(-1).tolist()
                weights[row, place] = slow_weight(probabilities, label, method)
    return weights


@pytest.mark.parametrize("method", RULES, ids=lambda method: method.selection)
def test_sum_weights_and_gradients_equal_loops(method: Method) -> None:
    model = build("llama_tied").double()
    ids, labels = labelled_rows(2, 13)
    labels[:, 0] = -100
    logits = model(input_ids=ids, use_cache=False).logits
    weights = slow_weights(logits.detach(), labels, method)
    log_p = logits.log_softmax(-1)[:, :-1]
    losses = -log_p.gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0]
    expected = (weights[:, 1:] * losses).sum()
    expected_gradients = gradients(model, expected)
    # The weights differ, and none of them has a gradient of its own.
    assert len(weights[labels >= 0].unique()) > 1

    batch = {"labels": labels, "mapped_tokens": [0], "unmapped_tokens": [int((labels >= 0).sum())]}
    objective = Objective(method)
    own_weights = objective.own_weights(batch, None)
    assert own_weights is not None
    add_token_losses(model)
    total, found_losses, found_weights = model(
        input_ids=ids, labels=labels, token_losses=True, instead=own_weights.losses
    )
    torch.testing.assert_close(found_weights.double(), weights, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(total.double(), expected, rtol=1e-6, atol=0)
    assert_same_gradients(gradients(model, total), expected_gradients, relative=1e-6)

    guidance = objective.select(found_losses, batch)
    if method.selection == "eaft":
        assert guidance.weight_BS[labels >= 0].isnan().all()
    else:
        assert torch.equal(objective.weights(guidance), found_weights)
    assert (
        objective.divisor_tokens(batch)
        == objective.weighted_tokens(batch)
        == labels[labels >= 0].numel()
    )


def test_token_at_the_threshold_is_trained_on() -> None:
    losses = torch.tensor([math.log(perplexity) for perplexity in (2.4, 2.5, 2.6)])
    assert weigh_by_student(losses, "stm", None).tolist() == [1, 1, 0]
    assert weigh_by_student(losses, "stm", 2.6).tolist() == [1, 1, 1]


def test_a_rule_without_a_teacher_takes_none() -> None:
    for method in RULES:
        assert not method.needs_teacher
        assert method.splits_alike
        assert "selection" in method.in_effect()
        assert "top_k" not in method.in_effect()
        with pytest.raises(ValueError, match="does not use"):
            method.check_teacher(1)


def test_runs_that_began_before_a_threshold_was_an_option_resume() -> None:
    earlier = vars(Method()).copy()
    earlier.pop("stm_perplexity")
    assert not differences(earlier, vars(Method()))
    assert differences(earlier, vars(Method(selection="stm", stm_perplexity=3.0)))
