"""Checkpoints that are read under another layout: number for number, or refused."""

from __future__ import annotations

import copy
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from vocagnolm.run.relayout import (
    LayoutError,
    change_of_layout,
    load_optimizer,
    load_weights,
)

# The last of three processes gets one row of seven, and none of two. There is but one in a process
# of tests: torch keeps what it knows of a mesh, with the place in it.
PROCESSES, RANK = 3, 2
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.1),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.1, momentum=0.9, centered=True),
}


class Student(nn.Module):
    """Two names of one weight, and tensors with fewer rows than processes."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, width)
        self.body = nn.Linear(width, 2)
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.randn(5))
        self.register_buffer("scale", torch.randn(()))


def make(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer with two groups, as Trainer makes one: some weights decay."""
    weights = list(model.parameters())
    groups = [{"params": weights[1:]}, {"params": weights[:1], "weight_decay": 0.0}]
    return OPTIMIZERS[name](groups)


def trained(name: str) -> tuple[Student, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Student()
    optimizer = make(name, model)
    for _ in range(2):
        for weight in model.parameters():
            weight.grad = torch.randn_like(weight)
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.05  # of the schedule
    return model, optimizer


def save_whole(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """As transformers does, which writes a tied weight once, and a large model in several files."""
    path.mkdir()
    state = {key: value for key, value in model.state_dict().items() if key != "head.weight"}
    first = state.popitem()
    save_file(dict([first]), path / "model-00001-of-00002.safetensors")
    save_file(state, path / "model-00002-of-00002.safetensors")
    save_file({"sums": torch.ones(2)}, path / "metrics_0.safetensors")
    torch.save(optimizer.state_dict(), path / "optimizer.pt")


def save_sharded(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """As Accelerate does."""
    parts = {
        "pytorch_model_fsdp_0": {"model": get_model_state_dict(model)},
        "optimizer_0": {"optimizer": get_optimizer_state_dict(model, optimizer)},
    }
    for name, part in parts.items():
        save(part, storage_writer=FileSystemWriter(path / name), no_dist=True)


@pytest.fixture
def one_of_several() -> Iterator[None]:
    """Be one of several processes that have nothing to say to one another."""
    distributed.init_process_group("fake", rank=RANK, world_size=PROCESSES, store=FakeStore())
    yield
    distributed.destroy_process_group()


def part_of(whole: Tensor) -> Tensor:
    """The rows of this process."""
    rows = -(-len(whole) // PROCESSES)
    return whole[RANK * rows : (RANK + 1) * rows]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sharded_checkpoint_is_read_exactly_when_resumed_whole(name: str, tmp_path: Path) -> None:
    saved, optimizer = trained(name)
    save_sharded(tmp_path / "checkpoint-2", saved, optimizer)
    model = Student()
    restored = make(name, model)
    load_weights(tmp_path / "checkpoint-2", model)
    load_optimizer(tmp_path / "checkpoint-2", restored)
    assert model.head.weight is model.embed.weight
    for key, tensor in saved.state_dict().items():
        assert torch.equal(model.state_dict()[key], tensor)
    ours, theirs = restored.state_dict(), optimizer.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for number, state in theirs["state"].items():
        assert ours["state"][number].keys() == state.keys()
        assert all(torch.equal(ours["state"][number][key], state[key]) for key in state)


def named(module: str, name: str) -> bytes:
    """A pickle of what a module calls so."""
    return f"c{module}\n{name}\n.".encode()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("crafted", "fault"),
    [
        (named("colorsys", "rgb_to_hsv"), "an index has no colorsys.rgb_to_hsv"),
        (named("colorsys", "Metadata"), "an index has no colorsys.Metadata"),
        (named("torch.distributed.checkpoint.metadata", "os"), "metadata.os)"),
        (named("torch", "load"), "an index has no torch.load"),
        (pickle.dumps([1]), "found a list"),
        (pickle.dumps("cut off")[:-2], "pickle data was truncated"),
        (b"ctorch.serialization\n_get_layout\n(S'x'\ntR.", "'x'"),
    ],
)
def test_index_is_read_as_records_or_refused(crafted: bytes, fault: str, tmp_path: Path) -> None:
    save_sharded(tmp_path, *trained("sgd"))
    sys.modules.pop("colorsys", None)
    index = tmp_path / "pytorch_model_fsdp_0" / ".metadata"
    index.write_bytes(crafted)
    with pytest.raises(OSError, match=f"{re.escape(str(index))} is no index of shards") as raised:
        load_weights(tmp_path, Student())
    assert fault in str(raised.value)
    assert "colorsys" not in sys.modules


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_whole_checkpoint_is_read_exactly_when_resumed_sharded(
    name: str, one_of_several: None, tmp_path: Path
) -> None:
    saved, optimizer = trained(name)
    save_whole(tmp_path / "checkpoint-2", saved, optimizer)
    model = Student()
    fully_shard(model)
    restored = make(name, model)
    load_weights(tmp_path / "checkpoint-2", model)
    load_optimizer(tmp_path / "checkpoint-2", restored)
    for ours, theirs in zip(model.buffers(), saved.buffers(), strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(restored.param_groups, optimizer.param_groups, strict=True):
        assert all(ours[key] == theirs[key] for key in theirs.keys() - {"params"})
    parameters = dict(saved.named_parameters())
    for key, weight in model.named_parameters():
        assert isinstance(weight, DTensor)
        assert torch.equal(weight.to_local(), part_of(parameters[key]))
        ours, theirs = restored.state.get(weight, {}), optimizer.state.get(parameters[key], {})
        assert ours.keys() == theirs.keys()
        for what, value in theirs.items():
            found = ours[what].to_local() if value.ndim else ours[what]
            assert torch.equal(found, part_of(value) if value.ndim else value)
            assert found.untyped_storage().nbytes() == found.nbytes, "the whole tensor is held"
    if (open_files := Path("/proc/self/maps")).exists():
        assert str(tmp_path) not in open_files.read_text()


def test_restored_optimizer_steps_alike_when_resumed_sharded(
    one_of_several: None, tmp_path: Path
) -> None:
    saved, optimizer = trained("adamw")
    save_whole(tmp_path / "checkpoint-2", saved, optimizer)
    before = (tmp_path / "checkpoint-2" / "optimizer.pt").read_bytes()
    model = Student()
    fully_shard(model)
    restored = make("adamw", model)
    load_weights(tmp_path / "checkpoint-2", model)
    load_optimizer(tmp_path / "checkpoint-2", restored)
    for weight in (*model.parameters(), *saved.parameters()):
        weight.grad = torch.ones_like(weight)
    restored.step()
    optimizer.step()
    for ours, theirs in zip(model.parameters(), saved.parameters(), strict=True):
        assert isinstance(ours, DTensor)
        assert torch.equal(ours.to_local(), part_of(theirs))
    assert (tmp_path / "checkpoint-2" / "optimizer.pt").read_bytes() == before


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("fault", ["shape", "too many", "missing"])
def test_weights_of_another_student_are_rejected(fault: str, tmp_path: Path) -> None:
    saved, optimizer = trained("sgd")
    save_sharded(tmp_path / "checkpoint-2", saved, optimizer)
    model = Student(width=5 if fault == "shape" else 4)
    if fault == "too many":
        del model.body
    elif fault == "missing":
        model.other = nn.Linear(2, 2)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(LayoutError, match="of its weights are missing, too many or of another"):
        load_weights(tmp_path / "checkpoint-2", model)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_whole_weights_are_rejected_without_fsdp2(tmp_path: Path) -> None:
    save_whole(tmp_path / "checkpoint-2", *trained("sgd"))
    with pytest.raises(LayoutError, match="set fsdp_version: 2"):
        load_weights(tmp_path / "checkpoint-2", Student())


class Quantized(torch.optim.AdamW):
    """An optimizer that is not PyTorch's."""


def test_optimizer_with_unknown_state_is_rejected(
    tmp_path: Path,
) -> None:
    model, optimizer = trained("adamw")
    save_whole(tmp_path / "checkpoint-2", model, optimizer)
    save_whole(tmp_path / "factors", model, torch.optim.Adafactor(model.parameters()))
    foreign = Quantized(optimizer.param_groups)
    with pytest.raises(LayoutError, match="with the state of Quantized: go on under the layout"):
        load_optimizer(tmp_path / "checkpoint-2", foreign)
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    one_group = torch.optim.AdamW(weights)
    with pytest.raises(LayoutError, match="with the state of AdamW"):
        load_optimizer(tmp_path / "checkpoint-2", one_group)
    factored = torch.optim.Adafactor(model.parameters())
    factored.step()
    torch.save(factored.state_dict(), tmp_path / "factors" / "optimizer.pt")
    with pytest.raises(LayoutError, match="with the state of Adafactor"):
        load_optimizer(tmp_path / "factors", torch.optim.Adafactor(model.parameters()))


def test_change_of_layout_says_what_differs(tmp_path: Path) -> None:
    whole, sharded, gathered = (tmp_path / name for name in ("whole", "sharded", "gathered"))
    (sharded / "pytorch_model_fsdp_0").mkdir(parents=True)
    gathered.mkdir()
    (gathered / "pytorch_model_fsdp.bin").touch()
    assert change_of_layout(whole, False) is None
    assert change_of_layout(sharded, True) is None
    assert change_of_layout(gathered, True) is None
    assert f"{whole} was saved whole and goes on sharded: " in str(change_of_layout(whole, True))
    assert f"{sharded} was saved sharded and goes on whole: " in str(
        change_of_layout(sharded, False)
    )
    with pytest.raises(LayoutError, match="FULL_STATE_DICT and can go on only so"):
        change_of_layout(gathered, False)
