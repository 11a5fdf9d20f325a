"""The paper's figures from comparison.json and audit.json: what is averaged, and never mixed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_results import edit_settings, write_evaluation, write_run

from benchmarks import figures
from vocagnolm.report.comparison import compare, to_json

MISTRAL, QWEN = "gair-prox/Mistral-7B-ProXMath", "Qwen/Qwen2.5-Math-7B-Instruct"
AUDITED: dict[str, Any] = {
    "teacher": MISTRAL,
    "vocabulary_overlap": {"raw": 0.5, "bytes": 0.8},
    "mapping": {"iou": 0.88, "ios": 1.0},
    "chunks": [{"chunks": 8, "iou": 0.9, "ios": 0.95}],
}


def numbers(paths: Sequence[Path], reported: Sequence[str] = ()) -> Any:
    content = json.loads(json.dumps(to_json(compare(paths, reported))))
    return figures.Numbers(content, [{"teachers": [AUDITED]}])


def run(root: Path, name: str, loss: float, **options: Any) -> Path:
    log = [{"step": 1, "eval_loss": 9.0}, {"step": 2, "eval_loss": loss}]
    return write_run(root / name, log, **{"uld_weight": 0.5, **options})


def test_sweeps_are_averaged_over_seeds(tmp_path: Path) -> None:
    paths = [
        run(tmp_path, f"{k}-{seed}", k + seed, top_k=k, teacher=QWEN, seed=seed)
        for k in (0.8, 0.4)
        for seed in (0, 2)
    ]
    found = numbers(paths)
    marks = found.marks(found.trained, "eval_loss", [x["options"]["top_k"] for x in found.trained])
    assert marks == [pytest.approx((k, k + 1, 2**0.5, 2**0.5)) for k in (0.4, 0.8)]
    # Another setting of the same top_k has no place.
    other = run(tmp_path, "other", 1.0, top_k=0.4, teacher=QWEN, aggregation="sum")
    with pytest.raises(ValueError, match="share a mark"):
        figures.sweeps(numbers([*paths, other]), "eval_loss")


def test_models_that_were_graded_differently_share_no_figure(tmp_path: Path) -> None:
    paths = []
    for name, teacher, correct in (("a", MISTRAL, 20), ("b", QWEN, 30)):
        paths.append(run(tmp_path, name, 1.0, teacher=teacher))
        right = [idx < correct for idx in range(100)]
        write_evaluation(paths[-1] / "evaluation", {"math": right})
    # One teacher is evaluated, the other reported.
    model = tmp_path / "Mistral-7B-ProXMath"
    paths.append(write_evaluation(model, {"math": [idx < 60 for idx in range(100)]}))
    found = numbers(paths, ["Qwen2.5-Math-Instruct", "Llemma", "Llemma VocAgnoLM"])
    assert found.quality("Mistral-ProXMath", "math") == 60.0
    assert found.quality("Qwen2.5-Math-Instruct", "math") == 74.0
    figures.teachers(found, "math")
    edit_settings(paths[0] / "evaluation", grader="other")
    with pytest.raises(ValueError, match="graded differently"):
        figures.teachers(numbers(paths, ["Qwen2.5-Math-Instruct"]), "math")


def test_command_draws_the_papers_numbers(tmp_path: Path) -> None:
    model = write_evaluation(tmp_path / "m", {"math": [True, False]})
    comparison, audit = tmp_path / "comparison.json", tmp_path / "audit.json"
    comparison.write_text(json.dumps(to_json(compare([model], ["Table 2", "Table 4"]))))
    audit.write_text(json.dumps({"teachers": [AUDITED]}))
    argv = ["--comparison", str(comparison), "--audit", str(audit), "--output_dir", str(tmp_path)]
    figures.main([*argv, "--figure", "1", "--metric", "math"])
    assert (tmp_path / "figure-1.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "figure-1.pdf").read_bytes().startswith(b"%PDF")
    figures.main(["--audit", str(audit), "--output_dir", str(tmp_path), "--figure", "3"])
    assert (tmp_path / "figure-3.png").exists()
    paths = [run(tmp_path, "token", 3.0, teacher=MISTRAL)]
    for name, teacher, guidance in (("c", MISTRAL, "teacher"), ("r", None, "random")):
        options = {"method": "chunk", "chunks": 8, "chunk_guidance": guidance}
        paths.append(run(tmp_path, name, 8.0, teacher=teacher, **options))
    assert len(figures.alignment(numbers(paths), "eval_loss").axes) == 2
