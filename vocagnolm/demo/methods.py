"""The methods that the demo compares, and the options of their runs. No torch."""

from collections.abc import Sequence

from vocagnolm.run.parser import check
from vocagnolm.run.recipe import RECIPES
from vocagnolm.shell.io import ASSETS

RECIPE = RECIPES / "demo.yaml"
# It is one of the package's assets, made by benchmarks/make_demo_teacher.py.
TEACHER = "demo_teacher"
# {name of a run: (label, options that it adds to the recipe ...)}
METHODS = {
    "vocagnolm": ("VocAgnoLM", "--method=vocagnolm"),
    "share": ("VocAgnoLM, share", "--method=vocagnolm", "--aggregation=share"),
    "accept": ("VocAgnoLM, accept", "--method=vocagnolm", "--selection=accept"),
    "cpt": ("CPT", "--method=cpt"),
    "random": ("random 40 %", "--method=random"),
    "dft": ("DFT", "--selection=dft"),
    "stm": ("STM", "--selection=stm"),
    "eaft": ("EAFT", "--selection=eaft"),
}


def flags_of(method: str, seed: int, max_steps: int | None = None) -> list[str]:
    """Return the flags that a run adds to the recipe, without its paths."""
    flags = [f"--seed={seed}"]
    if max_steps:
        flags.append(f"--max_steps={max_steps}")
    flags += METHODS[method][1:]
    if "--method=vocagnolm" in flags:
        flags.append(f"--teacher={ASSETS / TEACHER}")
    return flags


def tokens_of(flags: Sequence[str]) -> int:
    """Count the student tokens that a run with these flags reads."""
    _, values, _ = check([f"--config={RECIPE}", *flags])
    return int(values["max_steps"] * values["global_batch_tokens"])
