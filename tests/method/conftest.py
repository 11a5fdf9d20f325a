"""A corpus that is aligned once for the tests of packing and collation."""

from __future__ import annotations

from collections.abc import Callable

import datasets
import pytest
from transformers import PreTrainedTokenizerFast

from vocagnolm.data import Segments, align_corpus
from vocagnolm.readers import student_reader, teacher_reader

Tokenizers = dict[str, PreTrainedTokenizerFast]


@pytest.fixture(scope="module")
def corpus_texts(fuzz_texts: Callable[..., list[str]], training_texts: list[str]) -> list[str]:
    texts = [*training_texts[:30], *fuzz_texts(60, seed=5)]
    return [text for text in texts if text.strip()]


@pytest.fixture(scope="module")
def aligned(tokenizers_by_family: Tokenizers, corpus_texts: list[str]) -> Segments:
    student = student_reader(tokenizers_by_family["metaspace"], 48)
    teacher = teacher_reader(tokenizers_by_family["nfc_digits"], 60)
    return align_corpus(datasets.Dataset.from_dict({"text": corpus_texts}), student, teacher)


@pytest.fixture(scope="module")
def plain(tokenizers_by_family: Tokenizers, corpus_texts: list[str]) -> Segments:
    student = student_reader(tokenizers_by_family["metaspace"], 48)
    return align_corpus(datasets.Dataset.from_dict({"text": corpus_texts}), student, None)
