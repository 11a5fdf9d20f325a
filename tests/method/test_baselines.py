"""Every baseline recipe against its own paper's definition, on examples worked by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vocagnolm.alignment import align_positions, align_spans
from vocagnolm.distillation import HeadStates
from vocagnolm.method import Method
from vocagnolm.objective import Objective, OnlineTeacher, TeacherLosses
from vocagnolm.output_head import Head
from vocagnolm.run.parser import parse

RECIPES = Path(__file__).resolve().parents[2] / "recipes" / "paper"


def method_of(recipe: str) -> Method:
    return parse(["--config", str(RECIPES / f"{recipe}.yaml"), "--use_cpu", "True"]).args.guidance


def guided(tokens: int) -> dict[str, Any]:
    """A row in which the teacher's token i guides token i."""
    first = torch.arange(tokens)
    ranges = torch.stack([first, first + 1], -1)[None]
    return {"labels": torch.zeros(1, tokens).long(), "teacher_ranges": ranges}


def test_rho1_recipe_trains_the_intersection_of_lin_et_al() -> None:
    """Lin et al. (2024), Equation 3, Appendix H and the last row of their Table 4.

    "Ranks in the top k%" of the excess loss, and of the reference's lowest entropies: "we do not
    hope that the language model to learn" a token that the reference is uncertain of. 70 % by each
    leave 60 % of their tokens, and of these ten: excess drops 3, 4, 9, and entropy 1, 4, 9.
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

    Mean losses of the student's chunks are 3, 2 and 5, of the teacher's 1, 0.5 and 4.5: excess 2,
    1.5 and 0.5. The first chunk has three label tokens, so the fourth is the first of the second
    chunk. By tokens, by maxima or by the teacher alone, the second chunk or its 6 nats would lead;
    if the teacher's last token, which has no loss, counted, the third would.
    """
    labels = [-100, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    student = torch.tensor([[0.0, 1.0, 3.0, 5.0, 0.0, 0.0, 6.0, 5.2, 4.9, 4.9]])
    has_loss = torch.tensor([[True] * 5 + [False]])
    teacher = TeacherLosses(torch.tensor([[0.5, 1.5, 1.0, 0.0, 4.5, 0.0]]), has_loss)
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


class Fixed(OnlineTeacher):
    """A teacher that predicts the same whatever it reads."""

    def __init__(self, probabilities: list[list[float]]) -> None:
        self.head = head_of(probabilities)

    def states(self, *_: Any) -> HeadStates:
        return self.head


def head_of(probabilities: list[list[float]]) -> HeadStates:
    """Positions with these distributions; the logits of zeros do not matter."""
    rows = torch.tensor(probabilities).clamp(min=1e-30).log()
    return HeadStates(rows, Head(torch.eye(rows.shape[1]), None, 1.0, None, torch.float32))


def distances(
    recipe: str, student: list[list[float]], teacher: list[list[float]], batch: dict[str, Any]
) -> list[float]:
    """What a recipe adds to the cross-entropy of each token that has a counterpart."""
    method = method_of(recipe)
    assert method.distance is not None
    tokens = len(student)
    batch |= {"input_ids": torch.zeros(1, tokens), "position_ids": torch.arange(tokens)[None]}
    batch |= {"labels": torch.tensor([[-100] + [0] * (tokens - 1)]), "teacher_widths": [0]}
    batch |= {"segment_edges": torch.tensor([0, tokens]), "longest_segment": tokens}
    batch |= {"teacher_segment_edges": [torch.tensor([0])], "teacher_longest_segment": [0]}
    pairs = Objective(method, Fixed(teacher)).pairs(batch)  # type: ignore[arg-type]
    states = head_of(student)
    *_, found = pairs.losses(states.hidden_MD[None], torch.zeros(1, tokens).long(), states.head)
    return (pairs.factor * found).tolist()


@pytest.mark.parametrize("recipe", ["kld__tinyllama-cpt", "kld__llemma"])
def test_kld_recipe_adds_the_reverse_divergence(recipe: str) -> None:
    """Eq. 5: KL(p_S || p_T) per token with an equal weight, over the words that both have.

    1/2 ln 2 + 1/4 ln 1 + 1/4 ln 1/2 = 1/4 ln 2, and 0 where both are alike. Only the teacher
    has the fourth word, as Llemma has 16: it is dropped, and the rest divided by what remains.
    """
    student = [[0.5, 0.25, 0.25], [0.25, 0.25, 0.5], [1.0, 0.0, 0.0]]
    teacher = [[0.125, 0.125, 0.25, 0.5]] * 3
    batch = {"mapped_tokens": [0], "unmapped_tokens": [2]}
    found = distances(f"table1/{recipe}", student, teacher, batch)
    assert found == pytest.approx([0.25 * math.log(2), 0.0], abs=1e-6)


def test_uld_recipe_pairs_the_ith_token_with_the_ith() -> None:
    """Boizard et al. (2025) and Eq. 6: half of the sorted probabilities' L1, the longer text cut.

    The student cuts "1+22" as 1 + 22 and the teacher as 1+ 2 2, so they pair 1 with 1+, + with 2
    and 22 with 2: |.7 - .5| + |.2 - .5| + .1 = .6, |.5 - .8| + |.5 - .2| = .6, and .4 + .4 = .8.
    """
    student = [[0.1, 0.7, 0.2], [0.5, 0.0, 0.5], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]
    teacher = [[0.5, 0.5], [0.8, 0.2], [0.4, 0.6], [0.0, 1.0]]
    ours, theirs = np.array([[0, 1], [1, 2], [2, 4]]), np.array([[0, 2], [2, 3], [3, 4]])
    for recipe in sorted(RECIPES.glob("table1/uld__*.yaml")):
        name = f"table1/{recipe.stem}"
        by_position = method_of(name).uld_pairing == "position"
        ranges = align_positions(3, 3) if by_position else align_spans(ours, theirs)
        rows = torch.tensor([[[-1, -1], *(ranges + 1).tolist()]])
        batch = {"teacher_ranges": rows, "mapped_tokens": [3], "unmapped_tokens": [0]}
        batch |= {"teacher_input_ids": torch.zeros(1, 4), "teacher_position_ids": rows}
        assert distances(name, student, teacher, batch) == pytest.approx([0.3, 0.3, 0.4])


def test_vocagnolm_recipe_selects_by_equations_2_to_4() -> None:
    """Max of -log P over [j, k], the largest 40 % of L_S - L_T, and the unmapped token.

    Excess 3 - 2, 1 - 2, 4 - 1 and 2 - .5: of four, two are selected.
    """
    batch = guided(5)
    batch["teacher_ranges"] = torch.tensor([[[0, 2], [1, 2], [2, 4], [4, 5], [-1, -1]]])
    losses = torch.tensor([[0.5, 2.0, 1.0, 0.0, 0.5]])
    student = torch.tensor([[3.0, 1.0, 4.0, 2.0, 0.0]])
    teacher = TeacherLosses(losses, torch.ones(1, 5).bool())
    for recipe in sorted(RECIPES.glob("table1/vocagnolm__*.yaml")):
        objective = Objective(method_of(f"table1/{recipe.stem}"))
        found = objective.select(student, batch, teacher)  # type: ignore[arg-type]
        assert found.weight_BS.tolist() == [[0, 0, 1, 1, 1]]


def test_cpt_recipe_trains_every_token() -> None:
    found = Objective(method_of("table1/cpt")).select(torch.rand(1, 9), guided(9))  # type: ignore[arg-type]
    assert found.weight_BS.tolist() == [[1] * 9]
