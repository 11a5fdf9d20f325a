"""A trainer in Python keeps the promises of `vocagnolm train`."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import datasets
import pytest
from adapter_world import World
from transformers import AutoModelForCausalLM, AutoTokenizer

from vocagnolm import Method, VocAgnoConfig, VocAgnoTrainer, __main__

SHORT: dict[str, Any] = {"max_length": 64, "per_device_train_batch_size": 8, "save_steps": 1}


def config(directory: Path, **changes: Any) -> VocAgnoConfig:
    options = {**SHORT, "max_steps": 1, "use_cpu": True, "disable_tqdm": True, **changes}
    return VocAgnoConfig(output_dir=str(directory), report_to=["none"], **options)


def pages(world: World) -> list[dict[str, Any]]:
    return [json.loads(line) for line in world.pages.read_text().splitlines()]


def trainer_of(world: World, directory: Path, **changes: Any) -> VocAgnoTrainer:
    given = {"model": str(world.student), "teacher": str(world.teacher)}
    given |= {name: changes.pop(name) for name in [*changes] if name in (*given, "train_dataset")}
    given.setdefault("train_dataset", pages(world))
    return VocAgnoTrainer(args=config(directory, **changes), **given)


@pytest.fixture(scope="module")
def run(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run in Python, on documents of which two are empty."""
    directory = tmp_path_factory.mktemp("python") / "run"
    rows = [*pages(world), {"text": ""}, {"text": " "}]
    trainer_of(world, directory, train_dataset=rows).train()
    return directory


def test_directory_says_what_the_run_is(run: Path, world: World) -> None:
    settings = json.loads((run / "run.json").read_text())
    assert settings["student"] == str(world.student)
    assert settings["teacher"] == [str(world.teacher)]
    assert (settings["top_k"], settings["max_steps"]) == (0.4, 1)
    skipped = (run / "skipped.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in skipped] == [
        {"document": 60, "reason": "empty"},
        {"document": 61, "reason": "empty"},
    ]


def test_saved_models_may_use_their_cache(run: Path, world: World, tmp_path: Path) -> None:
    assert json.loads((run / "checkpoint-1" / "config.json").read_text())["use_cache"] is True
    model: Any = AutoModelForCausalLM.from_pretrained(world.student, dtype="float32")
    model.config.use_cache = False
    trainer = trainer_of(world, tmp_path / "run", model=model, teacher=None, method="cpt")
    trainer.save_model(str(tmp_path / "saved"))
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["use_cache"] is False


OTHER_RUNS: list[tuple[str, dict[str, Any]]] = [
    ("top_k was ", {"top_k": 0.9}),
    ("selection was ", {"selection": "accept"}),
    ("learning_rate was ", {"learning_rate": 1e-3}),
    ("model was ", {"model": "OTHER"}),
    ("teacher was ", {"teacher": "STUDENT"}),
    ("the documents have changed", {"train_dataset": "FEWER"}),
]


