"""Models before and after loading: where they come from, what is refused, adapters, attention."""

# Registers torch_varlen with transformers, so that every model loaded here can be given it.
from vocagnolm.models import attention as attention
