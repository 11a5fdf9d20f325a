"""What is said on the command line of `train.py` reaches the trainer."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import (
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from vocagnolm import token_loss, trainer
from vocagnolm.models import layers, sharding
from vocagnolm.models import source as models
from vocagnolm.readers import Teachers, teacher_reader
from vocagnolm.run import main as train
from vocagnolm.run import parse as config
from vocagnolm.store import score
from vocagnolm.texts.tokenizers import check_same_tokens


@pytest.fixture(scope="module")
def places(
    tokenizer_dirs: dict[str, Path],
    tiny_llama: Callable[..., Any],
    training_texts: list[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, str]:
    root = tmp_path_factory.mktemp("options")
    roles = {"student": "metaspace", "reference": "metaspace", "teacher": "nfc_digits"}
    for seed, (role, family) in enumerate(roles.items()):
        shutil.copytree(tokenizer_dirs[family], root / role)
        tiny_llama(800, seed=seed, max_position_embeddings=64).save_pretrained(root / role)
    lines = (json.dumps({"text": text}) + "\n" for text in training_texts[:30])
    (root / "pages.jsonl").write_text("".join(lines))
    names = {name: str(root / name) for name in (*roles, "pages.jsonl", "store")}
    common = [f"--dataset={names['pages.jsonl']}", "--min_context=16"]
    teacher = f"--teacher={names['teacher']}"
    assert score.main([teacher, *common, f"--output_dir={names['store']}"]) == 0
    return names


def build(places: dict[str, str], out: Path, *options: str) -> Any:
    """The trainer that `train.py` makes; {names} in options are places."""
    argv = [
        *(f"--student={places['student']}", f"--dataset={places['pages.jsonl']}"),
        *("--max_length=64", "--global_batch_tokens=128", "--max_steps=1", "--use_cpu"),
        *("--report_to=none", f"--output_dir={out}"),
    ]
    argv += [option.format(**places) for option in options]
    built = train.build(config.parse(argv))
    assert built is not None
    return built[0]


REACHES = {
    "--method=uld --teacher={teacher} --uld_weight=1.5": {
        "method": "uld",
        "distance": "sorted_l1",
        "distance_weight": 1.5,
    },
    "--method=kld --teacher={reference} --kld_direction=forward": {
        "method": "kld",
        "distance": "forward_kl",
        "distance_weight": 1.0,
    },
    "--method=rho1 --teacher={reference} --rho1_score=loss_and_entropy --top_k=0.3": {
        "method": "rho1",
        "top_k": 0.3,
        "rho1_score": "loss_and_entropy",
    },
    "--teacher={teacher} --loss_divisor=selected --aggregation=sum --unmapped=exclude": {
        "loss_divisor": "selected",
        "aggregation": "sum",
        "unmapped": "exclude",
    },
    "--method=random --selection_scope=batch": {
        "method": "random",
        "selection_scope": "batch",
        "needs_teacher": False,
    },
    "--method=chunk --chunk_guidance=random": {"method": "chunk", "needs_teacher": False},
}


@pytest.mark.parametrize("options", REACHES)
def test_option_reaches_the_objective(options: str, places: dict[str, str], tmp_path: Path) -> None:
    trainer = build(places, tmp_path, *options.split())
    method = trainer.objective.method
    assert {name: getattr(method, name) for name in REACHES[options]} == REACHES[options]
    assert (trainer.teacher is not None) == method.needs_teacher


def test_chunks_reach_the_collator(places: dict[str, str], tmp_path: Path) -> None:
    chunked = build(places, tmp_path / "a", "--method=chunk", "--teacher={teacher}", "--chunks=8")
    assert chunked.data_collator.chunks == 8
    assert build(places, tmp_path / "b", "--teacher={teacher}").data_collator.chunks is None


@pytest.mark.parametrize("kind", ["--teacher", "--teacher_losses"])
def test_reduction_reaches_the_teachers(kind: str, places: dict[str, str], tmp_path: Path) -> None:
    names = ("{teacher}", "{reference}") if kind == "--teacher" else ("{store}", "{store}")
    weighted = ("--teacher_reduction=weighted", "--teacher_weights", "1", "3")
    trainer = build(places, tmp_path, kind, *names, *weighted)
    method = trainer.objective.method
    assert (method.teacher_reduction, method.teacher_weights) == ("weighted", [1.0, 3.0])
    assert (len(trainer.resident) or trainer.teacher.teachers) == 2


def test_two_stores_train_when_evaluation_has_no_losses(
    places: dict[str, str], tmp_path: Path
) -> None:
    stores = ("--teacher_losses", "{store}", "{store}")
    trainer = build(places, tmp_path, *stores, f"--eval_dataset={places['pages.jsonl']}")
    assert trainer.evaluate()["eval_loss"] > 0


def test_pairing_reaches_the_corpus(places: dict[str, str], tmp_path: Path) -> None:
    ranges = []
    for pairing in ("last", "position"):
        options = ("--method=uld", "--teacher={teacher}", f"--uld_pairing={pairing}")
        trainer = build(places, tmp_path / pairing, *options)
        batch = trainer.data_collator([trainer.train_dataset[0]])
        ranges.append(batch["teacher_ranges"].tolist())
    assert ranges[0] != ranges[1]


def test_fingerprint_differs_when_tokens_are_mapped_by_number(
    teacher_tokenizer: PreTrainedTokenizerBase,
) -> None:
    readers = (teacher_reader(teacher_tokenizer, 64),)
    assert Teachers(readers).fingerprint() != Teachers(readers, by_position=True).fingerprint()
    assert Teachers(readers).fingerprint() == readers[0].fingerprint()


def test_sharding_and_quantization_reach_every_teacher(
    places: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Any] = []
    load = models.ModelSource.load

    def note_load(source: Any, dtype: Any, quantized: Any = None, device: Any = None) -> Any:
        done.append((source.role, quantized, device))
        return load(source, dtype)

    def note_shards(model: Any, device: Any) -> Any:
        done.append(("sharded", device))
        return model

    monkeypatch.setattr(models.ModelSource, "load", note_load)
    monkeypatch.setattr(sharding, "shard_inside_machine", note_shards)
    teachers, cpu = ("--teacher", "{teacher}", "{teacher}"), torch.device("cpu")
    given = {"quant_method": "fp8"}
    build(
        places | {"given": json.dumps(given)},
        tmp_path / "a",
        *teachers,
        "--teacher_quantization={given}",
    )
    loaded = ("teacher", given, cpu)
    assert done == [("student", None, None), loaded, loaded]
    done.clear()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    build(places, tmp_path / "b", *teachers, "--teacher_sharding=node")
    one = [("teacher", None, cpu), ("sharded", cpu)]  # before the next one takes memory
    assert done == [("student", None, None), *one, *one]


@pytest.mark.parametrize("options", ["", "--compile_layers", "--attend_across_documents"])
def test_models_are_checked_and_then_compiled(
    options: str, places: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Any] = []

    def note(name: str, model: Any, *device: Any, **longest: int) -> None:
        done.append((name, model, *device, longest))

    for name in ("check_longest", "check_packing", "compile_layers"):
        monkeypatch.setattr(train, name, partial(note, name))
    teachers = ("--teacher", "{teacher}", "{reference}")
    short = tmp_path / "short.jsonl"
    short.write_text(json.dumps({"text": "1 + 1 = 2"}) + "\n")
    parts = [places["pages.jsonl"], str(short)]
    if not options:  # the longest segment is once evaluated on, and otherwise trained on
        parts.reverse()
    few = (f"--dataset={parts[0]}", f"--eval_dataset={parts[1]}", "--global_batch_tokens=64")
    built = build(places, tmp_path, *teachers, *few, *options.split())
    readers, crosses = (built.model, *built.teacher.models), "across" in options
    ours, *theirs = built.train_dataset.longest_segments(crosses)
    ours = max(ours, built.eval_dataset.longest_segments(crosses)[0])
    expected: list[Any] = []
    for reader, longest in zip(readers, (ours, *theirs), strict=True):
        expected.append(("check_longest", reader, torch.device("cpu"), {"longest": longest}))
        if not crosses:
            expected.append(("check_packing", reader, torch.device("cpu"), {}))
    if options == "--compile_layers":
        expected += [("compile_layers", reader, {}) for reader in readers]
    assert done == expected


@pytest.mark.parametrize(("kind", "rope"), [("--teacher", False), ("--teacher_losses", None)])
def test_liger_does_not_reach_the_teacher(
    kind: str,
    rope: bool | None,
    places: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layers, "is_liger_kernel_available", lambda: True)
    place = {"--teacher": "{teacher}", "--teacher_losses": "{store}"}[kind]
    trainer = build(places, tmp_path, f"{kind}={place}", "--use_liger_kernel=true")
    assert trainer.args.liger_kernel_config.get("rope") is rope


def test_trainer_probes_the_student_on_its_training_device(
    places: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    probe = token_loss.add_token_losses

    def note(model: Any, device: Any = None) -> Any:
        given.append(device)
        return probe(model, device)

    monkeypatch.setattr(trainer, "add_token_losses", note)
    build(places, tmp_path, "--method=cpt")
    assert given == [torch.device("cpu")]


@pytest.mark.parametrize("role", ["student", "teacher"])
@pytest.mark.parametrize("crossing", [False, True])
def test_run_is_refused_before_it_starts(
    crossing: bool, role: str, places: dict[str, str], tmp_path: Path
) -> None:
    options = ["--teacher={teacher}", *["--attend_across_documents"] * crossing]
    blocks = build(places, tmp_path / "any", *options).train_dataset
    longest = blocks.longest_segments(crossing)[role == "teacher"]
    assert longest > 16, "what check_packing reads"
    narrow = tmp_path / "narrow"
    shutil.copytree(places[role], narrow)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"vocab_size": 800, "max_position_embeddings": 64}
    message = f"sliding window of {longest - 1} tokens, shorter than a segment of {longest}, "
    refused = pytest.raises(ValueError, match=message)
    for window, ends in ((longest, nullcontext()), (longest - 1, refused)):
        narrower = MistralConfig(sliding_window=window, **sizes, **heads)
        MistralForCausalLM(narrower).save_pretrained(narrow)
        where = places | {role: str(narrow)}, tmp_path / f"{window}"
        with ends:
            build(*where, *options, "--attn_implementation=torch_varlen")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--method=kld --teacher={teacher}", "--method kld needs a teacher with the student's vo"),
        ("--method=rho1 --teacher={teacher}", "--method rho1 needs a teacher with the student's"),
        ("--method=rho1 --teacher_losses={store}", "another tokenizer than the student's"),
        ("--method=kld --teacher={short}", "--max_length 64 exceeds the teacher's context of 32"),
    ],
)
def test_teacher_is_refused(
    options: str,
    message: str,
    places: dict[str, str],
    tiny_llama: Callable[..., Any],
    tmp_path: Path,
) -> None:
    short = tmp_path / "short"
    shutil.copytree(places["reference"], short)
    tiny_llama(800, max_position_embeddings=32).save_pretrained(short)
    with pytest.raises(ValueError, match=message):
        build(places | {"short": str(short)}, tmp_path / "out", *options.split())


def test_tokens_are_the_same(
    student_tokenizer: PreTrainedTokenizerFast, teacher_tokenizer: PreTrainedTokenizerFast
) -> None:
    check_same_tokens(student_tokenizer, student_tokenizer, "kld")
    wider = copy.deepcopy(student_tokenizer)
    wider.add_tokens([f"<noise{n}>" for n in range(16)])
    check_same_tokens(student_tokenizer, wider, "kld")
    with pytest.raises(ValueError, match="needs a teacher with the student's vocabulary"):
        check_same_tokens(wider, student_tokenizer, "kld")
    with pytest.raises(ValueError, match="needs a teacher with the student's vocabulary"):
        check_same_tokens(student_tokenizer, teacher_tokenizer, "kld")
    otherwise = copy.deepcopy(student_tokenizer)
    splits = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.Metaspace()]
    otherwise.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    with pytest.raises(ValueError, match="cuts a text into other tokens"):
        check_same_tokens(student_tokenizer, otherwise, "kld")


def test_run_goes_on(places: dict[str, str], tmp_path: Path) -> None:
    build(places, tmp_path, "--teacher={teacher}")
    settings = json.loads((tmp_path / "run.json").read_text())
    del settings["chunks"], settings["use_peft"]
    (tmp_path / "run.json").write_text(json.dumps(settings))
    (tmp_path / "checkpoint-1").mkdir()  # there is something to go on with
    build(places, tmp_path, "--teacher={teacher}")
    with pytest.raises(ValueError, match=r"--top_k was 0\.4, now 0\.5"):
        build(places, tmp_path, "--teacher={teacher}", "--top_k=0.5")
