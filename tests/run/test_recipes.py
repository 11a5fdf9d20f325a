"""The recipes, with their bases, are the paper's runs: read by the real parser, on 32 GPUs."""

from __future__ import annotations

import math
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from vocagnolm.run.parser import check, parse
from vocagnolm.run.recipe import RECIPES, find_file, recipe_options
from vocagnolm.shell import dist as processes
from vocagnolm.training.config import VocAgnoConfig
from vocagnolm.training.job import settings_of
from vocagnolm.training.options import DataOptions, GuidanceOptions, ModelOptions, RunOptions

PAPER, ABLATIONS, BEYOND = (
    sorted((RECIPES / folder).rglob("*.yaml"))
    for folder in ("paper", "ablations", "beyond_the_paper")
)
WORLD_SIZE = 32
# Section 4.3, and the project's defaults where the paper says nothing.
SETTINGS = {
    "student": "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T",
    "dataset": ["open-web-math/open-web-math"],
    "max_length": 2048,
    "global_batch_tokens": 2**21,
    "learning_rate": 8e-5,
    "lr_scheduler_type": "cosine_with_min_lr",
    "lr_scheduler_kwargs": {"min_lr_rate": 0.1},  # to 8e-6
    **{"warmup_steps": 0, "optim": "adamw_torch_fused", "adam_beta1": 0.9, "adam_beta2": 0.95},
    **{"adam_epsilon": 1e-8, "weight_decay": 0.1, "max_grad_norm": 1.0, "seed": 42},
}
TEACHERS = {
    "llemma": "EleutherAI/llemma_7b",
    "mistral-proxmath": "gair-prox/Mistral-7B-ProXMath",
    "deepseekmath": "deepseek-ai/deepseek-math-7b-base",
    "deepseekmath-rl": "deepseek-ai/deepseek-math-7b-rl",
    "qwen2.5-math": "Qwen/Qwen2.5-Math-7B",
    "qwen2.5-math-instruct": "Qwen/Qwen2.5-Math-7B-Instruct",
    "tinyllama-cpt": "runs/paper/table1/cpt",
}


def test_recipe_is_found_by_name_when_no_file_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_file("--config", "paper/table1/cpt") == RECIPES / "paper" / "table1" / "cpt.yaml"
    Path("demo").write_text("teacher: t")
    assert find_file("--config", "demo") == Path("demo")


def options_of(path: Path) -> dict[str, Any]:
    """The options of a recipe over the defaults of the command."""
    kinds = (ModelOptions, DataOptions, GuidanceOptions, RunOptions)
    defaults = {field.name: field.default for kind in kinds for field in fields(kind)}
    recipe = {name: value for name, value in recipe_options(path).items() if value is not None}
    return defaults | recipe


def name_of(path: Path) -> str:
    return str(path.relative_to(RECIPES).with_suffix(""))


def named_in(parts: list[str]) -> dict[str, Any]:
    """The options of parts of a name, each OPTION-VALUE."""
    pairs = [part.split("-") for part in parts]
    return {option: yaml.safe_load(value) for option, value in pairs}


def tokens_of(path: Path) -> int:
    """Billions of tokens that the first line names."""
    found = re.search(r", (\d+)B tokens\.$", path.read_text(encoding="utf-8").splitlines()[0])
    assert found
    return int(found[1])


@pytest.mark.parametrize("path", [*PAPER, *ABLATIONS, *BEYOND], ids=name_of)
def test_recipe_is_the_papers_run(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VocAgnoConfig, "world_size", WORLD_SIZE)
    monkeypatch.setattr(processes, "launched_processes", lambda: WORLD_SIZE)
    job = parse(["--config", str(path), "--use_cpu"])
    run = job.args
    sequences = WORLD_SIZE * run.per_device_train_batch_size * run.gradient_accumulation_steps
    assert sequences == 1024
    assert sequences * run.max_length == run.global_batch_tokens == 2**21
    assert 0 <= run.max_steps * run.global_batch_tokens - tokens_of(path) * 10**9 < 2**21
    settings = settings_of(job)
    for name, value in SETTINGS.items():
        assert settings[name] == value, name
    recipe = recipe_options(path)
    assert {"max_steps", "output_dir"} <= recipe.keys()
    assert "bf16" not in recipe  # rejected on a machine without a GPU


