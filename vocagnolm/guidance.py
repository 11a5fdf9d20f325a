"""Brings teacher losses onto student tokens, Eq. (2), and chooses the trained ones, Eq. (4).

It takes losses and gives weights, as tensors. Nothing here waits for the device, but for a user's
own aggregation; nothing loops over tokens or has a gradient.

Shapes: B sequences, S student positions, T teacher positions. Losses are in nats and indexed by
the token that is predicted.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from vocagnolm.conventions import UNMAPPED
from vocagnolm.fields import check_choice
from vocagnolm.method import (
    AGGREGATIONS,
    UNITS,
    Reduction,
    Scope,
    Unmapped,
    load_own,
)

CountT = TypeVar("CountT", int, Tensor)


class TokenGuidance(NamedTuple):
    """The weight of every token of a batch, and what it rests on, all losses in float32."""

    student_loss_BS: Tensor  # Eq. (1)
    teacher_loss_BS: Tensor  # Eq. (2); 0.0 where unmapped
    valid_BS: Tensor  # bool, tokens with a label
    mapped_BS: Tensor  # bool, tokens with a teacher loss
    weight_BS: Tensor  # W of Eq. (4), 1.0 or 0.0; of acceptance, in [0, 1]
    teacher_loss_BT: Tensor  # of the teacher's own tokens


def aggregate_teacher_losses(
    teacher_loss_BT: Tensor,
    ranges_BS2: Tensor,
    aggregation: str | Callable[[Tensor, Tensor], Tensor] = "max",
    valid_BT: Tensor | None = None,
    shares_BS3: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the teacher loss of every student token, Eq. (2). No input receives gradient.

    Ranges may be ragged, overlap and come in any order, (-1, -1) where unmapped. Teacher tokens
    outside of `valid_BT`, bool, count as absent. One whose loss is NaN or infinite makes the
    student tokens non-finite whose range it is in, and no others.

    "share" (beyond the paper) takes of each teacher token's loss the share of its characters that
    lie in the student token, L_T(i) = sum_j L_T(j) |i and j| / |j|; other aggregations do not look
    at `shares_BS3` (`vocagnolm.alignment.covered_shares`).

    A function of your own, or its name `package.module:function`, gets the losses in the range of
    each student token, float32 [B, S, W], and which of the W places hold one, bool [B, S, W]; it
    returns float32 [B, S]. W is the length of the longest range, which is a host-device sync.

    Returns the losses, float32 [B, S], 0.0 where unmapped; and the mapped tokens, bool [B, S].
    """
    if isinstance(aggregation, str):
        check_choice("aggregation", aggregation, AGGREGATIONS)
        if ":" in aggregation:
            aggregation = load_own("aggregation", aggregation)
    loss_BT = teacher_loss_BT.detach().float()
    valid_BT = torch.ones_like(loss_BT, dtype=torch.bool) if valid_BT is None else valid_BT
    # Only teacher tokens with a loss count, and a range without any is as good as unmapped.
    count_BS = _range_sums(valid_BT.long(), ranges_BS2)
    if not isinstance(aggregation, str):
        loss_BS = _by_function(aggregation, loss_BT, ranges_BS2, valid_BT)
    elif aggregation == "max":
        loss_BS = _range_maxima(loss_BT.masked_fill(~valid_BT, -torch.inf), ranges_BS2)
    else:
        # A prefix sum would carry a NaN to all later tokens, so it is taken out here, and put back
        # into the ranges that hold it. The sums are float64 where a device has it, since a
        # difference of long float32 sums would lose the digits of a single loss.
        broken_BT = valid_BT & ~loss_BT.isfinite()
        summed_BT = loss_BT.masked_fill(broken_BT | ~valid_BT, 0.0).to(_widest_float(loss_BT))
        if aggregation == "share":
            loss_BS = _shared_sums(summed_BT, ranges_BS2, shares_BS3)
        else:
            loss_BS = _range_sums(summed_BT, ranges_BS2)
        # The 0 / 0 of an unmapped token is filled with 0.0 at the end.
        loss_BS = loss_BS / count_BS if aggregation == "mean" else loss_BS
        loss_BS = loss_BS.masked_fill(_range_sums(broken_BT.long(), ranges_BS2) > 0, torch.nan)
    return loss_BS.masked_fill(count_BS <= 0, 0.0).float(), count_BS > 0


