"""Reading documents: every local format, what a column may hold, and what is refused."""

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
import pyarrow as pa
import pytest
from datasets.arrow_writer import ArrowWriter

from vocagnolm.chat.columns import is_conversations
from vocagnolm.corpus import load_corpus, load_sample
from vocagnolm.texts import json_lines

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


def test_load_corpus_keeps_the_order_of_sorted_paths(
    tmp_path: Path,
) -> None:
    names = ("b/z.txt", "b/deep/er/a.txt", "a.txt", "c.txt", "a/y.txt", "B.txt")
    for name in names:
        write(tmp_path / name, name)
    write(tmp_path / "README.md", "not a document")
    expected = [str(p.relative_to(tmp_path)) for p in sorted(tmp_path / name for name in names)]
    assert texts_of(tmp_path) == expected
    assert texts_of(tmp_path) == expected


def test_load_corpus_reads_compressed_and_plain_files(
    tmp_path: Path,
) -> None:
    for index, (suffix, compress) in enumerate(COMPRESS.items()):
        write(tmp_path / f"{index}.jsonl{suffix}", compress(lines_of({"text": f"text {index}"})))
    assert texts_of(tmp_path) == [f"text {index}" for index in range(len(COMPRESS))]


def test_load_corpus_reads_the_named_file(
    tmp_path: Path,
) -> None:
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
def test_later_rows_may_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: dict[str, Any]
) -> None:
    monkeypatch.setattr(json_lines, "_BATCH_BYTES", 10)
    rows = [{"text": "a" * 20, "meta": {"id": 1}}] * 2
    path = write(tmp_path / "a.jsonl", lines_of(*rows, late))
    assert texts_of(path) == ["a" * 20] * 2 + [late.get("text")]


def test_long_line_needs_no_other_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "load_dataset", None)
    rows = [{"text": "a" * (5 << 20), "meta": 1}, {"text": "b", "meta": "other"}]
    path = write(tmp_path / "a.jsonl", lines_of(*rows))
    assert texts_of(path) == [row["text"] for row in rows]


def test_null_rows_are_read_wherever_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.jsonl", b'{"text": "a"}\nnull\n \nnull\n{"text": null}\nnull')
    for batch in range(1, 45, 4):
        monkeypatch.setattr(json_lines, "_BATCH_BYTES", batch)
        path.touch()
        assert texts_of(path) == ["a", *[None] * 4]


def test_line_beyond_the_limit_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_lines, "_BATCH_BYTES", 10)
    monkeypatch.setattr(json_lines, "_MOST_BYTES", 40)
    path = write(tmp_path / "a.jsonl", lines_of({"text": "a"}, {"text": "a" * 30}))
    told = "cannot be read: after 1 rows one is beyond 2 GiB: cut its text"
    assert error_of(path) == f"--dataset {path} {told}"


def test_single_rows_are_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_lines, "_BATCH_BYTES", 10)
    held = []
    own = ArrowWriter.write_row

    def write_row(self: ArrowWriter, row: pa.Table) -> None:
        held.append(len(self.current_rows))
        own(self, row)

    monkeypatch.setattr(ArrowWriter, "write_row", write_row)
    path = write(tmp_path / "a.jsonl", lines_of(*({"text": "a" * 20} for _ in range(3))))
    assert texts_of(path) == ["a" * 20] * 3
    assert held == [0, 0, 0]


