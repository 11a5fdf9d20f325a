"""Mix corpora: blocks of several, in given shares of every global batch.

Every corpus is read pass after pass, each in a new order, at its own speed. An epoch has as many
whole steps as no corpus is read twice in: the one that is smallest beside its share sets the end,
and the others go on in the next epoch from where they are.
"""

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import count, islice
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset, Sampler


class Mixture(Dataset[Any]):
    """Blocks of several corpora, one corpus behind the other, with the share of each.

    Args:
        blocks: of all corpora; `Blocks` with its `parts`.
        sizes: blocks of each corpus.
        weights: of each corpus, in any unit.
    """

    def __init__(self, blocks: Dataset[Any], sizes: Sequence[int], weights: Sequence[float]):
        # As typed: 0.1 is a tenth.
        exact = [Fraction(str(weight)) for weight in weights]
        self.blocks, self.sizes = blocks, list(sizes)
        self.shares = [weight / sum(exact) for weight in exact]

    def __len__(self) -> int:
        return sum(self.sizes)

    def __getitem__(self, block: int) -> Any:
        return self.blocks[block]

    def steps(self, per_step: int, scales: Sequence[float] | None = None) -> int:
        """Return the steps of an epoch; corpora may be so many times as large as what is here."""
        each = zip(self.sizes, self.shares, scales or [1] * len(self.sizes), strict=True)
        return int(min(int(size * scale) / (share * per_step) for size, share, scale in each))

    def counts(self, per_step: int) -> Iterator[list[int]]:
        """Return the blocks of each corpus in one global batch after another.

        In every batch, and in all batches so far, a corpus is less than one block away from its
        share.
        """
        exact = [share * per_step for share in self.shares]
        whole = [int(blocks) for blocks in exact]
        # What is left of a batch is given to the corpora that a fraction is owed to, the earliest
        # due first; the quota method of Balinski and Young, with several seats at a time.
        owed = [blocks - int(blocks) for blocks in exact]
        rest, given = per_step - sum(whole), [0] * len(exact)
        for step in count(1):
            waiting = [i for i, part in enumerate(owed) if given[i] < part * step]
            chosen = sorted(waiting, key=lambda i: (given[i] + 1) / owed[i])[:rest]
            for i in chosen:
                given[i] += 1
            yield [blocks + (i in chosen) for i, blocks in enumerate(whole)]


class MixedSampler(Sampler[int]):
    """Numbers of the blocks of a mixture, an epoch at a time.

    They depend on the seed and the number of the step alone, so that a run may be resumed anywhere,
    with any number of processes.
    """

    def __init__(self, mixture: Mixture, per_step: int, seed: int):
        self._mixture, self._per_step, self._seed, self._epoch = mixture, per_step, seed, 0
        self._steps = mixture.steps(per_step)
        if not self._steps:
            raise ValueError(
                f"a global batch of {per_step} blocks is more than a corpus of the mixture gives: "
                f"blocks {mixture.sizes}, shares {list(map(float, mixture.shares))}"
            )

    def __len__(self) -> int:
        return self._steps * self._per_step

    def set_epoch(self, epoch: int) -> None:
        """Begin with an epoch."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        sizes, first = self._mixture.sizes, self._steps * self._epoch
        last = first + self._steps
        starts = np.cumsum([0, *sizes])

        @lru_cache(maxsize=2 * len(sizes))
        def order(corpus: int, turn: int) -> npt.NDArray[np.int64]:
            numbers = np.arange(starts[corpus], starts[corpus + 1], dtype=np.int64)
            return np.random.default_rng([self._seed, corpus, turn]).permutation(numbers)

        taken = [0] * len(sizes)
        for step, counts in enumerate(islice(self._mixture.counts(self._per_step), last)):
            numbers = []
            for corpus, more in enumerate(counts):
                places = range(taken[corpus], taken[corpus] + more)
                taken[corpus] += more
                if step >= first:
                    turns = (divmod(place, sizes[corpus]) for place in places)
                    numbers += [int(order(corpus, turn)[at]) for turn, at in turns]
            # Else the first rows of a batch, and so the first processes, would hold one corpus.
            yield from (
                np.random.default_rng([self._seed, len(sizes), step]).permutation(numbers).tolist()
            )


def mean_losses(
    sums: npt.NDArray[Any], counts: npt.NDArray[Any], parts: Mapping[str, int]
) -> dict[str, float]:
    """Return the loss per token of all rows, and of each part by its name if there are several.

    Takes the sum of losses and the tokens of every row, and the rows of each part in their order.
    """
    ranges = {"loss": slice(None)}
    if len(parts) > 1:
        for name, end in zip(parts, np.cumsum([*parts.values()]), strict=True):
            ranges[f"{name}_loss"] = slice(end - parts[name], end)
    return {
        name: float(sums[part].sum(dtype=np.float64) / max(counts[part].sum(), 1))
        for name, part in ranges.items()
    }
