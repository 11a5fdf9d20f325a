"""A trainer in Python keeps the promises of `vocagnolm train`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer
from world import World

from vocagnolm import Method, VocAgnoConfig, VocAgnoTrainer, prepare_dataset
from vocagnolm.record import differences
from vocagnolm.report import compare
from vocagnolm.run.export import export
from vocagnolm.run.parser import parse
from vocagnolm.run.recipe import recipe_options

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"


def trainer_of(world: World, directory: Path, **changes: Any) -> VocAgnoTrainer:
    """A trainer of one step; `changes` are options or the trainer's arguments."""
    settings: dict[str, Any] = {"max_length": 64, "per_device_train_batch_size": 8}
    settings |= {"save_steps": 1, "max_steps": 1, "use_cpu": True, "disable_tqdm": True}
    arguments: dict[str, Any] = {"model": str(world.student), "train_dataset": world.rows()}
    if changes.get("method") != "cpt":
        arguments["teacher"] = str(world.teacher)
    for name, value in changes.items():
        is_setting = hasattr(VocAgnoConfig, name) and not isinstance(value, Method)
        (settings if is_setting else arguments)[name] = value
    args = VocAgnoConfig(output_dir=str(directory), report_to=["none"], **settings)
    return VocAgnoTrainer(args=args, **arguments)


def packed(world: World, *roles: str, rows: Any = None, max_length: int = 64) -> Any:
    """Pack rows, or the pages, with the tokenizers of some models."""
    tokenizers = [AutoTokenizer.from_pretrained(getattr(world, role)) for role in roles]
    for tokenizer in tokenizers:
        tokenizer.chat_template = PLAIN
    corpus = datasets.Dataset.from_list(rows or world.rows())
    return prepare_dataset(corpus, *tokenizers, max_length=max_length)


