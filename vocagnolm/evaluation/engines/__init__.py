"""Prompts in, greedy completions out."""