def test_load_corpus_keeps_nulls_when_parquet(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": ["a", None]}).to_parquet(str(tmp_path / "a.parquet"))
    assert texts_of(tmp_path / "a.parquet") == ["a", None]


def test_empty_txt_file_is_a_document(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "")
    write(tmp_path / "b.txt", "b")
    assert texts_of(tmp_path) == ["", "b"]


# Refusals


@pytest.mark.parametrize("name", ["nope.jsonl", "./nope", "/no/such/directory", "a/b.txt.gz"])
def test_missing_path_is_rejected(name: str) -> None:
    assert error_of(name) == f"--dataset {name}: no such file or directory"


def test_load_corpus_names_the_option(tmp_path: Path) -> None:
    message = error_of("nope.jsonl", option="--eval_dataset")
    assert message == "--eval_dataset nope.jsonl: no such file or directory"
    broken = write(tmp_path / "a.jsonl", "{oops\n")
    assert error_of(broken, option="--eval_dataset").startswith(f"--eval_dataset {broken} cannot")


def test_unknown_name_is_said_to_mean_the_hub() -> None:
    assert re.match(
        r"--dataset someone/pages \(no file or directory here, so a hub dataset\) cannot be read: ",
        error_of("someone/pages"),
    )


def test_load_corpus_lists_the_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", lines_of({"body": "x", "url": "u", "completion": "c"}))
    assert error_of(path) == (
        f"--text_column 'text' is not a column of {path}, and neither are messages, nor prompt and "
        "completion; its columns are body, url, completion"
    )


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.jsonl", b'{"text": "a"}\n{oops\n', "JSON parse error: Missing a name"),
        ("a.json", b'[{"text": "a"}', "Unexpected character found when decoding array"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "surrogate pair in string is invalid. in row 0"),
        ("a.txt", b"abc \xff\xfe", "'utf-8' codec can't decode byte 0xff in position 4"),
        ("a.parquet", b"not parquet", "[Pp]arquet"),
        ("a.jsonl.gz", b"not gzip", "Not a gzipped file"),
        ("a.jsonl", b'null\n{"text": "a"}\n', "its first row is null: leave it out"),
        ("a.json", b"[null]", "its first row is null: leave it out"),
        ("a.jsonl", b"", "it holds no documents"),
        ("a.jsonl", b"\n\n", "it holds no documents"),
        ("a.json", b"[]", "it holds no documents"),
        ("a.jsonl.gz", gzip.compress(b"", mtime=0), "it is empty or cut off"),
        ("a.jsonl.gz", b"", "it is empty or cut off"),
        ("a.jsonl.zst", b"", "it is empty or cut off"),
        ("a.jsonl.zst", b"not zstd", "zstd"),
    ],
)
def test_load_corpus_names_the_file_and_the_reason(
    tmp_path: Path, name: str, content: bytes, reason: str
) -> None:
    path = write(tmp_path / name, content)
    message = error_of(path)
    assert message.startswith(f"--dataset {path} cannot be read: ")
    assert re.search(reason, message)


