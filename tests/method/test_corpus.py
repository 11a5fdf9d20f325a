"""Reading documents: what each input holds, which rows are skipped, and what cannot be read."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from vocagnolm.corpus import load_corpus, load_sample, read_list
from vocagnolm.fields import OptionError
from vocagnolm.shell.hub import check_name
from vocagnolm.texts import is_conversations, only_text, reasons_in

TEXTS = ["First  document.\r\n\n$x^2$ 😀 数学 e\u0301\x00", "second"]
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.compress,
}
ASK, SAY = {"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}


def lines_of(*rows: dict[str, Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def documents(*names: object) -> bytes:
    return lines_of(*({"text": str(name)} for name in names))


def write(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def texts_of(path: Path, **options: Any) -> list[Any]:
    corpus = load_corpus(str(path), **options)
    assert set(corpus.column_names) <= {"text", "skipped"}
    return list(corpus["text"])


def files_of(path: Path | str) -> str:
    """What is said of the files of a directory."""
    return str(load_corpus(str(path)).info.description)


def error_of(path: Path | str, **options: Any) -> str:
    with pytest.raises(OptionError) as caught:
        load_corpus(str(path), **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


# Files


@pytest.mark.parametrize("suffix", COMPRESS)
def test_texts_stay_as_they_are(tmp_path: Path, suffix: str) -> None:
    rows = [{"text": text, "url": "u"} for text in TEXTS]
    text = "A line.\n\nAnother paragraph.\n  "
    table = b"\xef\xbb\xbfid\ttext\r\n1\tNA\r\n2\t007\r\n\r\n3\t" + b"a" * 200_000
    for name, content, expected in (
        ("pages.jsonl", lines_of(*rows), TEXTS),
        ("pages.json", json.dumps(rows, indent=1).encode(), TEXTS),
        ("page.txt", text.encode(), [text]),
        ("pages.tsv", table, ["NA", "007", "a" * 200_000]),
    ):
        path = write(tmp_path / (name + suffix), COMPRESS[suffix](content))
        assert texts_of(path) == expected


# The content of a JSON file, and its documents. After "!" comes why a row is skipped.
ROWS: list[tuple[bytes, list[str]]] = [
    (b'{"text": "a"}\n\n \n{"text": "b"}', ["a", "b"]),
    (b'\xef\xbb\xbf{"text": "a\\u2028\t"}\r\n', ["a\u2028\t"]),
    (documents("2024-01-05T00:00:00", 12), ["2024-01-05T00:00:00", "12"]),
    (lines_of({"text": "a"}, {"text": None}, {"url": "u"}), ["a", "!null", "!null"]),
    (lines_of({"text": 5}, {"text": "a"}, {"text": {"k": 1}}), ["!int", "a", "!dict"]),
    (documents("", " \n", "a"), ["!empty", "!empty", "a"]),
    (lines_of({"text": "a", "m": {"id": 1}}, {"text": "b", "m": 1}), ["a", "b"]),
    (lines_of({"text": "a", "m": None}, {"text": "b", "m": "late", "u": "u"}), ["a", "b"]),
    (lines_of({"url": "u"}, {"text": "a"}), ["!null", "a"]),
    (documents("a") + b'{"text": "\\ud83d"}\n', ["a", "!surrogate"]),
    (documents("a") + b"{oops\n" + documents("b"), ["a", "!a.jsonl:2: not valid JSON", "b"]),
    (documents("a") + b'{"text": "cut o', ["a", "!a.jsonl:2: not valid JSON"]),
    (documents("a") + b"[1, 2]\n", ["a", "!a.jsonl:2: not a JSON"]),
    (documents("a") + b'"text"\n', ["a", "!a.jsonl:2: not a JSON"]),
    (documents("a") + b'{"text": ' + b"[" * 9999, ["a", "!a.jsonl:2: not valid JSON"]),
    (documents("a") + b'{"text": "\xe9"}\n', ["a", "!a.jsonl:2: not valid UTF-8"]),
]


@pytest.mark.parametrize(("content", "expected"), ROWS)
def test_every_row_is_a_document_or_skipped(
    tmp_path: Path, content: bytes, expected: list[str]
) -> None:
    corpus = load_corpus(str(write(tmp_path / "a.jsonl", content)))
    assert len(corpus) == len(expected)
    for row, text in zip(corpus, expected, strict=True):
        if text.startswith("!"):
            assert row["text"] is None
            assert text[1:] in row["skipped"]
        else:
            assert row == {"text": text, "skipped": None}


@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
def test_row_of_a_table_is_skipped_if_its_text_is_unknown(tmp_path: Path, name: str) -> None:
    separator = "," if name == "a.csv" else "\t"
    rows = 'text|label\nhello| world|0\n"a|b\n ""c"""|1\n\nhello\nd|1\n'
    corpus = load_corpus(str(write(tmp_path / name, rows.replace("|", separator))))
    assert corpus["text"][:] == [None, f'a{separator}b\n "c"', None, "d"]
    first, _, second, _ = corpus["skipped"]
    assert first.startswith(f"{name}:2: 3 fields")
    assert second.startswith(f"{name}:6: 1 fields")


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array(["a", None]), ["a", None]),
        (pa.array(["a", "b"], pa.large_string()), ["a", "b"]),
        (pa.array(["é".encode(), b"\xff"], pa.binary()), ["é", None]),
        (pa.array(["é".encode(), b"\xff"], pa.large_binary()), ["é", None]),
        (pa.nulls(2), [None, None]),
        (pa.array([5, 6]), [None, None]),
        (pa.array([["a"], []]), [None, None]),
    ],
)
def test_column_of_a_table_is_text_or_skipped(
    tmp_path: Path, column: pa.Array, expected: list[str | None]
) -> None:
    pq.write_table(pa.table({"text": column, "n": [1, 2]}), tmp_path / "a.parquet")
    assert texts_of(tmp_path / "a.parquet") == expected
    reasons = list(reasons_in(load_corpus(str(tmp_path / "a.parquet"))))
    assert len(reasons) == expected.count(None)


