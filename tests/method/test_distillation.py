"""Distances of distributions and their gradients against full logits, on tiny models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import build, gradients
from references import slow_distance
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from benchmarks.harness import alone, resident_bytes
from vocagnolm import distillation, output_head
from vocagnolm.distillation import HeadStates, Pairs
from vocagnolm.output_head import last_hidden_state, read_head
from vocagnolm.token_loss import add_token_losses
from vocagnolm.weighted_loss import OwnWeights

ARCHITECTURES = ("llama", "llama_tied", "gemma2", "granite", "phi")
STUDENT_WORDS = 41
DISTANCES = ("reverse_kl", "forward_kl", "sorted_l1")
IDS = torch.randint(1, 30, (2, 9), generator=torch.Generator().manual_seed(2))
TOKENS = torch.arange(1, 9)
pytestmark = pytest.mark.usefixtures("small_tiles")


def make(name: str, words: int, seed: int = 0) -> Any:
    """A model with another head at every seed."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return add_token_losses(build(name, 0.2, seed, vocab_size=words, **sizes))


def states_of(model: Any, ids: Tensor) -> HeadStates:
    with torch.no_grad():
        hidden = last_hidden_state(model, input_ids=ids)
        return HeadStates(hidden.flatten(0, 1), read_head(model, hidden))


