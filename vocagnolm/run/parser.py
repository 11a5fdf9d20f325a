"""The command `vocagnolm train`: recipes, flags, help, and checks without torch."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vocagnolm.cli import OneLineErrors, OptionsParser, check_hub_names, shell
from vocagnolm.fields import options_of, suggestion
from vocagnolm.method import Method
from vocagnolm.run.recipe import as_flags, find_file, recipe_options, without_replaced
from vocagnolm.shell.io import log_main
from vocagnolm.training.options import (
    PAPER_TOKENS,
    DataOptions,
    GuidanceOptions,
    LoadOptions,
    ModelOptions,
    PackOptions,
    RunOptions,
)

if TYPE_CHECKING:
    from vocagnolm.training.job import Job

OPTIONS = (ModelOptions, DataOptions, GuidanceOptions, RunOptions)
# The groups of the help. Each class that declares options has one.
_GROUPS = (ModelOptions, DataOptions, LoadOptions, PackOptions, Method, RunOptions)
_ABOUT = """\
Continual pretraining with the token losses of a teacher of any vocabulary.

    vocagnolm train --teacher T --dry_run              # print the plan and exit
    vocagnolm train --teacher Qwen/Qwen2.5-Math-7B-Instruct --accelerate_config ddp
    vocagnolm train --config paper/table1/cpt          # vocagnolm recipes lists them
    accelerate launch train.py --teacher T             # the same command

--accelerate_config starts several processes. It takes a file of Accelerate or
one of the package's: ddp, fsdp2, ... It can be combined with --num_processes,
--num_machines, --machine_rank, --main_process_ip, --main_process_port,
--gpu_ids and --mixed_precision.

