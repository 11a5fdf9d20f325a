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
