"""The command line of training and its recipes: `parse(argv)` makes a `Job`.

A wrong name, choice or range is told before torch is imported, which takes seconds.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from runpy import run_path
from typing import TYPE_CHECKING, Any, NoReturn

import yaml

from vocagnolm.cli import OneLineErrors, near, note
from vocagnolm.method import Method
from vocagnolm.run.options import DataOptions, LoadOptions, ModelOptions, PackOptions, RunOptions

if TYPE_CHECKING:
    from transformers import HfArgumentParser

    from vocagnolm.run.job import Job


def _of_transformers(name: str) -> Path:
    package = importlib.util.find_spec("transformers")
    assert package
    assert package.origin
    return Path(package.origin).with_name(name)


if not TYPE_CHECKING:
    # By its path: importing the package before it takes a second.
    HfArgumentParser = run_path(str(_of_transformers("hf_argparser.py")))["HfArgumentParser"]

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
_OF_ADAPTERS = {each.name for each in fields(ModelOptions) if each.name.startswith("lora_")}
# Options of TRL whose values are of another kind here.
_OF_TRL = {
    "completion_only_loss": ": use --train_on",
    "assistant_only_loss": ": use --train_on",
    "packing": ": sequences of --max_length are always packed",
}


class Parser(OneLineErrors, HfArgumentParser):
    """Parser of dataclasses of options, without the fields of some names."""

    def __init__(self, types: Sequence[Any], without: Sequence[str] = ()) -> None:
        super().__init__(
            prog="train.py",
            usage="train.py [--config RECIPE.yaml] --teacher TEACHER [OPTION ...]",
            description=_ABOUT,
            epilog="train.py --help_all adds the other fields of transformers.TrainingArguments.",
            formatter_class=_Help,
            allow_abbrev=False,
            add_help=False,
        )
        self._without = without
        self._first = self.add_argument_group("most used")
        self._first.add_argument(
            "--config", type=str, help="YAML file of options and of a base; flags override it."
        )
        for each in types:
            self._add_dataclass_arguments(each)
        self.dataclass_types = list(types)

    def error(self, message: str) -> NoReturn:
        """Raise, with one of the two spellings that HfArgumentParser gives an option."""
        super().error(re.sub(r"/--\S+(?=:)", "", message))

    def _parse_dataclass_field(self, parser: Any, field: Any) -> None:  # type: ignore[override]
        if field.name in self._without:
            return
        field = copy.copy(field)
        is_first = field.metadata.get("first", False)
        field.metadata = {key: value for key, value in field.metadata.items() if key != "first"}
        group = self._first if is_first else parser
        HfArgumentParser._parse_dataclass_field(group, field)  # type: ignore[arg-type]


class _Help(argparse.RawDescriptionHelpFormatter):
    """One spelling of each option, the kind of its values, and its default in brackets."""

    def add_argument(self, action: argparse.Action) -> None:
        if not action.option_strings[0].startswith("--no_"):
            super().add_argument(action)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if action.const is True:
            return action.option_strings[0]
        return f"{action.option_strings[0]} {self._format_args(action, _kind(action))}"

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        if default is None or default is False or default == "":
            return action.help
        shown = " ".join(map(str, default)) if isinstance(default, list) else default
        return f"{action.help or ''} [{shown}]".strip()


def _kind(action: argparse.Action) -> str:
    return "N" if action.type is int else "X" if action.type is float else "NAME"


def parse(argv: Sequence[str]) -> Job:
    """Read the command line; `--config FILE.yaml` gives values that flags override.

    Raises:
        ValueError: an argument is wrong, in one line.
    """
    quick = Parser(OPTIONS)
    if {"-h", "--help", "--help_all"} & set(argv):
        quick.print_help()
        if "--help_all" in argv:
            _print_others()
        raise SystemExit(0)
    config = quick.parse_known_args(argv)[0].config
    options = recipe_options(config) if config else {}
    flags = as_flags(options)
    try:
        _check_names(quick, flags)
    except ValueError as error:
        raise ValueError(f"--config {config}: {error}") from error
    _check_names(quick, argv)
    # All checks that need no torch, on what recipe and flags say together.
    values = vars(quick.parse_known_args([*flags, *argv])[0])
    for each in OPTIONS:
        each(**{field.name: values[field.name] for field in fields(each)})

    # Only now, as importing them takes four seconds.
    from vocagnolm.run.config import RunArguments
    from vocagnolm.run.job import Job, check_together

    parser = Parser((*OPTIONS[:-1], RunArguments))
    values = vars(parser.parse_args([*flags, *argv]))
    del values["config"]
    values["output_dir"] = values["output_dir"] or _default_output_dir(values)
    _set_evaluation(values)
    made: Any = parser.parse_dict(values)
    model, load, data, pack, method, run = made
    job = Job(model, load, data, pack, method, run, recipe=config)
    check_together(job)
    job.run.set_batch(job.pack.max_length)
    for line in warnings_of(job):
        note(f"warning: {line}")
    return job


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


def trainer_fields() -> list[str]:
    """Read the fields of `transformers.TrainingArguments` from its source."""
    source = _of_transformers("training_args.py").read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == "TrainingArguments":
            return [
                each.target.id
                for each in node.body
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
            ]
    raise ImportError("this transformers has no TrainingArguments: install transformers<6")


def _check_names(parser: Parser, words: Sequence[str]) -> None:
    """Raise a ValueError for an option that neither a parser nor Trainer knows; skip values."""
    known = [*parser._option_string_actions]
    for name in trainer_fields():
        known += [f"--{name}", f"--no_{name}"]
    for word in parser.parse_known_args(words)[1]:
        option = "--" + word.partition("=")[0][2:].replace("-", "_")
        if word.startswith("--") and option not in known:
            advice = _OF_TRL.get(option[2:]) or near(option, known)
            raise ValueError(f"unknown option {option}{advice}")


def _print_others() -> None:
    from vocagnolm.run.config import RunArguments

    others = Parser([RunArguments], without=[each.name for each in fields(RunOptions)])
    others.usage, others.description, others.epilog = argparse.SUPPRESS, None, None
    sys.stdout.write(others.format_help().partition("\n\n")[2])


def warnings_of(job: Job) -> Iterator[str]:
    """Yield a line for each option that was given and has no effect."""
    model, method = job.model, job.method
    given = set()
    for options in (model, job.load, job.data, job.pack, method, job.run):
        given |= {each.name for each in fields(options) if vars(options)[each.name] != each.default}
    teachers = model.teacher or model.teacher_losses or []
    evaluates = job.data.eval_fraction or job.data.eval_dataset
    unread = {each.name for each in fields(Method)} - {*method.reads()}
    for has_effect, names, condition in (
        (False, unread, f"with {method.as_typed}"),
        (method.choice == "guided", {"guidance_table_steps"}, f"with {method.as_typed}"),
        (len(teachers) > 1, {"teacher_reduction"} - unread, "with one teacher"),
        (model.teacher, _OF_TEACHERS, "without --teacher"),
        (model.teacher_losses, {"missing_losses"}, "without --teacher_losses"),
        (model.use_peft, _OF_ADAPTERS, "without --use_peft"),
        (evaluates, {"eval_steps"}, "without --eval_fraction or --eval_dataset"),
        (job.run.push_to_hub, {"hub_model_id"}, "without --push_to_hub"),
    ):
        if not has_effect:
            for name in sorted(given & names):
                yield f"--{name} has no effect {condition}"


def _default_output_dir(values: Mapping[str, Any]) -> str:
    names = [values["student"], *(values["teacher"] or values["teacher_losses"] or ())]
    if values["method"] != "vocagnolm" or len(names) == 1:
        names.append(values["method"])
    return os.path.join("runs", "__".join(Path(name).name for name in names))


def _set_evaluation(values: dict[str, Any]) -> None:
    """Evaluate where there is something to evaluate on, as often as checkpoints are saved."""
    evaluates = bool(values["eval_fraction"] or values["eval_dataset"])
    strategy = values["eval_strategy"]
    if strategy not in (None, "no") and not evaluates:
        raise ValueError("--eval_strategy needs --eval_fraction or --eval_dataset")
    if strategy is None and evaluates:
        values["eval_strategy"] = strategy = "steps"
    if strategy == "steps":
        values["eval_steps"] = values["eval_steps"] or values["save_steps"]
