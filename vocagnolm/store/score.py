"""Score a corpus with a teacher, once, for any student: writes a teacher-loss store.

    vocagnolm score --teacher T --dataset D --output_dir S
    accelerate launch -m vocagnolm.cli score --teacher T --dataset D --output_dir S
    vocagnolm score --server URL --served_model NAME --teacher T ...    # T's tokenizer, no weights
    vocagnolm score --verify S         # compare every byte with the checksums
    vocagnolm score --verify S --dataset D    # and look for every document
    vocagnolm score --repair --teacher T --dataset D --output_dir S    # score again what is bad
    vocagnolm score --verify S --push_to_hub NAME    # a data set with a card
    vocagnolm score --compare S1 S2    # two teachers of one corpus, or one teacher served twice
    vocagnolm score --compare S1 S2 --student M --student_losses S0 --dataset D   # and their choice

Killed at any moment, the same command continues at the shards that are not written. Any number of
processes may share the work. Exit status: 0 done, 1 faults found, 2 a wrong argument or file, 3
losses that are not finite, 130 interrupted. A server's key is read from VOCAGNOLM_API_KEY.
"""

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

from vocagnolm.cli import (
    Exit,
    Parser,
    json_settings,
    say,
    shell,
)
from vocagnolm.host.options import refuse_idle
from vocagnolm.store.store import Store, bad_shards, remedy

# Documents that are missing, of how many there may be.
_SHOWN = 10
# Of a block, as everywhere by default.
_BLOCK_TOKENS = 2048
_OF_ENGINES = "batch_tokens quantization attn_implementation"
_OF_TOKENIZERS = "teacher_revision teacher_tokenizer teacher_chat_template trust_remote_code"
_OF_DATASETS = ("dataset", "dataset_config", "dataset_split", "text_column", "format")


@shell(
    "vocagnolm score", out_of_memory="lower --batch_tokens, --context or --dtype", resumable=True
)
def main(argv: Sequence[str] | None = None) -> int:
    """Score, verify, repair or compare, and return the exit status."""
    logging.getLogger("vocagnolm").setLevel(logging.INFO)
    arguments = parse_score(argv)
    if arguments.verify:
        return _verify(arguments)
    if arguments.compare:
        return _compare(arguments)
    from vocagnolm.store.scoring import score

    score(arguments)
    return Exit.DONE