If a run is interrupted, the same command resumes it. Exit status: 0 done, 2 a
wrong argument or file, 3 a loss or gradient became NaN or infinite, 4 out of
memory, 75 stopped by a signal; everything is saved, and a scheduler may start
it again. docs/running.md has the details.
"""
_OUT_OF_MEMORY = (
    "try, in order of what it costs, --per_device_train_batch_size (the global batch stays the "
    "same), --activation_checkpointing, --teacher_losses (a store instead of a teacher in memory)"
)


@shell("vocagnolm train", out_of_memory=_OUT_OF_MEMORY, resumable=True)
def main(argv: Sequence[str] | None = None) -> int:
    """Show help, or run the job. Returns the exit status."""
    job = parse(sys.argv[1:] if argv is None else argv, on_hub=True)
    # Importing the trainer takes seconds, which help and wrong options do not need.
    from vocagnolm.run.train import train

    return train(job)


def check(argv: Sequence[str]) -> tuple[str | None, dict[str, Any], list[str]]:
    """Make all checks of a command line that need no torch, which takes seconds to import.

    Returns:
        The file of `--config`; the values of the package's options that it or the command line
        gives; the words for Trainer's own options.

    Raises:
        ValueError: an argument is wrong, in one line.
    """
    parser = make_parser()
    if {"-h", "--help", "--help_all"} & set(argv):
        parser.print_help()
        if "--help_all" in argv:
            _trainer_parser().print_help()
        raise SystemExit(0)
    typed, _ = parser.parse_known_args(argv)
    recipe = str(find_file("config", typed.config)) if "config" in typed else None
    flags: list[str] = []
    if recipe:
        options = recipe_options(recipe)
        _check_names(parser, options, f"--config {recipe}: ")
        flags = as_flags(without_replaced(options, vars(typed)))
    # The recipe comes before the user's words, because argparse takes the last value.
    namespace, words = parser.parse_known_args(flags + list(argv))
    # The others are values. One may begin with one dash, such as -1, but not with two.
    unread = [word for word in words if word.startswith("--")]
    names = [word[2:].partition("=")[0].replace("-", "_") for word in unread]
    _check_names(parser, names)
    values = vars(namespace)
    values.pop("config", None)
    # The classes check their own options, and options that exclude each other.
    ModelOptions(**_of_class(values, ModelOptions))
    DataOptions(**_of_class(values, DataOptions))
    guidance = GuidanceOptions(**_of_class(values, GuidanceOptions))
    # A loop over methods may name a teacher for all of them.
    for name in ("teacher", "teacher_losses"):
        if not guidance.asks_teacher and values.pop(name, None):
            log_main(f"warning: --{name} has no effect with {guidance.guidance.as_typed}")
    model = ModelOptions(**_of_class(values, ModelOptions))
    RunOptions(**_of_class(values, RunOptions))
    guidance.check_teachers(model.teachers, is_stored=bool(model.teacher_losses))
    return recipe, values, words


def parse(argv: Sequence[str], *, on_hub: bool = False, updates: bool = True) -> Job:
    """Parse the command line. `--config RECIPE` gives values that flags override.

    With `on_hub`, models and corpora must be local, or on a hub within reach. Without `updates`,
    no global batch is divided into micro-batches.

    Raises:
        ValueError: an argument is wrong, in one line.
    """
    recipe, values, words = check(argv)
    model = ModelOptions(**_of_class(values, ModelOptions))
    data = DataOptions(**_of_class(values, DataOptions))
    # Check names before torch is imported, so that a wrong one is reported at once.
    if on_hub:
        declared = {option.name: option for option in options_of(*OPTIONS)}
        check_hub_names(vars(model) | vars(data) | values, declared)

    # Import them only now, because they import torch.
    from vocagnolm.training.config import VocAgnoConfig, settings_in
    from vocagnolm.training.job import Job

    arguments = _of_class(values, VocAgnoConfig)
    if words:
        arguments |= vars(_trainer_parser().parse_args(words))
    # This default depends on other options.
    if data.eval_fraction or data.eval_dataset:
        arguments.setdefault("eval_strategy", "steps")
    # The constructor of the arguments looks there for a run to resume.
    if not arguments.get("output_dir"):
        arguments["output_dir"] = model.output_dir(arguments.get("method", Method.method))
    # The batch size and the accumulation steps together decide the global batch. If only one of
    # them is given, the paper's applies, or that of the run to resume.
    may_lower_step = False
    if not updates:
        arguments |= {"global_batch_tokens": None, "gradient_accumulation_steps": 1}
    elif not {"per_device_train_batch_size", "gradient_accumulation_steps"} <= arguments.keys():
        begun = settings_in(arguments["output_dir"]).get("global_batch_tokens")
        may_lower_step = "global_batch_tokens" not in arguments and not begun
        arguments.setdefault("global_batch_tokens", begun or PAPER_TOKENS)
    return Job(model, data, VocAgnoConfig(**arguments), recipe, may_lower_step)


def make_parser() -> OptionsParser:
    """Return the parser of the package's own options."""
    parser = OptionsParser(
        "vocagnolm train",
        _ABOUT,
        usage="vocagnolm train [--config RECIPE] --teacher TEACHER [OPTION ...]",
        epilog="--help_all also shows the other fields of transformers.TrainingArguments.",
    )
    parser.first.add_argument(
        "--config", help="YAML file of options, or the name of a recipe. Flags override it."
    )
    for kind in _GROUPS:
        parser.add_options(kind, kind._argument_group_name)
    return parser


def _trainer_parser() -> argparse.ArgumentParser:
    """Return the parser of the other fields of `transformers.TrainingArguments`."""
    from transformers import HfArgumentParser

    from vocagnolm.training.config import VocAgnoConfig

    class Parser(OneLineErrors, HfArgumentParser):
        """A parser of transformers with errors of one line."""

    kind: Any = VocAgnoConfig
    parser = Parser(kind, prog="transformers.TrainingArguments", add_help=False)
    for action in parser._actions:
        # The result has only what is given.
        action.default = argparse.SUPPRESS
    return parser


def _of_class(values: dict[str, Any], kind: type) -> dict[str, Any]:
    """Return the values of the options that a class declares."""
    names = {declared.name for declared in options_of(kind)}
    return {name: values[name] for name in names & values.keys()}


def _check_names(parser: OptionsParser, names: Iterable[str], where: str = "") -> None:
    """Reject an option that neither this package nor Trainer has."""
    known = trainer_fields() | parser.options.keys()
    for name in names:
        if name not in known and name.removeprefix("no_") not in known:
            spellings = [f"--{known_name}" for known_name in known]
            hint = suggestion(f"--{name}", spellings)
            raise ValueError(f"{where}unknown option --{name}{hint}")


def trainer_fields() -> set[str]:
    """Name the fields of `transformers.TrainingArguments`."""
    # Importing the class takes seconds, so the names are read from its source.
    spec = importlib.util.find_spec("transformers")
    source = Path(str(spec and spec.origin)).with_name("training_args.py")
    names = set()
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names
