"""Models: loading, quantization, sharding and adapters."""
