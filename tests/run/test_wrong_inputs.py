"""Wrong inputs end in one line that names the option at fault, before anything is trained."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from world import World

from vocagnolm import __main__, cli
from vocagnolm.run.launch import launch, split
from vocagnolm.run.parser import parse
from vocagnolm.training.settings import options_without_effect

T = ("--teacher", "t")
TWO = ("--teacher", "t", "u")
WRONG: list[tuple[tuple[str, ...], str]] = [
    # Names, choices and types.
    (("--teachr", "t"), "unknown option --teachr (did you mean --teacher?)"),
    ((*T, "--method", "vocagnlm"), "invalid choice: 'vocagnlm'"),
    (("stray", *T), "unrecognized arguments: stray"),
    (("--config", "paper/table1/cp"), "(did you mean paper/table1/cpt?)"),
    (("--config", "", *T), "--config is empty: give a value, or leave it out"),
    ((*T, "--eval_dataset="), "--eval_dataset is empty"),
    ((*T, "--dataset", "tests", "./tests"), "--dataset names a corpus twice"),
    ((*T, "--dataloader_drop_last"), "--dataloader_drop_last True leaves texts out"),
    ((*T, "--dataset", "a.jsonl", ""), "--dataset is empty"),
    # Ranges.
    ((*T, "--top_k", "1.4"), "--top_k must be in (0, 1], got 1.4"),
    ((*T, "--max_length", "1"), "--max_length must be in [4, 16777216], got 1"),
    ((*T, "--eval_fraction", "1"), "--eval_fraction must be in [0, 1), got 1.0"),
    ((*T, "--use_peft", "--lora_r", "0"), "--lora_r must be in [1, inf), got 0"),
    ((*T, "--max_steps", "0"), "--max_steps 0 makes no update"),
    ((*T, "--max_steps", "-2"), "--max_steps must be in [-1, inf), got -2"),
    ((*T, "--warmup_steps", "nan"), "--warmup_steps must be in [0, inf), got nan"),
    ((*T, "--max_grad_norm", "nan"), "--max_grad_norm must be in [0, inf], got nan"),
    ((*T, "--max_grad_norm", "-1"), "--max_grad_norm must be in [0, inf], got -1.0"),
    ((*T, "--weight_decay", "inf"), "--weight_decay must be in [0, inf), got inf"),
    ((*T, "--adam_beta1", "2"), "--adam_beta1 must be in [0, 1), got 2.0"),
    ((*T, "--neftune_noise_alpha", "nan"), "--neftune_noise_alpha must be in [0, inf), got nan"),
    ((*T, "--fp16", "--bf16"), "--fp16 and --bf16 cannot be combined"),
    # Teachers.
    ((), "--method vocagnolm needs a teacher: give --teacher or"),
    ((*T, "--method", "cpt"), "--method cpt does not use a teacher"),
    ((*T, "--method", "chunk", "--chunks", "9999"), "--chunks 9999 exceeds --max_length 2048"),
    (("--teacher_losses", "s", "--method", "kld"), "--method kld compares distributions"),
    ((*T, "--teacher_losses", "s"), "--teacher and --teacher_losses cannot be combined"),
    ((*TWO, "--method", "uld"), "--method uld takes one teacher, got 2"),
    ((*TWO, "--teacher_reduction", "weighted"), "takes 2 --teacher_weights, found 0"),
    ((*TWO, "--teacher_reduction", "first"), "--teacher_reduction first needs stores"),
    (
        ("--teacher_losses", "s", "--missing_losses", "plain", "--unmapped", "exclude"),
        "--missing_losses plain trains on every token",
    ),
    ((*TWO, "--teacher_tokenizer", "a"), "--teacher_tokenizer needs one value for each of 2"),
    # Corpora.
    ((*T, "--dataset", "a", "a"), "--dataset names a corpus twice"),
    ((*T, "--dataset", "a", "b", "--dataset_weights", "1"), "--dataset_weights needs several"),
    ((*T, "--dataset", "a", "b", "--text_column", *"xyz"), "--text_column needs one value, or one"),
    ((*T, "--eval_dataset", "e", "--eval_fraction", ".1"), "cannot be combined"),
    # Schedules, which are made when training begins.
    ((*T, "--lr_scheduler_kwargs", "{"), "--lr_scheduler_kwargs { is not JSON"),
    ((*T, "--lr_scheduler_kwargs", "5"), "--lr_scheduler_kwargs '5': TypeError"),
    (
        (*T, "--lr_scheduler_type", "linear", "--lr_scheduler_kwargs", '{"min_lr_rate": 0.1}'),
        "--lr_scheduler_type linear does not work with --lr_scheduler_kwargs {'min_lr_rate': 0.1}",
    ),
    # What YAML 1.1 makes of a number without a point.
    ((*T, "--lr_scheduler_kwargs", '{"min_lr": "1e-5"}'), "{'min_lr': '1e-5'}: TypeError"),
    (
        (*T, "--lr_scheduler_type", "polynomial", "--lr_scheduler_kwargs", '{"lr_end": -1}'),
        "the learning rate would become negative",
    ),
    # Arguments of transformers that would change numbers, or lose data.
    ((*T, "--ignore_data_skip"), "--ignore_data_skip True trains on the same data again"),
    ((*T, "--bf16_full_eval"), "--bf16_full_eval True casts the student"),
    (
        (*T, "--use_liger_kernel", "--liger_kernel_config", '{"cross_entropy": true}'),
        "--use_liger_kernel would replace the loss",
    ),
    ((*T, "--fsdp", "full_shard", "--fsdp_config", '{"version": 1}'), "FSDP1 is not supported"),
    ((*T, "--accelerator_config", '{"split_batches": true}'), "--accelerator_config split"),
    ((*T, "--save_strategy", "best"), "--save_strategy best needs an evaluation"),
    ((*T, "--push_to_hub", "--hub_strategy", "every_save"), "--hub_strategy every_save"),
    ((*T, "--global_batch_tokens", "3000"), "2,048 tokens, not --global_batch_tokens 3,000"),
]


@pytest.mark.parametrize(("argv", "message"), WRONG, ids=[" ".join(argv) for argv, _ in WRONG])
def test_wrong_option_is_named(argv: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        parse([*argv, "--use_cpu"])
    assert message in str(caught.value)


def test_empty_value_stands_for_a_directory_or_a_file_among_several() -> None:
    argv = ["--teacher", "t", "a/b", "--teacher_revision", "", "main", "--hub_token="]
    argv += ["--dataset", "d.jsonl", "c/d", "--dataset_config", "", "en", "--use_cpu"]
    job = parse(argv)
    assert job.args.teacher_revision == ["", "main"]
    assert job.data.dataset_config == ["", "en"]


def test_wrong_launch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "2")
    with pytest.raises(ValueError, match="parallelism_config_cp_size is not supported"):
        parse([*T, "--use_cpu"])
    monkeypatch.undo()
    # `accelerate launch` takes this version by default.
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="FSDP1 is not supported"):
        parse([*T, "--use_cpu"])


def test_config_that_starts_one_process_on_a_cpu_is_named(tmp_path: Path) -> None:
    config = tmp_path / "cpus.yaml"
    config.write_text("distributed_type: MULTI_CPU\nnum_processes: 2\n")
    with pytest.raises(ValueError, match="distributed_type MULTI_CPU, which starts one: use ddp"):
        split([f"--accelerate_config={config}"])
    config.write_text("distributed_type: MULTI_CPU\nnum_processes: 2\nmpirun_config: {a: b}\n")
    assert split([f"--accelerate_config={config}"])[1] == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("train dp", "dp: no such file, here or in the package (did you mean ddp?): cpu, ddp"),
        ("train cpu --num_processes 2", "distributed_type NO, which starts one"),
        ("train ddp --num_processes two", "argument --num_processes: invalid int value: 'two'"),
        ("train ddp --teachr t", "unknown option --teachr (did you mean --teacher?)"),
        ("score ddp --teachr t", "unrecognized arguments: --teachr t (did you mean --teacher?)"),
        ("evaluate ddp --modle m", "unrecognized arguments: --modle m (did you mean --model?)"),
    ],
)
def test_wrong_accelerate_config_is_named(argv: str, message: str) -> None:
    command, *words = argv.split()
    check = import_module(__main__.COMMANDS[command][0]).check
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        launch(command, ["--accelerate_config", *words], check)
    assert message in str(caught.value)


def test_negative_integer_is_named_and_other_types_may_be_negative() -> None:
    parser = cli.Parser("command", None)
    parser.add_argument("--count", type=int, default=3)
    parser.add_argument("--weight", type=float)
    parser.add_argument("--label")
    parser.add_argument("--flag", action="store_true")
    with pytest.raises(ValueError, match=r"^--count must not be negative, got -1$"):
        parser.parse_args(["--count", "-1"])
    arguments = parser.parse_args(["--count", "0", "--weight", "-1.5", "--label=-1", "--flag"])
    assert vars(arguments) == {"count": 0, "weight": -1.5, "label": "-1", "flag": True}
    assert parser.parse_args([]).count == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("teachr: t", "recipe.yaml: unknown option --teachr (did you mean --teacher?)"),
        ("method: kdl", "argument --method: invalid choice: 'kdl'"),
        ("base: recipe.yaml", "recipe.yaml is its own base"),
        ("config: other.yaml", "has an option config: call it base"),
        ("- teacher", "must be a mapping of options to values"),
        ("teacher: [", "recipe.yaml cannot be read"),
        ("base: none.yaml", "none.yaml cannot be read"),
        ("base: [a.yaml, b.yaml]", "base must be the name of one file, got ['a.yaml', 'b.yaml']"),
        ("dataset: [a.jsonl, null]", "recipe.yaml: --dataset has an empty item"),
        ("max_length: [1, 2]", "max_length"),
    ],
)
def test_wrong_recipe_is_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        parse(["--config", str(path), *T])
    assert message in str(caught.value)


def test_recipe_builds_on_its_base_and_flags_override_it(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(
        "teacher: [t]\ntop_k: 0.5\nchunks: 8\nlr_scheduler_kwargs: {min_lr: 1.0e-6}\n"
    )
    path = tmp_path / "mine.yaml"
    path.write_text("base: base.yaml\ntop_k: 0.6\nchunks: null\nuse_peft: true\n")
    job = parse(["--config", str(path), "--lora_r", "4", "--use_cpu"])
    assert (job.args.top_k, job.args.chunks) == (0.6, 32)
    assert (job.model.teacher, job.model.use_peft, job.model.lora_r) == (["t"], True, 4)
    assert job.args.lr_scheduler_kwargs == {"min_lr": 1e-6}
    assert job.recipe == str(path)
    assert parse(["--config", str(path), "--top_k=0.7", "--use_cpu"]).args.top_k == 0.7


def test_options_without_effect_are_warned_of() -> None:
    unread = ("--method", "cpt", "--chunks", "8", "--lora_r", "4", "--teacher_dtype", "float16")
    job = parse([*unread, "--use_cpu", "--eval_steps", "9"])
    assert [*options_without_effect(job, evaluates=False)] == [
        "--chunks has no effect with --method cpt",
        "--eval_steps has no effect without --eval_fraction or --eval_dataset",
        "--lora_r has no effect without --use_peft",
        "--teacher_dtype has no effect without --teacher",
    ]
    job = parse([*T, "--selection", "accept", "--top_k", ".7", "--aggregation=sum", "--use_cpu"])
    assert [*options_without_effect(job, evaluates=False)] == [
        f"--{name} has no effect with --method vocagnolm --selection accept"
        for name in ("aggregation", "top_k")
    ]


# The commands that write a directory, with options that they need.
WRITING = {
    "train": "--method cpt",
    "score": "--teacher T",
    "rank": "--student S --teacher T",
    "audit": "--student S --teacher T",
    "inspect": "--student S --teacher T --document 0",
}


@pytest.mark.parametrize("command", WRITING)
def test_results_go_outside_the_documents(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    argv = [command, *WRITING[command].split(), "--dataset", str(tmp_path)]
    argv += ["--output_dir", str(tmp_path / "new")]
    assert __main__.main(argv) == cli.Exit.WRONG
    assert f"--output_dir {tmp_path}/new is inside --dataset {tmp_path}" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_ranking_keeps_its_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "kept.jsonl"
    kept.write_text('{"text": "a"}\n')
    argv = ["rank", *WRITING["rank"].split(), "--dataset", str(kept), "--output_dir", str(tmp_path)]
    assert __main__.main(argv) == cli.Exit.WRONG
    assert f"--dataset {kept} would be replaced" in capsys.readouterr().err


WRONG_RUNS: list[tuple[dict[str, str], str]] = [
    ({"student": "/no/model"}, "--student /no/model: no such directory"),
    ({"teacher": "no-model"}, "--teacher no-model cannot be loaded"),
    ({"output_dir": "/proc/x/y"}, "--output_dir /proc/x/y: /proc cannot be written"),
    ({"max_length": "4096", "global_batch_tokens": "4096"}, "exceeds the student's context"),
    ({"eval_dataset": "no.jsonl"}, "--eval_dataset no.jsonl: no such file"),
    ({"resume_from_checkpoint": "/no"}, "--resume_from_checkpoint /no: no such directory"),
    ({"global_batch_tokens": "640000"}, "lower one of these"),
]


@pytest.mark.parametrize(("options", "message"), WRONG_RUNS, ids=[str(x) for x, _ in WRONG_RUNS])
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
    assert "--max_length 64 exceeds the teacher's context of 32" in capfd.readouterr().err


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
    assert not out
    assert err.count("\n") == 1
    assert "error:" in err


@pytest.mark.processes
def test_quick_answers_need_no_torch() -> None:
    code = (
        "import sys; from vocagnolm.run.parser import parse\n"
        "for argv in ('', '--teachr t', '--method vocagnlm', '--method a:B', '--top_k 3',\n"
        "             '--config none.yaml', '--help'):\n"
        "    try: parse(argv.split())\n"
        "    except (ValueError, SystemExit): assert 'torch' not in sys.modules, argv\n"
        "    else: raise AssertionError(argv)"
    )
    subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=True)


@pytest.mark.processes
def test_checkout_that_is_not_installed_starts(tmp_path: Path) -> None:
    absent = (
        "import importlib.metadata as metadata, runpy, sys\n"
        "def version(name):\n"
        "    if name == 'vocagnolm': raise metadata.PackageNotFoundError(name)\n"
        "    return own(name)\n"
        "own, metadata.version = metadata.version, version\n"
    )
    root = Path(__file__).resolve().parents[2]
    module = "sys.argv = ['vocagnolm', {0}]; runpy.run_module('vocagnolm', run_name='__main__')"
    script = "sys.argv = ['train.py', {0}]; runpy.run_path('train.py', run_name='__main__')"
    for start, word, said in (
        (module, "--version", "vocagnolm (not installed)"),
        (module, "recipes", "demo"),
        (script, "--help", "usage: vocagnolm train"),
    ):
        code = absent + start.format(repr(word))
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True)
        assert (done.returncode, said in done.stdout) == (0, True), done.stderr


def run_as_audit(directory: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run `mine.py` of a directory as the command `audit`."""
    begin = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from vocagnolm import __main__ as command; "
        "command.COMMANDS['audit'] = ('mine', ''); command.start()"
    )
    environ["PYTHONPATH"] = os.pathsep.join([str(directory), *sys.path])
    command = [sys.executable, "-c", begin, "audit"]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environ})


