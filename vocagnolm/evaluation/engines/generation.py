"""The rules of every engine: prompts in, greedy completions out, cut at the first stop string.

Two engines that choose the same tokens give the same completions. The rules are those of the
harness's vLLM path; `Chat` is another protocol than the paper's.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from transformers import GenerationConfig
from transformers import PreTrainedTokenizerBase as Tokenizer

from vocagnolm.chat.reading import special_ids
from vocagnolm.chat.render import DATE, check_date
from vocagnolm.evaluation.tasks.benchmarks import CHAT_PROTOCOL, INSTRUCTION

# A stop string, an end-of-text token, `max_new_tokens` were generated, the context is full.
FinishReason = Literal["stop", "eos", "length", "context"]
# Stands for bytes that are no character, such as half of one.
_UNDECODABLE = "\ufffd"
# Stands for an answer in a chat template.
_MARK = "\ue000"


@dataclass(frozen=True)
class Chat:
    """A tokenizer and a chat template."""

    tokenizer: Tokenizer
    source: str

    def __post_init__(self) -> None:
        check_date(self.source, "its tokenizer_config.json")

    def prompt(self, question: str) -> str:
        """Render a user's turn, and the beginning of the answer."""
        return self._render([{"role": "user", "content": question}], answers=True)

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """The token with which the template ends an answer; none where that is no special one."""
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
        after = self._render(turns, answers=False).partition(_MARK)[2]
        ids = self.tokenizer(after, add_special_tokens=False)["input_ids"] if after else []
        special = special_ids(self.tokenizer)
        return frozenset([id for id in ids if id in special][:1])

    def settings(self) -> dict[str, object]:
        """Return what two answers must share to belong together."""
        sha256 = hashlib.sha256(self.source.encode()).hexdigest()
        return {"name": CHAT_PROTOCOL, "instruction": INSTRUCTION, "template_sha256": sha256}

    def _render(self, turns: list[dict[str, str]], *, answers: bool) -> str:
        text = self.tokenizer.apply_chat_template(
            turns,
            chat_template=self.source,
            tokenize=False,
            add_generation_prompt=answers,
            date_string=DATE,  # items are asked on many days
        )
        return str(text)


@dataclass(frozen=True)
class Completion:
    """The text that a model wrote after one prompt."""

    # Position among the prompts given to `generate`.
    index: int
    # Cut at the first stop string, stripped.
    text: str
    # Special ones included.
    n_prompt_tokens: int
    # The end-of-text token or those of the stop string included.
    n_new_tokens: int
    finish_reason: FinishReason


@dataclass(frozen=True)
class Decoding:
    """The rules of one call of an engine's `generate`."""

    tokenizer: Tokenizer
    stops: tuple[str, ...]
    max_new_tokens: int
    # The most tokens of a prompt and its completion; `NO_LIMIT` if there is none.
    context: int
    eos_ids: frozenset[int]
    # A chat template has written them already.
    add_special_tokens: bool = True

    def rows(self, prompts: Sequence[str]) -> "list[Row]":
        """Tokenize each prompt; a ValueError where one leaves no room for a completion."""
        if not prompts:
            return []
        options = {"verbose": False, "add_special_tokens": self.add_special_tokens}
        encoded: list[list[int]] = self.tokenizer(list(prompts), **options)["input_ids"]
        rows = [Row(index, ids, self) for index, ids in enumerate(encoded)]
        if too_long := sum(row.room < 1 for row in rows):
            raise ValueError(
                f"{too_long} of {len(rows)} prompts leave no room for a completion: the longest "
                f"has {max(map(len, rows))} tokens and the model's context holds {self.context}; "
                "use fewer examples, or a model with a longer context"
            )
        return rows

    def decode(self, ids: Sequence[int]) -> str:
        """Turn generated ids into text, without special tokens."""
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return str(self.tokenizer.decode(list(ids), **options))

    def has_stop(self, text: str) -> bool:
        """True if a stop string occurs in a text."""
        return any(stop in text for stop in self.stops)


class Row:
    """A prompt and the tokens so far of its completion, watched for the end as they come."""

    # Stop strings are searched for in the last tokens only, decoded from an anchor that follows at
    # a distance:
    #
    #     ids      o o o o o o o o o o o o o o o
    #                        ^ anchor          ^ new
    #     decoded            [---------------->]
    #
    # The tokens before the anchor change nothing after it: it is moved only to a place where the
    # text so far ends with the text of the tokens from there on, every character of which is whole.
    # A decoder with byte fallback even makes all bytes of a run unreadable for one that is wrong.

    def __init__(self, index: int, prompt: list[int], decoding: Decoding):
        self.index, self.prompt = index, prompt
        self.new: list[int] = []
        self.is_finished = False
        self._decoding = decoding
        self._most = min(decoding.max_new_tokens, decoding.context - len(prompt))
        self._longest_stop = max(map(len, decoding.stops), default=0)
        self._anchor = 0

    def __len__(self) -> int:
        return len(self.prompt) + len(self.new)

    @property
    def room(self) -> int:
        """Tokens that may still follow."""
        return self._most - len(self.new)

    def append(self, token: int) -> None:
        """Add a token, and see whether the completion ends with it."""
        self.new.append(token)
        self.is_finished = (
            token in self._decoding.eos_ids or not self.room or self._completes_a_stop()
        )

    def _completes_a_stop(self) -> bool:
        if not self._longest_stop:
            return False
        text = self._decoding.decode(self.new[self._anchor :])
        # A token is mostly one character or more: nothing of an unfinished stop string is lost.
        distance = self._longest_stop + 4
        if len(self.new) - self._anchor >= 2 * distance:
            tail = self._decoding.decode(self.new[-distance:])
            whole = len(tail) > self._longest_stop and _UNDECODABLE not in tail
            if whole and text.endswith(tail):
                self._anchor = len(self.new) - distance
        return self._decoding.has_stop(text)

    def completion(self) -> Completion:
        """Build the completion from the tokens."""
        text, stops = self._decoding.decode(self.new), self._decoding.stops
        reason: FinishReason = "stop"
        if not self._decoding.has_stop(text):
            if self.new and self.new[-1] in self._decoding.eos_ids:
                reason = "eos"
            elif len(self.new) == self._decoding.max_new_tokens:
                reason = "length"
            elif not self.room:
                reason = "context"
        return Completion(self.index, cut(text, stops), len(self.prompt), len(self.new), reason)


def cut(text: str, stops: Sequence[str]) -> str:
    r"""Cut a text before the first occurrence of any stop string, and strip it.

    >>> cut(" 7.\n\nProblem: 1 + 1\n\nQuestion: 2", ["\n\nQuestion:", "\n\nProblem:"])
    '7.'
    """
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(found, default=len(text))].strip()


def shared_length(sequences: Sequence[list[int]]) -> int:
    """Count the tokens that all sequences begin with.

    >>> shared_length([[1, 2, 3], [1, 2, 4], [1, 2]])
    2
    """
    # In sorted order, the first and the last differ first where any two do.
    first, last = min(sequences), max(sequences)
    for count, (one, other) in enumerate(zip(first, last, strict=False)):
        if one != other:
            return count
    return len(first)


def end_of_text_ids(
    config: GenerationConfig, tokenizer: Tokenizer, chat: Chat | None = None
) -> frozenset[int]:
    """Collect the ids that end a text: of the generation config, the tokenizer and the template."""
    ids = config.eos_token_id
    own = {*(ids if isinstance(ids, list) else [ids]), tokenizer.eos_token_id} - {None}
    return frozenset(own | (chat.end_ids if chat else set()))
