"""The paper's figures from comparison.json and audit.json: what is plotted, and never mixed."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_results import edit_results, write_evaluation, write_run

from vocagnolm.report.comparison import compare, to_json

ROOT = Path(__file__).parents[2]
MISTRAL, QWEN = "gair-prox/Mistral-7B-ProXMath", "Qwen/Qwen2.5-Math-7B-Instruct"
IOU, IOS = {8: 0.9, 16: 0.8}, {8: 0.95, 16: 0.85}
AUDIT = {
    "teachers": [
        {
            "teacher": teacher,
            "vocabulary_overlap": {"raw": {"teacher": 0.5}, "bytes": {"teacher": 0.8}},
            "token_level": {"iou": 0.88, "ios": 1.0},
            "chunks": [{"chunks": n, "iou": IOU[n], "ios": IOS[n]} for n in IOU],
        }
        for teacher in (MISTRAL, QWEN)
    ]
}


@pytest.fixture(scope="module")
def figures() -> Any:
    path = ROOT / "benchmarks" / "figures.py"
    spec = importlib.util.spec_from_file_location("figures", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def numbers(figures: Any, paths: Sequence[Path], reported: Sequence[str] = ()) -> Any:
    return figures.Numbers(to_json(compare(paths, reported)), [AUDIT])


def lines(axes: Any) -> dict[str, list[tuple[float, float]]]:
    """The points of the lines of a plot, by label."""
    found = {}
    handles = [*axes.containers, *(line for line in axes.lines if line.get_marker() not in "_|")]
    for place, handle in enumerate(handles):
        line = handle[0] if isinstance(handle, tuple) else handle
        found[f"{place}"] = [*zip(*map(list, line.get_data()), strict=True)]
    return found


def run(root: Path, name: str, loss: float, **options: Any) -> Path:
    log = [{"step": 1, "eval_loss": 9.0}, {"step": 2, "eval_loss": loss}]
    return write_run(root / name, log, **{"uld_weight": 0.5, **options})


def test_sweeps_are_averaged_over_seeds(figures: Any, tmp_path: Path) -> None:
    paths = [
        run(tmp_path, f"{k}-{seed}", k + seed, top_k=k, teacher=QWEN, seed=seed)
        for k in (0.8, 0.4)
        for seed in (0, 2)
    ]
    found = numbers(figures, paths)
    marks = found.marks(found.trained, "eval_loss", [x["options"]["top_k"] for x in found.trained])
    assert marks == [pytest.approx((k, k + 1, 2**0.5, 2**0.5)) for k in (0.4, 0.8)]
    left, _ = figures.sweeps(found, "eval_loss").axes
    assert lines(left)["0"] == [pytest.approx((0.4, 1.4)), pytest.approx((0.8, 1.8))]
    # Another setting of the same top_k has no place.
    other = run(tmp_path, "other", 1.0, top_k=0.4, teacher=QWEN, aggregation="sum")
    with pytest.raises(ValueError, match="would share a mark"):
        figures.sweeps(numbers(figures, [*paths, other]), "eval_loss")


def test_students_stand_above_their_teachers(figures: Any, tmp_path: Path) -> None:
    paths = []
    for name, teacher, correct in (("a", MISTRAL, 20), ("b", QWEN, 30)):
        paths.append(run(tmp_path, name, 1.0, teacher=teacher))
        right = [idx < correct for idx in range(100)]
        write_evaluation(paths[-1] / "evaluation", {"math": right})
    # One teacher is evaluated, the other reported.
    model = tmp_path / "Mistral-7B-ProXMath"
    paths.append(write_evaluation(model, {"math": [idx < 60 for idx in range(100)]}))
    reported = ["Qwen2.5-Math-Instruct", "Llemma", "Llemma VocAgnoLM"]
    (axes,) = figures.teachers(numbers(figures, paths, reported), "math").axes
    ours, theirs, *_ = lines(axes).values()
    assert sorted(ours) == [pytest.approx((60.0, 20.0)), pytest.approx((74.0, 30.0))]
    del theirs
    hollow = [line for line in axes.lines if line.get_markerfacecolor() == "white"]
    assert [[*map(float, x)] for x in hollow[0].get_data()] == [[17.2], [5.2]]
    # Evaluations graded differently have no figure.
    edit_results(paths[0] / "evaluation", lambda results: results.update(grader="other"))
    with pytest.raises(ValueError, match="asked or graded differently"):
        figures.teachers(numbers(figures, paths, reported), "math")


def test_chunks_stand_at_the_overlap_of_the_audit(figures: Any, tmp_path: Path) -> None:
    paths = [run(tmp_path, "token", 3.0, teacher=MISTRAL)]
    for n in IOU:
        own = {"method": "chunk", "chunks": n}
        paths.append(run(tmp_path, f"c{n}", n, teacher=MISTRAL, chunk_guidance="teacher", **own))
        paths.append(run(tmp_path, f"r{n}", n + 1, teacher=None, chunk_guidance="random", **own))
    figure = figures.alignment(numbers(figures, paths), "eval_loss")
    for axes, overlap, token in zip(figure.axes, (IOU, IOS), (88, 100), strict=True):
        guided, random, level, *_ = lines(axes).values()
        assert guided == [pytest.approx((100 * overlap[n], n)) for n in (16, 8)]
        assert random == [pytest.approx((100 * overlap[n], n + 1)) for n in (16, 8)]
        assert level == [pytest.approx((token, 3.0))]


def test_command_draws_the_papers_numbers(figures: Any, tmp_path: Path) -> None:
    model = write_evaluation(tmp_path / "m", {"math": [True, False]})
    found = to_json(compare([model], ["Table 2", "Table 4"]))
    comparison, audit = tmp_path / "comparison.json", tmp_path / "audit.json"
    comparison.write_text(json.dumps(found))
    audit.write_text(json.dumps({"teachers": AUDIT["teachers"][:1]}))
    argv = ["--comparison", str(comparison), "--audit", str(audit), "--output_dir", str(tmp_path)]
    figures.main([*argv, "--figure", "1", "--metric", "math"])
    assert (tmp_path / "figure-1.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "figure-1.pdf").read_bytes().startswith(b"%PDF")
    content = figures.Numbers(found, [AUDIT])
    assert (
        content.quality("Mistral-ProXMath", "math") == content.reported["Mistral-ProXMath"]["math"]
    )