@pytest.mark.parametrize("path", PAPER, ids=name_of)
def test_recipe_is_what_its_name_says(path: Path) -> None:
    found, recipe = options_of(path), recipe_options(path)
    first, *rest = path.stem.split("__")
    if path.parent.name == "table3":
        assert found.items() >= named_in([first, rest[0]]).items()
        assert rest[1] == f"{tokens_of(path)}b"
        assert found["teacher"] == [TEACHERS["mistral-proxmath"]]
        return
    method, *chunks = first.split("-")
    assert found["method"] == method
    assert recipe.get("chunks") == (int(chunks[0]) if chunks else None)
    teachers = [TEACHERS[name] for name in rest if name != "random"]
    assert recipe.get("teacher", []) == teachers
    guidance = "random" if rest == ["random"] else "teacher"
    assert recipe.get("chunk_guidance") == (guidance if chunks else None)


@pytest.mark.parametrize("path", PAPER, ids=name_of)
def test_recipe_has_the_papers_guidance(path: Path) -> None:
    expected = {
        **{"top_k": 0.4, "aggregation": "max", "unmapped": "include", "uld_weight": 0.5},
        **{"kld_direction": "reverse", "uld_pairing": "position", "rho1_score": "loss_and_entropy"},
        **{"selection_scope": "sequence", "loss_divisor": "all", "attend_across_documents": False},
    }
    if path.parent.name == "table3":
        expected = {k: v for k, v in expected.items() if k not in ("aggregation", "unmapped")}
    found = options_of(path)
    if found["method"] == "rho1":  # Lin et al. (2024), Table 4
        expected["top_k"] = 0.7
    if recipe_options(path).get("chunk_guidance") == "teacher":  # whole chunks: docs/method.md
        expected |= {"aggregation": "mean", "chunk_selection": "chunks"}
    effective = parse(["--config", str(path), "--use_cpu"]).args.guidance.in_effect().keys()
    held = expected.keys() & (effective | {"attend_across_documents"})
    assert {name: found[name] for name in held} == {name: expected[name] for name in held}


@pytest.mark.parametrize("path", ABLATIONS, ids=name_of)
def test_ablation_changes_only_what_its_name_says(path: Path) -> None:
    found = options_of(path)
    name = "table3/unmapped-include__aggregation-max__2b.yaml"
    if found["method"] == "uld":
        name = "table1/uld__mistral-proxmath.yaml"
    base = options_of(RECIPES / "paper" / name) | {"max_steps": math.ceil(2e9 / 2**21)}
    where = found.pop("output_dir"), base.pop("output_dir")
    assert found == base | named_in(path.stem.split("__"))
    if found["method"] != "uld" and found == base:
        assert where[0] == where[1]


def test_option_replaces_those_of_a_recipe_that_exclude_it(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("teacher: T\nteacher_dtype: float32\ntop_k: 0.7\neval_fraction: 0.1\n")
    argv = [f"--config={recipe}", "--teacher-losses", "stores/t", "--eval_dataset=held_out.jsonl"]
    expected = {"teacher_losses": ["stores/t"], "eval_dataset": "held_out.jsonl", "top_k": 0.7}
    assert check(argv)[1] == expected
    # So does a recipe that builds on another one.
    built = tmp_path / "built.yaml"
    built.write_text("base: recipe.yaml\nteacher_losses: [stores/t]\n")
    expected = {"teacher_losses": ["stores/t"], "eval_fraction": 0.1, "top_k": 0.7}
    assert check([f"--config={built}"])[1] == expected
    # Two in one place are still a mistake.
    with pytest.raises(ValueError, match="cannot be combined"):
        check([*argv, "--teacher=T"])


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