def test_changed_file_is_read_again(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", documents("before"))
    assert texts_of(path) == ["before"]
    write(path, documents("after it"))
    assert texts_of(path) == ["after it"]


# Directories

README = """---
configs:
- config_name: one
  default: true
  data_files:
  - split: train
    path: ["second/*.jsonl", first.jsonl]
  - split: test
    path: held.jsonl
- config_name: two
  data_files: other.jsonl
---
"""

# The files of a directory, those that are read, and those that the plan names as left out.
DIRECTORIES: list[tuple[list[str], list[str], list[str]]] = [
    (["train.jsonl", "test.jsonl"], ["train.jsonl"], ["test.jsonl"]),
    (["data/train-00000-of-00001.jsonl", "data/test-00000-of-00001.jsonl"],
     ["data/train-00000-of-00001.jsonl"], ["data/test-00000-of-00001.jsonl"]),
    (["train/a.jsonl", "validation/a.jsonl", "dev/b.jsonl"], ["train/a.jsonl"],
     ["validation/a.jsonl", "dev/b.jsonl"]),
    (["my_train_file.jsonl", "an-eval-file.jsonl"], ["my_train_file.jsonl"],
     ["an-eval-file.jsonl"]),
    # None of these names a split. The order is that of paths.
    (["contest.jsonl", "latest.jsonl", "B.jsonl", "protest/devote.jsonl"],
     ["B.jsonl", "contest.jsonl", "latest.jsonl", "protest/devote.jsonl"], []),
    # Files of notebooks and of macOS.
    (["a.jsonl", ".ipynb_checkpoints/a.jsonl", "._a.jsonl", "__pycache__/b.jsonl"], ["a.jsonl"],
     ["__pycache__/b.jsonl"]),
    # Most files are texts, and are left out all the same.
    (["a.jsonl", "LICENSE.txt", "notes/TODO.txt", "NOTICE.txt"], ["a.jsonl"],
     ["LICENSE.txt", "notes/TODO.txt", "NOTICE.txt"]),
    (["a.jsonl", "b.JSONL", "c.ndjson", "d.zip", "e.parq", "1.png", "2.png"],
     ["a.jsonl", "b.JSONL", "c.ndjson"], ["1.png", "2.png", "d.zip", "e.parq"]),
    (["a[1].jsonl", "a1.jsonl", "a*.jsonl"], ["a*.jsonl", "a1.jsonl", "a[1].jsonl"], []),
    (["pages.jsonl/inner.jsonl"], ["pages.jsonl/inner.jsonl"], []),
]  # fmt: skip


@pytest.mark.parametrize(("names", "read", "left_out"), DIRECTORIES)
def test_directory_is_read_as_datasets_reads_it(
    tmp_path: Path, names: list[str], read: list[str], left_out: list[str]
) -> None:
    root = tmp_path / "pages [1]"
    for name in names:
        write(root / name, documents(name))
    assert texts_of(root) == read
    description, _, omitted = files_of(str(root)).partition("; left out: ")
    assert description == f"read {len(read)} file{'s' * (len(read) != 1)} of train"
    assert sorted(omitted.split(", ")) == sorted(left_out or [""])


def test_texts_of_a_directory_are_its_documents(tmp_path: Path) -> None:
    for name, content in {"b/z.txt": b"z", "a.txt": b"", "c.txt": b"\xe9", "B.txt": b"B"}.items():
        write(tmp_path / name, content)
    assert texts_of(tmp_path) == ["B", None, "z", None]


def test_directory_obeys_the_configs_of_its_readme(tmp_path: Path) -> None:
    for name in ("first.jsonl", "second/odd.jsonl", "other.jsonl", "held.jsonl"):
        write(tmp_path / name, documents(name))
    write(tmp_path / "README.md", README)
    assert texts_of(tmp_path) == ["first.jsonl", "second/odd.jsonl"]
    assert texts_of(tmp_path, config_name="two") == ["other.jsonl"]
    assert texts_of(tmp_path, split="test") == texts_of(tmp_path, split=None) == ["held.jsonl"]
    assert "three" in error_of(tmp_path, config_name="three")
    write(tmp_path / "README.md", README.replace("  default: true\n", ""))
    assert "'one', 'two'" in error_of(tmp_path)


@pytest.mark.parametrize("is_saved", [False, True])
def test_split_is_chosen(tmp_path: Path, is_saved: bool) -> None:
    root = tmp_path / "pages"
    splits = {name: [f"{name} {number}" for number in range(10)] for name in ("train", "test")}
    if is_saved:
        saved = {
            name: datasets.Dataset.from_dict({"text": texts}) for name, texts in splits.items()
        }
        datasets.DatasetDict(saved).save_to_disk(str(root))
    else:
        for name, texts in splits.items():
            write(root / f"{name}.jsonl", documents(*texts))
    train, test = splits["train"], splits["test"]
    assert texts_of(root) == train
    assert texts_of(root, split="test") == texts_of(root, split=None) == test
    assert texts_of(root, split="train[:20%]+test[-2:]") == train[:2] + test[-2:]
    assert texts_of(root, split="train[:99]") == train
    assert load_sample(str(root), 3)[0]["text"][:] == train[:3]
    assert "test" in files_of(str(root)).partition("left out")[2]
    assert "train, test" in error_of(root, split="validation").replace("test, train", "train, test")


def test_held_out_split_is_never_read_by_accident(tmp_path: Path) -> None:
    write(tmp_path / "test.jsonl", documents("test"))
    assert "no split train" in error_of(tmp_path)
    write(tmp_path / "validation.jsonl", documents("validation"))
    assert "test" in error_of(tmp_path, split=None)


def test_dataset_of_save_to_disk_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = datasets.Dataset.from_dict({"text": ["a", "b", "c"], "n": [1, 2, 3]})
    rows.select([2, 0]).save_to_disk(str(tmp_path / "saved"))
    monkeypatch.chdir(tmp_path)
    assert texts_of(Path("saved")) == ["c", "a"]
    assert files_of("saved") == "read 1 file of train"


def test_links_of_a_hub_cache_are_followed(tmp_path: Path) -> None:
    write(tmp_path / "blobs/0a1b", documents(1, 2))
    snapshot = tmp_path / "snapshots/main"
    snapshot.mkdir(parents=True)
    (snapshot / "train.jsonl").symlink_to(tmp_path / "blobs/0a1b")
    assert len(texts_of(snapshot)) == 2


def test_formats_of_a_directory_may_differ(tmp_path: Path) -> None:
    table = pa.table({"text": ["b"], "url": ["u"]})
    write(tmp_path / "a.jsonl", documents("a"))
    pq.write_table(table, tmp_path / "b.parquet")
    pq.write_table(pa.table({"text": pa.array(["c"], pa.large_string())}), tmp_path / "c.parquet")
    pq.write_table(pa.table({"text": pa.nulls(2)}), tmp_path / "d.parquet")
    # Nothing, no rows, and rows after an empty first group.
    write(tmp_path / "e.jsonl", b"")
    write(tmp_path / "f.json", b"[]")
    pq.write_table(table.slice(0, 0), tmp_path / "g.parquet")
    with pq.ParquetWriter(tmp_path / "h.parquet", table.schema) as writer:
        writer.write_table(table.slice(0, 0))
        writer.write_table(table)
    assert texts_of(tmp_path) == ["a", "b", "c", None, None, "b"]
    assert "e.jsonl (empty)" in files_of(str(tmp_path))


# What cannot be read


# A file, what it holds, and why it is rejected. Of Markdown, the directory is read.
WRONG_FILES: list[tuple[str, bytes, str]] = [
    ("a.jsonl", b"{oops\n", "a.jsonl:1: not valid JSON"),
    ("a.jsonl", b'{"body": "x"}\n', "which has body"),
    ("a.jsonl", b'{"question": "x"}\n', "instruction and output"),
    ("a.jsonl", b"", "no documents"),
    ("a.json", b"[]", "no documents"),
    ("a.json", b'[{"text": "a"}, {"te', "Unterminated"),
    ("a.parquet", b"not parquet", "Parquet"),
    ("a.arrow", b"not arrow", "read"),
    ("a.jsonl.gz", b"not gzip", "Not a gzipped file"),
    ("a.csv", b"text,label\n", "no documents"),
    ("a.csv", b'text,label\na,0\n"hello,0\nb,1\n', "line 3: not valid CSV"),
    ("a.csv", b'text,label\n"hello" world,0\n', "line 2: not valid CSV"),
    ("data.xlsx", b"PK", "ending in .jsonl"),
    ("notes/a.md", b"a", "ending in .jsonl"),
    ("README.md", b"---\nconfigs: [\n---\n", "flow node"),
]


@pytest.mark.parametrize(("name", "content", "reason"), WRONG_FILES)
def test_error_names_the_file_and_the_reason(
    tmp_path: Path, name: str, content: bytes, reason: str
) -> None:
    path = write(tmp_path / name, content)
    asked = tmp_path if name.endswith(".md") else path
    message = error_of(asked)
    assert str(asked) in message
    assert reason in message


def test_two_columns_of_one_name_are_rejected(tmp_path: Path) -> None:
    pq.write_table(pa.table([["a"], ["b"]], names=["text", "text"]), tmp_path / "a.parquet")
    assert "which has text, text" in error_of(tmp_path / "a.parquet")


@pytest.mark.parametrize("suffix", [suffix for suffix in COMPRESS if suffix])
@pytest.mark.parametrize("kept", [0.1, 0.99])
@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_compressed_file_that_is_cut_off_is_rejected(
    tmp_path: Path, name: str, kept: float, suffix: str
) -> None:
    whole = COMPRESS[suffix](documents(*(f"{n} {n * n:x} {n**5}" for n in range(500))))
    path = write(tmp_path / (name + suffix), whole[: int(kept * len(whole))])
    message = error_of(path)
    assert str(path) in message
    assert "ended before the end" in message or "Truncated" in message


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("", {}, "dataset is empty"),
        ("nope.jsonl", {"option": "eval_dataset"}, "eval_dataset nope.jsonl: no such file"),
        ("/no/such/directory", {}, "dataset /no/such/directory: no such file"),
        ("someone/pages", {}, "a hub dataset"),
        ("a.jsonl", {"split": "test"}, "no split test"),
        ("a.jsonl", {"split": "train[:x]"}, "Unrecognized"),
        ("a.jsonl", {"config_name": "en"}, "en: a.jsonl is a file"),
    ],
)
def test_wrong_argument_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any], reason: str
) -> None:
    write(tmp_path / "a.jsonl", documents("a"))
    monkeypatch.chdir(tmp_path)
    assert reason in error_of(name, **options)


