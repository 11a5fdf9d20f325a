"""Token losses against full logits, on tiny models of the real architectures."""

import copy
import inspect
import sys
from pathlib import Path

import pytest
import torch
from architectures import (
    ARCHITECTURES,
    SEGMENTS,
    VOCABULARY,
    assert_same_gradients,
    build,
    gradients,
    labelled_rows,
    reference_losses,
    rows,
    with_attention,
)
from fork_server import serve
from launch import launch
from torch import distributed
from torch.nn import functional as F

from benchmarks.claims import token_losses
from benchmarks.harness import alone
from vocagnolm import output_head, token_loss
from vocagnolm.attention import segments_of
from vocagnolm.conventions import NonFiniteLoss
from vocagnolm.models.probes import check_packing
from vocagnolm.token_loss import add_token_losses, first_tokens, require_finite

LENGTH = 13
pytestmark = pytest.mark.usefixtures("small_tiles")


def test_first_tokens_equal_nonzero_when_count_is_known():
    chosen = torch.rand(5, 31, generator=torch.Generator().manual_seed(0)) < 0.3
    expected = chosen.flatten().nonzero()[:, 0]
    assert torch.equal(first_tokens(chosen, len(expected)), expected)
    assert first_tokens(chosen, 0).shape == (0,)


def batch(rows=2, ignored=0.2):
    ids, labels = labelled_rows(rows, LENGTH, ignored)
    # A user's own method may give a token a negative weight.
    generator = torch.Generator().manual_seed(1)
    weights = torch.rand(ids.shape, generator=generator) - 0.3
    weights = weights.masked_fill(torch.rand(ids.shape, generator=generator) < 0.6, 0.0)
    return ids, labels, weights * (labels != -100)


def test_losses_of_logits_far_apart_are_finite():
    model = build()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(10_000)
    ids, labels, _ = batch()
    expected = reference_losses(model, ids, labels)
    assert expected.max() > 100  # exp(100) is more than float32 has
    losses = add_token_losses(model)(input_ids=ids, labels=labels, token_losses=True)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_losses_and_gradients_equal_full_logits(name):
    model = build(name)
    ids, labels, weights = batch()
    expected = reference_losses(model, ids, labels)
    expected_gradients = gradients(model, (expected * weights).sum())
    add_token_losses(model)
    used = int((weights[:, 1:] != 0).sum())
    assert 0 < used < 13
    count = int((labels[:, 1:] != -100).sum())
    # Counts that are too high do no harm.
    for bound, told in ((None, None), (used, None), (used + 1, count), (None, count), (99, 99)):
        options = {"weighted_tokens": bound, "label_tokens": told}
        losses = model(input_ids=ids, labels=labels, token_losses=True, **options)
        assert losses.dtype == torch.float32
        torch.testing.assert_close(losses, expected, rtol=0, atol=1e-5)
        assert_same_gradients(gradients(model, (losses * weights).sum()), expected_gradients)


@pytest.mark.parametrize("name", ["gemma2", "granite", "cohere"])
def test_attaching_rejects_a_head_it_does_not_reproduce(name, monkeypatch):
    monkeypatch.setattr(output_head, "scale_and_cap", lambda config: (1.0, None))
    # The small logits of an untrained model must not hide the difference.
    for spread, dtype in ((0.3, "float32"), (0.001, "float32"), (0.001, "bfloat16")):
        model = build(name, spread).to(getattr(torch, dtype))
        model.config.final_logit_softcapping = spread  # as far below the logits in every case
        forward = model.forward
        with pytest.raises(ValueError, match=rf"{type(model).__name__} differ .* does something"):
            add_token_losses(model)
        assert model.forward == forward


def test_attaching_rejects_a_head_that_is_off_by_a_thousandth(monkeypatch):
    monkeypatch.setattr(output_head, "scale_and_cap", lambda config: (1.001, None))
    with pytest.raises(ValueError, match="differ"):
        add_token_losses(build("phi"))


@pytest.mark.parametrize("bound_below", [0, 1])
def test_gradients_are_nan_beyond_the_announced_tokens(bound_below):
    model = add_token_losses(build("phi"))
    ids, labels, weights = batch()
    bound = (int((weights[:, 1:] != 0).sum()) - 1) * bound_below
    losses = model(input_ids=ids, labels=labels, token_losses=True, weighted_tokens=bound)
    found = gradients(model, (losses * weights).sum())
    assert found["lm_head.weight"].isnan().all()
    assert found["lm_head.bias"].isnan().all()
    assert all(gradient.isnan().any() for gradient in found.values())


