"""Losses, packing and templates of pretrained models, against what transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from real_data import GEMMA, SMOLLM2, real_model
from torch.nn import functional as F

from vocagnolm.attention import segments_of
from vocagnolm.models.load import ModelSource
from vocagnolm.models.probes import check_packing
from vocagnolm.token_loss import add_token_losses

# They take minutes.
pytestmark = pytest.mark.slow

TEXT = (
    "A train leaves at 9:15 and arrives at 11:40. How long does the journey take?\n"
    "From 9:15 to 11:15 there are 2 hours. From 11:15 to 11:40 there are 25 minutes.\n"
    "The answer is $2 \\cdot 60 + 25 = 145$ minutes. "
)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    return chosen


@pytest.fixture
def model(model_directory: Path, dtype: torch.dtype) -> Any:
    return ModelSource(str(model_directory), "teacher").load(dtype).eval()


def ids_of(directory: Path, repeats: int) -> torch.Tensor:
    source = ModelSource(str(directory), "teacher")
    tokenizer: Any = source.tokenizer(source.config())
    ids: torch.Tensor = tokenizer(TEXT * repeats, return_tensors="pt").input_ids
    return ids


def losses_of_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the losses of the tokens after the first, from full logits, never in 16 bits."""
    logits = model(input_ids=ids, use_cache=False).logits
    if logits.dtype == torch.bfloat16:
        logits = logits.float()
    return F.cross_entropy(logits[:, :-1].mT, ids[:, 1:], reduction="none")


def test_losses_equal_those_of_full_logits(
    model: Any, model_directory: Path, dtype: torch.dtype
) -> None:
    ids = ids_of(model_directory, 1)
    with torch.no_grad():
        expected = losses_of_logits(model, ids)
        add_token_losses(model)
        losses = model(input_ids=ids, labels=ids, token_losses=True)[:, 1:]
    # Logits of up to 30 are rounded to 8 bits on one side, and added up in float32 on the other.
    bound = 1e-3 if dtype == torch.float32 else 0.13
    torch.testing.assert_close(losses, expected, rtol=0, atol=bound)
    assert abs(float(losses.mean() - expected.mean())) < bound / 5


@pytest.mark.parametrize("name", [SMOLLM2, GEMMA])
def test_losses_with_products_in_bfloat16_are_near_those_in_float32(name: str) -> None:
    """As a student computes them with --bf16; its weights stay in float32."""
    directory = real_model(name)
    model: Any = ModelSource(str(directory), "student").load(torch.float32).eval()
    ids = ids_of(directory, 1)
    with torch.no_grad():
        expected = losses_of_logits(model, ids)
        add_token_losses(model)
        with torch.autocast("cpu", torch.bfloat16):
            losses = model(input_ids=ids, labels=ids, token_losses=True)[:, 1:]
    errors = losses - expected
    assert 0 < float(errors.square().mean().sqrt()) < 0.1
    assert abs(float(errors.mean())) < 0.02


@pytest.mark.parametrize("name", [SMOLLM2, GEMMA])
def test_gradients_equal_those_of_full_logits(name: str) -> None:
    directory = real_model(name)
    # Float32 rounds the product with the head to some 1e-4 of a gradient, so both are in float64.
    # Only the losses themselves are always in float32.
    model: Any = ModelSource(str(directory), "student").load(torch.float32).double().eval()
    ids = ids_of(directory, 1)
    weights = torch.linspace(-0.5, 1, ids.shape[1] - 1)[None]
    # The embeddings, which are tied to the head, the last norm and a first layer.
    watched = [
        model.get_input_embeddings().weight,
        model.model.norm.weight,
        model.model.layers[0].self_attn.q_proj.weight,
    ]
    expected = torch.autograd.grad((losses_of_logits(model, ids) * weights).sum(), watched)
    add_token_losses(model)
    losses = model(input_ids=ids, labels=ids, token_losses=True)[:, 1:]
    gradients = torch.autograd.grad((losses * weights).sum(), watched)
    for gradient, reference in zip(gradients, expected, strict=True):
        scale = float(reference.abs().max())
        torch.testing.assert_close(gradient, reference, rtol=0, atol=1e-6 * scale)


def test_packed_documents_do_not_see_each_other(model: Any, model_directory: Path) -> None:
    add_token_losses(model)
    # Longer than the sliding windows of Gemma.
    ids = ids_of(model_directory, 8)
    half = 32
    assert ids.shape[1] > 512 + half
    with torch.no_grad():
        check_packing(model)
        packed = torch.cat([ids, ids[:, :half]], dim=1)
        positions = torch.cat([torch.arange(ids.shape[1]), torch.arange(half)])[None]
        together = model(
            input_ids=packed,
            labels=packed,
            position_ids=positions,
            segments=segments_of([ids.shape[1], half]),
            token_losses=True,
        )
        alone = model(input_ids=ids, labels=ids, token_losses=True)
    bound = 1e-3 if model.dtype == torch.float32 else 0.25
    # The loss of the second document's first token does not count: nothing comes before it.
    first = slice(1, ids.shape[1])
    second = slice(ids.shape[1] + 1, None)
    torch.testing.assert_close(together[:, first], alone[:, first], rtol=0, atol=bound)
    torch.testing.assert_close(together[:, second], alone[:, 1:half], rtol=0, atol=bound)
