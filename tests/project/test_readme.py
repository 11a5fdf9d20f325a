"""The examples of the README and of the pages run, and the files that they link to exist."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]


def first_example(page: str) -> str:
    """The first Python example of a page; `test_extending` runs the rest."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.search(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    assert found
    return found[1]


@pytest.mark.slow
def test_library_example_of_the_documents_runs(
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
    lines = [json.dumps({"text": text}) for text in training_texts[:20] * 12]
    Path("pages.jsonl").write_text("\n".join(lines), encoding="utf-8")
    names: dict[str, Any] = dict(zip(("STUDENT", "TEACHER"), directories, strict=True))
    exec(compile(first_example("docs/library.md"), "library.md", "exec"), names)
    assert names["trainer"].state.global_step > 0


def test_links_of_pages_exist() -> None:
    # Links as GitHub resolves them; mkdocs checks those of the site.
    for page in [ROOT / "README.md", *ROOT.glob("docs/*.md")]:
        text = page.read_text(encoding="utf-8")
        links = re.findall(r"\]\(((?!http)[^)#\s]+)", text)
        links += re.findall(r"src(?:set)?=\"((?!http)[^\"]+)", text)
        missing = [link for link in links if not (page.parent / link.partition("#")[0]).exists()]
        assert missing == [], page.name
