"""Claims that are checked, experiments that are described, estimates that are computed.

`python -m benchmarks` measures the claims and fails where one does not hold. An experiment or an
estimate is run by its name: `python -m benchmarks.experiments.NAME`, `benchmarks.estimates.NAME`.
"""
