"""Measurements without limits. docs/ and `NOTEBOOK.md` show their tables."""
