"""A store that an online run leaves behind."""

from __future__ import annotations

import hashlib
import json
import re
import signal
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from adapter_world import World
from stored_world import in_memory

from vocagnolm.cli import Exit
from vocagnolm.run import options as train
from vocagnolm.run.job import load_documents, read_models
from vocagnolm.store import record as recording
from vocagnolm.store.format import (
    MANIFEST_FILE,
    SHARDS,
    Store,
    finish_store,
    read_manifest,
    shard_name,
)
from vocagnolm.store.record import PROCESSES, LossRecorder, load_recorder
from vocagnolm.trainer import VocAgnoTrainer

BLOCK, STEPS = 64, 8
EPOCHS = ("--max_steps=90", "--save_steps=12")  # one may leave a block out; several do not


@pytest.fixture(scope="module")
def models(world: World) -> dict[str, str]:
    return {"student": str(world.student), "teacher": str(world.teacher)}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, training_texts: list[str]) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "pages.jsonl"
    texts = [*training_texts[:40], " ".join(training_texts[:60])]  # the last one is cut
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def run(
    models: dict[str, str], corpus: Path, output_dir: Path, *options: str, expected: int = 0
) -> str:
    """Train, and return the hash of the weights, if there are any."""
    status = train.main(
        [
            f"--student={models['student']}",
            *(f"--dataset={corpus}", f"--output_dir={output_dir}"),
            *(f"--max_length={BLOCK}", f"--global_batch_tokens={2 * BLOCK}", "--use_cpu=True"),
            *(f"--max_steps={STEPS}", "--save_steps=3", "--report_to=none", *options),
        ]
    )
    assert status == expected
    if status:
        return ""
    return hashlib.sha256((output_dir / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.slow
def test_run_from_its_own_store_gives_its_weights(
    models: dict[str, str], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "store"
    # Rounded losses would choose a few other tokens.
    monkeypatch.setattr("vocagnolm.store.record._DTYPE", "float32")
    saving = f"--save_store={directory}"
    first = run(models, corpus, tmp_path / "a", f"--teacher={models['teacher']}", saving, *EPOCHS)
    assert {path.suffix for path in directory.iterdir()} == {".arrow", ".json"}
    assert [path.name for path in directory.glob("*.json")] == [MANIFEST_FILE]
    second = run(models, corpus, tmp_path / "b", f"--teacher_losses={directory}", *EPOCHS)
    assert second == first


@pytest.mark.slow
@pytest.mark.parametrize("how", ["exception", "signal"])
def test_store_is_whole_after_a_resumed_run(
    how: str,
    models: dict[str, str],
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory = tmp_path / "store"
    options = (f"--teacher={models['teacher']}", f"--save_store={directory}", *EPOCHS)
    original = VocAgnoTrainer.training_step
    calls = 0

    def cut_off(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 71 and how == "exception":
            raise KeyboardInterrupt
        if calls == 71:
            signal.raise_signal(signal.SIGUSR1)
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(VocAgnoTrainer, "training_step", cut_off)
        status = Exit.INTERRUPTED if how == "exception" else Exit.STOPPED
        run(models, corpus, tmp_path / "run", *options, expected=status)
    assert SHARDS not in read_manifest(directory)
    run(models, corpus, tmp_path / "run", *options)
    store = Store(directory)
    texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    assert all(store.segments(text) for text in texts)


def test_store_differs_when_the_teacher_is_quantized_otherwise(
    models: dict[str, str], corpus: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "store"
    argv = [f"--student={models['student']}", f"--teacher={models['teacher']}", "--use_cpu=True"]
    argv += [f"--dataset={corpus}", f"--max_length={BLOCK}", f"--output_dir={tmp_path / 'run'}"]
    argv += [f"--global_batch_tokens={2 * BLOCK}", f"--save_store={directory}"]
    found = []
    for bits in (8, 8, 4, None):
        given = [f'--teacher_quantization={{"bits": {bits}}}'] if bits else []
        job = train.parse([*argv, *given])
        pair = read_models(job.model, job.args, job.args.device)
        documents = load_documents(job, pair)
        message = "quantization was {'bits': 8}, now " + (f"{{'bits': {bits}}}" if bits else "None")
        rejected = pytest.raises(ValueError, match=re.escape(message))
        with nullcontext() if bits == 8 else rejected:
            found.append(load_recorder(job, pair, documents))
    assert len(found) == 2


def made_up(directory: Path) -> LossRecorder:
    """A recorder of two documents in two blocks, of seven and of three tokens."""
    row = {"document": 0, "teacher_tokens": 3, "teacher_codes": [2, 2], "teacher_exceptions": []}
    segments = [{**row, "start": 0, "end": 2}, {**row, "start": 2, "end": 4}]
    segments.append({**row, "document": 1, "start": 0, "end": 2})
    documents: Any = SimpleNamespace(
        texts=in_memory(["abcd", "ef"]),
        segments=SimpleNamespace(rows=datasets.Dataset.from_list(segments)),
        blocks=SimpleNamespace(segments={5: [0, 1], 6: [2]}.__getitem__),
    )
    about = {"teacher": "t", "tokenizer_sha256": "", "context": 3}
    return LossRecorder(directory, documents, about)


def test_start_tokens_and_later_epochs_are_not_recorded(tmp_path: Path) -> None:
    recorder = made_up(tmp_path)
    seen, new = [9.0, 1, 2, 9, 3, 4, 9], [9.0, 5, 6, 0, 0, 0, 0]
    recorder.add(torch.tensor([5]), torch.tensor([seen]))
    recorder.write(1)
    recorder.add(torch.tensor([5, 6]), torch.tensor([seen, new]))
    recorder.write(2)
    recorder.write(3)  # nothing is new
    shards = [path.name for path in sorted(tmp_path.glob("*.arrow"))]
    assert shards == [shard_name(step * PROCESSES) for step in (1, 2)]
    description = {"teacher": "t", "tokenizer_sha256": "", "context": 3}
    finish_store(tmp_path, description)
    found = Store(tmp_path)
    assert [one.losses.tolist() for one in found.segments("abcd") or []] == [[1, 2], [3, 4]]
    assert [one.losses.tolist() for one in found.segments("ef") or []] == [[5, 6]]
    assert found.manifest["tokens"] == 6


def test_losses_are_written_before_they_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = SimpleNamespace(
        process_index=3, is_main_process=True, wait_for_everyone=lambda: waits.append(1)
    )
    waits: list[int] = []
    monkeypatch.setattr(recording, "PartialState", lambda: process)
    monkeypatch.setattr(recording, "MOST_HELD", 7)
    recorder, begun = made_up(tmp_path), {"args": None, "control": None}
    at: Any = SimpleNamespace(global_step=1, max_steps=4)
    for at.global_step in (1, 2):
        recorder.add(torch.tensor([5]), torch.arange(7.0)[None])
        recorder.on_step_end(state=at, **begun)
    shards = [shard_name(step * PROCESSES + 3) for step in (2, 3)]
    assert [path.name for path in tmp_path.glob("*.arrow")] == shards[:1]
    recorder.add(torch.tensor([6]), torch.arange(7.0)[None])
    for at.global_step, process.is_main_process in ((3, True), (4, False), (4, True)):
        assert not (tmp_path / MANIFEST_FILE).exists()
        recorder.on_train_end(state=at, **begun)
    assert [path.name for path in sorted(tmp_path.glob("*.arrow"))] == shards
    assert Store(tmp_path).manifest["tokens"] == 6
    assert len(waits) == 6


def test_store_of_another_run_is_rejected(
    models: dict[str, str], corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "store"
    options = (f"--teacher={models['teacher']}", f"--save_store={directory}")
    run(models, corpus, tmp_path / "a", *options)
    arguments = [f"--student={models['student']}", f"--dataset={corpus}", "--use_cpu=True"]
    sizes = (f"--max_length={BLOCK}", f"--global_batch_tokens={2 * BLOCK}", "--max_steps=2")
    status = train.main([*arguments, *options, *sizes, f"--output_dir={tmp_path / 'b'}"])
    assert status == 2
    assert "holds a finished store" in capsys.readouterr().err
    # Its own run, killed before its end, goes on.
    (tmp_path / "a" / "README.md").unlink()
    run(models, corpus, tmp_path / "a", *options)