def _by_function(
    function: Callable[[Tensor, Tensor], Tensor],
    loss_BT: Tensor,
    ranges_BS2: Tensor,
    valid_BT: Tensor,
) -> Tensor:
    """Lay the losses of every range in a row of their own, from its left, and reduce the rows."""
    first_BS, last_BS = ranges_BS2.long().clamp(min=0).unbind(-1)
    longest = max(1, int((last_BS - first_BS).amax()))
    # Place w of a row is the teacher token first + w. Those from `last` on are not of the range:
    # they read some token that exists, and `held_BSW` tells the function to leave them out.
    place_BSW = first_BS[..., None] + torch.arange(longest, device=loss_BT.device)
    held_BSW = place_BSW < last_BS[..., None]
    flat = place_BSW.clamp(max=loss_BT.shape[-1] - 1).flatten(1)
    loss_BSW = loss_BT.gather(-1, flat).view_as(place_BSW)
    held_BSW &= valid_BT.gather(-1, flat).view_as(place_BSW)
    found_BS = function(loss_BSW, held_BSW)
    if found_BS.shape != first_BS.shape:
        raise ValueError(
            f"--aggregation: expected one loss for each student token, {list(first_BS.shape)}, got "
            f"{list(found_BS.shape)}"
        )
    return found_BS


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
    # The ends are read, not subtracted from a sum, so that a range of one whole token has exactly
    # its value:
    #     range      [first | . . . . | last - 1]
    #     shares        f       between     l
    first_BS, last_BS = ranges_BS2.long().clamp(min=0).unbind(-1)
    # Places are clamped, because an unmapped range, or one at the end of a row, would reach beyond
    # the row. What is read there counts for nothing: it is masked here, or by the caller.
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
    # In the pass of a width, a power of two, window[t] is the maximum of [t, t + width). A range
    # shorter than two widths is the union of two such windows, one at either end:
    #     range      [first . . . . . . last)     length 6, width 4
    #     at start   [. . . .)
    #     at end         [. . . .)
    first_BS, last_BS = ranges_BS2.long().clamp(min=0).unbind(-1)
    length_BS, positions = last_BS - first_BS, values_BT.shape[-1]
    maxima_BS = torch.zeros_like(length_BS, dtype=values_BT.dtype)
    window_BT, width = values_BT, 1
    # Both windows of a range are read in the one pass that its length belongs to, and the other
    # passes keep what that one wrote. No pass depends on a value, so the host never waits.
    while width <= positions:
        at_start = window_BT.gather(-1, first_BS.clamp(max=positions - 1))
        at_end = window_BT.gather(-1, (last_BS - width).clamp(min=0))
        here_BS = (length_BS >= width) & (length_BS < 2 * width)
        maxima_BS = torch.where(here_BS, torch.maximum(at_start, at_end), maxima_BS)
        # Two windows of a width, one after the other, make one of twice the width. Beyond the row
        # is -inf, which no maximum takes.
        later_BT = F.pad(window_BT[:, width:], (0, width), value=-torch.inf)
        window_BT, width = torch.maximum(window_BT, later_BT), 2 * width
    return maxima_BS


def batch_chunk_credit(
    student_loss_BS: Tensor, teacher_loss_BT: Tensor, ranges_BS2: Tensor
) -> Tensor:
    """Return the advantage of every student token, as `vocagnolm.credit.chunk_credit` does.

    Ranges are (-1, -1) where unmapped, as padding is; there the advantage is 0.0. Returns float64
    [B, S], on Apple's GPUs float32. No input receives gradient, and nothing waits for the device.
    """
    wide = _widest_float(student_loss_BS)
    first_BS, last_BS = ranges_BS2.long().unbind(-1)
    mapped_BS = first_BS != UNMAPPED
    positions = first_BS.shape[-1]
    # A chunk ends after a mapped token if all later ranges begin where the ranges so far end, or
    # after it. Unmapped tokens reach nowhere, and begin beyond every range.
    beyond = teacher_loss_BT.shape[-1] + 1
    reached_BS = last_BS.clamp(min=0).cummax(-1).values
    later_BS = first_BS.masked_fill(~mapped_BS, beyond).flip(-1).cummin(-1).values.flip(-1)
    next_BS = F.pad(later_BS[:, 1:], (0, 1), value=beyond)
    is_end_BS = mapped_BS & (next_BS >= reached_BS)
    # The place of the first end from each token on. The last position stands in where there is
    # none, which only unmapped tokens see.
    place_S = torch.arange(positions, device=first_BS.device)
    end_BS = place_S.expand_as(first_BS).masked_fill(~is_end_BS, positions - 1)
    end_BS = end_BS.flip(-1).cummin(-1).values.flip(-1)
    # The losses to go are those from each token to the end of its chunk, of both models.
    own_BS = student_loss_BS.detach().to(wide).masked_fill(~mapped_BS, 0.0)
    own_to_go_BS = _range_sums(own_BS, torch.stack([place_S.expand_as(end_BS), end_BS + 1], -1))
    teacher_end_BS = reached_BS.gather(-1, end_BS)
    teacher_ranges_BS2 = torch.stack([first_BS, teacher_end_BS], -1)
    teacher_to_go_BS = _range_sums(teacher_loss_BT.detach().to(wide), teacher_ranges_BS2)
    return (own_to_go_BS - teacher_to_go_BS).masked_fill(~mapped_BS, 0.0)


