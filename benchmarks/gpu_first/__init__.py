"""The first report of speed on a GPU, after `make test-gpu`: speed, memory, kernels.

    python -m benchmarks.gpu_first                  # on one GPU of 80 GB or more, in 10 minutes
    python -m benchmarks.gpu_first --scale tiny     # the same code on a CPU, in half a minute

Weights and ids are random, so that no network, tokenizer or data is needed, nor `datasets`. How to
read the lines is in docs/speed.md.
"""
