"""All options of training by subject: the page of `--help`, and one with the rejected options.

python -m vocagnolm.run.options     # writes docs/options.md, and the page that --help shows
"""

import argparse
import re
import textwrap
from dataclasses import dataclass, fields
from pathlib import Path

from transformers import TrainingArguments
from transformers.hf_argparser import string_to_bool

from vocagnolm.host.files import write_text
from vocagnolm.host.tables import markdown_table
from vocagnolm.models.adapters import AdapterArguments
from vocagnolm.objective import Method
from vocagnolm.run import HELP_PAGE
from vocagnolm.run.arguments import DataArguments, GuidanceArguments, ModelArguments
from vocagnolm.run.parse import make_parser
from vocagnolm.run.training_arguments import RunArguments
from vocagnolm.training.arguments import REJECTED

_PAGE = Path(__file__).resolve().parents[2] / "docs" / "options.md"
_ABOUT = """Continual pretraining with the token losses of a teacher of any vocabulary.

    python train.py --teacher T --dry_run              # print the plan and exit
    accelerate launch train.py --teacher Qwen/Qwen2.5-Math-7B-Instruct
    accelerate launch train.py --config recipes/demo.yaml --teacher T

`vocagnolm train` is the same command. Given again, it resumes a run that ended
early. Exit status: 0 done, 2 a wrong argument or file, 3 losses became NaN or
infinite, 4 out of memory, a full disk or another process lost, 75 stopped by a
signal with all saved, so that a scheduler may start it again. docs/options.md
lists the options, docs/running.md has the details."""
_HEAD = """# Options of training

Options of `train.py` and `vocagnolm train`, made by `python -m vocagnolm.run.options`. Every field
of `transformers.TrainingArguments` is one, too: below are those that are new, have another default
here or are often used; `train.py --help_all` shows the others, and *Rejected* lists those that may
not be set. `--config FILE.yaml` reads options from a file, and flags override it. A file may call
one beside it its `base`, and says only what differs."""
_FOOT = """## Rejected

DeepSpeed and FSDP1 are rejected, whether an option or an Accelerate file asks for them, and fields
that have no effect beside the others, such as `--eval_steps` without an evaluation.
`--parallelism_config` is read from an Accelerate file only. These fields have one value:"""
# Sections of one class each, and those of names of `RunArguments`.
_CLASSES = {
    "Models": ModelArguments,
    "Adapters": AdapterArguments,
    "Data": DataArguments,
    "Method": GuidanceArguments,
}
_OF_RUN = {
    "Batch and schedule": "global_batch_tokens per_device_train_batch_size "
    "gradient_accumulation_steps num_train_epochs max_steps learning_rate lr_scheduler_type "
    "lr_scheduler_kwargs warmup_steps optim adam_beta2 weight_decay max_grad_norm seed "
    "max_bad_steps",
    "Output, checkpoints and evaluation": "config output_dir dry_run save_strategy save_steps "
    "save_total_limit resume_from_checkpoint eval_strategy eval_steps per_device_eval_batch_size "
    "load_best_model_at_end push_to_hub hub_model_id hub_strategy",
    "Logs": "logging_steps logging_first_step logging_nan_inf_filter report_to run_name project "
    "wandb_project wandb_group wandb_tags include_num_input_tokens_seen device_peak_tflops "
    "disable_tqdm",
    "Hardware": "bf16 use_cpu activation_checkpointing use_liger_kernel liger_kernel_config fsdp "
    "fsdp_config ddp_timeout ddp_find_unused_parameters dataloader_num_workers "
    "remove_unused_columns",
}
# Trainer's own words for these are paragraphs, and others in each version.
_OF_TRAINER = {
    "num_train_epochs": "Passes over the corpus.",
    "max_steps": "Optimizer steps; -1: as many as the epochs take.",
    "learning_rate": "Peak of the schedule.",
    "lr_scheduler_type": "Schedule of the learning rate.",
    "warmup_steps": "Steps of warm-up, or their share if below 1.",
    "optim": "Optimizer of transformers.",
    "adam_beta2": "Decay of AdamW's second moment.",
    "weight_decay": "Weight decay, of all weights but biases and norms.",
    "max_grad_norm": "Gradients are clipped to this norm; 0: never.",
    "seed": "Seed of the order of the blocks, of adapters and dropout.",
    "save_strategy": "When checkpoints are saved; the final model always is.",
    "save_steps": "Steps between two checkpoints.",
    "save_total_limit": "Checkpoints that are kept.",
    "eval_steps": "Steps between two evaluations; by default as often as checkpoints.",
    "load_best_model_at_end": "End with the checkpoint of the lowest evaluation loss.",
    "push_to_hub": "Push the model to the hub, with its card.",
    "hub_model_id": "Its name there; by default that of the output directory.",
    "hub_strategy": "When it is pushed: end, every_save, checkpoint or all_checkpoints.",
    "logging_steps": "Steps between two logs.",
    "logging_first_step": "Log the first step, too.",
    "logging_nan_inf_filter": "Hide losses that are NaN, at a wait per micro-batch.",
    "run_name": "Name of the run in trackers; by default the path of --config.",
    "disable_tqdm": "Show no progress bar; by default on a terminal only.",
    "use_cpu": "Compute on the CPU, even beside a GPU.",
    "activation_checkpointing": "Keep the layers' inputs only, and compute them again.",
    "use_liger_kernel": "Use the kernels of liger-kernel.",
    "fsdp": "Shard the student with FSDP2; accelerate_configs/ has files.",
    "fsdp_config": "JSON or a file of settings of FSDP2.",
    "ddp_timeout": "Seconds that processes wait for one another.",
    "ddp_find_unused_parameters": "Look for parameters without a gradient, in each step.",
    "dataloader_num_workers": "Processes that read blocks ahead.",
    "remove_unused_columns": "Has one value here: blocks need all their columns.",
}
_OTHERS = "Other fields of transformers.TrainingArguments"
_WIDTH, _INDENT, _MOST_CHOICES = 80, 26, 8