def selected_count(
    mapped: CountT, unmapped: CountT, top_k: float, unmapped_strategy: Unmapped
) -> CountT:
    """Count the tokens of a population that get weight 1, before any loss is known.

    The population, a sequence or a micro-batch, has tokens with and without a teacher loss.
    """
    if unmapped_strategy == "mean":
        return _share(mapped + unmapped, top_k)
    return _share(mapped, top_k) + (unmapped if unmapped_strategy == "include" else 0)


def _share(count: CountT, top_k: float) -> CountT:
    """Return ceil(top_k * count), the same of Python integers and int64 tensors."""
    # In whole millionths -(-a // b) is the exact ceiling. In floats, 0.07 * 100 would become 8.
    return -(-count * round(top_k * UNITS) // UNITS)


def select_top(score_BS: Tensor, candidates_BS: Tensor, top_k: float, scope: Scope) -> Tensor:
    """Return the candidates of the largest scores, exactly ceil(top_k * candidates), bool [B, S].

    Among equal scores the lower position comes first, and the earlier sequence in scope "batch".
    """
    check_choice("selection_scope", scope, Scope)
    if scope == "batch":
        flat = select_top(score_BS.reshape(1, -1), candidates_BS.reshape(1, -1), top_k, "sequence")
        return flat.view_as(candidates_BS)
    # Tokens are sorted by score and then, stably, candidates first. A sentinel for the others could
    # equal the score of a candidate.
    order_BS = score_BS.detach().argsort(dim=-1, descending=True, stable=True)
    competes_BS = candidates_BS.gather(-1, order_BS).to(torch.uint8)
    order_BS = order_BS.gather(-1, competes_BS.argsort(dim=-1, descending=True, stable=True))
    # The first `count` of this order are chosen, and the scatter puts each back to its position.
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
    """Return the weights W of Eq. (4), by the excess of the student's loss over the teacher's.

    The tokens compete that are in both `mapped_BS` and `valid_BS`. Of them a share of `top_k` is
    selected, in every "sequence" or in the whole micro-"batch". Unmapped tokens weigh 1 with
    "include" and 0 with "exclude"; with "mean" they compete with the mean teacher loss of the
    batch's mapped tokens (0 if there are none). With the teacher's entropies, a token is selected
    only if it is in the share of lowest entropy too (Rho-1, Lin et al. 2024, Appendix H).

    Returns float32 [B, S] of 0.0 and 1.0, without gradient: `selected_count` ones per population,
    with entropies at most as many.
    """
    check_choice("unmapped", unmapped, Unmapped)
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

    It is the probability with which speculative decoding accepts a token that the student proposes
    and the teacher judges. Unmapped tokens weigh 1. W is float32 [B, S], 0.0 without a label, and
    has no gradient.
    """
    # The clamp comes first, as the exponential would overflow where the student's loss is much
    # larger.
    accepted_BS = (student_loss_BS - teacher_loss_BS).clamp(max=0.0).exp()
    return torch.where(mapped_BS, accepted_BS.float(), 1.0).masked_fill(~valid_BS, 0.0)


def reduce_teachers(
    loss_BS: Tensor,
    mapped_BS: Tensor,
    teachers: int,
    reduction: Reduction,
    weights: Sequence[float] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return one loss per student token of several teachers' (beyond the paper).

    The losses are 0.0 where a teacher has no token; the second result is true where all have one.
    """
    # A row has the tokens by one teacher after those by another:
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
        # In float64, equal losses have exactly their mean. No tensor of weights: copying it to a
        # device would be a host-device sync.
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

    They depend on the seed, the packed sequence and the token, or chunk, in it alone, so the same
    are chosen for every split of the sequences into batches and processes.
    """
    # Each number is mixed before the next one is added. Otherwise token 1 of sequence 0 would have
    # the score of token 0 of sequence 1.
    seed_B1 = torch.full_like(block_B, _signed(seed))[:, None]
    block_B1 = _splitmix64(_splitmix64(seed_B1) + block_B[:, None])
    return _splitmix64(block_B1 + index_BS) & (2**63 - 1)


def _splitmix64(x: Tensor) -> Tensor:
    """Mix the bits of int64 numbers (Steele, Lea and Flood, 2014); arithmetic wraps around."""
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    # The algorithm shifts zeros in, and a shift of int64 repeats the sign: the mask removes it.
    return torch.bitwise_right_shift(x, bits) & int(2 ** (64 - bits) - 1)


def _signed(x: int) -> int:
    """Return the int64 of the same 64 bits as an unsigned number."""
    return (x + 2**63) % 2**64 - 2**63
