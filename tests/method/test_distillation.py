"""Distances of distributions and their gradients against full logits, on tiny models."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import transformers
from references import slow_distance
from torch import Tensor
from torch.nn import functional as F

from benchmarks.claims import distillation_memory
from vocagnolm import output_head
from vocagnolm.distillation import HeadStates, Pairs, entropies, first_tokens
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
        return HeadStates(hidden.flatten(0, 1), *read_head(model, hidden))


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles, the last of them ragged, in every test."""
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

    pairs = Pairs(states_of(teacher, other_ids), tokens, theirs)
    losses, (total, found) = student(
        input_ids=ids, labels=ids, token_losses=True, also=partial(pairs.distances, distance)
    )
    assert found.dtype == torch.float32
    assert not found.requires_grad
    torch.testing.assert_close(total, found.sum())
    own = gradients(student, losses.sum() - 0.7 * total)

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
    for key, gradient in gradients(student, plain - 0.7 * expected.sum()).items():
        error = float((own[key] - gradient).norm() / gradient.norm().clamp(min=1e-6))
        assert error < 1e-5, (key, error)


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_distance_from_the_student_itself_is_exactly_zero(name: str, distance: Any) -> None:
    model = build(name, STUDENT_WORDS, 0)
    ids = torch.randint(1, 30, (2, 9), generator=torch.Generator().manual_seed(2))
    tokens = torch.arange(1, 9)
    pairs = Pairs(states_of(model, ids), tokens, tokens)
    _, (total, found) = model(
        input_ids=ids, labels=ids, token_losses=True, also=partial(pairs.distances, distance)
    )
    assert (found == 0).all()
    assert all((gradient == 0).all() for gradient in gradients(model, total).values())


def test_sorted_distance_ignores_the_order_of_teacher_words() -> None:
    student, teacher = build("llama", STUDENT_WORDS, 0), build("llama", 57, 1)
    ids = torch.randint(1, 30, (2, 9), generator=torch.Generator().manual_seed(2))
    tokens = torch.tensor([1, 4, 5, 7, 10])
    states = states_of(teacher, ids)
    permuted = states._replace(weight_VD=states.weight_VD[torch.randperm(57)])
    found = []
    for teacher_states in (states, permuted):
        pairs = Pairs(teacher_states, tokens, tokens)
        _, (total, value) = student(
            input_ids=ids, labels=ids, token_losses=True, also=partial(pairs.distances, "sorted_l1")
        )
        found.append((value, gradients(student, total)))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-7)
    pairs = Pairs(permuted, tokens, tokens)
    kl = student(
        input_ids=ids, labels=ids, token_losses=True, also=partial(pairs.distances, "reverse_kl")
    )[1][1]
    assert not torch.allclose(kl, found[0][0])  # which does look at the words


def test_kl_ignores_noise_words_of_the_teacher() -> None:
    """Llemma has 16 words more than its student; they are dropped and the rest renormalised."""
    student, teacher = build("llama", STUDENT_WORDS, 0), build("llama", STUDENT_WORDS + 16, 1)
    ids = torch.randint(1, 30, (1, 9), generator=torch.Generator().manual_seed(2))
    tokens = torch.arange(1, 9)
    states = states_of(teacher, ids)
    values = []
    for words in (STUDENT_WORDS + 16, STUDENT_WORDS):
        pairs = Pairs(states._replace(weight_VD=states.weight_VD[:words]), tokens, tokens)
        also = partial(pairs.distances, "reverse_kl")
        values.append(student(input_ids=ids, labels=ids, token_losses=True, also=also)[1][1])
    torch.testing.assert_close(*values, rtol=1e-5, atol=1e-6)  # products of other shapes


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_distances_are_summed_in_the_widest_dtype(
    dtype: torch.dtype,
) -> None:
    student, teacher = (build("llama", words, seed) for words, seed in ((41, 0), (57, 1)))
    ids = torch.randint(1, 30, (2, 9), generator=torch.Generator().manual_seed(2))
    tokens = torch.arange(1, 9)
    results = {}
    for kind in (torch.float32, dtype):
        states = states_of(teacher.to(kind), ids)
        pairs = Pairs(states, tokens, tokens)
        _, (total, found) = student.to(kind)(
            input_ids=ids, labels=ids, token_losses=True, also=partial(pairs.distances, "sorted_l1")
        )
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
        pairs = Pairs(states_of(teacher, ids), tokens, tokens)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            _, (total, found) = student(
                input_ids=ids,
                labels=ids,
                token_losses=True,
                also=partial(pairs.distances, distance),
            )
        assert found.dtype == torch.float32
        gradient = torch.cat([g.flatten() for g in gradients(student, total).values()])
        results.append((found, gradient))
    for exact, rounded in zip(*results, strict=True):
        assert 0 < float((exact - rounded).norm() / exact.norm()) < 0.05


