"""train.py on real text with real tokenizers, where `../shared` is at hand.

The models have the teachers' true architectures at a small width, and random weights.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from vocagnolm.run import main as train

STEPS = 30


def make_model(source: Path, target: Path) -> Path:
    """A small random model of the architecture of `source`, with its tokenizer."""
    config = AutoConfig.from_pretrained(source)
    heads_per_key = config.num_attention_heads // config.num_key_value_heads
    config.update(
        {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": max(1, 4 // heads_per_key),
            "head_dim": 8,
            "layer_types": getattr(config, "layer_types", None) and config.layer_types[:2],
        }
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(target)
    for file in source.glob("*token*.json"):
        shutil.copy(file, target)
    return target


@pytest.fixture(scope="module")
def corpus(shared_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first documents of GSM8K and PlanetMath."""
    directory = tmp_path_factory.mktemp("corpus")
    for name, count in (("gsm8k_train", 300), ("planetmath", 60)):
        with open(shared_dir / "data" / "corpora" / f"{name}.jsonl", encoding="utf-8") as lines:
            kept = [line for line, _ in zip(lines, range(count), strict=False)]
        (directory / f"{name}.jsonl").write_text("".join(kept), encoding="utf-8")
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("teacher", ["deepseek-math-7b"])
def test_train_learns_saves_resumes_and_loads(
    teacher: str,
    corpus: Path,
    shared_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tokenizers = shared_dir / "tokenizers"
    student_dir = make_model(tokenizers / "tinyllama", tmp_path / "student")
    teacher_dir = make_model(tokenizers / teacher, tmp_path / "teacher")

    def arguments(output: str) -> list[str]:
        return [
            *("--student", str(student_dir), "--teacher", str(teacher_dir)),
            *("--dataset", str(corpus), "--max_length", "128", "--global_batch_tokens", "256"),
            *("--max_steps", str(STEPS), "--save_steps", str(STEPS // 2), "--logging_steps", "5"),
            *("--learning_rate", "1e-2", "--use_cpu", "--disable_tqdm", "true"),
            *("--output_dir", str(tmp_path / output)),
        ]

    assert train.main(arguments("run")) == 0
    assert "100.00% of the text tokens mapped" in capsys.readouterr().out
    state = json.loads((tmp_path / "run" / "trainer_state.json").read_text())
    losses = [log["student_loss_nats"] for log in state["log_history"] if "loss" in log]
    assert state["global_step"] == STEPS
    assert losses[-1] < losses[0] - 1, losses

    # A run that was cut off half-way goes on by itself, and ends at the same place.
    half = f"checkpoint-{STEPS // 2}"
    shutil.copytree(tmp_path / "run" / half, tmp_path / "cut" / half)
    shutil.copy(tmp_path / "run" / "run.json", tmp_path / "cut" / "run.json")
    assert train.main(arguments("cut")) == 0
    assert "resuming from" in capsys.readouterr().out
    whole, resumed = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)
        for name in ("run", "cut")
    )
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run")
    original = AutoTokenizer.from_pretrained(student_dir)
    text = "The sum of 12 and 30 is"
    assert tokenizer(text).input_ids == original(text).input_ids
    generated = whole.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=4)
    assert generated.shape[1] > len(tokenizer(text).input_ids)
    card = (tmp_path / "run" / "README.md").read_text()
    assert f", guided by {teacher_dir.name}." in card
    assert '"top_k": 0.4' in card
