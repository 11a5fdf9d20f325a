"""The resumable Trainer in one's own script: what it saves, when, and in which order."""

from __future__ import annotations

import copy
import json
import signal
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback
from world import assert_equal_weights, make_trainer

from vocagnolm.conventions import NonFiniteLoss
from vocagnolm.training import resumable, run_directory
from vocagnolm.training.run_directory import newest_checkpoint

Make = Callable[..., Any]


@pytest.fixture
def make(blocks: Any, pair: tuple[Any, Any], tmp_path: Path) -> Make:
    """`make(**training)`: a trainer of 3 steps that saves after each."""

    def trainer(**training: Any) -> Any:
        saving = {"save_strategy": "steps", "save_steps": 1, "max_bad_steps": 0, **training}
        options = {"eval_dataset": [blocks[0]]}
        return make_trainer(tmp_path, blocks, *copy.deepcopy(pair), options=options, **saving)

    return trainer


def test_signal_handlers_are_restored_after_training(make: Make) -> None:
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    during: list[Any] = []

    class Look(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            during.extend(map(signal.getsignal, numbers))

    before = [*map(signal.getsignal, numbers)]
    trainer = make()
    trainer.add_callback(Look())
    trainer.train()
    assert not set(during) & set(before)
    assert [*map(signal.getsignal, numbers)] == before
    trainer._inner_training_loop = None  # an error
    with pytest.raises(TypeError):
        trainer.train()
    assert [*map(signal.getsignal, numbers)] == before


def test_trainer_trains_outside_the_main_thread(make: Make) -> None:
    trainer = make()
    thread = threading.Thread(target=trainer.train)
    thread.start()
    thread.join()
    assert trainer.state.global_step == 3


def test_trainer_resumes_from_the_newest_good_checkpoint(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match="no good checkpoint"):
        make().train(resume_from_checkpoint=True)
    whole = make()
    loss = whole.train().training_loss
    weights = tmp_path / "checkpoint-3" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    trainer = make()
    output = trainer.train(resume_from_checkpoint=True)
    assert f"not resuming from {weights.parent}: model.safetensors has " in caplog.text
    assert output.training_loss == output.metrics["train_loss"] == loss
    assert_equal_weights(whole.model.state_dict(), trainer.model.state_dict())


def test_newest_and_best_checkpoints_stay_even_where_a_run_is_moved(
    make: Make, tmp_path: Path
) -> None:
    def trainer() -> Any:
        best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1}
        made = make(save_total_limit=1, **best)
        # The loss falls, so the first checkpoint has the greatest.
        made.args.greater_is_better = True
        return made

    whole = trainer()
    whole.train()
    assert {path.name for path in tmp_path.glob("*-*")} == {"checkpoint-1", "checkpoint-3"}
    states = [json.loads(path.read_text()) for path in tmp_path.glob("*/trainer_state.json")]
    assert {state["best_model_checkpoint"] for state in states} == {str(tmp_path / "checkpoint-1")}
    moved = tmp_path.with_name(f"{tmp_path.name}-moved")
    tmp_path.rename(moved)
    resumed = trainer()
    resumed.args.output_dir = str(moved)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.best_global_step == 1
    assert_equal_weights(whole.model.state_dict(), resumed.model.state_dict())


def test_earlier_run_is_moved_aside_when_training_begins_anew(make: Make, tmp_path: Path) -> None:
    def begin(name: str, **options: Any) -> dict[str, torch.Tensor]:
        trainer = make()
        trainer.args.output_dir = str(tmp_path / name)
        trainer.train(**options)
        trainer.save_model()
        return trainer.model.state_dict()

    first = begin("run")
    assert_equal_weights(begin("run"), first)
    # The earlier run can still be resumed, at its end, which changes nothing.
    earlier = tmp_path / "run-earlier-1"
    assert (earlier / "model.safetensors").exists()
    assert newest_checkpoint(earlier) == str(earlier / "checkpoint-3")
    assert_equal_weights(begin(earlier.name, resume_from_checkpoint=True), first)


def test_model_that_a_run_reads_is_not_moved_aside(make: Make, tmp_path: Path) -> None:
    make(max_steps=1).train()
    trainer = make(max_steps=1)
    trainer.settings |= {"teacher": [str(tmp_path)]}
    with pytest.raises(ValueError, match="a teacher of"):
        trainer.train()
    assert newest_checkpoint(tmp_path)


def test_remains_of_a_killed_save_do_not_get_into_the_next(make: Make, tmp_path: Path) -> None:
    of_others = tmp_path / ".saving" / "checkpoint-2" / "rng_state_7.pth"
    of_others.parent.mkdir(parents=True)
    of_others.write_bytes(b"half a state")
    make().train()
    assert not list(tmp_path.rglob("rng_state_7.pth"))
    assert not (tmp_path / ".saving").exists()


