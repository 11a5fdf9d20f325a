"""A teacher spread over the devices of one machine."""

import os

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

from vocagnolm.fields import OptionError
from vocagnolm.models.cost import decoder_layers
from vocagnolm.token_loss import add_token_losses


def devices_of_a_machine() -> int:
    """Return the number of processes on this machine, according to the launcher."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def shard_inside_machine(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Spread the weights of a frozen model over the processes of each machine, in place.

    Then every process must call the model equally often, each with its own rows. The losses are
    those of the whole model, bit for bit. One layer is gathered at a time. The model must be on the
    CPU, the same in all processes. Afterwards each process has its shard on its device.
    """
    world, local = torch.distributed.get_world_size(), devices_of_a_machine()
    # The mesh is a rectangle, so all machines must have the same number of processes.
    if world % local:
        raise OptionError(
            "teacher_sharding", f"node: {world} processes are not {local} per machine"
        )
    # Weights are sharded inside a machine, where links are fast, and each machine has a whole copy.
    # Every process builds the mesh of all machines, because making its groups is collective.
    names = ("node", "device")
    mesh = init_device_mesh(device.type, (world // local, local), mesh_dim_names=names)["device"]
    model.train(False).requires_grad_(False)
    # Each layer is a unit, so that one is gathered at a time. The last call takes the rest: the
    # embeddings and the head.
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    # Test the losses after sharding, so that the test runs on the device.
    return add_token_losses(model)
