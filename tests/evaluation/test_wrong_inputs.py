"""Wrong options, files, items and outputs: each is named in one line, before any work."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from vocagnolm.evaluation.engines.generation import Chat
from vocagnolm.evaluation.evaluate import check
from vocagnolm.evaluation.extraction import normalise_gold
from vocagnolm.evaluation.regrading import regrade
from vocagnolm.evaluation.tasks.benchmarks import BENCHMARKS, read_benchmarks
from vocagnolm.evaluation.tasks.tasks import load_items

# A directory, and what is wrong.
Try = Callable[[Path, Any], object]


def options(directory: Path, words: str) -> None:
    check(words.split())


def own_file(directory: Path, content: object) -> None:
    """Read a file of benchmarks, given as text or as an object."""
    text = content if isinstance(content, str) else json.dumps(content)
    (directory / "mine.yaml").write_text(text)
    read_benchmarks(directory / "mine.yaml")


def own_item(directory: Path, case: tuple[dict[str, Any], dict[str, str]]) -> None:
    """Load a benchmark of one item, given its fields besides `ask`, and fields of the record."""
    row, fields = case
    record = {"file": "a.jsonl", "question": "{ask}", "answer": "{gold}"} | fields
    (directory / "mine.yaml").write_text(json.dumps({"m": record}))
    write(directory / "a.jsonl", {"ask": "a"} | row)
    load_items(read_benchmarks(directory / "mine.yaml")["m"], None)


def rows(directory: Path, case: tuple[str, list[dict[str, Any]]]) -> None:
    """Load a benchmark from rows that are not the harness's."""
    name, lines = case
    write(directory / str(BENCHMARKS[name].file), *lines)
    load_items(BENCHMARKS[name], directory)


def output(directory: Path, record: object, in_chat: bool = False) -> None:
    """Grade an output after a good one of idx 0."""
    benchmark = BENCHMARKS["gsm8k"]
    write(directory / "outputs.jsonl", GOOD | {"idx": 0}, record)
    regrade(directory / "outputs.jsonl", benchmark.in_chat() if in_chat else benchmark, None)


def output_of_chat(directory: Path, record: object) -> None:
    output(directory, record, in_chat=True)


def drawn(directory: Path, keys: list[tuple[int, int]]) -> None:
    """Grade outputs of these items and numbers."""
    write(directory / "o.jsonl", *(GOOD | {"idx": idx, "sample": n} for idx, n in keys))
    regrade(directory / "o.jsonl", BENCHMARKS["gsm8k"], None)


def outputs(directory: Path, file: tuple[str, bytes]) -> None:
    path = directory / file[0]
    path.write_bytes(file[1])
    regrade(path, BENCHMARKS["gsm8k"], None)


def gold(directory: Path, case: tuple[Any, object]) -> None:
    normalise_gold(*case)


def template(directory: Path, source: str) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0})))
    Chat(tokenizer, source)


