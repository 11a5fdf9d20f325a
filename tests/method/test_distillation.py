"""Distances of distributions and their gradients against full logits, on tiny models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from references import slow_distance
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.harness import alone, resident_bytes
from vocagnolm import distillation, output_head
from vocagnolm.distillation import HeadStates, Pairs
from vocagnolm.output_head import last_hidden_state, read_head
from vocagnolm.token_loss import add_token_losses

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "soft_cap": ("Gemma2", {"final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8}),
    "scale": ("Granite", {"logits_scaling": 4.0}),
    "bias": ("Phi", {}),
}
STUDENT_WORDS = 41
DISTANCES = ("reverse_kl", "forward_kl", "sorted_l1")


def build(name: str, words: int, seed: int, dtype: torch.dtype = torch.float32) -> Any:
    family, options = ARCHITECTURES[name]
    config = getattr(transformers, family + "Config")(vocab_size=words, **SIZES | options)
    model = transformers.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    return add_token_losses(model.to(dtype).eval())


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


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use several tiles, the last one ragged, in every test."""
    monkeypatch.setattr(output_head, "TILE_LOGITS", 5 * (STUDENT_WORDS + 50) + 1)


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("teacher_words", [STUDENT_WORDS, 57, 30])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_distances_and_gradients_equal_those_of_full_logits(
    name: str, teacher_words: int, distance: Any
) -> None:
    student, teacher = build(name, STUDENT_WORDS, 0), build("soft_cap", teacher_words, 1)
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(1, 30, (2, 9), generator=generator)
    other_ids = torch.randint(1, 30, (2, 11), generator=generator)
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
    model = build(name, STUDENT_WORDS, 0)
    ids = torch.randint(1, 30, (2, 9), generator=torch.Generator().manual_seed(2))
    tokens = torch.arange(1, 9)
    found = []
    for factor in (0.0, 1.0):
        total, _, distances = distill(model, ids, states_of(model, ids), tokens, distance, factor)
        assert (distances == 0).all()
        found.append(gradients(model, total))
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_distances_are_summed_in_the_widest_dtype(dtype: torch.dtype) -> None:
    student, teacher = (build("llama", words, seed) for words, seed in ((41, 0), (57, 1)))
    ids = torch.randint(1, 30, (2, 9), generator=torch.Generator().manual_seed(2))
    tokens = torch.arange(1, 9)
    results = {}
    for kind in (torch.float32, dtype):
        states = states_of(teacher.to(kind), ids)
        total, _, found = distill(student.to(kind), ids, states, tokens, "sorted_l1")
        results[kind] = found, gradients(student, total)["lm_head.weight"].float()
    tolerance = 1e-5 if dtype == torch.float64 else 0.1
    for a, b in zip(*results.values(), strict=True):
        assert float((a - b).norm() / a.norm()) < tolerance


@pytest.mark.parametrize("distance", DISTANCES)
def test_bfloat16_distances_are_near_those_of_float32(distance: Any) -> None:
    """Under autocast, as on a GPU; the backward pass runs outside of it."""
    words = 57 if distance == "sorted_l1" else STUDENT_WORDS
    student, teacher = build("llama", STUDENT_WORDS, 0), build("llama", words, 1)
    ids = torch.randint(1, 30, (2, 9), generator=torch.Generator().manual_seed(2))
    tokens = torch.arange(1, 9)
    results = []
    for enabled in (False, True):
        states = states_of(teacher, ids)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            total, _, found = distill(student, ids, states, tokens, distance)
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


def test_float16_gradients_survive_until_loss_scaling() -> None:
    """Probabilities of e^-20 are below float16's 6e-8, and loss scaling acts only backward."""
    found = []
    for dtype in (torch.float32, torch.float16):
        logits = torch.tensor([0.0, *[-20.0] * 40], dtype=dtype).requires_grad_()
        (distill_one(logits, torch.zeros(41, dtype=dtype)) * 2.0**16).backward()
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
    student, found, own = build("bias", STUDENT_WORDS, 0), [], output_head.HeadGradients.add

    def add(self: Any, *tile: Any) -> None:
        found.append(self.sums)
        own(self, *tile)

    monkeypatch.setattr(output_head.HeadGradients, "add", add)
    student.lm_head.requires_grad_(False)
    ids, tokens = torch.ones(1, 9).long(), torch.arange(1, 9)
    distill(student, ids, states_of(student, ids), tokens, "forward_kl")
    assert [gradient is None for gradient in found[0]] == [False, True, True]


