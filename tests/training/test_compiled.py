"""Compiled layers: in one piece, at most three times, with the numbers of those that are not."""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from references import largest_difference
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM
from world import assert_equal_weights, make_trainer, outcome

from vocagnolm import attention, output_head
from vocagnolm.attention import TORCH_VARLEN, RowSegments, segments_of
from vocagnolm.collator import PackedCollator
from vocagnolm.models.compiled import losses_of
from vocagnolm.record import differences
from vocagnolm.store.windows import HFScorer, Window
from vocagnolm.token_loss import add_token_losses
from vocagnolm.training.config import VocAgnoConfig
from vocagnolm.training.job import settings_of

Make = Callable[..., Any]
# This compiler captures the same graphs as the default one, which takes minutes here.
QUICK = {"torch_compile": True, "torch_compile_backend": "aot_eager"}


@pytest.fixture(autouse=True)
def counted() -> Iterator[None]:
    """Nothing is compiled before a test, or counted."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def make(blocks: Any, pair: tuple[Any, Any], tmp_path: Path) -> Make:
    """`make(name, **training)`: a trainer of narrow micro-batches, whose widths vary."""

    def trainer(name: str, varlen: bool = False, **training: Any) -> Any:
        models = copy.deepcopy(pair)
        for model in models:
            model.set_attn_implementation(TORCH_VARLEN if varlen else "sdpa")
        training = {"per_device_train_batch_size": 1, "max_steps": 8, **training}
        return make_trainer(tmp_path / name, blocks, *models, **training)

    return trainer


# -- A kernel ------------------------------------------------------------------------------------
# On a GPU, a kernel attends, which a graph has as one node. It needs one on a CPU, too.


def _probabilities(query: Tensor, key: Tensor, scale: float) -> Tensor:
    hidden = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool).triu(1)
    return (query @ key.mT * scale).masked_fill(hidden, -torch.inf).softmax(-1)


def _segments(edges: Tensor, *rows: Tensor) -> Iterator[tuple[slice, list[Tensor]]]:
    """Yield each segment, with its [H, n, D]; keys and values are repeated for each query."""
    heads, ends = rows[0].shape[1], edges.tolist()
    for start, end in pairwise(ends):
        repeated = [x[start:end].repeat_interleave(heads // x.shape[1], 1) for x in rows]
        yield slice(start, end), [x.transpose(0, 1) for x in repeated]


@torch.library.custom_op("vocagnolm_tests::attend", mutates_args=())
def attend(q: Tensor, k: Tensor, v: Tensor, edges: Tensor, longest: int, scale: float) -> Tensor:
    """Attend within each segment."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for part, (query, key, value) in _segments(edges, q, k, v):
        out[part] = (_probabilities(query, key, scale) @ value).transpose(0, 1)
    return out


