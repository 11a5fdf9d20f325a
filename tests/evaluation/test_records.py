"""The files of an evaluation: items as lines, settings, and what a kill leaves."""

from __future__ import annotations

import copy
import json
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest

from vocagnolm.evaluation.records import EvaluationDirectory, to_line

SETTINGS: dict[str, Any] = {
    "model": {"name": "runs/student", "revision": "sha256:aa"},
    "engine": "hf",
    "dtype": "float32",
    "limit": None,
    "benchmarks": {
        "gsm8k": {"version": 1, "data_sha256": "d", "prompts_sha256": "p", "max_new_tokens": 9}
    },
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """The settings with another value at a path such as "model.revision"."""
    settings: dict[str, Any] = copy.deepcopy(SETTINGS)
    *parents, name = path.split(".")
    reduce(getitem, parents, settings)[name] = value
    return settings


def append(directory: EvaluationDirectory, benchmark: str, process: int, *indices: int) -> None:
    with directory.appending(benchmark, process) as file:
        for idx in indices:
            file.write(to_line({"idx": idx, "by": process}))


def outputs(*indices: int) -> list[tuple[int, int]]:
    """The keys of items that have one output."""
    return [(idx, 0) for idx in indices]


@pytest.fixture
def directory(tmp_path: Path) -> EvaluationDirectory:
    """A directory with settings and two items of gsm8k."""
    directory = EvaluationDirectory(tmp_path / "evaluation")
    directory.path.mkdir()
    directory.write_settings(SETTINGS)
    append(directory, "gsm8k", 0, 4, 1)
    return directory


# Items


@pytest.mark.parametrize("torn", [b'{"idx": 7, "by', b'{"idx": 7}', b"\xe2\x82", b"\x00\x00"])
def test_torn_last_line_is_ignored_and_cut_off(directory: EvaluationDirectory, torn: bytes) -> None:
    path = directory.path / "gsm8k.part0.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    assert list(directory.finished("gsm8k")) == outputs(4, 1)
    append(directory, "gsm8k", 0, 7)
    assert list(directory.finished("gsm8k")) == outputs(4, 1, 7)
    assert path.read_bytes() == whole + to_line({"idx": 7, "by": 0}).encode()


def test_complete_sorts_and_removes_parts(directory: EvaluationDirectory) -> None:
    append(directory, "gsm8k", 11, 3)
    append(directory, "gsm8k", 2, 0)
    append(directory, "mathqa", 0, 8)
    append(directory, "math", 0, 9)
    # A user's copy of a part is not read, and stays.
    (directory.path / "gsm8k.part0.old.jsonl").write_text(to_line({"idx": 9, "by": 0}))
    assert list(directory.finished("math")) == outputs(9)
    assert sorted(directory.finished("gsm8k")) == outputs(0, 1, 3, 4)
    with pytest.raises(ValueError, match="output_dir"):
        directory.complete("gsm8k", outputs(1, 2, 4))  # the second is missing
    assert sorted(directory.finished("gsm8k")) == outputs(0, 1, 3, 4)
    directory.complete("gsm8k", outputs(0, 1, 3, 4))
    lines = (directory.path / "gsm8k.jsonl").read_text().splitlines()
    assert [json.loads(line)["idx"] for line in lines] == [0, 1, 3, 4]
    parts = {path.name for path in directory.path.glob("*.part*")}
    assert parts == {"gsm8k.part0.old.jsonl", "math.part0.jsonl", "mathqa.part0.jsonl"}


def test_complete_ends_the_same_after_a_kill(
    directory: EvaluationDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(directory, "gsm8k", 1, 0)

    def kill(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", kill)
        with pytest.raises(KeyboardInterrupt):
            directory.complete("gsm8k", outputs(0, 1, 4))
    killed = (directory.path / "gsm8k.jsonl").read_bytes()
    assert (directory.path / "gsm8k.part1.jsonl").exists()
    assert sorted(directory.finished("gsm8k")) == outputs(0, 1, 4)
    directory.complete("gsm8k", outputs(0, 1, 4))
    assert (directory.path / "gsm8k.jsonl").read_bytes() == killed
    assert not list(directory.path.glob("*.part*"))


@pytest.mark.parametrize("text", ["naïve 数学 😀", "a\udc80b", "\x00\x1b\x7f", "\u2028\r\n"])
def test_text_survives_when_it_is_not_valid_unicode(
    directory: EvaluationDirectory, text: str
) -> None:
    with directory.appending("demo", 0) as file:
        file.write(to_line({"idx": 0, "raw_output": text}))
    directory.complete("demo", outputs(0))
    assert (directory.path / "demo.jsonl").read_bytes().isascii()
    assert directory.finished("demo")[0, 0]["raw_output"] == text


# Settings


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("model.revision", "sha256:bb", "model was sha256:aa, now sha256:bb"),
        ("limit", 8, "limit was None, now 8"),
        ("benchmarks.gsm8k.prompts_sha256", None, r"gsm8k\.prompts_sha256 was p, now None"),
    ],
)
def test_other_settings_are_rejected(
    directory: EvaluationDirectory, path: str, value: Any, said: str
) -> None:
    with pytest.raises(ValueError, match=f"output_dir .*{said}"):
        directory.write_settings(changed(path, value))
    # Without the earlier settings, it is not known how the items were made.
    (directory.path / "settings.json").unlink()
    with pytest.raises(ValueError, match="engine was None, now hf"):
        directory.write_settings(SETTINGS)


def test_model_may_be_moved_when_its_content_is_known(directory: EvaluationDirectory) -> None:
    directory.write_settings(changed("model.name", "/elsewhere/student"))
    unknown = changed("model.revision", "unknown")
    (directory.path / "settings.json").write_text(json.dumps(unknown))
    directory.write_settings(unknown)
    with pytest.raises(ValueError, match="org/other"):
        directory.write_settings(unknown | {"model": {"name": "org/other", "revision": "unknown"}})


def test_another_benchmark_joins(directory: EvaluationDirectory) -> None:
    directory.write_settings(changed("benchmarks", {"math": {"version": 3}}))
    append(directory, "math", 0, 0)
    directory.write_settings(SETTINGS)
    for name, before in (("math", 3), ("gsm8k", 1)):
        with pytest.raises(ValueError, match=rf"{name}\.version was {before}, now 4"):
            directory.write_settings(changed("benchmarks", {name: {"version": 4}}))


@pytest.mark.parametrize("content", [None, b"", b'{"idx": 3'])
def test_settings_may_change_when_there_is_no_item(tmp_path: Path, content: bytes | None) -> None:
    directory = EvaluationDirectory(tmp_path)
    directory.write_settings(SETTINGS)
    if content is not None:
        (tmp_path / "gsm8k.part0.jsonl").write_bytes(content)
    directory.write_settings(changed("dtype", "float16"))
    directory.write_settings(changed("benchmarks", {"math": {"version": 1}}))
    assert list(json.loads((tmp_path / "settings.json").read_text())["benchmarks"]) == ["math"]
