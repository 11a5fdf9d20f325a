"""What a command refuses, in one line and before anything is trained: arguments, and a word."""

from __future__ import annotations

import json
import re
import shutil
from importlib import import_module
from pathlib import Path

import pytest
from world import World

from vocagnolm import __main__, cli
from vocagnolm.run.launch import launch
from vocagnolm.run.parser import parse
from vocagnolm.training.job import options_without_effect

# Intervals, types and choices of all options are in tests/training/test_config.py.
REFUSED: list[tuple[str, str, str]] = [
    # Names and values.
    ("--teachr t", "teachr", "--teacher"),
    ("--teacher t --method vocagnlm", "method", "vocagnlm"),
    ("stray --teacher t", "stray", "unrecognized"),
    ("--config paper/table1/cp", "config", "paper/table1/cpt"),
    ("--teacher t --eval_dataset=", "eval_dataset", "empty"),
    ("--teacher t --fp16 --bf16", "bf16", "combined"),
    ("--teacher t --max_grad_norm nan", "max_grad_norm", "[0, inf]"),
    # Teachers.
    ("", "method", "needs a teacher"),
    ("--teacher_losses s --method kld", "method", "distributions"),
    ("--teacher t --teacher_losses s", "teacher", "combined"),
    ("--teacher t u --method uld", "method", "one teacher"),
    ("--teacher t u --teacher_reduction weighted", "teacher_reduction", "2 --teacher_weights"),
    ("--teacher t u --teacher_reduction first", "teacher_reduction", "stores"),
    ("--teacher t u --teacher_tokenizer a", "teacher_tokenizer", "each of 2"),
    # Corpora.
    ("--teacher t --dataset tests ./tests", "dataset", "twice"),
    ("--teacher t --dataset a b --dataset_weights 1", "dataset_weights", "several"),
    ("--teacher t --dataset a b --text_column x y z", "text_column", "one"),
    ("--teacher t --eval_dataset e --eval_fraction .1", "eval_dataset", "combined"),
    # Schedules, which are made when training begins.
    ("--teacher t --max_steps 0", "max_steps", "no update"),
    ("--teacher t --lr_scheduler_kwargs {", "lr_scheduler_kwargs", "JSON"),
    # What YAML 1.1 makes of a number without a point.
    ('--teacher t --lr_scheduler_kwargs {"min_lr":"1e-5"}', "lr_scheduler_kwargs", "TypeError"),
    ("--teacher t --global_batch_tokens 3000", "global_batch_tokens", "2,048"),
    # Arguments of transformers that would change numbers, or lose data.
    ("--teacher t --ignore_data_skip", "ignore_data_skip", "again"),
    ("--teacher t --bf16_full_eval", "bf16_full_eval", "casts"),
    ("--teacher t --label_smoothing_factor 0.1", "label_smoothing_factor", "nothing"),
    ('--teacher t --fsdp full_shard --fsdp_config {"version":1} --dry_run', "FSDP1", "supported"),
    ("--teacher t --fsdp full_shard", "fsdp", "several processes"),
    ('--teacher t --accelerator_config {"split_batches":true}', "accelerator_config", "split"),
    ("--teacher t --save_strategy best", "save_strategy", "evaluation"),
    ("--teacher t --metric_for_best_model accuracy", "metric_for_best_model", "loss"),
    ("--teacher t --greater_is_better true", "greater_is_better", "worst"),
    ("--teacher t --push_to_hub --hub_strategy every_save", "hub_strategy", "every_save"),
]


@pytest.mark.parametrize(("line", "option", "word"), REFUSED, ids=[row[0] for row in REFUSED])
def test_option_is_refused(line: str, option: str, word: str) -> None:
    with pytest.raises(ValueError, match=rf"(^|--|\b){option}\b") as caught:
        parse([*line.split(" "), "--use_cpu"] if line else ["--use_cpu"])
    assert word in str(caught.value)


@pytest.mark.parametrize(
    "name", "save_safetensors logging_dir chat_template_path eos_token jit_mode_eval".split()
)
def test_no_other_option_is_proposed_for_a_word_that_is_unlike_it(name: str) -> None:
    with pytest.raises(ValueError, match=f"unknown option --{name}$"):
        parse(["--teacher", "t", f"--{name}", "x"])


def test_method_without_a_teacher_leaves_it_out(capsys: pytest.CaptureFixture[str]) -> None:
    job = parse("--teacher t --method cpt --dataloader_drop_last --use_cpu".split())
    assert job.model.teacher is None
    assert "warning: --teacher " in capsys.readouterr().err
    # It would leave texts out of an evaluation.
    assert not job.args.dataloader_drop_last


