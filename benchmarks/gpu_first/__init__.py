"""The first report on a GPU, after `make test-gpu`: speed, memory, kernels.

    python -m benchmarks.gpu_first                  # on one GPU of 80 GB or more, in 10 minutes
    python -m benchmarks.gpu_first --scale tiny     # the same code on a CPU, in half a minute

Weights and ids are random, so no network, tokenizer or data is needed.
docs/speed.md explains the lines.
"""
