"""The command line of training and its recipes: `parse(argv)` makes a `Job`.

A wrong name, choice or range is an error before torch is imported, which takes seconds.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from runpy import run_path
from typing import TYPE_CHECKING, Any

import yaml

from vocagnolm.cli import OneLineErrors, log_main, near
from vocagnolm.method import Method
from vocagnolm.run.options import (
    DataOptions,
    LoadOptions,
    ModelOptions,
    PackOptions,
    RunOptions,
    check_together,
)

if TYPE_CHECKING:
    from transformers import HfArgumentParser

    from vocagnolm.run.job import Job

_SPEC = importlib.util.find_spec("transformers")
assert _SPEC
assert _SPEC.origin
_TRANSFORMERS = Path(_SPEC.origin).parent
if not TYPE_CHECKING:
    # By its path: importing the package before it takes a second.
    HfArgumentParser = run_path(str(_TRANSFORMERS / "hf_argparser.py"))["HfArgumentParser"]

OPTIONS = (ModelOptions, LoadOptions, DataOptions, PackOptions, Method, RunOptions)
_ABOUT = """\
Continual pretraining with the token losses of a teacher of any vocabulary.

    python train.py --teacher T --dry_run              # print the plan and exit
    accelerate launch train.py --teacher Qwen/Qwen2.5-Math-7B-Instruct
    accelerate launch train.py --config recipes/demo.yaml --teacher T

`vocagnolm train` is the same command. Given again, it resumes a run that ended
early. Exit status: 0 done, 2 a wrong argument or file, 3 losses became NaN or
infinite, 4 out of memory, 75 stopped by a signal with all saved, so that a
scheduler may start it again. docs/running.md has the details.
"""
_OF_TEACHERS = {
    *("teacher_revision", "teacher_tokenizer", "teacher_chat_template"),
    *("teacher_dtype", "teacher_quantization", "teacher_sharding"),
}
# Options of TRL whose values are of another kind here.
_OF_TRL = {
    "completion_only_loss": ": use --train_on",
    "assistant_only_loss": ": use --train_on",
    "packing": ": sequences of --max_length are always packed",
}


class Parser(OneLineErrors, HfArgumentParser):
    """Parser of dataclasses of options; those that are `first` come on top of the help."""

    def __init__(self, types: Sequence[Any]) -> None:
        super().__init__(
            prog="train.py",
            usage="train.py [--config RECIPE.yaml] --teacher TEACHER [OPTION ...]",
            description=_ABOUT,
            epilog="train.py --help_all adds the other fields of transformers.TrainingArguments.",
            formatter_class=_Help,
            allow_abbrev=False,
            add_help=False,
        )
        self._first = self.add_argument_group("most used")
        self._first.add_argument(
            "--config", type=str, help="YAML file of options and of a base; flags override it."
        )
        for each in types:
            self._add_dataclass_arguments(each)
        self.dataclass_types = list(types)

    def _parse_dataclass_field(self, parser: Any, field: Any) -> None:  # type: ignore[override]
        field = copy.copy(field)
        group = self._first if field.metadata.get("first") else parser
        field.metadata = {key: value for key, value in field.metadata.items() if key != "first"}
        HfArgumentParser._parse_dataclass_field(group, field)  # type: ignore[arg-type]


class _Help(argparse.RawDescriptionHelpFormatter):
    """One spelling of each option, the kind of its values, and its default in brackets."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        name = action.option_strings[0]
        if action.const is True:
            return name
        kind = "N" if action.type is int else "X" if action.type is float else "NAME"
        return f"{name} {self._format_args(action, kind)}".rstrip()

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        if default is None or default is False or default == "":
            return action.help
        shown = " ".join(map(str, default)) if isinstance(default, list) else default
        return f"{action.help or ''} [{shown}]".strip()


