"""`vocagnolm weights`: the numbers of training, as rows of a data set."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from kills import Killed
from launch import run_jobs
from transformers import AutoModelForCausalLM, AutoTokenizer
from world import World, make_world

from vocagnolm import VocAgnoTrainer, __main__
from vocagnolm.run import weighing
from vocagnolm.run.parser import parse
from vocagnolm.training.models import read_models
from vocagnolm.training.packed import pack_documents, read_corpora

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
TOKENS = ("student_loss", "teacher_loss", "weight")


@pytest.fixture(scope="module")
def corpora(
    tokenizer_dirs: dict[str, Path],
    tiny_llama: Callable[..., Any],
    training_texts: list[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> World:
    """A world with documents, some of them long, and with conversations."""
    root = tmp_path_factory.mktemp("weights")
    texts = [*training_texts[:17], "\n\n".join(training_texts[17:22])]
    world = make_world(root, tiny_llama, tokenizer_dirs, texts, initializer_range=0.1)
    for place in (world.student, world.teacher):
        tokenizer: Any = AutoTokenizer.from_pretrained(place)
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(place)
    turns = []
    for text in texts[:9]:
        asked = [{"role": "user", "content": text[:20]}]
        turns.append({"messages": [*asked, {"role": "assistant", "content": text[20:90]}]})
    # With its second answer, this one exceeds 48 tokens.
    said = {"role": "assistant", "content": texts[0]}
    turns.append({"messages": [*turns[0]["messages"], *asked, said]})
    (root / "turns.jsonl").write_text("".join(json.dumps(row) + "\n" for row in turns))
    return world


def argv_of(world: World, out: Path, **changes: Any) -> list[str]:
    """A command line that weighs the documents."""
    given: dict[str, Any] = {"max_length": "48", "max_steps": None, "save_steps": None}
    given |= {"eval_fraction": None, "global_batch_tokens": None, "learning_rate": None}
    return world.argv("", **{**given, "output_dir": str(out), "use_cpu": "True", **changes})


def weigh(world: World, out: Path, **changes: Any) -> datasets.Dataset:
    assert __main__.main(["weights", *argv_of(world, out, **changes)]) == 0
    return datasets.load_dataset(str(out), split="train", cache_dir=f"{out}-cache")


def trained(world: World, out: Path, **changes: Any) -> dict[tuple[str, int, int], dict[str, Any]]:
    """What training computes of each segment in an epoch at rate 0, by corpus, document, start."""
    one = {"global_batch_tokens": "48", "learning_rate": "0", "save_strategy": "no"}
    job = parse(argv_of(world, out, **one, **changes))
    models = read_models(job.model, job.args, job.args.device)
    packed = pack_documents(job, models, read_corpora(job))
    trainer = VocAgnoTrainer(prepared=(job, models, packed))
    found: dict[int, dict[str, Any]] = {}
    objective, add_student = trainer.token_objective, trainer.metrics.add_student
    select = type(objective).select

    def selected(self: Any, student: Any, batch: Any, teacher: Any = None) -> Any:
        guidance = select(self, student, batch, teacher)
        found[batch["block"].item()] = {
            "teacher_loss": guidance.teacher_loss_BS.where(guidance.mapped_BS, torch.nan)[0]
        }
        return guidance

    def added(loss_BS: Any, valid_BS: Any, weight_BS: Any, block_B: Any) -> None:
        add_student(loss_BS, valid_BS, weight_BS, block_B)
        floor = job.args.unselected_weight * valid_BS
        numbers = {
            "student_loss": loss_BS[0].detach(),
            "weight": weight_BS.where(weight_BS != 0, floor)[0],
        }
        found[block_B.item()] |= {**numbers, "valid": valid_BS[0]}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(objective), "select", selected)
        patch.setattr(trainer.metrics, "add_student", added)
        trainer.train()
    assert sorted(found) == list(range(len(packed.blocks)))
    segments = {}
    names, ends = list(packed.texts), np.cumsum(list(packed.blocks.parts.values()))
    for block, numbers in found.items():
        rows, first = packed.segments.rows[packed.blocks.segments(block)], 0
        name = names[int(np.searchsorted(ends, block, side="right"))]
        for place, ids in enumerate(rows["student_ids"]):
            part = {each: values[first : first + len(ids)] for each, values in numbers.items()}
            key = (name, rows["document"][place], rows["start"][place])
            segments[key] = {**part, "input_ids": ids, "end": rows["end"][place]}
            first += len(ids)
    return segments


def source_of(row: dict[str, Any]) -> dict[str, Any]:
    """The document or conversation of which a row is a part."""
    source: dict[str, Any] = json.loads(
        Path(row["dataset"]).read_text().splitlines()[row["document"]]
    )
    return source


CASES: dict[str, dict[str, Any]] = {
    "the paper's rule": {},
    "acceptance": {"selection": "accept"},
    "two teachers": {"teacher": ["TEACHER", "STUDENT"], "aggregation": "mean"},
    "a store": {"teacher_losses": ["STORE"], "selection": "accept"},
    "a floor in bfloat16": {"unselected_weight": "0.3", "aggregation": "share", "bf16": "True"},
    "conversations": {"dataset": ["TURNS"], "selection": "accept"},
    "two corpora": {"dataset": ["PAGES", "TURNS"], "method": "rho1", "teacher": ["STUDENT"]},
    "chunks": {"method": "chunk", "chunks": "4"},
    "equal weights": {"method": "cpt", "teacher": None},
    "random weights": {"method": "random", "teacher": None},
    "by the student's probability": {"selection": "dft", "teacher": None},
    "by the student's entropy": {"selection": "eaft", "teacher": None},
}


@pytest.mark.parametrize("case", CASES)
def test_rows_have_the_numbers_of_training(case: str, corpora: World, tmp_path: Path) -> None:
    places = {"TEACHER": corpora.teacher, "STUDENT": corpora.student, "PAGES": corpora.pages}
    places["TURNS"] = corpora.root / "turns.jsonl"
    if case == "a store":
        places["STORE"] = corpora.score()
    options: dict[str, Any] = {}
    for name, value in CASES[case].items():
        is_list = isinstance(value, list)
        options[name] = [str(places[item]) for item in value] if is_list else value
    rows = weigh(corpora, tmp_path / "out", **options)
    expected = trained(corpora, tmp_path / "run", **options)
    found = {(row["dataset"], row["document"], row["start"]): row for row in rows}
    assert found.keys() == expected.keys()
    if case == "the paper's rule":
        assert len({document for _, document, _ in found}) < len(found)
    if case == "conversations":
        assert len(rows[9]["messages"]) < len(source_of(rows[9])["messages"])
    assert list(found) == sorted(found)
    for key, row in found.items():
        same = expected[key]
        content = source_of(row)
        if row.get("messages"):
            said = "\n".join(message["content"] for message in row["messages"])
            assert len(said) == row["end"]
            assert row["messages"] == content["messages"][: len(row["messages"])]
        else:
            assert row["text"] == content["text"][row["start"] : row["end"]]
        valid = same["valid"].numpy()
        assert row["input_ids"] == same["input_ids"]
        assert row["end"] == same["end"]
        assert row["labels"] == np.where(valid, row["input_ids"], -100).tolist()
        for name in TOKENS:
            # A token without a label has no loss, and no weight.
            nothing = 0.0 if name == "weight" else np.nan
            numbers = np.where(valid, same[name].float().numpy(), nothing)
            np.testing.assert_allclose(row[name], numbers, rtol=1e-6, atol=1e-6)


def test_weights_of_a_corpus_multiply_those_of_the_method(corpora: World, tmp_path: Path) -> None:
    rows = [row | {"weight": (-0.5, 0.0, 3.0)[n % 3]} for n, row in enumerate(corpora.rows())]
    weighted = tmp_path / "weighted.jsonl"
    weighted.write_text("".join(json.dumps(row) + "\n" for row in rows))
    plain = weigh(corpora, tmp_path / "plain", selection="accept")
    found = weigh(corpora, tmp_path / "found", selection="accept", dataset=str(weighted))
    for one, other in zip(plain, found, strict=True):
        weight = rows[other["document"]]["weight"]
        assert other["weight"] == pytest.approx([weight * value for value in one["weight"]])
        assert other["input_ids"] == one["input_ids"]


def files(out: Path) -> dict[str, bytes]:
    """The shards of a finished directory."""
    return {path.name: path.read_bytes() for path in sorted((out / "data").iterdir())}


def test_directory_is_the_same_when_the_command_was_killed(
    corpora: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(weighing, "SHARD_SEQUENCES", 8)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    rows = weigh(corpora, whole)
    assert len(files(whole)) == 3
    write_file, written = weighing.write_file, []

    def kill_after_two(path: Path, *rest: Any) -> None:
        write_file(path, *rest)
        written.append(path.name)
        if len(written) == 2:
            raise Killed

    monkeypatch.setattr(weighing, "write_file", kill_after_two)
    with pytest.raises(Killed):
        weigh(corpora, killed)
    # A part must not pass for the whole.
    with pytest.raises(datasets.exceptions.DataFilesNotFoundError):
        datasets.load_dataset(str(killed))
    weigh(corpora, killed)
    assert sorted(written) == sorted(files(whole))
    assert files(killed) == files(whole)
    before = list(written)
    assert __main__.main(["weights", *argv_of(corpora, killed)]) == 0
    assert written == before
    # A training of ours would weigh the tokens anew.
    argv = argv_of(corpora, tmp_path / "run", dataset=str(whole), global_batch_tokens="48")
    assert __main__.main(["train", *argv]) == 2
    assert f"{len(rows)} has a list" in capsys.readouterr().err


def test_other_settings_are_refused_in_the_same_directory(
    corpora: World,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weigh(corpora, tmp_path)
    told = capsys.readouterr().out
    assert "bytes per token" in told
    assert __main__.main(["weights", *argv_of(corpora, tmp_path, top_k="0.3")]) == 2
    assert "top_k was 0.4, now 0.3" in capsys.readouterr().err
    # Shards of two sizes would not fit together.
    monkeypatch.setattr(weighing, "SHARD_SEQUENCES", 8)
    assert __main__.main(["weights", *argv_of(corpora, tmp_path)]) == 2
    assert "shard_sequences was 256, now 8" in capsys.readouterr().err


def test_weights_of_another_student_or_teacher_at_the_same_path_are_refused(
    corpora: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for role in ("student", "teacher"):
        shutil.copytree(getattr(corpora, role), tmp_path / role)
    places = {role: str(tmp_path / role) for role in ("student", "teacher")}
    weigh(corpora, tmp_path / "out", **places)
    for role, name in (("teacher", "teacher"), ("student", "your model")):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / role)
        with torch.no_grad():
            model.get_output_embeddings().weight *= 2
        model.save_pretrained(tmp_path / role)
        assert __main__.main(["weights", *argv_of(corpora, tmp_path / "out", **places)]) == 2
        assert f"{name} has changed" in capsys.readouterr().err


def test_two_stores_of_one_teacher_give_what_one_does(corpora: World, tmp_path: Path) -> None:
    lines = corpora.pages.read_text().splitlines(keepends=True)
    stores = []
    for name, part in (("first", lines[:7]), ("second", lines[7:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(part))
        stores.append(str(corpora.score(name, dataset=str(tmp_path / f"{name}.jsonl"))))
    weigh(corpora, tmp_path / "two", teacher_losses=stores, selection="accept")
    weigh(corpora, tmp_path / "one", teacher_losses=[str(corpora.score())], selection="accept")
    assert files(tmp_path / "two") == files(tmp_path / "one")


@pytest.mark.parametrize(
    ("line", "option"),
    [
        ("--teacher t --method kld", "method"),
        ("--teacher t --method uld", "method"),
        ("--teacher t --teacher_sharding node", "teacher_sharding"),
        ("--teacher t --dry_run", "dry_run"),
        ("--teacher t", "output_dir"),
    ],
)
def test_option_is_refused(line: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = [] if option == "output_dir" else ["--output_dir=o"]
    assert __main__.main(["weights", *line.split(), *out]) == 2
    assert f"--{option} " in capsys.readouterr().err


def test_nan_of_a_teacher_is_not_a_missing_loss(
    corpora: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guide = VocAgnoTrainer.token_guidance

    def broken(self: Any, batch: Any) -> Any:
        guidance = guide(self, batch)
        return guidance._replace(teacher_loss_BS=guidance.teacher_loss_BS * torch.nan)

    monkeypatch.setattr(VocAgnoTrainer, "token_guidance", broken)
    assert __main__.main(["weights", *argv_of(corpora, tmp_path)]) == 3
    assert not list(tmp_path.glob("*/*.parquet"))


@pytest.mark.processes
def test_two_processes_write_what_one_does(
    corpora: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weighing, "SHARD_SEQUENCES", 8)
    alone, both = tmp_path / "alone", tmp_path / "both"
    weigh(corpora, alone)
    argv = argv_of(corpora, both)
    job = {"argv": argv, "fsdp": False, "command": "vocagnolm.run.weights"}
    run_jobs(tmp_path, [job])
    assert files(both) == files(alone)
