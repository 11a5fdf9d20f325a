"""The embedded world of `make demo`."""

# Names of runs: their labels, and what they add to the recipe.
METHODS = {
    "share": ("VocAgnoLM, share", "--method=vocagnolm", "--aggregation=share"),
    "vocagnolm": ("VocAgnoLM", "--method=vocagnolm"),
    "cpt": ("CPT", "--method=cpt"),
    "random": ("random 40 %", "--method=random"),
}