# Conversations


def test_column_of_conversations_is_cached_apart_from_documents(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", lines_of({"messages": [ASK, SAY]}))
    for text_column, kind in ((None, True), ("messages", False), (None, True)):
        assert is_conversations(load_corpus(str(path), text_column=text_column)) == kind


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_conversations_are_read(tmp_path: Path, kind: str) -> None:
    rows = lines_of({"messages": [ASK, SAY], "id": 3}, {"messages": None, "id": None})
    path = write(tmp_path / "a.jsonl", rows)
    if kind == "parquet":
        table = datasets.load_dataset("json", data_files=str(path), split="train")
        path = tmp_path / "b.parquet"
        table.to_parquet(path)
    corpus = load_corpus(str(path))
    assert is_conversations(corpus)
    first, second = corpus
    assert (first["text"], first["roles"]) == ("1 + 1?\n2", ["user", "assistant"])
    assert first["ends"] == [6, 8]
    assert (first["untrained"], first["prompt_messages"], first["extras"]) == ([], 0, "")
    assert (first["skipped"], second["text"]) == (None, None)
    assert "has no list" in second["skipped"]


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("k", [[None], [None, {"a": 1}]]),
        ("k", [[[None]], [[None, "a"]]]),
        ("at", ["now", "2026-11-22"]),
        ("at", ["a", 1]),
    ],
)
@pytest.mark.parametrize("names", [("messages",), ("prompt", "completion")])
def test_fields_of_messages_stay_unchanged(
    tmp_path: Path, field: str, values: list[Any], names: tuple[str, ...]
) -> None:
    rows = [{name: [{**SAY, field: value}] for name in names} for value in values]
    corpus = load_corpus(str(write(tmp_path / "a.jsonl", lines_of(*rows))))
    found = [json.loads(given)["messages"] for given in corpus["extras"]]
    assert found == [[{field: value}] * len(names) for value in values]


