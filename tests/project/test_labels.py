"""The ceiling of an experiment's world, and the questions with wrong answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from benchmarks.experiments import (
    ceiling,
    conversations,
    label_worlds,
    labels,
    methods,
    worlds,
)


@pytest.mark.parametrize(
    ("gain", "noise", "usable"),
    [
        (0.5, 0.1, True),
        (0.5, 0.11, False),
        (0.0, 0.0, False),
        (-0.5, 0.01, False),
        (0.1, 0.0, True),
    ],
)
def test_world_is_usable_when_its_ceiling_is_five_times_the_noise(
    gain: float, noise: float, usable: bool
) -> None:
    assert ceiling.is_usable(gain, noise) is usable
    line = ceiling.first_line(gain, noise, "points")
    assert (". " in line) is not usable  # it says why not


def test_recorded_ceilings_are_losses_less_those_without_mistakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = {"noisy": (2.0, 2.5, 9.0), "clean": (1.5, 1.75), "noisy-old": (3.0,)}
    rows = []
    for world, by_seed in losses.items():
        for seed, loss in enumerate(by_seed):
            for rule, value in (("const", loss), ("accept", 0.0)):
                row = {"world": world, "seed": seed, "rule": rule, "nats_per_character": value}
                rows.append(json.dumps(row))
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    monkeypatch.setattr(ceiling, "RECORDED", tmp_path / "rows.jsonl")
    # The third seed has no run without mistakes.
    assert ceiling.recorded_gains("noisy", "nats_per_character") == [0.5, 0.75]
    for world in ("clean", "noisy-old", "another"):
        assert ceiling.recorded_gains(world, "nats_per_character") == []
        assert ceiling.recorded_line(world) == ""


@pytest.mark.parametrize(("measure", "sign"), [("accuracy", "+"), ("nats_per_character", "-")])
def test_conversations_gain_what_right_solutions_add(
    tmp_path: Path, measure: str, sign: str
) -> None:
    cases = []
    for case, values in (("spoilt", (0.2, 0.3)), ("neutral", (0.7, 0.9, 0.9))):
        world = worlds.DemoWorld(tmp_path / case)
        cases.append(world)
        for seed, value in enumerate(values):
            directory = world.seed_dir(seed) / "cpt"
            directory.mkdir(parents=True)
            result = {"run": conversations.RUNS["cpt"], measure: value}
            (directory / methods.RESULT_FILE).write_text(json.dumps(result))
    assert f" {sign}0.550 " in conversations.ceiling_line(cases)
    assert conversations.ceiling_line([cases[0], worlds.DemoWorld(tmp_path / "other")]) == ""


@pytest.mark.parametrize("world", label_worlds.WORLDS)
@pytest.mark.parametrize("noise", ["systematic", "random"])
def test_rows_have_the_share_of_mistakes_that_arms_expect(world: str, noise: str) -> None:
    asked = {question.text: question.answers for question in label_worlds.questions(world, 0, 3)}
    rows = {
        kind: label_worlds.rows(world, noise, kind, 3)
        for kind in ("all", "clean", *label_worlds.KINDS)
    }
    wrong = [row for row in rows["all"] if row["completion"] != asked[row["prompt"]][0]]
    assert len(wrong) == 180
    assert [row for row in rows["all"] if not row["right"]] == wrong
    mistakes = {asked[row["prompt"]].index(row["completion"]) for row in wrong}
    assert (mistakes == {1}) is (noise == "systematic")
    for kind in ("clean", "oracle"):
        for row in rows[kind]:
            assert row["completion"] == asked[row["prompt"]][0]
    assert len(rows["oracle"]) == len(rows["random"]) == 120
    shuffled = sorted(map(json.dumps, rows["repacked1"]))
    assert shuffled == sorted(map(json.dumps, rows["all"]))
    assert rows["repacked1"] != rows["all"]


@pytest.mark.parametrize("world", label_worlds.WORLDS)
def test_held_out_questions_are_in_no_training_set(world: str) -> None:
    held_out = {question.text for question in label_worlds.questions(world, 1, 0)}
    assert len(held_out) == label_worlds.HELD_OUT
    for seed in range(3, 6):
        assert not held_out & {question.text for question in label_worlds.questions(world, 0, seed)}


def test_candidates_cost_what_they_cost_when_read_alone() -> None:
    torch.manual_seed(0)
    model = worlds.make_model(50, 16, 2).double().eval()
    prompt_1S = torch.tensor([[1, 7, 9, 4]])
    answers = [torch.tensor(ids) for ids in ([5], [8, 2, 3], [6, 2])]
    with torch.inference_mode():
        found = labels.candidate_nats(model, prompt_1S, answers)
        for answer, nats in zip(answers, found, strict=True):
            logits = model(torch.cat([prompt_1S[0], answer])[None]).logits[0]
            expected = F.cross_entropy(logits[3:-1], answer, reduction="sum")
            assert float(nats) == pytest.approx(float(expected), abs=1e-5)


def test_table_begins_with_the_ceiling_and_compares_only_where_there_is_one(
    tmp_path: Path,
) -> None:
    rows = []
    for world, oracle in (("names", 0.9), ("units", 0.43)):
        right = {"clean": 1, "oracle": oracle, "equal": 0.4, "repacked1": 0.41, "repacked2": 0.39}
        for arm, value in (right | {"start": 0.1, "teacher": 0.9, "accept": 0.5}).items():
            row = {"world": world, "arm": arm, "seed": 3, "right": value, "general": 0.8}
            row["noise"] = "systematic"
            if arm in ("start", "teacher"):
                row |= {"noise": "", "seed": 0}
            rows.append(json.dumps(row))
    path = tmp_path / "labels.jsonl"
    path.write_text("\n".join(rows))
    found = labels.table(path, (3, 4, 5))
    names, units = found.split("units, systematic")
    assert names.strip().startswith("names, systematic: Ceiling: +0.500 of the answers")
    assert f"| {labels.TITLES['accept']} (1) | 0.500 | 0.500 | 0.20 | 0.800 |" in names
    assert "|" not in units


def test_gains_are_those_of_the_seeds_that_have_both_arms() -> None:
    rows = []
    for arm, by_seed in {
        "equal": {3: 0.4, 4: 0.2, 5: 0.3},
        "oracle": {3: 0.9, 4: 0.8},
        "accept": {4: 0.5},
        "repacked1": {3: 0.4},
        "repacked2": {3: 0.43},
    }.items():
        for seed, right in by_seed.items():
            rows.append({"world": "names", "noise": "random", "arm": arm, "seed": seed})
            rows[-1]["right"] = right
    case = labels.Case("names-random", rows, 3)
    assert case.ceiling() == pytest.approx((0.5 + 0.6) / 2)
    assert case.gain("accept") == pytest.approx(0.3)
    assert case.gain("oracle", "accept") == pytest.approx(0.3)
