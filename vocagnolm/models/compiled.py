"""Models whose layers are compiled."""

from torch import nn

from vocagnolm.models.cost import decoder_layers
from vocagnolm.token_loss import inner_model


def compile_layers(
    model: nn.Module,
    backend: str | None = None,
    mode: str | None = None,
    dynamic: bool | None = None,
) -> None:
    """Compile each repeated layer of a model in place, which leaves the names of its weights.

    Layers of one kind share what is compiled. The embeddings, the head in tiles and the alignment
    stay as they are. DDP and FSDP2 may wrap the model before or after. The options are those of
    `torch.compile`.
    """
    for layer in decoder_layers(inner_model(model)):
        layer.compile(backend=backend or "inductor", mode=mode, dynamic=dynamic)
