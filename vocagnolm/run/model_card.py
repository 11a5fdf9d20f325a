"""README.md of a trained student: settings, results and software, in full."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerState

from vocagnolm.host.versions import versions

_PACKAGES = "vocagnolm torch transformers accelerate datasets tokenizers"
_TITLES = {
    "vocagnolm": "teacher-guided continual pretraining (VocAgnoLM, arXiv 2503.19123)",
    "cpt": "plain continual pretraining",
    "random": "continual pretraining on a random share of the tokens",
    "kld": "continual pretraining with a KL divergence from a teacher (Eq. 5)",
    "uld": "continual pretraining with Universal Logit Distillation (Eq. 6)",
    "rho1": "continual pretraining on the tokens that a reference model chooses (Rho-1)",
    "chunk": "continual pretraining guided by chunks (Section 6.1)",
}


def model_card(name: str, settings: Mapping[str, Any], state: TrainerState) -> str:
    """Describe a trained student, for `README.md` beside its weights."""
    guided = _guided_by(settings)
    measured = {"steps": float(state.global_step)}
    for key in ("student_loss_nats", "eval_loss"):
        if values := [entry[key] for entry in state.log_history if key in entry]:
            measured |= {f"first {key}": values[0], f"last {key}": values[-1]}
    numbers = "\n".join(f"- {key}: {value:.6g}" for key, value in measured.items())
    software = versions(f"python {_PACKAGES}")
    python = software.pop("python")
    packages = ", ".join(f"{package} {version}" for package, version in software.items())
    return f"""\
---
library_name: transformers
{_hub_entries(settings)}---

# {name}

{settings["student"]} after {_TITLES[settings["method"]]} on {settings["dataset"]}{guided}.

## Result

{numbers}

## Settings

```json
{json.dumps(dict(settings), indent=2)}
```

## Software

Python {python}; {packages}.
"""


def _guided_by(settings: Mapping[str, Any]) -> str:
    """Name the teachers of a run, if it had any."""
    if stores := settings["teacher_losses"]:
        return f", guided by stored losses of {' and '.join(store['teacher'] for store in stores)}"
    teacher = settings["teacher"] or []
    names = [teacher] if isinstance(teacher, str) else teacher
    return f", guided by {' and '.join(names)}" if names else ""


def _hub_entries(settings: Mapping[str, Any]) -> str:
    """Link the student and the corpus, unless they are directories, which no hub has."""
    student, dataset = settings["student"], settings["dataset"]
    lines = ""
    if not Path(student).exists():
        lines += f"base_model: {json.dumps(student)}\n"
    if not Path(dataset).exists():
        lines += f"datasets: [{json.dumps(dataset)}]\n"
    return lines
