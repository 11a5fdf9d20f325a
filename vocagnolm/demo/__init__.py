"""The embedded world of `make demo`."""
