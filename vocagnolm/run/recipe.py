"""Recipes: runs written down as YAML."""

from __future__ import annotations

import json
from pathlib import Path

import yaml


def read_recipe(path: str) -> list[str]:
    """A YAML mapping as the flags it stands for, so that one parser checks both."""
    try:
        recipe = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"--config {path} cannot be read: {reason}") from error
    if not isinstance(recipe, dict):
        raise ValueError(f"--config {path} must be a mapping of options to values")
    if "config" in recipe:
        raise ValueError(f"--config {path} names another config: give one recipe")
    flags: list[str] = []
    for name, value in recipe.items():
        if isinstance(value, list):
            flags += [f"--{name}", *map(str, value)]
        elif value is not None:
            flags.append(f"--{name}={json.dumps(value) if isinstance(value, dict) else value}")
    return flags
