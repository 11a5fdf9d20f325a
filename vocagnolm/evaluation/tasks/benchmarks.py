"""The benchmarks as data, in the order of Table 1, and how their rows are read.

`benchmarks.yaml` has a record for each. Rows are as in the harness's files. The reference is
`parse_question` and `parse_ground_truth` of ZubinGou/math-evaluation-harness at db77bc6.
"""

import ast
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from string import Formatter
from types import MappingProxyType
from typing import Any, get_args

from vocagnolm.evaluation.extraction import AnswerKind, extract, normalise_gold, strip_string
from vocagnolm.fields import OptionError, check_choice, in_range
from vocagnolm.shell.io import read_mapping

RawRow = Mapping[str, Any]
# The evaluator that made the published numbers.
HARNESS = "ZubinGou/math-evaluation-harness@db77bc6"
# The name of the chat protocol in records and tables.
CHAT_PROTOCOL = "zero-shot chat"
# In a chat, this follows the question, as the cards of DeepSeekMath and Qwen2.5-Math recommend.
INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."
# If the reference is one of these, the harness names the answers that it expects.
_TRUTH = " (True or False)"
_CONSENT = " (Yes or No)"
_HINTS = {"true": _TRUTH, "false": _TRUTH, "yes": _CONSENT, "no": _CONSENT}


def _gsm8k(row: RawRow) -> tuple[str, object]:
    return row["question"], row["answer"].split("####", 1)[1]


def _math(row: RawRow) -> tuple[str, object]:
    # The last box of the solution, found as in a model's output. The field `answer` is cleaner, but
    # published numbers were not graded by it.
    return row["problem"], extract("free", row["solution"]) or ""


def _svamp(row: RawRow) -> tuple[str, object]:
    body = row["Body"].strip().removesuffix(".") + "."
    # The hub spells it "145" where the harness has 145.0.
    return f"{body} {row['Question'].strip()}", float(row["Answer"])


def _asdiv(row: RawRow) -> tuple[str, object]:
    # The answer's unit is in parentheses.
    gold = re.sub(r"\(.*?\)", "", row["answer"])
    return f"{row['body'].strip()} {row['question'].strip()}", gold


def _tabmwp(row: RawRow) -> tuple[str, object]:
    # A table as text, with its title if it has one, and the options as Python prints a list.
    title = f'regarding "{row["table_title"]}" ' if row["table_title"] else ""
    question = (
        f"Read the following table {title}and answer a question:\n{row['table']}\n{row['question']}"
    )
    if row["choices"]:
        question += f" Please select from the following options: {row['choices']}"
    is_number = row["ans_type"] in ("integer_number", "decimal_number")
    return question, _number(row["answer"]) if is_number else row["answer"]


def _number(text: str) -> float:
    if "/" in text:
        numerator, denominator = text.split("/")
        return int(numerator) / int(denominator)
    if "," in text:
        return float(text.replace(",", ""))
    return float(text.split("%")[0]) / 100 if "%" in text else float(text)


def _mathqa(row: RawRow) -> tuple[str, object]:
    problem = row["problem"]
    problem = problem[:1].upper() + problem[1:]
    options = _mathqa_options(row["options"].strip())
    return _with_options(problem, options), str(row["correct"]).upper()


def _mathqa_options(options: str) -> str:
    """Show options written `a ) 1 , b ) 2` as `(A) 1, (B) 2`.

    A few rows have a Python list of options, as a string.

    >>> _mathqa_options("a ) 3 , 5 , b ) 7"), _mathqa_options("['a ) a ) 4 cm', 'b ) b ) 6 cm']")
    ('(A) 3, 5, (B) 7', '(A) 4 cm, (B) 6 cm')
    """
    if options.startswith("["):
        options = ", ".join(ast.literal_eval(options))
    for letter in "abcde":
        label = f"({letter.upper()}) "
        options = options.replace(f"{letter} ) {letter} ) ", label).replace(f"{letter} ) ", label)
    return options.replace(" , ", ", ")


def _mmlu_stem(row: RawRow) -> tuple[str, object]:
    options = []
    for letter, text in zip("ABCD", row["choices"], strict=True):
        options.append(f"({letter}) {text.strip()}")
    return _with_options(row["question"], ", ".join(options)), "ABCD"[row["answer"]]


