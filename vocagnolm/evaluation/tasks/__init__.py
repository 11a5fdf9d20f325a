"""The tasks: benchmarks as data, their rows and their prompts."""
