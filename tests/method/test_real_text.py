"""train.py with real tokenizers.

The models have the teachers' true architectures at a small width, and random weights.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from real_data import real_data
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from vocagnolm.run.options import main


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


@pytest.mark.slow
def test_train_maps_all_tokens_and_learns(
    training_texts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = {"student": "tinyllama", "teacher": "deepseek-math-7b"}
    places = [
        f"--{role}={make_model(real_data(f'tokenizers/{name}'), tmp_path / role)}"
        for role, name in models.items()
    ]
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in training_texts))
    options = "--max_length=128 --global_batch_tokens=256 --max_steps=30 --logging_steps=5"
    options += " --learning_rate=1e-2 --use_cpu --disable_tqdm=true --report_to=none"
    out = tmp_path / "run"
    assert main([*places, f"--dataset={corpus}", *options.split(), f"--output_dir={out}"]) == 0
    assert "100.00% of the text tokens mapped" in capsys.readouterr().out
    state = json.loads((out / "trainer_state.json").read_text())
    losses = [log["student_loss_nats"] for log in state["log_history"] if "loss" in log]
    assert losses[-1] < losses[0] - 1, losses
    text = "The sum of 12 and 30 is"
    saved, original = (AutoTokenizer.from_pretrained(x) for x in (out, tmp_path / "student"))
    assert saved(text).input_ids == original(text).input_ids