@pytest.mark.processes
def test_interrupt_is_one_line(tmp_path: Path) -> None:
    send = "os.kill(os.getpid(), signal.SIGINT)"
    work = f"from vocagnolm.cli import shell\n@shell('mine')\ndef main(argv):\n    {send}\n"
    (tmp_path / "mine.py").write_text("import os, signal\n" + work)
    done = run_as_audit(tmp_path)
    assert (done.returncode, done.stderr) == (cli.Exit.INTERRUPTED, "mine: interrupted\n")


# A command that holds a temporary directory, and then does something.
HOLDING = """
import os, signal, time
from tempfile import TemporaryDirectory
from vocagnolm.cli import shell
@shell("mine")
def main(argv):
    with TemporaryDirectory(dir="{0}"):
        {1}
"""


@pytest.mark.processes
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
@pytest.mark.parametrize("several", [False, True])
def test_ended_command_leaves_nothing_behind_when_it_is_alone(
    name: str, several: bool, tmp_path: Path
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    send = f"os.kill(os.getpid(), signal.{name})"
    (tmp_path / "mine.py").write_text(HOLDING.format(place, send))
    done = run_as_audit(tmp_path, **({"RANK": "0"} if several else {}))
    if several:
        # Cleaning up might wait for the other processes.
        assert done.returncode == -getattr(signal, name)
        return
    assert (done.returncode, done.stderr) == (cli.Exit.INTERRUPTED, "mine: interrupted\n")
    assert not list(place.iterdir())


@pytest.mark.processes
def test_ended_process_of_a_pool_leaves_alone_what_is_its_parents(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    # The child reports that it runs, because Python drops signals that arrive during a fork.
    fork = (
        "ready, there = os.pipe(); child = os.fork(); "
        "child or (os.write(there, b'.'), time.sleep(60), os._exit(0)); "
        "os.read(ready, 1); os.kill(child, signal.SIGTERM); "
        f"print(os.waitpid(child, 0)[1], len(os.listdir('{place}')))"
    )
    (tmp_path / "mine.py").write_text(HOLDING.format(place, fork))
    done = run_as_audit(tmp_path)
    # The status of a process that a signal has ended is the signal's number.
    assert done.stdout == f"{signal.SIGTERM:d} 1\n", done.stderr
