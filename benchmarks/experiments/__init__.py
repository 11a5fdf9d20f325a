"""Measurements without a limit to hold: their tables are read, and stand in docs/."""
