"""Score a corpus with a teacher, once, for any student: writes a teacher-loss store.

    vocagnolm score --teacher T --dataset D --output_dir S
    accelerate launch -m vocagnolm score --teacher T --dataset D --output_dir S
    vocagnolm score --server URL --served_model NAME --teacher T ...    # T's tokenizer, no weights
    vocagnolm score --verify S         # compare every byte with the checksums
    vocagnolm score --verify S --dataset D    # and look for every document

Killed at any moment, the same command continues at the shards that are not written, and keeps every
answer of a server. Delete those that --verify finds bad: the same command scores what is missing.
Any number of processes may share the work. Exit status: 0 done, 1 faults found, 2 a wrong argument
or file, 3 losses that are not finite, 130 interrupted. A server's key is read from
VOCAGNOLM_API_KEY.
"""

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

from vocagnolm.cli import Exit, Parser, shell
from vocagnolm.extras import require, require_quantization
from vocagnolm.fields import json_settings
from vocagnolm.printing import print_main
from vocagnolm.store.format import SHARDS, Store, find_faults, manifest_of

# Options that need something else, without which they would be ignored.
_OF_SERVER = "served_model api concurrency"
_OF_WEIGHTS = "dtype quantization attn_implementation batch_tokens"
_OF_CORPUS = "dataset_config dataset_split text_column"
_OF_SCORING = (
    "teacher teacher_revision teacher_tokenizer teacher_chat_template output_dir context "
    "min_context shard_documents loss_dtype trust_remote_code server "
    f"{_OF_SERVER} {_OF_WEIGHTS}"
)


def check(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; a ValueError where an argument is wrong."""
    parser = Parser("vocagnolm score", __doc__)
    add = parser.add_argument
    add("--teacher", help="Causal LM that scores: a hub name, a directory or a GGUF file.")
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
    add(
        "--api",
        choices=("vllm", "sglang", "echo", "llama.cpp"),
        help="Of the server; default: found.",
    )
    add("--concurrency", type=int, default=16, help="Requests at once.")
    add("--verify", type=Path, metavar="STORE", help="Compare a store with its checksums.")
    arguments = parser.parse_args(argv)
    _check_together(parser, arguments)
    for name in ("context", "min_context", "shard_documents", "batch_tokens", "concurrency"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")
    if arguments.quantization is not None:
        arguments.quantization = json_settings("--quantization", arguments.quantization)
        require_quantization(arguments.quantization, "--quantization")
    return arguments


def _check_together(parser: Parser, arguments: argparse.Namespace) -> None:
    """Raise a ValueError for an option that is missing, or has no effect, beside the others."""
    # argparse cannot require these, as --verify does without them.
    for name in ("teacher", "dataset", "output_dir"):
        if not arguments.verify and getattr(arguments, name) is None:
            raise ValueError(f"--{name} is required, unless a store is to be checked with --verify")
    if arguments.verify:
        parser.refuse(arguments, _OF_SCORING, "with --verify")
        if not arguments.dataset:
            parser.refuse(arguments, _OF_CORPUS, "with --verify without --dataset")
    elif arguments.server:
        require("httpx", "--server")
        if arguments.served_model is None:
            raise ValueError("--server needs --served_model, the name that it has for the teacher")
        parser.refuse(arguments, _OF_WEIGHTS, "with --server, which has the weights")
    else:
        parser.refuse(arguments, _OF_SERVER, "without --server")


@shell(
    "vocagnolm score", out_of_memory="lower --batch_tokens, --context or --dtype", resumable=True
)
def main(argv: Sequence[str] | None = None) -> int:
    """Score a corpus or verify a store, and return the exit status."""
    logging.getLogger("vocagnolm").setLevel(logging.INFO)
    arguments = check(argv)
    if arguments.verify:
        return _verify(arguments)
    # This import brings torch and transformers, which --help and --verify alone do not need.
    from vocagnolm.store.scoring import score

    score(arguments)
    return Exit.DONE


def _verify(arguments: argparse.Namespace) -> int:
    """Print the faults of a store, and return the exit status."""
    directory: Path = arguments.verify
    manifest = manifest_of(directory)
    shards = manifest[SHARDS]
    # Every byte is read and compared: a shard of the right size may hold other bytes.
    faults = find_faults(directory, shards, by_hash=True)
    for fault in faults.values():
        print_main(f"{directory}/{fault}")
    if faults:
        print_main(
            f"{len(faults)} of {len(shards)} shards are bad: delete them, and give the command "
            "again that made the store"
        )
        return Exit.FAULTS
    # The shards are whole, so that a document which is missing now was never in the store.
    if arguments.dataset:
        from vocagnolm.store.scoring import find_missing

        missing = find_missing(Store(directory), arguments)
        if missing:
            indices = ", ".join(map(str, missing[:10]))
            if len(missing) > 10:
                indices += ", ..."
            print_main(
                f"{len(missing):,} documents of {' '.join(arguments.dataset)} are not in "
                f"{directory}, or have another text there (indices from 0: {indices}): score "
                "this corpus into another directory, or train without them with --missing_losses "
                "skip"
            )
            return Exit.FAULTS
    print_main(f"{directory}: {len(shards)} shards, {manifest['tokens']:,} tokens, all good")
    return Exit.DONE
