"""Runs `vocagnolm score` with the `argv` of a `ForkServer` request, to be killed.

A process writes the line "PROCESS SHARD" to the file `scored` once a shard is written.
"""

from __future__ import annotations

import os
from typing import Any

from fork_server import serve
from transformers import LlamaForCausalLM  # noqa: F401 - imported before processes are forked

from vocagnolm.store import score, scoring


def run(request: dict[str, Any]) -> int:
    """Run the command."""
    scored = os.open(request["scored"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    original = scoring.score_shard

    def score_shard(job: Any, shard: int, *rest: Any) -> None:
        original(job, shard, *rest)
        os.write(scored, f"{os.getpid()} {shard}\n".encode())

    scoring.score_shard = score_shard
    return score.main(request["argv"])


if __name__ == "__main__":
    serve(run)
