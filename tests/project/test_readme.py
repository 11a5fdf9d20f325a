"""The README and the pages: their examples run, what they name exists, none is missing."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")}
DOCUMENTS = [README, *PAGES.values()]


def code_blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def test_readme_is_short_and_wrapped() -> None:
    lines = README.splitlines()
    assert len(lines) <= 140
    assert [line for line in lines if len(line) > 100] == []


def test_short_example_of_the_readme_runs(tiny_llama: Callable[..., Any]) -> None:
    (example,) = code_blocks("python")
    names: dict[str, Any] = {"model": tiny_llama(50), "ids": torch.tensor([[1, 2, 3]])}
    exec(compile(example, "README.md", "exec"), names)
    assert names["losses"].shape == (1, 3)


def test_index_of_the_documents_names_each_page() -> None:
    linked = re.findall(r"^\| \[(\S+)\]\(\1\)", PAGES["README.md"], flags=re.MULTILINE)
    assert sorted([*linked, "README.md"]) == sorted(PAGES)


@pytest.mark.slow
@pytest.mark.parametrize("page", ["library.md", "coming_from_trl.md"])
def test_library_example_of_the_documents_runs(
    page: str,
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
    lines = [json.dumps({"text": text}) for text in training_texts[:20]]
    Path("pages.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (example,) = code_blocks("python", PAGES[page])
    names: dict[str, Any] = dict(zip(("STUDENT", "TEACHER"), directories, strict=True))
    exec(compile(example, page, "exec"), names)
    assert names["trainer"].state.global_step > 0


def test_example_of_trl_is_python() -> None:
    theirs = code_blocks("", PAGES["coming_from_trl.md"])[0]
    assert {"SFTTrainer", "SFTConfig"} <= set(compile(theirs, "page", "exec").co_names)


@pytest.mark.parametrize("text", DOCUMENTS, ids=lambda text: text.splitlines()[0])
def test_files_and_tests_named_in_the_documents_exist(text: str) -> None:
    for link in re.findall(r"\]\(((?!http)[^)#]+)\)", text):
        assert (ROOT / link).exists() or (ROOT / "docs" / link).exists(), link
    sources = {path.name: path.read_text(encoding="utf-8") for path in ROOT.glob("tests/**/*.py")}
    for name in re.findall(r"`(test_\w+\.py)", text):
        assert name in sources, name
    for name in re.findall(r"\b(test_\w+)`", text):
        assert any(f"def {name}(" in source for source in sources.values()), name


def test_site_lists_each_page() -> None:
    listed = re.findall(r"- (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    assert sorted(listed) == sorted(PAGES)


def test_messages_that_are_explained_are_said() -> None:
    files = [path for end in ("py", "yaml") for path in ROOT.glob(f"vocagnolm/**/*.{end}")]
    source = "".join(path.read_text(encoding="utf-8") for path in files)
    # One text, where a literal goes on in the next line.
    source = re.sub(r'"\n\s*f?"', "", source).replace("{extra}", "eval")
    cells = re.findall(r"^\| (`.*?) \|", PAGES["troubleshooting.md"], flags=re.MULTILINE)
    messages = [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]
    assert len(messages) > 10
    assert [message for message in messages if message not in source] == []
