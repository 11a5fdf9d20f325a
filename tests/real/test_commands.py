"""What a user types, with pretrained models of three vocabularies and few tokens."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from real_data import GEMMA, SMOLLM2, real_model
from transformers import AutoModelForCausalLM
from world import assert_equal_weights, write_pages

from vocagnolm.__main__ import main

# They take minutes.
pytestmark = pytest.mark.slow

PROBLEM = (
    "A shop sells pens at {price} dollars each. Mia buys {count} pens and pays with a 100 dollar "
    "note. How much change does she get?\nThe pens cost {price} * {count} = {cost} dollars. The "
    "change is 100 - {cost} = {change} dollars.\nThe answer is {change}."
)


def problems(count: int) -> list[str]:
    texts = []
    for index in range(count):
        price, pens = 2 + index % 7, 3 + index % 5
        cost = price * pens
        texts.append(PROBLEM.format(price=price, count=pens, cost=cost, change=100 - cost))
    return texts


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pages") / "pages.jsonl"
    write_pages(path, problems(40))
    return path


def run(*argv: object) -> None:
    assert main([str(word) for word in argv]) == 0


def training(student: Path, pages: Path, output_dir: Path, **options: object) -> list[object]:
    settings: dict[str, object] = {
        "student": student,
        "dataset": pages,
        "output_dir": output_dir,
        "max_length": 96,
        "global_batch_tokens": 192,
        "max_steps": 2,
        "save_steps": 1,
        "report_to": "none",
        "use_cpu": "true",
    }
    settings |= options
    return ["train", *(f"--{name}={value}" for name, value in settings.items())]


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    weights: dict[str, torch.Tensor] = model.state_dict()
    return weights


def log_of(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "log.jsonl").read_text().splitlines()]


def test_every_command_works(pair: tuple[Path, Path], pages: Path, tmp_path: Path) -> None:
    student, teacher = pair
    store, guided = tmp_path / "store", tmp_path / "guided"
    run(
        *("audit", "--student", student, "--teacher", teacher, "--dataset", pages),
        *("--output_dir", tmp_path / "audit"),
    )
    run("score", "--teacher", teacher, "--dataset", pages, "--output_dir", store)
    settings: dict[str, object] = {"teacher_losses": store, "selection": "accept", "max_steps": 3}
    run(*training(student, pages, guided, **settings))
    trained = weights_of(guided)
    # Keep what a run killed after its first step leaves; the same command goes on from there.
    for name in ("checkpoint-2", "checkpoint-3"):
        shutil.rmtree(guided / name)
    (guided / "model.safetensors").unlink()
    (guided / "README.md").unlink()
    run(*training(student, pages, guided, **settings))
    assert_equal_weights(weights_of(guided), trained)
    # The teacher itself gives the same first step as its stored losses, up to their float16.
    online = tmp_path / "online"
    run(*training(student, pages, online, teacher=teacher, selection="accept", max_steps=1))
    first_losses = [log_of(directory)[0]["student_loss_nats"] for directory in (guided, online)]
    assert first_losses[0] == pytest.approx(first_losses[1], abs=1e-3)
    exported = tmp_path / "exported"
    run("export", guided / "checkpoint-3", "--output_dir", exported)
    assert_equal_weights(weights_of(exported), trained)
    run(
        *("evaluate", "--model", exported, "--benchmarks", "demo", "--limit", 2),
        *("--output_dir", tmp_path / "answers"),
    )
    run("compare", guided, online, "--output_dir", tmp_path / "report")
    run(
        *("inspect", "--student", student, "--teacher", teacher, "--dataset", pages),
        *("--max_length", 128, "--output_dir", tmp_path / "view"),
    )


def test_adapters_train_and_merge(pages: Path, tmp_path: Path) -> None:
    student, teacher = real_model(SMOLLM2), real_model(GEMMA)
    adapted, exported = tmp_path / "adapted", tmp_path / "exported"
    run(*training(student, pages, adapted, teacher=teacher, use_peft="true"))
    run("export", adapted, "--output_dir", exported)
    from peft import AutoPeftModelForCausalLM

    ids = torch.arange(100, 140)[None]
    merged: Any = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    apart: Any = AutoPeftModelForCausalLM.from_pretrained(adapted, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, apart(ids).logits, rtol=0, atol=2e-3)


def test_conversations_are_read_in_both_templates(pair: tuple[Path, Path], tmp_path: Path) -> None:
    student, teacher = pair
    chats = tmp_path / "chats.jsonl"
    with chats.open("w") as file:
        for text in problems(24):
            prompt, _, completion = text.partition("\n")
            file.write(json.dumps({"prompt": prompt, "completion": completion}) + "\n")
    # Gemma is a base model here, and has no template.
    options: dict[str, object] = {"max_length": 160, "global_batch_tokens": 320, "max_steps": 1}
    if student.name == GEMMA:
        options["student_chat_template"] = "chatml"
    if teacher.name == GEMMA:
        options["teacher_chat_template"] = "chatml"
    out = tmp_path / "run"
    run(*training(student, chats, out, teacher=teacher, selection="accept", **options))
    # Questions and templates have no labels, and answers are about half of a text.
    entry = log_of(out)[0]
    assert 0.2 < entry["student_loss_nats"] < 5


def test_plan_tells_the_memory_that_a_run_takes(pages: Path, tmp_path: Path) -> None:
    student, teacher = real_model(SMOLLM2), real_model(GEMMA)
    argv = training(student, pages, tmp_path / "run", teacher=teacher, logging_steps=1)
    command = [sys.executable, "-m", "vocagnolm", *map(str, argv)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    printed = process.stdout.read()
    # The peak of this process alone. Other tests have started larger ones.
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    (plan,) = re.findall(r"about ([0-9.]+) GiB a device", printed)
    # Linux counts in KiB. PyTorch and the other libraries take about .7 GiB of their own.
    peak = usage.ru_maxrss / 2**20
    assert float(plan) == pytest.approx(peak - 0.7, rel=0.25)
