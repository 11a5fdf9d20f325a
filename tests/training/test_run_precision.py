"""The precision of a run on a CPU: chosen, reported, kept on resuming, and near to float32."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from processors import pretend
from safetensors.torch import load_file
from world import World, assert_equal_weights, make_trainer

from benchmarks.models import backward, prepare
from vocagnolm.method import Method
from vocagnolm.run import parser
from vocagnolm.run.parser import parse
from vocagnolm.training.config import VocAgnoConfig
from vocagnolm.training.models import read_models

CPU = torch.device("cpu")


# The processor, the launcher's precision, the options, what the run began in, the precision, why.
# Options come before what the run began in, which comes before the launcher.
CASES: list[tuple[str | None, str, dict[str, Any], dict[str, bool], str, str]] = [
    ("AMX", "", {}, {}, "bf16", "multiplies in it"),
    (None, "", {}, {}, "no", "no products"),
    (None, "", {"bf16": True}, {}, "bf16", "as asked for, and slow"),
    ("AMX", "no", {}, {}, "bf16", "multiplies in it"),
    ("AMX", "fp16", {}, {}, "fp16", "launcher"),
    ("AMX", "bf16", {"bf16": False}, {}, "no", "as asked for"),
    ("AMX", "bf16", {}, {"bf16": False, "fp16": False}, "no", "as it began"),
    ("AMX", "no", {}, {"bf16": False, "fp16": True}, "fp16", "as it began"),
]


@pytest.mark.parametrize("case", CASES)
def test_precision_follows_options_then_the_run_then_the_launcher_then_the_processor(
    case: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.accelerator.is_available():
        pytest.skip("a GPU has its own default")
    unit, launched, options, began, expected, why = case
    pretend(monkeypatch, unit)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched)
    (tmp_path / "run.json").write_text(json.dumps(began))
    (tmp_path / "checkpoint-1").mkdir()
    config = VocAgnoConfig(output_dir=str(tmp_path), **options)
    # Accelerate computes in what Trainer passes on, and the run's directory keeps the others.
    assert config.mixed_precision == expected
    assert (config.bf16, config.fp16) == (expected == "bf16", expected == "fp16")
    assert why in config.why_precision
    # Trainer accepts bfloat16 on a CPU only with `use_cpu`.
    assert config.use_cpu or not config.bf16


@pytest.mark.parametrize(
    ("options", "dtype", "attention"),
    [
        ("--use_cpu", "bfloat16", None),
        ("--use_cpu --bf16=false", "float32", None),
        ("--use_cpu --bf16=false --teacher_dtype=bfloat16", "bfloat16", None),
        # It may be for a GPU.
        ("--dry_run --bf16=true", "bfloat16", "torch_varlen"),
    ],
)
def test_models_on_a_cpu_have_its_precision_and_attention_unless_asked_otherwise(
    options: str, dtype: str, attention: str | None, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, "AMX")
    job = parse([*world.argv("out"), *options.split()])
    models = read_models(job.model, job.args, CPU)
    assert models.teacher_dtype == dtype
    assert models.student.source.attn_implementation == attention


def test_run_goes_on_in_its_precision_when_another_processor_resumes_it(
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    argv = world.argv(str(out), use_cpu="True", eval_fraction=None, max_steps="4")
    pretend(monkeypatch, "AMX")
    assert parser.main(argv) == 0
    assert "with AMX" in capsys.readouterr().out
    assert json.loads((out / "run.json").read_text())["bf16"] is True
    whole = load_file(out / "model.safetensors")
    # What is left of a run that was killed after its second step.
    shutil.rmtree(out / "checkpoint-4")
    for name in ("model.safetensors", "README.md"):
        (out / name).unlink()
    pretend(monkeypatch, None)
    # Another precision is another run.
    assert parser.main([*argv, "--bf16=false"]) == 2
    assert "bf16 was True, now False" in capsys.readouterr().err
    assert parser.main(argv) == 0
    assert "as it began" in capsys.readouterr().out
    assert_equal_weights(load_file(out / "model.safetensors"), whole)


def test_step_in_bfloat16_moves_float32_weights_as_float32_does(
    blocks: Any, pair: tuple[Any, Any], tmp_path: Path
) -> None:
    student, teacher = (model.float() for model in pair)
    gradients = {}
    for is_bfloat16 in (False, True):
        if is_bfloat16:
            teacher.bfloat16()
        # Its weights change smoothly with the losses, so no selection can flip.
        method = Method(selection="accept")
        # A model that was prepared for one precision keeps it.
        models = copy.deepcopy(student), teacher
        options = {"method": method}
        trainer = make_trainer(tmp_path, blocks, *models, bf16=is_bfloat16, options=options)
        prepare(trainer)
        batch = trainer.data_collator([blocks[index] for index in range(8)])
        loss = backward(trainer, [batch])
        found = [weight.grad for weight in trainer.model.parameters()]
        assert {gradient.dtype for gradient in found} == {torch.float32}
        whole = torch.cat([gradient.flatten() for gradient in found])
        gradients[is_bfloat16] = torch.cat([loss.reshape(1), whole])
    exact, rounded = gradients[False], gradients[True]
    # Seen: 1.3e-3 and .117, of which the teacher adds .023. These models are random, with losses
    # far above those of trained ones.
    assert float(rounded[0]) == pytest.approx(float(exact[0]), rel=3e-3)
    assert 0.05 < (rounded - exact).norm() / exact.norm() < 0.15
