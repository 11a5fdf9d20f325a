"""Which runs are seeds of one setting, and what their logs say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_results import edit_settings, entry, write_evaluation, write_json, write_run

from vocagnolm import method
from vocagnolm.report.comparison import compare
from vocagnolm.report.findings import findings
from vocagnolm.report.plots import bar_series, read_curves
from vocagnolm.report.trainings import METHODS, differing
from vocagnolm.run import parser
from vocagnolm.training.job import settings_of

PLAIN: dict[str, Any] = {"method": "cpt", "teacher": None}


def held_out(place: Path, loss: float, tokens: int = 99, **options: Any) -> Path:
    log = [entry(1, 1.0, eval_loss=loss, eval_tokens=tokens)]
    return write_run(place, log, student="s", **options)


# What may differ between seeds of one setting: a server turns 1.0 into 1, paths of models contain
# the seed, also below a directory of one seed that both share, and each seed has its own corpus.
OF_SEEDS: dict[str, tuple[object, object]] = {
    "rate": (1.0, 1),
    "student": ("/x/seed0/student", "/x/seed1/student"),
    "student_tokenizer": ("/x/seed0/student", "/x/seed0/student"),
    "dataset": (["/seed0/seed0/p", "/seed0/q"], ["/seed0/seed1/p", "/seed0/q"]),
    "teacher_losses": (
        [{"store": "/seed0", "teacher": "T"}],
        [{"store": "/seed1", "teacher": "T"}],
    ),
    "data_seed": (3, 4),
    "blocks": (7, 8),
    "teacher_losses_sha256": ("a", "b"),
    "teacher_hashes": (["a"], ["b"]),
    "student_hashes": ({"a": "b"}, {"a": "c"}),
    "evaluation": ({"documents": {"": ["a"]}}, {"documents": {"": ["b"]}}),
}


@pytest.mark.parametrize("name", OF_SEEDS)
def test_seeds_are_pooled_when_nothing_else_differs(name: str, tmp_path: Path) -> None:
    paths = []
    for seed, value in enumerate(OF_SEEDS[name]):
        paths.append(write_run(tmp_path / f"{seed}", [entry(1, 1.0)], seed=seed, **{name: value}))
    # A server gives the options in another order.
    settings = json.loads((paths[0] / "run.json").read_text())
    write_json(paths[0] / "run.json", dict(reversed(settings.items())))
    (runs,) = compare(paths).settings.values()
    assert len(runs) == 2


def test_seeds_are_not_pooled_when_a_path_has_another_number(tmp_path: Path) -> None:
    paths = []
    for seed in (0, 1):
        student = f"/x/seed{seed}3/student"
        paths.append(write_run(tmp_path / f"{seed}", [entry(1, 1.0)], seed=seed, student=student))
    assert len(compare(paths).settings) == 2


# Settings of seeds whose digests differ without a change of any document.
OTHER_DIGESTS: dict[str, list[dict[str, Any]]] = {
    "name has the seed": [{"dataset": ["/seed0/p"]}, {"dataset": ["/seed1/p"]}],
    "held out by the seed": [{"eval_fraction": 0.1}, {"eval_fraction": 0.1}],
    "no name": [{"dataset": []}, {"dataset": []}],
    "another tokenizer": [{"student": "/seed0/s"}, {"student": "/seed1/s"}],
}


@pytest.mark.parametrize("case", OTHER_DIGESTS)
def test_seeds_with_other_digests_are_pooled_where_the_seed_explains_them(
    case: str, tmp_path: Path
) -> None:
    paths = []
    for seed, (digest, options) in enumerate(zip("ab", OTHER_DIGESTS[case], strict=True)):
        options = {"corpus_digest": [digest], **options}
        paths.append(write_run(tmp_path / f"{seed}", [entry(1, 1.0)], seed=seed, **options))
    (runs,) = compare(paths).settings.values()
    assert differing(runs) == []


def test_runs_on_other_documents_of_one_name_are_told_apart(tmp_path: Path) -> None:
    """The file was written again between the second run and the third."""
    paths = []
    for name, seed, digest in (("a", 0, "x"), ("b", 1, "x"), ("c", 2, "y"), ("d", 0, "y")):
        options = {"seed": seed, "corpus_digest": [digest], **PLAIN}
        paths.append(write_run(tmp_path / name, [entry(1, 1.0)], **options))
    # Only a run without the teacher reads alike.
    paths.append(write_run(tmp_path / "guided", [entry(1, 1.0)], corpus_digest=["z"]))
    for order in (paths, paths[::-1]):
        settings = compare(order).settings
        labels = {name: sorted(run.label for run in runs) for name, runs in settings.items()}
        assert labels == {
            "CPT, corpus_digest x": ["a", "b"],
            "CPT, corpus_digest y": ["c", "d"],
            "VocAgnoLM, T": ["guided"],
        }


def test_repeated_run_is_not_a_seed_of_its_setting(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / name, [entry(1, 1.0)]) for name in ("run", "run2")]
    paths.append(write_run(tmp_path / "other seed", [entry(1, 1.0)], seed=1))
    first, again = compare(paths).settings.items()
    assert [run.label for run in first[1]] == ["run", "other seed"]
    assert [run.label for run in again[1]] == ["run2"]
    assert (first[0], again[0]) == ("VocAgnoLM, T", "VocAgnoLM, T, run2")


def test_settings_of_train_py_are_read(tmp_path: Path) -> None:
    argv = ["--teacher", "a/T1", "b/T2", "--use_cpu", "True", "--output_dir", str(tmp_path)]
    settings = settings_of(parser.parse([*argv, "--student", "s", "--dataset", "d"]))
    write_json(tmp_path / "run.json", settings)
    assert list(compare([tmp_path]).settings) == ["VocAgnoLM, T1 + T2"]
    assert set(method.METHODS[:-1]) == set(METHODS)


def test_teacher_is_named_by_stores_and_loss_is_that_of_the_last_step(tmp_path: Path) -> None:
    log = [entry(1, 1.0, eval_loss=3.0), entry(2, 1.0)]
    stores = [{"store": "/s", "teacher": "Qwen/Qwen2.5-Math-7B"}, {"teacher": "x/other"}]
    ((run,),) = compare([write_run(tmp_path, log, teacher_losses=stores)]).settings.values()
    assert run.eval_loss is None
    assert run.name == "VocAgnoLM, Qwen2.5-Math + other"


def test_curves_and_bars_are_means_over_the_seeds(tmp_path: Path) -> None:
    paths = []
    for seed, steps, correct in ((0, (1, 2, 3), 20), (2, (1, 2), 22)):
        log = [entry(step, step + seed) for step in steps]
        paths.append(write_run(tmp_path / f"{seed}", log, seed=seed))
        right = {"gsm8k": [idx < correct for idx in range(100)]}
        write_evaluation(paths[-1] / "evaluation", right)
    (curve,) = read_curves(compare(paths).settings)["loss on all tokens (nats)"].values()
    # Only one run has the third step.
    assert curve.to_numpy().tolist() == [[1000, 2, 1, 3], [2000, 3, 2, 4]]
    (bar,) = bar_series(compare(paths)).values()
    value, low, high = bar.loc["gsm8k"]
    assert (value, low, high) == pytest.approx((21, 21 - 2**0.5, 21 + 2**0.5))
    # Models that were asked differently are not averaged.
    edit_settings(paths[1] / "evaluation", "gsm8k", max_new_tokens=2)
    assert [bar.value["gsm8k"] for bar in bar_series(compare(paths)).values()] == [20, 22]


# Findings of held-out losses


def test_findings_hold_guided_runs_against_controls(tmp_path: Path) -> None:
    paths = [
        held_out(tmp_path / "guided", 8.683),
        held_out(tmp_path / "wider", 8.0, top_k=0.6),
        held_out(tmp_path / "plain", 8.197, **PLAIN),
    ]
    narrow, wide, missing = findings(compare(paths))
    assert "CPT is ahead of VocAgnoLM, T, top_k 0.4 by 0.486 nats" in narrow
    assert "VocAgnoLM, T, top_k 0.6 is ahead of CPT by 0.197 nats" in wide
    assert "--method random" in missing
    assert "--method cpt" not in missing
    # Without a control, the others are compared with the first.
    pair, _ = findings(compare(paths[:2]))
    assert "top_k 0.6 is ahead of VocAgnoLM, T, top_k 0.4 by 0.683 nats" in pair


def test_findings_pair_common_seeds(tmp_path: Path) -> None:
    paths = []
    # The last seed favors neither.
    losses = ((2.0, 2.2), (2.1, 2.4), (2.3, 2.2), (2.5, 2.5))
    for seed, (guided, plain) in enumerate(losses):
        student = f"/demo/seed{seed}/base"
        for name, loss, options in (("guided", guided, {}), ("plain", plain, PLAIN)):
            log = [entry(1, 1.0, eval_loss=loss, eval_tokens=99)]
            options = {"student": student, "seed": seed, **options}
            paths.append(write_run(tmp_path / f"{name}{seed}", log, **options))
    finding, _ = findings(compare(paths))
    assert "VocAgnoLM, T is ahead of CPT by 0.100 nats" in finding
    assert "2 of 4 seeds" in finding
    assert "p = 1.000" in finding


def test_findings_have_no_test_without_two_common_seeds(tmp_path: Path) -> None:
    paths = [held_out(tmp_path / f"{seed}", 2.0, seed=seed, **PLAIN) for seed in (1, 2)]
    paths.append(held_out(tmp_path / "guided", 1.0))
    assert "no test possible" in findings(compare(paths))[0]
    level = held_out(tmp_path / "level", 2.0, seed=2)
    assert "level" in findings(compare([paths[1], level]))[0]


@pytest.mark.parametrize("option", ["student", "student_tokenizer", "eval_fraction"])
def test_findings_compare_no_losses_of_other_tokens(option: str, tmp_path: Path) -> None:
    paths = [held_out(tmp_path / "a", 2.0, **PLAIN), held_out(tmp_path / "b", 1.0, rate=1, **PLAIN)]
    assert len(findings(compare(paths))) == 1
    settings = json.loads((paths[1] / "run.json").read_text())
    write_json(paths[1] / "run.json", settings | {option: "other"})
    assert findings(compare(paths)) == []


def test_findings_compare_no_losses_of_other_texts(tmp_path: Path) -> None:
    paths = [held_out(tmp_path / "plain", 2.0, **PLAIN), held_out(tmp_path / "guided", 1.0, 98)]
    assert "the same texts" in findings(compare(paths))[0]
    # Seeds that only one of them has may have held out other texts.
    paths += [held_out(tmp_path / f"{seed}", 1.0, 99 - seed, seed=seed) for seed in (0, 1)]
    finding, _ = findings(compare([paths[0], *paths[2:]]))
    assert "CPT by 1.000 nats" in finding
    # Documents that the same seed holds out differ where the corpus has changed.
    changed = []
    for name, top_k in (("old", 0.4), ("new", 0.6)):
        options = {"top_k": top_k, "eval_fraction": 0.1}
        changed.append(held_out(tmp_path / name, 2.0, corpus_digest=[name], **options))
    assert "the same texts" in findings(compare(changed))[0]


def test_findings_compare_no_losses_of_texts_that_are_cut_otherwise(tmp_path: Path) -> None:
    paths = []
    for number, segments in enumerate((7, 8, None)):
        log = [entry(1, 1.0, eval_loss=2.0, eval_tokens=99, eval_segments=segments)]
        paths.append(write_run(tmp_path / f"{number}", log, student="s", rate=number))
    assert "--max_length" in findings(compare(paths[:2]))[0]
    # A log of version 0.1 does not say.
    assert "level" in findings(compare(paths[1:]))[0]