def stop_at(trainer: Any, step: int) -> list[int]:
    """Act as if a signal came in a step; return a list that collects the steps that are saved."""
    saved, save = [], trainer._save_checkpoint

    class AskToStop(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            trainer.preemption.is_asked |= state.global_step + 1 == step

    def told(*args: Any) -> None:
        saved.append(trainer.state.global_step)
        save(*args)

    trainer.add_callback(AskToStop())
    trainer._save_checkpoint = told
    return saved


def test_stopped_run_is_saved_despite_best_only(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    epochs = {"eval_strategy": "epoch", "num_train_epochs": 2, "max_steps": -1}
    trainer = make(save_strategy="best", metric_for_best_model="loss", **epochs)
    monkeypatch.setattr(Trainer, "_determine_best_metric", lambda *args, **kwargs: False)
    steps = len(trainer.get_train_dataloader())
    saved = stop_at(trainer, steps)  # the last one of the first epoch
    trainer.train()
    assert trainer.preemption.is_agreed
    assert saved == [steps]
    assert newest_checkpoint(tmp_path) == str(tmp_path / f"checkpoint-{steps}")
    assert "eval_loss" in trainer.state.log_history[-2]


def test_checkpoint_due_at_a_stop_is_saved_once(make: Make) -> None:
    trainer = make()
    saved = stop_at(trainer, 2)
    trainer.train()
    assert saved == [1, 2]
    trainer.save_progress()
    assert saved == [1, 2]


def test_resumed_run_does_not_repeat_its_first_evaluation(make: Make, tmp_path: Path) -> None:
    evaluation = {"eval_strategy": "steps", "eval_steps": 3, "eval_on_start": True}
    make(**evaluation).train()
    again = make(**evaluation)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert [entry["step"] for entry in again.state.log_history if "eval_loss" in entry] == [0, 3]
    assert again.args.eval_on_start


def test_checkpoint_lacks_no_file_of_another_machine(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        resumable, "gather_object", lambda own: [*own, {"metrics_1.safetensors": 5}]
    )
    monkeypatch.setattr(run_directory, "_VISIBLE_S", 1)
    with pytest.raises(OSError, match=r"lacks metrics_1.safetensors"):
        make().train()
    assert newest_checkpoint(tmp_path) is None


def test_skipped_step_changes_nothing(make: Make) -> None:
    trainer = make(max_steps=5, save_strategy="no", optim="adamw_torch", max_bad_steps=1)
    losses, calls, seen = trainer._student_losses, [], []

    def break_second(*args: Any, **options: Any) -> Any:
        calls.append(args)
        found = losses(*args, **options)
        return found * torch.nan if len(calls) == 2 else found

    def break_fourth(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * torch.inf if len(calls) == 4 else gradient

    class Look(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            state = trainer.optimizer.state_dict()["state"].values()
            tensors = [*trainer.model.parameters(), *(t for s in state for t in s.values())]
            seen.append([tensor.detach().clone() for tensor in tensors])

    trainer._student_losses = break_second
    trainer.model.model.norm.weight.register_hook(break_fourth)
    trainer.add_callback(Look())
    trainer.train()
    changed = [not all(map(torch.equal, before, after)) for before, after in pairwise(seen)]
    assert changed == [False, True, False, True]
    assert all(tensor.isfinite().all() for tensor in seen[-1])
    # The loss of a dropped step is neither logged nor counted.
    logged = [log for log in trainer.state.log_history if "selected_fraction" in log]
    assert ["student_loss_nats" in log for log in logged] == [True, False, True, False, True]
    mean = sum(log["loss"] for log in logged if "loss" in log) / 3
    assert trainer.state.log_history[-1]["train_loss"] == pytest.approx(mean)


def test_run_stops_at_one_bad_step_more_than_allowed(make: Make) -> None:
    trainer = make(max_steps=5, save_strategy="no", max_bad_steps=1)
    losses = trainer._student_losses
    trainer._student_losses = lambda *given, **options: losses(*given, **options) * torch.nan
    with pytest.raises(NonFiniteLoss, match=r"step 2: the student.* learning_rate"):
        trainer.train()
    assert all(weight.isfinite().all() for weight in trainer.model.parameters())


def test_checkpoint_of_another_sharding_is_rejected(make: Make, tmp_path: Path) -> None:
    make(max_steps=1).train()
    (tmp_path / "checkpoint-1" / "pytorch_model_fsdp_0").mkdir()
    with pytest.raises(ValueError, match="with FSDP"):
        make(max_steps=1).train(resume_from_checkpoint=True)


def test_settings_of_the_method_stay_when_the_trainer_is_made(make: Make) -> None:
    trainer = make()
    trainer.args.top_k = 0.9
    with pytest.raises(ValueError, match=r"^args: .*changed"):
        trainer.train()


def test_log_is_saved_with_the_model(make: Make, tmp_path: Path) -> None:
    trainer = make(max_steps=1)
    trainer.train()
    trainer.save_model(str(tmp_path / "elsewhere"))
    assert not (tmp_path / "trainer_state.json").exists()
    trainer.save_model()
    assert (tmp_path / "trainer_state.json").exists()
    assert not (tmp_path / "elsewhere" / "trainer_state.json").exists()