@torch.library.custom_op("vocagnolm_tests::attend_backward", mutates_args=())
def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, edges: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value."""
    sums = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
    for part, (query, key, value, slope) in _segments(edges, q, k, v, grad):
        p = _probabilities(query, key, scale)
        dp = slope @ value.mT
        scores = p * (dp - (dp * p).sum(-1, keepdim=True)) * scale
        for total, found in zip(sums, (scores @ key, scores.mT @ query, p.mT @ slope), strict=True):
            # Several queries share a key.
            shared = found.unflatten(0, (total.shape[1], -1)).sum(1)
            total[part] = shared.transpose(0, 1)
    return sums[0], sums[1], sums[2]


@attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, edges: Tensor, longest: int, scale: float) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


@attend_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, edges: Tensor, scale: float) -> Any:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def _keep(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.scale = inputs[5]


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *attend_backward(grad, *ctx.saved_tensors, ctx.scale), None, None, None


attend.register_autograd(_gradients, setup_context=_keep)


def as_kernel(rows: tuple[Tensor, ...], segments: RowSegments, scale: float | None) -> Tensor:
    return attend(*rows, *segments, scale or rows[0].shape[-1] ** -0.5)


def test_kernel_attends_as_the_reference() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = []
    for heads in (4, 2, 2):
        row = torch.randn(9, heads, 8, dtype=torch.float64, generator=generator)
        rows.append(row.requires_grad_())
    segments, found = segments_of([4, 2, 3]), []
    for function in (as_kernel, attention._reference):
        out = function(tuple(rows), segments, None)
        found.append([out, *torch.autograd.grad(out.square().sum(), rows)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


# -- Runs ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_layers_are_compiled_whole_and_at_most_three_times_in_rows_of_any_width(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, widths = PackedCollator._widths, set()

    def varied(collator: PackedCollator, sequences: Any) -> list[int]:
        found = [width + 64 * (sequences[0]["block"] % 3) for width in own(collator, sequences)]
        widths.update(found)
        return found

    monkeypatch.setattr(PackedCollator, "_widths", varied)
    monkeypatch.setattr(attention, "_reference", as_kernel)
    runs = []
    for name, options in (("eager", {}), ("compiled", QUICK)):
        trainer = make(name, varlen=True, max_steps=50, **options)
        trainer.train()
        runs.append(outcome(trainer))
        assert bool(counters["stats"]["unique_graphs"]) == bool(options)
    assert len(widths) == 3
    assert not counters["graph_break"], counters["graph_break"]
    # Layers twice, losses once.
    assert counters["stats"]["unique_graphs"] <= 3
    (weights, log), (compiled, entries) = runs
    assert largest_difference(weights, compiled) < 1e-9
    for entry, other in zip(log, entries, strict=True):
        assert entry == pytest.approx(other, rel=1e-9)


@pytest.mark.slow
def test_compiled_run_resumes_exactly(make: Make, tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 4}
    whole = make("whole", **saving, **QUICK)
    whole.train()
    assert 0 < counters["stats"]["unique_graphs"] <= 3
    assert not counters["graph_break"], counters["graph_break"]
    resumed = make("resumed", **saving, **QUICK)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert_equal_weights(outcome(whole)[0], outcome(resumed)[0])
    eager = make("eager")
    eager.train()
    assert largest_difference(outcome(eager)[0], outcome(whole)[0]) < 1e-9
    whole.save_model()
    # The names are those of the model.
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float64)
    assert_equal_weights(saved.state_dict(), whole.model.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("packs", [False, True])
def test_scorer_is_compiled_whole_and_at_most_three_times_in_batches_of_any_shape(
    packs: bool, pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_reference", as_kernel)
    models = copy.deepcopy(pair[1]), copy.deepcopy(pair[1])
    for model in models:
        model.set_attn_implementation(TORCH_VARLEN if packs else "sdpa")
    eager, compiled = HFScorer(models[0], 256), HFScorer(models[1], 256, "aot_eager")
    rng, shapes = random.Random(0), []
    models[1].model.register_forward_pre_hook(
        lambda _, __, inputs: shapes.append(inputs["input_ids"].shape), with_kwargs=True
    )
    while len(shapes) < 50:
        lengths = [1 + int(300 * rng.random() ** 3) for _ in range(20)]
        windows = [Window(n, [1, *rng.choices(range(90), k=k)], k) for n, k in enumerate(lengths)]
        for row, expected in zip(compiled.losses(windows), eager.losses(windows), strict=True):
            np.testing.assert_allclose(row, expected, rtol=1e-5)
    assert len(set(shapes)) > 20
    assert not counters["graph_break"], counters["graph_break"]
    assert 0 < counters["stats"]["unique_graphs"] <= 3


@pytest.mark.slow
def test_compiled_losses_are_those_of_a_loop(
    pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = add_token_losses(copy.deepcopy(pair[1]).float())
    model.compiled_losses = torch.compile(losses_of, backend="aot_eager", dynamic=True)
    words = model.config.vocab_size
    monkeypatch.setattr(output_head, "TILE_LOGITS", 7 * words)
    for length in (2, 3, 5, 8, 11, 30):
        ids = torch.randint(words, (2, length), generator=torch.Generator().manual_seed(length))
        with torch.no_grad():
            logits = model(input_ids=ids).logits
            found = model(input_ids=ids, labels=ids, token_losses=True)
            # With entropies, they are not compiled.
            eager, _ = model(input_ids=ids, labels=ids, token_losses=True, with_entropies=True)
        torch.testing.assert_close(found, eager)
        for row, place in itertools.product(range(2), range(1, length)):
            values = logits[row, place - 1].tolist()
            expected = math.log(sum(map(math.exp, values))) - values[ids[row, place]]
            assert float(found[row, place]) == pytest.approx(expected, rel=1e-5)
    # On a CPU, tiles share memory: one for all of it, one for a part of any size, one for one row.
    assert counters["stats"]["unique_graphs"] == 3
    assert not counters["graph_break"], counters["graph_break"]


def test_student_of_model_init_is_compiled(
    make: Make, blocks: Any, pair: tuple[Any, Any], tmp_path: Path
) -> None:
    options = {"method": "cpt", "model_init": lambda: copy.deepcopy(pair[0])}
    captured = QUICK | {"torch_compile_backend": "eager"}
    trainer = make_trainer(tmp_path, blocks, None, options=options, max_steps=1, **captured)
    trainer.train()
    assert counters["stats"]["unique_graphs"]


# -- The switch ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "compiles"),
    [
        ({}, False),
        ({"torch_compile": True}, True),
        ({"torch_compile_mode": "max-autotune"}, True),
        ({"torch_compile_backend": "eager"}, True),
        ({"torch_compile": False, "torch_compile_backend": "eager"}, False),
    ],
)
def test_layers_are_compiled_when_trainer_would_compile(
    options: dict[str, Any], compiles: bool, tmp_path: Path
) -> None:
    config = VocAgnoConfig(output_dir=str(tmp_path), bf16=True, **options)
    assert config.compiles_layers == compiles
    # Trainer would round products to TF32.
    assert not torch.backends.cuda.matmul.allow_tf32


def test_run_of_an_earlier_version_resumes_without_it(make: Make) -> None:
    job = make("out")._job
    settings = settings_of(job)
    earlier = {name: value for name, value in settings.items() if name != "torch_compile"}
    assert not differences(earlier, settings)
    job.args.torch_compile = True
    assert "torch_compile was None, now True" in differences(earlier, settings_of(job))