def parse_score(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; refuse missing options, and those without effect."""
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
    add("--engine", choices=("hf", "vllm"), default="hf")
    add("--attn_implementation", help="As in transformers. hf only.")
    add("--trust_remote_code", action="store_true")
    _add_server(parser)
    add("--verify", type=Path, metavar="STORE", help="Compare a store with its checksums.")
    add("--repair", action="store_true", help="Verify --output_dir first, and score what is bad.")
    add("--push_to_hub", metavar="NAME", help="Of the store that --verify has found good.")
    _add_compare(parser)
    arguments = parser.parse_args(argv)
    given = parser.given(arguments)
    if arguments.verify:
        read = {"verify", "push_to_hub", *(_OF_DATASETS if arguments.dataset else ())}
        refuse_idle(given, given - read, "with --verify")
    elif arguments.compare:
        of_student = {"student", "student_losses", "top_k", *_OF_DATASETS}
        read = {"compare", *(of_student if arguments.student else ())}
        refuse_idle(given, given - read, "with --compare")
        for name in ("student_losses", "dataset"):
            if arguments.student and name not in given:
                raise ValueError(f"--{name} is required with --compare and --student")
    else:
        _check_scoring(arguments, given)
    return arguments


def _add_server(parser: Parser) -> None:
    add = parser.add_argument
    add("--server", metavar="URL", help="Of a server that has the teacher.")
    add("--served_model", metavar="NAME", help="Of the teacher, on that server.")
    add("--dialect", choices=("vllm", "sglang", "openai"), help="Of the server; default: found.")
    add("--concurrency", type=int, default=16, help="Requests at once.")


def _add_compare(parser: Parser) -> None:
    add = parser.add_argument
    add("--compare", type=Path, nargs=2, metavar="STORE", help="Two stores of one corpus.")
    add("--student", help="Whose tokens they choose: a hub name or a directory.")
    add("--student_losses", type=Path, metavar="STORE", help="The student's own losses.")
    add("--top_k", type=float, default=0.4, help="Share of the tokens chosen, Eq. 4.")


def _check_scoring(arguments: argparse.Namespace, given: set[str]) -> None:
    for name in ("teacher", "dataset", "output_dir"):
        if name not in given and not (name == "teacher" and arguments.server):
            raise ValueError(f"--{name} is required, unless a store is to be checked with --verify")
    if arguments.server and not arguments.served_model:
        raise ValueError("--served_model is required with --server: the teacher's name there")
    for is_idle, names, condition in (
        (True, "push_to_hub", "without --verify"),
        (True, "student student_losses top_k", "without --compare"),
        (not arguments.server, "served_model dialect concurrency", "without --server"),
        (arguments.server, f"{_OF_ENGINES} dtype engine", "with --server"),
        (not arguments.teacher, _OF_TOKENIZERS, "without --teacher"),
        (arguments.engine == "vllm", _OF_ENGINES, "with --engine vllm"),
    ):
        if is_idle:
            refuse_idle(given, names.split(), condition)
    if arguments.quantization is not None:
        arguments.quantization = json_settings("--quantization", arguments.quantization)


def _verify(arguments: argparse.Namespace) -> int:
    """Tell the faults of a store, and return the exit status."""
    from vocagnolm.store.job import find_missing
    from vocagnolm.store.scoring import load_corpora

    directory: Path = arguments.verify
    opened = Store(directory)
    shards = len(opened.manifest["shards"])
    faults = bad_shards(directory, opened.manifest)
    for file, fault in faults.items():
        say(f"{directory / file} {fault}")
    if faults:
        say(f"{len(faults)} of {shards} shards are bad: {remedy(opened.manifest)}")
        return Exit.FAULTS
    missing = []
    if arguments.dataset:
        missing = find_missing(opened, load_corpora(arguments))
    if missing:
        shown = ", ".join(map(str, missing[:_SHOWN])) + (", ..." if len(missing) > _SHOWN else "")
        say(
            f"{len(missing):,} documents of {' '.join(arguments.dataset)} are not in "
            f"{directory}, or have another text there (numbers from 0: {shown}): score this corpus "
            "into another directory, or train without them with --missing_losses skip"
        )
        return Exit.FAULTS
    say(f"{directory}: {shards} shards, {opened.manifest['tokens']:,} tokens, all good")
    if arguments.push_to_hub:
        from vocagnolm.store.card import push_store

        say(f"pushed to {push_store(directory, arguments.push_to_hub)}")
    return Exit.DONE


def _compare(arguments: argparse.Namespace) -> int:
    """Tell how two stores differ, and return the exit status."""
    from vocagnolm.objective import Method
    from vocagnolm.store.difference import difference
    from vocagnolm.store.reselect_main import select

    # Checked before anything is read.
    Method("vocagnolm", arguments.top_k)
    one, other = map(Store, arguments.compare)
    for opened in (one, other):
        opened.check()
    found = difference(one, other)
    alike = found.documents - found.not_alike
    say(f"{alike:,} of {found.documents:,} documents cut alike, {found.tokens:,} tokens")
    say(f"correlation of the losses {found.correlation:.6f}")
    say(f"difference {found.mean_nats:.4g} nats on average, {found.largest_nats:.4g} at most")
    if arguments.student:
        options = {**vars(arguments), "teacher_losses": arguments.compare}
        options |= {"top_k": [arguments.top_k], "aggregation": ["max"], "unmapped": ["include"]}
        selections, _ = select(argparse.Namespace(**options, max_length=_BLOCK_TOKENS))
        chosen, both = selections.together[0, 0], selections.together[0, 1]
        share = 1 - both / max(chosen, 1)
        say(f"chosen otherwise {share:.2%} of the {chosen:,} tokens that the first chooses")
    return Exit.DONE