def write(path: Path, *lines: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


TEMPLATES = {"question": "{q}", "answer": "{a}"}
OWN = {**TEMPLATES, "file": "a"}
ROW = {"question": "a", "answer": "#### 1"}
GOOD: dict[str, Any] = {"idx": 1, "gold": "8", "raw_output": "8"}
WRONG: list[tuple[Try, object, str]] = [
    (options, "", "model"),
    (options, "--model m --benchmarks demo --regrade FILE", "regrade"),
    (options, "--regrade FILE", "benchmark"),
    (options, "--model m --output FILE", "output"),
    (options, "--model m --benchmarks gsm9k", "benchmarks .*gsm9k"),
    (options, "--model m --limit 0", "limit"),
    (options, "--model m --batch_size 0", "batch_size"),
    (options, "--model m --benchmarks demo --chat", "chat .*demo"),
    (options, "--model m --samples 4", "samples"),
    (options, "--model m --samples 0 --temperature 1", "samples"),
    (options, "--model m --top_p 0 --temperature 1", "top_p"),
    (options, "--model m --temperature 0.005", "temperature"),
    (options, "--model m --temperature nan", "temperature"),
    (own_file, "- halves", "mine.yaml .*mapping"),
    (own_file, "halves: [", "mine.yaml cannot be read"),
    (own_file, "halves: {shots: 1, shots: 2}", "mine.yaml .*shots comes twice"),
    (own_file, {"m": 3}, "mine.yaml: m: "),
    (own_file, {"m": {**OWN, "shot": 1}}, "mine.yaml: m: .*shot"),
    (own_file, {"m": {"question": "{q}", "file": "a"}}, "m: .*answer"),
    (own_file, {"m": {"answer": "{a}", "file": "a"}}, "m: .*question"),
    (own_file, {"m": TEMPLATES}, "m: .*file"),
    (own_file, {"m": {**TEMPLATES, "hub": "a/b"}}, "m: .*hub_parts"),
    (own_file, {"m": {**OWN, "max_new_tokens": "9"}}, "m: .*max_new_tokens"),
    (own_file, {"m": {**OWN, "max_new_tokens_in_chat": 0}}, "m: .*max_new_tokens_in_chat"),
    (own_file, {"m": {**OWN, "template": "no place"}}, "m: template"),
    (own_file, {"m": {**OWN, "stops": "a"}}, "m: stops"),
    (own_file, {"m": {**OWN, "stops": ["a", ""]}}, "m: stops"),
    (own_file, {"m": {**OWN, "answer_kind": "d"}}, "m: answer_kind"),
    (own_file, {"m": {**OWN, "directory": "d"}}, "m: .*directory"),
    (own_file, {"m": {**OWN, "answer": "gold"}}, "m: .*braces"),
    # Results are stored by name.
    (own_file, {"../m": OWN}, "../m: .*name"),
    (own_file, {"gsm8k": OWN}, "gsm8k is the name"),
    (own_file, {"AVG": OWN}, "AVG is the name"),
    (own_item, ({}, {}), "a.jsonl: item 0 of m cannot .*'gold'"),
    (own_item, ({"gold": None}, {}), "item 0 .*{gold} .* null"),
    (own_item, ({"gold": 1, "ask": " "}, {}), "item 0 .*empty"),
    (own_item, ({"gold": float("nan")}, {}), "item 0 .*{gold} .* NaN"),
    (own_item, ({"gold": ["1", "one"]}, {}), "item 0 .*{gold} must"),
    (own_item, ({"gold": "$"}, {}), "item 0 .*empty"),
    (own_item, ({"gold": "two words"}, {"answer_kind": "marked"}), "item 0 .*two words"),
    (own_item, ({"gold": 1}, {"question": "{aks}: {ask}"}), "item 0 .*'aks'"),
    (rows, ("gsm8k", [ROW]), "expected 1319 items of gsm8k, found 1"),
    (rows, ("gsm8k", [ROW | {"idx": 3}] * 2), "found 2 with 1 indices"),
    (rows, ("gsm8k", [{"question": "a"}]), "test.jsonl: item 0 of gsm8k .*'answer'"),
    (rows, ("mawps", [{"input": "a", "target": None}]), "item 0 of mawps .*target"),
    (rows, ("sat", [{"question": "a", "options": "A) 1", "Answer": "F"}]), "item 0 .* found F"),
    (rows, ("aime24", [{"problem": "a", "answer": "1/2"}]), "item 0 .* integer, found 1/2"),
    (output, {"idx": 1, "gold": "8"}, "outputs.jsonl:2: .*raw_output"),
    (output, {"gold": "8", "raw_output": "8"}, ":2: .*idx"),
    (output, GOOD | {"raw_output": ["8", "9"]}, ":2: .*raw_output"),
    (output, GOOD | {"gold": None}, ":2: .*gold"),
    (output, GOOD | {"gold": float("nan")}, ":2: .*gold"),
    (output, GOOD | {"gold": True}, ":2: .*gold"),
    (output, GOOD | {"benchmark": "math"}, ":2: .*math"),
    (output, GOOD | {"benchmark": "gsm8k", "protocol": "zero-shot chat"}, ":2: .*zero-shot chat"),
    (output_of_chat, GOOD | {"benchmark": "gsm8k"}, ":2: .*zero-shot chat"),
    (output, [GOOD], ":2: .*object"),
    (output, GOOD | {"idx": "0", "sample": 0}, "2 outputs of 1 items"),
    (drawn, [(0, 0), (1, 0), (1, 1)], "3 outputs of 2 items"),
    (outputs, ("cut.jsonl", b'{"idx": 0, "gold": "8", "raw_ou'), "cut.jsonl:1: "),
    (outputs, ("empty.jsonl", b""), "empty.jsonl .*0 outputs"),
    (outputs, ("plain.jsonl.gz", b"not gzip"), "plain.jsonl.gz .*gzip"),
    (outputs, ("cut.jsonl.gz", gzip.compress(b"{}" * 999, mtime=0)[:20]), "cut.jsonl.gz .*gzip"),
    (gold, ("integer", "2.5"), "found 2.5"),
    (gold, ("letter", 2), "found 2"),
    (gold, ("boxed_letter", ""), "found "),
    (gold, ("marked", ""), "found "),
    (template, "hello", "chat .*question"),
    (template, "{{ raise_exception('system first') }}", "chat .*system first"),
    (template, "{% for m in messages %}", "chat .*template"),
]


@pytest.mark.parametrize(("attempt", "case", "named"), WRONG)
def test_wrong_input_is_named(attempt: Try, case: object, named: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=named):
        attempt(tmp_path, case)
