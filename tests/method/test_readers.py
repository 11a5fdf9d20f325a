"""The tokens that open and close a text, and the fingerprint of a reader."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from vocagnolm.readers import student_reader, teacher_reader
from vocagnolm.spans import encode
from vocagnolm.tokenizer import start_id

Tokenizers = dict[str, PreTrainedTokenizerFast]


def test_start_id_is_that_of_the_first_token_there_is(tokenizers_by_family: Tokenizers) -> None:
    backend = tokenizers_by_family["nfc_digits"].backend_tokenizer  # has <|endoftext|> as well
    named = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|im_start|>")
    tokenizers = (
        (tokenizers_by_family["metaspace"], "<s>"),
        (named, "<|im_start|>"),
        # The separator, and not <|im_end|>, which is the end of a turn.
        (tokenizers_by_family["nfc_digits"], "<|endoftext|>"),
        (tokenizers_by_family["unigram"], tokenizers_by_family["unigram"].eos_token),
    )
    for tokenizer, expected in tokenizers:
        assert tokenizer.convert_ids_to_tokens(start_id(tokenizer, "student")) == expected
    with pytest.raises(ValueError, match=r"teacher tokenizer .* has no BOS token"):
        start_id(PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE())), "teacher")


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
