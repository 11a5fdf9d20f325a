"""The first report on a GPU, after `make test-gpu`: speed, memory, kernels.

    python -m benchmarks.gpu_first                  # on one GPU of 80 GB or more, in 50 minutes
    python -m benchmarks.gpu_first --minutes 9      # what matters most; the next call goes on
    python -m benchmarks.gpu_first --scale tiny     # the same code on a CPU, in two minutes

Weights and ids are random, so no network, tokenizer or data is needed. The table of docs/speed.md
is written at the end.
"""
