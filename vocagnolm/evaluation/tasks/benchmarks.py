"""The benchmarks as data: `benchmarks.yaml` holds a record for each, in the order of Table 1."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources

import yaml

from vocagnolm.evaluation.extraction import AnswerKind
from vocagnolm.evaluation.normalization import strip_string
from vocagnolm.evaluation.tasks.questions import READERS, RawRow

HARNESS_COMMIT = "db77bc6bb2a17c90ed2d63e88ebd8c40a82858c5"
# The other protocol, named in all that is written.
CHAT_PROTOCOL = "zero-shot chat"
# After the question, as the model cards of DeepSeekMath and Qwen2.5-Math recommend.
INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."
# Chains of thought are longer than few-shot answers; Qwen2.5-Math's evaluation allows as many.
_CHAT_NEW_TOKENS = 2048
# A gold of one of these makes the harness name the answers that it expects.
_TRUTH, _CONSENT = " (True or False)", " (Yes or No)"
_HINTS = {"true": _TRUTH, "false": _TRUTH, "yes": _CONSENT, "no": _CONSENT}


@dataclass(frozen=True)
class Item:
    """One question of a benchmark, ready to be asked and graded."""

    # The position in the benchmark: the harness's `idx`.
    idx: int
    question: str
    # Parsed and normalised: a prediction is compared with it.
    gold: str


@dataclass(frozen=True)
class Benchmark:
    """Record of a benchmark, with its name in files and on the command line."""

    id: str
    # Heading in the paper's Table 1.
    column: str
    item_count: int
    shots: int
    licence: str
    source: str
    # In the harness's layout, relative to `--data_dir`; None for the demo.
    file: str | None = None
    # `sources.items_digest`; None where the items could not be checked against the harness.
    items_sha256: str | None = None
    # A dataset on the hub with these items in this order, and the configuration (None for the only
    # one) and the split of each of its parts.
    hub: str | None = None
    hub_parts: Sequence[tuple[str | None, str]] = ()
    # Name of the worked examples; None for the question alone.
    prompt_set: str | None = None
    template: str = "Question: {question}\nAnswer:"
    # A text is cut at the first of these: the end-of-text token as text, or a further example.
    stops: Sequence[str] = ("</s>", "\n\nQuestion:", "\n\nProblem:")
    max_new_tokens: int = 1024
    answer_kind: AnswerKind = "free"
    # Raised whenever a question, a gold or a prompt changes.
    version: int = 1
    # The name of a protocol other than the paper's.
    protocol: str = ""

    def names(self) -> dict[str, str]:
        """Name the benchmark in a record, and a protocol other than the paper's."""
        return {"benchmark": self.id} | ({"protocol": self.protocol} if self.protocol else {})

    def item(self, idx: int, row: RawRow) -> Item:
        """Build the item of a raw row."""
        question, raw_gold = READERS[self.id](row)
        # The harness normalises once before generation and once more when it grades.
        gold = strip_string(raw_gold)
        question += _HINTS.get(gold.lower(), "")
        return Item(idx, question.strip(), strip_string(gold))

    def in_chat(self) -> "Benchmark":
        """Ask the question alone, for an answer in a box, up to the end of the model's turn."""
        return replace(
            self,
            prompt_set=None,
            shots=0,
            template=f"{{question}}\n{INSTRUCTION.replace('{}', '{{}}')}",
            stops=(),
            max_new_tokens=_CHAT_NEW_TOKENS,
            answer_kind="boxed_letter" if self.answer_kind == "letter" else self.answer_kind,
            protocol=CHAT_PROTOCOL,
        )


_RECORDS = yaml.safe_load((resources.files(__package__) / "benchmarks.yaml").read_text("utf-8"))
BENCHMARKS = {name: Benchmark(name, **record) for name, record in _RECORDS.items()}
PAPER_BENCHMARKS = tuple(BENCHMARKS)[:9]
AVERAGES: Mapping[str, tuple[str, ...]] = {
    "AVG": PAPER_BENCHMARKS,
    "AVG w/o TAB, MMLU-STEM, SAT": PAPER_BENCHMARKS[:5] + PAPER_BENCHMARKS[6:7],
    "AVG w/o SAT": PAPER_BENCHMARKS[:-1],
}
