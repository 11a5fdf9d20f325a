"""Questions in a model's own chat template, zero-shot: another protocol than the paper's."""

import hashlib
from dataclasses import dataclass
from functools import cached_property

from transformers import PreTrainedTokenizerBase as Tokenizer

from vocagnolm.chat.reading import special_ids
from vocagnolm.chat.render import DATE, check_date
from vocagnolm.evaluation.tasks.benchmarks import CHAT_PROTOCOL, INSTRUCTION

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
