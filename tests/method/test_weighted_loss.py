"""Weighted sums of losses in one pass of the head against full logits, and against two passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import (
    ARCHITECTURES,
    assert_same_gradients,
    build,
    gradients,
    labelled_rows,
    reference_losses,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.harness import alone, resident_bytes
from vocagnolm import output_head
from vocagnolm.token_loss import add_token_losses
from vocagnolm.weighted_loss import OwnWeights

LENGTH = 13
pytestmark = pytest.mark.usefixtures("small_tiles")


def rows() -> tuple[Tensor, Tensor, Tensor]:
    """Ids, labels of which some are ignored, and another model's token losses."""
    ids, labels = labelled_rows(2, LENGTH)
    labels[:, 0] = -100  # nothing predicts the first token of a row
    return ids, labels, 8 * torch.rand(ids.shape, generator=torch.Generator().manual_seed(1))


def places(labels: Tensor) -> Tensor:
    return (labels != -100).flatten().nonzero()[:, 0]


def accepted(loss: Tensor, other: Tensor) -> Tensor:
    return (loss - other).clamp(max=0).exp()


def weigh_by(labels: Tensor, other: Tensor) -> OwnWeights:
    return OwnWeights(places(labels), lambda loss_K, at: accepted(loss_K, other.flatten()[at]))


def one_pass(model: Any, ids: Tensor, labels: Tensor, tokens: OwnWeights) -> Any:
    """Return the weighted sum and the losses."""
    values = model(input_ids=ids, labels=labels, token_losses=True, instead=tokens.losses)
    return values[:2]


