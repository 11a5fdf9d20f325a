"""The tokens that open and close a text, and the fingerprint of a reader."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from vocagnolm.readers import student_reader, teacher_reader
from vocagnolm.spans import encode
from vocagnolm.tokenizer import start_id

Tokenizers = dict[str, PreTrainedTokenizerFast]


def test_start_id_prefers_the_bos_token(tokenizers_by_family: Tokenizers) -> None:
    assert start_id(tokenizers_by_family["metaspace"], "student") == 1
    backend = tokenizers_by_family["nfc_digits"].backend_tokenizer  # has <|endoftext|> as well
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|im_start|>")
    assert start_id(tokenizer, "student") == backend.token_to_id("<|im_start|>")


def test_start_id_without_bos_is_the_separator(tokenizers_by_family: Tokenizers) -> None:
    tokenizer = tokenizers_by_family["nfc_digits"]
    separator = start_id(tokenizer, "teacher")
    assert tokenizer.convert_ids_to_tokens(separator) == "<|endoftext|>"
    assert separator != tokenizer.eos_token_id  # <|im_end|>, the end of a turn


def test_start_id_at_last_is_the_eos_token(tokenizers_by_family: Tokenizers) -> None:
    tokenizer = tokenizers_by_family["unigram"]
    assert start_id(tokenizer, "teacher") == tokenizer.eos_token_id is not None


def test_start_id_rejects_when_there_is_no_candidate() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    with pytest.raises(ValueError, match=r"^teacher tokenizer in memory \(.*\) has no BOS token"):
        start_id(tokenizer, "teacher")


def test_student_without_end_token_is_rejected(tokenizers_by_family: Tokenizers) -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers_by_family["metaspace"].backend_tokenizer, bos_token="<s>"
    )
    with pytest.raises(ValueError, match="has no EOS token: set eos_token"):
        student_reader(tokenizer, 32)


def test_reader_fingerprint_stays_when_the_tokenizer_was_used(
    tokenizers_by_family: Tokenizers,
) -> None:
    tokenizer = tokenizers_by_family["metaspace"]
    for reader in (student_reader(tokenizer, 32), teacher_reader(tokenizer, 40)):
        before = reader.fingerprint()
        encode(reader.tokenizer, "text </s>")
        assert reader.fingerprint() == before
