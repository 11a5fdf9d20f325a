"""The teacher-loss store: one number per teacher token, tied to characters."""
