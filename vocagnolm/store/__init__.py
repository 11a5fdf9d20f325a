"""The store of teacher losses: one number per teacher token, tied to characters."""
