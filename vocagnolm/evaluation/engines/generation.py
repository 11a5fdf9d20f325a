"""The rules that all engines share: prompts in, completions out, cut at the first stop string.

Engines that choose the same tokens return the same completions. The rules are those of the
harness's vLLM path. The paper uses neither `Chat` nor `Sampling`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from transformers import GenerationConfig
from transformers import PreTrainedTokenizerBase as Tokenizer

from vocagnolm.chat.reading import special_ids
from vocagnolm.chat.render import DATE, check_date
from vocagnolm.evaluation.tasks.benchmarks import CHAT_PROTOCOL, INSTRUCTION
from vocagnolm.evaluation.tasks.tasks import Sampling, text_sha256
from vocagnolm.fields import OptionError, listed

# A stop string, an end-of-text token, `max_new_tokens` generated, or a full context.
FinishReason = Literal["stop", "eos", "length", "context"]


@dataclass(frozen=True)
class Chat:
    """A tokenizer with a chat template, in which the question is a user's turn."""

    tokenizer: Tokenizer
    source: str

    def __post_init__(self) -> None:
        check_date(self.source, "its tokenizer_config.json")
        if self.prompt("1 + 1?") == self.prompt("2 + 2?"):
            raise OptionError(
                "chat", "needs a template with the question, which the tokenizer's leaves out"
            )

    def prompt(self, *turns: str) -> str:
        """Render a question up to where the answer begins, or a question with its answer."""
        messages = []
        for role, turn in zip(("user", "assistant"), turns, strict=False):
            messages.append({"role": role, "content": turn})
        try:
            text = self.tokenizer.apply_chat_template(
                messages,
                chat_template=self.source,
                tokenize=False,
                add_generation_prompt=len(turns) == 1,
                date_string=DATE,  # Items may be asked on different days.
            )
        # A template can raise anything.
        except Exception as error:
            reason = " ".join(str(error).split())
            raise OptionError("chat", f"fails in the tokenizer's template ({reason})") from error
        return str(text)

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Return the special token that follows an answer in the template, if there is one."""
        # No template writes this private-use character, so it marks the answer.
        answer = "\ue000"
        after = self.prompt("?", answer).partition(answer)[2]
        ids = self.tokenizer(after, add_special_tokens=False)["input_ids"]
        special = special_ids(self.tokenizer)
        for token_id in ids:
            if token_id in special:
                return frozenset([token_id])
        return frozenset()

    def settings(self) -> dict[str, object]:
        """Return what two answers must have in common to belong together."""
        sha256 = text_sha256(self.source)
        return {"name": CHAT_PROTOCOL, "instruction": INSTRUCTION, "template_sha256": sha256}


@dataclass(frozen=True)
class Completion:
    """The text that a model wrote after one prompt."""

    # The index of the prompt in the call of `generate`.
    index: int
    # Cut at the first stop string, and stripped.
    text: str
    # Special tokens are included.
    n_prompt_tokens: int
    # Includes the end-of-text token or the tokens of the stop string.
    n_new_tokens: int
    finish_reason: FinishReason


class Engine:
    """Completes prompts by the rules. A subclass chooses the tokens."""

    def __init__(
        self, tokenizer: Tokenizer, context: int, ending: GenerationConfig, chat: Chat | None
    ):
        self.tokenizer = tokenizer
        # The most tokens of a prompt with its completion, or `NO_LIMIT`.
        self.context = context
        # Any of these tokens ends a text: the model's and the tokenizer's, and in a chat the one
        # that ends a turn.
        all_ids = {*listed(ending.eos_token_id), tokenizer.eos_token_id}
        if chat:
            all_ids |= chat.end_ids
        self.eos_ids = frozenset(all_ids - {None})
        # A chat template has already written the special tokens.
        self.add_special_tokens = chat is None

    def generate(
        self,
        prompts: Sequence[str],
        stops: Sequence[str],
        max_new_tokens: int,
        sampling: Sampling | None = None,
        seeds: Sequence[int] = (),
    ) -> Iterator[list[Completion]]:
        """Yield groups of completions as they finish, in any order, each prompt exactly once.

        Without `sampling`, decoding is greedy. With it, every prompt needs a seed.

        Raises:
            ValueError: a prompt leaves no room in the context. Nothing has run then.
        """
        if not prompts:
            return iter(())
        options = {"verbose": False, "add_special_tokens": self.add_special_tokens}
        encoded: list[list[int]] = self.tokenizer(list(prompts), **options)["input_ids"]
        rows = []
        for index, ids in enumerate(encoded):
            # A tokenizer may append the token that ends a text.
            if self.add_special_tokens and ids and ids[-1] in self.eos_ids:
                ids = ids[:-1]
            seed = seeds[index] if sampling else 0
            rows.append(Row(index, ids, self, stops, max_new_tokens, sampling, seed))
        too_long = sum(row.room < 1 for row in rows)
        if too_long:
            longest = max(len(row) for row in rows)
            raise ValueError(
                f"{too_long} of {len(rows)} prompts leave no room for a completion (the longest "
                f"has {longest} tokens, and the model's context {self.context}): use fewer "
                "examples, or a model with a longer context"
            )
        return self._run(rows)

    def _run(self, rows: "list[Row]") -> Iterator[list[Completion]]:
        raise NotImplementedError

    def decode(self, ids: Sequence[int]) -> str:
        """Decode generated ids, without special tokens."""
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return str(self.tokenizer.decode(list(ids), **options))


@dataclass(eq=False)
class Row:
    """A prompt and the tokens of its completion so far, which is tested for its end."""

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

    index: int
    prompt: list[int]
    engine: Engine
    stops: Sequence[str]
    max_new_tokens: int
    # None means greedy decoding, which draws nothing.
    sampling: Sampling | None = None
    seed: int = 0
    new: list[int] = field(default_factory=list)
    is_finished: bool = False
    _anchor: int = 0

    def __len__(self) -> int:
        return len(self.prompt) + len(self.new)

    @property
    def room(self) -> int:
        """The number of tokens that may still follow."""
        return min(self.max_new_tokens - len(self.new), self.engine.context - len(self))

    def append(self, token: int) -> None:
        """Add a token, and test whether it ends the completion."""
        self.new.append(token)
        is_last = token in self.engine.eos_ids or not self.room
        self.is_finished = is_last or self._completes_a_stop()

    def _completes_a_stop(self) -> bool:
        if not self.stops:
            return False
        longest_stop = max(map(len, self.stops))
        text = self.engine.decode(self.new[self._anchor :])
        # Most tokens have at least one character, so these contain any unfinished stop string.
        distance = longest_stop + 4
        if len(self.new) - self._anchor >= 2 * distance:
            tail = self.engine.decode(self.new[-distance:])
            # U+FFFD stands for bytes that are not a whole character.
            whole = len(tail) > longest_stop and "\ufffd" not in tail
            if whole and text.endswith(tail):
                self._anchor = len(self.new) - distance
        return any(stop in text for stop in self.stops)

    def completion(self) -> Completion:
        """Build the completion from the tokens."""
        text = self.engine.decode(self.new)
        reason: FinishReason = "stop"
        if not any(stop in text for stop in self.stops):
            if self.new and self.new[-1] in self.engine.eos_ids:
                reason = "eos"
            elif len(self.new) == self.max_new_tokens:
                reason = "length"
            elif not self.room:
                reason = "context"
        text = cut(text, self.stops)
        return Completion(self.index, text, len(self.prompt), len(self.new), reason)


def cut(text: str, stops: Sequence[str]) -> str:
    r"""Cut a text before the first stop string, and strip it.

    >>> cut(" 7.\n\nProblem: 1 + 1\n\nQuestion: 2", ["\n\nQuestion:", "\n\nProblem:"])
    '7.'
    """
    end = len(text)
    for stop in stops:
        place = text.find(stop)
        if place >= 0:
            end = min(end, place)
    return text[:end].strip()
