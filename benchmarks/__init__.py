"""Claims that are checked, experiments that are described, and a first report of a GPU's speed.

`python -m benchmarks` measures the claims and fails if one does not hold. An experiment runs by its
name: `python -m benchmarks.experiments.NAME`. `NOTEBOOK.md` records the lessons.
"""
