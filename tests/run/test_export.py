"""What runs leave behind, with adapters or sharded or neither: resumed, or exported."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_world import World, make_world
from held_memory import STUDENT, held_of
from launch import run_jobs
from manifests import change_manifest
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    modeling_utils,
)

from vocagnolm.host.manifest import read_manifest
from vocagnolm.models.source import ModelSource
from vocagnolm.run import export
from vocagnolm.run import export_main as command
from vocagnolm.run import main as train
from vocagnolm.run import recipe as config
from vocagnolm.run.checkpoints import checkpoint_fault
from vocagnolm.run.pair import load_pair
from vocagnolm.store import score

pytestmark = pytest.mark.processes

pytest.importorskip("peft")
LORA = {
    "use_peft": "True",
    "lora_r": "4",
    "lora_alpha": "16",
    "lora_modules_to_save": "norm",
}
# Adam would make much of rounding where a gradient is next to nothing.
SGD = {"optim": "sgd", "learning_rate": "1"}
SHORT = {"max_steps": "2", "save_strategy": "no", "eval_fraction": None}
ADAPTERS = "adapter_model.safetensors"
CONFIGS = Path(__file__).parents[2] / "accelerate_configs"


@pytest.fixture(scope="module")
def world(
    tiny_llama: Callable[..., Any],
    tokenizer_dirs: dict[str, Path],
    training_texts: list[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> World:
    """Two finished runs: `adapted`, with adapters, and `plain`, without."""
    root = tmp_path_factory.mktemp("runs")
    world = make_world(
        root, tiny_llama, tokenizer_dirs, training_texts[:60], tie_word_embeddings=True
    )
    assert train.main(world.argv("adapted", use_cpu="True", **LORA)) == 0
    assert train.main(world.argv("plain", use_cpu="True", **SGD)) == 0
    return world


@pytest.fixture(scope="module")
def several(world: World) -> World:
    """The same runs in two and four processes, under DDP and FSDP2, online and from a store."""
    scoring = {"teacher": world.teacher, "dataset": world.pages, "output_dir": world.root / "store"}
    options = {**scoring, "loss_dtype": "float32", "min_context": 16}
    assert score.main([f"--{name}={value}" for name, value in options.items()]) == 0
    stored: dict[str, str | None] = {"teacher": None, "teacher_losses": str(world.root / "store")}
    assert train.main(world.argv("adamw", use_cpu="True")) == 0

    ddp, fsdp = partial(job, world, False), partial(job, world, True)
    four = [
        fsdp("sharded", **LORA),
        fsdp("sharded_teacher", **SGD, teacher_sharding="node"),
        fsdp("sharded_stored", **SGD, **stored),
    ]
    two = [  # a worker's last jobs are sharded
        ddp("ddp", **LORA),
        ddp("stored", **SGD, **stored),
        ddp("ddp_adamw", **SHORT),
        fsdp("sharded_plain", **SGD),
        fsdp("adapted_sharded", "adapted", **LORA),
        fsdp("plain_sharded", "plain", **SGD),
        fsdp("adamw_sharded", "adamw"),
        fsdp("sharded_adamw", **SHORT),
    ]
    run_in(world, four, two)
    return world


@pytest.fixture(scope="module")
def recomputed(several: World) -> World:
    """Further runs with adapters, recomputed or resumed."""
    options = LORA | {"gradient_checkpointing": "True"}
    two = [
        job(several, True, "sharded_recomputed", **options),
        job(several, True, "sharded_resumed", "sharded", **LORA),
    ]
    run_in(several, [job(several, False, "ddp_recomputed", **options)], two)
    return several


def job(
    world: World, fsdp: bool, name: str, resumed: str = "", **changes: str | None
) -> dict[str, Any]:
    """A job of several processes, from the second step of another run if one is named."""
    if resumed:
        changes["resume_from_checkpoint"] = str(world.root / resumed / "checkpoint-2")
    changes |= {} if fsdp else {"use_cpu": "True"}
    return {"argv": world.argv(name, **changes), "fsdp": fsdp}


def run_in(world: World, four: list[dict[str, Any]], two: list[dict[str, Any]]) -> None:
    """Run jobs in four processes, and then others in two."""
    for processes, jobs, name in ((4, four, "fsdp2_32xh100"), (2, two, "fsdp2")):
        config = {"accelerate_config": str(CONFIGS / f"{name}.yaml")}
        run_jobs(world.root, [job | config for job in jobs], processes)


def adapters_of(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / ADAPTERS)


def weights_of(directory: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).state_dict()


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def error_of(capsys: pytest.CaptureFixture[str], *argv: Any) -> str:
    assert command.main([str(argument) for argument in argv]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = [line for line in printed.err.splitlines() if "error:" in line]
    assert len(lines) == 1
    return lines[0].removeprefix("vocagnolm export: error: ")


# What a run leaves behind


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
    assert train.main(world.argv("resumed", use_cpu="True", **LORA)) == 0
    for name in ("checkpoint-4", "."):
        ours, theirs = (adapters_of(run / name) for run in (resumed, world.root / "adapted"))
        assert largest_difference(ours, theirs) == 0.0


def test_trained_parameters_are_counted_when_nothing_is_loaded(world: World) -> None:
    job = config.parse(world.argv("counted", use_cpu="True", **LORA))
    sizes = load_pair(job.model, job.load, job.pack, job.method, job.run.device).student_sizes
    base: Any = ModelSource(str(world.student), "student").load(torch.float32)
    adapters = adapters_of(world.root / "adapted")
    assert sizes.trained == sum(weight.numel() for weight in adapters.values())
    assert sizes.parameters == sizes.trained + sum(weight.numel() for weight in base.parameters())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["ddp", "ddp_recomputed", "sharded", "sharded_recomputed", "sharded_resumed"]
)
def test_adapters_are_those_of_one_process(name: str, recomputed: World) -> None:
    root = recomputed.root
    assert largest_difference(adapters_of(root / "adapted"), adapters_of(root / name)) < 1e-5


@pytest.mark.parametrize("name", ["stored", "sharded_stored", "sharded_teacher", "sharded_plain"])
def test_weights_are_those_of_one_online_process(name: str, several: World) -> None:
    alone, shared = (weights_of(several.root / run) for run in ("plain", name))
    assert largest_difference(alone, shared) < 1e-6
    assert largest_difference(weights_of(several.student), alone) > 1e-3


# Under another layout


def resume_whole(
    world: World, name: str, run: str, checkpoint: Path | None = None, **changes: str
) -> int:
    """Go on from the second step of a run in this process alone; the exit status."""
    path = checkpoint or world.root / run / "checkpoint-2"
    changes |= {"resume_from_checkpoint": str(path), "use_cpu": "True"}
    return train.main(world.argv(name, **changes))


def test_whole_run_ends_as_it_would_have(several: World) -> None:
    root = several.root
    assert (
        largest_difference(adapters_of(root / "adapted"), adapters_of(root / "adapted_sharded"))
        < 1e-5
    )
    # AdamW divides each gradient by its own size, and so makes much of rounding where there is
    # next to nothing else: by up to the learning rate a step.
    for name, tolerance in (("plain", 1e-6), ("adamw", 1e-5)):
        alone, sharded = (weights_of(root / run) for run in (name, f"{name}_sharded"))
        assert largest_difference(alone, sharded) < tolerance
        assert (root / f"{name}_sharded" / "checkpoint-4" / "optimizer_0").is_dir()
        assert not (root / f"{name}_sharded" / "checkpoint-2").exists(), "it began anew"
        assert checkpoint_fault(root / name / "checkpoint-2") is None


def test_sharded_run_ends_as_it_would_have(
    several: World, capsys: pytest.CaptureFixture[str]
) -> None:
    root = several.root
    assert resume_whole(several, "sharded_whole", "sharded", **LORA) == 0
    assert (
        largest_difference(adapters_of(root / "sharded"), adapters_of(root / "sharded_whole"))
        < 1e-5
    )
    assert resume_whole(several, "sharded_plain_whole", "sharded_plain", **SGD) == 0
    alone, sharded = (weights_of(root / run) for run in ("sharded_plain_whole", "sharded_plain"))
    assert largest_difference(alone, sharded) < 1e-6
    assert (root / "sharded_plain_whole" / "checkpoint-4" / "optimizer.pt").exists()
    assert not (root / "sharded_plain_whole" / "checkpoint-2").exists(), "it began anew"
    said = f"{root / 'sharded_plain' / 'checkpoint-2'} was saved sharded and goes on whole: "
    assert said in capsys.readouterr().out
    for name in ("sharded", "sharded_plain"):
        assert checkpoint_fault(root / name / "checkpoint-2") is None


def test_log_goes_on_when_the_layout_changes(several: World) -> None:
    def losses(run: str) -> dict[tuple[int, str], float]:
        history = json.loads((several.root / run / "trainer_state.json").read_text())["log_history"]
        kinds = {"loss", "eval_loss", "train_loss"}
        return {
            (entry["step"], kind): entry[kind] for entry in history for kind in kinds & entry.keys()
        }

    for alone, sharded in (("plain", "plain_sharded"), ("adamw", "adamw_sharded")):
        expected = losses(alone)
        assert {kind for step, kind in expected if step > 2} >= {"eval_loss", "train_loss"}
        assert losses(sharded) == pytest.approx(expected, rel=1e-5)


def test_best_model_is_loaded(several: World, tmp_path: Path) -> None:
    best = several.root / "sharded_plain" / "checkpoint-2"
    built = train.build(config.parse(several.argv("best", use_cpu="True", **SGD)))
    assert built is not None
    trainer = built[0]
    trainer.state.best_model_checkpoint = str(best)
    trainer._load_best_model()
    expected = weights_of(export.export(best, tmp_path / "best").directory)
    assert largest_difference(dict(trainer.model.state_dict()), expected) == 0.0


def test_run_is_refused_in_one_line(
    several: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = tmp_path / "checkpoint-2"
    shutil.copytree(several.root / "sharded_plain" / "checkpoint-2", checkpoint)
    settings = read_manifest(checkpoint)["run"] | {"optim": "adafactor"}
    change_manifest(checkpoint, run=settings)
    changes = {**SGD, "optim": "adafactor"}
    assert resume_whole(several, "refused", "sharded_plain", checkpoint, **changes) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert lines == [
        f"train.py: error: {checkpoint} cannot go on under another layout with the state of "
        "Adafactor: go on under the layout that it was saved under"
    ]


# What the plan says of memory


@pytest.mark.parametrize(
    ("name", "ranks", "parts"),
    [
        ("ddp_adamw", 2, (STUDENT, "teacher")),
        ("sharded_adamw", 2, (STUDENT, "teacher")),
        ("ddp", 2, (STUDENT,)),  # adapters
        ("sharded", 4, (STUDENT, "teacher")),
        ("sharded_teacher", 4, ("teacher",)),  # the plan counts AdamW
    ],
)
def test_plan_counts_what_each_process_holds(
    name: str, ranks: int, parts: tuple[str, ...], several: World
) -> None:
    for rank in range(ranks):
        held, planned = held_of(several.root / name, rank)
        assert {part: held[part] for part in parts} == pytest.approx(
            {part: planned[part] for part in parts}, rel=0.1
        )


# Export


def eval_loss(world: World, student: Path) -> float:
    """The loss of a model on what the runs were evaluated on."""
    options = {"student": str(student), "teacher": None, "method": "cpt", "use_cpu": "True"}
    built = train.build(config.parse(world.argv("evaluation", **options)))
    assert built is not None
    shutil.rmtree(world.root / "evaluation")
    return float(built[0].evaluate()["eval_loss"])


def last_eval_loss(run: Path) -> float:
    history = json.loads((run / "trainer_state.json").read_text())["log_history"]
    return [entry["eval_loss"] for entry in history if "eval_loss" in entry][-1]


@pytest.mark.parametrize("name", ["plain", "sharded_plain"])
def test_export_gives_the_trained_model(
    name: str, several: World, student_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    run = several.root / name
    assert (run / "checkpoint-5" / "pytorch_model_fsdp_0").exists() == (name == "sharded_plain")
    done = export.export(run / "checkpoint-5")
    assert done.directory == run / "export-5"
    assert largest_difference(weights_of(done.directory), weights_of(run)) == 0.0
    assert largest_difference(weights_of(done.directory), weights_of(several.student)) > 1e-3
    assert abs(eval_loss(several, done.directory) - last_eval_loss(run)) < 1e-5
    for file in ("config.json", "generation_config.json", "tokenizer_config.json"):
        ours, theirs = (json.loads((d / file).read_text()) for d in (done.directory, run))
        for found in (ours, theirs):  # transformers 5.17 makes a list of it when it trains
            if isinstance(found.get("eos_token_id"), int):
                found["eos_token_id"] = [found["eos_token_id"]]
        assert ours == theirs, file
    tokenizer = AutoTokenizer.from_pretrained(done.directory)
    assert tokenizer.get_vocab() == student_tokenizer.get_vocab()
    model = AutoModelForCausalLM.from_pretrained(done.directory)
    assert done.parameters == sum(weight.numel() for weight in model.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("name", ["adapted", "sharded"])
def test_export_merges_adapters_when_the_checkpoint_holds_some(
    name: str, several: World, tmp_path: Path
) -> None:
    run = several.root / name
    merged = export.export(run / "checkpoint-5", tmp_path / "merged", merge=True).directory
    finished = export.export(run, tmp_path / "finished", merge=True).directory
    assert largest_difference(weights_of(merged), weights_of(finished)) == 0.0
    assert abs(eval_loss(several, merged) - last_eval_loss(run)) < 1e-5
    before, after = weights_of(several.student), weights_of(merged)
    adapters, layer = adapters_of(run), "model.layers.0.self_attn.q_proj"
    a, b = (adapters[f"base_model.model.{layer}.lora_{which}.weight"] for which in "AB")
    changed = after[f"{layer}.weight"] - before[f"{layer}.weight"]
    assert (changed - 16 / 4 * b @ a).abs().max() < 1e-6
    assert changed.abs().max() > 1e-3
    assert torch.equal(after["model.norm.weight"], adapters["base_model.model.model.norm.weight"])


def test_export_rounds_the_weights_when_asked_for_bfloat16(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, target = world.root / "plain" / "checkpoint-4", tmp_path / "new" / "model"
    target.mkdir(parents=True)  # an empty directory is as good as none
    argv = [str(checkpoint), f"--output_dir={target}", "--dtype=bfloat16"]
    assert command.main(argv) == 0
    expected = {name: w.bfloat16() for name, w in weights_of(checkpoint).items()}
    found = weights_of(target, "auto")
    assert all(torch.equal(weight, expected[name]) for name, weight in found.items())
    assert json.loads((target / "config.json").read_text())["dtype"] == "bfloat16"
    printed = capsys.readouterr().out
    assert printed.startswith(f"{target}: 40,992 parameters in bfloat16, sha256:")
    assert {path.name for path in target.parent.iterdir()} == {"model"}


def test_export_leaves_nothing_behind_when_it_is_interrupted(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(export, "write_manifest", interrupt)
    with pytest.raises(KeyboardInterrupt):
        export.export(world.root / "plain" / "checkpoint-4", tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_export_says_where_a_disk_is_full(
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fill(*_: Any, **options: Any) -> None:
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr(modeling_utils, "safe_save_file", fill)
    target = tmp_path / "model"
    said = error_of(capsys, world.root / "plain" / "checkpoint-4", "--output_dir", target)
    assert said == f"{target} cannot be written: I/O error: No space left on device"
    assert list(tmp_path.iterdir()) == []


def test_export_refuses_in_one_line(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, adapted = (world.root / name / "checkpoint-5" for name in ("plain", "adapted"))
    assert error_of(capsys, adapted) == (
        f"{adapted} holds adapters, which PEFT loads as they are: add --merge for a whole model"
    )
    assert error_of(capsys, plain, "--merge") == (
        f"--merge has no effect: {plain} holds no adapters"
    )
    assert error_of(capsys, plain, "--output_dir", world.student) == (
        f"--output_dir {world.student} is not empty: give another"
    )
    assert error_of(capsys, tmp_path / "absent") == f"{tmp_path / 'absent'}: no such directory"


def test_export_knows_the_student(
    several: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, run = tmp_path / "checkpoint-5", several.root / "sharded_plain"
    shutil.copytree(run / "checkpoint-5", checkpoint)
    done = export.export(checkpoint)
    assert largest_difference(weights_of(done.directory), weights_of(run)) == 0.0
    change_manifest(checkpoint, run={})
    assert error_of(capsys, checkpoint, "--output_dir", tmp_path / "new") == (
        f"{checkpoint} does not say which student it is of: expected run.json in it or beside it, "
        "as train.py writes it"
    )


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["adapted", "plain", "sharded_plain"])
def test_export_refuses_when_the_checkpoint_is_damaged(
    name: str, several: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(several.root / name / "checkpoint-5", tmp_path / "checkpoint-5")
    weights = {"adapted": ADAPTERS, "plain": "model.safetensors"}
    file = weights.get(name, "pytorch_model_fsdp_0/__1_0.distcp")
    damage(tmp_path / "checkpoint-5" / file)
    message = error_of(capsys, tmp_path / "checkpoint-5")
    assert message.startswith(f"{tmp_path / 'checkpoint-5'}: {file}")


@pytest.mark.parametrize("change", ["student", "weights"])
def test_export_refuses_when_adapters_are_of_another_student(
    change: str,
    world: World,
    tiny_llama: Callable[..., Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = Path(shutil.copytree(world.root / "adapted", tmp_path / "adapted"))
    # Without it nothing tells that a file was changed.
    (run / "manifest.json").unlink()
    if change == "student":
        tiny_llama(700, hidden_size=48).save_pretrained(tmp_path / "other")
        settings = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps(settings | {"student": str(tmp_path / "other")}))
    else:
        save_file(dict(list(adapters_of(run).items())[1:]), run / ADAPTERS)
    message = error_of(capsys, run, "--merge", f"--output_dir={tmp_path / 'merged'}")
    assert message.startswith("the adapters do not fit ")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("names_student", [True, False])
def test_export_rejects_an_empty_adapter_configuration(
    names_student: bool, world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(world.root / "adapted", tmp_path / "adapted"))
    # Without it nothing tells that a file was changed.
    (run / "manifest.json").unlink()
    (run / "adapter_config.json").write_text("{}")
    if not names_student:
        (run / "run.json").unlink()
    message = error_of(capsys, run, "--merge", f"--output_dir={tmp_path / 'merged'}")
    assert message == (
        f"{run / 'adapter_config.json'} is no configuration of LoRA adapters as PEFT writes it: "
        "copy it from where they were trained"
    )


@pytest.mark.parametrize("role", ["model", "student"])
def test_adapters_are_no_model(role: Any, world: World) -> None:
    adapters = world.root / "adapted"
    with pytest.raises(ValueError, match="holds adapters") as caught:
        ModelSource(str(adapters), role).config()
    assert str(caught.value) == (
        f"--{role} {adapters} holds adapters, which need the model that they were trained around: "
        f"merge them with vocagnolm export {adapters} --merge"
    )
