"""Names and places of a run in Weights & Biases, TensorBoard and trackio: docs/wandb.md.

A log of train.py has plain names, as in `trainer_state.json`. Trackers get each of them in a
section, which `tracked_name` chooses, and `log_name` finds back.
"""

import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import get_type_hints

from vocagnolm.host.options import wrong_values
from vocagnolm.io import JsonObject, json_or_empty, read_asset, write_json

# In the directory of a run: its place in Weights & Biases.
TRACKER_FILE = "wandb_run.json"
# Those that no log has: what a tracker shows in another way, and the axis of all others.
EXCESS_HISTOGRAM, GUIDANCE_TABLE = "guidance/excess_loss_nats", "guidance/tokens"
STEP = "train/global_step"
# Entries of a run's config beside its settings in `run.json`, in the order of the page.
ABOUT = "recipe models corpus code hardware steps trainer student_config evaluation".split()
# Of the run's files in Weights & Biases, as beside a model.
EVALUATION_FOLDER, CHAT_FOLDER = "evaluation", "evaluation-chat"
_ENTRIES = read_asset("log_entries.yaml")
TRACKED_NAMES: dict[str, str] = {
    entry: f"{section}/{entry.removeprefix(f'{section}_')}"
    for section, entries in _ENTRIES["sections"].items()
    for entry in entries.split()
} | _ENTRIES["renamed"]
_LOG_NAMES = {name: entry for entry, name in TRACKED_NAMES.items()}


def tracked_name(entry: str) -> str:
    """Return the name that trackers get of an entry of a log.

    >>> tracked_name("teacher_loss_nats"), tracked_name("eval_math_loss"), tracked_name("new")
    ('teacher/loss_nats', 'eval/math_loss', 'train/new')
    """
    section = "eval" if entry.startswith("eval_") else "train"
    return TRACKED_NAMES.get(entry) or f"{section}/{entry.removeprefix('eval_')}"


def log_name(tracked: str) -> str:
    """Return the entry of a log that trackers get under a name; of others, their last part.

    >>> log_name("teacher/loss_nats"), log_name("train/student_loss_nats"), log_name("eval/x_loss")
    ('teacher_loss_nats', 'student_loss_nats', 'eval_x_loss')
    """
    section, _, rest = tracked.partition("/")
    return _LOG_NAMES.get(tracked) or (f"eval_{rest}" if section == "eval" else rest or section)


@dataclass
class Tracking:
    """Place of a run among others, and what it is; a tracker decides over what is None."""

    project: str | None = None
    group: str | None = None
    name: str | None = None
    tags: Sequence[str] | None = None
    # Shown beside the run: everything that runs are filtered, grouped or coloured by.
    config: Mapping[str, object] = field(default_factory=dict)

    def place(self) -> JsonObject:
        """Return the arguments of `wandb.init`; `project` may be ENTITY/PROJECT."""
        # Invalid in Weights & Biases: tags of no or of more than 64 characters.
        tags = self.tags and [tag[-64:] for tag in self.tags if tag]
        place = asdict(self) | {"tags": tags}
        if self.project and "/" in self.project:
            place["entity"], place["project"] = self.project.split("/", 1)
        return place


def import_wandb() -> ModuleType:
    """Import the package; a ValueError says that it is not installed."""
    try:
        wandb = importlib.import_module("wandb")
        # A directory of that name, which wandb makes for its files, imports too.
        if hasattr(wandb, "init"):
            return wandb
    except ImportError:
        pass
    missing = "--report_to wandb needs the package wandb, which is not installed"
    raise ValueError(f"{missing}: `pip install 'vocagnolm[wandb]'`, or leave --report_to out")


@cache
def offline_reason() -> str:
    """Ask the server of Weights & Biases once, and say why a run has to begin offline; "" if not.

    Raises:
        ValueError: the package is missing, or the server refuses the key.
    """
    wandb = import_wandb()
    # What the user has said counts.
    if os.environ.get("WANDB_MODE", "online") not in ("online", "shared"):
        return ""
    try:
        return "" if wandb.login(prompt=False) else "there is no key (`wandb login` asks for it)"
    except wandb.errors.AuthenticationError as error:
        reason = " ".join(str(error).split())
        # Its words for a server that cannot be reached; those of one that answers are others.
        if "Failed to execute API request" in reason:
            return "its server does not answer"
        raise ValueError(
            f"--report_to wandb: {reason}: `wandb login --relogin`, or set WANDB_MODE=offline"
        ) from error


def begin_run(wandb: ModuleType, place: Mapping[str, object]) -> str:
    """Begin a run of Weights & Biases, and return the line that tells where it is."""
    reason = offline_reason()
    try:
        run = wandb.init(**place, mode="offline" if reason else None)
    except wandb.Error as error:
        # An entity or project that is refused, known only now: the work is not lost for it.
        if reason:
            raise
        reason = " ".join(str(error).split())
        run = wandb.init(**place, mode="offline")
    if run.disabled:
        return "wandb      disabled, as WANDB_MODE says"
    if not run.offline:
        return f"wandb      {run.url}"
    why = f": {reason}" if reason else ""
    directory, here = Path(run.settings.sync_dir), Path.cwd()
    shown = directory.relative_to(here) if directory.is_relative_to(here) else directory
    return f"wandb      offline{why}; `wandb sync {shown}` sends it"


def write_place(directory: Path, wandb: ModuleType, place: Mapping[str, object]) -> None:
    """Keep the place of the run in progress, where it is resumed and evaluated from."""
    run = wandb.run
    # As the run was begun: what it is called may have come from the environment.
    known = {"id": run.id, "project": run.project, "entity": run.entity or None}
    known["url"] = None if run.offline else run.url
    write_json(directory / TRACKER_FILE, {**place, **known})


def read_place(directory: Path) -> JsonObject:
    """Read the arguments of `wandb.init` that continue the run of a directory; {} without one."""
    path = directory / TRACKER_FILE
    place = json_or_empty(path)
    kinds = {**get_type_hints(Tracking), "id": str, "entity": str | None}
    for fault in wrong_values({"id": None, **place} if path.is_file() else {}, kinds):
        raise ValueError(f"{path}: {fault}: delete the file")
    return place and {**{name: place[name] for name in kinds if name in place}, "resume": "allow"}
