"""Models: loading, adapters, quantization, sharding, attention and its probes."""

# Registers torch_varlen with transformers, so that every model loaded here can be given it.
from vocagnolm.models import attention as attention
