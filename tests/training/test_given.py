"""A trainer made from names and documents trains as the command line does."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
import yaml
from adapter_world import World
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)

from vocagnolm import VocAgnoConfig, VocAgnoTrainer, __main__, prepare_dataset
from vocagnolm.objective import StoredTeacher
from vocagnolm.run.parser import parse
from vocagnolm.run.recipe import recipe_options
from vocagnolm.training.checkpoints import changed_settings
from vocagnolm.training.requirements import check_evaluation, evaluation_losses

ROOT = Path(__file__).resolve().parents[2]
SHORT = {"max_length": 64, "global_batch_tokens": 512, "max_steps": 3, "report_to": ["none"]}


def config(directory: Path, **changes: Any) -> VocAgnoConfig:
    options = {**SHORT, "use_cpu": True, "save_strategy": "no", "disable_tqdm": True, **changes}
    return VocAgnoConfig(output_dir=str(directory), **options)


def pages(world: World) -> list[dict[str, Any]]:
    return [json.loads(line) for line in world.pages.read_text().splitlines()]


def assert_weights(trainer: Any, expected: dict[str, torch.Tensor]) -> None:
    found = trainer.model.state_dict()
    assert found.keys() >= expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name


def test_eight_lines_the_command_and_a_recipe_give_the_same_weights(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(world.root)
    names = {
        "student": str(world.student),
        "teacher": [str(world.teacher)],
        "selection": "accept",
    }
    options = {**names, "dataset": ["pages.jsonl"], **SHORT}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({**options, "output_dir": str(tmp_path / "recipe")}))
    assert __main__.main(["train", "--config", str(recipe), "--use_cpu"]) == 0
    line = [
        f"--{name}={each[0] if isinstance(each, list) else each}" for name, each in options.items()
    ]
    assert __main__.main(["train", *line, f"--output_dir={tmp_path / 'line'}", "--use_cpu"]) == 0
    expected = load_file(tmp_path / "recipe" / "model.safetensors")
    for name, weight in load_file(tmp_path / "line" / "model.safetensors").items():
        assert torch.equal(weight, expected[name]), name

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    code = re.findall(r"^```python\n(.*?)^```", readme, flags=re.MULTILINE | re.DOTALL)[0]
    for ours, theirs in (
        ("HuggingFaceTB/SmolLM2-135M", str(world.student)),
        ("Qwen/Qwen2.5-0.5B", str(world.teacher)),
        ("runs/python", str(tmp_path / "mine")),
        ("max_length=512, global_batch_tokens=8192", "**SHORT"),
    ):
        assert ours in code
        code = code.replace(ours, theirs)
    found: dict[str, Any] = {"SHORT": {**SHORT, "use_cpu": True}}
    exec(compile(code, "README.md", "exec"), found)
    assert_weights(found["trainer"], expected)


def test_all_forms_of_a_model_and_of_documents_are_one(world: World, tmp_path: Path) -> None:
    def run(model: Any, teacher: Any, data: Any, **given: Any) -> VocAgnoTrainer:
        args = config(tmp_path, **given.pop("args", {}))
        trainer = VocAgnoTrainer(model, args, None, data, teacher=teacher, **given)
        trainer.train()
        return trainer

    def loaded(place: Path) -> Any:
        return AutoModelForCausalLM.from_pretrained(place, dtype="float32")

    rows, data = pages(world), datasets.Dataset.from_list(pages(world))
    expected = run(str(world.student), str(world.teacher), data).model.state_dict()
    assert_weights(run(world.student, [world.teacher], rows), expected)
    assert_weights(run(loaded(world.student), loaded(world.teacher), data), expected)
    tokenizers = [AutoTokenizer.from_pretrained(place) for place in (world.student, world.teacher)]
    context = AutoConfig.from_pretrained(world.teacher).max_position_embeddings
    blocks = prepare_dataset(data, *tokenizers, max_length=64, teacher_context=context)
    assert_weights(run(loaded(world.student), str(world.teacher), blocks), expected)
    nameless = loaded(world.student)
    nameless.name_or_path = nameless.config.name_or_path = ""
    given = {"processing_class": tokenizers[0]}
    assert_weights(run(nameless, world.teacher, rows, **given), expected)
    # A store's directory, and evaluation data that does not use its losses.
    store = tmp_path / "store"
    argv = f"score --teacher {world.teacher} --dataset {world.pages} --output_dir {store}"
    assert __main__.main([*argv.split(), "--loss_dtype=float32"]) == 0
    given = {"eval_dataset": {"own": rows[:3], "packed": blocks}}
    trainer = run(str(world.student), str(store), rows, **given)
    assert_weights(trainer, expected)
    assert {"eval_own_loss", "eval_packed_loss"} <= trainer.evaluate().keys()
    assert trainer.evaluate("own")["eval_loss"] > 0
    with pytest.raises(ValueError, match="eval_dataset 'other': the trainer has own, packed"):
        trainer.evaluate("other")


def test_adapters_of_a_config_are_those_of_the_options(world: World, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    argv = world.argv("lora", eval_fraction=None, max_steps="2", save_steps="9")
    assert __main__.main(["train", *argv, "--use_peft", "--lora_r=4", "--use_cpu"]) == 0
    trainer = VocAgnoTrainer(
        model=str(world.student),
        teacher=str(world.teacher),
        args=config(tmp_path, max_steps=2, learning_rate=3e-3),
        train_dataset=pages(world),
        peft_config=peft.LoraConfig(
            task_type="CAUSAL_LM", r=4, lora_alpha=32, target_modules="all-linear"
        ),
    )
    trainer.train()
    expected = load_file(world.root / "lora" / "adapter_model.safetensors")
    found = peft.get_peft_model_state_dict(trainer.model)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def test_checkpoint_holds_the_config(world: World, tmp_path: Path) -> None:
    args = config(tmp_path, save_strategy="steps", max_steps=1, method="random", top_k=0.5)
    assert args.output_dir
    trainer = VocAgnoTrainer(str(world.student), args, None, pages(world))
    trainer.train()
    path = tmp_path / "checkpoint-1" / "training_args.bin"
    saved = torch.load(path, weights_only=False)
    assert isinstance(saved, VocAgnoConfig)
    assert saved.to_dict() == trainer.args.to_dict()
    assert (saved.method, saved.top_k, saved.max_length) == ("random", 0.5, 64)
    trainer = VocAgnoTrainer(
        str(world.student), VocAgnoConfig(**saved.to_dict()), None, pages(world)
    )
    trainer.train(resume_from_checkpoint=True)


def test_config_is_read_by_any_parser_of_dataclasses(tmp_path: Path) -> None:
    (args,) = HfArgumentParser(VocAgnoConfig).parse_args_into_dataclasses(
        ["--output_dir", str(tmp_path), "--use_cpu", "--top_k", "0.3", "--max_length", "64"]
    )
    assert (args.top_k, args.max_length, args.global_batch_tokens) == (0.3, 64, 512)


def test_init_kwargs_reach_the_models(world: World, tmp_path: Path) -> None:
    trainer = VocAgnoTrainer(
        str(world.student),
        config(
            tmp_path,
            model_init_kwargs={"attention_dropout": 0.25},
            teacher_model_init_kwargs='{"attention_dropout": 0.5}',
        ),
        None,
        pages(world),
        teacher=str(world.teacher),
    )
    assert trainer.model.config.attention_dropout == 0.25
    assert trainer.online_teachers[0].config.attention_dropout == 0.5


# What users of Trainer and TRL write in Python, and words of the answer.
WRONG_CONFIG: list[tuple[dict[str, Any], str]] = [
    ({"top_k": 2}, "^top_k must be in"),
    ({"top_k": "0.4"}, "^top_k must be a number, got '0.4'"),
    ({"max_length": 64.0}, "^max_length must be a whole number, got 64.0"),
    ({"attend_across_documents": "false"}, "^attend_across_documents must be True or False"),
    ({"train_on": "All"}, "^train_on must be one of completions, all, got All"),
    ({"teacher_dtype": torch.int8}, "^teacher_dtype must be one of auto, .*, got int8"),
    ({"lr_scheduler_kwargs": [1]}, r"lr_scheduler_kwargs \[1\]: TypeError"),
    ({"max_seq_length": 64, "block_size": 64}, "max_length is given twice"),
    ({"dtype": "bfloat16"}, "here it is teacher_dtype"),
    ({"dataset_text_field": "text"}, "text_column of prepare_dataset"),
    ({"eval_fraction": 0.1}, "eval_dataset to VocAgnoTrainer"),
    ({"teacher_model_name_or_path": "t"}, "give teacher to VocAgnoTrainer"),
    ({"use_peft": True}, "peft_config to VocAgnoTrainer"),
    ({"lmbda": 0.5}, "no answers are sampled"),
    ({"topk": 0.4}, r"\(did you mean top_k\?\)"),
    ({"optim": "adam"}, "^optim: there is no adam .did you mean adamw"),
    ({"report_to": "wandbb"}, "^report_to: there is no wandbb .did you mean wandb"),
    ({"deepspeed": "ds.json"}, "^deepspeed is not supported"),
]


@pytest.mark.parametrize(("options", "message"), WRONG_CONFIG, ids=[x for _, x in WRONG_CONFIG])
def test_config_names_arguments(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        config(tmp_path, **options)
    assert "--" not in str(caught.value)


WRONG_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"model": 5}, "^model must be a name, a directory or a model, got int"),
    ({"teacher": {"name": "t"}}, "^teacher must be a name, a directory or a model, got dict"),
    ({"peft_config": {"r": 4}}, "^peft_config must be a config of PEFT, .* got dict"),
]


@pytest.mark.parametrize(("given", "message"), WRONG_ARGUMENTS, ids=[x for _, x in WRONG_ARGUMENTS])
def test_trainer_names_arguments(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    with pytest.raises(ValueError, match=message):
        VocAgnoTrainer(**{"args": config(tmp_path), "train_dataset": [{"text": "a"}], **given})


def test_config_takes_a_dtype_and_one_name_for_a_list(tmp_path: Path) -> None:
    args = config(tmp_path, teacher_dtype=torch.bfloat16, teacher_tokenizer="org/t")
    assert (args.teacher_dtype, args.teacher_tokenizer) == ("bfloat16", ["org/t"])
    args.check_teacher(1)


ROWS = [{"text": "a"}]
BEST = {"eval_strategy": "steps", "save_strategy": "best"}
WRONG_EVALUATIONS: list[tuple[dict[str, Any], Any, str]] = [
    ({"eval_on_start": True}, None, "^eval_on_start needs eval_dataset"),
    ({"eval_strategy": "steps"}, None, "^eval_strategy needs eval_dataset"),
    ({**BEST, "metric_for_best_model": "foo"}, ROWS, "foo is not among .*: give one of loss$"),
    # Without a metric, it is the loss. Several sets have one each, and none together.
    (BEST, {"a": ROWS, "b": ROWS}, "model loss is not .*: give one of a_loss, b_loss$"),
]


@pytest.mark.parametrize(("options", "eval_dataset", "message"), WRONG_EVALUATIONS)
def test_evaluation_that_would_fail_is_rejected_before_the_alignment(
    options: dict[str, Any],
    eval_dataset: Any,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vocagnolm.training.assembly.align", None)
    args = config(tmp_path, method="cpt", **options)
    with pytest.raises(ValueError, match=message):
        VocAgnoTrainer("s", args, None, ROWS, eval_dataset=eval_dataset)


def test_losses_that_an_evaluation_gives_may_choose_the_best_model(tmp_path: Path) -> None:
    blocks = SimpleNamespace(parts={"web": 3, "math": 4})
    for evaluated, metric in (
        (ROWS, "loss"),
        ({"a": ROWS, "b": ROWS}, "eval_b_loss"),
        (blocks, "eval_math_loss"),
        ({"a": blocks}, "a_web_loss"),
    ):
        args = config(tmp_path, eval_strategy="steps", metric_for_best_model=metric)
        check_evaluation(args, evaluation_losses(evaluated))


def test_names_of_trl_and_transformers_work_at_both_doors(world: World, tmp_path: Path) -> None:
    args = VocAgnoConfig(
        output_dir=str(tmp_path), use_cpu=True, max_seq_length=64, batch_size=3, lr=1e-3, epochs=2
    )
    assert (args.max_length, args.per_device_train_batch_size) == (64, 3)
    assert (args.learning_rate, args.num_train_epochs) == (1e-3, 2)
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
    (tmp_path / "middle.yaml").write_text("base: base.yaml\nblock_size: 64\n")
    (tmp_path / "top.yaml").write_text("base: middle.yaml\nmax_length: 32\n")
    for name, length in (("base", 128), ("middle", 64), ("top", 32)):
        assert recipe_options(tmp_path / f"{name}.yaml")["max_length"] == length
    tokenizer = AutoTokenizer.from_pretrained(world.student)
    trainer = VocAgnoTrainer(
        str(world.student),
        config(tmp_path),
        None,
        pages(world),
        teacher_model=str(world.teacher),
        tokenizer=tokenizer,
    )
    assert trainer.online_teachers
    assert trainer.processing_class is tokenizer


def test_what_happens_anyway_is_taken_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert config(tmp_path, packing=True, assistant_only_loss=True).max_length == 64
    assert [line.split()[0] for line in caplog.messages] == ["packing", "assistant_only_loss"]


def test_bfloat16_on_a_cpu_needs_no_other_option(tmp_path: Path) -> None:
    if not torch.accelerator.is_available():
        assert VocAgnoConfig(output_dir=str(tmp_path), bf16=True).use_cpu


def test_advice_about_the_batch_is_a_number_that_works(world: World, tmp_path: Path) -> None:
    rows = pages(world)
    for options in (
        {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 9999},
        {"per_device_train_batch_size": 9999},
        {"per_device_train_batch_size": 3, "global_batch_tokens": 64 * 3 * 9999},
        {"global_batch_tokens": 64 * 9999},
    ):
        options = {"global_batch_tokens": None, **options}
        with pytest.raises(ValueError, match=r"lower \w+ to") as caught:
            VocAgnoTrainer(
                str(world.student), config(tmp_path, method="cpt", **options), None, rows
            )
        for name, number in re.findall(r"(\w+) to (?:at most )?(\d+)", str(caught.value)):
            options[name] = int(number)
        VocAgnoTrainer(str(world.student), config(tmp_path, method="cpt", **options), None, rows)


def test_resuming_with_other_settings_is_refused(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def run(**options: Any) -> VocAgnoTrainer:
        args = config(tmp_path, save_strategy="steps", save_steps=1, **options)
        names = {"model": str(world.student), "teacher": str(world.teacher)}
        return VocAgnoTrainer(args=args, train_dataset=pages(world), **names)

    run(top_k=0.4).train()
    for options in ({"top_k": 0.7}, {"top_k": 0.4, "selection": "accept"}):
        with pytest.raises(ValueError, match=r"other settings .(top_k|selection) was"):
            run(**options).train(resume_from_checkpoint=True)
    run(top_k=0.4).train(resume_from_checkpoint=True)
    assert "earlier run" not in caplog.text
    # The run starts anew, with a warning.
    run(top_k=0.4).train()
    assert "resume_from_checkpoint=True" in caplog.text


def test_model_of_a_run_is_not_overwritten(world: World, tmp_path: Path) -> None:
    student = tmp_path / "student"
    shutil.copytree(world.student, student)
    trainer = VocAgnoTrainer(
        str(student), config(student, method="cpt"), train_dataset=pages(world)
    )
    with pytest.raises(ValueError, match=r"output_dir .* has the student or a teacher of this run"):
        trainer.train()


def test_blocks_without_losses_need_a_teacher_in_memory(world: World, tmp_path: Path) -> None:
    tokenizers = [AutoTokenizer.from_pretrained(place) for place in (world.student, world.teacher)]
    data = datasets.Dataset.from_list(pages(world))
    blocks = prepare_dataset(data, *tokenizers, max_length=64)
    with pytest.raises(ValueError, match="train_dataset has no losses of a teacher"):
        VocAgnoTrainer(str(world.student), config(tmp_path), None, blocks, teacher=StoredTeacher())


def test_stores_and_models_are_not_mixed(world: World, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "manifest.json").write_text('{"format": 1}')
    teachers = [str(tmp_path / "store"), str(world.teacher)]
    with pytest.raises(ValueError, match="teacher has stores and models: give only one"):
        VocAgnoTrainer(str(world.student), config(tmp_path), None, pages(world), teacher=teachers)


def test_evaluation_that_steers_a_run_belongs_to_its_settings(world: World, tmp_path: Path) -> None:
    """The losses of other documents cannot be compared with those of the best checkpoint."""

    def evaluation(held_out: Any, **options: Any) -> Any:
        args = config(
            tmp_path,
            method="cpt",
            eval_strategy="steps",
            eval_steps=1,
            save_strategy="steps",
            save_steps=1,
            **options,
        )
        settings = VocAgnoTrainer(
            str(world.student), args, None, pages(world), eval_dataset=held_out
        ).settings
        return settings.get("evaluation")

    rows = pages(world)
    first = evaluation(rows[:3], load_best_model_at_end=True)
    assert first
    assert evaluation(rows[:3], load_best_model_at_end=True) == first
    assert evaluation(rows[:4], load_best_model_at_end=True) != first
    assert evaluation(rows[:3], lr_scheduler_type="reduce_lr_on_plateau") == first
    named = {"a": rows[:3], "b": rows[:3]}
    assert evaluation(named, load_best_model_at_end=True, metric_for_best_model="a_loss") != first
    assert evaluation(rows[:3]) is None
    saved, now = {"evaluation": first}, {"evaluation": {"metric": "loss", "documents": {}}}
    assert changed_settings(saved, now) == ["the evaluation that steers the run has changed"]
    # The earlier part of the run was not steered.
    assert changed_settings({}, now) == []


def test_documents_may_be_given_to_an_evaluation(world: World, tmp_path: Path) -> None:
    rows = pages(world)
    trainer = VocAgnoTrainer(
        str(world.student), config(tmp_path, method="cpt"), None, rows, eval_dataset=rows[:9]
    )
    expected = trainer.evaluate()["eval_loss"]
    assert trainer.evaluate(rows[:9])["eval_loss"] == expected
    assert trainer.evaluate(datasets.Dataset.from_list(rows[:9]))["eval_loss"] == expected
    assert trainer.predict(rows[:9]).metrics["test_loss"] == expected
    with pytest.raises(ValueError, match="eval_dataset must be documents or the Blocks"):
        trainer.evaluate(ROWS_OF_ANOTHER_KIND)
    with pytest.raises(ValueError, match="eval_dataset 'long': the trainer has none with a name"):
        trainer.evaluate("long")


class RowsOfAnotherKind(torch.utils.data.Dataset[object]):
    def __getitem__(self, index: int) -> object:
        return {"input_ids": [index]}


ROWS_OF_ANOTHER_KIND = RowsOfAnotherKind()

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"args": TrainingArguments("o", use_cpu=True)}, "must be a VocAgnoConfig, got Training"),
    ({"train_dataset": [{"text": " "}]}, "train_dataset has no usable document: 1 read"),
    (
        {"train_dataset": [{"id": 1}, {"text": 5}]},
        r"train_dataset has no usable document: 2 read, 2 skipped \(1 null, 1 not text but int\)",
    ),
    (
        {"train_dataset": datasets.Dataset.from_dict({"body": ["a"]})},
        "not a column of train_dataset",
    ),
    ({"train_dataset": None}, "train_dataset is missing"),
    ({"train_dataset": []}, "train_dataset is empty"),
    (
        {"train_dataset": datasets.DatasetDict(train=datasets.Dataset.from_list([{"text": "a"}]))},
        r"give one, such as dataset\['train'\]",
    ),
    ({"train_dataset": ["a"]}, "train_dataset must be a datasets.Dataset, .* got a list of str"),
    (
        {"eval_dataset": datasets.Dataset.from_dict({"text": ["a"]}).to_iterable_dataset()},
        "eval_dataset is a stream",
    ),
    ({"train_dataset": ROWS_OF_ANOTHER_KIND}, "train_dataset must be documents or the Blocks"),
    ({"eval_dataset": ROWS_OF_ANOTHER_KIND}, "eval_dataset must be documents or the Blocks"),
    (
        {"optimizers": (torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), None)},
        "the optimizer has none of the student's trained weights",
    ),
    (
        {"train_dataset": [{"text": "a"}]},
        "makes 1 sequence of .* lower global_batch_tokens to at most 64",
    ),
    ({"eval_dataset": [{"text": ""}]}, "eval_dataset has no usable document"),
    ({"model_init_kwargs": {"torch_dtype": "bfloat16"}}, "give torch_dtype as teacher_dtype"),
    ({"model_init_kwargs": {"config": object()}}, "config must be a value of JSON, got object"),
    ({"eval_do_concat_batches": False}, "eval_do_concat_batches False keeps apart the losses"),
    ({"max_grad_norm": None}, "max_grad_norm must be a number, got None"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[message for _, message in WRONG])
def test_what_is_wrong_is_named(
    changes: dict[str, Any], message: str, world: World, tmp_path: Path
) -> None:
    changes = dict(changes)
    given = {
        "model": str(world.student),
        "teacher": str(world.teacher),
        "train_dataset": pages(world),
    }
    own = {name: changes.pop(name) for name in [*changes] if hasattr(VocAgnoConfig, name)}

    def make() -> None:
        VocAgnoTrainer(**{"args": config(tmp_path, **own), **given, **changes})

    with pytest.raises(ValueError, match=message):
        make()


def test_frozen_model_is_rejected(world: World, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(world.student)
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="model has no weights to train"):
        VocAgnoTrainer(model, config(tmp_path, method="cpt"), train_dataset=pages(world))


def test_blocks_of_another_length_are_rejected(world: World, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(world.student)
    blocks = prepare_dataset(datasets.Dataset.from_list(pages(world)), tokenizer, max_length=32)
    with pytest.raises(ValueError, match="train_dataset has sequences of 32 tokens"):
        VocAgnoTrainer(str(world.student), config(tmp_path, method="cpt"), None, blocks)


PACKED_FOR_OTHERS = {
    "another student": ("teacher", "teacher"),
    "another teacher": ("student", "student"),
    "0 teachers": ("student",),
}


@pytest.mark.parametrize("fault", PACKED_FOR_OTHERS)
def test_blocks_of_other_tokenizers_are_rejected(fault: str, world: World, tmp_path: Path) -> None:
    tokenizers = [
        AutoTokenizer.from_pretrained(getattr(world, role)) for role in PACKED_FOR_OTHERS[fault]
    ]
    data = datasets.Dataset.from_list(pages(world))
    blocks = prepare_dataset(data, *tokenizers, max_length=64)
    message = "packed for 0 teachers" if len(tokenizers) == 1 else "with another tokenizer"
    with pytest.raises(ValueError, match=f"train_dataset was .*{message}"):
        VocAgnoTrainer(
            str(world.student), config(tmp_path), None, blocks, teacher=str(world.teacher)
        )


@pytest.mark.parametrize("role", ["student", "teacher"])
@pytest.mark.parametrize("name", ["train_dataset", "eval_dataset"])
def test_blocks_fit_into_the_contexts_of_their_models(
    name: str, role: str, world: World, tmp_path: Path
) -> None:
    tokenizers = [AutoTokenizer.from_pretrained(place) for place in (world.student, world.teacher)]
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(place, dtype="float32")
        for place in (world.student, world.teacher)
    )
    data = datasets.Dataset.from_list(pages(world))
    blocks = prepare_dataset(data, *tokenizers, max_length=64)
    tokens = blocks.longest_segments[role == "teacher"]
    short = datasets.Dataset.from_list([{"text": "1 + 1 = 2"}])
    given = {"train_dataset": prepare_dataset(short, *tokenizers, max_length=64), name: blocks}
    config_of = {"student": student.config, "teacher": teacher.config}
    config_of[role].max_position_embeddings = tokens
    VocAgnoTrainer(student, config(tmp_path, max_length=64), teacher=teacher, **given)
    config_of[role].max_position_embeddings = tokens - 1
    message = f"{name} has a segment of {tokens} {role} tokens, and the {role}'s context is"
    with pytest.raises(ValueError, match=message):
        VocAgnoTrainer(student, config(tmp_path, max_length=64), teacher=teacher, **given)


def test_blocks_without_a_teacher_are_rejected_by_loaded_models(
    world: World, tmp_path: Path
) -> None:
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(place, dtype="float32")
        for place in (world.student, world.teacher)
    )
    tokenizer = AutoTokenizer.from_pretrained(world.student)
    data = datasets.Dataset.from_list(pages(world))
    blocks = prepare_dataset(data, tokenizer, max_length=64)
    trainer = VocAgnoTrainer(student, config(tmp_path), None, blocks, teacher=teacher)
    with pytest.raises(ValueError, match="packed without a teacher"):
        trainer.train()


def test_full_disk_is_one_line_that_says_what_is_safe(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = VocAgnoTrainer(
        str(world.student),
        config(tmp_path, method="cpt", save_strategy="steps", save_steps=1),
        None,
        pages(world),
    )
    save = Trainer._save_optimizer_and_scheduler

    def save_until_full(self: Trainer, directory: str) -> None:
        if directory.endswith("-2"):
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 5 vs 4")
        save(self, directory)

    monkeypatch.setattr(Trainer, "_save_optimizer_and_scheduler", save_until_full)
    with pytest.raises(
        OSError, match=r"checkpoint-1 is whole.*resume_from_checkpoint=True"
    ) as caught:
        trainer.train()
    assert str(tmp_path) in str(caught.value)
    # The unfinished save is removed.
    assert sorted(path.name for path in tmp_path.glob("*/*")) == sorted(
        path.name for path in (tmp_path / "checkpoint-1").iterdir()
    )
    assert not (tmp_path / ".saving").exists()
