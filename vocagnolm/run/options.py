"""A page of all options of training, made from the dataclasses that hold them.

python -m vocagnolm.run.options > docs/options.md
"""

import sys
from typing import Any

from transformers import HfArgumentParser

from vocagnolm.host.tables import markdown_table
from vocagnolm.models.adapters import AdapterArguments
from vocagnolm.objective import Method
from vocagnolm.run.arguments import DataArguments, GuidanceArguments, ModelArguments
from vocagnolm.run.training_arguments import RunArguments
from vocagnolm.training.arguments import REJECTED

_HEAD = """# Options of training

Every option of `train.py` and `vocagnolm train`, made by `python -m vocagnolm.run.options`. Every
field of `transformers.TrainingArguments` is an option too: *Run* has those that are new or have
another default here, *Rejected* those that may not be set. `--config FILE.yaml` reads options from
a file, and flags override it."""
_FOOT = """## Rejected

DeepSpeed and FSDP1 are rejected, whether an option or an Accelerate file asks for them, and fields
that have no effect beside the others, such as `--eval_steps` without an evaluation.
`--parallelism_config` is read from an Accelerate file only. These fields have one value:"""
_SECTIONS = {
    "Models": ModelArguments,
    "Adapters": AdapterArguments,
    "Data": DataArguments,
    "Method": GuidanceArguments,
    "Run": RunArguments,
}


def options_page() -> str:
    """Return the page as Markdown, with a table for each dataclass."""
    parts = [_HEAD]
    for title, arguments in _SECTIONS.items():
        parts += [f"## {title}", markdown_table(_rows(arguments), padded=False)]
    rows = [["option", "only", "any other value"]]
    for name, (value, reason) in REJECTED.items():
        rows.append([f"`--{name}`", _shown(value), f"{reason[0].upper()}{reason[1:]}."])
    parts += [_FOOT, markdown_table(rows, padded=False)]
    return "\n\n".join(parts) + "\n"


def _rows(arguments: type) -> list[list[str]]:
    """Return an option a row: those that the class itself declares, in its order."""
    types: list[Any] = [arguments]
    actions = {action.dest: action for action in reversed(HfArgumentParser(types)._actions)}
    rows = [["option", "default", "meaning"]]
    names = list(vars(arguments)["__annotations__"])
    if issubclass(arguments, Method):
        names = [*vars(Method)["__annotations__"], *names]
    for name in names:
        action = actions[name]
        meaning = " ".join((action.help or "As in `TrainingArguments`.").split())
        if action.choices:
            meaning += " One of " + ", ".join(f"`{choice}`" for choice in action.choices) + "."
        rows.append([f"`--{name}`", _shown(action.default), meaning])
    return rows


def _shown(default: object) -> str:
    if default is None or default == "":
        return "none"
    text = str(default).lower() if isinstance(default, bool) else str(default)
    return f"`{text}`"


if __name__ == "__main__":
    sys.stdout.write(options_page())
