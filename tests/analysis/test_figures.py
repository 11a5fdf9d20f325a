"""The paper's figures from runs of ours: the plotted numbers, and every refusal."""

from __future__ import annotations

import doctest
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

import vocagnolm.analysis.figure_data
from vocagnolm import cli
from vocagnolm.analysis.figure_data import METHODS, PAPER_FILE, read_sources, teacher_name
from vocagnolm.analysis.figures import NUMBERS, make
from vocagnolm.analysis.runs import REPORTED_FILE
from vocagnolm.evaluation.tasks.benchmarks import AVERAGES, BENCHMARKS, PAPER_BENCHMARKS
from vocagnolm.run import parse as config
from vocagnolm.run.job import settings
from vocagnolm.views.view import (
    FORMAT,
    GuidanceView,
    PieceView,
    TextView,
    TokenView,
    ViewSettings,
)

MISTRAL, QWEN = "gair-prox/Mistral-7B-ProXMath", "Qwen/Qwen2.5-Math-7B-Instruct"
LAST_STEP = 100
IOU, IOS = {8: 0.9, 16: 0.8, 32: 0.7, 64: 0.6}, {8: 0.95, 16: 0.85, 32: 0.75, 64: 0.65}


def write_json(path: Path, content: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def write_evaluation(
    directory: Path, exact: float, name: str = "m", benchmarks: Sequence[str] = PAPER_BENCHMARKS
) -> Path:
    """What evaluate_math.py leaves; intervals are 2 points to either side, SAT is 10 higher."""

    def numbers(value: float) -> dict[str, Any]:
        interval = [value - 2, value + 2]
        return {"exact": value, "rounded": round(value, 1), "interval": interval, "marked": []}

    columns = {
        one: {
            "column": BENCHMARKS[one].column,
            "version": 1,
            "n": 100,
            "correct": 1,
            **numbers(exact + 10 * (one == "sat")),
            "math_verify": None,
            "prompts": {"name": "gsm8k", "origin": "harness", "sha256": "p"},
            "data": {"origin": "d", "digest": "d", "verified": True},
            "marks": [],
        }
        for one in benchmarks
    }
    averages = {
        average: numbers(sum(columns[one]["exact"] for one in members) / len(members))
        for average, members in AVERAGES.items()
        if set(members) <= set(columns)
    }
    results = {
        "model": {"name": name, "revision": "r"},
        "grader": "harness@1",
        "second_opinion": "math-verify 9",
        "benchmarks": columns,
        "averages": averages,
    }
    write_json(directory / "results.json", results)
    return directory


def write_run(
    directory: Path, exact: float | None = None, loss: float | None = None, **options: Any
) -> Path:
    """What train.py leaves, and evaluate_math.py beside it."""
    defaults = {
        **{"student": "TinyLlama", "teacher": None, "teacher_losses": None, "dataset": "d"},
        **{"method": "vocagnolm", "top_k": 0.4, "uld_weight": 0.5, "chunks": 32},
        **{"chunk_guidance": "teacher", "seed": 0, "data_seed": None, "max_steps": LAST_STEP},
        "corpus_digest": "c",
    }
    write_json(directory / "run.json", defaults | options)
    if loss is not None:
        log = [
            {"step": 1, "loss": 9.0},
            {"step": 50, "eval_loss": 9.0},
            {"step": LAST_STEP, "eval_loss": loss},
            {"step": LAST_STEP, "train_loss": 9.0},
        ]
        state = {"max_steps": LAST_STEP, "log_history": log}
        write_json(directory / "trainer_state.json", state)
    if exact is not None:
        write_evaluation(directory / "evaluation", exact)
    return directory


def write_audit(directory: Path, *teachers: str, dataset: str = "data/math.jsonl") -> Path:
    """What vocagnolm audit leaves: each teacher has 1 point less than the one before."""
    audits = [
        {
            "teacher": teacher,
            "vocabulary_overlap": {
                "raw": {"teacher": 0.5 - less, "student": 0.1, "union": 0.2},
                "bytes": {"teacher": 0.8 - less, "student": 0.3, "union": 0.4},
            },
            "mapping": {"mapped": 1.0},
            "token_level": {"iou": 0.88 - less, "ios": 1.0},
            "chunks": [{"chunks": n, "iou": IOU[n] - less, "ios": IOS[n] - less} for n in IOU],
        }
        for less, teacher in ((0.01 * number, teacher) for number, teacher in enumerate(teachers))
    ]
    audit = {"format": 1, "student": "TinyLlama", "dataset": dataset, "teachers": audits}
    write_json(directory / "audit.json", audit)
    return directory


def drawn(
    number: int, paths: Sequence[Path], metric: str | None = None, reported: Sequence[str] = ()
) -> dict[str, Any]:
    """What a figure was drawn from, after its three files are checked."""
    output = paths[0].parent / "figures"
    (image,) = make([number], paths, output, metric, reported)
    assert image == output / f"figure-{number}.png"
    assert image.read_bytes().startswith(b"\x89PNG")
    assert image.with_suffix(".pdf").read_bytes().startswith(b"%PDF")
    return dict(json.loads(image.with_suffix(".json").read_text()))


def error_of(
    number: int, paths: Sequence[Path], metric: str | None = None, reported: Sequence[str] = ()
) -> str:
    with pytest.raises(ValueError, match=r"expected .*, found .*: ") as caught:
        make([number], paths, paths[0].parent / "figures", metric, reported)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def lines_of(panel: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    lines = {line["label"]: line for line in panel["lines"]}
    assert len(lines) == len(panel["lines"])
    return lines


def xy(line: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    return [(point["x"], pytest.approx(point["y"])) for point in line["points"]]


# Figure 1


def test_vocabulary_figure_plots_overlap_against_quality_when_teachers_are_evaluated(
    tmp_path: Path,
) -> None:
    audit = write_audit(tmp_path / "audit", MISTRAL, QWEN)
    evaluation = write_evaluation(tmp_path / "teacher", 60.0, MISTRAL)
    figure = drawn(1, [audit, evaluation], reported=["Qwen2.5-Math-Instruct"])
    raw, decoded = (lines_of(panel) for panel in figure["panels"])
    for lines, shares in ((raw, (50, 49)), (decoded, (80, 79))):
        (ours,) = lines["teachers, evaluated"]["points"]
        (theirs,) = lines["teachers, reported"]["points"]
        assert (ours["x"], ours["y"]) == pytest.approx((shares[0], 60 + 10 / 9))
        assert ours["bar"] == pytest.approx([58 + 10 / 9, 62 + 10 / 9])
        assert (theirs["x"], theirs["y"]) == (pytest.approx(shares[1]), 84.0)
        assert (ours["text"], theirs["text"]) == ("Mistral-ProXMath", "Qwen2.5-Math-Instruct")
        assert [line["reported"] for line in lines.values()] == [False, True]
    assert "hollow: as reported (arXiv 2503.19123v1)" in figure["notes"]


def test_vocabulary_figure_plots_another_column_when_it_is_named(tmp_path: Path) -> None:
    audit = write_audit(tmp_path / "audit", MISTRAL)
    evaluation = write_evaluation(tmp_path / "teacher", 60.0, MISTRAL)
    panel = drawn(1, [audit, evaluation], "sat", ["Mistral-ProXMath"])["panels"][0]
    assert [line["points"][0]["y"] for line in panel["lines"]] == [70.0, 75.0]
    assert panel["y_label"] == "accuracy, SAT (%)"


def test_vocabulary_figure_is_refused_when_something_is_missing(tmp_path: Path) -> None:
    audit = write_audit(tmp_path / "audit", MISTRAL)
    run = write_run(tmp_path / "run", exact=1.0)
    assert "an audit of the teachers for --figure 1" in error_of(1, [run])
    message = error_of(1, [audit])
    assert "the quality of Mistral-ProXMath" in message
    assert "--reported NAME if the paper has it" in message
    assert "to name an audited teacher" in error_of(1, [audit], reported=["Llemma"])
    message = error_of(1, [audit], "AVG w/o SAT", ["Mistral-ProXMath"])
    assert "expected 'AVG w/o SAT' in the reported row 'Mistral-ProXMath' of Table 4" in message
    assert "'GPT-4'" in error_of(1, [audit], reported=["GPT-4"])


# Figure 3


def test_chunk_figure_plots_the_audit_when_there_are_two_teachers(tmp_path: Path) -> None:
    figure = drawn(3, [write_audit(tmp_path / "audit", MISTRAL, QWEN)])
    for panel, curve, token in zip(figure["panels"], (IOU, IOS), (88, 100), strict=True):
        assert panel["columns"] == ["8", "16", "32", "64", "token level"]
        first, first_token, second, _ = panel["lines"]
        expected = [(str(n), pytest.approx(100 * share)) for n, share in curve.items()]
        assert [(point["x"], point["y"]) for point in first["points"]] == expected
        assert first_token["points"][0]["y"] == pytest.approx(token)
        assert second["points"][0]["y"] == pytest.approx(expected[0][1].expected - 1)
        assert [first["label"], second["label"]] == ["Mistral-ProXMath", "Qwen2.5-Math-Instruct"]
        assert first["style"] != second["style"]


def test_chunk_figure_names_the_corpora_when_there_are_several(tmp_path: Path) -> None:
    one = write_audit(tmp_path / "a", MISTRAL)
    two = write_audit(tmp_path / "b", MISTRAL, dataset="gsm8k")
    lines = drawn(3, [one, two])["panels"][0]["lines"]
    labels = [line["label"] for line in lines if line["label"]]
    assert labels == ["Mistral-ProXMath, math.jsonl", "Mistral-ProXMath, gsm8k"]


def test_chunk_figure_is_refused_when_it_does_not_apply(tmp_path: Path) -> None:
    one, two = (write_audit(tmp_path / name, MISTRAL) for name in "ab")
    assert "--metric for a figure of quality" in error_of(3, [one], "AVG")
    assert "--reported for a figure whose numbers" in error_of(3, [one], reported=["Llemma"])
    assert "one audit of Mistral-ProXMath, found two" in error_of(3, [one, two])
    assert "an audit" in error_of(3, [write_run(tmp_path / "run", loss=1.0)])


# Figure 4


def test_method_figure_plots_every_column_when_runs_are_evaluated(tmp_path: Path) -> None:
    cpt = write_run(tmp_path / "cpt", 20.0, method="cpt")
    uld = write_run(tmp_path / "uld", 21.0, method="uld", teacher=[MISTRAL])
    base = write_evaluation(tmp_path / "base", 10.0)
    row = "Mistral-ProXMath VocAgnoLM"
    (panel,) = drawn(4, [cpt, uld, base], reported=[row])["panels"]
    lines = lines_of(panel)
    assert list(lines) == ["CPT", "ULD, Mistral-ProXMath", "base", f"reported: {row}"]
    assert panel["columns"][:2] == ["GSM8K", "MATH"]
    assert len(panel["columns"]) == 12
    assert xy(lines["ULD, Mistral-ProXMath"])[0] == ("GSM8K", 21.0)
    assert lines["CPT"]["points"][0]["bar"] == [18.0, 22.0]
    assert dict(xy(lines[f"reported: {row}"]))["TAB"] == 21.7


def test_method_figure_plots_mean_and_deviation_when_there_are_seeds(tmp_path: Path) -> None:
    paths = [
        write_run(tmp_path / f"{seed}", 20.0 + seed, seed=seed, corpus_digest=f"{seed}")
        for seed in range(3)
    ]
    figure = drawn(4, paths, "gsm8k")
    ((point,),) = (line["points"] for line in figure["panels"][0]["lines"])
    assert (point["y"], point["bar"], point["seeds"]) == (21.0, [20.0, 22.0], 3)
    assert sorted(point["runs"]) == sorted(map(str, paths))
    assert figure["notes"] == ["means over 3 seeds, bars: standard deviation"]


def test_method_figure_pools_seeds_when_only_numbers_in_paths_differ(tmp_path: Path) -> None:
    paths = [
        write_run(tmp_path / f"{n}", loss=1.0 + n, student=f"/x/seed{n}/student", method="cpt")
        for n in range(2)
    ]
    ((point,),) = (line["points"] for line in drawn(4, paths, "eval_loss")["panels"][0]["lines"])
    assert (point["y"], point["seeds"], point["x"]) == (1.5, 2, "held-out loss")


def test_method_figure_says_what_differs_when_method_and_teacher_do_not(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / f"{k}", loss=k, top_k=k) for k in (0.4, 0.6)]
    (panel,) = drawn(4, paths, "eval_loss")["panels"]
    assert list(lines_of(panel)) == ["VocAgnoLM, top_k 0.4", "VocAgnoLM, top_k 0.6"]
    assert panel["y_label"] == "held-out loss (nats per token)"


def test_method_figure_marks_partial_numbers_when_a_run_is_limited(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 20.0)
    path = run / "evaluation" / "results.json"
    results = json.loads(path.read_text())
    results["benchmarks"]["gsm8k"]["marked"] = ["partial"]
    write_json(path, results)
    figure = drawn(4, [run], "gsm8k")
    assert figure["panels"][0]["lines"][0]["points"][0]["marked"] == ["partial"]
    assert "*: partial" in figure["notes"]


def test_method_figure_leaves_out_a_column_when_a_run_does_not_have_it(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_evaluation(run / "evaluation", 20.0, benchmarks=["gsm8k"])
    lines = lines_of(drawn(4, [run, write_evaluation(tmp_path / "m", 10.0)])["panels"][0])
    assert [len(line["points"]) for line in lines.values()] == [1, 12]


def test_method_figure_is_refused_when_runs_are_wrong(tmp_path: Path) -> None:
    plain = write_run(tmp_path / "plain")
    same = [write_run(tmp_path / name, 20.0) for name in ("one", "two")]
    audit = write_audit(tmp_path / "audit", MISTRAL)
    assert "evaluate_math.py --model" in error_of(4, [plain])
    evaluated = write_run(tmp_path / "evaluated", 1.0, method="cpt")
    assert "evaluate_math.py --model" in error_of(4, [plain, evaluated])
    assert "found none: make some with train.py" in error_of(4, [audit])
    assert "seeds of their own" in error_of(4, same)
    assert "'AVG w/o SAT'" in error_of(4, same[:1], "demo")
    assert "finish its training" in error_of(4, same[:1], "eval_loss")
    assert "in the reported row 'Rho-1'" in error_of(4, same[:1], "sat", ["Rho-1"])


# Figure 5


@pytest.fixture
def students(tmp_path: Path) -> list[Path]:
    """Two methods with the same two teachers, and none."""
    paths = [
        write_run(tmp_path / f"{method}-{number}", exact, method=method, teacher=[teacher])
        for method, start in (("vocagnolm", 20.0), ("uld", 10.0))
        for number, (teacher, exact) in enumerate(((MISTRAL, start), (QWEN, start + 5)))
    ]
    return [*paths, write_run(tmp_path / "cpt", 5.0, method="cpt")]


def test_teacher_figure_plots_students_when_teachers_are_evaluated(
    students: list[Path], tmp_path: Path
) -> None:
    teachers = [
        write_evaluation(tmp_path / name, exact, reference)
        for name, exact, reference in (("t1", 60.0, MISTRAL), ("t2", 50.0, QWEN))
    ]
    (panel,) = drawn(5, [*students, *teachers], "math", ["Llemma VocAgnoLM"])["panels"]
    lines = lines_of(panel)
    assert xy(lines["VocAgnoLM"]) == [(50.0, 25.0), (60.0, 20.0)]
    assert xy(lines["ULD"]) == [(50.0, 15.0), (60.0, 10.0)]
    assert xy(lines["CPT"]) == [(None, 5.0)]
    assert xy(lines["reported: VocAgnoLM"]) == [(17.2, 5.2)]
    texts = [point["text"] for point in lines["VocAgnoLM"]["points"]]
    assert texts == ["Qwen2.5-Math-Instruct", "Mistral-ProXMath"]
    assert all(not point["text"] for point in lines["ULD"]["points"])
    assert lines["VocAgnoLM"]["style"] == lines["reported: VocAgnoLM"]["style"]


def test_teacher_figure_says_so_when_teachers_are_as_reported(students: list[Path]) -> None:
    names = ["Mistral-ProXMath", "Qwen2.5-Math-Instruct"]
    (panel,) = drawn(5, students, reported=names)["panels"]
    assert xy(lines_of(panel)["ULD"]) == [(59.2, 10 + 10 / 9), (84.0, 15 + 10 / 9)]
    assert panel["x_label"] == "teacher, as reported: accuracy, AVG (%)"


def test_teacher_figure_is_refused_when_something_is_missing(
    students: list[Path], tmp_path: Path
) -> None:
    teacher = write_evaluation(tmp_path / "t1", 60.0, MISTRAL)
    assert "the quality of Qwen2.5-Math-Instruct" in error_of(5, [*students, teacher])
    assert "for all teachers or for none" in error_of(5, students, reported=["Mistral-ProXMath"])
    assert "to name a teacher or a guided student" in error_of(5, students, reported=["Llemma"])
    assert "runs with a teacher for --figure 5" in error_of(5, students[-1:])
    longer = write_run(tmp_path / "longer", 1.0, teacher=[MISTRAL], max_steps=200)
    names = ["Mistral-ProXMath", "Qwen2.5-Math-Instruct"]
    message = error_of(5, [*students, longer], reported=names)
    assert "one setting of VocAgnoLM, Mistral-ProXMath for each mark" in message
    assert "which differ in max_steps" in message


# Figure 6


@pytest.fixture
def chunked(tmp_path: Path) -> list[Path]:
    """Chunks guided and random, and token level, with an audit."""
    paths = [write_audit(tmp_path / "audit", MISTRAL, QWEN)]
    for n in IOU:
        own = {"method": "chunk", "chunks": n}
        paths.append(write_run(tmp_path / f"c{n}", loss=n, teacher=[MISTRAL], **own))
        paths.append(write_run(tmp_path / f"r{n}", loss=n + 1, chunk_guidance="random", **own))
    paths.append(write_run(tmp_path / "token", loss=3.0, teacher=[MISTRAL]))
    return paths


def test_alignment_figure_plots_quality_against_overlap_when_audited(chunked: list[Path]) -> None:
    figure = drawn(6, chunked, "eval_loss")
    for panel, overlap, token in zip(figure["panels"], (IOU, IOS), (88, 100), strict=True):
        lines = lines_of(panel)
        places = [pytest.approx(100 * share) for share in overlap.values()]
        assert xy(lines["the teacher's chunks"]) == list(zip(places, IOU, strict=True))
        above = [n + 1 for n in IOU]
        assert xy(lines["random chunks"]) == list(zip(places, above, strict=True))
        assert xy(lines["token level"]) == [(pytest.approx(token), 3.0)]
        texts = [point["text"] for point in lines["random chunks"]["points"]]
        assert texts == ["8", "16", "32", "64"]  # the higher ones


def test_alignment_figure_plots_table_2_when_it_is_named(chunked: list[Path]) -> None:
    panel = drawn(6, chunked[:1], reported=["Table 2"])["panels"][0]
    lines = lines_of(panel)
    assert all(line["reported"] for line in lines.values())
    assert [y for _, y in xy(lines["reported: the teacher's chunks"])] == [18.2, 18.4, 18.6, 17.8]
    assert [y for _, y in xy(lines["reported: random chunks"])] == [17.7, 17.5, 17.9, 17.6]
    assert xy(lines["reported: token level"]) == [(pytest.approx(88), 19.2)]


def test_alignment_figure_is_refused_when_something_does_not_fit(
    chunked: list[Path], tmp_path: Path
) -> None:
    audit, *runs = chunked
    assert "an audit of Mistral-ProXMath for --figure 6" in error_of(6, runs, "eval_loss")
    other = write_run(tmp_path / "other", loss=1.0, teacher=[QWEN])
    assert "of one teacher" in error_of(6, [*chunked, other], "eval_loss")
    again = write_audit(tmp_path / "again", MISTRAL, dataset="gsm8k")
    assert "2 audits of them" in error_of(6, [*chunked, again], "eval_loss")
    finer = write_run(tmp_path / "f", loss=1.0, method="chunk", chunks=128, teacher=[MISTRAL])
    assert "audit again with --chunks 128" in error_of(6, [*chunked, finer], "eval_loss")
    assert "runs guided by chunks or tokens" in error_of(6, [audit])
    assert "leave --metric out" in error_of(6, chunked, "eval_loss", ["Table 2"])
    assert "expected no --reported but 'Table 2'" in error_of(6, chunked, "eval_loss", ["Llemma"])


# Figure 7


def test_sweep_figure_plots_both_sweeps_when_there_are_two_teachers(tmp_path: Path) -> None:
    paths = [
        write_run(tmp_path / f"{teacher[:4]}-{name}-{value}", loss=value, teacher=[teacher], **own)
        for teacher in (QWEN, MISTRAL)
        for name, value, own in (
            *(("k", k, {"top_k": k}) for k in (0.8, 0.4)),
            *(("w", w, {"method": "uld", "uld_weight": w}) for w in (1.5, 0.3)),
        )
    ]
    cpt = write_run(tmp_path / "cpt", loss=2.0, method="cpt")
    left, right = drawn(7, [*paths, cpt], "eval_loss")["panels"]
    teachers = ["Mistral-ProXMath", "Qwen2.5-Math-Instruct"]
    assert list(lines_of(left)) == list(lines_of(right)) == [*teachers, "CPT"]
    assert xy(lines_of(left)[teachers[0]]) == [(40.0, 0.4), (80.0, 0.8)]
    assert xy(lines_of(right)[teachers[1]]) == [(0.3, 0.3), (1.5, 1.5)]


def test_sweep_figure_has_one_panel_when_only_top_k_varies(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / f"{k}", 10 * k, teacher=[QWEN], top_k=k) for k in (0.4, 0.5)]
    (panel,) = drawn(7, paths)["panels"]
    assert panel["y_label"] == "accuracy, AVG w/o SAT (%)"
    assert xy(panel["lines"][0]) == [(40.0, 4.0), (50.0, 5.0)]


def test_sweep_figure_is_refused_when_there_is_no_sweep(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / f"{k}", loss=k, teacher=[QWEN], top_k=k) for k in (0.4, 0.5)]
    assert "differ in top_k or uld_weight" in error_of(7, paths[:1], "eval_loss")
    other = write_run(tmp_path / "other", loss=1.0, teacher=[QWEN], aggregation="sum")
    assert "differ in aggregation" in error_of(7, [*paths, other], "eval_loss")
    assert "found --figure 7: leave it out" in error_of(7, paths, "eval_loss", ["Llemma"])


# Figure 8


def write_view(path: Path, tokens: Sequence[TokenView]) -> Path:
    competition = "the tokens of a sequence"
    settings = ViewSettings("S", "T", "vocagnolm", 0.4, "max", "include", competition)
    text = TextView("a $b$\nc", 0, 0, 0, tuple(tokens))
    return write_json(path, {"format": FORMAT, **asdict(GuidanceView(settings, (text,)))})


TOKENS = [
    TokenView("<s>", 0, 0, "unlabelled", False, None, None),
    TokenView("a", 0, 1, "kept", True, 2.0, 1.0, (PieceView("a $", 0, 3, 1.0),)),
    TokenView(" $", 1, 3, "dropped", False, 1.0, 1.0, (PieceView("a $", 0, 3, 1.0),)),
    TokenView(
        "b$", 3, 5, "kept", True, 3.0, 1.0, (PieceView("b", 3, 4, 1.0), PieceView("$", 4, 5, 1.0))
    ),
    TokenView("\n", 5, 6, "dropped", False, 1.0, 1.0, (PieceView("\n", 5, 6, 1.0),)),
    TokenView("c", 6, 7, "unmapped", False, 1.0, None),
    TokenView("</s>", 7, 7, "unmapped", True, 1.0, None),
]


def test_guidance_figure_shows_states_and_pieces_when_inspected(tmp_path: Path) -> None:
    write_view(tmp_path / "inspected" / "guidance.json", TOKENS)
    (view,) = drawn(8, [tmp_path / "inspected"])["views"]
    cells = [(cell["text"], cell["state"], cell["pieces"], cell["line"]) for cell in view["cells"]]
    assert cells == [
        ("<s>", "nothing to learn", "", 0),
        ("a", "kept", "a·$", 0),
        ("·$", "dropped", "″", 0),
        ("b$", "kept", "b|$", 0),
        ("↵", "dropped", "↵", 0),
        ("c", "unmapped, not trained", "", 1),
        ("</s>", "unmapped, trained", "", 1),
    ]
    columns = [cell["column"] for cell in view["cells"]]
    assert columns == [0, 4, 8, 11, 15, 0, 2]
    assert view["left_out"] == 0


def test_guidance_figure_shows_the_last_step_when_it_is_of_a_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_view(run / "guidance" / "step-000100.json", TOKENS[:2])
    write_view(run / "guidance" / "step-000200.json", TOKENS)
    (view,) = drawn(8, [run])["views"]
    assert len(view["cells"]) == len(TOKENS)


def test_guidance_figure_says_what_it_leaves_out_when_a_text_is_long(tmp_path: Path) -> None:
    write_view(tmp_path / "inspected" / "guidance.json", TOKENS[1:4] * 300)
    (view,) = drawn(8, [tmp_path / "inspected"])["views"]
    assert 0 < view["left_out"] == 900 - len(view["cells"])
    assert max(cell["column"] + cell["width"] for cell in view["cells"]) <= 92
    assert {cell["line"] for cell in view["cells"]} == set(range(14))


@pytest.mark.filterwarnings("error")
def test_guidance_figure_is_drawn_when_letters_are_unusual(tmp_path: Path) -> None:
    texts = ["数学", "\x07", "שלום", "\u0301", "$\\frac", "\U0001f600", "\t", ""]
    tokens = [TokenView(text, 0, 1, "kept", True, 1.0, 1.0) for text in texts]
    write_view(tmp_path / "inspected" / "guidance.json", tokens)
    (view,) = drawn(8, [tmp_path / "inspected"])["views"]
    assert [cell["text"] for cell in view["cells"]][:2] == ["数学", "□"]


def test_guidance_figure_is_refused_when_there_is_none(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    assert "vocagnolm inspect --output_dir D" in error_of(8, [run])
    assert "expected --metric for a figure of numbers" in error_of(8, [run], "AVG")
    assert "expected --reported for a figure" in error_of(8, [run], reported=["Llemma"])
    write_json(run / "guidance.json", {"format": 99})
    with pytest.raises(ValueError, match="is no guidance view"):
        make([8], [run], tmp_path / "out")


# Sources


def test_source_is_read_once_when_its_evaluation_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 20.0)
    sources = read_sources([run / "evaluation"])
    assert [source.path for source in sources.trained] == [run]
    assert sources.evaluated == []
    with pytest.raises(ValueError, match="twice: give it once"):
        read_sources([run, run / "evaluation"])


def test_teacher_is_named_when_it_comes_from_stores(tmp_path: Path) -> None:
    stores = [{"store": "/s", "teacher": QWEN}, {"store": "/t", "teacher": "x/other"}]
    run = write_run(tmp_path / "run", teacher_losses=stores)
    (source,) = read_sources([run]).trained
    assert source.teacher == "Qwen2.5-Math-Instruct + other"


def test_settings_of_train_py_are_read_when_a_run_has_written_them(tmp_path: Path) -> None:
    argv = ["--teacher", QWEN, MISTRAL, "--use_cpu", "True"]
    run = write_json(tmp_path / "run" / "run.json", settings(config.parse(argv))).parent
    (source,) = read_sources([run]).trained
    assert source.method == "vocagnolm"
    assert source.teacher == "Qwen2.5-Math-Instruct + Mistral-ProXMath"
    assert {"top_k", "uld_weight", "chunks", "chunk_guidance"} <= source.settings.keys()


def test_methods_are_those_of_train_py_when_compared() -> None:
    method = get_type_hints(config.GuidanceArguments)["method"]
    assert set(get_args(method)) == set(METHODS)


def break_run(content: object) -> Callable[[Path], None]:
    return lambda run: write_json(run / "run.json", content) and None


def break_state(**changes: Any) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        state = json.loads((run / "trainer_state.json").read_text())
        write_json(run / "trainer_state.json", state | changes)

    return change


def break_audit(run: Path) -> None:
    (run / "run.json").unlink()
    write_json(run / "audit.json", {"format": 1, "teachers": [{"teacher": "t"}], "dataset": "d"})


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "nothing": (lambda run: (run / "run.json").unlink(), "expected run.json, results.json"),
    "list": (break_run([1]), "expected an object, found list"),
    "method": (break_run({"method": "magic"}), "expected a method of train.py, found 'magic'"),
    "log": (break_state(log_history=[{"eval_loss": 1.0}]), "expected the log of train.py"),
    "log_type": (break_state(log_history=[1]), "expected the log of train.py"),
    "unfinished": (break_state(max_steps=200), "eval_loss after the last step"),
    "not_finite": (
        break_state(log_history=[{"step": LAST_STEP, "eval_loss": float("nan")}]),
        "expected a finite eval_loss, found nan",
    ),
    "audit": (break_audit, "expected what vocagnolm audit writes"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_command_fails_in_one_line_when_a_source_is_broken(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change, message = BROKEN[name]
    run = write_run(tmp_path / "run", loss=1.0)
    change(run)
    argv = ["compare", str(run), "--figure", "4", "--metric", "eval_loss"]
    assert cli.main([*argv, "--output_dir", str(tmp_path / "out")]) == 2
    output = capsys.readouterr()
    assert message in output.err
    assert output.err.startswith("vocagnolm compare: error: ")
    assert output.err.count("\n") == 1
    assert output.out == ""


# The command and the paper's numbers


def test_command_draws_several_figures_when_called(
    chunked: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "figures"
    argv = [*map(str, chunked), "--figure", "6", "--figure", "4", "--metric", "eval_loss"]
    assert cli.main(["compare", *argv, "--output_dir", str(out)]) == 0
    assert capsys.readouterr().out == f"{out / 'figure-6.png'}\n{out / 'figure-4.png'}\n"
    assert len(list(out.iterdir())) == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--figure", "4"], "expected --output_dir with --figure"),
        (["--figure", "4", "--output_dir", "o", "--seed", "1"], "expected --seed for tables only"),
        (["--figure", "4", "--output_dir", "o", "--resamples", "9"], "expected --resamples for"),
        (["--metric", "AVG"], "expected --figure with --metric"),
    ],
)
def test_command_refuses_options_when_they_do_not_apply(
    tmp_path: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", 1.0)
    assert cli.main(["compare", str(run), *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("number", ["2", "9", "x"])
def test_command_refuses_a_figure_when_it_draws_none_of_that_number(number: str) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["compare", "run", "--figure", number])
    assert caught.value.code == 2
    assert NUMBERS == (1, 3, 4, 5, 6, 7, 8)


def test_table_2_equals_the_digest_when_it_is_there(shared_dir: Path) -> None:
    text = (shared_dir / "paper" / "README.md").read_text(encoding="utf-8")
    lines = text.split("### Table 2")[1].split("\n\n")[1].splitlines()[2:]
    cells = [[float(x) for x in line.strip("| ").split("|")[1:] if x.strip()] for line in lines]
    table = json.loads(PAPER_FILE.read_text())["Table 2"]
    assert cells[0] == table["random"]
    assert cells[1] == [*table["guided by the teacher"], table["token level"]]
    assert table["column"] == "AVG w/o SAT"


def test_paper_names_are_the_tables_when_compared() -> None:
    reported = json.loads(REPORTED_FILE.read_text())["tables"][1]["rows"]
    models = json.loads(PAPER_FILE.read_text())["models"]
    assert models.keys() == reported.keys()
    for name, others in models.items():
        assert {teacher_name(f"/x/{other}") for other in (name, *others)} == {name}
    assert teacher_name("some/qwen2.5-math-7b-rl") == "qwen2.5-math-7b-rl"


def test_figure_data_doctests_run_when_read() -> None:
    results = doctest.testmod(vocagnolm.analysis.figure_data)
    assert results.attempted > 0
    assert results.failed == 0


def test_figures_load_nothing_heavy_when_imported() -> None:
    code = (
        "import sys, vocagnolm.analysis.figures; heavy = ('torch', 'transformers', 'datasets', "
        "'matplotlib'); print([m for m in heavy if m in sys.modules])"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert output.stdout == "[]\n"
