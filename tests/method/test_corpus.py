"""Reading documents: every local format, what a column may hold, and what is rejected."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from vocagnolm.corpus import files_of, load_corpus, load_sample
from vocagnolm.texts import is_conversations, only_text

TEXTS = ["First  document.\r\n\n$x^2$ 😀 数学 e\u0301\x00", "second"]
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: in_zstandard(data),
}


def in_zstandard(data: bytes) -> bytes:
    """Compress like `zstd --long=28`; dumps of the web use up to 31."""
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=28, enable_ldm=True)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    return compressor.compress(data) + compressor.flush()


def lines_of(*rows: dict[str, Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def write(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def texts_of(path: Path, **options: Any) -> list[Any]:
    corpus = load_corpus(str(path), **options)
    assert set(corpus.column_names) <= {"text", "fault"}
    return list(corpus["text"])


def documents(*numbers: int) -> bytes:
    """JSON lines of documents with these numbers."""
    return lines_of(*({"text": f"document {number}"} for number in numbers))


def faults_of(path: Path, **options: Any) -> dict[int, str]:
    """Why rows are not documents, by index."""
    corpus = load_corpus(str(path), **options)
    if "fault" not in corpus.column_names:
        return {}
    return {row: fault for row, fault in enumerate(corpus["fault"]) if fault}


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


def test_load_corpus_reads_zstandard_of_parallel_tools(tmp_path: Path) -> None:
    """They write a skippable frame with the size of the frame behind it before each frame."""
    content = b""
    for text in TEXTS:
        frame = zstandard.compress(lines_of({"text": text}))
        content += b"\x50\x2a\x4d\x18" + struct.pack("<II", 4, len(frame)) + frame
    assert texts_of(write(tmp_path / "pages.jsonl.zst", content)) == TEXTS


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
        ([{"text": "a"}, {"text": 5}, {"text": 1.5}], ["a", None, None]),
        ([{"text": 5}, {"text": "a"}], [None, "a"]),
        ([{"text": "a"}, {"text": ["list"]}, {"text": {"k": 1}}], ["a", None, None]),
        ([{"text": "2024-01-05T00:00:00"}] * 2, ["2024-01-05T00:00:00"] * 2),
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
    text = late.get("text")
    assert texts_of(path) == ["a" * 20] * 2 + [text if isinstance(text, str) else None]


def test_load_corpus_keeps_nulls_when_parquet(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": ["a", None]}).to_parquet(str(tmp_path / "a.parquet"))
    assert texts_of(tmp_path / "a.parquet") == ["a", None]


def test_empty_txt_file_is_a_document(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "")
    write(tmp_path / "b.txt", "b")
    assert texts_of(tmp_path) == ["", "b"]


# Directories


@pytest.mark.parametrize(
    ("names", "read", "left_out"),
    [
        # Files, shards and folders that name a split.
        (["train.jsonl", "test.jsonl"], ["train.jsonl"], ["test.jsonl"]),
        (["data/train-00000-of-00001.jsonl", "data/test-00000-of-00001.jsonl"],
         ["data/train-00000-of-00001.jsonl"], ["data/test-00000-of-00001.jsonl"]),
        (["train/a.jsonl", "validation/a.jsonl", "dev/b.jsonl"], ["train/a.jsonl"],
         ["validation/a.jsonl", "dev/b.jsonl"]),
        (["my_train_file.jsonl", "my-eval-file.jsonl"], ["my_train_file.jsonl"],
         ["my-eval-file.jsonl"]),
        # None of these names a split.
        (["contest.jsonl", "latest.jsonl", "protest/devote.jsonl"],
         ["contest.jsonl", "latest.jsonl", "protest/devote.jsonl"], []),
        # Hidden files, those of notebooks and of macOS; endings in any case; texts next to data.
        (["a.jsonl", ".ipynb_checkpoints/a.jsonl", "._a.jsonl", "__pycache__/b.jsonl", "_c.jsonl"],
         ["a.jsonl"], [".ipynb_checkpoints/a.jsonl", "._a.jsonl", "_c.jsonl"]),
        (["a.jsonl", "b.JSONL", "c.ndjson", "LICENSE.txt", "notes/TODO.txt", "d.zip", "e.parq"],
         ["a.jsonl", "b.JSONL", "c.ndjson"], ["LICENSE.txt", "notes/TODO.txt", "d.zip", "e.parq"]),
    ],
)  # fmt: skip
def test_directory_is_read_as_datasets_reads_it(
    tmp_path: Path, names: list[str], read: list[str], left_out: list[str]
) -> None:
    for name in names:
        write(tmp_path / name, lines_of({"text": name}))
    assert sorted(texts_of(tmp_path)) == sorted(read)
    files = files_of(str(tmp_path))
    assert files is not None
    for name in left_out:
        assert name in files.describe()


def test_directory_obeys_the_configs_of_its_readme(tmp_path: Path) -> None:
    for name in ("first.jsonl", "second/odd.jsonl", "other.jsonl", "held.jsonl"):
        write(tmp_path / name, lines_of({"text": name}))
    write(
        tmp_path / "README.md",
        """---
