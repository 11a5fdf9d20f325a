"""Write a store of a teacher's losses on a corpus, for students with any tokenizer.

    vocagnolm score --teacher T --dataset D --output_dir S
    accelerate launch -m vocagnolm score --teacher T --dataset D --output_dir S
    vocagnolm score --server URL --served_model NAME --teacher T ...    # needs only T's tokenizer
    vocagnolm score --verify S         # compare every byte with the checksums

If the command is interrupted, even killed, give it again: it scores the missing shards. If the
corpus has grown, it scores what is new. To replace shards that --verify finds damaged, delete them
and score again. Any number of processes may share the work. A server's key is read from
VOCAGNOLM_API_KEY.
Exit status: 0 done, 1 faults found, 2 a wrong argument or file, 3 a loss is not finite, 130
interrupted.
"""

import argparse
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from vocagnolm.cli import Exit, Parser, shell, switch
from vocagnolm.fields import OptionError, in_range, json_settings
from vocagnolm.shell.io import print_main
from vocagnolm.store.format import SHARDS, find_faults, manifest_of


def make_parser() -> Parser:
    """Return the parser of the options."""
    parser = Parser("vocagnolm score", __doc__)
    # Errors name the model by its role, which `vocagnolm rank` sets.
    parser.set_defaults(role="teacher")
    add = parser.add_argument
    add(
        "--verify",
        type=Path,
        metavar="STORE",
        excludes=["dataset"],
        help="Check a store against its checksums.",
    )
    parser.add_dataset(several=True)
    add = partial(parser.add_argument, excludes=["verify"])
    add("--teacher", hub="model", help="Causal LM: a hub name, a directory or a GGUF file.")
    add("--teacher_revision", help="Branch, tag or commit on the hub.")
    add("--teacher_tokenizer", hub="model", help="If it is not stored with the weights.")
    add("--teacher_chat_template", help="plain, chatml or a file; default: the tokenizer's own.")
    add("--output_dir", type=Path, help="Directory of the store.")
    add(
        "--context",
        type=int,
        help="Maximum tokens per window; default: the model's context, at most 4096.",
    )
    add(
        "--min_context",
        type=int,
        help="Tokens that a window repeats from the one before; default: a quarter of the context, "
        "at most 512.",
    )
    add("--shard_documents", type=int, default=1000, help="Documents per shard.")
    dtypes = ("float16", "float32")
    add("--loss_dtype", choices=dtypes, default="float16", help="Precision of the stored losses.")
    add("--trust_remote_code", action="store_true")
    # A server has the weights.
    excludes = ["verify", "server"]
    add = partial(parser.add_argument, excludes=excludes)
    add("--batch_tokens", type=int, default=16384, help="Tokens per forward pass.")
    parser.add_dtype(excludes=excludes)
    add("--quantization", help="A transformers quantization config, as JSON.")
    add("--attn_implementation", help="As in from_pretrained.")
    add(
        "--torch_compile",
        nargs="?",
        const=True,
        default=False,
        type=switch,
        help="Compile the layers, which changes losses by rounding; true or false.",
    )
    add = partial(parser.add_argument, needs=["server"], excludes=["verify"])
    parser.add_argument("--server", metavar="URL", help="Server that runs the teacher.")
    add("--served_model", metavar="NAME", help="The teacher's name on that server.")
    apis = ("vllm", "sglang", "echo")
    add("--api", choices=apis, default="vllm", help="The server's kind; default: vllm.")
    add("--concurrency", type=int, default=16, help="Requests in flight.")
    return parser


def check(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line.

    Raises:
        ValueError: an argument is wrong.
    """
    parser = make_parser()
    arguments = parser.parse_args(argv)
    # argparse cannot require these, because --verify works without them.
    for name in ("teacher", "dataset", "output_dir"):
        if not arguments.verify and getattr(arguments, name) is None:
            raise OptionError(name, "is required without --verify")
    if arguments.server and arguments.served_model is None:
        raise OptionError("server", "needs --served_model, the teacher's name on that server")
    # A window has a start token, and at least one more.
    in_range(arguments, "[2, inf)", "context")
    in_range(arguments, "[1, inf)", "min_context", "shard_documents", "batch_tokens", "concurrency")
    if arguments.quantization is not None:
        arguments.quantization = json_settings("quantization", arguments.quantization)
    return arguments


@shell(
    "vocagnolm score", out_of_memory="lower --batch_tokens, --context or --dtype", resumable=True
)
def main(argv: Sequence[str] | None = None) -> int:
    """Score a corpus or verify a store, and return the exit status."""
    logging.getLogger("vocagnolm").setLevel(logging.INFO)
    arguments = check(argv)
    if arguments.verify:
        return _verify(arguments.verify)
    # This imports torch and transformers, which --help and --verify do not need.
    from vocagnolm.store.scoring import score

    score(arguments)
    return Exit.DONE


def _verify(directory: Path) -> int:
    """Print the faults of a store, and return the exit status."""
    manifest = manifest_of(directory)
    shards = manifest[SHARDS]
    # Compare every byte, because a shard of the right size may have other content.
    faults = find_faults(directory, shards, by_hash=True)
    for fault in faults.values():
        print_main(f"{directory}/{fault}")
    if faults:
        print_main(
            f"{len(faults)} of {len(shards)} shards are damaged: delete them, and repeat the "
            "command that made the store"
        )
        return Exit.FAULTS
    print_main(f"{directory}: {len(shards)} shards, {manifest['tokens']:,} tokens, all good")
    return Exit.DONE
