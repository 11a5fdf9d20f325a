"""Attention that takes segments, against that of `sdpa` and its mask."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from architectures import (
    SEGMENTS,
    assert_same_gradients,
    build,
    gradients,
    rows,
    with_attention,
)
from torch.nn.attention import varlen
from transformers import AttentionInterface, masking_utils
from transformers.modeling_flash_attention_utils import FlashAttentionKwargs

from vocagnolm import attention as packed_attention
from vocagnolm import token_loss
from vocagnolm.attention import RowSegments, why_not_varlen
from vocagnolm.models.probes import check_packing

MODELS = ("llama", "llama_tied", "qwen2", "qwen3", "mistral", "gpt_neox", "granite", "cohere")


@contextmanager
def masks_forbidden(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def reject(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a mask was made")

    with monkeypatch.context() as context:
        for name in ("sdpa_mask", "eager_mask"):
            context.setattr(masking_utils, name, reject)
        for name in ("sdpa", "torch_varlen"):
            context.setitem(masking_utils.AttentionMaskInterface._global_mapping, name, reject)
        yield


@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_equal_those_of_sdpa(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, weights = rows(), torch.rand(3, 16, generator=torch.Generator().manual_seed(1))
    found = []
    for attention in ("sdpa", "torch_varlen"):
        model = with_attention(name, attention).double()  # only mistakes are larger than rounding
        losses = model(**batch, segments=SEGMENTS)
        shape = model(**batch, segments=SEGMENTS, instead=lambda hidden, *_: hidden.shape)
        assert shape == (3, 16, 32)
        found.append((losses, gradients(model, (losses * weights).sum())))
        if attention == "torch_varlen":
            with masks_forbidden(monkeypatch):
                model(**batch, segments=SEGMENTS)
    torch.testing.assert_close(found[1][0], found[0][0], rtol=0, atol=1e-6)
    assert_same_gradients(found[1][1], found[0][1], relative=1e-6)


def test_mask_of_sdpa_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_attention("llama", "sdpa")
    with masks_forbidden(monkeypatch), pytest.raises(AssertionError, match="a mask was made"):
        model(**rows())


def test_attention_equals_that_of_sdpa() -> None:
    batch, mask = rows(), torch.ones(3, 16, dtype=torch.long)
    mask[0, :4] = 0
    model, reference = (build() for _ in range(2))
    model.set_attn_implementation("torch_varlen")
    ids = batch["input_ids"]
    for kwargs in (
        {"attention_mask": mask},
        {"position_ids": batch["position_ids"], "use_cache": False},
        {},
    ):
        found, expected = (m(input_ids=ids, **kwargs).logits for m in (model, reference))
        torch.testing.assert_close(found[:, 4:], expected[:, 4:])
    texts = [m.generate(ids, max_new_tokens=5, do_sample=False) for m in (model, reference)]
    assert torch.equal(*texts)


def test_model_with_its_own_flash_attention_gets_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = with_attention("llama", "sdpa"), rows()
    # transformers would look for the package.
    model.config._attn_implementation = "flash_attention_2"
    packed_attention.check_attention(model)
    arguments = {name: batch[name] for name in ("input_ids", "position_ids")}
    assert packed_attention.segment_call(model, SEGMENTS, arguments)["attention_mask"].numel() == 0
    monkeypatch.setattr(model, "_supports_attention_backend", False)
    assert "attention_mask" not in packed_attention.segment_call(model, SEGMENTS, arguments)


def test_flash_attention_gets_its_own_arguments() -> None:
    seen: list[dict[str, Any]] = []

    def flash(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        seen.append({"rows": len(query), "mask": mask, **kwargs})
        return packed_attention._attend(module, query, key, value, None, **kwargs)

    AttentionInterface.register("my_flash", flash)
    model, batch = with_attention("llama", "sdpa"), rows()
    model.config._attn_implementation = "my_flash"  # transformers would look for the package
    losses = model(**batch, segments=SEGMENTS)
    expected = with_attention("llama", "sdpa")(**batch)
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-5)
    names = set(FlashAttentionKwargs.__annotations__)
    assert len(names) == 4
    for call in seen:
        assert (call["rows"], call["mask"]) == (1, None)
        assert names <= call.keys()
        assert call["cu_seq_lens_q"].dtype == call["cu_seq_lens_k"].dtype == torch.int32
        assert call["cu_seq_lens_q"].tolist() == [0, 5, 14, 16, 32, 33, 40, 46, 47, 48]
        assert type(call["max_length_q"]) is type(call["max_length_k"]) is int
        assert call["max_length_q"] == 16
    # The attention is registered for the whole process: a mask of another caller reaches it.
    mask = torch.ones(1, 1, 48, 48, dtype=torch.bool)
    rows_BHTD = [torch.randn(1, 2, 48, 8) for _ in range(3)]
    edges = torch.tensor([0, 48], dtype=torch.int32)
    AttentionInterface()["my_flash"](
        SimpleNamespace(), *rows_BHTD, mask, cu_seq_lens_q=edges, max_length_q=48
    )
    assert seen[-1]["mask"] is mask


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sliding_window": 8}, "a sliding window"),
        ({"softcap": 50.0}, "a soft cap"),
        ({"s_aux": torch.zeros(2)}, "attention sinks"),
        ({"position_bias": torch.zeros(2)}, "bias of positions"),
        ({"dropout": 0.1}, "dropout"),
        ({"is_causal": False}, "not causal"),
    ],
)
def test_attention_beyond_the_kernel_is_rejected(options: dict[str, Any], message: str) -> None:
    query = torch.randn(1, 2, 16, 8)
    segments = {"cu_seq_lens_q": torch.tensor([0, 7, 16]), "max_length_q": 9}
    arguments: Any = (torch.nn.Identity(), query, query, query, None)
    packed_attention._attend(*arguments, **segments, sliding_window=9, dropout=0.0, is_causal=True)
    with pytest.raises(ValueError, match=f"torch_varlen does not support .*{message}.* sdpa$"):
        packed_attention._attend(*arguments, **segments, **options)


def test_window_shorter_than_a_segment_is_rejected() -> None:
    for name, options in (
        ("mistral", {}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}),  # in one of two layers
    ):
        model = with_attention(name, "torch_varlen", sliding_window=24, **options)
        check_packing(model)  # of a few tokens
        check_packing(model, longest=24)
        with pytest.raises(ValueError, match=r"sliding window of 24 tokens, .* segment of 25"):
            check_packing(model, longest=25)
        model.set_attn_implementation("sdpa")
        check_packing(model, longest=25)
    unused = with_attention("qwen2", "torch_varlen", sliding_window=24)
    check_packing(unused, longest=25)


@pytest.mark.parametrize(
    ("name", "options", "trains", "reason"),
    [
        ("llama", {}, True, None),
        ("llama", {"attention_dropout": 0.1}, True, "drops attention weights"),
        ("llama", {"attention_dropout": 0.1}, False, None),
        ("mistral", {"sliding_window": 24}, True, "a window of 24 tokens"),
        ("mistral", {"sliding_window": 10**6}, True, None),
        ("qwen2", {"sliding_window": 24}, True, None),  # which it does not use
        ("gemma2", {"sliding_window": 10**6}, True, "a soft cap"),
    ],
)
def test_varlen_is_the_default_where_the_model_allows_it(
    name: str, options: dict[str, Any], trains: bool, reason: str | None
) -> None:
    found = why_not_varlen(build(name, **options), trains=trains)
    assert found == reason if reason is None else reason in (found or "")


def test_kernel_unlike_the_models_attention_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    own = packed_attention._reference
    monkeypatch.setattr(
        packed_attention, "_reference", lambda rows, s, scale: own(rows, s, 2 * scale)
    )
    with pytest.raises(ValueError, match=r"output head \(or attn_implementation torch_varlen\)"):
        with_attention("llama", "torch_varlen")


def test_gpu_call_has_the_right_form() -> None:
    segments = RowSegments(torch.empty(3, dtype=torch.int32, device="meta"), 9)
    shapes = ((16, 4, 8), (16, 2, 8), (16, 2, 8))
    tensors = [torch.empty(s, dtype=torch.bfloat16, device="meta") for s in shapes]
    assert packed_attention._on_gpu((*tensors,), segments, 0.3).shape == (16, 4, 8)
    with pytest.raises(ValueError, match=r"found torch\.float32"):
        packed_attention._on_gpu(tuple(x.float() for x in tensors), segments, 0.3)


def test_kernel_of_torch_2_11_gets_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    def varlen_attn(
        *rows: Any, scale: float | None = None, window_size: tuple[int, int] = (-1, -1)
    ) -> Any:
        assert (scale, window_size) == (0.3, (-1, 0))
        return rows[0]

    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    monkeypatch.setattr(packed_attention, "_HAS_GROUPS", False)
    query = torch.empty(16, 4, 8, dtype=torch.bfloat16, device="meta")
    segments = RowSegments(torch.empty(3, dtype=torch.int32, device="meta"), 9)
    assert packed_attention._on_gpu((query,) * 3, segments, 0.3) is query


def test_checks_run_in_the_kernels_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    dtypes: set[torch.dtype] = set()
    own = packed_attention._reference

    def spy(rows: Any, *args: Any) -> Any:
        dtypes.add(rows[0].dtype)
        return own(rows, *args)

    monkeypatch.setattr(packed_attention, "_reference", spy)
    monkeypatch.setattr(
        token_loss, "in_its_precision", lambda model: torch.autocast("cpu", torch.bfloat16)
    )
    check_packing(with_attention("llama", "torch_varlen"))
    assert dtypes == {torch.bfloat16}
