"""Map teacher losses to student tokens, Eq. (2), and choose the tokens to train on, Eq. (4).

Losses go in and weights come out, as tensors. Nothing here loops over tokens or has a gradient, and
nothing waits for the device, except a user's own aggregation.

Shapes: B sequences, S student positions, T teacher positions. Losses are in nats and indexed by
the token that is predicted.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from vocagnolm.fields import OptionError, check_choice
from vocagnolm.method import (
    AGGREGATIONS,
    UNITS,
    Reduction,
    Scope,
    Selection,
    Unmapped,
    load_own,
)

# STM's paper has this threshold.
_STM_PERPLEXITY = 2.5
# EAFT's entropy is that of so many tokens.
_GATE_TOKENS = 20

CountT = TypeVar("CountT", int, Tensor)


class TokenGuidance(NamedTuple):
    """The weight of every token of a batch, and the losses that decide it, in float32."""

    student_loss_BS: Tensor  # Eq. (1)
    teacher_loss_BS: Tensor  # Eq. (2); 0.0 where unmapped
    valid_BS: Tensor  # bool, tokens with a label
    mapped_BS: Tensor  # bool, tokens with a teacher loss
    weight_BS: Tensor  # W of Eq. (4), 1.0 or 0.0; of a token weighted by itself, in [0, 1]
    teacher_loss_BT: Tensor  # of the teacher's own tokens


def aggregate_teacher_losses(
    teacher_loss_BT: Tensor,
    ranges_BS2: Tensor,
    aggregation: str | Callable[[Tensor, Tensor], Tensor] = "max",
    valid_BT: Tensor | None = None,
    shares_BS3: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the teacher loss of every student token, Eq. (2). No input receives gradient.

    Ranges may have any length and order, and may overlap. An unmapped token has (-1, -1). Teacher
    tokens that are false in `valid_BT` are ignored. A teacher loss that is NaN or infinite makes
    the losses of the student tokens NaN whose range it is in, and no others.

    "share" (beyond the paper) splits each teacher token's loss by the characters that it has in the
    student token: L_T(i) = sum_j L_T(j) |i and j| / |j|. Only it needs `shares_BS3`, which
    `vocagnolm.alignment.covered_shares` computes.

    A function of your own, or its name `package.module:function`, gets the losses in the range of
    each student token, float32 [B, S, W], and a mask of the places that hold one, bool [B, S, W].
    It returns float32 [B, S]. W is the length of the longest range: finding it is a host-device
    sync.

    Returns the losses, float32 [B, S], 0.0 where unmapped; and the mapped tokens, bool [B, S].
    """
    if isinstance(aggregation, str):
        check_choice("aggregation", aggregation, AGGREGATIONS)
        if ":" in aggregation:
            aggregation = load_own("aggregation", aggregation)
    loss_BT = teacher_loss_BT.detach().float()
    valid_BT = torch.ones_like(loss_BT, dtype=torch.bool) if valid_BT is None else valid_BT
    # Only teacher tokens with a loss count. A range without any is treated as unmapped.
    count_BS = _range_sums(valid_BT.long(), ranges_BS2)
    if not isinstance(aggregation, str):
        loss_BS = _by_function(aggregation, loss_BT, ranges_BS2, valid_BT)
    elif aggregation == "max":
        loss_BS = _range_maxima(loss_BT.masked_fill(~valid_BT, -torch.inf), ranges_BS2)
    else:
        # A prefix sum would spread a NaN to all later tokens. So NaNs are removed here, and put
        # back into the ranges that contain them. Sums are in float64 if the device has it: the
        # difference of two long float32 sums would lose the digits of a single loss.
        broken_BT = valid_BT & ~loss_BT.isfinite()
        summed_BT = loss_BT.masked_fill(broken_BT | ~valid_BT, 0.0).to(_widest_float(loss_BT))
        if aggregation == "share":
            loss_BS = _shared_sums(summed_BT, ranges_BS2, shares_BS3)
        else:
            loss_BS = _range_sums(summed_BT, ranges_BS2)
        # An unmapped token gives 0 / 0, which the last line replaces by 0.0.
        loss_BS = loss_BS / count_BS if aggregation == "mean" else loss_BS
        loss_BS = loss_BS.masked_fill(_range_sums(broken_BT.long(), ranges_BS2) > 0, torch.nan)
    return loss_BS.masked_fill(count_BS <= 0, 0.0).float(), count_BS > 0