@pytest.mark.parametrize(
    "rows",
    [
        [{"instruction": "Add.", "output": "2"}, {"instruction": 5, "input": "1", "output": "2"}],
        [{"messages": [ASK, SAY]}, {"id": 1, "messages": [ASK]}, {"id": "a", "messages": 5}],
        [{"prompt": "q", "completion": "2026-11-22"}, {"prompt": "q", "completion": 5}],
        [{"id": 1}, {"text": 5}, {"text": "\ud83d"}, {"text": "a"}],
    ],
)
def test_list_is_read_as_a_file_is(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    found = read_list(rows, None, "train_dataset")
    expected = load_corpus(str(write(tmp_path / "a.jsonl", lines_of(*rows))))
    assert found.features == expected.features
    assert found[:] == expected[:]


WEIGHED = [{"text": "a", "weight": 0.5}, {"text": "b", "weight": -2}, {"text": "c", "weight": None}]


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "list", "dataset", "numbers"])
def test_weights_of_documents_are_read(tmp_path: Path, kind: str) -> None:
    table = datasets.Dataset.from_list([*WEIGHED, {"text": "d", "weight": float("inf")}])
    path = tmp_path / f"a.{kind}"
    if kind == "csv":
        write(path, "weight,text\n0.5,a\n-2,b\n,c\n5 kg,d\n")
    elif kind == "jsonl":
        write(path, lines_of(*WEIGHED, {"text": "d", "weight": "5 kg"}))
    elif kind == "parquet":
        table.to_parquet(path)
    if path.exists():
        corpus = load_corpus(str(path))
    elif kind == "list":
        corpus = read_list(table.to_list(), None, "rows")
    else:
        body = table.rename_column("text", "body")
        if kind == "numbers":
            body = body.cast_column("weight", datasets.Value("float32"))
        corpus = only_text(body, "body", "rows")
    assert corpus["weight"][:3] == [0.5, -2.0, None if corpus["weight"][2] is None else 1.0]
    assert "weight of" in " ".join(reasons_in(corpus))
    assert len(list(reasons_in(corpus))) == 1


