"""What `vocagnolm export` reads in a checkpoint. Whole runs are in test_export.py."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from vocagnolm.models.load import ModelSource
from vocagnolm.run import export


@pytest.fixture
def saved(tiny_llama: Callable[..., Any], tokenizer_dirs: dict[str, Path], tmp_path: Path) -> Path:
    """A model that `save_model` wrote after training, which turns the cache off."""
    place = Path(shutil.copytree(tokenizer_dirs["metaspace"], tmp_path / "checkpoint-7"))
    model = tiny_llama(700)
    model.config.use_cache = False
    model.save_pretrained(place)
    return place


def write(place: Path, **content: Any) -> None:
    """Write JSON objects by the names of their files, without the ending."""
    for name, value in content.items():
        (place / f"{name}.json").write_text(json.dumps(value))


def test_saved_model_is_exported_next_to_it(saved: Path) -> None:
    done = export.export(saved)
    assert done == saved.with_name("export-7")
    assert AutoConfig.from_pretrained(done).use_cache is True
    with pytest.raises(ValueError, match="is not empty"):
        export.export(saved)
    file = saved.with_name("file")
    file.write_text("")
    with pytest.raises(ValueError, match="is not empty"):
        export.export(saved, file)


def test_settings_are_of_the_checkpoint_or_else_of_the_run(saved: Path) -> None:
    assert export._settings_of(saved) == {}
    size = (saved / "model.safetensors").stat().st_size
    # In Python, `save_model` writes no manifest.
    write(saved, run={"seed": 1})
    assert export._settings_of(saved) == {"seed": 1}
    write(saved, manifest={"files": {"model.safetensors": size}})
    assert export._settings_of(saved) == {"seed": 1}
    write(saved, manifest={"files": {"model.safetensors": size}, "run": {"seed": 2}})
    assert export._settings_of(saved) == {"seed": 2}
    (saved / "run.json").unlink()
    assert export._settings_of(saved) == {"seed": 2}
    write(saved, manifest={"files": {"model.safetensors": size + 1}, "run": {"seed": 2}})
    with pytest.raises(ValueError, match=r"model\.safetensors has"):
        export._settings_of(saved)


def test_directory_without_a_model_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no manifest\.json"):
        export.export(tmp_path)


def test_whole_model_needs_no_student(saved: Path, tmp_path: Path) -> None:
    write(saved, run={"student": str(tmp_path / "gone")})
    export.export(saved)


def test_student_is_that_of_the_run_or_else_of_the_adapters(tmp_path: Path) -> None:
    def student(settings: dict[str, Any]) -> ModelSource:
        return export._student_of(tmp_path, settings, trust_remote_code=True)

    run = {"student": "s", "student_revision": "1", "model_init_kwargs": {"rope_scaling": None}}
    expected = ModelSource("s", "student", "1", None, True, {"rope_scaling": None})
    assert student(run) == expected
    assert student({}) == ModelSource(str(tmp_path), "student", trust_remote_code=True)
    write(tmp_path, adapter_config={"base_model_name_or_path": "base", "revision": "2"})
    assert student(run) == expected
    # Python may have given the run a model without a name of its own.
    assert student({"student": ""}) == ModelSource("base", "student", "2", trust_remote_code=True)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"adapter_config\.json is damaged"):
        student(run)


def test_tokenizer_is_that_of_the_checkpoint_or_else_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_tokenizer(place: str, role: str, *, revision: str | None, **options: Any) -> Any:
        return place, role, revision, options

    monkeypatch.setattr(export, "load_tokenizer", load_tokenizer)
    student = ModelSource("base", "student", "2", trust_remote_code=True)
    trusted = {"trust_remote_code": True}
    run: dict[str, Any] = {"student_tokenizer": None}
    assert export._tokenizer_of(tmp_path, run, student) == ("base", "student", "2", trusted)
    run["student_tokenizer"] = "other"
    assert export._tokenizer_of(tmp_path, run, student) == ("other", "student", None, trusted)
    write(tmp_path, tokenizer_config={})
    place = str(tmp_path)
    assert export._tokenizer_of(tmp_path, run, student) == (place, "student", None, trusted)
