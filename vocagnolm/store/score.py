"""Score a corpus with a teacher, once, for any student: writes a teacher-loss store.

    vocagnolm score --teacher T --dataset D --output_dir S
    accelerate launch -m vocagnolm.cli score --teacher T --dataset D --output_dir S
    vocagnolm score --server URL --served_model NAME --teacher T ...    # T's tokenizer, no weights
    vocagnolm score --verify S         # compare every byte with the checksums
    vocagnolm score --verify S --dataset D    # and look for every document
    vocagnolm score --verify S --push_to_hub NAME    # a data set with a card

Killed at any moment, the same command continues at the shards that are not written. Delete those
that --verify finds bad: the same command scores what is missing. Any number of processes may share
the work. Exit status: 0 done, 1 faults found, 2 a wrong argument or file, 3 losses that are not
finite, 130 interrupted. A server's key is read from VOCAGNOLM_API_KEY.
"""

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

from vocagnolm.cli import Exit, Parser, json_settings, print_main, shell
from vocagnolm.store.format import MANIFEST_FILE, SHARDS, Store, find_faults, manifest_of

# Documents that are missing, of how many there may be.
_SHOWN = 10
_CARD = """---
pretty_name: Token losses of {teacher}
tags: [vocagnolm, "arxiv:2503.19123", teacher-loss-store]
configs: [{{config_name: default, data_files: "shard-*.arrow"}}]
---

# Token losses of {teacher}

The loss of {teacher} on each of {tokens:,} tokens of {documents:,} documents, tied to characters: a
teacher-loss store of [VocAgnoLM](https://arxiv.org/abs/2503.19123). It guides students with any
tokenizer, without the teacher. It contains no text: a digest of its text identifies each document.

```
hf download {name} --repo-type dataset --local-dir stores/mine
vocagnolm score --verify stores/mine
vocagnolm train --teacher_losses stores/mine --dataset CORPUS
```

`manifest.json` says how it was made.
"""


@shell(
    "vocagnolm score", out_of_memory="lower --batch_tokens, --context or --dtype", resumable=True
)
def main(argv: Sequence[str] | None = None) -> int:
    """Score a corpus or verify a store, and return the exit status."""
    logging.getLogger("vocagnolm").setLevel(logging.INFO)
    arguments = parse_score(argv)
    if arguments.verify:
        return _verify(arguments)
    from vocagnolm.store.scoring import score

    score(arguments)
    return Exit.DONE


def parse_score(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = Parser("vocagnolm score", __doc__)
    add = parser.add_argument
    add("--teacher", help="Causal LM that scores: a hub name or a directory.")
    add("--teacher_revision", help="Branch, tag or commit on the hub.")
    add("--teacher_tokenizer", help="Its tokenizer, if it is not with its weights.")
    add("--teacher_chat_template", help="plain, chatml or a file; default: its tokenizer's.")
    parser.add_dataset(several=True)
    add("--output_dir", type=Path, help="The store.")
    add("--context", type=int, help="Most tokens that the teacher reads at once; default: all.")
    add("--min_context", type=int, help="Before any token of a longer document; default: 512.")
    add("--shard_documents", type=int, default=1000, help="Documents per shard.")
    add("--batch_tokens", type=int, default=16384, help="Tokens of a forward pass.")
    add("--loss_dtype", choices=("float16", "float32"), default="float16", help="In the store.")
    parser.add_dtype()
    add("--quantization", help="JSON: a quantization config of transformers.")
    add("--attn_implementation", help="As in transformers.")
    add("--trust_remote_code", action="store_true")
    add("--server", metavar="URL", help="Of a server that has the teacher.")
    add("--served_model", metavar="NAME", help="Of the teacher, on that server.")
    add("--api", choices=("vllm", "sglang", "llama.cpp"), help="Of the server; default: found.")
    add("--concurrency", type=int, default=16, help="Requests at once.")
    add("--verify", type=Path, metavar="STORE", help="Compare a store with its checksums.")
    add("--push_to_hub", metavar="NAME", help="Of the store that --verify has found good.")
    arguments = parser.parse_args(argv)
    required = ["verify"] if arguments.verify else ["teacher", "dataset", "output_dir"]
    if arguments.server:
        required.append("served_model")
    for name in required:
        if getattr(arguments, name) is None:
            raise ValueError(f"--{name} is required, unless a store is to be checked with --verify")
    for name in ("context", "min_context", "shard_documents", "batch_tokens", "concurrency"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")
    if arguments.push_to_hub and not arguments.verify:
        raise ValueError("--push_to_hub needs a store that is verified: --verify STORE")
    if arguments.quantization is not None:
        arguments.quantization = json_settings("--quantization", arguments.quantization)
    return arguments


def _verify(arguments: argparse.Namespace) -> int:
    """Print the faults of a store, and return the exit status."""
    directory: Path = arguments.verify
    manifest = manifest_of(directory)
    shards = manifest[SHARDS]
    faults = find_faults(directory, shards, by_hash=True)
    for file, fault in faults.items():
        print_main(f"{directory / file} {fault}")
    if faults:
        print_main(
            f"{len(faults)} of {len(shards)} shards are bad: delete them, and give the command "
            "again that made the store"
        )
        return Exit.FAULTS
    missing = []
    if arguments.dataset:
        from vocagnolm.store.scoring import find_missing, load_corpora

        missing = find_missing(Store(directory), load_corpora(arguments))
    if missing:
        shown = ", ".join(map(str, missing[:_SHOWN])) + (", ..." if len(missing) > _SHOWN else "")
        print_main(
            f"{len(missing):,} documents of {' '.join(arguments.dataset)} are not in "
            f"{directory}, or have another text there (indices from 0: {shown}): score this corpus "
            "into another directory, or train without them with --missing_losses skip"
        )
        return Exit.FAULTS
    print_main(f"{directory}: {len(shards)} shards, {manifest['tokens']:,} tokens, all good")
    if arguments.push_to_hub:
        print_main(f"pushed to {_push(directory, arguments.push_to_hub)}")
    return Exit.DONE


def _push(directory: Path, name: str) -> str:
    """Put a store and its card on the hub, and return where."""
    from huggingface_hub import CommitOperationAdd, HfApi

    manifest = manifest_of(directory)
    teacher = Path(manifest["teacher"])
    shown = teacher.name if teacher.is_absolute() else teacher.as_posix()
    card = _CARD.format(**(manifest | {"name": name, "teacher": shown}))
    files = [MANIFEST_FILE, *(entry["file"] for entry in manifest[SHARDS])]
    operations = [CommitOperationAdd(file, directory / file) for file in files]
    operations.append(CommitOperationAdd("README.md", card.encode()))
    api = HfApi()
    api.create_repo(name, repo_type="dataset", exist_ok=True)
    commit = api.create_commit(
        name, operations, commit_message="A store of teacher losses", repo_type="dataset"
    )
    return str(commit.repo_url)