def test_weights_of_messages_are_seen_in_the_first_rows(tmp_path: Path) -> None:
    half = {"messages": [ASK, {**SAY, "weight": 0.5}]}
    plain = {"messages": [ASK, {**SAY, "weight": 0}, ASK, SAY]}
    for number, (rows, has_weights) in enumerate(
        [([plain], False), ([half, plain], True), ([plain | {"weight": 1}], True)]
    ):
        path = write(tmp_path / f"{number}.jsonl", lines_of(*rows))
        table = datasets.Dataset.from_list(rows)
        for corpus in (
            load_corpus(str(path)), read_list(rows, None, "rows"), only_text(table, None, "rows")
        ):  # fmt: skip
            assert ("weights" in corpus.column_names) == has_weights
            assert corpus["untrained"][-1] == [1]
    page = {"text": "a"}
    for number, (first, last) in enumerate(
        [(plain, half), (plain, plain | {"weight": 0.5}), (page, page | {"weight": -1})]
    ):
        late = write(tmp_path / f"late{number}.jsonl", lines_of(*[first] * 1000, last))
        (reason,) = reasons_in(load_corpus(str(late)))
        assert "first weight" in reason
    # Files with and without weights are one corpus.
    write(tmp_path / "both" / "a.jsonl", lines_of(plain))
    write(tmp_path / "both" / "b.jsonl", lines_of(half))
    assert load_corpus(str(tmp_path / "both"))["weights"][:] == [None, [1.0, 1.0, 0.5]]