@pytest.mark.parametrize("suffix", [suffix for suffix in COMPRESS if suffix])
@pytest.mark.parametrize("kept", [0.0, 0.1, 0.5, 0.99])
@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_compressed_file_is_said_to_be_cut_off(
    tmp_path: Path, name: str, kept: float, suffix: str
) -> None:
    whole = COMPRESS[suffix](lines_of(*({"text": f"{n} {n * n:x} {n**5}"} for n in range(500))))
    path = write(tmp_path / (name + suffix), whole[: int(kept * len(whole))])
    if kept == 0.0 and suffix == ".gz":  # no bytes are a valid one
        if name == "a.jsonl":
            assert error_of(path).endswith("cannot be read: it is empty or cut off")
        return
    assert error_of(path) == (
        f"--dataset {path} cannot be read: "
        "Compressed file ended before the end-of-stream marker was reached"
    )


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_load_corpus_names_the_compressed_file(tmp_path: Path, name: str, suffix: str) -> None:
    content = bytearray(COMPRESS[suffix](lines_of(*({"text": f"{n**9}"} for n in range(500)))))
    for at in range(len(content) // 2, len(content) // 2 + 40):
        content[at] ^= 0x5A
    path = write(tmp_path / (name + suffix), bytes(content))
    assert error_of(path).startswith(f"--dataset {path} cannot be read: ")


@pytest.mark.parametrize(("good", "bad"), [("a.jsonl", "b.jsonl"), ("b.jsonl", "a.jsonl")])
def test_load_corpus_names_the_one_file(tmp_path: Path, good: str, bad: str) -> None:
    write(tmp_path / good, lines_of({"text": "fine"}))
    write(tmp_path / bad, "{oops\n")
    assert error_of(tmp_path).startswith(f"--dataset {tmp_path / bad} cannot be read: JSON parse")


def test_load_corpus_reads_all_files(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", lines_of({"text": "a"}))
    write(tmp_path / "b.jsonl", lines_of({"text": "b", "url": "u"}))
    assert load_corpus(str(tmp_path))["text"][:] == ["a", "b"]


def test_load_corpus_names_the_files(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", lines_of({"text": "a"}))
    write(tmp_path / "b.jsonl", lines_of({"text": {"body": "b"}}))
    message = error_of(tmp_path)
    assert message.startswith(f"--dataset {tmp_path}: the texts have several types (")
    assert "a.jsonl" in message
    assert "b.jsonl" in message


def test_directory_of_several_formats_is_rejected(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", lines_of({"text": "a"}))
    write(tmp_path / "b.txt", "b")
    assert error_of(tmp_path) == (
        f"--dataset {tmp_path}: holds several formats (json, text); "
        "give a directory with one of them"
    )


@pytest.mark.parametrize("files", [(), ("data.csv", "README.md", "a.gz")])
def test_directory_without_known_files_is_rejected(tmp_path: Path, files: tuple[str, ...]) -> None:
    for name in files:
        write(tmp_path / name, "x")
    assert error_of(tmp_path) == (
        f"--dataset {tmp_path}: expected files ending in .jsonl, .json, .parquet, .txt "
        "(also compressed)"
    )


def test_file_of_unknown_ending_is_rejected(tmp_path: Path) -> None:
    path = write(tmp_path / "data.csv", "text\nx\n")
    assert error_of(path).startswith(f"--dataset {path}: expected files ending in .jsonl")


ASK, SAY = {"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("split", "test", "--dataset_split test: local files have only the split train, give the "),
        ("config_name", "en", "--dataset_config en: local files have no configurations, expected "),
        ("text_column", "body", "--text_column body has no effect on the conversations of "),
    ],
)
def test_option_of_other_sources_is_rejected(
    tmp_path: Path, name: str, given: str, said: str
) -> None:
    path = write(tmp_path / "a.jsonl", lines_of({"messages": [ASK, SAY]}))
    assert error_of(path, **{name: given}).startswith(said)
    with pytest.raises(ValueError, match=said):
        load_sample(str(path), 1, **{name: given})
    if name == "text_column":
        assert error_of(path, text_column="body").endswith("call the documents' column text")


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


@pytest.mark.parametrize("batch", [10, 4 << 20])
@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("k", [[None], [None, {"a": 1}]]),
        ("k", [[[None]], [[None, "a"]]]),
        ("at", ["2026-11-22", "2026-11-23"]),
        ("at", ["now", "2026-11-22"]),
        ("at", ["a", 1]),
        ("at", [True, 2]),
    ],
)
@pytest.mark.parametrize("names", [("messages",), ("prompt", "completion")])
def test_fields_of_messages_stay_unchanged(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    field: str,
    values: list[Any],
    names: tuple[str, ...],
    batch: int,
) -> None:
    monkeypatch.setattr(json_lines, "_BATCH_BYTES", batch)
    rows = [{name: [{**SAY, field: value}] for name in names} for value in values]
    corpus = load_corpus(str(write(tmp_path / "a.jsonl", lines_of(*rows))))
    found = [json.loads(given)["messages"] for given in corpus["given"]]
    assert found == [[{field: value}] * len(names) for value in values]


@pytest.mark.parametrize("answers", [["2026-11-22", "2026-11-23"], ["a", "2026-11-22"], ["a", 5]])
def test_answers_of_other_types(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: list[Any]
) -> None:
    monkeypatch.setattr(json_lines, "_BATCH_BYTES", 10)
    rows = [{"prompt": "q", "completion": answer} for answer in answers]
    path = write(tmp_path / "a.jsonl", lines_of(*rows))
    texts = [f"q\n{answer}" if isinstance(answer, str) else None for answer in answers]
    assert load_corpus(str(path))["text"][:] == texts
    given = load_corpus(str(path), format="text", text_column="completion")["text"][:]
    assert given == answers


@pytest.mark.parametrize(
    ("name", "value", "options"),
    [
        ("tools", [{"name": "f"}], {"tools": [{"name": "f"}]}),
        ("chat_template_kwargs", {"day": "2026-11-22"}, {"day": "2026-11-22"}),
    ],
)
def test_options_of_templates_are_kept(
    tmp_path: Path, name: str, value: Any, options: dict[str, Any]
) -> None:
    path = write(tmp_path / "a.jsonl", lines_of({"messages": [ASK, SAY], name: value}))
    (given,) = load_corpus(str(path))["given"]
    assert json.loads(given)["options"] == options


def test_load_corpus_reads_documents_when_told(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", lines_of({"text": "x", "messages": [ASK]}))
    assert "choose by --format text or --format messages" in error_of(path)
    assert load_corpus(str(path), format="text").column_names == ["text"]
    assert is_conversations(load_corpus(str(path), format="messages"))


def test_load_corpus_refuses_rows_of_two_kinds(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", lines_of({"text": "x"}, {"messages": [ASK, SAY]}))
    told = "row 1 is a conversation, and those before are not: give documents and"
    assert told in error_of(path)
    assert told in error_of(path, format="messages")


def test_load_corpus_refuses_files_of_two_kinds(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", lines_of({"text": "x"}))
    write(tmp_path / "b.jsonl", lines_of({"messages": [ASK, SAY]}))
    assert "holds conversations (b.jsonl) and documents" in error_of(tmp_path)
