"""Plain pretraining against `transformers.Trainer`, one row for each field or behaviour.

In float64 and with SGD an error of scale shows.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Subset
from transformers import Trainer, TrainerCallback, TrainingArguments
from world import MAX_LENGTH, make_trainer

from vocagnolm.collator import PackedCollator
from vocagnolm.packing import Blocks

EVENTS = (
    "train_begin train_end epoch_begin epoch_end step_begin step_end substep_end "
    "pre_optimizer_step optimizer_step log evaluate save prediction_step"
).split()
EPOCHS = {"max_steps": -1, "num_train_epochs": 2}
TWO_HALVES = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}
BEST = EVALUATED | {"save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True}
CASES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "accumulation": TWO_HALVES,
    "max_grad_norm": {"max_grad_norm": 0.1},
    "evaluation": EVALUATED,
    "ragged accumulation": EPOCHS | TWO_HALVES | {"gradient_accumulation_steps": 4},
    "part of an epoch": EPOCHS | {"num_train_epochs": 1.5},
    "ragged batch": EPOCHS | {"per_device_train_batch_size": 5},
    "data_seed": EPOCHS | {"data_seed": 7},
    "dataloader_num_workers": {"dataloader_num_workers": 2, "dataloader_persistent_workers": True},
    "weight_decay": {"optim": "adamw_torch", "learning_rate": 1e-3, "weight_decay": 0.1},
    "adafactor": {"optim": "adafactor", "learning_rate": 1e-3},
    "cosine": {"lr_scheduler_type": "cosine", "warmup_steps": 0.5},
    "plateau": EVALUATED | {"lr_scheduler_type": "reduce_lr_on_plateau"},
    "neftune_noise_alpha": {"neftune_noise_alpha": 5.0},
    "gradient_checkpointing": {"gradient_checkpointing": True},
    "logging_strategy epoch": EPOCHS | {"logging_strategy": "epoch"},
    "logging_strategy no": {"logging_strategy": "no"},
    "logging_first_step": {"logging_first_step": True},
    "eval_strategy epoch": EPOCHS | {"eval_strategy": "epoch"},
    "eval_delay": EVALUATED | {"eval_delay": 3},
    "eval_on_start": EVALUATED | {"eval_on_start": True},
    "eval_accumulation_steps": EVALUATED | {"eval_accumulation_steps": 1},
    "per_device_eval_batch_size": EVALUATED | {"per_device_eval_batch_size": 1},
    "save_strategy epoch": EPOCHS | {"save_strategy": "epoch"},
    "save_total_limit": {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2},
    "save_strategy best": BEST | {"save_strategy": "best", "metric_for_best_model": "loss"},
    "load_best_model_at_end": BEST,
}
# Upstream's logits are float32, which these optimizers' divisions make visible.
TOLERANCES = {"weight_decay": 1e-5, "adafactor": 1e-5}


class Events(TrainerCallback):
    """Names of all events of a run, in order."""

    def __init__(self) -> None:
        self.names: list[str] = []
        for name in EVENTS:
            setattr(self, f"on_{name}", lambda *a, _name=name, **k: self.names.append(_name))


def plain(items: list[Any]) -> dict[str, Any]:
    """Collate what a Trainer that knows nothing of blocks reads."""
    batch: Any = PackedCollator(MAX_LENGTH)(items)
    return {name: batch[name] for name in ("input_ids", "labels", "position_ids")}


def upstream(trainer: Any, model: Any, events: Events) -> Trainer:
    """`transformers.Trainer` with the arguments and data of one of ours."""
    args: TrainingArguments = copy.copy(trainer.args)
    args.output_dir = f"{args.output_dir}-upstream"
    # Ours ends an epoch with its last whole batch. Upstream's option would cut evaluations, too.
    args.dataloader_drop_last = args.eval_strategy == "no"
    data = {name: getattr(trainer, name) for name in ("train_dataset", "eval_dataset")}
    return Trainer(model, args, plain, **data, callbacks=[events])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_pretraining_is_that_of_the_upstream_trainer(
    name: str, blocks: Blocks, pair: tuple[Any, Any], tmp_path: Path
) -> None:
    training = CASES[name]
    data: dict[str, Any] = {"eval_dataset": Subset(blocks, range(16, 22))}
    own, other = Events(), Events()
    ours = make_trainer(
        tmp_path / "run",
        Subset(blocks, range(16)),
        copy.deepcopy(pair[0]),
        options={"method": "cpt", "callbacks": [own], **data},
        **{"per_device_train_batch_size": 4, "max_steps": 6, "learning_rate": 1e-3, **training},
    )
    theirs = upstream(ours, pair[0], other)
    for trainer in (ours, theirs):
        torch.manual_seed(ours.args.seed)  # theirs draws blocks by it
        trainer.train()
    assert ours.state.global_step == theirs.state.global_step > 0
    assert own.names == other.names
    for mine, yours in zip(ours.state.log_history, theirs.state.log_history, strict=True):
        for key in ("step", "epoch", "learning_rate", "loss", "eval_loss", "grad_norm"):
            assert mine.get(key, 0.0) == pytest.approx(yours.get(key, 0.0), rel=2e-3), key
    assert ours.state.best_global_step == theirs.state.best_global_step
    directories = [Path(trainer.args.output_dir) for trainer in (ours, theirs)]
    kept = [sorted(path.name for path in directory.glob("check*")) for directory in directories]
    assert kept[0] == kept[1]
    pairs = zip(ours.model.named_parameters(), theirs.model.parameters(), strict=True)
    for (which, a), b in pairs:
        assert (a - b).abs().max() <= TOLERANCES.get(name, 1e-7), which
