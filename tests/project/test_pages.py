"""What the README and the pages tell one to type is accepted, and their Python files work."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.commands.launch import launch_command_parser
from inline_grader import graded_inline
from safetensors.torch import load_file
from tests.project.first_hour import code_blocks, typed_lines
from transformers import AutoTokenizer, LlamaForCausalLM
from world import World, assert_equal_weights

from vocagnolm import VocAgnoConfig, VocAgnoTrainer
from vocagnolm.__main__ import COMMANDS, main
from vocagnolm.collator import PackedCollator
from vocagnolm.evaluation import runner
from vocagnolm.run.launch import split
from vocagnolm.run.parser import parse

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    path.relative_to(ROOT).as_posix()
    for place in (".", "docs", "benchmarks")
    for path in sorted(ROOT.glob(f"{place}/*.md"))
]
SCRIPTS = {"train.py": "train", "evaluate_math.py": "evaluate"}
# Smaller than the paper's run.
SHORT: dict[str, Any] = {"max_length": 64, "global_batch_tokens": 512, "use_cpu": True}
SHORT |= {"max_steps": 2, "learning_rate": 1e-2, "report_to": "none"}
SHORT |= {"per_device_train_batch_size": 8}
SMALL = [f"--{name}={value}" for name, value in SHORT.items()]


def typed_commands() -> list[Any]:
    """Return the words of each line that runs Python, from code blocks without a language."""
    found = []
    for page in PAGES:
        for language, first_line, text in code_blocks(page):
            for line, words in [] if language else typed_lines(text, first_line):
                if words[0] in ("vocagnolm", "python", "accelerate", "sbatch"):
                    found.append(pytest.param(words, id=f"{page}:{line}"))
    return found


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, with the files of the pages."""
    files = []
    for page in ("docs/library.md", "docs/alignment.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        # A name, and the code block that follows it.
        files += re.findall(r"^`([\w.]+)`[^\n]*:\n\n```\w+\n(.*?)^```", text, re.M | re.S)
    for name, text in files:
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name, _ in files:
        sys.modules.pop(name.removesuffix(".py"), None)


# Commands


def program_of(words: list[str]) -> tuple[str, list[str]]:
    """Return the `vocagnolm` command or the module that a line runs, and its arguments."""
    first, *rest = words
    if first == "vocagnolm":
        return rest[0], rest[1:]
    if first == "accelerate":
        given = launch_command_parser().parse_args(rest[1:])
        assert given.config_file is None or Path(given.config_file).is_file()
        module = ["-m"] if given.module else []
        return program_of(["python", *module, given.training_script, *given.training_script_args])
    if first == "sbatch":
        return "train", rest[rest.index("accelerate_configs/slurm.sh") + 1 :]
    if rest[0] != "-m":
        assert Path(rest[0]).is_file()
        return SCRIPTS.get(rest[0], ""), rest[1:]
    if rest[1] == "vocagnolm":
        return program_of(["vocagnolm", *rest[2:]])
    assert importlib.util.find_spec(rest[1])
    return "", rest[2:]


class Read(BaseException):
    """Raised when a command has read its options."""


@pytest.mark.parametrize("words", typed_commands())
def test_command_to_type_is_taken(
    words: list[str], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in ROOT.iterdir():
        (place / path.name).symlink_to(path)
    (place / "DATA").mkdir()
    (place / "PROMPTS/cot").mkdir(parents=True)
    name, argv = program_of(["0" if word == "RANK" else word for word in words])
    if not name or {"--help", "--help_all", "--version"} & {name, *argv}:
        return
    if "--accelerate_config" in argv:
        _, argv = split(argv)
    if name in ("train", "prepare"):
        assert parse(argv)
        return
    read = argparse.ArgumentParser.parse_known_args

    def stop(parser: argparse.ArgumentParser, args: Any = None, _: Any = None) -> None:
        _, unknown = read(parser, args)
        raise Read(unknown)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", stop)
    with pytest.raises(Read, match=r"^\[\]$"):
        importlib.import_module(COMMANDS[name][0]).main(argv)


def test_links_of_pages_exist() -> None:
    # Links as GitHub resolves them; mkdocs checks those of the site.
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        links = re.findall(r"\]\(((?!http)[^)#\s]+)", text)
        links += re.findall(r"src(?:set)?=\"((?!http)[^\"]+)", text)
        missing = [link for link in links if not (ROOT / page).parent.joinpath(link).exists()]
        assert missing == [], page


# Files


@pytest.fixture
def models(world: World, place: Path) -> None:
    """Models and a corpus under the pages' names."""
    for name in ("student", "teacher"):
        (place / name.upper()).symlink_to(getattr(world, name), target_is_directory=True)
    (place / "pages.jsonl").symlink_to(world.pages)


def run(start: str, *more: str) -> None:
    """Run the command of docs/library.md that begins with `vocagnolm START`, in this process."""
    blocks = (text for language, _, text in code_blocks("docs/library.md") if not language)
    (line,) = (text for text in blocks if text.startswith(f"vocagnolm {start}"))
    assert main([*shlex.split(line)[1:], *more]) == 0


def make_trainer(args: VocAgnoConfig, **options: Any) -> VocAgnoTrainer:
    rows = [json.loads(line) for line in Path("pages.jsonl").read_text().splitlines()]
    return VocAgnoTrainer("STUDENT", args, None, rows, teacher="TEACHER", **options)


def assert_trains_as_the_command_did(trainer: VocAgnoTrainer) -> None:
    trainer.train()
    weights = dict(trainer.model.named_parameters())
    assert_equal_weights(weights, load_file("command/model.safetensors"))


@pytest.mark.usefixtures("models")
def test_method_of_the_page_is_the_objective_of_a_trainer() -> None:
    run("train --method", *SMALL, "--output_dir=command", "--save_steps=1")
    # Resumed by its name.
    for path in ("command/model.safetensors", "command/README.md"):
        Path(path).unlink()
    shutil.rmtree("command/checkpoint-2")
    run("train --method", *SMALL, "--output_dir=command", "--save_steps=1")
    assert json.loads(Path("command/run.json").read_text())["method"] == "soft:Soft"

    from soft import Soft  # type: ignore[import-not-found]

    args = VocAgnoConfig(output_dir="trainer", save_strategy="no", **SHORT)
    trainer = make_trainer(args, objective=Soft)
    found = trainer.token_guidance(PackedCollator(64)([*trainer.train_dataset][:2]))
    lag = torch.sigmoid(found.student_loss_BS - found.teacher_loss_BS)
    assert torch.equal(found.weight_BS[found.mapped_BS], lag[found.mapped_BS])
    assert (found.weight_BS[found.valid_BS & ~found.mapped_BS] == 1).all()
    assert ((found.weight_BS > 0) == found.valid_BS).all()
    assert_trains_as_the_command_did(trainer)
    assert trainer.args.to_dict()["method"] == "soft:Soft"


@pytest.mark.usefixtures("models")
def test_aggregation_of_the_page_is_the_least_loss() -> None:
    run("train --aggregation", *SMALL, "--output_dir=command")
    assert json.loads(Path("command/run.json").read_text())["aggregation"] == "least:least"

    from least import least  # type: ignore[import-not-found]

    args = VocAgnoConfig(output_dir="trainer", aggregation=least, **SHORT)
    assert args.to_dict()["aggregation"] == "least:least"
    trainer = make_trainer(args)
    batch = PackedCollator(64)([*trainer.train_dataset][:2])
    found, several = trainer.token_guidance(batch), 0
    for row, ranges in enumerate(batch["teacher_ranges"].tolist()):
        for token, (first, last) in enumerate(ranges):
            if found.mapped_BS[row, token]:
                losses = found.teacher_loss_BT[row, first:last]
                assert found.teacher_loss_BS[row, token] == losses.min()
                several += last - first > 1
    assert several > 10
    assert_trains_as_the_command_did(trainer)


@pytest.mark.usefixtures("models")
def test_benchmark_of_the_page_is_asked() -> None:
    with graded_inline(runner):
        run("evaluate", "--output_dir=found")
    records = [json.loads(line) for line in Path("found/halves.jsonl").read_text().splitlines()]
    assert [record["gold"] for record in records] == ["4", "15"]


@pytest.mark.usefixtures("models")
def test_teacher_source_of_the_page_gives_its_losses() -> None:
    trainer = runpy.run_path("words.py")["trainer"]
    assert trainer.state.global_step == 10
    found = trainer.token_guidance(PackedCollator(64)([trainer.train_dataset[0]]))
    losses = {round(loss, 3) for loss in found.teacher_loss_BS[found.mapped_BS].tolist()}
    assert losses == {0.1, 0.5, 9.0}


@pytest.mark.usefixtures("models")
def test_on_policy_step_of_the_page_trains_the_student(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained("STUDENT")
    seen: list[list[int]] = []
    forward = LlamaForCausalLM.forward

    def record(model: LlamaForCausalLM, ids: torch.Tensor, **options: object) -> Any:
        seen.append(ids[0].tolist())
        return forward(model, ids, **options)

    def generate(_: object, prompt: torch.Tensor, **options: object) -> torch.Tensor:
        """Sample single letters, which are not the text's usual tokens, and the end."""
        seen.append(prompt[0].tolist())
        letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "answer7"]
        return torch.cat([prompt, torch.tensor([[*letters, tokenizer.eos_token_id]])], dim=1)

    monkeypatch.setattr(LlamaForCausalLM, "generate", generate)
    monkeypatch.setattr(LlamaForCausalLM, "forward", record)
    names = runpy.run_path("on_policy.py")
    assert len(names["credit"]) == len(names["student_losses"])
    assert names["text"].endswith("answer7")
    assert names["answer"].abs().max() > 0
    # The student's losses are those of the distribution that was sampled from.
    context, scored, *_ = seen
    assert scored[: len(context)] == context
    assert all(parameter.grad is not None for parameter in names["student"].parameters())
