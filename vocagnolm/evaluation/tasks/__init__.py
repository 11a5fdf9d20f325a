"""What is asked: benchmarks as data, their rows, their prompts."""
