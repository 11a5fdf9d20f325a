"""The tasks: benchmarks as data, their rows, their prompts."""
