"""A teacher spread over the devices of a machine."""

import os

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

from vocagnolm.token_loss import add_token_losses


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the repeated layers, which a model says must not be split; some models name none."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def devices_of_a_machine() -> int:
    """Return the processes of this machine, as the launcher says."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def shard_inside_machine(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Spread the weights of a frozen model over the processes of each machine, in place.

    Every process must then call the model equally often, each with rows of its own. The losses are
    those of the whole model, bit for bit; one layer is gathered at a time. The model comes on the
    CPU, the same in all processes, and leaves frozen, each shard on its process's device.
    """
    if not (layers := decoder_layers(model)):
        raise ValueError(
            f"{type(model).__name__} names no decoder layers (_no_split_modules), which "
            "--teacher_sharding shards one by one: leave it out"
        )
    world, local = torch.distributed.get_world_size(), devices_of_a_machine()
    # The mesh is a rectangle, so all machines must have as many processes.
    if world % local:
        raise ValueError(f"--teacher_sharding node: {world} processes are not {local} per machine")
    # The weights are sharded inside of a machine, where links are fast, and each machine has a
    # whole copy. Every process builds the mesh of all, because making its groups is collective.
    names = ("node", "device")
    mesh = init_device_mesh(device.type, (world // local, local), mesh_dim_names=names)["device"]
    model.train(False).requires_grad_(False)
    # Each layer is a unit, so that one is gathered at a time. The last call takes what is left:
    # the embeddings and the head.
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    # The probe of the losses comes after the sharding, so that it runs on the device.
    return add_token_losses(model)
