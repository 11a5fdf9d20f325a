"""The benchmarks as data: `benchmarks.yaml` holds a record for each, in the order of Table 1."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from types import MappingProxyType, NoneType

import yaml

from vocagnolm.evaluation.engines.chat import INSTRUCTION, MAX_NEW_TOKENS, PROTOCOL
from vocagnolm.evaluation.grading.extraction import AnswerKind
from vocagnolm.evaluation.grading.normalization import strip_string
from vocagnolm.evaluation.records import Fields, check_fields
from vocagnolm.evaluation.tasks.questions import READERS, RawRow

HARNESS_COMMIT = "db77bc6bb2a17c90ed2d63e88ebd8c40a82858c5"
_TYPES = {"str": str, "int": int, "float": float, "list": list, "null": NoneType}
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
class HubSource:
    """A dataset on the hub that holds the items of a benchmark, in its order."""

    name: str
    # The configuration (None for the only one) and the split of each part, in order.
    parts: tuple[tuple[str | None, str], ...]


@dataclass(frozen=True)
class Benchmark:
    """Record of a benchmark, with its name in files and on the command line."""

    id: str
    # Heading in the paper's Table 1.
    column: str
    fields: Fields = field(hash=False)
    item_count: int
    shots: int
    licence: str
    source: str
    verified: tuple[str, ...]
    # In the harness's layout, relative to `--data_dir`; None for the demo.
    file: str | None = None
    # Digest of the verified bytes: shown, never compared, as other bytes may hold the same items.
    file_sha256: str | None = None
    # The verified file is no file of the harness, but was rebuilt from its items.
    is_reconstruction: bool = False
    # `sources.items_digest`; None where the items could not be checked against the harness.
    items_sha256: str | None = None
    # None where no dataset of the hub is known to hold these items in this order.
    hub: HubSource | None = None
    # Name of the exemplars; None for the question alone.
    prompt_set: str | None = None
    template: str = "Question: {question}\nAnswer:"
    # A text is cut at the first of these: the end-of-text token as text, or a further exemplar.
    stops: tuple[str, ...] = ("</s>", "\n\nQuestion:", "\n\nProblem:")
    max_new_tokens: int = 1024
    answer_kind: AnswerKind = "free"
    # Raised whenever a question, a gold or a prompt changes.
    version: int = 1
    # The name of another protocol than the paper's.
    protocol: str = ""

    def names(self) -> dict[str, str]:
        """Name the benchmark in a record, and another protocol than the paper's."""
        return {"benchmark": self.id} | ({"protocol": self.protocol} if self.protocol else {})

    def item(self, idx: int, row: RawRow) -> Item:
        """Build the item of a raw row; a ValueError says what is wrong with a field."""
        check_fields(row, self.fields)
        question, raw_gold = READERS[self.id](row)
        # The harness normalises once before generation and once more when it grades.
        gold = strip_string(raw_gold)
        question += _HINTS.get(gold.lower(), "")
        return Item(idx, question.strip(), strip_string(gold))

    def in_chat(self) -> "Benchmark":
        """Ask the question alone, for an answer in a box, up to the end of the model's turn."""
        template = f"{{question}}\n{INSTRUCTION.replace('{}', '{{}}')}"
        kind: AnswerKind = "boxed_letter" if self.answer_kind == "letter" else self.answer_kind
        alone = replace(self, prompt_set=None, shots=0, template=template, stops=())
        return replace(alone, max_new_tokens=MAX_NEW_TOKENS, answer_kind=kind, protocol=PROTOCOL)


def _read_benchmarks() -> Mapping[str, Benchmark]:
    records = yaml.safe_load((resources.files(__package__) / "benchmarks.yaml").read_text("utf-8"))
    del records["texts"]  # named there for use in several records
    for record in records.values():
        for name, words in record["fields"].items():
            record["fields"][name] = tuple(_TYPES[word] for word in words.split())
        for name in {"verified", "stops"} & record.keys():
            record[name] = tuple(record[name])
        if hub := record.get("hub"):
            record["hub"] = HubSource(hub["name"], tuple(map(tuple, hub["parts"])))
    return MappingProxyType({name: Benchmark(name, **record) for name, record in records.items()})


BENCHMARKS = _read_benchmarks()
PAPER_BENCHMARKS = tuple(BENCHMARKS)[:9]
AVERAGES: Mapping[str, tuple[str, ...]] = {
    "AVG": PAPER_BENCHMARKS,
    "AVG w/o TAB, MMLU-STEM, SAT": PAPER_BENCHMARKS[:5] + PAPER_BENCHMARKS[6:7],
    "AVG w/o SAT": PAPER_BENCHMARKS[:-1],
}