def reference(model: Any, ids: Tensor, labels: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """The weighted sum and the losses, from full logits, with the weights in float32."""
    losses = reference_losses(model, ids, labels)
    weights = accepted(losses.detach().float(), other)
    assert ((weights > 0.05) & (weights < 0.95)).sum() > 3
    assert (weights[labels != -100] == 1).any()
    return (weights.to(losses.dtype) * losses).sum(), losses


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sum_and_gradients_equal_full_logits_in_float64(name: str) -> None:
    model = build(name).double()
    ids, labels, other = rows()
    expected, expected_losses = reference(model, ids, labels, other)
    total, losses = one_pass(add_token_losses(model), ids, labels, weigh_by(labels, other))
    assert total.dtype == losses.dtype == torch.float32
    assert not losses.requires_grad
    torch.testing.assert_close(total.double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(losses, expected_losses.float(), rtol=1e-6, atol=0)
    # The incoming gradient is exact in float32.
    found = gradients(model, -0.75 * total)
    assert_same_gradients(found, gradients(model, -0.75 * expected), relative=1e-10)


@pytest.mark.parametrize("name", ["llama_tied", "gemma2", "phi"])
@pytest.mark.parametrize("autocast", [False, True])
def test_one_pass_equals_two(name: str, autocast: bool) -> None:
    """In float32 up to the last digits of gradients, and in bfloat16 up to its rounding."""
    model = add_token_losses(build(name))
    ids, labels, other = rows()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        total, losses = one_pass(model, ids, labels, weigh_by(labels, other))
        # Given the number of labels, both make the same tiles.
        count = len(places(labels))
        plain = model(input_ids=ids, labels=labels, token_losses=True, label_tokens=count)
    assert torch.equal(losses, plain)
    weighted = (accepted(plain.detach(), other) * plain).sum()
    assert torch.equal(total, weighted)
    expected = gradients(model, 0.3 * weighted)
    assert_same_gradients(gradients(model, 0.3 * total), expected, 5e-2 if autocast else 1e-5)


@pytest.mark.parametrize("missing", [0, 1])
def test_a_label_that_is_left_out_makes_the_sum_nan(missing: int) -> None:
    model = add_token_losses(build())
    ids, labels, other = rows()
    tokens = weigh_by(labels, other)
    tokens = tokens._replace(token_M=tokens.token_M[missing:])
    total, losses = one_pass(model, ids, labels, tokens)
    assert bool(total.isnan()) == bool(missing)
    assert int(losses.isnan().sum()) == missing


def test_ignored_tokens_with_nan_states_harm_nothing() -> None:
    model = add_token_losses(build())
    ids, labels, other = rows()
    labels[:, -1] = -100
    broken = torch.zeros(LENGTH, 1, dtype=torch.bool)
    broken[-2:] = True  # these predict the ignored last token, and nothing
    model.model.norm.register_forward_hook(lambda _, __, out: out.masked_fill(broken, torch.nan))
    total, losses = one_pass(model, ids, labels, weigh_by(labels, other))
    assert losses.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients(model, total).values())


def test_batch_without_a_label_has_gradients_of_zero() -> None:
    model = add_token_losses(build("phi"))
    ids, labels, other = rows()
    labels.fill_(-100)
    total, losses = one_pass(model, ids, labels, weigh_by(labels, other))
    assert float(total.detach()) == 0
    assert (losses == 0).all()
    found = gradients(model, total)
    assert "lm_head.weight" in found
    assert all((gradient == 0).all() for gradient in found.values())


@pytest.mark.parametrize("frozen", ["lm_head", "model"])
def test_only_gradients_that_are_needed_are_made(
    frozen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with adapters, where the head's gradient would be as large as the head."""
    model = add_token_losses(build("phi"))
    ids, labels, other = rows()
    getattr(model, frozen).requires_grad_(False)
    expected = gradients(model, reference(model, ids, labels, other)[0])
    made: list[list[bool]] = []
    own = output_head.HeadGradients.add

    def add(self: Any, *tile: Any) -> None:
        made.append([gradient is not None for gradient in self.sums])
        own(self, *tile)

    monkeypatch.setattr(output_head.HeadGradients, "add", add)
    with torch.no_grad():
        one_pass(model, ids, labels, weigh_by(labels, other))
    assert not made
    total, _ = one_pass(model, ids, labels, weigh_by(labels, other))
    assert made[0] == ([True, False, False] if frozen == "lm_head" else [False, True, True])
    made.clear()
    assert_same_gradients(gradients(model, total), expected)
    assert not made


def test_second_backward_pass_is_an_error() -> None:
    """The first one scales in place what the forward pass has made."""
    ids, labels, other = rows()
    total, _ = one_pass(add_token_losses(build()), ids, labels, weigh_by(labels, other))
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


@pytest.mark.parametrize(
    ("words", "hidden", "device", "rows"),
    [
        (152_064, 896, "cpu", 112),
        (152_064, 64, "cpu", 55),
        (49_152, 576, "cpu", 170),
        (152_064, 3584, "cuda", 384),
    ],
)
def test_tiles_of_a_large_head_are_an_eighth_of_it_on_a_cpu(
    words: int, hidden: int, device: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_head, "TILE_LOGITS", 2**23)
    with FakeTensorMode():
        weight = torch.empty(words, hidden, device=device)
    head = output_head.Head(weight, None, 1.0, None, torch.float32)
    assert output_head.trained_rows_per_tile(10**6, head) == rows
    assert output_head.trained_rows_per_tile(50, head) == 50
    assert output_head.trained_rows_per_tile(0, head) == 1


def extra_bytes(words: int, hidden: int) -> int:
    """Return the memory of forward and backward, beyond that of a small head."""
    output_head.TILE_LOGITS = 2**18

    def step(words: int) -> None:
        weight = torch.randn(words, hidden).requires_grad_()
        head = output_head.Head(weight, None, 1.0, None, torch.float32)
        tokens = OwnWeights(torch.arange(1, 513), lambda loss_K, _: torch.ones_like(loss_K))
        states, targets = torch.randn(1, 513, hidden), torch.zeros(1, 513).long()
        targets[0, -1] = -100
        tokens.losses(states.requires_grad_(), targets, head)[0].backward()
        assert weight.grad is not None

    step(10)
    before = resident_bytes("VmRSS")
    step(words)
    return resident_bytes("VmHWM") - before


@pytest.mark.slow
def test_memory_is_one_gradient_of_the_head_and_a_tile() -> None:
    words, hidden = 32_000, 256
    weight = words * hidden * 4
    extra = alone(extra_bytes, words, hidden)
    # The weight itself, its gradient, and a fifth of it for the tile and the states.
    assert 1.9 * weight < extra < 2.3 * weight
