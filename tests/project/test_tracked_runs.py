"""A run that is trained and evaluated is one run of Weights & Biases."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM
from wandb_files import stored

from vocagnolm.demo import world
from vocagnolm.demo.run import STUDENT_TOKENIZER, TEACHER, student_config
from vocagnolm.evaluation import main as evaluation
from vocagnolm.io import ASSETS
from vocagnolm.run import options as train

RECIPE = """
student: {root}/student
teacher: {teacher}
dataset: {root}/pages.jsonl
max_length: 128
global_batch_tokens: 512
max_steps: 1
use_cpu: true
report_to: wandb
output_dir: {root}/run
"""


@pytest.mark.slow
def test_evaluation_is_in_the_run_that_trained_the_model(offline: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    LlamaForCausalLM(student_config()).save_pretrained(tmp_path / "student")
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / STUDENT_TOKENIZER)
    tokenizer.save_pretrained(tmp_path / "student")
    world.write_jsonl(tmp_path / "pages.jsonl", world.corpus(40, 1, 0.4))
    recipe = tmp_path / "recipes" / "show" / "guided.yaml"
    recipe.parent.mkdir(parents=True)
    recipe.write_text(RECIPE.format(root=tmp_path, teacher=ASSETS / TEACHER))
    assert train.main([f"--config={recipe}"]) == 0
    options = ["--benchmarks", "demo", "--limit", "2", "--report_to", "wandb"]
    assert evaluation.main(["--model", str(tmp_path / "run"), *options]) == 0
    # Their directories are named by the second, in which more than one may begin.
    runs = map(stored, offline.glob("offline-run-*"))
    trained, evaluated = sorted(runs, key=lambda each: str(each["run"]["start_time"]))
    for found in (trained, evaluated):
        assert found["run"]["run_id"] == trained["run"]["run_id"]
        assert found["run"]["display_name"] == "show/guided"
        assert found["run"]["tags"] == ["vocagnolm", "student", TEACHER]
        assert found["config"]["corpus"]["documents"] == 40
    assert evaluated["summary"]["eval/demo/partial/items"] == 2
