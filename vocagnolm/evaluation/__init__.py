"""Accuracy on math benchmarks: tasks, engines, grading, records and reports."""
