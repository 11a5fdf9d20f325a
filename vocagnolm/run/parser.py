"""The command line of `vocagnolm train`: recipes, flags, help, and checks without torch."""

from __future__ import annotations

import argparse
import importlib.util
import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from runpy import run_path
from typing import TYPE_CHECKING, Any

from vocagnolm.cli import OneLineErrors, check_names
from vocagnolm.doors import ALWAYS_ON, OTHER_NAMES, near, shell_door
from vocagnolm.fields import FirstHelp
from vocagnolm.method import Method
from vocagnolm.run.recipe import as_flags, find_file, recipe_options, without_replaced
from vocagnolm.shell.io import check_outside
from vocagnolm.shell.printing import log_main
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
    from transformers import HfArgumentParser

    from vocagnolm.training.settings import Job

# Find the package without importing it.
_SPEC = importlib.util.find_spec("transformers")
assert _SPEC
_TRANSFORMERS = Path(str(_SPEC.origin)).parent
if not TYPE_CHECKING:
    try:
        # Run the file by its path, because importing the package around it takes a second. If a
        # version of transformers has moved the file, import it.
        HfArgumentParser = run_path(str(_TRANSFORMERS / "hf_argparser.py"))["HfArgumentParser"]
    except (OSError, ImportError, KeyError):
        from transformers import HfArgumentParser
OPTIONS = (ModelOptions, DataOptions, GuidanceOptions, RunOptions)
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
it again.
docs/running.md has the details.
"""


class Parser(OneLineErrors, HfArgumentParser):
    """Parser of dataclasses of options. Those that are `first` are at the top of the help."""

    def __init__(self, types: Sequence[Any]) -> None:
        super().__init__(
            prog="vocagnolm train",
            usage="vocagnolm train [--config RECIPE] --teacher TEACHER [OPTION ...]",
            description=_ABOUT,
            epilog="--help_all also shows the other fields of transformers.TrainingArguments.",
            formatter_class=_Help,
            allow_abbrev=False,
            add_help=False,
        )
        self._first = self.add_argument_group("most used")
        self._first.add_argument(
            "--config",
            help="YAML file of options, or the name of a recipe. Flags override it.",
        )
        # Each class that declares fields has a group. A field belongs to the class that declares
        # it, whichever class inherits it.
        parts = (ModelOptions, DataOptions, LoadOptions, PackOptions, Method, RunOptions)
        self._groups: dict[str, Any] = {}
        for part in parts:
            group = self.add_argument_group(part._argument_group_name)
            self._groups |= {field.name: group for field in fields(part)}
        for kind in types:
            self._add_dataclass_arguments(kind)
        self.dataclass_types = list(types)
        # These names of TRL and transformers are accepted with a warning. Fields of Trainer's
        # arguments already exist.
        for name in ALWAYS_ON:
            if f"--{name}" not in self._option_string_actions:
                self.add_argument(f"--{name}", nargs="?", const=True, help=argparse.SUPPRESS)

    def names_in(self, words: Sequence[str]) -> set[str]:
        """Return the options in a command line under their own names, whatever their spelling."""
        actions = [self._option_string_actions.get(word.partition("=")[0]) for word in words]
        return {action.dest for action in actions if action}

    def _parse_dataclass_field(self, parser: Any, field: Any) -> None:  # type: ignore[override]
        is_first = isinstance(field.metadata.get("help"), FirstHelp)
        group: Any = self._first if is_first else self._groups.get(field.name, parser)
        HfArgumentParser._parse_dataclass_field(group, field)


class _Help(argparse.RawDescriptionHelpFormatter):
    """Shows one spelling of each option, the kind of its values, and its default in brackets."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        name = action.option_strings[0]
        if action.const is True:
            return name
        kind = "NAME"
        if action.type is int:
            kind = "N"
        elif action.type is float:
            kind = "X"
        return f"{name} {self._format_args(action, kind)}".rstrip()

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        if default is None or default is False or default == "":
            return action.help
        if isinstance(default, list):
            default = " ".join(map(str, default))
        return f"{action.help or ''} [{default}]".strip()


def check(argv: Sequence[str]) -> tuple[str | None, list[str], list[Any]]:
    """Make all checks of a command line that need no torch, which takes seconds to import.

    Returns:
        The file of `--config`; its options as flags, followed by those of the command line; the
        dataclasses of `OPTIONS` and a namespace of the other options.

    Raises:
        ValueError: an argument is wrong, in one line.
    """
    with shell_door():
        return _check(argv)