@pytest.mark.parametrize("distance", DISTANCES)
def test_teacher_may_have_another_dtype(distance: Any) -> None:
    ids, tokens, found = torch.arange(18).view(2, 9), torch.arange(1, 9), []
    student, teacher = build("llama", STUDENT_WORDS, 0).double(), build("llama", 57, 1)
    for dtype in (torch.float32, torch.float64):
        total, *_ = distill(student, ids, states_of(teacher.to(dtype), ids), tokens, distance)
        found.append((total, gradients(student, total)))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


def test_tile_holds_the_larger_teacher_vocabulary() -> None:
    student, teacher = (
        output_head.Head(torch.empty(words, 4), None, 1.0, None, torch.float32)
        for words in (10, 990)
    )
    rows = output_head.TILE_LOGITS // 1000
    assert output_head.rows_per_tile(10**6, student, teacher) == max(rows, 1)
    assert output_head.rows_per_tile(10**6, student) == output_head.TILE_LOGITS // 10


@pytest.mark.parametrize(
    ("words", "rows"), [(152_064, 384), (32_000, 2048), (2**18, 256), (2**19, 128), (2**20, 64)]
)
def test_tiles_fill_the_matrix_units_of_a_gpu(words: int, rows: int) -> None:
    with FakeTensorMode():
        head = output_head.Head(
            torch.empty(words, 4, device="cuda"), None, 1.0, None, torch.float32
        )
    assert output_head.rows_per_tile(10**6, head) == rows
    assert output_head.rows_per_tile(50, head) == 50


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


def test_sorted_distance_orders_many_rows_at_a_time_on_a_gpu() -> None:
    sorts: list[torch.Size] = []

    class Sorts(TorchDispatchMode):
        def __torch_dispatch__(
            self, op: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if "sort" in op.name():
                sorts.append(args[0].shape)
            return op(*args, **kwargs or {})

    with torch.device("meta"), Sorts():
        log_p, log_q = torch.empty(1024, 32_000), torch.empty(1024, 32_768)
        distillation._sorted_l1(log_p, torch.empty_like(log_p), log_q)
    # Each sorts at most 2**24 probabilities.
    assert sorts == [(512, 32_768), (512, 32_768), (524, 32_000), (500, 32_000)]


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("tile_logits", [1, 300, 10**6])
def test_entropies_equal_those_of_full_logits(
    name: str, tile_logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_head, "TILE_LOGITS", tile_logits)
    model = build(name, STUDENT_WORDS, 0)
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(1, 30, (2, 9), generator=generator)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.4, -100)
    has_label = labels[:, 1:] != -100
    rows: list[int] = []
    own = output_head.Head.logits
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
        plain = model(input_ids=ids, labels=labels, token_losses=True)
        monkeypatch.setattr(
            output_head.Head, "logits", lambda *a: rows.append(len(a[1])) or own(*a)
        )
        (losses, found), (more, _), (fewer, _) = (
            model(
                input_ids=ids,
                labels=labels,
                token_losses=True,
                with_entropies=True,
                label_tokens=int(has_label.sum()) + beyond,
            )
            for beyond in (0, 3, -1)
        )
    entropy = torch.distributions.Categorical(logits=logits[:, :-1]).entropy()
    torch.testing.assert_close(found, F.pad(entropy * has_label, (1, 0)), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(losses, plain, rtol=1e-5, atol=1e-6)
    assert sum(rows) == 3 * has_label.sum() + 3 - 1
    # Too high a count of labels does no harm; too low a one is not silently wrong.
    torch.testing.assert_close(more, plain, rtol=1e-5, atol=1e-6)
    assert fewer.isnan().sum() == 1
    with torch.no_grad():
        exact = model.double()(
            input_ids=ids,
            labels=labels,
            token_losses=True,
            with_entropies=True,
            label_tokens=int(has_label.sum()),
        )
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
