"""Questions in a model's own chat template, zero-shot: another protocol than the paper's."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from vocagnolm.chat.render import DATE, check_date
from vocagnolm.chat.turns import special_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

# The name of this protocol in all that is written.
PROTOCOL = "zero-shot chat"
# Behind the question, as the model cards of DeepSeekMath and Qwen2.5-Math say to ask.
INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."
# Chains of thought are longer than a few-shot answer; Qwen2.5-Math's evaluation allows as many.
MAX_NEW_TOKENS = 2048
_MARK = "\ue000"


@dataclass(frozen=True)
class Chat:
    """A tokenizer with a chat template, its own or another one."""

    tokenizer: Tokenizer
    source: str

    def __post_init__(self) -> None:
        check_date(self.source, "--chat_template FILE")

    def prompt(self, question: str) -> str:
        """Render a user's turn, and the beginning of the answer."""
        return self._render([{"role": "user", "content": question}], answers=True)

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """The token with which the template ends an answer; none where that is no special one."""
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
        behind = self._render(turns, answers=False).partition(_MARK)[2]
        ids = self.tokenizer(behind, add_special_tokens=False)["input_ids"] if behind else []
        special = special_ids(self.tokenizer)
        return frozenset([id for id in ids if id in special][:1])

    def settings(self) -> dict[str, object]:
        """Return what two answers must share to belong together."""
        sha256 = hashlib.sha256(self.source.encode()).hexdigest()
        return {"name": PROTOCOL, "instruction": INSTRUCTION, "template_sha256": sha256}

    def _render(self, turns: list[dict[str, str]], *, answers: bool) -> str:
        try:
            text = self.tokenizer.apply_chat_template(
                turns,
                chat_template=self.source,
                tokenize=False,
                add_generation_prompt=answers,
                date_string=DATE,  # items are asked on many days
            )
        # A template can raise anything.
        except Exception as error:
            said = " ".join(str(error).split())
            raise ValueError(f"--chat: the template says: {said}") from error
        return str(text)


def load_chat(tokenizer: Tokenizer, file: Path | None) -> Chat:
    """Take a model's own template, or that of a file; a ValueError where there is none."""
    if file is not None:
        try:
            return Chat(tokenizer, file.read_bytes().decode())
        except (OSError, UnicodeDecodeError) as error:
            expected = f"--chat_template {file}: expected a Jinja template in UTF-8"
            raise ValueError(f"{expected}, found: {error}") from error
    if not tokenizer.chat_template:
        raise ValueError(
            "--chat: the model has no chat template: give one by --chat_template FILE, or ask "
            "few-shot, without --chat"
        )
    return Chat(tokenizer, tokenizer.get_chat_template())