def distill(
    student: Any,
    ids: Tensor,
    teacher: HeadStates,
    tokens: Tensor,
    distance: Any,
    factor: float = 1.0,
    theirs: Tensor | None = None,
) -> Any:
    """The trained sum, the losses [B, S] and the distances [R]; `theirs` defaults to `tokens`."""
    labels = (torch.arange(ids.numel()) % ids.shape[1] > 0).nonzero()[:, 0]
    alone = labels[~torch.isin(labels, tokens)]
    pairs = Pairs(teacher, tokens, tokens if theirs is None else theirs, alone, distance, factor)
    return student(input_ids=ids, labels=ids, token_losses=True, instead=pairs.losses)


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("teacher_words", [STUDENT_WORDS, 57, 30])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_distances_and_gradients_equal_those_of_full_logits(
    name: str, teacher_words: int, distance: Any
) -> None:
    student, teacher = make(name, STUDENT_WORDS), make("gemma2", teacher_words, 1)
    ids = IDS
    other_ids = torch.randint(1, 30, (2, 11), generator=torch.Generator().manual_seed(3))
    tokens = torch.tensor([1, 4, 5, 7, 10, 12, 16])  # places in the flat batch; 0 and 9 start rows
    theirs = torch.tensor([3, 1, 1, 10, 12, 21, 20])

    states = states_of(teacher, other_ids)
    total, losses, found = distill(student, ids, states, tokens, distance, 0.3, theirs)
    for values in (losses, found):
        assert values.dtype == torch.float32
        assert not values.requires_grad
    own = gradients(student, -0.7 * total)

    logits = student(input_ids=ids, use_cache=False).logits
    with torch.no_grad():
        other = teacher(input_ids=other_ids, use_cache=False).logits.flatten(0, 1)
    plain = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    flat = logits.flatten(0, 1)
    expected = torch.stack(
        [
            slow_distance(distance, flat[a - 1], other[b - 1])
            for a, b in zip(tokens.tolist(), theirs.tolist(), strict=True)
        ]
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(losses.sum(), plain, rtol=1e-5, atol=0)
    trained = plain + 0.3 * expected.sum()
    torch.testing.assert_close(total, trained, rtol=1e-5, atol=0)
    for key, gradient in gradients(student, -0.7 * trained).items():
        error = float((own[key] - gradient).norm() / gradient.norm().clamp(min=1e-6))
        assert error < 1e-5, (key, error)


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_distance_from_the_student_itself_is_exactly_zero(name: str, distance: Any) -> None:
    model = make(name, STUDENT_WORDS)
    found = []
    for factor in (0.0, 1.0):
        total, _, distances = distill(model, IDS, states_of(model, IDS), TOKENS, distance, factor)
        assert (distances == 0).all()
        found.append(gradients(model, total))
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_distances_are_summed_in_the_widest_dtype(dtype: torch.dtype) -> None:
    student, teacher = make("llama", STUDENT_WORDS), make("llama", 57, 1)
    results = {}
    for kind in (torch.float32, dtype):
        states = states_of(teacher.to(kind), IDS)
        total, _, found = distill(student.to(kind), IDS, states, TOKENS, "sorted_l1")
        results[kind] = found, gradients(student, total)["lm_head.weight"].float()
    tolerance = 1e-5 if dtype == torch.float64 else 0.1
    for a, b in zip(*results.values(), strict=True):
        assert float((a - b).norm() / a.norm()) < tolerance


@pytest.mark.parametrize("distance", DISTANCES)
def test_bfloat16_distances_are_near_those_of_float32(distance: Any) -> None:
    """Under autocast, as on a GPU; the backward pass runs outside of it."""
    words = 57 if distance == "sorted_l1" else STUDENT_WORDS
    student, teacher = make("llama", STUDENT_WORDS), make("llama", words, 1)
    results = []
    for enabled in (False, True):
        states = states_of(teacher, IDS)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            total, _, found = distill(student, IDS, states, TOKENS, distance)
        assert found.dtype == torch.float32
        gradient = torch.cat([g.flatten() for g in gradients(student, total).values()])
        results.append((found, gradient))
    for exact, rounded in zip(*results, strict=True):
        assert 0 < float((exact - rounded).norm() / exact.norm()) < 0.05


def one_position(logits: Tensor) -> HeadStates:
    head = output_head.Head(logits[:, None], None, 1.0, None, logits.dtype)
    return HeadStates(torch.ones(1, 1, dtype=logits.dtype), head)


def distill_one(logits: Tensor, teacher_logits: Tensor, distance: Any = "sorted_l1") -> Tensor:
    student, one = one_position(logits), torch.ones(1).long()
    pairs = Pairs(one_position(teacher_logits), one, one, one[:0], distance, 1.0)
    target = torch.zeros(1, 1).long()
    return pairs.losses(student.hidden_MD[None], target, student.head)[0]


def weigh_one(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """The loss of one token of weight 1, as the one pass of acceptance computes it."""
    states, head = one_position(logits)
    tokens = OwnWeights(torch.ones(1).long(), lambda loss_K, _: torch.ones_like(loss_K))
    return tokens.losses(states.expand(1, 2, 1), torch.tensor([[0, -100]]), head)[0]


@pytest.mark.parametrize("sum_of_one", [weigh_one, distill_one])
def test_float16_gradients_survive_until_loss_scaling(sum_of_one: Any) -> None:
    """Probabilities of e^-20 are below float16's 6e-8, and loss scaling acts only backward."""
    found = []
    for dtype in (torch.float32, torch.float16):
        logits = torch.tensor([0.0, *[-20.0] * 40], dtype=dtype).requires_grad_()
        (sum_of_one(logits, torch.zeros(41, dtype=dtype)) * 2.0**16).backward()
        assert logits.grad is not None
        found.append(logits.grad[1:].float())
    torch.testing.assert_close(*found, rtol=0.03, atol=0)


def test_losses_are_differentiated_once_and_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, tiles, own = torch.randn(41).requires_grad_(), [], output_head.HeadGradients.add
    monkeypatch.setattr(output_head.HeadGradients, "add", lambda *a: tiles.append(own(*a)))
    for wanted in (False, True):
        with torch.set_grad_enabled(wanted):
            total = distill_one(logits, torch.randn(57))
        assert bool(tiles) == wanted
    tiles.clear()
    (first,) = torch.autograd.grad(total, logits, retain_graph=True)
    (again,) = torch.autograd.grad(3 * total, logits)
    assert not tiles
    assert first.abs().max() > 0
    torch.testing.assert_close(again, 3 * first)


def test_frozen_head_gets_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under adapters: a gradient [V, D] that nothing reads would be as large as the head."""
    student, found, own = make("phi", STUDENT_WORDS), [], output_head.HeadGradients.add

    def add(self: Any, *tile: Any) -> None:
        found.append(self.sums)
        own(self, *tile)

    monkeypatch.setattr(output_head.HeadGradients, "add", add)
    student.lm_head.requires_grad_(False)
    distill(student, IDS, states_of(student, IDS), TOKENS, "forward_kl")
    assert [gradient is None for gradient in found[0]] == [False, True, True]


@pytest.mark.parametrize("distance", DISTANCES)
def test_teacher_may_have_another_dtype(distance: Any) -> None:
    student, teacher, found = make("llama", STUDENT_WORDS).double(), make("llama", 57, 1), []
    for dtype in (torch.float32, torch.float64):
        total, *_ = distill(student, IDS, states_of(teacher.to(dtype), IDS), TOKENS, distance)
        found.append((total, gradients(student, total)))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("words", "device", "rows"),
    [
        # Both heads' words count.
        ([10, 990], "cpu", 2**24 // 1000),
        ([10], "cpu", 10**6),
        # Multiples of what the matrix units of a GPU multiply at once.
        ([152_064], "cuda", 384),
        ([32_000], "cuda", 2048),
        ([2**18], "cuda", 256),
        ([2**19], "cuda", 128),
        ([2**20], "cuda", 64),
    ],
)
def test_tiles_hold_as_many_rows_as_their_heads_allow(
    words: list[int], device: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_head, "TILE_LOGITS", 2**24)
    with FakeTensorMode():
        weights = [torch.empty(size, 4, device=device) for size in words]
    heads = [output_head.Head(weight, None, 1.0, None, torch.float32) for weight in weights]
    assert output_head.rows_per_tile(10**6, *heads) == rows
    assert output_head.rows_per_tile(50, *heads) == 50


@pytest.mark.parametrize(("ours", "theirs"), [(40, 57), (57, 40), (40, 40)])
def test_sorted_distance_does_not_depend_on_rows_ordered_at_a_time(
    ours: int, theirs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_p, log_q = (torch.randn(9, size).log_softmax(-1) for size in (ours, theirs))
    found = []
    for ordered in (1, 100, 10**6):
        monkeypatch.setattr(distillation, "_ORDERED", ordered)
        found.append(distillation._sorted_l1(log_p.clone(), log_p.exp(), log_q.clone()))
    torch.testing.assert_close(found[1:], found[:1] * 2, rtol=0, atol=0)


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("tile_logits", [1, 300, 10**6])
def test_entropies_equal_those_of_full_logits(
    name: str, tile_logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_head, "TILE_LOGITS", tile_logits)
    model, ids = make(name, STUDENT_WORDS), IDS
    ignored = torch.rand(ids.shape, generator=torch.Generator().manual_seed(2)) < 0.4
    labels = ids.masked_fill(ignored, -100)
    has_label = labels[:, 1:] != -100
    given = {"input_ids": ids, "labels": labels, "token_losses": True}
    rows: list[int] = []
    own = output_head.Head.logits
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
        plain = model(**given)
        given["with_entropies"] = True
        count = int(has_label.sum())
        monkeypatch.setattr(
            output_head.Head, "logits", lambda *a: rows.append(len(a[1])) or own(*a)
        )
        (losses, found), (more, _), (fewer, _) = (
            model(**given, label_tokens=told) for told in (count, count + 3, count - 1)
        )
        assert sum(rows) == 3 * count + 3 - 1
        exact = model.double()(**given, label_tokens=count)
    entropy = torch.distributions.Categorical(logits=logits[:, :-1]).entropy()
    torch.testing.assert_close(found, F.pad(entropy * has_label, (1, 0)), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(losses, plain, rtol=1e-5, atol=1e-6)
    # Too high a count of labels does no harm; too low a one is not silently wrong.
    torch.testing.assert_close(more, plain, rtol=1e-5, atol=1e-6)
    assert fewer.isnan().sum() == 1
    assert [values.dtype for values in exact] == [torch.float32] * 2
    torch.testing.assert_close(exact, (losses, found), rtol=1e-4, atol=1e-5)


def extra_bytes(distance: Any) -> int:
    """Return the memory of a distance of 512 pairs, forward and backward, beyond that of two."""
    output_head.TILE_LOGITS = 200_000
    torch.manual_seed(0)
    student, teacher = (torch.randn(513, 16) for _ in range(2))
    ours, theirs = (torch.randn(vocabulary, 16) / 4 for vocabulary in (4000, 19_000))
    if distance != "sorted_l1":
        ours = theirs

    def step(pairs: int) -> None:
        states, weight = (x.clone().requires_grad_() for x in (student, ours))
        places = torch.arange(1, pairs + 1)
        head, their_head = (
            output_head.Head(each, None, 1.0, None, torch.float32) for each in (weight, theirs)
        )
        states_T = HeadStates(teacher, their_head)
        compared = Pairs(states_T, places, places, places[:0], distance, 1.0)
        targets = places.new_zeros(1, len(states))
        compared.losses(states[None], targets, head)[0].sum().backward()

    step(2)
    before = resident_bytes("VmRSS")
    step(512)
    return resident_bytes("VmHWM") - before


@pytest.mark.slow
@pytest.mark.parametrize("distance", ["reverse_kl", "sorted_l1"])
def test_distances_need_less_memory_than_the_distributions(distance: str) -> None:
    assert alone(extra_bytes, distance) < 512 * 19_000 * 4
