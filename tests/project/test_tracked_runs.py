"""Three runs, trained, evaluated and compared with nothing but what their trackers hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoTokenizer, LlamaForCausalLM
from wandb_files import stored

from vocagnolm import cli
from vocagnolm.demo import world
from vocagnolm.demo.models import STUDENT_TOKENIZER, TEACHER, student_config
from vocagnolm.evaluation import main as evaluation
from vocagnolm.io import ASSETS
from vocagnolm.run import main as train

RECIPE = """
student: {root}/student
dataset: {root}/pages.jsonl
eval_dataset: {root}/held_out.jsonl
max_length: 128
global_batch_tokens: 512
per_device_train_batch_size: 4
max_steps: 2
logging_steps: 1
use_cpu: true
report_to: [wandb, tensorboard]
output_dir: {root}/runs/{method}
method: {method}
"""
GUIDED = f"teacher: {ASSETS / TEACHER}\nguidance_table_steps: 2\n"


def make_runs(tmp_path: Path) -> None:
    """Train a student in three ways, and evaluate it."""
    torch.manual_seed(0)
    LlamaForCausalLM(student_config()).save_pretrained(tmp_path / "student")
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / STUDENT_TOKENIZER)
    tokenizer.save_pretrained(tmp_path / "student")
    held_out = world.held_out_questions()
    world.write_jsonl(tmp_path / "pages.jsonl", world.corpus(40, 1, 0.4, held_out))
    world.write_jsonl(tmp_path / "held_out.jsonl", world.corpus(5, 2, 0.0, set()))
    for method in ("cpt", "random", "vocagnolm"):
        recipe = tmp_path / "recipes" / "show" / f"{method}.yaml"
        recipe.parent.mkdir(parents=True, exist_ok=True)
        text = RECIPE.format(root=tmp_path, method=method)
        recipe.write_text(text + (GUIDED if method == "vocagnolm" else ""))
        assert train.main([f"--config={recipe}"]) == 0
        model = str(tmp_path / "runs" / method)
        options = ["--benchmarks", "demo", "--limit", "2", "--report_to", "wandb"]
        assert evaluation.main(["--model", model, *options]) == 0


@pytest.mark.slow
def test_three_runs_are_compared_by_what_trackers_hold(
    offline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_runs(tmp_path)
    begun = map(stored, offline.glob("offline-run-*"))
    # Their directories are named by the second, in which more than one may begin.
    runs = sorted(begun, key=lambda each: str(each["run"]["start_time"]))
    assert len(runs) == 6
    trained, evaluated = runs[-2:]
    for found in (trained, evaluated):
        assert found["run"]["display_name"] == "show/vocagnolm"
        assert found["run"]["run_group"] == "show"
        assert found["run"]["tags"] == ["vocagnolm", "student", TEACHER]
        assert found["config"]["corpus"]["documents"] == 40
    scalars = {name for row in trained["history"] for name in row if "_type" not in name}
    sections = {name.partition("/")[0] for name in scalars if not name.startswith("_")}
    assert sections == {"train", "guidance", "teacher", "speed", "memory", "eval"}
    assert "guidance/excess_loss_nats.values" in scalars
    assert evaluated["summary"]["eval/demo/partial/items"] == 2
    (events,) = {path.parent for path in tmp_path.glob("runs/vocagnolm/runs/*/events*")}
    board = EventAccumulator(str(events))
    board.Reload()
    logged = {name for name in scalars if not name.startswith("_")} - {"train/global_step"}
    shown = {name for name in logged if not name.startswith("guidance/excess_loss_nats.")}
    assert set(board.Tags()["scalars"]) == {x for x in shown if not x.startswith("guidance/tokens")}
    capsys.readouterr()
    out = tmp_path / "comparison"
    assert cli.main(["compare", "--wandb", str(offline), "--output_dir", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].replace("|", " ").split() == ["run", "prompts", "Demo"]
    assert [line.split()[1] for line in lines[4:7]] == ["cpt", "random", "vocagnolm"]
    assert (out / "comparison.html").is_file()
    comparison = json.loads((out / "comparison.json").read_text())
    assert len(comparison["pairings"]) == 2
    assert not any(pairing["refused"] for pairing in comparison["pairings"])
