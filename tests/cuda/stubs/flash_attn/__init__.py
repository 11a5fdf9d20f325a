"""The signatures of flash-attn 2.8, as strict as its kernels, computed by PyTorch's own kernel."""

import torch
from torch.nn.attention.varlen import varlen_attn

__version__ = "2.8.3"


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    for rows in (q, k, v):
        assert (rows.dim(), rows.stride(-1), rows.dtype) == (3, 1, q.dtype)
        assert rows.dtype in (torch.float16, torch.bfloat16)
    assert q.shape[1] % k.shape[1] == 0
    for edges in (cu_seqlens_q, cu_seqlens_k):
        assert (edges.device, edges.dtype, edges.stride()) == (q.device, torch.int32, (1,))
    assert type(max_seqlen_q) is type(max_seqlen_k) is int
    assert (causal, dropout_p, softcap, window_size) == (True, 0.0, 0.0, (-1, -1))
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    options = {"scale": softmax_scale, "window_size": (-1, 0), "enable_gqa": True}
    return varlen_attn(q, k, v, *lengths, **options)


def flash_attn_func(*args, **kwargs):
    raise AssertionError("packed documents would see each other")


flash_attn_with_kvcache = flash_attn_func
