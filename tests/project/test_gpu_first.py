"""The first report of speed on a GPU: a rehearsal on a CPU, what a second call does, its table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_first import table
from benchmarks.gpu_first.__main__ import main
from benchmarks.gpu_first.machine import device_name
from benchmarks.gpu_first.report import DONE, FAILED, SKIPPED, Report, name_run, read
from benchmarks.gpu_first.stages import STAGES, run_stages
from benchmarks.harness import Skipped

LABELS = {name: stage.label for name, stage in STAGES.items()}
PAGE = f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n"


def report_of(path: Path, stage: str) -> Report:
    return Report(path / "run.jsonl", stage, True, path)


def say_steps(report: Report, tokens_per_s: float, shape: str = "4 x 4") -> None:
    """Print what a stage of steps prints."""
    report.say("shape", shape)
    for name in ("CPT step", "stored step", "teacher forward", "online step", "score"):
        report.say(name, "", mfu=0.25, tokens_per_s=tokens_per_s)


@pytest.mark.slow
@pytest.mark.processes
def test_gpu_first_goes_on_where_it_ended(tmp_path: Path) -> None:
    file, page = tmp_path / f"{name_run(device_name())}.jsonl", tmp_path / "page.md"
    page.write_text(PAGE)
    # One stage was interrupted, and another was done.
    Report(file, "eager", True, tmp_path).say("CPT step", "old", tokens_per_s=-1.0)
    Report(file, "sdpa", True, tmp_path).say(DONE)
    options = ["--scale=tiny", "--stages=eager,sdpa", f"--output_dir={tmp_path}"]
    assert main([*options, f"--page={page}"]) == 0
    said = read(file)
    assert DONE in said["eager"], said["eager"]
    assert [*said["sdpa"]] == [DONE]
    assert said["eager"]["CPT step"]["planned_gib"] > 0
    assert said["eager"]["score"]["tokens_per_s"] > 0
    assert "| eager " in page.read_text()


@pytest.mark.slow
def test_stages_pass_on_a_cpu(tmp_path: Path) -> None:
    for stage in ("eager", "compiled", "filled", "transformers"):
        report = report_of(tmp_path, stage)
        with report.ending():
            STAGES[stage].run(report)
    said = read(tmp_path / "run.jsonl")
    assert not [name for name, lines in said.items() if FAILED in lines], said
    for way in ("CPT step", "stored step", "teacher forward", "online step", "score"):
        for stage in ("eager", "compiled", "filled"):
            assert said[stage][way]["tokens_per_s"] > 0
    assert said["filled"]["shape"]["value"] == "1 x 32 sequences of 128"
    assert said["compiled"]["compilations"]["graph_breaks"] == 0
    for number in ("loss", "grad_norm", "teacher_loss"):
        plain = said["eager"]["numbers"][number]
        assert said["compiled"]["numbers"][number] == pytest.approx(plain, rel=1e-4)
    assert said["transformers"]["new tokens per s"]["value"] > 0


def test_nothing_starts_when_time_is_over(tmp_path: Path) -> None:
    run_stages(tmp_path / "run.jsonl", list(STAGES), 0.0, True, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("error", "end"), [(None, DONE), (Skipped("no"), SKIPPED), (RuntimeError("no"), FAILED)]
)
def test_stage_says_how_it_ends(error: Exception | None, end: str, tmp_path: Path) -> None:
    report = report_of(tmp_path, "vllm")
    with report.ending():
        if error:
            raise error
    assert [*read(report.file)["vllm"]] == [end]
    # The next attempt is what counts.
    report.say(DONE)
    assert [*read(report.file)["vllm"]] == [DONE]


def test_another_device_or_other_code_is_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {name_run("NVIDIA H200"), name_run("NVIDIA H100")}
    import vocagnolm

    for text in ("a = 1", "a = 2"):
        (tmp_path / "__init__.py").write_text(text)
        monkeypatch.setattr(vocagnolm, "__file__", str(tmp_path / "__init__.py"))
        names.add(name_run("NVIDIA H200"))
    assert len(names) == 4


def test_table_has_a_row_for_each_finished_stage(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    report_of(tmp_path, "machine").say(
        "machine", "NVIDIA H200", month="May", versions={"torch": "3"}
    )
    # Without finished steps, older numbers stay.
    say_steps(report_of(tmp_path, "eager"), 1000.0)
    table.write(page, read(tmp_path / "run.jsonl"), LABELS)
    assert page.read_text() == PAGE
    report_of(tmp_path, "eager").say(DONE)
    say_steps(report_of(tmp_path, "filled"), 3000.0, "2 x 16")
    report_of(tmp_path, "filled").say(DONE)
    report_of(tmp_path, "liger").say(FAILED, "ImportError: liger\nand more")
    say_steps(report_of(tmp_path, "sdpa"), 7000.0)  # interrupted
    table.write(page, read(tmp_path / "run.jsonl"), LABELS)
    text = page.read_text()
    rows: list[Any] = [line.split("|") for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in row] for row in rows[2:]]
    assert [cell[1] for cell in cells] == [LABELS["eager"], LABELS["filled"] + " (2 x 16)"]
    assert {*cells[0][2:-1]} == {"25%, 1,000"}
    assert {*cells[1][2:-1]} == {"25%, 3,000"}
    assert "liger" in text
    assert "and more" not in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "NVIDIA H200 (May; torch 3)" in text
