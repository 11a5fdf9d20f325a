"""A corpus that is aligned once for packing and collation, and small tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from vocagnolm.data import Segments

    Tokenizers = dict[str, PreTrainedTokenizerFast]


def _align(tokenizers: Tokenizers, texts: list[str], teacher_family: str | None) -> Segments:
    # These take seconds to import, and most tests of this folder do not need them.
    import datasets

    from vocagnolm.data import align_corpus
    from vocagnolm.readers import student_reader, teacher_reader

    student = student_reader(tokenizers["metaspace"], 48)
    teacher = teacher_reader(tokenizers[teacher_family], 60) if teacher_family else None
    return align_corpus(datasets.Dataset.from_dict({"text": texts}), student, teacher)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the heads of tiny models compute in several tiles, the last one ragged."""
    from architectures import VOCABULARY

    from vocagnolm import output_head

    monkeypatch.setattr(output_head, "TILE_LOGITS", 4 * VOCABULARY + 1)


@pytest.fixture(scope="module")
def corpus_texts(fuzz_texts: Callable[..., list[str]], training_texts: list[str]) -> list[str]:
    texts = [*training_texts[:30], *fuzz_texts(60, seed=5)]
    return [text for text in texts if text.strip()]


@pytest.fixture(scope="module")
def aligned(tokenizers_by_family: Tokenizers, corpus_texts: list[str]) -> Segments:
    return _align(tokenizers_by_family, corpus_texts, "nfc_digits")


@pytest.fixture(scope="module")
def plain(tokenizers_by_family: Tokenizers, corpus_texts: list[str]) -> Segments:
    return _align(tokenizers_by_family, corpus_texts, None)