@pytest.mark.parametrize("bound", [None, 0, 5])
def test_gradients_are_zero_when_no_token_is_weighted(bound):
    model = add_token_losses(build())
    ids, labels, _ = batch()
    losses = model(input_ids=ids, labels=labels, token_losses=True, weighted_tokens=bound)
    assert all((g == 0).all() for g in gradients(model, (losses * 0.0).sum()).values())


def test_ignored_token_with_a_nan_state_harms_nothing():
    model = add_token_losses(build())
    ids, labels, _ = batch(rows=1, ignored=0)
    labels[:, -1] = -100
    broken = torch.zeros(ids.shape[1], 1, dtype=torch.bool)
    broken[-2:] = True  # these predict the ignored last token, and nothing
    model.model.norm.register_forward_hook(lambda _, __, out: out.masked_fill(broken, torch.nan))
    for bound in (None, LENGTH - 2):
        losses = model(input_ids=ids, labels=labels, token_losses=True, weighted_tokens=bound)
        assert losses.isfinite().all()
        assert (losses[:, 1:-1] > 0).all()
        found = gradients(model, losses.sum())
        assert all(gradient.isfinite().all() for gradient in found.values())


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "gpt2"])
def test_packed_documents_have_the_losses_of_separate_ones(name):
    model = add_token_losses(build(name))
    ids, _, _ = batch(ignored=0)
    lengths = [(4, 9), (7, 6)]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    labels = ids.masked_fill(positions == 0, -100)
    packed = model(input_ids=ids, position_ids=positions, labels=labels, token_losses=True)
    for row, (first, second) in enumerate(lengths):
        for part in (slice(0, first), slice(first, first + second)):
            one = ids[row : row + 1, part]
            alone = model(input_ids=one, labels=one, token_losses=True)
            torch.testing.assert_close(packed[row : row + 1, part], alone, rtol=0, atol=1e-5)


def test_losses_under_autocast_are_float32_and_close():
    model = add_token_losses(build())
    ids, labels, weights = batch()
    exact = model(input_ids=ids, labels=labels, token_losses=True)
    exact_gradients = gradients(model, (exact * weights).sum())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = model(input_ids=ids, labels=labels, token_losses=True)
        logits = model(input_ids=ids, use_cache=False).logits
    assert logits.dtype == torch.bfloat16
    expected = F.cross_entropy(logits[:, :-1].float().mT, labels[:, 1:], reduction="none")
    torch.testing.assert_close(losses[:, 1:], expected, rtol=0, atol=1e-5)
    assert losses.dtype == torch.float32
    assert not torch.equal(losses, losses.bfloat16().float())
    for name, gradient in gradients(model, (losses * weights).sum()).items():
        assert gradient.dtype == torch.float32
        cosine = F.cosine_similarity(gradient.flatten(), exact_gradients[name].flatten(), dim=0)
        assert cosine > 0.98, name


def test_losses_of_a_bfloat16_model_are_accurate_float32():
    model = build()
    ids, labels, _ = batch()
    expected = reference_losses(model.bfloat16().float(), ids, labels)
    losses = add_token_losses(model.bfloat16())(input_ids=ids, labels=labels, token_losses=True)
    assert losses.dtype == torch.float32
    assert (losses - expected).abs().max() < 0.3
    losses.sum().backward()
    assert model.lm_head.weight.grad.dtype == torch.bfloat16


def test_gradients_of_a_bfloat16_head_sum_in_float32():
    hidden, targets = torch.ones(4000, 8), torch.zeros(4000, dtype=torch.int64)  # 1,000 tiles
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.zeros(VOCABULARY, 8, dtype=dtype, requires_grad=True)
        head = output_head.Head(weight, None, 1.0, None, dtype)
        given = (hidden, weight, None, head, targets, torch.arange(len(targets)), None, False)
        token_loss._TokenLoss.apply(*given)[0].sum().backward()
        found[dtype] = weight.grad.float()
    torch.testing.assert_close(found[torch.bfloat16], found[torch.float32], rtol=1e-2, atol=0)


