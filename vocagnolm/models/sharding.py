"""A teacher that no single device holds: its weights sharded over the devices of a machine.

Not over all machines: the weights are gathered again for every forward pass, and between machines
that takes about as long as the pass itself (15 GB for a 7B teacher).
"""

import os

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

from vocagnolm.models.layers import decoder_layers
from vocagnolm.token_loss import add_token_losses


def devices_of_a_machine() -> int:
    """Return the processes of this machine, as the launcher says."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def require_several_devices() -> None:
    """Raise a ValueError where this machine has one process: nothing to spread a teacher over."""
    if devices_of_a_machine() < 2:
        raise ValueError(
            "--teacher_sharding node has no effect with one process on a machine: leave it out"
        )


def shard_inside_machine(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Spread the weights of a frozen model over the processes of each machine, in place.

    Every process must then call the model equally often, each with rows of its own. The losses are
    those of the whole model, bit for bit; one layer is gathered at a time. The model comes on the
    CPU, the same in all processes, and leaves frozen, each shard on its process's device.
    """
    world, local = torch.distributed.get_world_size(), devices_of_a_machine()
    if world % local:
        raise ValueError(
            f"--teacher_sharding node needs as many processes on every machine: {world} processes "
            f"cannot be {local} on each"
        )
    # Sharded inside a machine, replicated between machines.
    names = ("node", "device")
    mesh = init_device_mesh(device.type, (world // local, local), mesh_dim_names=names)["device"]
    model.train(False).requires_grad_(False)
    # Layer by layer, so that one is gathered at a time; then the embeddings and the head.
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    # Behind the sharding, so that its probe runs on the device.
    return add_token_losses(model)
