"""Vocabulary-agnostic teacher-guided language modelling (VocAgnoLM, arXiv 2503.19123)."""
