"""What a job owes its machine: whole files, one lock, a manifest, processes that agree."""