configs:
- config_name: one
  default: true
  data_files:
  - split: train
    path: [first.jsonl, "second/*.jsonl"]
  - split: test
    path: held.jsonl
- config_name: two
  data_files: other.jsonl
---
# Pages
""",
    )
    assert texts_of(tmp_path) == ["first.jsonl", "second/odd.jsonl"]
    assert texts_of(tmp_path, config_name="two") == ["other.jsonl"]
    assert texts_of(tmp_path, split="test") == ["held.jsonl"]
    assert "one, two" in error_of(tmp_path, config_name="three")


def test_split_is_chosen_and_a_missing_one_is_told(tmp_path: Path) -> None:
    for name in ("train", "test"):
        write(tmp_path / f"{name}.jsonl", lines_of(*({"text": f"{name} {n}"} for n in range(10))))
    assert texts_of(tmp_path, split="test") == [f"test {n}" for n in range(10)]
    assert texts_of(tmp_path, split="train[:20%]") == ["train 0", "train 1"]
    assert len(texts_of(tmp_path, split="train+test")) == 20
    assert "train (train.jsonl), test (test.jsonl)" in error_of(tmp_path, split="validation")
    (tmp_path / "train.jsonl").unlink()
    # Nobody trains on a held-out split by accident.
    assert "no split train" in error_of(tmp_path)


def test_links_of_a_hub_cache_are_followed(tmp_path: Path) -> None:
    write(tmp_path / "blobs/0a1b", documents(1, 2))
    snapshot = tmp_path / "snapshots/main"
    snapshot.mkdir(parents=True)
    (snapshot / "train.jsonl").symlink_to(tmp_path / "blobs/0a1b")
    assert len(texts_of(snapshot)) == 2


@pytest.mark.parametrize("is_dict", [False, True])
def test_directory_of_save_to_disk_is_read(tmp_path: Path, is_dict: bool) -> None:
    rows = datasets.Dataset.from_dict({"text": ["a", "b"], "n": [1, 2]})
    saved = datasets.DatasetDict(train=rows, test=rows.select([0])) if is_dict else rows
    saved.save_to_disk(str(tmp_path / "saved"))
    assert texts_of(tmp_path / "saved") == ["a", "b"]


def test_formats_of_a_directory_may_differ(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", documents(0))
    datasets.Dataset.from_dict({"text": ["b"], "url": ["u"]}).to_parquet(tmp_path / "b.parquet")
    polars = pa.table({"text": pa.array(["c"], pa.large_string())})
    pq.write_table(polars, tmp_path / "c.parquet")
    pq.write_table(pa.table({"text": pa.nulls(2)}), tmp_path / "d.parquet")
    write(tmp_path / "e.jsonl", b"")
    assert texts_of(tmp_path) == ["document 0", "b", "c", None, None]


@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
def test_table_is_read_as_text(tmp_path: Path, name: str) -> None:
    separator = "," if name == "a.csv" else "\t"
    rows = [["id", "text"], ["1", "NA"], ["2", "2024-01-05"], ["3", "007"]]
    write(tmp_path / name, "\n".join(separator.join(row) for row in rows))
    assert texts_of(tmp_path / name) == ["NA", "2024-01-05", "007"]


# Bad rows among good ones


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{oops\n", "not valid JSON"),
        (b'{"text": "cut o\n', "not valid JSON"),
        (b"[1, 2]\n", "not a JSON object but int"),
        (b'"text"\n', "not a JSON object but str"),
        (b'{"text": "\xe9t\xe9"}\n', "not valid UTF-8"),
    ],
)
def test_bad_line_is_skipped_by_its_number(tmp_path: Path, line: bytes, reason: str) -> None:
    path = write(tmp_path / "a.jsonl", documents(0, 1) + line + documents(3))
    faults = faults_of(path)
    assert faults[2] == f"a.jsonl:3: {reason}"
    assert load_corpus(str(path))["text"][-1] == "document 3"


def test_lone_surrogate_is_skipped(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", documents(0) + b'{"text": "\\ud83d"}\n' + documents(2))
    assert "surrogate" in faults_of(path)[1]
    assert texts_of(path) == ["document 0", None, "document 2"]


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary()])
def test_bytes_are_text_when_they_are_utf8(tmp_path: Path, kind: pa.DataType) -> None:
    values = pa.array(["é".encode(), b"\xff", None], kind)
    pq.write_table(pa.table({"text": values}), tmp_path / "a.parquet")
    assert texts_of(tmp_path / "a.parquet") == ["é", None, None]
    assert faults_of(tmp_path / "a.parquet") == {1: "not valid UTF-8"}


def test_other_columns_may_be_what_they_like_when_the_file_is_large(tmp_path: Path) -> None:
    # Past the first ten megabytes, from which Arrow's reader infers all types.
    text = "a" * 20_000
    rows = [{"text": text, "note": None, "meta": {"pile": "x"}}] * 600
    rows += [{"text": text, "note": "late", "meta": {"pile": "x", "url": "u"}, "lang": "en"}] * 3
    assert texts_of(write(tmp_path / "a.jsonl", lines_of(*rows))) == [text] * 603


# What cannot be read


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.jsonl", b"{oops\n", "line 1: not valid JSON"),
        ("a.jsonl", b'{"body": "x"}\n', "'text' is not a column of .* its columns are body"),
        ("a.jsonl", b'{"question": "x"}\n', "instruction and output"),
        ("a.parquet", b"not parquet", "[Pp]arquet"),
        ("a.jsonl.gz", b"not gzip", "line 1: not valid JSON"),
        ("a.jsonl", b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        ("a.jsonl", "{}".encode("utf-16"), "UTF-16"),
        ("a.jsonl", b"", "it holds no documents"),
        ("a.json", b"[]", "it holds no documents"),
        ("a.json", b'[{"text": "a"}, {"te', "its array is damaged or cut off"),
        ("data.xlsx", b"PK", "expected files ending in .jsonl"),
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
    assert "no such file or directory" in error_of(name, option="--eval_dataset")


def test_unknown_name_is_said_to_mean_the_hub() -> None:
    assert "so a hub dataset) cannot be read: " in error_of("someone/pages")


@pytest.mark.parametrize("options", [{"split": "test"}, {"config_name": "en"}])
def test_option_of_the_hub_is_rejected_for_files(tmp_path: Path, options: dict[str, str]) -> None:
    path = write(tmp_path / "a.jsonl", lines_of({"text": "a"}))
    assert "a file has no configuration" in error_of(path, **options)
    with pytest.raises(ValueError, match="a file has no configuration"):
        load_sample(str(path), 1, **options)


ASK, SAY = {"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}


def test_column_of_conversations_is_cached_apart_from_documents(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", lines_of({"messages": [ASK, SAY]}))
    for text_column, kind in ((None, True), ("messages", False), (None, True)):
        assert is_conversations(load_corpus(str(path), text_column=text_column)) == kind


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
        "prompt_messages": int("prompt" in row), "extras": "", "fault": None
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
    found = [json.loads(given)["messages"] for given in corpus["extras"]]
    assert found == [[{field: value}] * len(names) for value in values]


@pytest.mark.parametrize("answers", [["a", "2026-11-22"], ["a", 5]])
def test_answers_of_other_types(tmp_path: Path, answers: list[Any]) -> None:
    rows = [{"prompt": "q", "completion": answer} for answer in answers]
    path = write(tmp_path / "a.jsonl", lines_of(*rows))
    texts = [f"q\n{answer}" if isinstance(answer, str) else None for answer in answers]
    assert load_corpus(str(path))["text"][:] == texts
    given = load_corpus(str(path), text_column="completion")["text"][:]
    assert given == [answer if isinstance(answer, str) else None for answer in answers]


def test_files_of_two_kinds_are_rejected(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", lines_of({"text": "x"}))
    write(tmp_path / "b.jsonl", lines_of({"messages": [ASK, SAY]}))
    assert "holds conversations and documents" in error_of(tmp_path)


def test_empty_name_is_not_the_current_directory() -> None:
    with pytest.raises(ValueError, match="is empty"):
        load_corpus("")


def test_transform_is_rejected() -> None:
    corpus = datasets.Dataset.from_dict({"text": ["a"]})
    changed = corpus.with_transform(lambda rows: {"text": [f"{text}b" for text in rows["text"]]})
    with pytest.raises(ValueError, match=r"^mine has a transform .*: apply it with map$"):
        only_text(changed, None, "mine")
    # Other formats change no value.
    assert only_text(corpus.with_format("numpy"), None, "mine")["text"][:] == ["a"]
