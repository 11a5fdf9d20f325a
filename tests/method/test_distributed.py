"""The real Trainer and Accelerate on two and four processes give the result of one process."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import run_jobs
from methods_world import World, make_world
from references import largest_difference
from world import Tokenizers

pytestmark = pytest.mark.processes

STEPS, TOLERANCE = 5, 1e-5
CHECKPOINTED = {"gradient_checkpointing": True}
# The reference is not compiled. This compiler takes seconds, and the default one, minutes.
COMPILED = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
CLIPPED = {"optim": "adamw_torch", "max_grad_norm": 1.0}
# 59 blocks: 3 are left over.
EPOCH = {"max_steps": -1, "num_train_epochs": 1}
# "chunk random" covers random numbers, and "turns", below, shares.
METHODS = (
    "accept",
    "kld",
    "uld",
    "rho1 entropy",
    "chunk",
    "chunk random",
    "several weighted",
    "eaft",
)
# Those that a corpus brings.
WEIGHTS = ([1.0, -0.5, 0.0, 2.5, 0.25] * 12)[:59]
# What is trained, how it is distributed, and over how many processes.
JOBS: list[dict[str, Any]] = [
    {"processes": 2, "models": "tied", "fsdp": False, "training": CHECKPOINTED},
    {"processes": 2, "models": "plain", "fsdp": True, "training": CHECKPOINTED},
    {"processes": 2, "models": "tied", "fsdp": True, "method": "selected"},
    {"processes": 2, "models": "tied", "fsdp": True, "training": {"bf16": True}},
    *({"processes": 2, "models": "plain", "fsdp": False, "method": m} for m in METHODS),
    *({"processes": 2, "models": "plain", "fsdp": True, "method": m} for m in ("kld", "uld")),
    {"processes": 2, "models": "tied", "fsdp": True, "method": "accept", "training": CHECKPOINTED},
    *(
        {"processes": 2, "models": "plain", "fsdp": fsdp, "method": "turns"}
        for fsdp in (False, True)
    ),
    *(
        {"processes": 2, "models": "plain", "fsdp": False, "method": method}
        for method in ("stored turns", "mixture")
    ),
    *({"processes": 2, "models": "plain", "fsdp": False, "training": t} for t in (CLIPPED, EPOCH)),
    *(
        {"processes": 2, "models": "plain", "fsdp": fsdp, "method": method, "weights": WEIGHTS}
        for fsdp, method in ((False, "vocagnolm"), (True, "accept"), (False, "turns"))
    ),
    {"processes": 2, "models": "tied", "fsdp": False, "training": COMPILED},
    {"processes": 2, "models": "plain", "fsdp": True, "training": COMPILED | CHECKPOINTED},
    {"processes": 4, "models": "tied", "fsdp": False, "training": CHECKPOINTED, "machines": [1, 2]},
    {"processes": 4, "models": "tied", "fsdp": True, "training": CHECKPOINTED},
    {"processes": 4, "models": "plain", "fsdp": True, "method": "selected"},
    {"processes": 4, "models": "plain", "fsdp": True, "replicas": 2},
]


@pytest.fixture(scope="module")
def worlds(
    training_texts: list[str], tokenizers: Tokenizers, tiny_llama: Callable[..., Any]
) -> dict[str, World]:
    def make(tied: bool) -> World:
        def build(*arguments: Any, **options: Any) -> Any:
            return tiny_llama(*arguments, **options, tie_word_embeddings=tied)

        return make_world(build, tokenizers, training_texts[:59])

    return {"plain": make(False), "tied": make(True)}


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_parameters_do_not_depend_on_the_processes(
    processes: int, worlds: dict[str, World], tokenizer_dirs: dict[str, Path], tmp_path: Path
) -> None:
    for name, world in worlds.items():
        (tmp_path / "texts.json").write_text(json.dumps(world.texts))
        for role in ("student", "teacher", "reference"):
            getattr(world, role).save_pretrained(tmp_path / name / role)
    families = {"student_tokenizer": "metaspace", "teacher_tokenizer": "nfc_digits"}
    common = {key: str(tokenizer_dirs[family]) for key, family in families.items()}
    jobs = [
        {"method": "vocagnolm", **common, **job}
        | {"training": {"max_steps": STEPS} | job.get("training", {})}
        # A worker runs sharded jobs last.
        for job in sorted(JOBS, key=lambda job: job["fsdp"])
        if job["processes"] == processes
    ]
    alone: dict[Any, dict[str, torch.Tensor]] = {}
    for job, shared in zip(jobs, run_jobs(tmp_path, jobs, processes), strict=True):
        name, method, training = job["models"], job["method"], job["training"]
        rounded = training.pop("bf16", False)
        for changes_nothing in (*CHECKPOINTED, *COMPILED):
            training.pop(changes_nothing, None)
        key = name, method, str(training), "weights" in job
        start = dict(worlds[name].student.named_parameters())
        if key not in alone:
            world = copy.copy(worlds[name])
            world.segments, world.weights = {}, job.get("weights")
            trainer = world.trainer(tmp_path / "alone", method, **training)
            trainer.train()
            alone[key] = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
            assert largest_difference(start, alone[key]) > 1e-4
            if method == "vocagnolm":
                loss = trainer.evaluate(trainer.train_dataset)["eval_loss"]
                alone[key]["eval_loss"] = torch.tensor(loss)
        found = {n: shared[n] for n in alone[key]}
        assert largest_difference(alone[key], found) < (1e-2 if rounded else TOLERANCE), job
