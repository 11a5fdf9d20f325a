"""Settings of a run on disk: a directory is continued only under those it was begun with."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from vocagnolm.host.manifest import MANIFEST_FILE
from vocagnolm.io import JsonObject, check_writable, json_or_empty, write_json

# In the directory of a run.
RUN_FILE = "run.json"
_Settings = Mapping[str, object]


def differences(before: _Settings, now: _Settings, *, prefix: str = "") -> list[str]:
    """List the settings of `now` that were others before, as "NAME was X, now Y"."""
    # Settings of before were read from JSON, where a tuple is a list.
    before, now = (json.loads(json.dumps(dict(settings))) for settings in (before, now))
    changed = [name for name in sorted(now) if before.get(name) != now[name]]
    return [f"{prefix}{name} was {before.get(name)}, now {now[name]}" for name in changed]


def check_same(changed: Sequence[str], holder: str, remedy: str) -> None:
    """Raise "HOLDER (all `differences`): REMEDY" if there are any."""
    if changed:
        raise ValueError(f"{holder} ({'; '.join(changed)}): {remedy}")


def run_of(path: str | Path) -> JsonObject:
    """Read the settings of the run that saved a checkpoint; empty if it does not say."""
    found = json_or_empty(Path(path) / MANIFEST_FILE).get("run")
    return found if isinstance(found, dict) else {}


def origin_fault(path: str | Path, settings: _Settings, defaults: _Settings) -> str | None:
    """Compare a checkpoint's run with this one, as `check_settings` does; None if they fit."""
    before = run_of(path)
    changed = differences({**defaults, **before}, settings, prefix="--") if before else []
    return f"it is of a run with other settings ({'; '.join(changed)})" if changed else None


def check_settings(
    output_dir: str | Path,
    settings: _Settings,
    defaults: _Settings | None = None,
    checkpoint: str | None = None,
) -> None:
    """Reject an `output_dir` that cannot be written, or holds a run with other settings.

    Only `settings` are compared, with `defaults` for options younger than the run; also with those
    of the `checkpoint` that is resumed from, which may be of another directory.
    """
    directory = Path(output_dir)
    check_writable(directory)
    path = directory / RUN_FILE
    # Settings alone bind nobody: a run that was stopped before it saved may be given others.
    progress = (directory.glob(pattern) for pattern in ("checkpoint-*", "*.safetensors"))
    if path.exists() and any(map(any, progress)):
        before = json_or_empty(path)
        if not before:
            raise ValueError(f"{path} is damaged: give another --output_dir")
        changed = differences({**(defaults or {}), **before}, settings, prefix="--")
        holder = f"{directory} holds a run with other settings"
        check_same(changed, holder, "give another --output_dir")
    if checkpoint and (fault := origin_fault(checkpoint, settings, defaults or {})):
        raise ValueError(f"{checkpoint}: {fault}")


def write_settings(output_dir: str | Path, settings: _Settings) -> None:
    """Record the settings of a run, for `check_settings`."""
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    write_json(Path(output_dir) / RUN_FILE, settings)