@pytest.fixture(scope="module")
def run(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run in Python."""
    directory = tmp_path_factory.mktemp("python") / "run"
    trainer_of(world, directory).train()
    return directory


def test_saved_models_may_use_their_cache(run: Path, world: World, tmp_path: Path) -> None:
    assert json.loads((run / "checkpoint-1" / "config.json").read_text())["use_cache"] is True
    model: Any = AutoModelForCausalLM.from_pretrained(world.student, dtype="float32")
    model.config.use_cache = False
    trainer = trainer_of(world, tmp_path / "run", model=model, method="cpt")
    trainer.save_model(str(tmp_path / "saved"))
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["use_cache"] is False


@pytest.mark.parametrize(
    ("name", "value", "change"),
    [
        ("top_k", 0.9, "top_k was "),
        ("model", lambda world: str(world.teacher), "student was "),
        ("train_dataset", lambda world: world.rows()[1:], "content of dataset"),
    ],
)
def test_another_run_does_not_resume(
    name: str, value: Any, change: str, run: Path, world: World
) -> None:
    changed = {name: value(world) if callable(value) else value}
    with pytest.raises(ValueError, match=rf"other settings \(.*{change}"):
        trainer_of(world, run, **changed).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_files_have_the_mode_of_the_umask(mask: int, world: World, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        trainer = trainer_of(world, tmp_path / "run", method="cpt")
        trainer.train()
        trainer.save_model()
        export(tmp_path / "run" / "checkpoint-1", tmp_path / "exported")
        store = world.score(f"store-{mask}")
    finally:
        os.umask(before)
    files = [path for path in [*tmp_path.rglob("*"), *store.rglob("*")] if path.is_file()]
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in files}
    assert "model.safetensors" in modes
    assert set(modes.values()) == {oct(0o666 & ~mask)}


def test_refused_config_leaves_nothing_behind(world: World, tmp_path: Path) -> None:
    before = dict(os.environ)
    with pytest.raises(ValueError, match=r"^fsdp .*several processes"):
        trainer_of(world, tmp_path, fsdp="full_shard")
    assert os.environ == before


def test_runs_without_a_model_are_compared(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluated: dict[str, Any] = {"eval_dataset": world.rows()[:9], "eval_strategy": "steps"}
    evaluated |= {"eval_steps": 1, "max_steps": 2}
    for name in ("saved", "unsaved"):
        trainer = trainer_of(world, tmp_path / name, method="cpt", save_strategy="no", **evaluated)
        trainer.train()
        if name == "saved":
            trainer.save_model()
    capsys.readouterr()
    assert compare.main([str(tmp_path / "saved"), str(tmp_path / "unsaved")]) == 0
    printed = capsys.readouterr().out
    lines = [line for line in printed.splitlines() if line.startswith(("| saved", "| unsaved"))]
    saved, unsaved = ([cell.strip(" |") for cell in line.split(" | ")] for line in lines)
    assert "-" not in saved + unsaved
    # All but the name and the speed.
    assert saved[1:6] + saved[7:] == unsaved[1:6] + unsaved[7:]
    # A run that was stopped has no loss of its end.
    lines = (tmp_path / "unsaved/log.jsonl").read_text().splitlines(keepends=True)
    log = [line for line in lines if json.loads(line)["step"] == 1]
    (tmp_path / "unsaved/log.jsonl").write_text("".join(log))
    assert compare.main([str(tmp_path / "unsaved")]) == 0
    stopped = capsys.readouterr().out.splitlines()[-3].split(" | ")
    assert [cell.strip(" |") for cell in stopped[3:6]] == ["1", "512", "-"]


def test_checkpoint_in_the_config_is_resumed(run: Path, world: World) -> None:
    trainer_of(world, run, resume_from_checkpoint=str(run / "checkpoint-1")).train()
    # A run that starts over moves this one.
    assert (run / "checkpoint-1").exists()
    assert not run.with_name("run-earlier-1").exists()


def test_teacher_of_a_method_without_one_is_left_out(
    world: World, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trainer = trainer_of(world, tmp_path, method="cpt", teacher=str(world.teacher))
    assert (trainer.settings["teacher"], trainer.online_teachers) == (None, [])
    assert "warning: teacher " in capfd.readouterr().err


def test_trainer_evaluates_without_documents_to_train_on(world: World, tmp_path: Path) -> None:
    every = [{"body": row["text"]} for row in world.rows()]
    plain: dict[str, Any] = {"method": "cpt", "text_column": "body"}
    rows = every[:9]
    expected = trainer_of(world, tmp_path, **plain, train_dataset=every).evaluate(rows)["eval_loss"]
    alone = trainer_of(world, tmp_path, **plain, train_dataset=None, eval_dataset=rows)
    assert alone.evaluate()["eval_loss"] == expected
    parts = {"a": rows, "b": rows}
    alone = trainer_of(world, tmp_path, **plain, train_dataset=None, eval_dataset=parts)
    assert alone.evaluate()["eval_b_loss"] == expected


def test_checkpoint_without_an_optimizer_is_not_resumed(world: World, tmp_path: Path) -> None:
    trainer_of(world, tmp_path, method="cpt", save_only_model=True).train()
    assert (tmp_path / "checkpoint-1" / "model.safetensors").exists()
    with pytest.raises(ValueError, match="optimizer"):
        trainer_of(world, tmp_path, method="cpt").train(resume_from_checkpoint=True)


def test_objects_of_the_caller_stay(world: World, tmp_path: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(world.student)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer(["a b c"] * 2, truncation=True, max_length=2, padding=True)
    args = trainer_of(world, tmp_path, method="cpt", logging_nan_inf_filter=True).args
    before = json.dumps(args.to_dict(), default=str), tokenizer.backend_tokenizer.to_str()
    VocAgnoTrainer(str(world.student), args, None, world.rows(), processing_class=tokenizer).train()
    after = json.dumps(args.to_dict(), default=str), tokenizer.backend_tokenizer.to_str()
    assert after == before


def test_arguments_without_effect_are_warned_of(
    world: World, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trainer_of(world, tmp_path, method="cpt", chunks=8, hub_model_id="a/b")
    told = capfd.readouterr().err
    assert "warning: chunks " in told
    assert "warning: hub_model_id " in told


def test_settings_hold_the_adapters_of_a_peft_config(world: World, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    adapters = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "v_proj"])
    trainer = trainer_of(world, tmp_path, method="cpt", peft_config=adapters)
    settings = json.loads(json.dumps(trainer.settings))
    assert settings["use_peft"]
    rebuilt = peft.get_peft_config(settings["peft_config"])
    for name in ("r", "lora_alpha", "target_modules", "modules_to_save", "use_dora"):
        assert getattr(rebuilt, name) == getattr(adapters, name), name


def test_checkpoint_holds_the_config(world: World, tmp_path: Path) -> None:
    trainer = trainer_of(world, tmp_path, method="cpt", weight_decay=0.5)
    trainer.train()
    saved = torch.load(tmp_path / "checkpoint-1" / "training_args.bin", weights_only=False)
    assert saved.to_dict() == trainer.args.to_dict()
    assert (saved.method, saved.weight_decay) == ("cpt", 0.5)
    again = VocAgnoConfig(**saved.to_dict())
    VocAgnoTrainer(str(world.student), again, None, world.rows()).train(resume_from_checkpoint=True)


def test_init_kwargs_reach_the_models(world: World, tmp_path: Path) -> None:
    kwargs: dict[str, Any] = {"model_init_kwargs": {"attention_dropout": 0.25}}
    kwargs["teacher_model_init_kwargs"] = '{"attention_dropout": 0.5}'
    trainer = trainer_of(world, tmp_path, **kwargs)
    assert trainer.model.config.attention_dropout == 0.25
    assert trainer.online_teachers[0].config.attention_dropout == 0.5


def test_names_of_trl_and_transformers_work(tmp_path: Path) -> None:
    line = (
        "--model_name_or_path s --teacher_model t --dataset_name d.jsonl --max-seq-length=64 "
        "--batch_size 3 --gradient_accumulation_steps 1 --lr 1e-3 --use_lora --use_cpu"
    )
    job = parse(line.split())
    assert (job.model.student, job.model.teacher, job.model.use_peft) == ("s", ["t"], True)
    assert (job.data.dataset, job.args.max_length) == (["d.jsonl"], 64)
    assert (job.args.per_device_train_batch_size, job.args.learning_rate) == (3, 1e-3)
    # A recipe's option overrides its base's, whichever name either uses.
    (tmp_path / "base.yaml").write_text("max_length: 128\nteacher: t\n")
    (tmp_path / "top.yaml").write_text("base: base.yaml\nblock_size: 64\n")
    assert recipe_options(tmp_path / "top.yaml")["max_length"] == 64


def test_evaluation_that_steers_a_run_belongs_to_its_settings(world: World, tmp_path: Path) -> None:
    """The losses of other documents cannot be compared with those of the best checkpoint."""

    def evaluation(held_out: Any, **options: Any) -> Any:
        options |= {"method": "cpt", "eval_strategy": "steps", "eval_steps": 1}
        trainer = trainer_of(world, tmp_path, eval_dataset=held_out, **options)
        return trainer.settings.get("evaluation")

    rows = world.rows()
    first = evaluation(rows[:3], load_best_model_at_end=True)
    assert first
    assert evaluation(rows[:4], load_best_model_at_end=True) != first
    assert evaluation(rows[:3], lr_scheduler_type="reduce_lr_on_plateau") == first
    named = {"a": rows[:3], "b": rows[:3]}
    assert evaluation(named, load_best_model_at_end=True, metric_for_best_model="a_loss") != first
    assert evaluation(rows[:3]) is None
    saved, now = {"evaluation": first}, {"evaluation": {"metric": "loss", "documents": {}}}
    assert differences(saved, now) == ["the content of the evaluation has changed"]
    # The earlier part of the run was not steered.
    assert differences({}, now) == []


def test_documents_may_be_given_to_an_evaluation(world: World, tmp_path: Path) -> None:
    rows = world.rows()
    trainer = trainer_of(world, tmp_path, method="cpt", eval_dataset=rows[:9])
    expected = trainer.evaluate()["eval_loss"]
    assert trainer.evaluate(rows[:9])["eval_loss"] == expected
    assert trainer.evaluate(datasets.Dataset.from_list(rows[:9]))["eval_loss"] == expected
    predicted = trainer.predict(rows[:9])
    assert predicted.metrics["test_loss"] == expected
    mean = predicted.predictions.sum() / predicted.label_ids.sum()
    assert mean == pytest.approx(expected)


def test_full_disk_is_one_line_that_says_what_is_safe(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(world, tmp_path, method="cpt", save_strategy="steps", max_steps=3)
    save = Trainer._save_optimizer_and_scheduler

    def save_until_full(self: Trainer, directory: str) -> None:
        if directory.endswith("-2"):
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 5 vs 4")
        save(self, directory)

    monkeypatch.setattr(Trainer, "_save_optimizer_and_scheduler", save_until_full)
    safe = rf"{tmp_path}.*checkpoint-1 is whole.*resume_from_checkpoint=True"
    with pytest.raises(OSError, match=safe):
        trainer.train()
    # The unfinished save is removed.
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["checkpoint-1"]


@pytest.mark.parametrize(
    ("name", "role"), [("train_dataset", "student"), ("eval_dataset", "teacher")]
)
def test_packed_sequences_fit_into_the_contexts_of_their_models(
    name: str, role: str, world: World, tmp_path: Path
) -> None:
    short = packed(world, "student", "teacher", rows=[{"text": "1 + 1 = 2"}] * 99)
    long = packed(world, "student", "teacher")
    given: dict[str, Any] = {"train_dataset": short, name: long}
    for argument, place in (("model", world.student), ("teacher", world.teacher)):
        given[argument] = AutoModelForCausalLM.from_pretrained(place, dtype="float32")
    config = given["model" if role == "student" else role].config
    tokens = config.max_position_embeddings = long.longest_segments[role == "teacher"]
    trainer_of(world, tmp_path, **given)
    config.max_position_embeddings = tokens - 1
    with pytest.raises(ValueError, match=rf"{name} .*{tokens} {role} tokens"):
        trainer_of(world, tmp_path, **given)


def test_evaluation_may_have_a_longer_teacher_context(world: World, tmp_path: Path) -> None:
    """No teacher reads an evaluation."""
    tokenizers = [AutoTokenizer.from_pretrained(path) for path in (world.student, world.teacher)]
    pages = datasets.Dataset.from_list([{"text": row["text"][:30]} for row in world.rows()])
    # Rows of a few tokens more than the context of training.
    short, long = (
        prepare_dataset(pages, *tokenizers, max_length=64, teacher_context=context)
        for context in (45, 4096)
    )
    assert long.teacher_tokens.max() > 45
    trainer = trainer_of(world, tmp_path, train_dataset=short, eval_dataset=long, max_steps=1)
    alone = trainer_of(world, tmp_path / "alone", train_dataset=long, eval_dataset=long)
    assert trainer.evaluate()["eval_loss"] == alone.evaluate()["eval_loss"]


def test_batches_of_an_evaluation_may_stay_apart(world: World, tmp_path: Path) -> None:
    given: dict[str, Any] = {"method": "cpt", "eval_dataset": world.rows()[:30]}
    given["per_device_eval_batch_size"] = 2
    joined = trainer_of(world, tmp_path / "joined", **given).evaluate()
    apart = trainer_of(world, tmp_path / "apart", eval_do_concat_batches=False, **given).evaluate()
    assert apart["eval_loss"] == joined["eval_loss"]
    assert apart["eval_tokens"] == joined["eval_tokens"]


def test_search_looks_for_the_lowest_loss(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trainer, "hyperparameter_search", lambda trainer, *given: given)
    trainer = trainer_of(world, tmp_path, eval_dataset=world.rows()[:9], method="cpt")
    _, objective = trainer.hyperparameter_search()
    metrics = trainer.evaluate()
    assert objective(metrics) == metrics["eval_loss"]
    assert trainer.hyperparameter_search(None, len) == (None, len)


def test_log_has_the_loss_of_a_subclass(world: World, tmp_path: Path) -> None:
    class Shifted(VocAgnoTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs) + 100.0

    plain = trainer_of(world, tmp_path / "plain", method="cpt")
    shifted = Shifted(args=plain.args, train_dataset=plain.train_dataset, model=plain.model)
    # Before the first trains, so that both begin with the same weights.
    losses = [trainer.train().training_loss for trainer in (shifted, plain)]
    assert losses[0] > 100.0
    assert losses[1] < 100.0


def test_adapters_of_a_loaded_model_belong_to_the_settings(world: World, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def settings(alpha: int) -> Any:
        config = peft.LoraConfig(target_modules=["q_proj"], lora_alpha=alpha)
        model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(world.student), config)
        return trainer_of(world, tmp_path, model=model, method="cpt").settings

    first = settings(8)
    assert differences(first, settings(8)) == []
    assert differences(first, settings(64)) == ["the content of your adapters has changed"]
    # Runs of earlier versions have not recorded them.
    del first["adapters"]
    assert differences(first, settings(64)) == []


def test_run_without_a_directory_is_named_after_its_models(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(world.student, dtype="float32")
    args = VocAgnoConfig(max_length=64, per_device_train_batch_size=8, use_cpu=True, max_steps=1)
    trainer = VocAgnoTrainer(model, args, None, packed(world, "student"), method="cpt")
    assert trainer.args.output_dir == f"runs/{world.student.name}__cpt"


def test_config_of_other_batches_is_refused(world: World, tmp_path: Path) -> None:
    args = VocAgnoConfig(output_dir=str(tmp_path), max_length=64, per_device_train_batch_size=4)
    args.gradient_accumulation_steps = 2
    with pytest.raises(ValueError, match="batch was changed"):
        VocAgnoTrainer(str(world.student), args, None, world.rows(), method="cpt")


# -- What a trainer refuses: the argument at fault, and why -----------------------------------

ROW = {"text": "a"}
TALK = {"prompt": "What is 1 + 1?", "completion": "2"}


def adapted(world: World) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"])
    return peft.get_peft_model(AutoModelForCausalLM.from_pretrained(world.student), config)


def lora(world: World) -> Any:
    return pytest.importorskip("peft").LoraConfig(target_modules=["q_proj"])


def store_and_model(world: World) -> list[str]:
    store = world.root / "unfinished"
    store.mkdir(exist_ok=True)
    (store / "manifest.json").write_text('{"format": 1}')
    return [str(store), str(world.teacher)]


def of_both(row: dict[str, str]) -> Callable[[World], Any]:
    """Pack a row many times for both models."""
    return lambda world: packed(world, "student", "teacher", rows=[row] * 99)


def two_evaluations(world: World) -> dict[str, Any]:
    return {"a": world.rows()[:9], "b": world.rows()[:9]}


STEERED = {"load_best_model_at_end": True, "eval_strategy": "steps", "method": "cpt"}
STEERED |= {"eval_dataset": two_evaluations}
TABLE = datasets.Dataset.from_list([ROW])
OTHER_OPTIMIZER = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
CPT = {"method": "cpt"}
ALL_TOKENS = {"method": Method(unmapped="exclude")}
# A setting or an argument, its value, a word of the fault, and what else is given. Values that are
# functions are called with a world.
REFUSED: list[tuple[str, Any, str, dict[str, Any]]] = [
    # Options.
    ("top_k", 2, "(0, 1]", {}),
    ("train_on", "All", "completions", {}),
    ("lr_scheduler_kwargs", [1], "TypeError", {}),
    ("model_init_kwargs", {"dtype": "auto"}, "dtype", {}),
    ("missing_losses", "plain", "every token", ALL_TOKENS),
    ("eval_strategy", "steps", "eval_dataset", {}),
    # Models.
    ("peft_config", lora, "already", {"model": adapted}),
    ("teacher", store_and_model, "only one", {}),
    ("optimizers", (OTHER_OPTIMIZER, None), "none of", {}),
    # Documents.
    ("train_dataset", None, "NoneType", {}),
    ("train_dataset", [], "list", {}),
    ("train_dataset", ["a"], "datasets.Dataset", {}),
    ("train_dataset", [{"input_ids": [1]}], "Blocks", {}),
    ("train_dataset", [{"id": 1}, {"text": 5}], "1 null, 1 not text", {}),
    ("train_dataset", TABLE.rename_column("text", "body"), "one column", {}),
    ("train_dataset", datasets.DatasetDict(train=TABLE), "DatasetDict", {}),
    ("eval_dataset", TABLE.to_iterable_dataset(), "IterableDataset", {}),
    ("eval_dataset", [{"text": ""}], "no usable", {}),
    ("train_dataset", [ROW], "1 sequence", {}),
    # Packed sequences.
    ("train_dataset", lambda world: packed(world, "student", max_length=32), "32 tokens", CPT),
    ("train_dataset", lambda world: packed(world, "student", "student"), "other tokenizers", {}),
    ("train_dataset", lambda world: packed(world, "student"), "tokenizers", {}),
    ("eval_dataset", lambda world: packed(world, "student", max_length=99), "99 tokens", CPT),
    ("uld_pairing", "position", "last", {"method": "uld", "train_dataset": of_both(ROW)}),
    ("train_on", "all", "completions", {"train_dataset": of_both(TALK)}),
    ("student_chat_template", "plain", "None", {"train_dataset": of_both(TALK)}),
    ("method", "chunk", "conversation", {"train_dataset": of_both(TALK)}),
    # Evaluations.
    ("metric_for_best_model", None, "a_loss, b_loss", STEERED),
]


@pytest.mark.parametrize(("name", "value", "word", "others"), REFUSED)
def test_fault_is_named(
    name: str, value: Any, word: str, others: dict[str, Any], world: World, tmp_path: Path
) -> None:
    changes = {"max_steps": 3, name: value, **others}
    for key, given in changes.items():
        changes[key] = given(world) if callable(given) else given
    with pytest.raises((ValueError, TypeError), match=rf"\b{name.removesuffix('s')}") as caught:
        trainer_of(world, tmp_path, **changes)
    assert word in str(caught.value)
    assert "--" not in str(caught.value)