def _by_function(
    function: Callable[[Tensor, Tensor], Tensor],
    loss_BT: Tensor,
    ranges_BS2: Tensor,
    valid_BT: Tensor,
) -> Tensor:
    """Copy the losses of each range into a separate row, and reduce the rows."""
    first_BS, last_BS = ranges_BS2.long().clamp(min=0).unbind(-1)
    longest = max(1, int((last_BS - first_BS).amax()))
    # Place w of a row is the teacher token first + w. Places from `last` on are outside the range.
    # They read some existing token, and `held_BSW` tells the function to ignore it.
    place_BSW = first_BS[..., None] + torch.arange(longest, device=loss_BT.device)
    held_BSW = place_BSW < last_BS[..., None]
    flat = place_BSW.clamp(max=loss_BT.shape[-1] - 1).flatten(1)
    loss_BSW = loss_BT.gather(-1, flat).view_as(place_BSW)
    held_BSW &= valid_BT.gather(-1, flat).view_as(place_BSW)
    aggregated_BS = function(loss_BSW, held_BSW)
    if aggregated_BS.shape != first_BS.shape:
        raise OptionError(
            "aggregation",
            f"expected one loss for each student token, {list(first_BS.shape)}, got "
            f"{list(aggregated_BS.shape)}",
        )
    # NaN would be less than any threshold, so such tokens would silently count as not selected.
    is_sound_BS = held_BSW.any(-1) & (loss_BSW.isfinite() | ~held_BSW).all(-1)
    if bool((aggregated_BS.isnan() & is_sound_BS).any()):
        raise OptionError("aggregation", "got NaN for a token whose teacher losses are finite")
    return aggregated_BS


def _widest_float(tensor: Tensor) -> torch.dtype:
    # Apple's GPUs have no float64.
    return torch.float32 if tensor.device.type == "mps" else torch.float64


def _range_sums(values_BT: Tensor, ranges_BS2: Tensor) -> Tensor:
    # A range's sum is a difference of prefix sums; an unmapped (-1, -1) becomes [0, 0), empty:
    #     values    v0    v1    v2    v3
    #     prefix  0    v0  v0+v1  ...          sum of [1, 3) = prefix[3] - prefix[1]
    first_BS, last_BS = ranges_BS2.long().clamp(min=0).unbind(-1)
    prefix = F.pad(values_BT.cumsum(-1), (1, 0))
    return prefix.gather(-1, last_BS) - prefix.gather(-1, first_BS)


def _shared_sums(values_BT: Tensor, ranges_BS2: Tensor, shares_BS3: Tensor | None) -> Tensor:
    """Weigh a range's first value, the sum of those between, and the last, by their shares."""
    if shares_BS3 is None:
        raise ValueError(
            "this method needs shares of characters: use PackedCollator(..., shares=True)"
        )
    # The two ends are read directly instead of being subtracted from a sum. A range of one whole
    # token then has exactly its value:
    #     range      [first | . . . . | last - 1]
    #     shares        f       between     l
    first_BS, last_BS = ranges_BS2.long().clamp(min=0).unbind(-1)
    # Places are clamped, because an unmapped range, or one at the end of a row, would reach beyond
    # the row. What is read there does not count: it is masked here or by the caller.
    inner_BS = first_BS + 1
    between_BS2 = torch.stack([inner_BS, torch.maximum(inner_BS, last_BS - 1)], -1)
    parts_BS3 = torch.stack(
        [
            values_BT.gather(-1, first_BS.clamp(max=values_BT.shape[-1] - 1)),
            _range_sums(values_BT, between_BS2.clamp(max=values_BT.shape[-1])),
            values_BT.gather(-1, (last_BS - 1).clamp(min=0)).masked_fill(last_BS <= inner_BS, 0.0),
        ],
        -1,
    )
    return (parts_BS3 * shares_BS3.to(values_BT.dtype)).sum(-1)


def _range_maxima(values_BT: Tensor, ranges_BS2: Tensor) -> Tensor:
    """Return the maximum of every non-empty range, in log2(T) passes of fixed shapes."""
    # In each pass, window[t] is the maximum of [t, t + width), where the width is a power of two.
    # A range of width to 2 * width - 1 tokens is the union of two windows, one at each end:
    #     range      [first . . . . . . last)     length 6, width 4
    #     at start   [. . . .)
    #     at end         [. . . .)
    first_BS, last_BS = ranges_BS2.long().clamp(min=0).unbind(-1)
    length_BS, positions = last_BS - first_BS, values_BT.shape[-1]
    maxima_BS = torch.zeros_like(length_BS, dtype=values_BT.dtype)
    window_BT, width = values_BT, 1
    # Each range takes its maximum from the one pass that fits its length, and the other passes keep
    # it. No pass depends on a value, so the host never waits.
    while width <= positions:
        at_start = window_BT.gather(-1, first_BS.clamp(max=positions - 1))
        at_end = window_BT.gather(-1, (last_BS - width).clamp(min=0))
        here_BS = (length_BS >= width) & (length_BS < 2 * width)
        maxima_BS = torch.where(here_BS, torch.maximum(at_start, at_end), maxima_BS)
        # Two adjacent windows make one of twice the width. Beyond the row there is -inf.
        later_BT = F.pad(window_BT[:, width:], (0, width), value=-torch.inf)
        window_BT, width = torch.maximum(window_BT, later_BT), 2 * width
    return maxima_BS


