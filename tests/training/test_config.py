"""Defaults of a run, what is derived from other options, and the global batch."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, get_origin

import pytest
from transformers.trainer_utils import SchedulerType

from vocagnolm.fields import Option, OptionError, kinds_of, options_of
from vocagnolm.run.parser import parse
from vocagnolm.training.config import VocAgnoConfig, split_global_batch
from vocagnolm.training.job import settings_of
from vocagnolm.training.options import GuidanceOptions, RunOptions

T = ("--teacher", "t", "--use_cpu")


def test_defaults_are_the_papers() -> None:
    args = parse(T).args
    assert (args.max_length, args.global_batch_tokens) == (2048, 2**21)
    assert (args.learning_rate, args.lr_scheduler_type) == (8e-5, "cosine_with_min_lr")
    assert args.lr_scheduler_kwargs == {"min_lr_rate": 0.1}
    assert (args.adam_beta2, args.weight_decay, args.num_train_epochs) == (0.95, 0.1, 1.0)
    assert (args.report_to, args.resume_from_checkpoint) == ([], "auto")
    assert parse([*T, "--lr_scheduler_type", "linear"]).args.lr_scheduler_kwargs is None
    assert parse([*T, "--no_logging_first_step"]).args.logging_first_step is False


@pytest.mark.parametrize("has_bf16", [True, False])
def test_bf16_is_the_default_on_a_gpu_that_has_it(
    has_bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda: has_bf16)
    monkeypatch.setattr("transformers.TrainingArguments.__post_init__", lambda self: None)
    monkeypatch.setattr("vocagnolm.training.config.check_arguments", lambda args: None)
    monkeypatch.setattr(VocAgnoConfig, "world_size", 1)
    assert VocAgnoConfig().bf16 is has_bf16
    assert VocAgnoConfig(fp16=True).bf16 is False


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("--teacher org/b c", "runs/a__b__c"),
        ("--teacher b --method uld", "runs/a__b__uld"),
        ("--teacher_losses stores/s", "runs/a__s"),
        ("--method cpt --output_dir o", "o"),
    ],
)
def test_output_is_named_after_the_models(argv: str, expected: str) -> None:
    assert parse(["--student", "org/a", "--use_cpu", *argv.split()]).args.output_dir == expected


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("", ("no", None)),
        ("--eval_fraction .1", ("steps", 250)),
        ("--eval_dataset e --save_steps 50", ("steps", 50)),
        ("--eval_fraction .1 --eval_steps 9", ("steps", 9)),
        ("--eval_fraction .1 --eval_strategy epoch", ("epoch", None)),
    ],
)
def test_run_evaluates_where_there_is_something_to_evaluate_on(
    argv: str, expected: tuple[str, int | None]
) -> None:
    run = parse([*T, *argv.split()]).args
    assert (run.eval_strategy, run.eval_steps) == expected


def test_settings_have_one_name_for_a_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t").mkdir()
    settings = settings_of(parse(["--student=./t", *T]))
    assert [settings["student"]] == settings["teacher"] == [f"{tmp_path}/t"]


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "m.gguf"])
def test_settings_identify_the_weights_of_local_teachers(name: str, tmp_path: Path) -> None:
    content = bytearray(3_000_000)
    (tmp_path / name).write_bytes(content)
    place = tmp_path / name if name.endswith(".gguf") else tmp_path
    argv = ["--use_cpu", "--teacher", str(place), "a/hub-name"]
    before = settings_of(parse(argv))
    (tmp_path / "README.md").touch()
    assert settings_of(parse(argv)) == before
    found = [before.pop("teacher_hashes")]
    # The first byte, the last one, and a training that changes many.
    for changed in (slice(0, 1), slice(-1, None), slice(1_000_000, 2_000_000)):
        content[changed] = b"x" * len(content[changed])
        (tmp_path / name).write_bytes(content)
        after = settings_of(parse(argv))
        found.append(after.pop("teacher_hashes"))
        assert after == before
    assert all(files[0].keys() == {name} and files[1] == {} for files in found)
    assert len({files[0][name] for files in found}) == 4


def test_settings_have_the_code_of_a_users_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name alone would let a run resume with other code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def code(module: str, value: int) -> object:
        text = f"import numpy as np\n\ndef mine(losses):\n    return losses.sum(-1) * {value}\n"
        Path(f"{module}.py").write_text(text)
        return settings_of(parse([*T, f"--aggregation={module}:mine"]))["own_code_sha256"]

    assert code("first_code", 1) == code("equal_code", 1) != code("other_code", 2)
    assert "own_code_sha256" not in settings_of(parse(T))


def test_settings_have_the_batch_of_a_process_where_tokens_compete_in_it() -> None:
    name = "per_device_train_batch_size"
    assert name not in settings_of(parse(T))
    assert settings_of(parse([*T, "--selection_scope=batch"]))[name] == 8


def test_liger_leaves_the_losses_alone() -> None:
    given = '{"rope": false, "cross_entropy": true}'
    kernels = parse([*T, "--use_liger_kernel", "--liger_kernel_config", given]).args
    off = {"fused_linear_cross_entropy": False, "cross_entropy": False}
    assert kernels.liger_kernel_config == {**off, "rope": False}


@pytest.mark.parametrize("declared", list(options_of(GuidanceOptions, RunOptions)))
def test_value_of_another_type_or_outside_of_an_interval_is_rejected(declared: Option) -> None:
    kind, _ = kinds_of(VocAgnoConfig)[declared.name]
    wrong: list[Any] = []
    if get_origin(kind) is Literal:
        wrong = ["Skip", True]
    elif kind is bool:
        wrong = ["no", 1]
    elif declared.interval:
        low, high = map(float, declared.interval[1:-1].split(","))
        wrong = ["1", float("nan"), kind(low - 1)]
        if declared.interval[0] == "(":
            wrong.append(kind(low))
        if declared.interval[-1] == ")" and high < float("inf"):
            wrong.append(kind(high))
    for value in wrong:
        with pytest.raises(OptionError, match=rf"^{declared.name} must be "):
            VocAgnoConfig(use_cpu=True, **{declared.name: value})


@pytest.mark.parametrize("schedule", [schedule.value for schedule in SchedulerType])
def test_schedule_that_needs_no_settings_is_accepted(schedule: str) -> None:
    needed = {"cosine_with_min_lr": "min_lr", "cosine_warmup_with_min_lr": "min_lr"}
    needed["warmup_stable_decay"] = "num_decay_steps"
    settings = {needed[schedule]: 1} if schedule in needed else {}
    options = {"lr_scheduler_type": schedule, "lr_scheduler_kwargs": settings}
    args = VocAgnoConfig(use_cpu=True, eval_strategy="steps", **options)
    assert args.lr_scheduler_kwargs == settings


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 32, 64])
@pytest.mark.parametrize("given", list(itertools.product([None, 1, 3, 8], [None, 1, 5, 16])))
def test_global_batch_is_made_exactly_or_not_at_all(
    world_size: int, given: tuple[int | None, int | None]
) -> None:
    fixed = world_size * (given[0] or 1) * (given[1] or 1)
    possible = fixed == 1024 if None not in given else 1024 % fixed == 0
    with nullcontext() if possible else pytest.raises(ValueError, match="not global_batch_tok"):
        rows, steps = split_global_batch(2**21, 2048, world_size, *given)
        assert world_size * rows * steps == 1024
        assert given[0] in (None, rows)
        assert given[1] in (None, steps)


@pytest.mark.parametrize(("per_device", "expected"), [(1, 1), (6, 6), (11, 1), (12, 6), (64, 8)])
def test_batch_size_is_the_largest_divisor_up_to_8(per_device: int, expected: int) -> None:
    assert split_global_batch(64 * per_device, 64, 1) == (expected, per_device // expected)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # As for Trainer, unless a global batch is asked for.
        ({}, (16384, 8, 1, 8)),
        ({"global_batch_tokens": 2**21}, (2**21, 8, 128, 8)),
        ({"global_batch_tokens": 2**21, "per_device_train_batch_size": 4}, (2**21, 4, 256, 4)),
        ({"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}, (12288, 3, 2, 3)),
        ({"per_device_eval_batch_size": 2}, (16384, 8, 1, 2)),
    ],
)
def test_batch_is_derived(options: dict[str, Any], expected: tuple[int, ...]) -> None:
    run = VocAgnoConfig(use_cpu=True, **options)
    batch_sizes = run.per_device_train_batch_size, run.per_device_eval_batch_size
    tokens, rows, steps, evaluated = expected
    assert (run.global_batch_tokens, *batch_sizes) == (tokens, rows, evaluated)
    assert run.gradient_accumulation_steps == steps
    # The trainer's arguments are made again from those that a checkpoint keeps.
    again = VocAgnoConfig(**run.to_dict())
    assert again.to_dict() == run.to_dict()
    shown = run.batch_arithmetic()
    assert f"= 1 process x {rows} sequences x {steps} accumulation step" in shown
    asked = "global_batch_tokens" in options
    assert ("Trainer's step" in shown) == (not asked)
