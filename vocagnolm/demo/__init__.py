"""The embedded world of `make demo`."""

METHODS = ("vocagnolm", "cpt", "random")