def _sat(row: RawRow) -> tuple[str, object]:
    # From `A) 1 B) 2` to `(A) 1 (B) 2`. Options like `A. 1 B. 2` keep their dots, because published
    # numbers were made with them.
    options = re.sub(r" ([BCD]\) )", r" (\1", f"({row['options'].strip()}")
    return _with_options(row["question"], options), row["Answer"]


def _with_options(question: str, options: str) -> str:
    return f"{question}\nWhat of the following is the right choice? Explain your answer.\n{options}"


READERS: Mapping[str, Callable[[RawRow], tuple[str, Any]]] = {
    "gsm8k": _gsm8k,
    "math": _math,
    "svamp": _svamp,
    "asdiv": _asdiv,
    "tabmwp": _tabmwp,
    "mathqa": _mathqa,
    "mmlu_stem": _mmlu_stem,
    "sat": _sat,
}


class _Filler(Formatter):
    r"""Fills a template from a row, as `str.format` does. Every value must be a text or a number.

    >>> _Filler().vformat(r"{gold[0][value]} apples, \frac{{1}}{{2}}", (), {"gold": [{"value": 3}]})
    '3 apples, \\frac{1}{2}'
    """

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Look up the value for a place. A missing one is an error of any kind."""
        value, key = super().get_field(field_name, args, kwargs)
        # As text, other values would become answers such as "None", "nan" or "['1', 'one']".
        is_finite = not isinstance(value, float) or math.isfinite(value)
        if not (isinstance(value, str | int | float) and is_finite):
            fault = f"must be a text or a number, found {json.dumps(value)}"
            raise ValueError(f"{{{field_name}}} {fault}")
        return value, key


@dataclass(frozen=True)
class Item:
    """One question of a benchmark, ready to be asked and graded."""

    # The position in the benchmark: the harness's `idx`.
    idx: int
    question: str
    # The gold is parsed and normalised, like a prediction that is compared with it.
    gold: str


@dataclass(frozen=True)
class Benchmark:
    """Record of a benchmark, with its name in files and on the command line."""

    id: str
    # The column's heading in the paper's Table 1.
    column: str
    item_count: int
    shots: int
    # The file's name in the harness's layout, relative to `--data_dir`; None for the demo.
    file: str | None = None
    # `tasks.items_digest`, or None if the items could not be compared with the harness's.
    items_sha256: str | None = None
    # A hub dataset with these items in this order: the configuration (None if it has only one) and
    # the split of each part.
    hub: str | None = None
    hub_parts: Sequence[tuple[str | None, str]] = ()
    # The name of the worked examples; None means the question alone.
    prompt_set: str | None = None
    template: str = "Question: {question}\nAnswer:"
    # A text is cut at the first of these: an end-of-text token written as text, or another example.
    # Without its own, a user's benchmark adds the words before the question in its template.
    stops: Sequence[str] = ("</s>", "\n\nQuestion:", "\n\nProblem:")
    max_new_tokens: int = 1024
    # Chains of thought are longer in a chat. Qwen2.5-Math's evaluation allows this many tokens.
    max_new_tokens_in_chat: int = 2048
    answer_kind: AnswerKind = "free"
    # The version is raised when a question, a gold or a prompt changes.
    version: int = 1
    # The name of a protocol other than the paper's.
    protocol: str = ""
    # A user's own benchmark has the directory of its file. Its templates make question and gold
    # from a row's fields, such as "{body} {question}". The harness's benchmarks use `READERS`
    # instead.
    directory: Path | None = None
    question: str = ""
    answer: str = ""

    def names(self) -> dict[str, str]:
        """Name the benchmark in a record, with its protocol if it is not the paper's."""
        names = {"benchmark": self.id}
        if self.protocol:
            names["protocol"] = self.protocol
        return names

    def item(self, idx: int, row: RawRow) -> Item:
        """Build the item of a raw row. A row of another kind may raise any error."""
        if self.question:
            fill = _Filler().vformat
            question, raw_gold = fill(self.question, (), row), fill(self.answer, (), row)
        else:
            question, raw_gold = READERS[self.id](row)
        # The harness normalises once before generation and once more when it grades.
        gold = normalise_gold(self.answer_kind, raw_gold)
        # An output without an answer would be right. In the harness this happens for one item of
        # MATH.
        if self.directory and not (question.strip() and gold):
            raise ValueError("its question and its answer must not be empty")
        question += _HINTS.get(gold.lower(), "")
        return Item(idx, question.strip(), strip_string(gold))

    def in_chat(self) -> "Benchmark":
        """Ask only the question, for an answer in a box, up to the end of the model's turn."""
        if self.answer_kind == "marked":
            raise OptionError("chat", f"cannot ask {self.id}, whose answers are not boxed")
        return replace(
            self,
            prompt_set=None,
            shots=0,
            template=f"{{question}}\n{INSTRUCTION}",
            stops=(),
            max_new_tokens=self.max_new_tokens_in_chat,
            answer_kind="boxed_letter" if self.answer_kind == "letter" else self.answer_kind,
            protocol=CHAT_PROTOCOL,
        )


