"""Wrong arguments of the commands that report: one line that names the option."""

from __future__ import annotations

from pathlib import Path

import pytest
from world import World, write_pages

from vocagnolm import __main__


@pytest.mark.parametrize(
    ("command", "wrong"),
    [
        # Options of a corpus have no effect on a text.
        ("inspect --text x", "--document 7"),
        ("inspect --text x", "--text_column body"),
        ("inspect --text x", "--teacher_chat_template plain"),
        ("inspect --text x", "--max_length 0"),
        ("inspect --text x", "--selection dft"),
        ("inspect --dataset pages.jsonl", "--document -1"),
        ("inspect --dataset pages.jsonl", "--document 4"),
        ("audit --dataset pages.jsonl", "--documents 0"),
        # Conversations are not documents, and another program's audit.md stays.
        ("audit", "--dataset talks.jsonl"),
        ("audit --dataset pages.jsonl", "--output_dir ."),
    ],
)
def test_wrong_argument_is_refused(
    command: str,
    wrong: str,
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_pages(Path("pages.jsonl"), ["one"] * 4)
    Path("talks.jsonl").write_text('{"prompt": "1 + 1?", "completion": "2"}\n')
    Path("audit.md").write_text("mine")
    models = ["--student", str(world.student), "--teacher", str(world.teacher)]
    assert __main__.main([*command.split(), *models, *wrong.split()]) == 2
    complained = capsys.readouterr().err.replace("error: argument ", "error: ")
    assert f"error: {wrong.split()[0]}" in complained
    assert Path("audit.md").read_text() == "mine"
