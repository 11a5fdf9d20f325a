"""What `rank` keeps of each source, and how it judges scores by labels."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from store_world import random_store
from transformers import PreTrainedTokenizerFast

from vocagnolm import __main__
from vocagnolm.corpus import load_corpus, load_values
from vocagnolm.store.choice import good_labels, judged, judgement, kept_by_source, one_line
from vocagnolm.store.rank import SCORES

OPTIONS = {"split": "train", "text_column": None, "config_name": None}


# Labels


def slow_auc(values: Sequence[float], good: Sequence[float]) -> float:
    """The share of pairs of a good and another document in the right order; ties count half."""
    right = pairs = 0.0
    for value, is_good in zip(values, good, strict=True):
        for other, other_is_good in zip(values, good, strict=True):
            if is_good and not other_is_good:
                pairs += 1
                right += (value > other) + (value == other) / 2
    return right / pairs


def slow_precision(values: Sequence[float], good: Sequence[float], kept: int) -> float:
    """The share of good documents in the best; those that are level share the last places."""
    total = 0.0
    for value, is_good in zip(values, good, strict=True):
        better = sum(other > value for other in values)
        level = sum(other == value for other in values)
        total += is_good * min(max(kept - better, 0) / level, 1)
    return total / kept


@pytest.mark.parametrize("levels", [3, 10, 1000])
def test_auc_and_precision_equal_loops_over_pairs(levels: int) -> None:
    rng = np.random.default_rng(levels)
    good = (rng.random(60) < 0.4).astype(float)
    values = np.round(rng.random(60) + 0.3 * good, 3) // (1 / levels)
    for kept in (1, 20, 60):
        (auc, low, high), (precision, lowest, highest) = judged(values, good, kept)
        assert auc == pytest.approx(slow_auc(values, good), abs=1e-12)
        assert precision == pytest.approx(slow_precision(values, good, kept), abs=1e-12)
        assert low < auc < high
        assert lowest <= precision <= highest


@pytest.mark.slow
def test_intervals_cover_the_truth_in_nineteen_of_twenty_samples() -> None:
    rng = np.random.default_rng(0)
    covered = np.zeros(2)
    for _ in range(300):
        good = (rng.random(200) < 0.5).astype(float)
        # Good documents have a larger value in three of four pairs: P(N(d, 1) > N(0, 1)).
        values = rng.normal(size=200) + 0.9539 * good
        # Half of the population is above the middle between both means, .6833 of the good ones.
        for column, truth in enumerate((0.75, 0.6833)):
            _, low, high = judged(values, good, 100)[column]
            covered[column] += low < truth < high
    # Three standard errors of 300 samples are .038.
    assert (np.abs(covered / 300 - 0.95) < 0.04).all()


def test_many_documents_are_judged_in_seconds_as_exactly() -> None:
    rng = np.random.default_rng(0)
    good = (rng.random(100_000) < 0.3).astype(float)
    values = rng.normal(size=100_000) + 0.3 * good
    (auc, low, high), _ = judged(values, good, 50_000)
    ranks = values.argsort().argsort() + 1.0
    count = good.sum()
    exact = (ranks[good == 1].sum() - count * (count + 1) / 2) / count / (100_000 - count)
    assert auc == pytest.approx(exact, abs=1e-9)
    # The standard error of Hanley and McNeil is about .002.
    assert low < auc < high < low + 0.01


@pytest.mark.parametrize("share", [0.3, None])
def test_judgement_is_of_labelled_documents_and_of_the_end_that_is_best(
    share: float | None,
) -> None:
    rng = np.random.default_rng(1)
    good = rng.choice([0.0, 1.0, np.nan], 50)
    columns = {name: np.round(rng.random(50) + (good == 1) / 5, 1) for name in ("up", "down")}
    lines = list(judgement(columns, {"up": True, "down": False}, good, share))
    assert lines == list(judgement(columns, {"up": True, "down": False}, good, share))
    labelled = ~np.isnan(good)
    kept = math.ceil(0.3 * labelled.sum())
    for line, name, best, sign in zip(
        lines[2:], ("up", "down"), ("largest", "smallest"), (1, -1), strict=True
    ):
        values = sign * columns[name][labelled]
        words = [name, best, f"{slow_auc(values, good[labelled]):.3f}"]
        if share:
            words.append(f"{slow_precision(values, good[labelled], kept):.3f}")
        assert re.sub(r"\[.*?\]", "", line).split() == words


def test_interval_of_few_labels_leaves_out_resamples_of_one_kind() -> None:
    (auc, low, high), _ = judged(np.arange(4.0), np.array([1.0, 0, 0, 1]), 2)
    assert low <= auc <= high


# Sources


def test_shares_of_sources_are_those_counted_by_hand() -> None:
    sources = ["b", "a", "b", "b", "a"]
    kept = np.array([True, False, True, False, True])
    rows = [line.split() for line in kept_by_source(sources, np.array([10, 20, 30, 0, 40]), kept)]
    assert rows[1:] == [
        ["b", "3", "66.7%", "40", "100.0%"],
        ["a", "2", "50.0%", "60", "66.7%"],
        ["all", "5", "60.0%", "100", "80.0%"],
    ]


def test_small_sources_are_counted_together() -> None:
    sources = ["large"] * 3 + [f"s{number}" for number in range(100)]
    lines = list(kept_by_source(sources, np.ones(103, int), np.ones(103, bool)))
    assert len(lines) == 15
    assert lines[-2].split()[:3] == ["89", "others", "89"]


def test_document_is_shown_in_a_line_that_controls_no_terminal() -> None:
    assert one_line("a\n\n\x1b[31mb\u202e  c", 80) == "a [31mb c"
    assert one_line("x" * 100, 10) == "x" * 9 + "…"


@pytest.mark.parametrize(
    ("labels", "good", "expected"),
    [
        (["true", None, "false"], None, [1, None, 0]),
        (["True", "False", None], None, [1, 0, None]),
        (["1", "0", "0"], None, [1, 0, 0]),
        (["1.0", "0.0", "NaN"], None, [1, 0, None]),
        (["fine", "bad", "", "NaN"], "fine", [1, 0, None, None]),
        (["0", "1", "2"], "0", [1, 0, 0]),
    ],
)
def test_labels_say_which_documents_are_good(
    labels: list[str | None], good: str | None, expected: list[float | None]
) -> None:
    np.testing.assert_array_equal(good_labels(labels, good), np.array(expected, float))


@pytest.mark.parametrize("labels", [["true", "false", "unsure"], ["1", "1", None], ["0"], []])
def test_labels_that_do_not_say_which_documents_are_good(labels: list[str | None]) -> None:
    with pytest.raises(ValueError, match="label_column"):
        good_labels(labels, None)


def test_scores_are_not_judged_by_labels_of_one_kind() -> None:
    columns = {"excess": np.zeros(3)}
    (line,) = judgement(columns, {"excess": True}, np.array([1, np.nan, 1]), 0.5)
    assert "both kinds" in line


# Columns beside the text


def test_values_of_a_dataset_of_the_hub_are_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    table = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1, None]})
    monkeypatch.setattr("vocagnolm.corpus._read_hub", lambda *_, **options: table)
    assert load_values("some/pages", "label", **OPTIONS) == ["1", None]
    assert load_values("some/pages", None, **OPTIONS) == ["some/pages"] * 2


def write_rows(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_values_stay_beside_their_rows_whatever_is_skipped(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    (folder / "sub").mkdir(parents=True)
    table = {"text": ["t", None, "u"], "label": [True, False, None]}
    datasets.Dataset.from_dict(table).to_parquet(folder / "a.parquet")
    rows = [{"text": "v", "label": 1}, 5, {"text": ""}, {"text": "w", "label": "yes"}]
    write_rows(folder / "sub/b.jsonl", rows)
    (folder / "sub/empty.jsonl").touch()
    corpus = load_corpus(str(folder), **OPTIONS)
    assert corpus["text"] == ["t", None, "u", "v", None, None, "w"]
    values = load_values(str(folder), "label", **OPTIONS)
    assert values == ["true", "false", None, "1", None, None, "yes"]
    files = load_values(str(folder), None, **OPTIONS)
    assert files == ["a.parquet"] * 3 + ["sub/b.jsonl"] * 4
    assert load_values(str(folder / "a.parquet"), None, **OPTIONS) == ["a.parquet"] * 3
    part = {**OPTIONS, "split": "train[2:5]"}
    assert load_values(str(folder), "label", **part) == [None, "1", None]
    datasets.Dataset.from_dict(table).save_to_disk(str(tmp_path / "saved"))
    assert load_values(str(tmp_path / "saved"), "label", **OPTIONS) == ["true", "false", None]
    # A table may lack the column, but not all of them.
    datasets.Dataset.from_dict({"text": ["x"]}).to_parquet(folder / "c.parquet")
    assert load_values(str(folder), "label", **OPTIONS) == [*values[:3], None, *values[3:]]
    for path in (folder / "c.parquet", tmp_path / "saved"):
        with pytest.raises(ValueError, match="label_column absent"):
            load_values(str(path), "absent", "label_column", **OPTIONS)


# The command


@pytest.fixture
def command(tmp_path: Path, tokenizers_by_family: dict[str, PreTrainedTokenizerFast]) -> list[str]:
    """Two stores of a corpus with labels and sources. Two of its rows are not documents."""
    rows: list[dict[str, Any]] = [{"text": ""}, {"text": None, "good": True}]
    texts = [f"text {number} of a page" for number in range(40)]
    for number, text in enumerate(texts):
        rows.append({"text": text, "good": number % 3 == 0, "site": "ab"[number % 2]})
        rows[-1]["weight"] = number / 2
    write_rows(tmp_path / "pages.jsonl", rows)
    argv = ["rank", f"--dataset={tmp_path / 'pages.jsonl'}", f"--output_dir={tmp_path / 'out'}"]
    for seed, (role, family) in enumerate([("student", "metaspace"), ("teacher", "byte_level")]):
        random_store(tmp_path / role, texts, tokenizers_by_family[family], seed=seed)
        argv.append(f"--{role}_losses={tmp_path / role}")
    return argv


def ranks(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "out/ranks.jsonl").open()]


def test_rank_shows_what_it_would_keep_and_then_keeps_it(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    choice = ["--keep=0.25", "--group_column=site", "--by=student", "--reverse"]
    assert __main__.main([*command, *choice, "--dry_run"]) == 0
    shown = capsys.readouterr().out
    assert not (tmp_path / "out/kept.jsonl").exists()
    assert __main__.main([*command, *choice]) == 0
    assert shown.count(", not written") == 1
    assert capsys.readouterr().out == shown.replace(", not written", "")
    rows = sorted(ranks(tmp_path), key=lambda row: -row["student"])
    kept = [json.loads(line) for line in (tmp_path / "out/kept.jsonl").open()]
    assert [row["document"] for row in kept] == sorted(row["document"] for row in rows[:10])
    # Training reads the weights of documents, too.
    assert all(row["weight"] == (row["document"] - 2) / 2 for row in kept)
    assert kept[0].keys() == {"document", "text", "weight"}
    for remainder, site in enumerate("ab"):
        of_site = [row for row in rows if row["document"] % 2 == remainder]
        of_kept = [row for row in rows[:10] if row in of_site]
        share = sum(row["tokens"] for row in of_kept) / sum(row["tokens"] for row in of_site)
        (line,) = [line.split() for line in shown.splitlines() if line.startswith(f"{site} ")]
        assert line[1:3] == ["20", f"{len(of_kept) / 20:.1%}"]
        assert line[4] == f"{share:.1%}"
    examples = [line for line in shown.splitlines() if " of a page" in line]
    assert [line.split()[:3] for line in examples] == [
        [f"{row['student']:.3f}", "text", str(row["document"] - 2)]
        for row in [*rows[:10], *rows[-10:]]
    ]
    assert f"the last: student {rows[9]['student']:.3f}" in shown


def test_rank_judges_every_score_by_labels(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    choice = ["--keep=0.5", "--by=teacher", "--reverse"]
    assert __main__.main([*command, *choice, "--label_column=good"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert "40 labelled documents, 14 good" in "\n".join(out)
    rows = ranks(tmp_path)
    good = [float((row["document"] - 2) % 3 == 0) for row in rows]
    means = [f"{name} {np.mean([row[name] for row in rows]):.3f}" for name in SCORES]
    assert f"means: {', '.join(means)}" in out
    for name in SCORES:
        # Only the score of the choice is reversed.
        sign = -1 if name == "student" else 1
        values = [sign * row[name] for row in rows]
        (line,) = [line for line in out if line.startswith(f"{name:8} ")]
        assert f" {slow_auc(values, good):.3f} [" in line
        assert f" {slow_precision(values, good, 20):.3f} [" in line