def one_position(logits: Tensor) -> HeadStates:
    head = output_head.Head(1.0, None, logits.dtype)
    return HeadStates(torch.ones(1, 1, dtype=logits.dtype), logits[:, None], None, head)


def test_float16_gradients_survive_until_loss_scaling() -> None:
    """Probabilities of e^-20, where float16 ends at 6e-8; its loss scaling comes backward only."""
    found = []
    for dtype in (torch.float32, torch.float16):
        logits = torch.tensor([0.0, *[-20.0] * 40], dtype=dtype).requires_grad_()
        student, pairs = (
            one_position(logits),
            Pairs(one_position(0 * logits.detach()), *[torch.ones(1).long()] * 2),
        )
        total, _ = pairs.distances("sorted_l1", student.hidden_MD[None], *student[1:])
        (total * 2.0**16).backward()
        assert logits.grad is not None
        found.append(logits.grad[1:].float())
    torch.testing.assert_close(*found, rtol=0.03, atol=0)


def test_distances_are_differentiated_once_and_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, tokens = torch.randn(41).requires_grad_(), torch.ones(1).long()
    student, pairs = one_position(logits), Pairs(one_position(torch.randn(57)), tokens, tokens)
    tiles: list[object] = []
    own = output_head.HeadGradients.add
    monkeypatch.setattr(output_head.HeadGradients, "add", lambda *a: tiles.append(own(*a)))
    for expected in (0, 1):
        with torch.set_grad_enabled(bool(expected)):
            total, _ = pairs.distances("sorted_l1", student.hidden_MD[None], *student[1:])
        assert len(tiles) == expected
    (first,) = torch.autograd.grad(total, logits, retain_graph=True)
    (again,) = torch.autograd.grad(3 * total, logits)
    assert len(tiles) == 1
    assert first.abs().max() > 0
    torch.testing.assert_close(again, 3 * first)


def test_distances_make_tiles_of_both_vocabularies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_head, "TILE_LOGITS", 3 * (STUDENT_WORDS + 570))
    student, teacher = build("llama", STUDENT_WORDS, 0), build("llama", 570, 1)
    ids = torch.randint(1, 30, (2, 9), generator=torch.Generator().manual_seed(2))
    tokens, rows = torch.arange(1, 9), []
    own = output_head.Head.logits

    def logits(self: Any, hidden: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        rows.append(len(hidden))
        return own(self, hidden, weight, *rest)

    states = states_of(teacher, ids)
    pairs = Pairs(states, tokens, tokens)
    head = read_head(student, states.hidden_MD)
    monkeypatch.setattr(output_head.Head, "logits", logits)
    pairs.distances("sorted_l1", states_of(student, ids).hidden_MD[None], *head)
    assert rows == [3, 3, 3, 3, 2, 2]


def test_tile_holds_the_larger_teacher_vocabulary() -> None:
    student, teacher = torch.empty(10, 4), torch.empty(990, 4)
    rows = output_head.TILE_LOGITS // 1000
    assert output_head.rows_per_tile(10**6, student, teacher) == max(rows, 1)
    assert output_head.rows_per_tile(10**6, student) == output_head.TILE_LOGITS // 10


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_entropies_equal_those_of_full_logits(name: str) -> None:
    model = build(name, STUDENT_WORDS, 0)
    ids = torch.randint(1, 30, (2, 9), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    expected = torch.distributions.Categorical(logits=logits).entropy().flatten()
    torch.testing.assert_close(entropies(states_of(model, ids)), expected, rtol=1e-5, atol=1e-6)


def test_first_tokens_equal_nonzero_when_count_is_known() -> None:
    chosen = torch.rand(5, 31, generator=torch.Generator().manual_seed(0)) < 0.3
    expected = chosen.flatten().nonzero()[:, 0]
    assert torch.equal(first_tokens(chosen, len(expected)), expected)
    assert first_tokens(chosen, 0).shape == (0,)


@pytest.mark.slow
def test_distances_need_little_memory_when_measured() -> None:
    """A small copy of the benchmark, whose sizes the issue is about: under a quarter of naive."""
    size = distillation_memory.Size(512, 4000, 19_000, hidden=16, tile_logits=200_000)
    assert distillation_memory.measure(size).value < 0.25
