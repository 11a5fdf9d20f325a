"""Numbers that are computed from sizes and assumptions; nothing is run."""
