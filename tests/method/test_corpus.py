"""Reading documents: every local format, what a column may hold, and what is rejected."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from vocagnolm.corpus import is_conversations, load_corpus, load_sample

TEXTS = ["First  document.\r\n\n$x^2$ 😀 数学 e\u0301\x00", "second"]
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


def lines_of(*rows: dict[str, Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def write(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def texts_of(path: Path, **options: Any) -> list[Any]:
    corpus = load_corpus(str(path), **options)
    assert corpus.column_names == ["text"]
    return list(corpus["text"])


def error_of(path: Path | str, **options: Any) -> str:
    with pytest.raises(ValueError, match=r"--\w+") as caught:
        load_corpus(str(path), **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


# Formats


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("kind", ["lines", "list"])
def test_load_corpus_gives_texts_unchanged(tmp_path: Path, kind: str, suffix: str) -> None:
    rows = [{"text": text, "url": "u"} for text in TEXTS]
    content = lines_of(*rows) if kind == "lines" else json.dumps(rows, indent=1).encode()
    name = ("pages.jsonl" if kind == "lines" else "pages.json") + suffix
    assert texts_of(write(tmp_path / name, COMPRESS[suffix](content))) == TEXTS


def test_load_corpus_gives_texts_unchanged_when_parquet(tmp_path: Path) -> None:
    path = tmp_path / "pages.parquet"
    datasets.Dataset.from_dict({"text": TEXTS, "n": [1, 2]}).to_parquet(str(path))
    assert texts_of(path) == TEXTS


@pytest.mark.parametrize("suffix", COMPRESS)
def test_load_corpus_makes_one_document_of_a_file(tmp_path: Path, suffix: str) -> None:
    text = "A line.\n\nAnother paragraph.\n  "
    assert texts_of(write(tmp_path / f"a.txt{suffix}", COMPRESS[suffix](text.encode()))) == [text]


def test_load_corpus_keeps_the_order_of_sorted_paths(tmp_path: Path) -> None:
    names = ("b/z.txt", "b/deep/er/a.txt", "a.txt", "c.txt", "a/y.txt", "B.txt")
    for name in names:
        write(tmp_path / name, name)
    write(tmp_path / "README.md", "not a document")
    expected = [str(p.relative_to(tmp_path)) for p in sorted(tmp_path / name for name in names)]
    assert texts_of(tmp_path) == expected
    assert texts_of(tmp_path) == expected


def test_load_corpus_reads_the_named_file(tmp_path: Path) -> None:
    for name in ("a[1].jsonl", "a1.jsonl", "a*.jsonl", "a?.jsonl"):
        write(tmp_path / name, lines_of({"text": name}))
    for name in ("a[1].jsonl", "a*.jsonl", "a?.jsonl"):
        assert texts_of(tmp_path / name) == [name]
    assert sorted(texts_of(tmp_path)) == ["a*.jsonl", "a1.jsonl", "a?.jsonl", "a[1].jsonl"]


def test_load_corpus_ignores_a_directory(tmp_path: Path) -> None:
    write(tmp_path / "pages.txt" / "inner.txt", "inner")
    assert texts_of(tmp_path) == ["inner"]


def test_load_corpus_reads_new_content(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", lines_of({"text": "before"}))
    assert texts_of(path) == ["before"]
    write(path, lines_of({"text": "after it"}))
    assert texts_of(path) == ["after it"]


# Columns and values


def test_load_corpus_renames_the_text_column(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", lines_of({"body": "the body", "text": "not this"}))
    assert texts_of(path, text_column="body") == ["the body"]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([{"text": "a"}, {"text": None}], ["a", None]),
        ([{"text": "a"}, {"url": "no text"}], ["a", None]),
        ([{"text": "a"}, {"text": 5}, {"text": 1.5}], ["a", 5, 1.5]),
        ([{"text": 5}, {"text": "a"}], [5, "a"]),
        ([{"text": 1}, {"text": 2}], [1, 2]),
        ([{"text": "a"}, {"text": ["list"]}, {"text": {"k": 1}}], ["a", ["list"], {"k": 1}]),
        ([{"text": "a"}, {"text": ""}, {"text": " \n"}], ["a", "", " \n"]),
        ([{"text": "2026-11-22"}, {"text": "12"}], ["2026-11-22", "12"]),
    ],
)
def test_load_corpus_keeps_every_row(
    tmp_path: Path, rows: list[dict[str, Any]], expected: list[Any]
) -> None:
    assert texts_of(write(tmp_path / "a.jsonl", lines_of(*rows))) == expected


@pytest.mark.parametrize(
    "late",
    [
        {"text": "b", "url": "u"},
        {"text": "b", "meta": {"other": "x"}},
        {"text": "b", "meta": 1},
        {"meta": {"id": 1}},
        {"text": 5},
    ],
)
def test_later_rows_may_differ(tmp_path: Path, late: dict[str, Any]) -> None:
    rows = [{"text": "a" * 20, "meta": {"id": 1}}] * 2
    path = write(tmp_path / "a.jsonl", lines_of(*rows, late))
    assert texts_of(path) == ["a" * 20] * 2 + [late.get("text")]


def test_load_corpus_keeps_nulls_when_parquet(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": ["a", None]}).to_parquet(str(tmp_path / "a.parquet"))
    assert texts_of(tmp_path / "a.parquet") == ["a", None]


def test_empty_txt_file_is_a_document(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "")
    write(tmp_path / "b.txt", "b")
    assert texts_of(tmp_path) == ["", "b"]


def test_load_corpus_reads_all_files(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", lines_of({"text": "a"}))
    write(tmp_path / "b.jsonl", lines_of({"text": "b", "url": "u"}))
    write(tmp_path / "c.txt", "c")
    assert load_corpus(str(tmp_path))["text"][:] == ["a", "b", "c"]


# What cannot be read


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.jsonl", b'{"text": "a"}\n{oops\n', "JSON parse error: Missing a name"),
        ("a.jsonl", b'{"body": "x"}\n', "'text' is not a column of .* its columns are body"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "surrogate pair in string is invalid. in row 0"),
        ("a.txt", b"abc \xff\xfe", "'utf-8' codec can't decode byte 0xff in position 4"),
        ("a.parquet", b"not parquet", "[Pp]arquet"),
        ("a.jsonl.gz", b"not gzip", "Not a gzipped file"),
        ("a.jsonl", b"", "it holds no documents"),
        ("a.json", b"[]", "it holds no documents"),
        ("a.jsonl.zst", b"not zstd", "zstd"),
        ("data.csv", b"text\nx\n", "expected files ending in .jsonl, .json, .parquet, .txt"),
    ],
)
def test_load_corpus_names_the_file_and_the_reason(
    tmp_path: Path, name: str, content: bytes, reason: str
) -> None:
    message = error_of(write(tmp_path / name, content))
    assert str(tmp_path / name) in message
    assert re.search(reason, message)


@pytest.mark.parametrize("suffix", [suffix for suffix in COMPRESS if suffix])
@pytest.mark.parametrize("kept", [0.1, 0.99])
@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_compressed_file_is_said_to_be_cut_off(
    tmp_path: Path, name: str, kept: float, suffix: str
) -> None:
    whole = COMPRESS[suffix](lines_of(*({"text": f"{n} {n * n:x} {n**5}"} for n in range(500))))
    path = write(tmp_path / (name + suffix), whole[: int(kept * len(whole))])
    ended = "Compressed file ended before the end-of-stream marker was reached"
    assert error_of(path) == f"--dataset {path} cannot be read: {ended}"


@pytest.mark.parametrize("name", ["nope.jsonl", "/no/such/directory"])
def test_missing_path_is_rejected(name: str) -> None:
    expected = f"--eval_dataset {name}: no such file or directory"
    assert error_of(name, option="--eval_dataset") == expected


def test_unknown_name_is_said_to_mean_the_hub() -> None:
    assert "so a hub dataset) cannot be read: " in error_of("someone/pages")


def test_texts_of_several_types_are_rejected(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", lines_of({"text": "a"}))
    write(tmp_path / "b.jsonl", lines_of({"text": {"body": "b"}}))
    assert "the texts have several types (" in error_of(tmp_path)


@pytest.mark.parametrize("options", [{"split": "test"}, {"config_name": "en"}])
def test_option_of_the_hub_is_rejected_for_files(tmp_path: Path, options: dict[str, str]) -> None:
    path = write(tmp_path / "a.jsonl", lines_of({"text": "a"}))
    assert "files have no configuration" in error_of(path, **options)
    with pytest.raises(ValueError, match="files have no configuration"):
        load_sample(str(path), 1, **options)


ASK, SAY = {"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [ASK, SAY], "id": 3},
        {"prompt": [ASK], "completion": [SAY]},
        {"prompt": "1 + 1?", "completion": "2"},
    ],
)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_load_corpus_reads_conversations(tmp_path: Path, row: dict[str, Any], kind: str) -> None:
    path = write(tmp_path / "a.jsonl", lines_of(row, dict.fromkeys(row)))
    if kind == "parquet":
        parquet = tmp_path / "b.parquet"
        datasets.load_dataset("json", data_files=str(path), split="train").to_parquet(parquet)
        path = parquet
    corpus = load_corpus(str(path))
    assert is_conversations(corpus)
    first, second = corpus
    assert first == {
        "text": "1 + 1?\n2", "roles": ["user", "assistant"], "ends": [6, 8], "untrained": [],
        "given": "", "fault": None
    }  # fmt: skip
    assert (second["text"], second["roles"]) == (None, [])
    assert "nothing" in second["fault"]


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("k", [[None], [None, {"a": 1}]]),
        ("k", [[[None]], [[None, "a"]]]),
        ("at", ["now", "2026-11-22"]),
        ("at", ["a", 1]),
        ("at", [True, 2]),
    ],
)
@pytest.mark.parametrize("names", [("messages",), ("prompt", "completion")])
def test_fields_of_messages_stay_unchanged(
    tmp_path: Path, field: str, values: list[Any], names: tuple[str, ...]
) -> None:
    rows = [{name: [{**SAY, field: value}] for name in names} for value in values]
    corpus = load_corpus(str(write(tmp_path / "a.jsonl", lines_of(*rows))))
    found = [json.loads(given)["messages"] for given in corpus["given"]]
    assert found == [[{field: value}] * len(names) for value in values]


@pytest.mark.parametrize("answers", [["a", "2026-11-22"], ["a", 5]])
def test_answers_of_other_types(tmp_path: Path, answers: list[Any]) -> None:
    rows = [{"prompt": "q", "completion": answer} for answer in answers]
    path = write(tmp_path / "a.jsonl", lines_of(*rows))
    texts = [f"q\n{answer}" if isinstance(answer, str) else None for answer in answers]
    assert load_corpus(str(path))["text"][:] == texts
    given = load_corpus(str(path), text_column="completion")["text"][:]
    assert given == answers


def test_files_of_two_kinds_are_rejected(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", lines_of({"text": "x"}))
    write(tmp_path / "b.jsonl", lines_of({"messages": [ASK, SAY]}))
    assert "holds conversations and documents" in error_of(tmp_path)