@pytest.mark.parametrize("cached", [1, 8 * 7, 8 * VOCABULARY])
def test_gradients_of_a_bfloat16_head_do_not_depend_on_the_words_at_once(cached, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    hidden_KD = torch.randn(40, 8, generator=generator).bfloat16()
    gradient_KV = torch.randn(40, VOCABULARY, generator=generator)
    head = output_head.Head(torch.zeros(VOCABULARY, 8).bfloat16(), None, 1.0, None, torch.bfloat16)
    monkeypatch.setattr(output_head, "CACHED", cached)
    gradients = output_head.HeadGradients((False, True, False), hidden_KD, head)
    gradients.add(torch.arange(40), gradient_KV, hidden_KD)
    expected_VD = gradient_KV.bfloat16().double().T @ hidden_KD.double()
    torch.testing.assert_close(gradients.sums[1].double(), expected_VD, rtol=2**-8, atol=1e-6)


def test_a_float64_model_is_differentiated_in_float64():
    model = build("gemma2").double()
    ids, labels, weights = batch()
    weights = weights.bfloat16().float()  # survives the float32 gradient of a float32 loss
    expected = gradients(model, (reference_losses(model, ids, labels) * weights).sum())
    add_token_losses(model)
    losses = model(input_ids=ids, labels=labels, token_losses=True)
    assert losses.dtype == torch.float32
    assert_same_gradients(gradients(model, (losses * weights).sum()), expected, relative=1e-12)


@pytest.mark.parametrize("frozen", ["lm_head", "model"])
def test_frozen_parts_get_and_change_no_gradient(frozen):
    model = build("phi")
    ids, labels, weights = batch()
    getattr(model, frozen).requires_grad_(False)
    expected = gradients(model, (reference_losses(model, ids, labels) * weights).sum())
    add_token_losses(model)
    losses = model(input_ids=ids, labels=labels, token_losses=True)
    found = gradients(model, (losses * weights).sum())
    assert not any(name.startswith(frozen) for name in found)
    assert_same_gradients(found, expected)


def test_every_other_call_is_what_it_was():
    model = build()
    ids, labels, _ = batch(ignored=0.2)
    signature, state = inspect.signature(model.forward), set(model.state_dict())
    expected = model(ids, None, labels=labels)
    written = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert add_token_losses(model) is model
    assert inspect.signature(model.forward) == signature
    found = model(ids, None, labels=labels)
    assert torch.equal(found.loss, expected.loss)
    assert torch.equal(found.logits, expected.logits)
    again = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(again, written)
    assert set(model.state_dict()) == state


def test_attaching_is_idempotent_and_copies_run_their_layers():
    model = add_token_losses(build())
    forward = model.forward
    assert add_token_losses(model).forward == forward
    ids, _, _ = batch()
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.zero_()
    uniform = torch.log(torch.tensor(float(VOCABULARY)))
    losses = other(input_ids=ids, labels=ids, token_losses=True)
    torch.testing.assert_close(losses[:, 1:], uniform.expand(2, LENGTH - 1))
    assert (other(input_ids=ids).logits == 0).all()
    assert (model(input_ids=ids).logits != 0).any()


def test_token_losses_survive_wrapping_and_unwrapping_by_accelerate():
    from types import MethodType

    from accelerate.utils import convert_outputs_to_fp32, extract_model_from_parallel

    model = add_token_losses(build())
    ids, labels, _ = batch()
    expected = model(input_ids=ids, labels=labels, token_losses=True)
    model._original_forward = model.forward  # as Accelerator.prepare_model does under bf16
    autocast = torch.autocast("cpu", dtype=torch.bfloat16)
    model.forward = MethodType(convert_outputs_to_fp32(autocast(model.forward.__func__)), model)
    wrapped = model.forward
    assert add_token_losses(model).forward == wrapped
    assert model(input_ids=ids, labels=labels, token_losses=True).dtype == torch.float32
    model = extract_model_from_parallel(model, keep_fp32_wrapper=False)
    found = model(input_ids=ids, labels=labels, token_losses=True)
    assert torch.equal(found, expected)


def test_attaching_restores_modes_and_random_state():
    model = build("llama", attention_dropout=0.5).train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    check_packing(model)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)


def test_a_vocabulary_of_three_words_can_be_probed():
    model = add_token_losses(build(vocab_size=3))
    check_packing(model)
    ids = torch.tensor([[0, 1, 2, 1]])
    found = model(input_ids=ids, labels=ids, token_losses=True)
    torch.testing.assert_close(found, reference_losses(model, ids, ids))


@pytest.mark.parametrize("where", ["embed_tokens", "lm_head"])
def test_probe_reads_words_that_both_ends_have(where):
    model = build("llama")
    shorter = torch.nn.Parameter(torch.zeros(5, model.config.hidden_size))
    {"embed_tokens": model.model.embed_tokens, "lm_head": model.lm_head}[where].weight = shorter
    assert token_loss.probe_ids(model, (4, 32)).unique().tolist() == list(range(5))


