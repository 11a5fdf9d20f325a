"""The experiments at their tiniest size: aggregations, real documents, and conversations."""

from __future__ import annotations

import doctest
import json
import re
from pathlib import Path
from random import Random
from types import ModuleType

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from benchmarks.experiments import (
    conversations,
    method_worlds,
    methods,
    text_worlds,
)
from vocagnolm.demo import world as demo_world
from vocagnolm.demo.models import STUDENT_TOKENIZER, TEACHER
from vocagnolm.io import ASSETS
from vocagnolm.store.format import Store

pytestmark = pytest.mark.processes


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Documents that are told apart by their numbers, of which every second one is a problem."""
    path, rng = tmp_path / "corpus.jsonl", Random(0)
    words = "one two three four five six seven eight nine ten".split()
    with path.open("w") as file:
        for number in range(120):
            body = " ".join(rng.choices(words, k=60))
            row = {"text": f"How many {number}?\n{body}", "source": "x/train/1" * (number % 2)}
            file.write(json.dumps(row) + "\n")
    return path


class TinyWorld(text_worlds.TextWorld):
    """The same code with nothing to learn from it."""

    longer_steps = 1
    options = ("--max_length=64", "--global_batch_tokens=256", "--max_steps=2")
    held_out_documents, page_documents = 10, 40


@pytest.mark.parametrize("name", text_worlds.SPOILS)
def test_pages_know_what_is_as_it_was(name: str, corpus: Path, tmp_path: Path) -> None:
    world = TinyWorld(tmp_path / name, [corpus], text_worlds.SPOILS[name], 1)
    originals = world.documents[1][: world.page_documents]
    for (page, is_kept), original in zip(world.pages, originals, strict=True):
        assert len(is_kept) == len(page)
        words = [w for w, at in _words(page) if is_kept[at : at + len(w)].all()]
        left = iter(original.split(" "))
        assert name == "noisy" or all(word in left for word in words)
    share = np.mean(np.concatenate([kept for _, kept in world.pages]))
    # Of an inserted phrase and a word's share of what is inserted: 9.7 and 4.6 characters.
    expected = {"clean": 1, "noisy": 0.5, "replaced-20": 0.8, "replaced-40": 0.6}
    expected |= {"inserted-20": 4.6 / (4.6 + 0.2 * 9.7), "inserted-40": 4.6 / (4.6 + 0.4 * 9.7)}
    assert share == pytest.approx(expected[name], abs=0.12)


def _words(page: str) -> list[tuple[str, int]]:
    found, at = [], 0
    for word in page.split(" "):
        found.append((word, at))
        at += len(word) + 1
    return found


@pytest.mark.slow
def test_oracle_and_judge_run_in_a_tiny_world(corpus: Path, tmp_path: Path) -> None:
    name = "replaced-40"
    world = TinyWorld(tmp_path / name, [corpus], text_worlds.SPOILS[name], 1)
    runs = methods.RUNS[name]
    chosen = ("student", "cpt", "oracle", "random-kept", "fine-small__share")
    for run in chosen:
        methods.do(world, run, runs[run], 3)
    results = methods.collect(world, runs)
    assert set(results) == set(chosen)
    row = results["cpt"][3]
    assert row["nats_per_token"] == pytest.approx(
        np.mean([row[f"nats_fifth_{number}"] for number in range(1, 6)]), rel=0.05
    )
    assert 0 <= row["top1"] <= 1
    assert (
        methods.paired(results)["oracle"][3]["top1"] == results["oracle"][3]["top1"] - row["top1"]
    )
    page, is_kept = world.pages[0]
    found = Store(world.need("oracle_losses", 0)).segments(page)
    assert found is not None
    (segment,) = found
    for (begin, end), loss in zip(segment.spans, segment.losses, strict=True):
        assert (loss < 1e6) == is_kept[begin:end].all()
    state = json.loads((world.seed_dir(3) / "oracle" / "trainer_state.json").read_text())
    share = [log["selected_fraction"] for log in state["log_history"] if "selected_fraction" in log]
    assert share == pytest.approx([world.kept_share], abs=0.05)


@pytest.mark.parametrize(("problem", "at"), [("How?\nb", 4), ("How\nb?\n\nc d", 6)])
def test_answers_are_what_follows_the_question(
    problem: str, at: int, corpus: Path, tmp_path: Path
) -> None:
    """Of a model without preferences every token costs the same."""
    world = TinyWorld(tmp_path / "clean", [corpus], text_worlds.SPOILS["clean"], 1)
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / STUDENT_TOKENIZER)
    model = text_worlds.make_model(len(tokenizer), 8, 1)
    torch.nn.init.zeros_(model.model.embed_tokens.weight)
    for saved in (model, tokenizer):
        saved.save_pretrained(tmp_path / "model")
    texts = ["a b c", problem]
    found = text_worlds.judge_text(tmp_path / "model", texts, texts[1:], world.documents[1])
    uniform = np.log(len(tokenizer))
    assert found["nats_per_token"] == pytest.approx(uniform)
    answer = tokenizer(problem, add_special_tokens=False, return_offsets_mapping=True)
    after = sum(start >= at for start, _ in answer["offset_mapping"])
    assert found["answer_nats_per_character"] == pytest.approx(
        after * uniform / (len(problem) - at)
    )


@pytest.mark.parametrize(("module", "examples"), [(methods, 2), (text_worlds, 1)])
def test_examples_of_tables_hold(module: ModuleType, examples: int) -> None:
    results = doctest.testmod(module)
    assert (results.failed, results.attempted) == (0, examples)


@pytest.fixture
def solved(tmp_path: Path) -> Path:
    """Problems as GSM8K's, of the demo's world."""
    path, rng = tmp_path / "solved.jsonl", Random(0)
    items = [demo_world.problem(rng) for _ in range(250)]
    texts = (f"{x.question}\n{x.steps[0]} is it.\nThe answer is {x.answer}." for x in items)
    demo_world.write_jsonl(path, texts)
    return path


def problem_talks(path: Path, solved: Path, share: float) -> conversations.ProblemTalks:
    tokenizers = [ASSETS / STUDENT_TOKENIZER, ASSETS / TEACHER]
    return conversations.ProblemTalks(path, share, solved, [solved], tokenizers)


def test_spoilt_characters_of_answers_are_known(solved: Path, tmp_path: Path) -> None:
    world, right = (problem_talks(tmp_path, solved, share) for share in (1.0, 0.0))
    kinds = set()
    for talk, before in zip(world.talks(0), right.talks(0), strict=True):
        assert before.is_spoilt is None
        assert len(talk.is_spoilt) == len(talk.answer)
        kept = "".join(np.array([*talk.answer])[~talk.is_spoilt])
        letters = re.sub(r"\d", "", before.answer)
        is_last = letters.endswith(f"\n{kept}")
        assert kept == letters or is_last
        kinds.add(is_last)
    assert kinds == {True, False}


@pytest.mark.slow
def test_conversations_are_compared_at_their_tiniest_size(
    solved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = ("--max_length=128", "--max_steps=1", "--global_batch_tokens=512")
    for name, options in {
        "sizes": tiny,
        "options": (*tiny, "--student_chat_template=plain"),
    }.items():
        monkeypatch.setattr(conversations.ProblemTalks, name, options)
    monkeypatch.setattr(demo_world, "HELD_OUT_PROBLEMS", 8)
    monkeypatch.setattr(conversations, "_TOLD", 20)
    monkeypatch.setattr(conversations.ProblemTalks, "held_out_problems", 8)
    monkeypatch.setattr(conversations.ProblemTalks, "page_problems", 40)
    for name in ("first_steps", "teacher_steps"):
        monkeypatch.setattr(conversations.ProblemTalks, name, 1)
    monkeypatch.setattr(
        method_worlds, "BASE_OPTIONS", ("--max_steps=1", "--global_batch_tokens=512")
    )
    runs = ["--runs", "student", "teacher", "cpt", "share"]
    files = ["--problems", str(solved), "--texts", str(solved), "--tokenizers"]
    files += [str(ASSETS / STUDENT_TOKENIZER), str(ASSETS / TEACHER)]
    given = ["--output_dir", str(tmp_path / "runs"), "--seeds=7", "--demo_steps=2"]
    conversations.main([*given, *files, *runs])
    read = set()
    for case in ("demo-2/spoilt", "demo-2/neutral", "gsm8k/spoilt", "gsm8k/neutral"):
        directory = tmp_path / "runs" / case
        found = json.loads((directory / "results.json").read_text())["runs"]
        assert set(found) == set(runs[1:])
        for name in ("cpt", "share"):
            state = json.loads((directory / "seed7" / name / "trainer_state.json").read_text())
            log, *_ = (log for log in state["log_history"] if "selected_fraction" in log)
            assert (log["selected_fraction"] == 1) == (name == "cpt")
            read.add((case, log["student_loss_nats"]))
        assert (directory / "seed7" / conversations.SPOILT_FILE).exists() == ("spoilt" in case)
    # All methods of a case have read the same.
    assert len(read) == 4
    # The demo's teacher knows which answers are right, and the student does not yet.
    told = json.loads((tmp_path / "runs/demo-2/spoilt/seed7/spoilt.json").read_text())
    assert told["teacher"]["spoilt"] > 3 * told["teacher"]["kept"]
