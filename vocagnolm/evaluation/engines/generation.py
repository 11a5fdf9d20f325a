"""What every engine obeys: prompts in, greedy completions out, cut at the first stop string.

Enters: prompts. Leaves: completions. Knows neither benchmarks nor models: an engine asks `Decoding`
what a prompt's tokens are, how many may follow them and what becomes of those, so that two engines
that choose the same tokens give the same completions. The rules are those of the evaluation
harness's vLLM path (greedy, at most so many tokens and never past the context, the text before the
first stop string).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

FinishReason = Literal["stop", "eos", "length", "context"]
_UNDECODABLE = "\ufffd"  # stands where bytes are no character, such as half of one


@dataclass(frozen=True)
class Completion:
    """What a model wrote after one prompt.

    Attributes:
        index: which of the prompts given to `generate`.
        text: cut at the first stop string, stripped.
        n_prompt_tokens: tokens of the prompt, special ones included.
        n_new_tokens: tokens generated, the end-of-text token or those of the stop string included.
        finish_reason: "stop" (a stop string), "eos" (an end-of-text token), "length"
            (`max_new_tokens` were generated) or "context" (the model's context is full).
    """

    index: int
    text: str
    n_prompt_tokens: int
    n_new_tokens: int
    finish_reason: FinishReason


class Engine(Protocol):
    """Completes prompts."""

    def generate(
        self, prompts: Sequence[str], stops: Sequence[str], max_new_tokens: int
    ) -> Iterator[list[Completion]]:
        """Give groups of completions as they finish, in any order, each prompt exactly once.

        Raises:
            ValueError: at once, before anything runs, if a prompt leaves no room in the context.
        """
        ...


def shared_length(sequences: Sequence[list[int]]) -> int:
    """How many tokens all sequences begin with.

    >>> shared_length([[1, 2, 3], [1, 2, 4], [1, 2]])
    2
    """
    first, last = min(sequences), max(sequences)  # they differ first where any two do
    pairs = enumerate(zip(first, last, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(first), len(last)))


def cut(text: str, stops: Sequence[str]) -> str:
    r"""The text before the first occurrence of any stop string, stripped.

    >>> cut(" 7.\n\nProblem: 1 + 1\n\nQuestion: 2", ["\n\nQuestion:", "\n\nProblem:"])
    '7.'
    """
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(found, default=len(text))].strip()


def end_of_text_ids(generation_config: Any, tokenizer: Any) -> frozenset[int]:
    """Every id that ends a text: those of the model's generation config, and the tokenizer's."""
    ids = generation_config.eos_token_id
    listed = [] if ids is None else ids if isinstance(ids, list) else [ids]
    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return frozenset([*listed, *own])


def context_length(config: Any) -> int | None:
    """The most tokens a model holds, prompt included; None where its configuration names no limit.

    A "longrope" model rotates differently past the length it was first trained with, and does so
    for a whole batch as soon as one of its rows is longer: its context ends there.
    """
    text_config = config.get_text_config()
    length = getattr(text_config, "max_position_embeddings", None)
    rope = getattr(text_config, "rope_parameters", None) or {}
    if length and rope.get("rope_type") == "longrope":
        length = min(length, rope.get("original_max_position_embeddings", length))
    return int(length) if length else None


@dataclass(frozen=True)
class Decoding:
    """The rules of one call of `generate`.

    Attributes:
        tokenizer: a tokenizer of `transformers`.
        stops: strings that end a completion, in generated text only.
        max_new_tokens: the most tokens of a completion.
        context: the most tokens of a prompt and its completion; None without a limit.
        eos_ids: ids that end a completion.
    """

    tokenizer: Any
    stops: tuple[str, ...]
    max_new_tokens: int
    context: int | None
    eos_ids: frozenset[int]

    def __post_init__(self) -> None:
        if "" in self.stops:
            raise ValueError("a stop string is empty and would end every completion: leave it out")
        if self.max_new_tokens < 1:
            raise ValueError(
                f"max_new_tokens is {self.max_new_tokens}: give the tokens of a completion, 1 or "
                "more"
            )

    def encode(self, prompts: Sequence[str]) -> list[list[int]]:
        """Token ids of each prompt, with the special tokens that the tokenizer adds to a text.

        Raises:
            ValueError: a prompt has no token, or leaves no room for one more in the context.
        """
        if not prompts:
            return []
        encoded: list[list[int]] = self.tokenizer(list(prompts), verbose=False)["input_ids"]
        lengths = [len(ids) for ids in encoded]
        if not min(lengths):
            raise ValueError(
                f"prompt {lengths.index(0)} has no token, and a model needs one to continue: write "
                "something into it"
            )
        too_long = sum(self.cap(length) < 1 for length in lengths)
        if too_long:
            raise ValueError(
                f"{too_long} of {len(prompts)} prompts leave no room for a completion: the longest "
                f"has {max(lengths)} tokens and the model's context holds {self.context}; use fewer"
                " or shorter examples, or a model with a longer context"
            )
        return encoded

    def cap(self, n_prompt_tokens: int) -> int:
        """The most tokens that may follow a prompt of so many."""
        if self.context is None:
            return self.max_new_tokens
        return min(self.max_new_tokens, self.context - n_prompt_tokens)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of generated ids, without special tokens."""
        text: str = self.tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def has_stop(self, text: str) -> bool:
        """Whether a stop string occurs in a text."""
        return any(stop in text for stop in self.stops)

    def completion(self, index: int, n_prompt_tokens: int, ids: Sequence[int]) -> Completion:
        """What has become of a prompt, from the ids generated until one of the rules ended it."""
        text = self.decode(ids)
        return Completion(
            index=index,
            text=cut(text, self.stops),
            n_prompt_tokens=n_prompt_tokens,
            n_new_tokens=len(ids),
            finish_reason=self._finish_reason(text, n_prompt_tokens, ids),
        )

    def _finish_reason(self, text: str, n_prompt_tokens: int, ids: Sequence[int]) -> FinishReason:
        if self.has_stop(text):
            return "stop"
        if ids and ids[-1] in self.eos_ids:
            return "eos"
        if len(ids) == self.max_new_tokens:
            return "length"
        return "context" if len(ids) == self.cap(n_prompt_tokens) else "stop"


class GeneratedTokens:
    """The tokens of one completion, watched for stop strings as they come.

    Only the last tokens are decoded at every step, from an anchor that follows at a distance. What
    comes before the anchor can change nothing after it: an anchor is moved only to where the text
    so far ends with the text of the tokens from there on, every character of which is whole. That
    matters where characters are spread over tokens; a decoder with byte fallback even makes all
    bytes of a run unreadable for one that is wrong.

    Attributes:
        ids: the tokens so far.
    """

    def __init__(self, decoding: Decoding):
        self.ids: list[int] = []
        self._decoding = decoding
        self._longest_stop = max(map(len, decoding.stops), default=0)  # characters
        self._anchor = 0

    def append(self, token: int) -> bool:
        """Add a token, and say whether it completes a stop string."""
        self.ids.append(token)
        if not self._longest_stop:
            return False
        text = self._decoding.decode(self.ids[self._anchor :])
        self._follow(text)
        return self._decoding.has_stop(text)

    def _follow(self, text: str) -> None:
        """Move the anchor, if it lags, to where nothing of an unfinished stop string is lost."""
        distance = self._longest_stop + 4  # a token is mostly one character or more
        if len(self.ids) - self._anchor < 2 * distance:
            return
        tail = self._decoding.decode(self.ids[-distance:])
        whole = len(tail) > self._longest_stop and _UNDECODABLE not in tail
        if whole and text.endswith(tail):
            self._anchor = len(self.ids) - distance
