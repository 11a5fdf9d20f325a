"""What determines the content of a store: how its teacher reads documents."""

from collections.abc import Mapping
from pathlib import Path

from transformers import PreTrainedConfig

from vocagnolm.chat.render import Template
from vocagnolm.models.load import context_length
from vocagnolm.readers import Reader
from vocagnolm.shell.io import differences
from vocagnolm.store import format as store
from vocagnolm.tokenizer import tokenizer_sha256

# Defaults: the context before the first scored token, if there is room, and the most tokens that a
# teacher reads at once, because more would need large activations.
_MIN_CONTEXT = 512
_LONGEST_CONTEXT = 4096


def context_of(
    config: PreTrainedConfig,
    *,
    is_served: bool,
    context: int | None = None,
    least: int | None = None,
) -> tuple[int, int]:
    """Return the most tokens of a window, and the least context before the tokens that it scores.

    A request that exceeds the teacher's context, or contradicts itself, is a ValueError.
    """
    # A server generates one token after every window, which needs room in the context, too.
    limit = context_length(config) - is_served
    context = context or min(limit, _LONGEST_CONTEXT)
    if context > limit:
        raise ValueError(
            f"--context {context} exceeds the teacher's context of {limit}: lower it to that"
        )
    # A window has a start token, and must score at least one token.
    if context < 2:
        raise ValueError(f"--context must be at least 2, got {context}")
    min_context = least or min(_MIN_CONTEXT, context // 4)
    if min_context > context - 2:
        raise ValueError(
            f"--min_context {min_context} leaves no room in a context of {context}: lower it to "
            f"at most {context - 2}"
        )
    return context, min_context


def describe_reading(
    reader: Reader, template: Template | None, min_context: int
) -> dict[str, object]:
    """Return a manifest's description of how a teacher reads documents or conversations."""
    return {
        "tokenizer_sha256": tokenizer_sha256(reader.tokenizer),
        "special_tokens": {"before": reader.start, "behind": None},
        **(template.as_json() if template else {}),
        "segmentation": "windows of whole documents",
        "context": reader.limit,
        "min_context": min_context,
    }


def check_plan(directory: Path, plan: Mapping[str, object], option: str = "--output_dir") -> None:
    """Raise a ValueError if a directory has a store with other settings.

    The directory, which the option names, need not exist. `plan` is everything that determines the
    content of a store.
    """
    manifest = store.read_manifest(directory)
    if not manifest:
        # Shards without a manifest may be any teacher's, so do not add to them.
        if any(directory.glob("shard-*")):
            raise ValueError(f"{option} {directory} holds shards, but no {store.MANIFEST_FILE}")
        # Nobody could tell which of the two the name of such a directory means.
        if (directory / "config.json").exists():
            raise ValueError(f"{option} {directory} holds a model: give another directory")
        return
    # A corpus is identified by its texts, and a teacher by its revision if it has one. Their names,
    # and a server's address, do not matter.
    ignored = {"dataset", "server"}
    # A teacher without a known revision, such as one behind a server, is identified by its name.
    if plan.get("teacher_revision") not in (None, "unknown"):
        ignored.add("teacher")
    compared_settings = {}
    for name, value in plan.items():
        if name not in ignored:
            compared_settings[name] = value
    changes = differences(manifest, compared_settings)
    if changes:
        raise ValueError(
            f"{option} {directory} holds another store ({'; '.join(changes)}): give another "
            "directory, or delete this one"
        )