_RECORDS = read_mapping("benchmarks_file", Path(__file__).with_name("benchmarks.yaml"))
# The built-in benchmarks. A user's own are passed along separately.
BENCHMARKS: Mapping[str, Benchmark] = MappingProxyType(
    {name: Benchmark(name, **record) for name, record in _RECORDS.items()}
)
PAPER_BENCHMARKS = tuple(BENCHMARKS)[:9]
AVERAGES: Mapping[str, tuple[str, ...]] = {
    "AVG": PAPER_BENCHMARKS,
    "AVG w/o TAB, MMLU-STEM, SAT": PAPER_BENCHMARKS[:5] + PAPER_BENCHMARKS[6:7],
    "AVG w/o SAT": PAPER_BENCHMARKS[:-1],
}


def read_benchmarks(path: Path) -> dict[str, Benchmark]:
    """Read a user's own benchmarks from a YAML file, by name.

    A record has templates `question` and `answer`, and the source of the items: a `file` of JSON
    lines in the directory of the YAML file, or `hub` and `hub_parts`. It may have other fields of
    `Benchmark`. A ValueError names the file, the benchmark and the wrong field.
    """
    benchmarks = {}
    for name, record in read_mapping("benchmarks_file", path).items():
        # Results are stored by name.
        if name in BENCHMARKS or name in AVERAGES:
            fault = f"{path}: {name} is the name of another benchmark or average"
            raise OptionError("benchmarks_file", fault)
        # The constructor raises a TypeError for a field that it does not know.
        try:
            benchmarks[name] = _own_benchmark(name, record, path.parent)
        except (TypeError, ValueError) as error:
            raise OptionError("benchmarks_file", f"{path}: {name}: {error}") from error
    return benchmarks


def _own_benchmark(name: str, record: dict[str, Any], directory: Path) -> Benchmark:
    """Build a benchmark, and check the fields that would silently change its accuracy."""
    # Its results are in files with that name.
    if not re.fullmatch(r"\w[\w-]*", str(name)):
        raise ValueError("a name must be of letters, digits, _ and -")
    # A count of 0 takes all items.
    defaults: dict[str, Any] = {"column": name, "item_count": 0, "shots": 0}
    benchmark = Benchmark(name, directory=directory, **defaults | record)
    has_items = benchmark.file or (benchmark.hub and benchmark.hub_parts)
    if not (benchmark.question and benchmark.answer and has_items):
        raise ValueError("it needs question, answer, and either file or hub, hub_parts")
    # The name of a field alone would be the question, or the answer, of every item.
    if not ("{" in benchmark.question and "{" in benchmark.answer):
        raise ValueError("question and answer must name fields in braces, such as {text}")
    in_range(benchmark, "[1, inf)", "max_new_tokens", "max_new_tokens_in_chat")
    check_choice("answer_kind", benchmark.answer_kind, get_args(AnswerKind))
    if "{question}" not in benchmark.template:
        raise ValueError("template must contain {question}")
    # A text would be read as a list of letters, and an empty text would stop at once.
    if isinstance(benchmark.stops, str) or "" in benchmark.stops:
        raise ValueError("stops must be a list of texts, none of them empty")
    if "stops" not in record:
        return replace(benchmark, stops=_stops(benchmark))
    return benchmark


def _stops(benchmark: Benchmark) -> Sequence[str]:
    """Return the default stops, and how another example in the style of the template begins."""
    before, _, _ = benchmark.template.partition("{question}")
    # The words are on the question's line, or on the line above, as in "Problem:\n{question}".
    _, _, paragraph = before.rpartition("\n\n")
    _, _, words = paragraph.rstrip().rpartition("\n")
    stop = f"\n\n{words}"
    # A mark alone, such as "-" or "$", may begin a paragraph of an answer, too.
    if stop in benchmark.stops or not re.search(r"[^\W\d_]", words):
        return benchmark.stops
    return [*benchmark.stops, stop]
