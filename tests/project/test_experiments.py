"""The experiments at their tiniest size: real documents, spoilt or not, and conversations."""

from __future__ import annotations

import argparse
import json
import sys
from itertools import chain
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer
from world import write_pages

from benchmarks.experiments import (
    conversations,
    forgetting,
    methods,
    pool,
    pool_results,
    rank,
    real,
    real_pages,
    real_results,
    worlds,
)
from vocagnolm.demo import run as demo_run
from vocagnolm.demo import world as demo_world
from vocagnolm.demo.methods import TEACHER
from vocagnolm.shell.io import ASSETS
from vocagnolm.store.format import Store
from vocagnolm.store.rank import SCORES

pytestmark = pytest.mark.processes


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Numbered documents, of which every second one is a problem."""
    path, rng = tmp_path / "corpus.jsonl", Random(0)
    words = "one two three four five six seven eight nine ten".split()
    rows = []
    for number in range(120):
        body = " ".join(rng.choices(words, k=60))
        row = {"text": f"How many {number}?\n{body}", "source": "x/train/1" * (number % 2)}
        rows.append(json.dumps(row))
    path.write_text("\n".join(rows))
    return path


class TinyWorld(worlds.TextWorld):
    """The same code, at a size that teaches nothing."""

    longer_steps = first_steps = 1
    options = ("--max_length=64", "--global_batch_tokens=256", "--max_steps=2")
    held_out_documents, page_documents = 10, 40


@pytest.mark.parametrize("name", worlds.SPOILS)
def test_pages_know_what_is_as_it_was(name: str, corpus: Path, tmp_path: Path) -> None:
    world = TinyWorld(tmp_path, [corpus], worlds.SPOILS[name])
    originals = world.documents[1][: world.page_documents]
    for (page, is_kept), original in zip(world.pages, originals, strict=True):
        assert len(is_kept) == len(page)
        words, at = [], 0
        for word in page.split(" "):
            if is_kept[at : at + len(word)].all():
                words.append(word)
            at += len(word) + 1
        left = iter(original.split(" "))
        assert name == "noisy" or all(word in left for word in words)
    share = np.mean(np.concatenate([kept for _, kept in world.pages]))
    # An inserted phrase has about 9.7 characters, and a word 4.6.
    expected = {"clean": 1, "noisy": 0.5, "inserted-40": 4.6 / (4.6 + 0.4 * 9.7)}
    assert share == pytest.approx(expected[name], abs=0.12)


@pytest.mark.slow
def test_oracle_and_judge_run_in_a_tiny_world(corpus: Path, tmp_path: Path) -> None:
    name = "inserted-40"
    world = TinyWorld(tmp_path / name, [corpus], worlds.SPOILS[name])
    runs = methods.RUNS[name]
    chosen = ("student", "cpt", "oracle", "random-kept", "fine-small__share")
    for run in chosen:
        methods.do(world, run, runs[run], 3)
    assert set(methods.collect(world, runs)) == set(chosen)
    page, is_kept = world.pages[0]
    stored = Store(world.need("oracle_losses", 0)).document(page)
    assert stored is not None
    for (begin, end), loss in zip(stored.spans, stored.losses, strict=True):
        assert (loss < 1e6) == is_kept[begin:end].all()


@pytest.mark.parametrize(("problem", "at"), [("How?\nb", 4), ("How\nb?\n\nc d", 6)])
def test_answers_are_what_follows_the_question(problem: str, at: int, tmp_path: Path) -> None:
    """For a model without preferences every token costs the same."""
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / demo_run.STUDENT_TOKENIZER)
    model = worlds.make_model(len(tokenizer), 8, 1)
    torch.nn.init.zeros_(model.model.embed_tokens.weight)
    for saved in (model, tokenizer):
        saved.save_pretrained(tmp_path / "model")
    texts = ["a b c", problem]
    found = worlds.judge_text(tmp_path / "model", texts, texts[1:], texts)
    uniform = np.log(len(tokenizer))
    assert found["nats_per_token"] == pytest.approx(uniform)
    answer = tokenizer(problem, add_special_tokens=False, return_offsets_mapping=True)
    after = sum(start >= at for start, _ in answer["offset_mapping"])
    expected = after * uniform / (len(problem) - at)
    assert found["answer_nats_per_character"] == pytest.approx(expected)


@pytest.fixture
def tiny_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo's models, hardly trained."""
    monkeypatch.setattr(worlds.DemoWorld, "options", ("--max_steps=2", "--global_batch_tokens=512"))
    monkeypatch.setattr(worlds.DemoWorld, "steps", 2)
    monkeypatch.setattr(demo_world, "HELD_OUT_PROBLEMS", 8)
    monkeypatch.setattr(demo_run, "BASE_OPTIONS", ("--max_steps=1", "--global_batch_tokens=512"))


