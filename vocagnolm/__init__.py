"""Vocabulary-agnostic teacher-guided language modelling (VocAgnoLM, arXiv 2503.19123).

The method lies flat here; everything around it is in packages. Read it in this order:

    conventions    letters of shapes, -100 and -1, half-open, nats
    fields         how an option is declared and checked
    method         the settings of a method
    files          a directory, a split -> the files of documents that are read
    jsonl          a file of JSON -> its rows, whatever is wrong with some
    corpus         a file, a directory, a hub name -> a column of text
    texts          a column -> texts or conversations, and what is wrong with some
    hub            a name that the hub cannot have, a hub that is away
    gguf           a name -> a directory or repository, and the GGUF file in it
    tokenizer      a name -> a tokenizer that loses no text
    token_bytes    tokens -> the bytes they stand for
    plain_tokenizer a tokenizers.Tokenizer in place of transformers'
    composed       characters that NFC composes to one
    spans          text -> ids and character spans without gaps
    readers        tokens that open and close a text, and its limit; what guides a student
    alignment      Algorithm 1: the teacher tokens that cover each student token
    credit         losses of teacher tokens -> of student tokens, or advantages, in NumPy
    cutting        a long text -> places to cut it
    layout         segments of many texts -> flat columns
    data           documents -> segments that fit all readers, aligned, cached
    packing        segments -> packed sequences of max_length tokens
    collator       packed sequences -> a batch, ranges re-based
    attention      where documents end in a packed row
    output_head    hidden states -> logits, a tile at a time
    token_loss     Eq. 1: the loss of every token
    weighted_loss  Eq. 3 in one pass of the head, where a weight follows from the token's own losses
    guidance       Eq. 2, Eq. 4: losses in, weights out
    distillation   Eq. 5, Eq. 6
    objective      what a method makes of a batch, and where the teacher's losses come from
    trainer        Eq. 3: the step; its loop is `transformers.Trainer`'s

The names of `__all__` are imported when they are first used, so that work on text loads no torch.
"""

import importlib
from typing import Any

_MODULES = {
    "Blocks": "packing",
    "Method": "method",
    "Objective": "objective",
    "PackedCollator": "collator",
    "VocAgnoConfig": "training.config",
    "VocAgnoTrainer": "trainer",
    "add_token_losses": "token_loss",
    "aggregate_teacher_losses": "guidance",
    "align_spans": "alignment",
    "encode": "spans",
    "prepare_dataset": "training.assembly",
    "select_tokens": "guidance",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return vars(importlib.import_module(f"{__name__}.{_MODULES[name]}"))[name]


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