@pytest.mark.parametrize("where", ["model.layers.0.mlp.down_proj", "lm_head"])
def test_model_with_nan_weights_is_rejected_by_name(where):
    model = build()
    model.name_or_path = "some/teacher"
    model.get_submodule(where).weight.data[0, 0] = torch.nan
    forward = model.forward
    with pytest.raises(NonFiniteLoss, match=r"LlamaForCausalLM \(some/teacher\).*NaN.*float32"):
        add_token_losses(model)
    assert model.forward == forward


@pytest.mark.parametrize("broken", [0, 1])
def test_one_broken_tensor_is_enough(broken):
    tensors = [torch.ones(3), torch.ones(3)]
    require_finite(build(), *tensors)
    tensors[broken][2] = torch.inf
    with pytest.raises(NonFiniteLoss, match="NaN or infinite"):
        require_finite(build(), *tensors)


def test_models_of_another_kind_are_rejected_with_advice():
    wrapped, stateless = build(), build()
    wrapped.lm_head = torch.nn.Sequential(wrapped.lm_head)  # as an adapter would be
    for model, reason in (
        (torch.nn.Linear(2, 2), "for Linear: .*causal language model"),
        (wrapped.model, "for LlamaModel: .*causal language model"),
        (wrapped, "of type Sequential"),
    ):
        with pytest.raises(ValueError, match=reason):
            add_token_losses(model)
    stateless.model.forward = lambda **kwargs: {"logits": None}
    ids = torch.zeros(1, 2).long()
    with pytest.raises(ValueError, match="no last_hidden_state"):
        token_loss._token_losses(stateless, ids, labels=ids)


def test_packed_rows_without_segments_are_rejected():
    batch = rows()
    model = with_attention("llama", "torch_varlen")
    for attention in ("flash_attention_2", "torch_varlen"):
        model.config._attn_implementation = attention
        with pytest.raises(ValueError, match=rf"{attention} does not separate .* pass segments="):
            model(**batch)


def test_configuration_that_tells_enough_is_rejected_at_once():
    dropping = with_attention("llama", "torch_varlen", attention_dropout=0.1)
    with pytest.raises(ValueError, match="dropout"):
        dropping.train()(**rows(), segments=SEGMENTS)
    with pytest.raises(ValueError, match="needs chunked attention"):
        with_attention("llama", "torch_varlen", attention_chunk_size=8)


def test_segments_are_cumulative_lengths_when_some_are_empty():
    assert segments_of([3, 0, 4]).edges.tolist() == [0, 3, 7]
    assert segments_of([3, 0, 4]).longest == 4
    assert (segments_of([]).edges.tolist(), segments_of([]).longest) == ([0], 0)


@pytest.mark.slow  # test_export.py has sharded runs
@pytest.mark.processes
def test_gradients_of_a_wrapped_model_equal_the_bare(tmp_path):
    launch(Path(__file__), tmp_path, 1)


def compare_wrapped(wrapper):
    """Compare a model in a process group of one with the bare model."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    model = add_token_losses(build("llama_tied" if wrapper == "ddp" else "llama"))
    ids, labels, weights = batch()
    bare = model(input_ids=ids, labels=labels, token_losses=True)
    expected = gradients(model, (bare * weights).sum())
    if wrapper == "ddp":
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
    else:
        mesh = distributed.init_device_mesh("cpu", (1,))
        # The head is apart from the norm before it, as with adapters: nothing else gathers it.
        for unit in (*model.model.layers, model.lm_head):
            fully_shard(unit, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
    losses = wrapped(input_ids=ids, labels=labels, token_losses=True, weighted_tokens=26)
    assert torch.equal(losses, bare)
    found = gradients(model, (losses * weights).sum())
    found = {k: g.full_tensor() if isinstance(g, DTensor) else g for k, g in found.items()}
    assert_same_gradients(found, expected)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_peak_memory_stays_below_a_tenth_of_logits():
    extra_bytes, _ = alone(token_losses.score, token_losses.OURS, token_losses.FULL)
    assert extra_bytes < 0.1 * 4096 * 152_064 * 4


def run(request):
    """Compare in a process of `launch`, which ends at once: gloo may hang the end of a group."""
    distributed.init_process_group("gloo")
    for name in ("ddp", "fsdp2"):
        compare_wrapped(name)
    return 0


if __name__ == "__main__":
    serve(run)
