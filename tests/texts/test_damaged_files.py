"""Files and lists that break the rules of their format, or hold no rows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vocagnolm.corpus import load_corpus, read_list

MORE, FEWER = "more fields than the header", "fewer fields than the header"


@pytest.mark.parametrize(("name", "separator"), [("a.csv", ","), ("a.tsv", "\t")])
@pytest.mark.parametrize(
    ("first", "reason"),
    [
        ("hello| world|0", f"{MORE} \\(quote texts with (commas|tabs)\\)"),
        ("hello", f"{FEWER} \\(quote texts with line breaks\\)"),
        ('"hello" world|0', "not valid CSV"),
    ],
)
def test_row_of_a_table_is_skipped_when_its_text_is_unknown(
    tmp_path: Path, name: str, separator: str, first: str, reason: str
) -> None:
    quoted = '"a|b\n ""c"""|1\n\n'
    rows = "text|label\n" + first + "\n" + quoted + first + "\nd|1\n"
    (tmp_path / name).write_text(rows.replace("|", separator))
    corpus = load_corpus(str(tmp_path / name))
    assert corpus["text"][:] == [None, f'a{separator}b\n "c"', None, "d"]
    faults = corpus["fault"][:]
    assert re.fullmatch(f"{name}:2: {reason}.*", faults[0])
    assert re.fullmatch(f"{name}:6: {reason}.*", faults[2])
    assert faults[1] is faults[3] is None


@pytest.mark.parametrize("rows", ['text,label\na,0\n"hello,0\nb,1\n', '"text,label\nhello,0\n'])
def test_table_is_refused_when_a_quoted_field_has_no_end(tmp_path: Path, rows: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(rows)
    number = rows[: rows.index('"')].count("\n") + 1
    reason = f"cannot be read: line {number}: a quoted field has no end"
    with pytest.raises(ValueError, match=re.escape(f"--dataset {path} {reason}")):
        load_corpus(str(path))


def test_table_is_read_when_its_texts_are_long(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("\ufefftext\r\n" + "a" * 200_000 + "\r\nNA\r\n")
    assert load_corpus(str(path))["text"][:] == ["a" * 200_000, "NA"]


def test_file_without_rows_adds_no_document(tmp_path: Path) -> None:
    table = pa.table({"text": ["a", "b"]})
    pq.write_table(table, tmp_path / "a.parquet")
    pq.write_table(table.slice(0, 0), tmp_path / "b.parquet")
    pq.write_table(pa.table({}), tmp_path / "c.parquet")
    # The first group of rows is empty, and the second is not.
    with pq.ParquetWriter(tmp_path / "d.parquet", table.schema) as writer:
        writer.write_table(table.slice(0, 0))
        writer.write_table(table)
    for name in ("e.arrow", "f.arrow"):
        with pa.ipc.new_stream(tmp_path / name, table.schema) as stream:
            stream.write_table(table.slice(0, 0 if name == "e.arrow" else 2))
    (tmp_path / "g.json").write_text("[]")
    assert load_corpus(str(tmp_path))["text"][:] == ["a", "b"] * 3
    tables = tmp_path / "tables"
    tables.mkdir()
    (tables / "a.csv").write_text("text,label\n")
    with pytest.raises(ValueError, match="tables cannot be read: it holds no documents"):
        load_corpus(str(tables))
    (tables / "b.csv").write_text("text\na\n")
    assert load_corpus(str(tables))["text"][:] == ["a"]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("dataset_dict.json", "[]", "has no list splits"),
        ("dataset_dict.json", "{", "not valid JSON"),
        ("train/state.json", "{", "not valid JSON"),
        ("train/state.json", '{"_data_files": [5]}', "names no file in 5"),
        ("train/data-00000-of-00001.arrow", None, "is listed, but not there"),
    ],
)
def test_damaged_directory_of_save_to_disk_names_the_file(
    tmp_path: Path, name: str, content: str | None, reason: str
) -> None:
    rows = datasets.Dataset.from_dict({"text": ["a"]})
    datasets.DatasetDict(train=rows).save_to_disk(str(tmp_path))
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=reason) as caught:
        load_corpus(str(tmp_path), option="--eval_dataset")
    message = str(caught.value)
    assert message.startswith(f"--eval_dataset {tmp_path / name}: {reason}")
    assert message.endswith("copy the directory again, or save the dataset again")
    assert "\n" not in message


ASK, SAY = {"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}


@pytest.mark.parametrize(
    ("rows", "texts"),
    [
        (
            [
                {"instruction": "Add.", "output": "2"},
                {"instruction": "Add.", "input": "1, 1", "output": "2"},
                {"instruction": 5, "output": "2"},
            ],
            ["Add.\n2", "Add.\n\n1, 1\n2", None],
        ),
        (
            [
                {"messages": [ASK, {**SAY, "content": [{"type": "text", "text": "2"}]}]},
                {"id": 1, "messages": [ASK, SAY]},
                {"id": "a", "messages": 5},
            ],
            ["1 + 1?\n2", "1 + 1?\n2", None],
        ),
        ([{"id": 1}, {"text": 5}, {"text": "\ud83d"}, {"text": "a"}], [None, None, None, "a"]),
    ],
)
def test_list_is_read_as_a_file_is(
    tmp_path: Path, rows: list[dict[str, Any]], texts: list[str | None]
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_list(rows, None, "train_dataset")
    expected = load_corpus(str(path))
    assert found["text"][:] == texts
    assert found.features == expected.features
    assert found[:] == expected[:]
