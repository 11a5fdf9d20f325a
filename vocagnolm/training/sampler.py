"""The order in which a run reads its packed sequences."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Sampler


def mixed_counts(sizes: Sequence[float], weights: Sequence[float]) -> npt.NDArray[np.int64]:
    """Count how often an epoch reads each corpus, from their numbers of packed sequences.

    Every corpus is read at least once, and in the shares of the weights.
    """
    shares = np.asarray(weights) / np.sum(weights)
    # The corpus that is largest for its share is read once, and determines the total. Round the
    # quotient first, because 700 / 0.7 is slightly more than 1000.
    total = np.ceil((np.asarray(sizes) / shares).max().round(6))
    counts: npt.NDArray[np.int64] = np.round(shares * total).astype(np.int64)
    return counts


def mixed_order(
    sizes: Sequence[int], weights: Sequence[float], seed: int, epoch: int
) -> npt.NDArray[np.int64]:
    """Draw the indices of an epoch's packed sequences. Each corpus is read in passes."""
    # The epoch is part of the seed, so a resumed run need not draw the epochs before.
    rng = np.random.default_rng([seed, epoch])
    counts = mixed_counts(sizes, weights)
    # First draw which corpus each place of the epoch reads, then which of its sequences.
    corpus = rng.permutation(np.repeat(np.arange(len(sizes)), counts))
    order, first = np.empty(len(corpus), np.int64), 0
    for i, size in enumerate(sizes):
        # A corpus is shuffled again for each pass over it, and the last pass may be cut off.
        passes = [rng.permutation(size) for _ in range(-(-counts[i] // size))]
        order[corpus == i] = first + np.concatenate(passes)[: counts[i]]
        first += size
    return order


@dataclass(eq=False)
class StepSampler(Sampler[int]):
    """Draw an epoch of whole steps, each with its widest packed sequences first.

    So rows of similar width share a micro-batch, all processes read similar widths at a time, and
    the peak of memory is at the beginning.

    Attributes:
        sizes: packed sequences of each corpus.
        weights: shares of the corpora; without them all sequences are read once.
        widths: of all packed sequences; without them the order stays.
        step: returns the number of steps made, and so the epoch.
    """

    sizes: Sequence[int]
    weights: Sequence[float] | None
    seed: int
    per_step: int
    widths: npt.NDArray[np.int64] | None
    step: Callable[[], int]

    def __len__(self) -> int:
        mixed = self.weights and mixed_counts(self.sizes, self.weights).sum()
        count = int(mixed or sum(self.sizes))
        # Cut an epoch off at its last whole step. Accelerate would repeat the first sequences until
        # every process has a batch, and an epoch's last step would depend on the number of
        # processes. Each epoch leaves out other sequences. A corpus with less than one step is not
        # cut.
        return count // self.per_step * self.per_step or count

    def __iter__(self) -> Iterator[int]:
        # The epoch follows from the number of steps, which is in a resumed run's state.
        epoch = self.step() // max(1, len(self) // self.per_step)
        if self.weights:
            drawn = mixed_order(self.sizes, self.weights, self.seed, epoch)
        else:
            # Accelerate's own sampler draws this order, from the seed and the epoch.
            generator = torch.Generator().manual_seed(self.seed + epoch)
            drawn = torch.randperm(sum(self.sizes), generator=generator).numpy()
        drawn = drawn[: len(self)]
        # If a step lacks sequences, it is filled with its first ones. The sort is stable, so
        # sequences of the same width keep the order in which they were drawn.
        if self.widths is not None and len(drawn) >= self.per_step:
            steps = drawn.reshape(-1, self.per_step)
            widest_first = np.argsort(-self.widths[steps], axis=1, kind="stable")
            drawn = np.take_along_axis(steps, widest_first, axis=1).ravel()
        return iter(drawn.tolist())