@dataclass(frozen=True)
class _Option:
    name: str
    default: str
    meaning: str
    # What is typed behind it, "" for a switch.
    value: str


def sections(*, everything: bool = False) -> dict[str, list[str]]:
    """Return the names of the options by subject; Trainer's other fields only if asked for.

    Another version of transformers may lack one.
    """
    found = {title: _own(arguments) for title, arguments in _CLASSES.items()}
    found |= {title: names.split() for title, names in _OF_RUN.items()}
    shown = {name for names in found.values() for name in names}
    rest = [each.name for each in fields(RunArguments) if each.name not in shown | REJECTED.keys()]
    ours = set(_own(RunArguments))
    # A new option of ours is shown, even if nobody has chosen a section.
    found["Hardware"] += [name for name in rest if name in ours]
    if everything:
        found[_OTHERS] = sorted(set(rest) - ours)
    return found


def help_page(*, everything: bool = False) -> str:
    """Return the text of `--help`, or of `--help_all`."""
    options = _options()
    usage = "usage: train.py [--config RECIPE.yaml] --teacher TEACHER [OPTION ...]"
    lines = [usage, "", _ABOUT]
    for title, names in sections(everything=everything).items():
        lines += ["", f"{title}:"]
        lines += [line for name in names if name in options for line in _help_lines(options[name])]
    if not everything:
        lines += ["", f"{_OTHERS}: --help_all"]
    return "\n".join(lines) + "\n"


def options_page() -> str:
    """Return the page as Markdown, with a table for each subject."""
    options, parts = _options(), [_HEAD]
    for title, names in sections().items():
        rows = [["option", "default", "meaning"]]
        for option in (options[name] for name in names if name in options):
            default = f"`{option.default}`" if option.default else "none"
            rows.append([f"`--{option.name}`", default, option.meaning])
        parts += [f"## {title}", markdown_table(rows, padded=False)]
    rows = [["option", "only", "any other value"]]
    for name, (value, reason) in REJECTED.items():
        rows.append([f"`--{name}`", f"`{_shown(value)}`", f"{reason[0].upper()}{reason[1:]}."])
    parts += [_FOOT, markdown_table(rows, padded=False)]
    return "\n\n".join(parts) + "\n"


def _own(arguments: type) -> list[str]:
    """Return the options that a class itself declares, in its order."""
    names = list(vars(arguments)["__annotations__"])
    # The method's settings belong to training, too.
    return [*vars(Method)["__annotations__"], *names] if issubclass(arguments, Method) else names


def _options() -> dict[str, _Option]:
    theirs = {each.name: each.metadata.get("help", "") for each in fields(TrainingArguments)}
    options = {}
    # The first action of a name sets it, a second one takes it back.
    for action in reversed(make_parser()._actions):
        name, text = action.dest, action.help or _OF_TRAINER.get(action.dest)
        if text is None or text == theirs.get(name):
            # A sentence of theirs is enough.
            first = re.split(r"(?<=[.]) (?=[A-Z])", " ".join(theirs[name].split()))[0]
            text = _OF_TRAINER.get(name) or first.replace("%%", "%")
        choices = list(action.choices or ())
        if 0 < len(choices) <= _MOST_CHOICES:
            text += f" One of {', '.join(f'`{choice}`' for choice in choices)}."
        options[name] = _Option(name, _shown(action.default), text, _typed(action))
    return options


def _typed(action: argparse.Action) -> str:
    if action.const is True:
        return ""
    value = {int: "N", float: "X", string_to_bool: "BOOL"}.get(action.type, "NAME")
    return f"{value} ..." if action.nargs in ("+", "*") else value


def _shown(default: object) -> str:
    """Write a default as it is typed; "" for none."""
    if default is None or default == "":
        return ""
    if isinstance(default, list):
        return " ".join(map(str, default))
    return str(default).lower() if isinstance(default, bool) else str(default)


def _help_lines(option: _Option) -> list[str]:
    name = f"  --{option.name} {option.value}".rstrip()
    text = option.meaning.replace("`", "")
    if option.default not in ("", "false"):
        text += f" [{option.default}]"
    lines = textwrap.wrap(text, _WIDTH - _INDENT, break_on_hyphens=False) or [""]
    # A long name has a line of its own.
    if len(name) >= _INDENT:
        lines.insert(0, "")
    first, *others = lines
    return [f"{name:{_INDENT}}{first}".rstrip(), *(" " * _INDENT + line for line in others)]


if __name__ == "__main__":
    write_text(_PAGE, options_page())
    write_text(HELP_PAGE, help_page())