@pytest.mark.slow
@pytest.mark.usefixtures("tiny_demo")
def test_conversations_are_compared_at_their_tiniest_size(tmp_path: Path) -> None:
    runs = ["--runs", "student", "teacher", "share"]
    conversations.main(["--output_dir", str(tmp_path), "--seeds=7", *runs])
    for case in conversations.CASES:
        found = json.loads((tmp_path / case / "results.json").read_text())["runs"]
        # The teacher answers in its own template; the student has not begun to.
        assert found["teacher"]["7"]["accuracy"] > 0.5 > found["student"]["7"]["accuracy"]


def test_area_under_the_curve_equals_a_count_of_pairs() -> None:
    rng = np.random.default_rng(0)
    # Few values, so that many pairs are equal.
    scores, is_right = rng.integers(0, 6, 60).astype(float), rng.random(60) < 0.4
    won = []
    for right in scores[is_right]:
        for wrong in scores[~is_right]:
            won.append(float(right > wrong) + 0.5 * float(right == wrong))
    assert rank.area_under_curve(scores, is_right) == pytest.approx(np.mean(won))


@pytest.mark.slow
@pytest.mark.usefixtures("tiny_demo")
def test_documents_are_ranked_at_their_tiniest_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rank.main([f"--output_dir={tmp_path}", "--seeds=7", "--pages=60"])
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if "|" in line]
    areas = {row[0].strip(): row[1:] for row in rows}
    assert areas.keys() >= {*SCORES, *rank.TRIALS}
    # The teacher knows right from wrong; its store does not depend on the student.
    (on_problems,) = {float(areas["teacher"][column]) for column in (1, 3, 5)}
    assert on_problems > 0.9


# Pretrained models


@pytest.fixture
def corpora(tmp_path: Path) -> Path:
    """Documents that name their kind and their number."""
    directory = tmp_path / "corpora"
    directory.mkdir()
    separators = dict(real_pages.PROBLEMS.values())
    for name in chain(separators, *real_pages.ARTICLES.values()):
        texts = []
        for number in range(150):
            words = f"{name} {number} " * 25
            texts.append(f"What is {name} {number}?{separators.get(name, ' ')}{words}")
        write_pages(directory / name, texts)
    return directory


def test_pages_are_not_held_out_and_only_problems_are_changed(corpora: Path) -> None:
    documents = real_pages.read_documents(corpora)
    held_out = set().union(*real_pages.held_out_texts(documents).values())
    pages = {}
    for world in real_pages.WORLDS:
        pages[world] = real_pages.make_pages(world, documents, 2048, lambda text: len(text.split()))
        assert not held_out & set(pages[world])
    changed = set()
    for noisy, clean in zip(pages["noisy"], pages["clean"], strict=True):
        if noisy != clean:
            assert noisy.split("?")[0] == clean.split("?")[0]
            changed.add(clean.split()[2])
    assert changed == {*dict(real_pages.PROBLEMS.values())}


