"""What a user can set: the defaults, the batch arithmetic, recipes, and every refusal."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from transformers.trainer_utils import IntervalStrategy
from transformers.utils import is_bitsandbytes_available

from vocagnolm.objective import Method
from vocagnolm.run import training_arguments
from vocagnolm.run.arguments import DataArguments
from vocagnolm.run.job import Job
from vocagnolm.run.parse import parse
from vocagnolm.run.recipe import recipe_of
from vocagnolm.run.training_arguments import RunArguments, split_global_batch

ROOT = Path(__file__).resolve().parents[2]
CPU = ("--use_cpu", "True")
TEACHER = ("--teacher", "some/teacher", *CPU)
STORES = ("--teacher_losses", "S1", "S2")
RECIPES = sorted(set((ROOT / "recipes").rglob("*.yaml")) - {ROOT / "recipes" / "base.yaml"})
ACCELERATE_CONFIGS = sorted((ROOT / "accelerate_configs").glob("*.yaml"))


def error_of(*argv: str) -> str:
    with pytest.raises(ValueError, match=r"\S") as caught:
        parse(argv)
    message = str(caught.value)
    assert "\n" not in message
    return message


def recipe(tmp_path: Path, content: str) -> tuple[str, str]:
    path = tmp_path / "recipe.yaml"
    path.write_text(content)
    return "--config", str(path)


# Defaults


@pytest.fixture(scope="module")
def defaults() -> Job:
    return parse(TEACHER)


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("model", "student", "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T"),
        ("model", "teacher_dtype", "auto"),
        ("model", "trust_remote_code", False),
        ("data", "dataset", ["open-web-math/open-web-math"]),
        ("data", "dataset_weights", None),
        ("data", "dataset_split", ["train"]),
        ("data", "text_column", ["text"]),
        ("data", "max_length", 2048),
        ("data", "eval_fraction", 0.0),
        ("data", "attend_across_documents", False),
        ("method", "method", "vocagnolm"),
        ("method", "top_k", 0.4),
        ("method", "aggregation", "max"),
        ("method", "unmapped", "include"),
        ("method", "selection_scope", "sequence"),
        ("method", "loss_divisor", "all"),
        ("run", "global_batch_tokens", 2 * 1024 * 1024),
        ("run", "learning_rate", 8e-5),
        ("run", "lr_scheduler_type", "cosine_with_min_lr"),
        ("run", "lr_scheduler_kwargs", {"min_lr_rate": 0.1}),
        ("run", "adam_beta1", 0.9),
        ("run", "adam_beta2", 0.95),
        ("run", "weight_decay", 0.1),
        ("run", "max_grad_norm", 1.0),
        ("run", "num_train_epochs", 1.0),
        ("run", "max_steps", -1),
        ("run", "remove_unused_columns", False),
        ("run", "logging_nan_inf_filter", False),
        ("run", "resume_from_checkpoint", "auto"),
        ("run", "dry_run", False),
        ("run", "ddp_timeout", 1800),
        ("run", "per_device_eval_batch_size", 8),
        ("run", "output_dir", "runs/TinyLlama-1.1B-intermediate-step-1431k-3T__teacher"),
    ],
)
def test_parse_gives_the_papers_settings(defaults: Job, part: str, name: str, value: Any) -> None:
    assert getattr(vars(defaults)[part], name) == value


def test_parse_decays_to_a_tenth(defaults: Job) -> None:
    run = defaults.run
    assert isinstance(run.lr_scheduler_kwargs, dict)
    assert run.learning_rate * run.lr_scheduler_kwargs["min_lr_rate"] == pytest.approx(8e-6)


def test_parse_leaves_out_the_minimum() -> None:
    run = parse((*TEACHER, "--lr_scheduler_type", "linear")).run
    assert not run.lr_scheduler_kwargs
    given = parse((*TEACHER, "--lr_scheduler_kwargs", '{"min_lr": 1e-6}')).run
    assert given.lr_scheduler_kwargs == {"min_lr": 1e-6}


def test_guidance_is_the_trainers_default(defaults: Job) -> None:
    assert defaults.method.in_effect() == Method().in_effect() | {"guidance_table_steps": 0}


@pytest.mark.parametrize("has_bf16", [True, False])
def test_parse_computes_in_bfloat16(monkeypatch: pytest.MonkeyPatch, has_bf16: bool) -> None:
    assert parse(TEACHER).run.bf16 is False  # --use_cpu
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: has_bf16)
    monkeypatch.setattr(training_arguments, "argument_faults", lambda arguments: ())
    argument_class = RunArguments
    monkeypatch.setattr(argument_class.__mro__[1], "__post_init__", lambda self: None)
    assert argument_class().bf16 is has_bf16
    assert argument_class(use_cpu=True).bf16 is False
    assert argument_class(fp16=True).bf16 is False
    assert argument_class(bf16=False).bf16 is False


# The batch


@pytest.mark.parametrize("world_size", range(1, 65))
@pytest.mark.parametrize("given", [(None, None), (2, None), (None, 4), (1, 16), (8, 1024)])
def test_split_global_batch_multiplies_out_or_explains(
    world_size: int, given: tuple[int | None, int | None]
) -> None:
    tokens, length, sequences = 2**21, 2048, 1024
    fixed = world_size * (given[0] or 1) * (given[1] or 1)
    possible = fixed == sequences if None not in given else sequences % fixed == 0
    if possible:
        batch_size, accumulation = split_global_batch(tokens, length, world_size, *given)
        assert world_size * batch_size * accumulation * length == tokens
        assert given[0] in (None, batch_size)
        assert given[1] in (None, accumulation)
        if given == (None, None):
            assert batch_size == min(8, sequences // world_size)
        return
    with pytest.raises(ValueError, match="processes x") as caught:
        split_global_batch(tokens, length, world_size, *given)
    found = re.match(
        r"(\d+) processes x (\d+) sequences x (\d+) accumulation steps x 2048 tokens = "
        r"([\d,]+) tokens, not --global_batch_tokens 2,097,152 \(1024 sequences\): change",
        str(caught.value),
    )
    assert found
    processes, per_device, steps, product = (int(n.replace(",", "")) for n in found.groups())
    assert processes == world_size
    assert processes * per_device * steps * 2048 == product != tokens


@pytest.mark.parametrize(("per_device", "expected"), [(1, 1), (6, 6), (11, 1), (12, 6), (64, 8)])
def test_split_global_batch_takes_divisors_up_to_8(per_device: int, expected: int) -> None:
    assert split_global_batch(per_device * 3 * 10, 10, 3) == (expected, per_device // expected)


@pytest.mark.parametrize("world_size", [1, 8, 32])
def test_set_batch_spells_out_the_arithmetic(
    monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    run = parse(TEACHER).run
    monkeypatch.setattr(type(run), "world_size", property(lambda self: world_size))
    run.set_batch(2048)
    assert (run.per_device_train_batch_size, run.per_device_eval_batch_size) == (8, 8)
    assert run.gradient_accumulation_steps == 128 // world_size
    assert run.batch_arithmetic(2048) == (
        f"2,097,152 tokens = {world_size} processes x 8 sequences x {128 // world_size} "
        "accumulation steps x 2048 tokens"
    )


PARTS = ("--per_device_train_batch_size", "3", "--gradient_accumulation_steps", "2")
AS_DECIDED = ", as --per_device_train_batch_size and --gradient_accumulation_steps decide"


@pytest.mark.parametrize(
    ("options", "tokens", "said"),
    [
        (PARTS, 6 * 2048, AS_DECIDED),
        ((*PARTS, "--global_batch_tokens", str(6 * 2048)), 6 * 2048, "2048 tokens"),
        # One of them splits the paper's batch.
        (("--per_device_train_batch_size", "4"), 2**21, "2048 tokens"),
        (("--gradient_accumulation_steps", "256"), 2**21, "2048 tokens"),
    ],
)
def test_batch_size_and_accumulation_decide_together(
    options: tuple[str, ...], tokens: int, said: str
) -> None:
    run = parse((*TEACHER, *options)).run
    assert run.global_batch_tokens == tokens
    assert run.batch_arithmetic(2048).endswith(said)
    rows, steps = run.per_device_train_batch_size, run.gradient_accumulation_steps
    assert rows * steps * 2048 == tokens


@pytest.mark.parametrize(("given", "expected"), [((), 8), (("2",), 2), (("16",), 16)])
def test_set_batch_keeps_the_evaluation_batch(given: tuple[str, ...], expected: int) -> None:
    run = parse((*TEACHER, *("--per_device_eval_batch_size",) * len(given), *given)).run
    assert (run.per_device_train_batch_size, run.per_device_eval_batch_size) == (8, expected)


@pytest.mark.parametrize(
    ("num_proc", "cores", "documents", "expected"),
    [
        (None, 6, 9_999, None),
        (None, 6, 10_000, 6),
        (None, 1, 10_000, None),
        (3, 6, 10_000, 3),
        (1, 6, 10_000, None),
        (3, 6, 9_999, None),
    ],
)
@pytest.mark.parametrize("has_affinity", [True, False])
def test_processes_are_the_cores(
    monkeypatch: pytest.MonkeyPatch,
    has_affinity: bool,
    num_proc: int | None,
    cores: int,
    documents: int,
    expected: int | None,
) -> None:
    if has_affinity:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
        monkeypatch.setattr(os, "cpu_count", lambda: 999)
    else:
        monkeypatch.delattr(os, "sched_getaffinity", raising=False)
        monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert DataArguments(num_proc=num_proc).processes(documents) == expected


# Recipes


def test_parse_takes_the_recipe_and_then_the_flags(tmp_path: Path) -> None:
    config = recipe(
        tmp_path,
        "teacher: from/recipe\nlearning_rate: 3e-4\nmax_length: 64\nglobal_batch_tokens: 256\n"
        "lr_scheduler_kwargs: {min_lr_rate: 0.5}\nuse_cpu: true\nreport_to: [none]\n"
        "seed: null\nattend_across_documents: false\noutput_dir: --odd\n",
    )
    job = parse((*config, "--learning_rate", "1e-3", "--max_length=128"))
    model, data, run = job.model, job.data, job.run
    assert model.teacher == ["from/recipe"]
    assert (run.learning_rate, data.max_length, run.global_batch_tokens) == (1e-3, 128, 256)
    assert run.lr_scheduler_kwargs == {"min_lr_rate": 0.5}
    assert (run.seed, run.report_to, run.output_dir) == (42, [], "--odd")
    assert data.attend_across_documents is False
    # Where --config stands does not matter.
    assert parse(("--learning_rate", "1e-3", *config)).run.learning_rate == 1e-3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "must be a mapping of options to values"),
        ("- a\n", "must be a mapping of options to values"),
        ("b: 1\na: [\n", "line 3, cannot be read: expected the node content, but found"),
        ("b: 1\na: 1\na: 2\n", "line 2 names a, as line 3 does: leave one out"),
        ("a: 2026-02-30\n", "cannot be read: day is out of range for month"),
        ("a: " + "[" * 2000, "cannot be read: maximum recursion depth exceeded"),
        ("config: other.yaml\n", "line 1 names another config: call it base, or leave it out"),
    ],
)
def test_parse_names_the_recipe(tmp_path: Path, content: str, message: str) -> None:
    option, path = recipe(tmp_path, content)
    assert (
        error_of(option, path, *TEACHER)
        .replace(f"{path},", path)
        .startswith(f"{option} {path} {message}")
    )


def test_parse_names_the_recipe_when_there_is_none(tmp_path: Path) -> None:
    assert error_of("--config", str(tmp_path / "no.yaml")).startswith(
        f"--config {tmp_path / 'no.yaml'} cannot be read: [Errno 2] No such file"
    )
    assert "Is a directory" in error_of("--config", str(tmp_path))
    (tmp_path / "bytes.yaml").write_bytes(b"a: \xff\xfe")
    assert "codec can't decode" in error_of("--config", str(tmp_path / "bytes.yaml"))
    assert error_of("--config") == "argument --config: expected one argument"
    two = ("--config", "a.yaml", "--config=b.yaml")
    assert error_of(*two) == "--config names a.yaml and b.yaml: give one, with the other as base"


def test_parse_checks_the_values_of_a_recipe(tmp_path: Path) -> None:
    wrong = recipe(tmp_path, "# a share\n\ntop_k: 1.4\n")
    said = "--top_k must be in (0, 1], got 1.4"
    assert error_of(*wrong, *TEACHER) == f"--config {wrong[1]}, line 3: {said}"
    for flags in (("--top_k", "1.4"), ("--top-k=1.4",)):
        assert error_of(*wrong, *TEACHER, *flags) == said
    misspelt = recipe(tmp_path, "seed: 1\nlearnig_rate: 1\n")
    assert error_of(*misspelt, *TEACHER) == (
        f"--config {misspelt[1]}, line 2: unrecognized arguments: --learnig_rate=1 (did you mean "
        "--learning_rate?)"
    )


def resolved(path: Path) -> dict[str, object]:
    return recipe_of(["--config", str(path)]).options


def test_recipe_overrides_its_bases_when_chained(tmp_path: Path) -> None:
    (tmp_path / "bases").mkdir()
    first = "teacher: [a, b]\ntop_k: 0.5\nseed: 7\nmax_length: 64\n"
    (tmp_path / "bases" / "first.yaml").write_text(first)
    (tmp_path / "bases" / "second.yaml").write_text("base: first.yaml\ntop_k: 0.6\nseed: 8\n")
    config = recipe(tmp_path, "seed: null\nteacher: c\nbase: bases/second.yaml\n")
    job = parse((*config, *CPU))
    assert (job.model.teacher, job.method.top_k, job.data.max_length) == (["c"], 0.6, 64)
    # null takes a base's value away: what is left is the default.
    assert job.run.seed == 42


@pytest.mark.parametrize(
    ("base", "content", "message"),
    [
        ("base.yaml", None, "--config {0}/base.yaml cannot be read, the base of {0}/recipe.yaml: "),
        ("base.yaml", "learnig_rate: 1\n", "--config {0}/base.yaml, line 1: unrecognized argu"),
        ("base.yaml", "a: [", "--config {0}/base.yaml, line 1, cannot be read, the base of {0}/"),
        ("base.yaml", "base: recipe.yaml\n", "--config {0}/recipe.yaml is its own base: {0}/re"),
        ("recipe.yaml", None, "--config {0}/recipe.yaml is its own base: {0}/recipe.yaml -> {0}/"),
        ("[a, b]", None, "--config {0}/recipe.yaml, line 1: base must name a file beside it,"),
    ],
)
def test_parse_names_the_base_when_wrong(
    tmp_path: Path, base: str, content: str | None, message: str
) -> None:
    config = recipe(tmp_path, f"base: {base}\n")
    if content is not None:
        (tmp_path / "base.yaml").write_text(content)
    assert error_of(*config, *TEACHER).startswith(message.format(tmp_path))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_parse_accepts_when_the_recipe_is_ours(path: Path) -> None:
    names = resolved(path)
    argv = ["--config", str(path), *CPU]
    if names.get("method", "vocagnolm") == "vocagnolm" and "teacher" not in names:
        argv += ["--teacher", "t"]
    parts = vars(parse(argv)).values()
    for name, value in names.items():
        part = next(part for part in parts if hasattr(part, name))
        found = getattr(part, name)
        if name not in ("report_to", "use_cpu"):
            assert json.loads(json.dumps(found)) in (value, [value]), name


@pytest.mark.parametrize("path", ACCELERATE_CONFIGS, ids=lambda path: path.name)
def test_accelerate_reads_the_file(path: Path) -> None:
    assert path.read_text().startswith("#")  # the hardware
    config = load_config_from_file(str(path))
    assert config.num_processes >= 1


def test_several_trackers_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse([*TEACHER, "--report_to", "wandb", "tensorboard"]).run.report_to == [
        *("wandb", "tensorboard")
    ]
    assert parse(TEACHER).run.report_to == []


# Refusals


def test_missing_wandb_is_said_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    expected = "--report_to wandb needs the package wandb, which is not installed: `pip install"
    assert error_of(*TEACHER, "--report_to", "wandb").startswith(expected)


REJECTED = re.findall(
    r"^(?!#)(\S.*)\n    (.+)$",
    Path(__file__).with_name("rejected.txt").read_text(),
    re.MULTILINE,
)


@pytest.mark.parametrize(("line", "message"), REJECTED)
def test_command_line_is_rejected_in_one_line(
    line: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    named = {"TEACHER": TEACHER, "CPU": CPU, "STORES": STORES, "NOTHING": ()}
    found = error_of(*(part for word in shlex.split(line) for part in named.get(word, (word,))))
    if message.endswith("..."):
        assert found.startswith(message.removesuffix("..."))
    else:
        assert found == message


def test_table_of_rejections_is_read_whole() -> None:
    assert len(REJECTED) == 105


LAUNCHED = {
    "ACCELERATE_USE_DEEPSPEED=true": "DeepSpeed is not supported: shard with FSDP2 (accelerate_co",
    "ACCELERATE_USE_FSDP=true": "FSDP1 is not supported: set fsdp_version: 2, as in accelerate_",
    "ACCELERATE_USE_FSDP=true FSDP_VERSION=1": "FSDP1 is not supported: set fsdp_version: 2, as",
}


@pytest.mark.parametrize("environment", LAUNCHED)
def test_launchers_way_to_shard_is_rejected(
    environment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for setting in environment.split():
        monkeypatch.setenv(*setting.split("="))
    assert error_of(*TEACHER).startswith(LAUNCHED[environment])


def test_fsdp1_is_rejected_on_the_command_line() -> None:
    sharded = ("--fsdp", "true", "--fsdp_config")
    assert error_of(*TEACHER, *sharded, '{"version": 1}').startswith("FSDP1 is not supported: set")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), "no"),
        (("--include_num_input_tokens_seen",), "all"),
        (("--include_num_input_tokens_seen", "true"), "all"),
        (("--include_num_input_tokens_seen", "False"), "no"),
        (("--include_num_input_tokens_seen", "all"), "all"),
        (("--include_num_input_tokens_seen", "non_padding"), "non_padding"),
    ],
)
def test_parse_counts_tokens_as_asked(options: tuple[str, ...], expected: str) -> None:
    assert parse((*TEACHER, *options)).run.include_num_input_tokens_seen == expected


OPTIONS = {option.name for option in fields(RunArguments)}


@pytest.mark.skipif("train_sampling_strategy" not in OPTIONS, reason="not in this transformers")
@pytest.mark.parametrize("strategy", ["group_by_length", "batch_rebalance", "sequential"])
def test_parse_refuses_an_order_that_is_not_random(strategy: str) -> None:
    assert error_of(*TEACHER, "--train_sampling_strategy", strategy) == (
        f"--train_sampling_strategy {strategy} is not supported (blocks are equally long, and "
        "packing has put similar ones side by side): leave it out"
    )


def test_parse_refuses_a_sampler_that_does_not_resume() -> None:
    options = ("--accelerator_config", '{"use_seedable_sampler": false}')
    assert "makes resuming inexact" in error_of(*TEACHER, *options)
    assert "would train on the same blocks again" in error_of(*TEACHER, "--ignore_data_skip")
    assert error_of(*TEACHER, "--save_only_model") == (
        "--save_only_model True leaves nothing to resume from: leave it out"
    )


@pytest.mark.skipif(is_bitsandbytes_available(), reason="bitsandbytes is here")
def test_parse_refuses_an_optimizer() -> None:
    assert error_of(*TEACHER, "--optim", "adamw_bnb_8bit").startswith(
        "--optim adamw_bnb_8bit cannot be used: You need to install `bitsandbytes`"
    )


@pytest.mark.parametrize(
    "argv",
    [
        *(("--optim", name) for name in ("adamw_torch", "adafactor", "sgd")),
        ("--torch_empty_cache_steps", "5"),
        *(
            ("--lr_scheduler_type", name)
            for name in ("linear", "cosine", "constant", "constant_with_warmup", "inverse_sqrt")
        ),
        (
            "--lr_scheduler_type",
            "cosine_with_restarts",
            "--lr_scheduler_kwargs",
            '{"num_cycles":3}',
        ),
        (
            *("--lr_scheduler_type", "warmup_stable_decay", "--warmup_steps", "0.1"),
            *("--lr_scheduler_kwargs", '{"num_decay_steps": 9}'),
        ),
        ("--lr_scheduler_type", "reduce_lr_on_plateau", "--eval_fraction", "0.1"),
    ],
)
def test_parse_accepts_optimizers_and_schedules(
    argv: tuple[str, ...],
) -> None:
    assert parse((*TEACHER, *argv))


OF_ANY = ("top_k", "top_k_warmup_steps", "unselected_weight", "selection_scope", "loss_divisor")
SELECTION = (*OF_ANY, "unmapped")
LOOKED_AT = {
    "vocagnolm": (*SELECTION, "aggregation", "guidance_table_steps"),
    "cpt": (),
    "random": OF_ANY,
    "kld": ("kld_direction",),
    "uld": ("uld_weight", "uld_pairing"),
    "rho1": (*SELECTION, "rho1_score", "guidance_table_steps"),
    "chunk": (
        *(*SELECTION, "aggregation", "chunks", "chunk_guidance", "chunk_selection"),
        "guidance_table_steps",
    ),
}
OTHER_VALUES = {
    "top_k": "0.5",
    "aggregation": "mean",
    "unmapped": "exclude",
    "unselected_weight": "0.3",
    "top_k_warmup_steps": "0.1",
    "selection_scope": "batch",
    "loss_divisor": "selected",
    "kld_direction": "forward",
    "uld_weight": "1.5",
    "uld_pairing": "last",
    "rho1_score": "loss_and_entropy",
    "chunks": "8",
    "chunk_guidance": "random",
    "chunk_selection": "tokens",
    "guidance_table_steps": "100",
}
OF_THE_TEACHER = ("teacher", "teacher_tokenizer", "teacher_revision")
UNGUIDED = {
    "cpt": (),
    "random": (),
    "chunk": ("--chunk_guidance", "random"),
}


@pytest.mark.parametrize("method", LOOKED_AT)
@pytest.mark.parametrize("name", OTHER_VALUES)
def test_parse_refuses_an_option(method: str, name: str) -> None:
    value = OTHER_VALUES[name]
    teacher = () if method in ("cpt", "random") or value == "random" else TEACHER
    argv = (*CPU, *teacher, "--method", method, f"--{name}", value)
    if name in LOOKED_AT[method]:
        assert str(getattr(parse(argv).method, name)) == value
    else:
        expected = f"--{name} has no effect with --method {method}: leave it out"
        assert error_of(*argv) == expected
    assert (
        set(parse((*CPU, *teacher, "--method", method)).method.in_effect())
        == {*("method", *LOOKED_AT[method])}
        if value != "random"
        else True
    )


@pytest.mark.parametrize(
    "name", ["aggregation", "unmapped", "chunk_selection", "guidance_table_steps"]
)
def test_parse_refuses_an_option_of_the_teacher(name: str) -> None:
    argv = (*CPU, "--method", "chunk", "--chunk_guidance", "random", f"--{name}")
    expected = f"--{name} has no effect with --method chunk --chunk_guidance random: leave it out"
    assert error_of(*argv, OTHER_VALUES[name]) == expected


@pytest.mark.parametrize("method", UNGUIDED)
@pytest.mark.parametrize("name", OF_THE_TEACHER)
def test_parse_refuses_a_teacher(method: str, name: str) -> None:
    options = ("--method", method, *UNGUIDED[method])
    message = f"--{name} has no effect with {' '.join(options)}: leave it out"
    assert error_of(*CPU, *options, f"--{name}", "x") == message


@pytest.mark.parametrize("method", ["kld", "uld", "rho1"])
def test_parse_refuses_a_store_when_distributions_are_compared(method: str) -> None:
    argv = [*CPU, "--method", method, "--teacher_losses", "store"]
    argv += ["--rho1_score", "loss_and_entropy"] if method == "rho1" else []
    expected = f"--method {method} compares distributions over words, which a store of losses does"
    assert error_of(*argv).startswith(expected)
    several = (*CPU, "--method", method, *argv[6:], "--teacher", "a", "b")
    assert error_of(*several).startswith(f"--method {method} takes one teacher, got 2")


def test_parse_takes_several_teachers_when_they_are_given() -> None:
    options = ("--teacher_reduction", "weighted", "--teacher_weights", "1", "2")
    job = parse((*CPU, "--teacher", "a", "b", "--teacher_revision", "x", "y", *options))
    model, method = job.model, job.method
    assert (model.teacher, model.teacher_revision) == (["a", "b"], ["x", "y"])
    assert method.teacher_weights == [1.0, 2.0]
    for name in ("teacher_revision", "teacher_tokenizer"):
        expected = f"--{name} needs one value for each of 2 teachers, got 1"
        assert error_of(*CPU, "--teacher", "a", "b", f"--{name}", "x") == expected
    expected = "--save_store takes one teacher, got 2: name one with --teacher"
    assert error_of(*CPU, "--teacher", "a", "b", "--save_store", "s") == expected
    for method in ("kld", "uld"):
        found = error_of(*TEACHER, "--method", method, "--save_store", "s")
        assert found.startswith(f"--save_store keeps token losses, which --method {method} does")


def test_parse_refuses_to_spread_a_teacher() -> None:
    sharded = (*TEACHER, "--teacher_sharding", "node")
    expected = "--teacher_sharding node has no effect with one process on a machine: leave it out"
    assert error_of(*sharded) == expected
    parse((*sharded, "--dry_run"))  # of a job with more


def test_parse_refuses_to_overlap_without_a_gpu() -> None:
    assert error_of(*TEACHER, "--overlap_teacher") == (
        "--overlap_teacher needs a GPU, found cpu: leave it out"
    )
    parse((*TEACHER, "--overlap_teacher", "--dry_run"))  # of a job with one
    for method in ("kld", "uld", "cpt"):
        teacher = TEACHER if method != "cpt" else CPU
        found = error_of(*teacher, "--method", method, "--overlap_teacher", "--dry_run")
        assert found == f"--overlap_teacher has no effect with --method {method}: leave it out"
    stored = error_of(*CPU, "--teacher_losses", "store", "--overlap_teacher", "--dry_run")
    assert stored.startswith("--overlap_teacher has no effect with --teacher_losses, which no")
    found = error_of(*TEACHER, "--overlap_teacher", "--teacher_sharding", "node", "--dry_run")
    assert found.startswith("--overlap_teacher does not go with --teacher_sharding node")


@pytest.mark.parametrize("attention", ["torch_varlen", "flash_attention_2", "sdpa", None])
def test_parse_refuses_32_bits_on_a_gpu(
    attention: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = (*TEACHER, *(("--attn_implementation", attention) if attention else ()))
    wide = ("--teacher_dtype", "float32")
    parse((*given, *wide))  # on a CPU
    own = RunArguments.device
    where = property(lambda run: torch.device("cuda") if own.fget(run) else None)
    monkeypatch.setattr(RunArguments, "device", where)
    parse((*given, "--bf16", "true"))
    for precision in ("bf16", "fp16"):
        with monkeypatch.context() as launched:
            launched.setenv("ACCELERATE_MIXED_PRECISION", precision)
            parse(given)  # float32 weights under autocast
    if attention in ("sdpa", None):
        parse((*given, *wide))
        return
    start, end = f"--attn_implementation {attention} computes in 16 bits on a GPU, but ", "sdpa"
    found = error_of(*given)
    assert found.startswith(f"{start}the student computes in float32: use --bf16 true, or ")
    assert found.endswith(end)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    found = error_of(*given, *wide)
    assert found.startswith(f"{start}--teacher_dtype is float32: use --teacher_dtype auto, or ")


# What follows from what is given


@pytest.mark.parametrize(
    ("argv", "output_dir"),
    [
        (("--teacher", "a/b", "--student", "c/d"), "runs/d__b"),
        (("--teacher", "a/b/", "--student", "./c/d/"), "runs/d__b"),
        (("--method", "cpt", "--student", "c/d"), "runs/d__cpt"),
        (("--method", "random", "--student", "c/d"), "runs/d__random"),
        (("--method", "cpt", "--output_dir", "here"), "here"),
        (("--method", "cpt", "--student", "d", "--output_dir", ""), "runs/d__cpt"),
    ],
)
def test_parse_names_the_output_after_the_models(argv: tuple[str, ...], output_dir: str) -> None:
    assert parse((*argv, *CPU)).run.output_dir == output_dir


def test_parse_evaluates_when_there_is_evaluation_data() -> None:
    assert parse(TEACHER).run.eval_strategy == IntervalStrategy.NO
    run = parse((*TEACHER, "--eval_fraction", "0.1", "--save_steps", "70")).run
    assert (run.eval_strategy, run.eval_steps) == (IntervalStrategy.STEPS, 70)
    run = parse((*TEACHER, "--eval_dataset", "d", "--eval_steps", "9")).run
    assert (run.eval_strategy, run.eval_steps) == (IntervalStrategy.STEPS, 9)
    run = parse((*TEACHER, "--eval_dataset", "d", "--eval_strategy", "epoch")).run
    assert run.eval_strategy == IntervalStrategy.EPOCH


def test_parse_does_not_evaluate_when_told_not_to() -> None:
    run = parse((*TEACHER, "--eval_fraction", "0.1", "--eval_strategy", "no")).run
    assert run.eval_strategy == IntervalStrategy.NO


@pytest.mark.parametrize("documents", [("--eval_fraction", "0.1"), ("--eval_dataset", "d")])
def test_parse_loads_the_best_model(
    documents: tuple[str, ...],
) -> None:
    run = parse(
        (*TEACHER, *documents, "--load_best_model_at_end", "True", "--save_steps", "70")
    ).run
    assert run.load_best_model_at_end is True
    assert (run.eval_strategy, run.eval_steps) == (IntervalStrategy.STEPS, 70)
    assert run.metric_for_best_model == "loss"
    run = parse((*TEACHER, *documents, "--save_strategy", "best")).run
    assert (run.metric_for_best_model, run.greater_is_better) == ("loss", False)


def test_parse_refuses_the_best_model() -> None:
    assert error_of(*TEACHER, "--load_best_model_at_end", "True").startswith(
        "--load_best_model_at_end requires the save and eval strategy to match"
    )


# Stores of teacher losses instead of a teacher


def test_parse_takes_stores(tmp_path: Path) -> None:
    argv = (*CPU, *STORES, "--teacher_reduction", "weighted", "--teacher_weights", "1", "2.5")
    job = parse(argv)
    model, method = job.model, job.method
    assert (model.teacher, model.teacher_losses) == (None, ["S1", "S2"])
    assert (method.teacher_reduction, method.teacher_weights) == ("weighted", [1.0, 2.5])
    content = "teacher_losses: [S1, S2]\nteacher_reduction: weighted\nteacher_weights: [1, 2.5]\n"
    again = parse((*CPU, *recipe(tmp_path, content)))
    assert (again.model, again.method) == (model, method)
    assert parse((*CPU, *recipe(tmp_path, "teacher_losses: S1"))).model.teacher_losses == ["S1"]


@pytest.mark.parametrize(
    ("stores", "output_dir"), [(("a/S1/",), "runs/d__S1"), (("a/S1", "b/S2"), "runs/d__S1__S2")]
)
def test_parse_names_the_output_after_the_stores(stores: tuple[str, ...], output_dir: str) -> None:
    argv = (*CPU, "--student", "c/d", "--teacher_losses", *stores)
    assert parse(argv).run.output_dir == output_dir
