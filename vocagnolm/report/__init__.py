"""Readings of finished runs and of tokenizers: audits, comparisons, the paper's figures."""
