"""The embedded world of `make demo`."""

# Names of runs, and what they add to the recipe.
METHODS = {
    "share": ("--method=vocagnolm", "--aggregation=share"),
    "vocagnolm": ("--method=vocagnolm",),
    "cpt": ("--method=cpt",),
    "random": ("--method=random",),
}