def parse(argv: Sequence[str]) -> Job:
    """Read the command line; `--config FILE.yaml` gives values that flags override.

    Raises:
        ValueError: an argument is wrong, in one line.
    """
    quick = Parser(OPTIONS)
    if {"-h", "--help", "--help_all"} & {*argv}:
        (_full_parser() if "--help_all" in argv else quick).print_help()
        raise SystemExit(0)
    recipe = quick.parse_known_args(argv)[0].config
    flags = as_flags(recipe_options(recipe)) if recipe else []
    try:
        _check_names(quick, flags)
    except ValueError as error:
        raise ValueError(f"--config {recipe}: {error}") from error
    _check_names(quick, argv)
    flags += argv
    # All checks that need no torch, on what recipe and flags say together.
    *options, _, _ = quick.parse_args_into_dataclasses(
        flags, return_remaining_strings=True, look_for_args_file=False
    )
    model, _, data, pack, method, run = options
    check_together(model, pack, method)

    # Only now, as importing torch takes seconds.
    from vocagnolm.run.job import Job, check_launch

    evaluates = data.eval_fraction or data.eval_dataset
    if evaluates:
        flags = ["--eval_strategy=steps", f"--eval_steps={run.save_steps}", *flags]
    made: Any = _full_parser().parse_args_into_dataclasses(flags, look_for_args_file=False)
    model, load, data, pack, method, run, _ = made
    if run.eval_strategy != "no" and not evaluates:
        raise ValueError("--eval_strategy needs --eval_fraction or --eval_dataset")
    run.output_dir = run.output_dir or _default_output_dir(model, method)
    run.set_batch(pack.max_length)
    job = Job(model, load, data, pack, method, run, recipe)
    check_launch(job)
    for line in _warnings(options):
        log_main(f"warning: {line}")
    return job


def _full_parser() -> Parser:
    """Return the parser that knows the other fields of `transformers.TrainingArguments`, too."""
    from vocagnolm.run.config import RunArguments

    return Parser((*OPTIONS[:-1], RunArguments))


def recipe_options(path: str | Path) -> dict[str, Any]:
    """Read a YAML file of options over those of its `base`, a file beside it."""
    try:
        options = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path} cannot be read: {error}") from error
    if not isinstance(options, dict):
        raise ValueError(f"--config {path} must be a mapping of options to values")
    if "config" in options:
        raise ValueError(f"--config {path} names another config: call it base")
    base = options.pop("base", None)
    if base is None:
        return options
    try:
        return recipe_options(Path(path).parent / base) | options
    except RecursionError:
        raise ValueError(f"--config {path} is its own base") from None


def as_flags(options: Mapping[str, Any]) -> list[str]:
    """Write options as the flags that they stand for; without those that are null."""
    flags: list[str] = []
    for name, value in options.items():
        if isinstance(value, list):
            flags += [f"--{name}", *map(str, value)]
        elif value is not None:
            flags.append(f"--{name}={json.dumps(value) if isinstance(value, dict) else value}")
    return flags


def _check_names(parser: Parser, words: Sequence[str]) -> None:
    """Raise a ValueError for an option that neither a parser nor Trainer knows; skip values."""
    known = [*parser._option_string_actions]
    # Its fields, from its source: importing it takes seconds.
    source = (_TRANSFORMERS / "training_args.py").read_text(encoding="utf-8")
    for name in re.findall(r"^    (\w+): ", source, flags=re.MULTILINE):
        known += [f"--{name}", f"--no_{name}"]
    for word in parser.parse_known_args(words)[1]:
        option = "--" + word.partition("=")[0][2:].replace("-", "_")
        if word.startswith("--") and option not in known:
            advice = _OF_TRL.get(option[2:]) or near(option, known)
            raise ValueError(f"unknown option {option}{advice}")


def _warnings(options: Sequence[Any]) -> Iterator[str]:
    """Yield a line for each option that was given and has no effect."""
    model, _, data, _, method, run = options
    given = set()
    for each in options:
        given |= {field.name for field in fields(each) if vars(each)[field.name] != field.default}
    evaluates = data.eval_fraction or data.eval_dataset
    of_adapters = {name for name in given if name.startswith("lora_")}
    unread = {field.name for field in fields(Method)} - {*method.in_effect()}
    for has_effect, names, condition in (
        (False, unread, f"with {method.as_typed}"),
        (method.choice == "guided", {"guidance_table_steps"}, f"with {method.as_typed}"),
        (model.teachers > 1, {"teacher_reduction"} - unread, "with one teacher"),
        (model.teacher, _OF_TEACHERS, "without --teacher"),
        (model.teacher_losses, {"missing_losses"}, "without --teacher_losses"),
        (model.use_peft, of_adapters, "without --use_peft"),
        (evaluates, {"eval_steps"}, "without --eval_fraction or --eval_dataset"),
        (run.push_to_hub, {"hub_model_id"}, "without --push_to_hub"),
    ):
        if not has_effect:
            for name in sorted(given & names):
                yield f"--{name} has no effect {condition}"


def _default_output_dir(model: ModelOptions, method: Method) -> str:
    names = [model.student, *(model.teacher or model.teacher_losses or ())]
    if method.method != "vocagnolm" or len(names) == 1:
        names.append(method.method)
    return os.path.join("runs", "__".join(Path(name).name for name in names))