def test_files_of_two_kinds_are_rejected(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", documents("x"))
    write(tmp_path / "b.jsonl", lines_of({"messages": [ASK, SAY]}))
    assert "conversations and documents" in error_of(tmp_path)


def test_transform_is_rejected() -> None:
    corpus = datasets.Dataset.from_dict({"text": ["a"]})
    changed = corpus.with_transform(lambda rows: {"text": [f"{text}b" for text in rows["text"]]})
    with pytest.raises(ValueError, match=r"^mine has a transform"):
        only_text(changed, None, "mine")
    # Other formats change no value.
    assert only_text(corpus.with_format("numpy"), None, "mine")["text"][:] == ["a"]


# Names that are not paths


@pytest.mark.parametrize(
    "name", ["./foo/bar/baz", "foo/bar/baz", "a b", "/no/model", "~/m", "../m"]
)
def test_name_that_the_hub_cannot_have_is_rejected(name: str) -> None:
    with pytest.raises(ValueError, match=f"teacher {name}: no such file"):
        check_name("teacher", name)


def test_names_of_files_and_of_repositories_pass(tmp_path: Path) -> None:
    for name in (str(tmp_path), "gpt2", "org/model"):
        check_name("student", name)


def test_document_after_the_teacher_is_rejected(tmp_path: Path) -> None:
    pages = tmp_path / "pages.jsonl"
    pages.write_text("{}")
    with pytest.raises(ValueError, match=r"teacher .* is a file"):
        check_name("teacher", str(pages))
    check_name("dataset", str(pages), "dataset")
