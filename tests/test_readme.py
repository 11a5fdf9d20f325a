"""What the documentation tells people to type works."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from vocagnolm import config

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = [README, *(p.read_text(encoding="utf-8") for p in (ROOT / "docs").glob("*.md"))]


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def train_commands() -> list[list[str]]:
    lines = [line for block in code_blocks("") for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if "train.py" in line]


@pytest.mark.parametrize("words", train_commands(), ids=" ".join)
def test_command_of_the_readme_parses(words: list[str]) -> None:
    if "--config_file" in words:
        assert (ROOT / words[words.index("--config_file") + 1]).is_file()
    arguments = config.parse(words[words.index("train.py") + 1 :])
    assert arguments[0].teacher == "Qwen/Qwen2.5-Math-7B-Instruct"


def test_option_table_of_the_readme_has_the_defaults() -> None:
    model, data, guidance, run = config.parse(["--teacher", "T"])
    rows = re.findall(r"^\| (`--.*?) \| (.*?) \|", README, flags=re.MULTILINE)
    checked = 0
    for options, defaults in rows:
        names = re.findall(r"`--(\w+)`", options)
        for name, default in zip(names, defaults.split(", "), strict=False):
            if name not in ("student", "teacher", "config") and default != "none":
                owner = next(part for part in (model, data, guidance, run) if hasattr(part, name))
                assert default.strip("`").lower() == str(getattr(owner, name)).lower(), name
                checked += 1
    assert checked >= 12


def test_library_example_of_the_readme_runs(
    tokenizer_dirs: dict[str, Path],
    tiny_llama: Callable[..., Any],
    training_texts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directories = []
    for family in ("metaspace", "nfc_digits"):
        directory = tmp_path / family
        shutil.copytree(tokenizer_dirs[family], directory)
        size = len(AutoTokenizer.from_pretrained(directory))
        tiny_llama(size, max_position_embeddings=4096).save_pretrained(directory)
        directories.append(str(directory))
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"text": text}) for text in training_texts]
    Path("pages.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (example,) = code_blocks("python")
    names: dict[str, Any] = dict(zip(("STUDENT", "TEACHER"), directories, strict=True))
    exec(compile(example, "README.md", "exec"), names)
    assert names["trainer"].state.global_step > 0


@pytest.mark.parametrize("text", DOCUMENTS, ids=lambda text: text.splitlines()[0])
def test_files_and_tests_named_in_the_documents_exist(text: str) -> None:
    for link in re.findall(r"\]\(((?!http)[^)#]+)\)", text):
        assert (ROOT / link).exists() or (ROOT / "docs" / link).exists(), link
    sources = {path.name: path.read_text(encoding="utf-8") for path in ROOT.glob("tests/*.py")}
    for name in re.findall(r"`(test_\w+\.py)", text):
        assert name in sources, name
    for name in re.findall(r"\b(test_\w+)`", text):
        assert any(f"def {name}(" in source for source in sources.values()), name
