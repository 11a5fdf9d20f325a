"""Lets a `tokenizers.Tokenizer` be used without transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PlainTokenizer:
    """A `tokenizers.Tokenizer` with the parts of transformers' fast tokenizers that are used."""

    backend_tokenizer: Any
    is_fast = True
    name_or_path = ""

    def __call__(
        self, texts: Sequence[str], *, split_special_tokens: bool, **_: object
    ) -> dict[str, list[Any]]:
        """Return the ids and offsets of texts. `without_limits` restores the backend."""
        backend = self.backend_tokenizer
        backend.encode_special_tokens = split_special_tokens
        batch = backend.encode_batch(texts, add_special_tokens=False)
        return {
            "input_ids": [encoding.ids for encoding in batch],
            "offset_mapping": [encoding.offsets for encoding in batch],
        }

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size())

    def get_vocab(self) -> dict[str, int]:
        """Return the ids of all tokens, including added ones."""
        return dict(self.backend_tokenizer.get_vocab())

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        """The added tokens by their ids."""
        return dict(self.backend_tokenizer.get_added_tokens_decoder())


def as_fast(tokenizer: Any) -> Any:
    """Make a `tokenizers.Tokenizer` usable like those of transformers."""
    is_plain = hasattr(tokenizer, "encode_batch_fast") and hasattr(tokenizer, "to_str")
    return PlainTokenizer(tokenizer) if is_plain else tokenizer