def _check(argv: Sequence[str]) -> tuple[str | None, list[str], list[Any]]:
    quick_parser = Parser(OPTIONS)
    if {"-h", "--help", "--help_all"} & {*argv}:
        # The full page needs transformers' arguments, whose import takes seconds.
        parser = _full_parser() if "--help_all" in argv else quick_parser
        parser.print_help()
        raise SystemExit(0)
    config = quick_parser.parse_known_args(argv)[0].config
    recipe = str(find_file("--config", config)) if config else None
    from_recipe = recipe_options(recipe) if recipe else {}
    for name, value in from_recipe.items():
        action = quick_parser._option_string_actions.get(f"--{name}")
        if isinstance(value, list) and action and action.nargs not in ("*", "+"):
            raise ValueError(f"--config {recipe}: --{name} takes one value, got {value}")
    from_recipe = without_replaced(from_recipe, quick_parser.names_in(argv))
    # The recipe becomes flags before the user's, because argparse takes the last one.
    flags = as_flags(from_recipe)
    try:
        # Check the recipe by itself, so that the message names its file.
        _check_names(quick_parser, flags)
    except ValueError as error:
        raise ValueError(f"--config {recipe}: {error}") from error
    _check_names(quick_parser, argv)
    flags += argv
    # Only the recipe and the flags together make a run, so options that exclude each other are
    # compared now, by the constructors of the dataclasses.
    *options, _ = quick_parser.parse_args_into_dataclasses(
        flags, return_remaining_strings=True, look_for_args_file=False
    )
    model, _, method, _, _ = options
    method.check_teacher(model.teachers, is_stored=bool(model.teacher_losses))
    return recipe, flags, options


def parse(argv: Sequence[str], *, on_hub: bool = False) -> Job:
    """Parse the command line. `--config RECIPE` gives values that flags override.

    With `on_hub`, models and corpora must be local, or on a hub within reach.

    Raises:
        ValueError: an argument is wrong, in one line.
    """
    with shell_door():
        return _parse(argv, on_hub=on_hub)


def _parse(argv: Sequence[str], *, on_hub: bool) -> Job:
    recipe, flags, options = check(argv)
    model, data, method, run, _ = options
    # Check names before torch is imported, so that a wrong one is reported at once.
    if on_hub:
        check_names(*options)

    # Import them only now, because they import torch.
    from vocagnolm.training.requirements import check_evaluation
    from vocagnolm.training.settings import Job

    # These defaults depend on other options. They come first, so the user's flags win.
    evaluates = data.eval_fraction or data.eval_dataset
    if evaluates:
        flags = ["--eval_strategy=steps", f"--eval_steps={run.save_steps}", *flags]
    # The batch size and the accumulation steps together decide the global batch. If only one of
    # them is given, the paper's applies.
    if run.global_batch_tokens is None and not (
        run.per_device_train_batch_size and run.gradient_accumulation_steps
    ):
        flags = [f"--global_batch_tokens={PAPER_TOKENS}", *flags]
    # The constructor of the arguments looks there for a run to resume.
    if not run.output_dir:
        flags = [*flags, f"--output_dir={model.output_dir(method.method)}"]
    parsed: Any = _full_parser().parse_args_into_dataclasses(flags, look_for_args_file=False)
    model, data, args, _ = parsed
    # Of several corpora, each has a loss, too.
    losses = ["loss", "*_loss"] if data.eval_fraction and len(data.dataset) > 1 else ["loss"]
    check_evaluation(args, losses if evaluates else [])
    sources = [*data.dataset, *([data.eval_dataset] if data.eval_dataset else [])]
    check_outside(args.output_dir, sources)
    job = Job(model, data, args, recipe)
    # The parser's last result is a namespace of the arguments that are in no dataclass.
    namespace = options[-1]
    for name, reason in ALWAYS_ON.items():
        if getattr(namespace, name) is not None:
            log_main(f"warning: --{name} has no effect: {reason}")
    return job


def _full_parser() -> Parser:
    """Return the parser that also knows the other fields of `transformers.TrainingArguments`."""
    from vocagnolm.training.config import VocAgnoConfig

    return Parser((ModelOptions, DataOptions, VocAgnoConfig))


def _check_names(parser: Parser, words: Sequence[str]) -> None:
    """Raise a ValueError for an option that neither a parser nor Trainer knows. Skip values."""
    known_options = set(parser._option_string_actions)
    for name in trainer_fields():
        known_options |= {f"--{name}", f"--no_{name}"}
    # What is left are unknown options and their values. A value may begin with one dash, such as
    # -1, but not with two.
    for word in parser.parse_known_args(words)[1]:
        option = "--" + word.partition("=")[0][2:].replace("-", "_")
        if not word.startswith("--") or option in known_options:
            continue
        answer = OTHER_NAMES.get(option[2:])
        if not answer:
            raise ValueError(f"unknown option {option}{near(option, known_options)}")
        if answer.startswith("--"):
            answer = f"here it is {answer}"
        raise ValueError(f"unknown option {option}: {answer}")


def trainer_fields(source: Path = _TRANSFORMERS / "training_args.py") -> list[str]:
    """List the fields of `transformers.TrainingArguments`, from its source if possible."""
    # Importing the class takes seconds, so the names are read from its source. If another version
    # looks different, output_dir is not found, and then the import is needed.
    text = source.read_text(encoding="utf-8") if source.exists() else ""
    names = re.findall(r"^    (\w+): ", text, flags=re.MULTILINE)
    if "output_dir" not in names:
        from transformers import TrainingArguments

        names = [field.name for field in fields(TrainingArguments)]
    return names
