"""The methods that the demo compares, and the options of their runs. No torch."""

from collections.abc import Sequence

from vocagnolm.fields import OptionError, aliases_of
from vocagnolm.run.parser import OPTIONS, check
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
}
# `run.train` gives these to every run.
_OF_EVERY_RUN = {"config", "student", "dataset", "output_dir"}


def flags_of(method: str, seed: int, options: Sequence[str] = ()) -> list[str]:
    """Return the flags that a run adds to the recipe, without its paths. Options are NAME=VALUE."""
    flags = [f"--seed={seed}"]
    flags += [f"--{option}" for option in options]
    flags += METHODS[method][1:]
    if "--method=vocagnolm" in flags:
        flags.append(f"--teacher={ASSETS / TEACHER}")
    return flags


def tokens_of(flags: Sequence[str]) -> int:
    """Count the student tokens that a run with these flags reads."""
    _, values, _ = check([f"--config={RECIPE}", *flags])
    steps = values["max_steps"]
    if steps < 1:
        raise OptionError("max_steps", f"must be at least 1 in the demo, got {steps}")
    return int(steps * values["global_batch_tokens"])


def check_options(methods: Sequence[str], options: Sequence[str]) -> None:
    """Reject options that the demo sets itself, and those that a run would reject."""
    set_by_demo = set(_OF_EVERY_RUN)
    for method in methods:
        for flag in flags_of(method, 0):
            set_by_demo.add(flag.removeprefix("--").partition("=")[0])
    aliases = aliases_of(*OPTIONS)
    for option in options:
        name, _, value = option.partition("=")
        name = name.replace("-", "_")
        if not value:
            raise OptionError("options", f"expected NAME=VALUE, got {option}")
        if aliases.get(name, name) in set_by_demo:
            raise OptionError("options", f"{option}: the demo sets this itself: leave it out")
    try:
        for method in methods:
            tokens_of(flags_of(method, 0, options))
    except ValueError as error:
        raise OptionError("options", f"{error}") from error
