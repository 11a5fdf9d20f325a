"""What runs save, with adapters, sharded or neither, and how it is resumed or exported."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from launch import run_jobs
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from world import World, make_world, save_model

from vocagnolm import VocAgnoConfig, VocAgnoTrainer
from vocagnolm.models.load import ModelSource
from vocagnolm.run import export, parser
from vocagnolm.run.parser import parse
from vocagnolm.training.models import read_models

pytestmark = pytest.mark.processes

peft = pytest.importorskip("peft")
LORA = {"use_peft": "True", "lora_r": "4", "lora_alpha": "16", "lora_modules_to_save": "norm"}
# Adam would magnify rounding where a gradient is tiny.
SGD = {"optim": "sgd", "learning_rate": "1"}
FSDP2 = Path(__file__).parents[2] / "accelerate_configs/fsdp2.yaml"


@pytest.fixture(scope="module")
def world(
    tiny_llama: Callable[..., Any],
    tokenizer_dirs: dict[str, Path],
    training_texts: list[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> World:
    """Two finished runs: `adapted`, with adapters, and `plain`, without."""
    root, texts = tmp_path_factory.mktemp("runs"), training_texts[:60]
    world = make_world(root, tiny_llama, tokenizer_dirs, texts, tie_word_embeddings=True)
    for name, options in (("adapted", LORA), ("plain", SGD)):
        assert parser.main(world.argv(name, use_cpu="True", **options)) == 0
    return world


@pytest.fixture(scope="module")
def several(world: World) -> World:
    """The same runs in two processes, under DDP and FSDP2, online and from a store."""
    stored = {"teacher_losses": str(world.score())}
    jobs = [  # a worker runs sharded jobs last
        job(world, False, "stored", **SGD, **stored),
        job(world, True, "sharded_plain", **SGD),
        job(world, True, "sharded", **LORA),
        job(world, True, "sharded_teacher", **SGD, teacher_sharding="node"),
        job(world, True, "sharded_stored", **SGD, **stored),
    ]
    run_jobs(world.root, jobs, 2)
    return world


@pytest.fixture(scope="module")
def several_adapted(world: World) -> World:
    """More runs with adapters, in four and in two processes."""
    recomputed = LORA | {"gradient_checkpointing": "True"}
    resumed = LORA | {"resume_from_checkpoint": str(world.root / "sharded_four/checkpoint-2")}
    run_jobs(world.root, [job(world, True, "sharded_four", **LORA)], 4)
    jobs = [
        job(world, False, "ddp", **LORA),
        job(world, False, "ddp_recomputed", **recomputed),
        job(world, True, "sharded_recomputed", **recomputed),
        job(world, True, "sharded_resumed", **resumed),
    ]
    run_jobs(world.root, jobs, 2)
    return world


def job(world: World, fsdp: bool, name: str, **changes: str) -> dict[str, Any]:
    """A job of several processes."""
    changes |= {} if fsdp else {"use_cpu": "True"}
    return {"argv": world.argv(name, **changes), "fsdp": fsdp, "accelerate_config": str(FSDP2)}


def adapters_of(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "adapter_model.safetensors")


def weights_of(directory: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).state_dict()


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


# What a run saves


def test_run_saves_adapters_only_when_it_trains_them(world: World) -> None:
    run = world.root / "adapted"
    for directory in (run / "checkpoint-2", run):
        assert not list(directory.glob("model*.safetensors"))
        saved = json.loads((directory / "adapter_config.json").read_text())
        assert saved["base_model_name_or_path"] == str(world.student)
        assert saved["r"] == 4
        assert (directory / "tokenizer.json").exists()
    assert not (run / "checkpoint-2" / "README.md").exists()
    assert "# adapted" in (run / "README.md").read_text()
    before, after = adapters_of(run / "checkpoint-2"), adapters_of(run)
    assert largest_difference(before, after) > 1e-3, "nothing was trained"
    assert {weight.dtype for weight in after.values()} == {torch.float32}


def test_resumed_run_equals_the_uninterrupted_one(world: World) -> None:
    resumed = world.root / "resumed"
    shutil.copytree(world.root / "adapted" / "checkpoint-2", resumed / "checkpoint-2")
    shutil.copy(world.root / "adapted" / "run.json", resumed)
    assert parser.main(world.argv("resumed", use_cpu="True", **LORA)) == 0
    for name in ("checkpoint-4", "."):
        ours, theirs = (adapters_of(run / name) for run in (resumed, world.root / "adapted"))
        assert largest_difference(ours, theirs) == 0.0


def test_trained_parameters_are_counted_when_nothing_is_loaded(world: World) -> None:
    job = parse(world.argv("counted", use_cpu="True", **LORA))
    models = read_models(job.model, job.args, job.args.device)
    sizes = models.student.sizes
    base: Any = ModelSource(str(world.student), "student").load(torch.float32)
    adapters = adapters_of(world.root / "adapted").values()
    assert sizes.trained == sum(weight.numel() for weight in adapters)
    assert sizes.parameters == sizes.trained + sum(weight.numel() for weight in base.parameters())


def test_last_evaluation_is_of_the_best_model_that_is_saved(
    world: World, capfd: pytest.CaptureFixture[str]
) -> None:
    often = {"max_steps": "2", "save_steps": "1", "eval_steps": "1", "learning_rate": "0.3"}
    world.train("best", load_best_model_at_end="True", save_total_limit="2", **often)
    state = json.loads((world.root / "best" / "trainer_state.json").read_text())
    first, worse, last = (e["eval_loss"] for e in state["log_history"] if "eval_loss" in e)
    assert first == last < worse
    # The checkpoint has the tied head under its other name.
    assert "missing keys" not in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["ddp", "ddp_recomputed", "sharded_four", "sharded_recomputed", "sharded_resumed"]
)
def test_adapters_are_those_of_one_process(name: str, several_adapted: World) -> None:
    root = several_adapted.root
    assert largest_difference(adapters_of(root / "adapted"), adapters_of(root / name)) < 1e-5


@pytest.mark.parametrize("name", ["stored", "sharded_stored", "sharded_teacher", "sharded_plain"])
def test_weights_are_those_of_one_online_process(name: str, several: World) -> None:
    alone, shared = (weights_of(several.root / run) for run in ("plain", name))
    assert largest_difference(alone, shared) < 1e-6
    assert largest_difference(weights_of(several.student), alone) > 1e-3


# Export


@pytest.mark.parametrize("name", ["plain", "sharded_plain"])
def test_export_gives_the_trained_model(
    name: str, several: World, student_tokenizer: PreTrainedTokenizerBase
) -> None:
    run = several.root / name
    assert (run / "checkpoint-5" / "pytorch_model_fsdp_0").exists() == (name == "sharded_plain")
    done = export.export(run / "checkpoint-5")
    assert done == run / "export-5"
    assert largest_difference(weights_of(done), weights_of(run)) == 0.0
    assert largest_difference(weights_of(done), weights_of(several.student)) > 1e-3
    for file in ("config.json", "generation_config.json", "tokenizer_config.json"):
        assert json.loads((done / file).read_text()) == json.loads((run / file).read_text())
    tokenizer = AutoTokenizer.from_pretrained(done)
    assert tokenizer.get_vocab() == student_tokenizer.get_vocab()
    model = AutoModelForCausalLM.from_pretrained(done)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("name", ["adapted", "sharded"])
def test_export_merges_adapters(name: str, several: World, tmp_path: Path) -> None:
    run = several.root / name
    merged = export.export(run / "checkpoint-5", tmp_path / "merged")
    finished = export.export(run, tmp_path / "finished")
    assert largest_difference(weights_of(merged), weights_of(finished)) == 0.0
    before, after = weights_of(several.student), weights_of(merged)
    adapters, layer = adapters_of(run), "model.layers.0.self_attn.q_proj"
    a, b = (adapters[f"base_model.model.{layer}.lora_{which}.weight"] for which in "AB")
    changed = after[f"{layer}.weight"] - before[f"{layer}.weight"]
    assert (changed - 16 / 4 * b @ a).abs().max() < 1e-6
    assert changed.abs().max() > 1e-3
    assert torch.equal(after["model.norm.weight"], adapters["base_model.model.model.norm.weight"])


def test_export_rounds_the_weights_when_asked_for_bfloat16(world: World, tmp_path: Path) -> None:
    checkpoint, target = world.root / "plain" / "checkpoint-4", tmp_path / "new" / "model"
    target.mkdir(parents=True)  # an empty directory is as good as none
    argv = [str(checkpoint), f"--output_dir={target}", "--dtype=bfloat16"]
    assert export.main(argv) == 0
    expected = {name: w.bfloat16() for name, w in weights_of(checkpoint).items()}
    found = weights_of(target, "auto")
    assert all(torch.equal(weight, expected[name]) for name, weight in found.items())
    assert json.loads((target / "config.json").read_text())["dtype"] == "bfloat16"
    assert {path.name for path in target.parent.iterdir()} == {"model"}


def test_export_leaves_nothing_behind_when_it_is_interrupted(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr(PreTrainedTokenizerBase, "save_pretrained", interrupt)
    with pytest.raises(KeyboardInterrupt):
        export.export(world.root / "plain" / "checkpoint-4", tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_export_rejects_what_it_cannot_write(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, cut = world.root / "plain" / "checkpoint-5", tmp_path / "checkpoint-5"
    shutil.copytree(plain, cut)
    os.truncate(cut / "model.safetensors", 99)
    # A run in Python that ended without `save_model`.
    shutil.copytree(plain, tmp_path / "run" / "checkpoint-5")
    for argv, message in (
        ([plain, "--output_dir", world.student], f"--output_dir {world.student} is not empty"),
        ([plain, "--output_dir", world.pages], f"--output_dir {world.pages} is not empty"),
        ([tmp_path / "absent"], f"{tmp_path / 'absent'}: no such directory"),
        ([tmp_path], f"{tmp_path}: it has no manifest.json"),
        ([tmp_path / "run"], f"{tmp_path / 'run'}: .*whole model"),
        ([cut], f"{cut}: model.safetensors has 99 bytes"),
    ):
        assert export.main([str(word) for word in argv]) == 2
        assert re.match(f"vocagnolm export: error: {message}", capsys.readouterr().err)


def test_adapters_are_not_merged_into_another_student(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    student = tmp_path / "student"
    shutil.copytree(world.student, student)
    options = {**LORA, "student": str(student), "output_dir": str(tmp_path / "run")}
    argv = world.argv("", use_cpu="True", **options)
    assert parser.main([*argv, "--max_steps=1"]) == 0
    model = AutoModelForCausalLM.from_pretrained(student)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(2)
    model.save_pretrained(student)
    assert export.main([str(tmp_path / "run"), f"--output_dir={tmp_path / 'whole'}"]) == 2
    assert "other weights" in capsys.readouterr().err
    assert not (tmp_path / "whole").exists()
    assert parser.main([*argv, "--max_steps=2", "--extend"]) == 2
    assert "your model has changed" in capsys.readouterr().err


def test_adapters_are_no_student_or_teacher(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapters = str(world.root / "adapted")
    for role in ("student", "teacher"):
        argv = world.argv("", use_cpu="True", **{role: adapters}, output_dir=str(tmp_path / role))
        assert parser.main(argv) == 2
        assert "vocagnolm export" in capsys.readouterr().err


def test_shards_that_lack_a_weight_are_rejected(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def join(shards: str, directory: str) -> None:
        weights = load_file(world.student / "model.safetensors")
        del weights["model.norm.weight"]
        save_file(weights, Path(directory, "model.safetensors"))

    monkeypatch.setattr(export, "merge_fsdp_weights", join)
    with pytest.raises(ValueError, match=r"lacks weights .*: model\.norm\.weight$"):
        export._trained(ModelSource(str(world.student), "student"), tmp_path, {}, tmp_path)


@pytest.mark.parametrize("kind", ["checkpoint", "saved", "adapters"])
def test_what_a_trainer_in_python_saves_is_exported(
    kind: str, world: World, tmp_path: Path
) -> None:
    config = None
    if kind == "adapters":
        config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False)
    once = {"max_length": 64, "max_steps": 1, "save_steps": 1, "learning_rate": 1e-2}
    args = VocAgnoConfig(str(tmp_path / "run"), use_cpu=True, report_to=[], method="cpt", **once)
    trainer = VocAgnoTrainer(str(world.student), args, None, world.rows(), peft_config=config)
    trainer.train()
    place = tmp_path / "run/checkpoint-1"
    if kind == "saved":
        place = tmp_path / "saved"
        trainer.save_model(str(place))
    # If the typed name is a link, the export is next to the link.
    link = tmp_path / "links/here"
    link.parent.mkdir()
    link.symlink_to(place, target_is_directory=True)
    exported = export.export(link)
    assert exported.parent == link.parent
    ids = torch.arange(3, 35)[None]
    models = (AutoModelForCausalLM.from_pretrained(exported), trainer.model.eval())
    with torch.no_grad():
        found, expected = (model(input_ids=ids, use_cache=False).logits for model in models)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


# What export reads in a checkpoint


@pytest.fixture
def saved(tiny_llama: Callable[..., Any], tokenizer_dirs: dict[str, Path], tmp_path: Path) -> Path:
    """A model that `save_model` wrote after training, which turns the cache off."""
    model = tiny_llama(700)
    model.config.use_cache = False
    save_model(tmp_path / "checkpoint-7", tokenizer_dirs["metaspace"], model)
    return tmp_path / "checkpoint-7"


def write(place: Path, **content: Any) -> None:
    """Write JSON files, by their names without the ending."""
    for name, value in content.items():
        (place / f"{name}.json").write_text(json.dumps(value))


def test_saved_model_is_exported_next_to_it_without_its_student(saved: Path) -> None:
    write(saved, run={"student": "/gone"})
    done = export.export(saved)
    assert done == saved.with_name("export-7")
    assert json.loads((done / "config.json").read_text())["use_cache"] is True
    with pytest.raises(ValueError, match="is not empty"):
        export.export(saved)


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