def selected_count(
    mapped: CountT, unmapped: CountT, top_k: float, unmapped_strategy: Unmapped
) -> CountT:
    """Count the tokens that get weight 1 in a sequence or a micro-batch, before losses are known.

    Args:
        mapped: number of its tokens with a teacher loss.
        unmapped: number of its label tokens without one.
        top_k: share to select.
        unmapped_strategy: what happens to unmapped tokens.
    """
    if unmapped_strategy == "mean":
        return _share(mapped + unmapped, top_k)
    return _share(mapped, top_k) + (unmapped if unmapped_strategy == "include" else 0)


def _share(count: CountT, top_k: float) -> CountT:
    """Return ceil(top_k * count), exactly, for a Python integer or an int64 tensor."""
    # Integer arithmetic in millionths is exact: -(-a // b) is the ceiling. With floats, 7 % of 100
    # tokens would become 8.
    return -(-count * round(top_k * UNITS) // UNITS)


def select_top(score_BS: Tensor, candidates_BS: Tensor, top_k: float, scope: Scope) -> Tensor:
    """Choose the candidates with the largest scores: exactly ceil(top_k * candidates), bool [B, S].

    Ties go to the lower position, and with scope "batch" to the earlier sequence.
    """
    if scope == "batch":
        flat = select_top(score_BS.reshape(1, -1), candidates_BS.reshape(1, -1), top_k, "sequence")
        return flat.view_as(candidates_BS)
    # Sort by score, and then stably, so that candidates come first. A sentinel score for the other
    # tokens could equal the score of a candidate.
    order_BS = score_BS.detach().argsort(dim=-1, descending=True, stable=True)
    competes_BS = candidates_BS.gather(-1, order_BS).to(torch.uint8)
    order_BS = order_BS.gather(-1, competes_BS.argsort(dim=-1, descending=True, stable=True))
    # Choose the first `count` in this order, and scatter the choice back to the positions.
    count_B1 = _share(candidates_BS.sum(-1, keepdim=True), top_k)
    chosen_BS = torch.arange(score_BS.shape[-1], device=score_BS.device) < count_B1
    return torch.zeros_like(candidates_BS).scatter_(-1, order_BS, chosen_BS)


@torch.no_grad()
def select_tokens(
    student_loss_BS: Tensor,
    teacher_loss_BS: Tensor,
    valid_BS: Tensor,
    mapped_BS: Tensor,
    *,
    top_k: float,
    unmapped: Unmapped,
    scope: Scope,
    entropy_BS: Tensor | None = None,
) -> Tensor:
    """Return the weights W of Eq. (4), by the student's loss minus the teacher's.

    Tokens that are true in `mapped_BS` and `valid_BS` compete. The `top_k` share of them is
    selected, in each "sequence" or in the whole micro-"batch". Unmapped tokens get weight 1 with
    "include" and 0 with "exclude". With "mean", they compete with the mean teacher loss of the
    batch's mapped tokens (0 if there are none). If the teacher's entropies are given, a token must
    also be in the `top_k` share of lowest entropy (Rho-1, Lin et al. 2024, Appendix H).

    Returns float32 [B, S] of 0.0 and 1.0, without gradient. Each sequence or batch has
    `selected_count` ones, or fewer with entropies.
    """
    candidates_BS = valid_BS & mapped_BS
    if unmapped == "mean":
        known_BS = teacher_loss_BS.masked_fill(~candidates_BS, 0.0)
        mean = known_BS.sum(dtype=_widest_float(known_BS)) / candidates_BS.sum().clamp(min=1)
        teacher_loss_BS = torch.where(mapped_BS, teacher_loss_BS, mean.to(known_BS.dtype))
        candidates_BS = valid_BS
    weight_BS = select_top(student_loss_BS - teacher_loss_BS, candidates_BS, top_k, scope)
    if entropy_BS is not None:
        weight_BS &= select_top(-entropy_BS, candidates_BS, top_k, scope)
    if unmapped == "include":
        weight_BS |= valid_BS & ~mapped_BS
    return weight_BS.float()


@torch.no_grad()
def accept_tokens(
    student_loss_BS: Tensor, teacher_loss_BS: Tensor, valid_BS: Tensor, mapped_BS: Tensor
) -> Tensor:
    """Return W = min(1, p_T / p_S) = min(1, exp(L_S - L_T)), beyond the paper.

    This is the probability that speculative decoding accepts the token, if the student proposes it
    and the teacher verifies it. Unmapped tokens get weight 1, and tokens without a label 0. W is
    float32 [B, S], without gradient.
    """
    # Clamp first: if the student's loss is much larger, the exponential would overflow.
    accepted_BS = (student_loss_BS - teacher_loss_BS).clamp(max=0.0).exp()
    return torch.where(mapped_BS, accepted_BS.float(), 1.0).masked_fill(~valid_BS, 0.0)


@torch.no_grad()
def weigh_by_student(loss: Tensor, selection: Selection, stm_perplexity: float | None) -> Tensor:
    """Weight tokens by the student's losses alone, beyond the paper; any shape, float32.

    "dft": W = p_S = exp(-L_S), the weight of Dynamic Fine-Tuning (arXiv 2508.05629). "stm": W = 1
    up to a perplexity exp(L_S), else 0, Selective Token Masking (arXiv 2501.14315), by the student
    as it is now. For "eaft", all are 1, because `entropy_gate` gives the weight.
    """
    if selection == "dft":
        return (-loss).exp().float()
    if selection == "stm":
        return (loss <= math.log(stm_perplexity or _STM_PERPLEXITY)).float()
    return torch.ones_like(loss, dtype=torch.float32)


@torch.no_grad()
def entropy_gate(log_p_KV: Tensor) -> Tensor:
    """Return the weights of Entropy-Adaptive Fine-Tuning (arXiv 2601.02151), float32 [K].

    W = H / log 20, where H is the entropy of the 20 most likely tokens, whose probabilities are
    scaled to a sum of 1. `log_p_KV` are the student's log-probabilities.
    """
    likely = min(_GATE_TOKENS, log_p_KV.shape[-1])
    log_q_KL = log_p_KV.topk(likely, dim=-1).values.float().log_softmax(-1)
    return -(log_q_KL.exp() * log_q_KL).sum(-1) / math.log(_GATE_TOKENS)


def reduce_teachers(
    loss_BS: Tensor,
    mapped_BS: Tensor,
    teachers: int,
    reduction: Reduction,
    weights: Sequence[float] | None = None,
) -> tuple[Tensor, Tensor]:
    """Combine the losses of several teachers into one per student token (beyond the paper).

    Returns the losses, and which tokens every teacher covers. The losses of the others are 0.0.
    """
    # A row has all tokens for the first teacher, then all tokens for the second:
    #     [B, K S]   | a0 a1 a2 | b0 b1 b2 |   ->   [B, K, S]   ->   [B, S]   reduce(a0, b0) ...
    if teachers == 1:
        return loss_BS, mapped_BS
    shape = loss_BS.shape[0], teachers, -1
    loss_BKS, mapped_BS = loss_BS.reshape(shape), mapped_BS.reshape(shape).all(1)
    if reduction in ("min", "max"):
        reduced_BS = loss_BKS.amin(1) if reduction == "min" else loss_BKS.amax(1)
    elif reduction == "first":
        reduced_BS = loss_BKS[:, 0]
    else:
        # In float64, the mean of equal losses is exactly their value. The weights stay Python
        # numbers: copying a tensor of them to the device would be a host-device sync.
        numbers = weights or (1.0,) * teachers
        wide_BKS = loss_BKS.to(_widest_float(loss_BS))
        weighted = []
        for number, wide_BS in zip(numbers, wide_BKS.unbind(1), strict=True):
            weighted.append(number * wide_BS)
        total_BS = torch.stack(weighted).sum(0)
        reduced_BS = (total_BS / sum(numbers)).float()
    return reduced_BS * mapped_BS, mapped_BS


def random_scores(block_B: Tensor, index_BS: Tensor, seed: int) -> Tensor:
    """Return scores for the random controls, uniform int64 [B, S] in [0, 2**63).

    A score depends only on the seed, the packed sequence, and the token or chunk in it. So the
    choice does not depend on how sequences are split into batches and processes.
    """
    # Mix each number before the next one is added. Otherwise token 1 of sequence 0 would have the
    # score of token 0 of sequence 1.
    seed_B1 = torch.full_like(block_B, _signed(seed))[:, None]
    block_B1 = _splitmix64(_splitmix64(seed_B1) + block_B[:, None])
    return _splitmix64(block_B1 + index_BS) & (2**63 - 1)


def _splitmix64(x: Tensor) -> Tensor:
    """Mix the bits of int64 numbers (Steele, Lea and Flood, 2014). Arithmetic wraps around."""
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    # The algorithm shifts in zeros. An int64 shifts in its sign, which the mask removes.
    return torch.bitwise_right_shift(x, bits) & int(2 ** (64 - bits) - 1)


def _signed(x: int) -> int:
    """Return the int64 with the same 64 bits as an unsigned number."""
    return (x + 2**63) % 2**64 - 2**63