@pytest.mark.parametrize(("change", "changes"), OTHER_RUNS, ids=[said for said, _ in OTHER_RUNS])
def test_another_run_does_not_resume(
    change: str, changes: dict[str, Any], run: Path, world: World, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(world.student, other)
    rows = [*pages(world), {"text": ""}, {"text": " "}]
    places = {"OTHER": str(other), "STUDENT": str(world.student), "FEWER": rows[1:]}
    changes = {key: places.get(str(value), value) for key, value in changes.items()}
    trainer = trainer_of(world, run, **{"train_dataset": rows, **changes})
    with pytest.raises(ValueError, match=rf"holds a run with other settings \(.*{change}"):
        trainer.train(resume_from_checkpoint=True)


def test_refusal_of_both_doors_has_the_same_words(
    world: World, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    argv = world.argv(str(tmp_path / "run"), eval_fraction=None, max_steps="2", save_steps="1")
    assert __main__.main(["train", *argv, "--use_cpu"]) == 0
    (tmp_path / "run" / "README.md").unlink()
    capfd.readouterr()
    assert __main__.main(["train", *argv, "--use_cpu", "--top_k", "0.7"]) == 2
    (error,) = capfd.readouterr().err.splitlines()
    command = error.partition("error: ")[2].replace("--", "")

    directory = tmp_path / "python"
    trainer_of(world, directory).train()
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        trainer_of(world, directory, top_k=0.7).train(resume_from_checkpoint=True)
    assert str(caught.value).replace(str(directory), str(tmp_path / "run")) == command


def test_checkpoint_without_settings_is_not_trusted(run: Path, world: World) -> None:
    copied = run.with_name("copied")
    shutil.copytree(run, copied)
    (copied / "run.json").unlink()
    manifest = json.loads((copied / "checkpoint-1" / "manifest.json").read_text())
    manifest["run"] = {}
    (copied / "checkpoint-1" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="lacks the settings of its run"):
        trainer_of(world, copied).train(resume_from_checkpoint=str(copied / "checkpoint-1"))


def test_nobody_elses_objects_are_changed(world: World, tmp_path: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(world.student)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer(["a b c"] * 2, truncation=True, max_length=2, padding=True)
    args = config(tmp_path / "run", method="cpt", logging_nan_inf_filter=True)
    before = json.dumps(args.to_dict(), default=str), tokenizer.backend_tokenizer.to_str()
    trainer = VocAgnoTrainer(
        str(world.student), args, None, pages(world), processing_class=tokenizer
    )
    trainer.train()
    after = json.dumps(args.to_dict(), default=str), tokenizer.backend_tokenizer.to_str()
    assert after == before


def test_method_beside_a_config_is_checked_with_it(world: World, tmp_path: Path) -> None:
    args = config(tmp_path, missing_losses="plain")
    with pytest.raises(ValueError, match="missing_losses plain trains on every token"):
        VocAgnoTrainer(
            str(world.student),
            args,
            None,
            pages(world),
            teacher=str(world.teacher),
            method=Method(unmapped="exclude"),
        )


def test_arguments_without_effect_are_told(
    world: World, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trainer_of(world, tmp_path, teacher=None, method="cpt", chunks=8, hub_model_id="a/b")
    told = capfd.readouterr().err
    assert "warning: chunks has no effect with method cpt" in told
    assert "warning: hub_model_id has no effect without push_to_hub" in told


def test_run_is_compared(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["compare", str(run)]) == 0
    assert "VocAgnoLM" in capfd.readouterr().out


def test_documents_late_are_those_at_once(world: World, tmp_path: Path) -> None:
    rows = pages(world)
    trainer = trainer_of(world, tmp_path, train_dataset=rows)
    held_out = datasets.Dataset.from_list(rows[:8])
    losses = {trainer.evaluate(form)["eval_loss"] for form in (rows[:8], held_out)}
    assert len(losses) == 1
    assert trainer.predict(rows[:8]).metrics["test_loss"] in losses


def test_used_directory_is_told(run: Path, world: World, caplog: pytest.LogCaptureFixture) -> None:
    copied = run.with_name("used")
    shutil.copytree(run, copied)
    with caplog.at_level(logging.WARNING):
        trainer_of(world, copied).train()
    assert "holds an earlier run, which was moved to" in caplog.text


def test_adapters_that_are_drawn_by_the_weights_are_checked_without_them(
    world: World, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    adapters = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="pissa")
    trainer = VocAgnoTrainer(
        str(world.student),
        config(tmp_path, method="cpt"),
        train_dataset=pages(world),
        peft_config=adapters,
    )
    drawn = [weight for name, weight in trainer.model.named_parameters() if "lora_B" in name]
    assert all(weight.any() for weight in drawn)


def test_adapted_model_takes_no_other_adapters(world: World, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    adapters = peft.LoraConfig(target_modules=["q_proj"])
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(world.student), adapters)
    with pytest.raises(ValueError, match="peft_config: the model has adapters already"):
        VocAgnoTrainer(
            model,
            config(tmp_path, method="cpt"),
            train_dataset=pages(world),
            peft_config=adapters,
        )


def test_settings_hold_the_adapters_of_a_peft_config(world: World, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    adapters = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "v_proj"])
    given = {"model": str(world.student), "peft_config": adapters}
    trainer = VocAgnoTrainer(
        args=config(tmp_path, method="cpt"), train_dataset=pages(world), **given
    )
    settings = json.loads(json.dumps(trainer.settings))
    assert settings["use_peft"]
    rebuilt = peft.get_peft_config(settings["peft_config"])
    for name in ("r", "lora_alpha", "target_modules", "modules_to_save", "use_dora"):
        assert getattr(rebuilt, name) == getattr(adapters, name), name
