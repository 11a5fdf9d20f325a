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
from vocagnolm.io import ASSETS

ROOT = Path(__file__).resolve().parents[2]
TOKENS = 3 * 4096
WORDS = 50  # in a document


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
    assert real_results.answers_cell(equal, equal, "svamp") == "33.3"
    # Over both seeds, the items gain 1, 1 and -1 of 2 answers. A draw may have only the last item,
    # or only the others.
    cell = real_results.answers_cell(ours, equal, "svamp")
    assert cell == "50.0 (+16.7: -50.0 to +50.0)"
