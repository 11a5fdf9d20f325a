"""Claims that are checked, experiments that are described, and the first report of speed on a GPU.

`python -m benchmarks` measures the claims and fails where one does not hold. An experiment is run
by its name: `python -m benchmarks.experiments.NAME`. `NOTEBOOK.md` has what was learned on the way.
"""
