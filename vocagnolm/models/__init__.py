"""Models: loading, quantization, sharding, probes and adapters."""
