"""Every baseline recipe against its own paper's definition, on examples worked by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from vocagnolm.objective import Method, Objective
from vocagnolm.run.parse import parse
from vocagnolm.teacher import TeacherLosses

RECIPES = Path(__file__).resolve().parents[2] / "recipes" / "paper"


def method_of(recipe: str) -> Method:
    return parse(["--config", str(RECIPES / f"{recipe}.yaml"), "--use_cpu", "True"]).method


def guided(tokens: int) -> dict[str, Any]:
    """A row whose tokens are each guided by the teacher's token of their number."""
    first = torch.arange(tokens)
    ranges = torch.stack([first, first + 1], -1)[None]
    return {"labels": torch.zeros(1, tokens).long(), "teacher_ranges": ranges}


def test_rho1_recipe_trains_the_intersection_of_lin_et_al() -> None:
    """Lin et al. (2024), Equation 3, Appendix H and the last row of their Table 4.

    "Ranks in the top k%" of the excess loss, and of the reference's entropy from below: "we do not
    hope that the language model to learn" a token that the reference is uncertain of. 70 % and 70 %
    are 60 % of their tokens, as of these ten: those out by excess are 3, 4, 9; by entropy 1, 4, 9.
    """
    student = torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0, 6.0, 2.5, 1.5, 3.5, 0.5]])
    reference = torch.tensor([[1.0, 3.5, 0.5, 1.9, 1.2, 5.0, 2.3, 0.5, 1.0, 0.6]])
    entropy = torch.tensor([[0.2, 3.0, 0.1, 0.3, 2.9, 0.4, 0.5, 0.6, 0.7, 2.8]])
    losses = TeacherLosses(reference, torch.ones_like(reference).bool(), entropy)
    objective = Objective(method_of("table1/rho1__tinyllama-cpt"))
    found = objective.select(student, guided(10), losses)  # type: ignore[arg-type]
    assert found.weight_BS.nonzero()[:, 1].tolist() == [0, 2, 5, 6, 7, 8]


def chunked(labels: list[int], chunk: list[int], ranges: list[list[int]]) -> dict[str, Any]:
    return {
        "labels": torch.tensor([labels]),
        "chunk": torch.tensor([chunk]),
        "teacher_ranges": torch.tensor([[ranges[c] for c in chunk]]),
        "block": torch.tensor([5]),
    }


def test_chunk_recipe_trains_the_chunks_that_lag_most() -> None:
    """Section 6.1: Eq. 2 to 4 on chunks, which are "selected"; 40 % of nine label tokens are four.

    Mean losses of the student's chunks are 3, 2 and 5, of the teacher's 1, 1 and 4.5: excess 2, 1
    and 0.5. The first chunk has three label tokens, so one is taken of the second, from its start.
    By tokens those of 6, 5.4, 5.2 and 4.9 nats would lead, and by maxima the second chunk.
    """
    labels = [-100, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    student = torch.tensor([[9.0, 1.0, 3.0, 5.0, 0.0, 0.0, 6.0, 5.2, 4.9, 4.9]])
    teacher = TeacherLosses(torch.tensor([[0.5, 1.5, 2.0, 0.0, 5.0, 4.0]]), torch.ones(1, 6).bool())
    batch = chunked(labels, [0, 0, 0, 0, 1, 1, 1, 2, 2, 2], [[0, 2], [2, 4], [4, 6]])
    for chunks in (8, 16, 32, 64):
        objective = Objective(method_of(f"table2/chunk-{chunks}__mistral-proxmath"))
        found = objective.select(student, batch, teacher)  # type: ignore[arg-type]
        assert found.weight_BS.nonzero()[:, 1].tolist() == [1, 2, 3, 4]


def test_random_chunk_recipe_trains_whole_chunks() -> None:
    """The control of Section 6.1: "chunks are selected randomly"; 40 % of ten tokens are four."""
    batch = chunked([1] * 10, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4], [[0, 1]] * 5)
    for seed in range(20):
        objective = Objective(method_of("table2/chunk-8__random"), seed=seed)
        found = objective.select(torch.rand(1, 10), batch)  # type: ignore[arg-type]
        by_chunk = found.weight_BS.view(5, 2).sum(-1)
        assert sorted(by_chunk.tolist()) == [0, 0, 0, 2, 2]