@pytest.fixture
def student(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny student, judged by two documents of each kind."""
    monkeypatch.setattr(real_pages, "HELD_OUT", 2)
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / demo_run.STUDENT_TOKENIZER)
    path = tmp_path / "student"
    worlds.make_model(len(tokenizer), 8, 1).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def arguments_of(student: Path, corpora: Path, output_dir: Path) -> argparse.Namespace:
    """Return what the experiments on pools need, with runs of two steps."""
    return argparse.Namespace(
        output_dir=output_dir,
        student=student,
        teacher=ASSETS / TEACHER,
        corpora=corpora,
        tokens=2 * pool.STEP_TOKENS,
        learning_rate=0.01,
    )


@pytest.mark.parametrize("junk", [50, 75])
def test_pools_have_their_share_of_each_junk(
    junk: int, student: Path, corpora: Path, tmp_path: Path
) -> None:
    pools = pool.Pools(arguments_of(student, corpora, tmp_path / "runs"))
    pages = pools.pool(junk, 3)
    tokens: dict[str, int] = {}
    for page in pages:
        tokens[page["source"]] = tokens.get(page["source"], 0) + pools.count(page["text"])
        assert page["good"] == (page["source"] in real_pages.KINDS)
    total = sum(tokens.values())
    # A page more than its share, of at most 1,500 characters.
    assert total == pytest.approx(pool.POOL * pools.tokens, abs=6 * 1500)
    for kind in pool.JUNK:
        assert tokens[kind] / total == pytest.approx(junk / 500, abs=0.1)
    assert pages != pools.pool(junk, 4)
    oracle = pools.part(junk, 3, "oracle")
    assert all(page["good"] for page in oracle)
    assert sum(page["tokens"] for page in oracle) >= pools.tokens
    held_out = set().union(*real_pages.held_out_texts(pools.documents).values())
    assert not held_out & {page["text"] for page in pages}


def test_a_rule_is_measured_against_the_line_through_equal_weights() -> None:
    points = [(1.0, 5.0), (2.0, 4.0), (4.0, 8.0)]
    for x, y in ((1.0, 5.0), (1.5, 4.5), (3.0, 6.0), (4.0, 8.0)):
        assert pool_results.on_line(points, x) == pytest.approx(y)
    assert pool_results.on_line(points, 0.9) is None


@pytest.mark.slow
def test_pools_and_forgetting_at_their_tiniest_size(
    student: Path,
    corpora: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(pool, "MAX_LENGTH", 512)
    pools = pool.Pools(arguments_of(student, corpora, tmp_path))
    for arm in (
        "start",
        "random",
        "again",
        "oracle_again",
        "oracle",
        "auc",
        "excess",
        "student_reversed",
        "accept",
    ):
        pools.finish(50, 3, arm)
    rows = {row["arm"]: row for row in pool.read_rows(tmp_path / "pool.jsonl")}
    assert rows["random"]["shares"] == rows["again"]["shares"] != rows["excess"]["shares"]
    assert rows["random"]["nats"] != rows["again"]["nats"]
    # Over all junk, it is a mean of those against each kind.
    for score, (area, *_) in rows["auc"]["auc"].items():
        by_kind = rows["auc"]["auc_by_kind"][score].values()
        assert min(by_kind) - 0.001 <= area <= max(by_kind) + 0.001
    runs = forgetting.Forgetting(arguments_of(student, corpora, tmp_path / "other"))
    monkeypatch.setattr(forgetting, "EPOCH_TOKENS", 2000)
    for world, rule in (("noisy", "const"), ("noisy", "accept"), ("epochs", "oracle")):
        runs.run_once(world, rule, 3, 0.01)
        runs.run_once(world, rule, 3, 0.01)
    rows_of_epochs = pool.read_rows(tmp_path / "other" / "forgetting.jsonl")
    assert len(rows_of_epochs) == 3
    assert len(rows_of_epochs[2]["epochs"]) == forgetting.EPOCHS
    assert not list(tmp_path.rglob("checkpoint-*"))
    printed = ""
    for directory in (tmp_path, tmp_path / "other"):
        monkeypatch.setattr(sys, "argv", ["pool_results", f"--directory={directory}"])
        pool_results.main()
        printed += capsys.readouterr().out
    assert "Ceiling" in printed
    assert f"| {pool_results.TITLES['oracle']} (1) | 100 % |" in printed
    assert "| accept (1) | " in printed
    assert "epoch 6" in printed


@pytest.mark.slow
def test_pretrained_models_are_compared_at_their_tiniest_size(
    student: Path, corpora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(real, "RESULTS", tmp_path / "real.jsonl")
    argv = ["real", f"--output_dir={tmp_path / 'runs'}", f"--student={student}", "--seeds=3"]
    argv += [f"--teacher={ASSETS / TEACHER}", f"--corpora={corpora}", f"--tokens={3 * 4096}"]
    argv += ["--learning_rate=0.01", "--worlds=noisy", "--rules", "const", "accept", "shuffled"]
    monkeypatch.setattr(sys, "argv", argv)
    real.main()
    rows = {row["rule"]: row for row in real.read_results()}
    assert list(rows) == ["const", "accept", "shuffled"]
    # The first step has the same weights in another order; later ones have another student.
    assert rows["shuffled"]["mean_weight"][0] == rows["accept"]["mean_weight"][0]
    assert rows["shuffled"]["nats"] != rows["accept"]["nats"]
    # No models are left over, and nothing runs again.
    assert not list((tmp_path / "runs").rglob("model.safetensors"))
    real.main()
    assert len(real.read_results()) == 3


def test_answers_are_compared_by_item_and_seed() -> None:
    ours = {"0": "110", "1": "100"}
    equal = {"0": "100", "1": "001"}
    by_rule = {"accept": {"svamp": ours}, "const": {"svamp": equal}}
    assert real_results.answers_cell(by_rule, "accept", "svamp") == "50.0 (+16.7)"
    # Over both seeds, the items gain 1, 1 and -1 of 2 answers. A draw may have only the last item,
    # or only the others.
    gain = real_results.answers_gain(ours, equal, "svamp")
    assert gain == pytest.approx((100 / 6, -50, 50))