def test_empty_value_stands_for_a_directory_or_a_file_among_several() -> None:
    argv = ["--teacher", "t", "a/b", "--teacher_revision", "", "main", "--hub_token="]
    argv += ["--dataset", "d.jsonl", "c/d", "--dataset_config", "", "en", "--use_cpu"]
    job = parse(argv)
    assert job.args.teacher_revision == ["", "main"]
    assert job.data.dataset_config == ["", "en"]


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("train dp", "ddp"),
        ("train ddp --num_processes two", "'two'"),
        ("train ddp --teachr t", "--teacher"),
        ("score ddp --teachr t", "--teacher"),
        ("evaluate ddp --modle m", "--model"),
    ],
)
def test_launch_is_refused(line: str, word: str) -> None:
    command, *words = line.split()
    check = import_module(__main__.COMMANDS[command][0]).check
    with pytest.raises(ValueError, match=word):
        launch(command, ["--accelerate_config", *words], check)


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("PARALLELISM_CONFIG_CP_SIZE", "2", "parallelism_config_cp_size"),
        # `accelerate launch` takes version 1 by default.
        ("ACCELERATE_USE_FSDP", "true", "FSDP1"),
    ],
)
def test_environment_of_a_launcher_is_refused(
    name: str, value: str, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=word):
        parse(["--teacher", "t", "--use_cpu"])


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("teachr: t", "--teacher"),
        ("method: kdl", "kdl"),
        ("base: recipe.yaml", "its own base"),
        ("base: none.yaml", "none.yaml"),
        ("config: other.yaml", "unknown option"),
        ("- teacher", "mapping"),
        ("teacher: [", "cannot be read"),
        ("top_k: 0.2\nteacher: t\ntop_k: 0.4", "top_k comes twice"),
        ("model_init_kwargs: {a: 1, a: 2}", "a comes twice"),
        ("max_length: [1, 2]", "max_length"),
    ],
)
def test_recipe_is_refused(text: str, word: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=word):
        parse(["--config", str(path), "--teacher", "t"])


@pytest.mark.parametrize(
    ("line", "option", "why"),
    [
        ("--method cpt --chunks 8", "chunks", "with --method cpt"),
        ("--method cpt --eval_steps 9", "eval_steps", "without --eval_fraction or --eval_dataset"),
        ("--method cpt --lora_r 4", "lora_r", "without --use_peft"),
        ("--method cpt --teacher_dtype float16", "teacher_dtype", "without --teacher"),
        ("--teacher t --selection accept --top_k .7", "top_k", "with .* --selection accept"),
        ("--teacher t --eval_fraction .1 --eval_steps 9", "", ""),
    ],
)
def test_option_without_effect_is_warned_of(line: str, option: str, why: str) -> None:
    job = parse([*line.split(), "--use_cpu"])
    lines = list(options_without_effect(job, evaluates=bool(job.data.eval_fraction)))
    assert len(lines) == bool(option)
    assert all(re.search(f"--{option} has no effect {why}", text) for text in lines)


@pytest.mark.parametrize(
    "command",
    [
        "train --method cpt",
        "score --teacher T",
        "rank --student S --teacher T",
        "audit --student S --teacher T",
        "inspect --student S --teacher T --document 0",
    ],
)
def test_results_go_outside_the_documents(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    paths = ["--dataset", str(tmp_path), "--output_dir", str(tmp_path / "new")]
    assert __main__.main([*command.split(), *paths]) == cli.Exit.WRONG
    assert f"--output_dir {tmp_path}/new is inside {tmp_path}" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"student": "/no/model"}, "--student /no/model: no such file"),
        ({"teacher": "no-model"}, "--teacher no-model cannot be loaded"),
        ({"output_dir": "/proc/x/y"}, "--output_dir /proc/x/y: /proc cannot be written"),
        ({"max_length": "4096", "global_batch_tokens": "4096"}, "--max_length 4096 "),
        ({"eval_dataset": "no.jsonl"}, "--eval_dataset no.jsonl: no such file"),
        ({"resume_from_checkpoint": "/no"}, "--resume_from_checkpoint /no: no such directory"),
        ({"global_batch_tokens": "640000"}, "with --global_batch_tokens "),
    ],
)
def test_wrong_run_leaves_no_trace(
    options: dict[str, str],
    message: str,
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if "global_batch_tokens" not in options or "max_length" in options:
        # The error comes before any corpus is aligned.
        monkeypatch.setattr("vocagnolm.training.packed.align_corpus", None)
    given = {"output_dir": str(tmp_path / "out"), "eval_fraction": None, "use_cpu": "true"}
    assert __main__.main(["train", *world.argv("", **given | options)]) == cli.Exit.WRONG
    err = capfd.readouterr().err
    assert err.startswith("vocagnolm train: error: ")
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_rows_fit_the_context_of_a_teacher_of_the_same_tokens(
    world: World, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    teacher = shutil.copytree(world.student, tmp_path / "teacher")
    config = json.loads((teacher / "config.json").read_text())
    (teacher / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32}))
    argv = world.argv("", method="kld", teacher=str(teacher), output_dir=str(tmp_path / "out"))
    assert __main__.main(["train", *argv, "--use_cpu"]) == cli.Exit.WRONG
    assert "--max_length 64 " in capfd.readouterr().err


@pytest.mark.parametrize(
    "command", ["inspect --nosuch", "audit", "export", "score --verify none", "prepare", "trian"]
)
def test_command_ends_in_one_line(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert __main__.main(command.split()) == cli.Exit.WRONG
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "error:" in err


@pytest.mark.parametrize(
    "command",
    [
        "train --method=cpt --student=S --dataset=D --output_dir=O",
        "evaluate --model=M --benchmarks=demo --output_dir=O",
    ],
)
def test_command_rejects_to_be_one_of_several(
    command: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    # As on a machine with a GPU, where processes without LOCAL_RANK are not connected.
    monkeypatch.setattr("accelerate.state.get_int_from_env", lambda names, default: default)
    assert __main__.main(command.split()) == 2
    assert "torchrun" in capfd.readouterr().err
