"""The experiment on pretrained models: its pages, and its runs with untrained models."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from benchmarks.experiments import real, real_pages, real_results
from benchmarks.experiments.worlds import make_model
from vocagnolm.demo.methods import TEACHER
from vocagnolm.demo.run import STUDENT_TOKENIZER
from vocagnolm.shell.io import ASSETS

ROOT = Path(__file__).resolve().parents[2]
TOKENS = 3 * 4096
WORDS = 50  # in a document
# What the runs of the curves have in common.
GUIDED = {"teacher": "qwen2.5-coder-1.5b", "learning_rate": 2e-4}


@pytest.fixture
def corpora(tmp_path: Path) -> Path:
    """Documents that name their kind and their number."""
    directory = tmp_path / "corpora"
    directory.mkdir()
    separators = dict(real_pages.PROBLEMS.values())
    names = [*separators, *(name for names in real_pages.ARTICLES.values() for name in names)]
    for name in names:
        with (directory / name).open("w") as file:
            for number in range(150):
                words = f"{name} {number} " * (WORDS // 2)
                text = f"What is {name} {number}?{separators.get(name, ' ')}{words}"
                file.write(json.dumps({"text": text}) + "\n")
    return directory


def _count(text: str) -> int:
    return len(text.split())


def test_worlds_share_their_clean_pages_and_none_is_held_out(corpora: Path) -> None:
    documents = real_pages.read_documents(corpora)
    held_out = set().union(*real_pages.held_out_texts(documents).values())
    pages = {
        world: real_pages.make_pages(world, documents, 2048, _count) for world in real_pages.WORLDS
    }
    assert not held_out & set().union(*pages.values())
    kinds = [page.split()[2] in dict(real_pages.PROBLEMS.values()) for page in pages["clean"]]
    changed = [noisy != clean for noisy, clean in zip(pages["noisy"], pages["clean"], strict=True)]
    # Only problems get another solution, and only about two in five.
    assert not any(
        change for change, is_problem in zip(changed, kinds, strict=True) if not is_problem
    )
    assert sum(changed) == pytest.approx(real_pages.WRONG_SHARE * sum(kinds), abs=12)
    for noisy, clean, change in zip(pages["noisy"], pages["clean"], changed, strict=True):
        if change:
            assert noisy.split("?")[0] == clean.split("?")[0]
            assert set(noisy.split("?")[1].split()) != set(clean.split("?")[1].split())
    half = [page in pages["clean"] for page in pages["mixed"]]
    assert sum(half) == pytest.approx(len(half) / 2, abs=1)
    assert sum(map(_count, pages["clean"][:-1])) < 2048


@pytest.mark.slow
@pytest.mark.processes
def test_rules_are_compared_at_their_tiniest_size(
    corpora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(real, "RESULTS", tmp_path / "real.jsonl")
    monkeypatch.setattr(real_pages, "HELD_OUT", 2)
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / STUDENT_TOKENIZER)
    student = tmp_path / "student"
    make_model(len(tokenizer), 8, 1).save_pretrained(student)
    tokenizer.save_pretrained(student)
    argv = ["real", f"--output_dir={tmp_path / 'runs'}", f"--student={student}", "--seeds=3"]
    argv += [f"--teacher={ASSETS / TEACHER}", f"--corpora={corpora}", f"--tokens={TOKENS}"]
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
    (results,) = real_results.read_results(tmp_path / "real.jsonl").values()
    (difference,) = results.differences("noisy", "accept", "math")
    assert difference == rows["accept"]["nats"]["math"] - rows["const"]["nats"]["math"]
    assert "acceptance, shuffled" in real_results.rules_table(results)


def test_pages_show_the_results_as_they_are() -> None:
    tables = real_results.page_tables(real_results.picked())
    for page, table in tables.items():
        assert "| acceptance (" in table
        assert table in (ROOT / page).read_text(encoding="utf-8")
    results = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    assert real_results.guidance_table() in results
    assert real_results.rates_table() in results
    assert real_results.answers_table() in results


def test_answers_are_compared_by_item_and_seed() -> None:
    ours = {"0": "110", "1": "100"}
    equal = {"0": "100", "1": "001"}
    by_rule = {"accept": {"svamp": ours}, "const": {"svamp": equal}}
    assert real_results.answers_cell(by_rule, "accept", "svamp") == "50.0 (+16.7)"
    assert real_results.answers_cell(by_rule, "const", "svamp") == "33.3"
    assert real_results.answers_cell(by_rule, "accept", "mawps") == ""
    # Over both seeds, the items gain 1, 1 and -1 of 2 answers. A draw may have only the last item,
    # or only the others.
    gain = real_results.answers_gain(ours, equal, "svamp")
    assert gain == pytest.approx((100 / 6, -50, 50))


def test_loss_curves_have_the_seeds_of_runs_of_each_length() -> None:
    curves = real_results.loss_curves()
    for rule, label in real_results.CURVES.items():
        loss = curves["nats per character"][label]
        gain = curves["less equal weights"][label]
        assert loss.tokens[0] == gain["mean"][0] == 0
        for results in real_results.read_results().values():
            for row in results.runs("noisy", rule):
                if all(row[name] == GUIDED[name] for name in GUIDED):
                    (point,) = loss[loss.tokens == row["tokens"]].itertuples()
                    assert point.low <= real_results.nats(row) <= point.high
    paper = curves["less equal weights"]["the paper's: max, top 40 %"]
    differences = real_results.picked().differences("noisy", "paper")
    assert paper["mean"][1] == pytest.approx(sum(differences) / len(differences))
