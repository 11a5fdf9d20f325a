"""Vocabulary-agnostic teacher-guided language modelling (VocAgnoLM, arXiv 2503.19123).

The method is in the modules here, and everything around it is in packages. Read it in this order:

    conventions    letters of shapes, -100 and -1, half-open, nats
    fields         declares and checks options
    method         the settings of a method
    texts          rows of a file -> documents, conversations, or reasons why they are skipped
    corpus         a file, a directory, a hub name -> a column of text
    tokenizer      a name -> a tokenizer that loses no text
    token_bytes    tokens -> the bytes they stand for
    spans          text -> ids and character spans without gaps
    readers        a model's tokens of a text, with start and end tokens and limits
    alignment      Algorithm 1: the teacher tokens that cover each student token
    credit         teacher losses -> losses or advantages of student tokens, in NumPy
    cutting        a long text -> places to cut it
    layout         segments of many texts -> flat columns
    data           documents -> segments that fit all readers, aligned, cached
    packing        segments -> packed sequences of max_length tokens
    collator       packed sequences -> a batch
    attention      keeps the documents of a packed row apart
    output_head    hidden states -> logits, a tile at a time
    token_loss     Eq. 1: the loss of every token
    weighted_loss  Eq. 3 in one pass of the head, if weights depend on own losses only
    guidance       Eq. 2, Eq. 4: losses in, weights out
    distillation   Eq. 5, Eq. 6: distances between distributions
    objective      a method with its teacher: a batch -> weights
    trainer        Eq. 3: the step, in the loop of `transformers.Trainer`

The names in `__all__` are imported when they are first used, so that work on text imports no torch.
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
    "prepare_dataset": "training.in_python",
    "select_tokens": "guidance",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return vars(importlib.import_module(f"{__name__}.{_MODULES[name]}"))[name]


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
