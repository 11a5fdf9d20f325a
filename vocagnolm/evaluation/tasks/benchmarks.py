"""The benchmarks as data: what is asked, how often, with which prompt, and what counts as gold.

One record per benchmark and nothing else: reading rows is `sources`, writing prompts `few_shot`.
The specification is ZubinGou/math-evaluation-harness at db77bc6, the evaluator behind the published
numbers of Lin et al. (2024) and Zhou et al. (2024).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from types import MappingProxyType

from vocagnolm.evaluation.grading.extraction import AnswerKind
from vocagnolm.evaluation.grading.normalization import strip_string
from vocagnolm.evaluation.tasks import questions
from vocagnolm.evaluation.tasks.questions import Row

HARNESS_COMMIT = "db77bc6bb2a17c90ed2d63e88ebd8c40a82858c5"

_QUESTION = "Question: {question}\nAnswer:"
_PROBLEM = "Problem:\n{question}\nSolution:"
# What a model writes when it goes on to the next exemplar; the end-of-text token as text.
_STOPS = ("</s>", "\n\nQuestion:", "\n\nProblem:")
# A gold of one of these makes the harness say what it expects.
_HINTS = {
    "true": " (True or False)",
    "false": " (True or False)",
    "yes": " (Yes or No)",
    "no": " (Yes or No)",
}


@dataclass(frozen=True)
class Item:
    """One question of a benchmark, ready to be asked and graded.

    Attributes:
        idx: position in the benchmark: the harness's `idx`.
        question: as it stands in the prompt.
        gold: parsed and normalised, what a prediction is compared with.
    """

    idx: int
    question: str
    gold: str


@dataclass(frozen=True)
class HubSource:
    """A dataset on the hub that holds the items of a benchmark, in its order.

    Attributes:
        name: of the dataset.
        parts: configuration (None for the only one) and split of each part, in order.
        keep: whether a row is among the items.
        revision: branch, tag or commit; what was loaded is told by the items' digest.
    """

    name: str
    parts: tuple[tuple[str | None, str], ...]
    keep: Callable[[Row], bool] = questions.is_any
    revision: str = "main"


@dataclass(frozen=True)
class Benchmark:
    """What there is to know about a benchmark.

    Attributes:
        id: name on the command line and in files.
        column: heading in the paper's Table 1.
        fields: fields of a raw row, with the types each may have.
        build_question: from a raw row to the question, before it is stripped.
        parse_gold: from a raw row to the gold, before it is normalised.
        item_count: number of items.
        file: in the harness's layout, relative to `--data_dir`; None for the demo.
        file_sha256: of the bytes of that file that were verified; shown, never compared, since
            the same items may come as other bytes.
        items_sha256: digest of the built items (`sources.items_digest`); None where they could not
            be checked against the harness.
        hub: None where no dataset of the hub is known to hold these items in this order.
        prompt_set: name of the exemplars; None for the question alone.
        shots: number of exemplars.
        template: of the question, with a place for it.
        stops: a text is cut at the first of these.
        max_new_tokens: the most tokens generated per item.
        answer_kind: how the answer is found in a text.
        is_reconstruction: `file_sha256` is not of the harness's bytes, but of a file that was
            rebuilt from its items.
        version: raised whenever a question, a gold or a prompt changes.
        licence: of the items.
        source: where the items come from.
        verified: what was checked, sentence by sentence.
    """

    id: str
    column: str
    fields: Mapping[str, tuple[type, ...]] = field(hash=False)
    build_question: Callable[[Row], str]
    parse_gold: Callable[[Row], object]
    item_count: int
    file: str | None
    file_sha256: str | None
    items_sha256: str | None
    hub: HubSource | None
    prompt_set: str | None
    shots: int
    licence: str
    source: str
    verified: tuple[str, ...]
    template: str = _QUESTION
    stops: tuple[str, ...] = _STOPS
    max_new_tokens: int = 1024
    answer_kind: AnswerKind = "free"
    is_reconstruction: bool = False
    version: int = 1

    def item(self, idx: int, row: Row) -> Item:
        """Build the item of a raw row.

        Raises:
            ValueError: a field is missing, of another type, or says nothing that can be asked.
        """
        for name, types in self.fields.items():
            if name not in row:
                raise ValueError(f"expected a field `{name}`, found {', '.join(row) or 'none'}")
            if type(row[name]) not in types:
                expected = " or ".join(kind.__name__ for kind in types)
                found = type(row[name]).__name__
                raise ValueError(f"expected `{name}` to be {expected}, found {found}")
        gold = strip_string(self.parse_gold(row))
        question = self.build_question(row) + _HINTS.get(gold.lower(), "")
        # The harness normalises once before generation and once more when it grades.
        return Item(idx, question.strip(), strip_string(gold))


_BUILT = "Questions, golds and whole prompts equal the harness's, item by item."
_BYTES = "file_sha256 is that of the harness's own file."
_HUB_UNSEEN = "The hub's rows were not seen; the digest of what is loaded decides."
_HARNESS_FILE = "Without --data_dir the harness's file is loaded at its pinned commit."

_MMLU_STEM = (
    *("college_biology", "astronomy", "electrical_engineering", "high_school_biology"),
    *("machine_learning", "abstract_algebra", "high_school_mathematics"),
    *("high_school_computer_science", "college_chemistry", "high_school_chemistry"),
    *("computer_security", "conceptual_physics", "high_school_physics", "college_physics"),
    *("high_school_statistics", "elementary_mathematics", "college_mathematics"),
    "college_computer_science",
)

_GSM8K = Benchmark(
    id="gsm8k",
    column="GSM8K",
    fields={"question": (str,), "answer": (str,)},
    build_question=itemgetter("question"),
    parse_gold=questions.gsm8k_gold,
    item_count=1319,
    file="gsm8k/test.jsonl",
    file_sha256="9f098df7ff4522078d6ccec27a5c38a454790fdb51131bedfaa0e490070d5394",
    items_sha256="6978a300747aa46ab435df7b47dc6abb685b1f935bb115e0fc7abd167f4566a0",
    hub=HubSource("openai/gsm8k", (("main", "test"),)),
    prompt_set="gsm8k",
    shots=8,
    licence="MIT",
    source="openai/grade-school-math, test split",
    verified=(_BUILT, _BYTES, _HUB_UNSEEN),
)
_MATH = Benchmark(
    id="math",
    column="MATH",
    fields={"problem": (str,), "solution": (str,)},
    build_question=itemgetter("problem"),
    parse_gold=questions.math_gold,
    item_count=500,
    file="math_oai/test.jsonl",
    file_sha256="35dc41080a3680858b27fa7e0533d2d547825316fc5dafe5d316f4ccc5a06132",
    items_sha256="8c5ef49e575e1edf2d4eae22629f7425c268fd1e9f23d0475384cf9122616cb1",
    hub=HubSource("HuggingFaceH4/MATH-500", ((None, "test"),)),
    prompt_set="minerva_math",
    shots=4,
    template=_PROBLEM,
    licence="MIT",
    source="openai/prm800k, math_splits/test.jsonl, from hendrycks/math",
    verified=(
        _BUILT,
        _BYTES,
        "The file is byte-identical to openai/prm800k's.",
        "Published numbers are multiples of 0.2, so these 500 items and not all 5,000.",
        _HUB_UNSEEN,
    ),
)
_SVAMP = Benchmark(
    id="svamp",
    column="SVAMP",
    fields={"Body": (str,), "Question": (str,), "Answer": (int, float, str)},
    build_question=questions.svamp_question,
    parse_gold=questions.svamp_gold,
    item_count=1000,
    file="svamp/test.jsonl",
    file_sha256="d0826ff1264f3860e46fc4e71db9e31d2d188960db87090e22677f9493e67a0d",
    items_sha256="53a710792632a6f4c1153d6209333447dfffdf4a187cef217ea898b8a2423db2",
    hub=HubSource("ChilleD/SVAMP", ((None, "train"), (None, "test"))),
    prompt_set="gsm8k",
    shots=8,
    licence="MIT",
    source="arkilpatel/SVAMP, all 1,000 problems",
    verified=(_BUILT, _BYTES, _HUB_UNSEEN),
)
_ASDIV = Benchmark(
    id="asdiv",
    column="ASDiv",
    fields={"body": (str,), "question": (str,), "answer": (str,)},
    build_question=questions.asdiv_question,
    parse_gold=questions.asdiv_gold,
    item_count=2215,
    file="asdiv/test.jsonl",
    file_sha256="5759580385e706f961a30d4c07d6925b35c3f7c86d6c50bc413957169693dad2",
    items_sha256="3828609a5dbc7082498645c78203526ea4d16892441b73442369e2aa539cddcf",
    hub=HubSource("EleutherAI/asdiv", ((None, "validation"),), keep=questions.has_one_answer),
    prompt_set="gsm8k",
    shots=8,
    licence="CC BY-NC 4.0",
    source="chaochun/nlu-asdiv-dataset, its 2,305 problems without those of several answers",
    verified=(_BUILT, _BYTES, _HUB_UNSEEN),
)
_MAWPS = Benchmark(
    id="mawps",
    column="MAWPS",
    fields={"input": (str,), "target": (int, float)},
    build_question=itemgetter("input"),
    parse_gold=itemgetter("target"),
    item_count=2065,
    file="mawps/test.jsonl",
    file_sha256="00ffe31161be8623a3d36741830edbba87a3aee0109f693810fe40b9d5d91b8b",
    items_sha256="20c929a019974c7eb461523d7bac00ac2afe4abaa6f4ed015d9173bc52200978",
    hub=None,  # the hub's versions hold other selections
    prompt_set="gsm8k",
    shots=8,
    licence="none stated",
    source="sroy9/mawps: SingleEq 508, SingleOp 562, AddSub 395, MultiArith 600",
    verified=(_BUILT, _BYTES, _HARNESS_FILE),
)
_TABMWP = Benchmark(
    id="tabmwp",
    column="TAB",
    fields={
        "question": (str,),
        "table": (str,),
        "table_title": (str, type(None)),
        "choices": (list, type(None)),
        "answer": (str,),
        "ans_type": (str,),
    },
    build_question=questions.tabmwp_question,
    parse_gold=questions.tabmwp_gold,
    item_count=1000,
    file="tabmwp/test.jsonl",
    file_sha256="53ad4752e0e50f9cda28603b26aa5b14f8bfc88e72bcf2ea6cf36437e4a631f3",
    items_sha256="75059e168a3a28994d2ed56dd07c9a0de8b5526e8b0039c5d1aaa1728a0a786f",
    hub=None,  # the items are a random thousand of 7,686
    prompt_set="gsm8k",
    shots=8,
    licence="CC BY-NC-SA 4.0",
    source="lupantech/PromptPG, 1,000 of its 7,686 test problems, drawn by the harness",
    verified=(
        _BUILT,
        "The file is a reconstruction from published outputs (707,672 bytes), and file_sha256 is "
        "that of the reconstruction.",
        "The harness's own file (18,219,454 bytes, git blob c686337) was not at hand; it holds the "
        "same items with more columns.",
        _HARNESS_FILE,
    ),
    is_reconstruction=True,
)
_MATHQA = Benchmark(
    id="mathqa",
    column="MQA",
    fields={"problem": (str,), "options": (str,), "correct": (str,)},
    build_question=questions.mathqa_question,
    parse_gold=questions.mathqa_gold,
    item_count=1000,
    file="mathqa/test.jsonl",
    file_sha256="136de4608366708d01d4c38890437e722c9209e9a66ef5d119cb01f6f88dfec6",
    items_sha256="8fa1e2165dbbb11fd2853bad33e53f8f7e39f785010e1cb2ca9beebe0828615f",
    hub=None,  # math_qa holds all 2,985, behind a loading script
    prompt_set="mathqa",
    shots=4,
    template=_PROBLEM,
    answer_kind="letter",
    licence="Apache-2.0 (AQuA-RAT, whose problems they are)",
    source="MathQA, 1,000 of its 2,985 test problems, drawn by the harness",
    verified=(_BUILT, _BYTES, _HARNESS_FILE),
)
_MMLU = Benchmark(
    id="mmlu_stem",
    column="MMLU-STEM",
    fields={"question": (str,), "choices": (list,), "answer": (int,)},
    build_question=questions.mmlu_question,
    parse_gold=questions.mmlu_gold,
    item_count=3018,
    file="mmlu_stem/test.jsonl",
    file_sha256="fd7c16f96067d285638abb5aaef9cd8a063b11454e14cb64df93141a58691478",
    items_sha256="861045926d81175714f880a2f3c307651c101a117555551f6403f3fe00178651",
    hub=HubSource("cais/mmlu", tuple((subject, "test") for subject in _MMLU_STEM)),
    prompt_set="mmlu_stem",
    shots=4,
    template=_PROBLEM,
    answer_kind="letter",
    licence="MIT",
    source="hendrycks/test, 18 subjects",
    verified=(_BUILT, _BYTES, "The subjects come in the harness's order.", _HUB_UNSEEN),
)
_SAT = Benchmark(
    id="sat",
    column="SAT",
    fields={"question": (str,), "options": (str,), "Answer": (str,)},
    build_question=questions.sat_question,
    parse_gold=itemgetter("Answer"),
    item_count=32,
    file="sat_math/test.jsonl",
    file_sha256="96720a1dc496ea72f80db55250290cf9c48e95b657ac2183b7deb1dc4627351f",
    items_sha256="b382add4f5413af5bfbd702658c73cfb2a670704f65ac0678361ad1f653f5eed",
    hub=None,  # mcaleste/sat_multiple_choice_math_may_23 has other columns, in an unknown order
    prompt_set="mmlu_stem",
    shots=4,
    template=_PROBLEM,
    answer_kind="letter",
    licence="exam questions of the College Board",
    source="SAT of May 2023, questions without figures",
    verified=(_BUILT, _BYTES, _HARNESS_FILE),
)
_GSM_HARD = Benchmark(
    id="gsm_hard",
    column="GSM-Hard",
    fields={"input": (str,), "target": (int, float)},
    build_question=itemgetter("input"),
    parse_gold=itemgetter("target"),
    item_count=1319,
    file="gsm_hard/test.jsonl",
    file_sha256=None,
    items_sha256=None,
    hub=HubSource("reasoning-machines/gsm-hard", ((None, "train"),)),
    prompt_set="gsm8k",
    shots=8,
    licence="MIT",
    source="GSM8K's test questions with larger numbers (Gao et al., 2023)",
    verified=("Nothing: its items were not at hand, and it is outside the averages.",),
)
_DEMO = Benchmark(
    id="demo",
    column="Demo",
    fields={"question": (str,), "answer": (str,)},
    build_question=itemgetter("question"),
    parse_gold=itemgetter("answer"),
    item_count=400,
    file=None,
    file_sha256=None,
    items_sha256="39e1be189d9c1a5b33b9f6713efc875b5866a85f5b9cd8d24f6153312467f0ab",
    hub=None,
    prompt_set=None,
    shots=0,
    template="{question}",
    stops=("\n",),
    max_new_tokens=28,  # two steps and the final number, one token per digit, take 26
    answer_kind="marked",
    licence="Apache-2.0",
    source="the held-out problems of the embedded world",
    verified=("The items are those that vocagnolm.demo.world holds out.",),
)

_PAPER = (_GSM8K, _MATH, _SVAMP, _ASDIV, _MAWPS, _TABMWP, _MATHQA, _MMLU, _SAT)
PAPER_BENCHMARKS = tuple(benchmark.id for benchmark in _PAPER)
"""The columns of Table 1, in its order."""

AVERAGES: Mapping[str, tuple[str, ...]] = {
    "AVG": PAPER_BENCHMARKS,
    "AVG w/o TAB, MMLU-STEM, SAT": PAPER_BENCHMARKS[:5] + PAPER_BENCHMARKS[6:7],
    "AVG w/o SAT": PAPER_BENCHMARKS[:-1],
}
"""The three averages of Table 1 and their benchmarks."""

BENCHMARKS: Mapping[str, Benchmark] = MappingProxyType(
    {benchmark.id: benchmark for benchmark in (*_PAPER, _GSM_HARD, _DEMO)}
)
"""Every benchmark by its id."""
