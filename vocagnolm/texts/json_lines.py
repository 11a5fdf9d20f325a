"""JSON Lines read leanly: a line takes three times its size in memory, with `datasets` alone seven.

Its builder parses a line twice, and takes every string for a point in time first. Here texts
and messages have their types, and what looks like a date stays text.
"""

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass

import datasets
import pyarrow as pa
from datasets.exceptions import DatasetGenerationError
from pyarrow.json import ParseOptions, ReadOptions, read_json

_BATCH_BYTES, _BUFFER_BYTES = 4 << 20, 1 << 20
# Offsets in Arrow's strings have 32 bits, and so has the size of what its parser takes.
_MOST_BYTES = (1 << 31) - 1
_MESSAGES = pa.list_(pa.struct({"role": pa.string(), "content": pa.string()}))
# More columns of conversations, of the types that they are found to have.
_OTHERS = ("prompt", "completion", "tools", "chat_template_kwargs")


class _RowError(ValueError):
    """Of a row that `datasets` cannot read either."""


@dataclass
class _Config(datasets.BuilderConfig):  # type: ignore[misc]
    text_column: str = ""


class JsonLines(datasets.ArrowBasedBuilder):  # type: ignore[misc]
    """The columns of documents and of conversations in one file, made and cached by `datasets`.

    Texts and messages are always there, null where a file has none. Where they have other types, or
    the file is no JSON Lines, pyarrow or `datasets` raise what they find.
    """

    # Raise it when other rows come of a file: old caches must not be read.
    VERSION = datasets.Version("1.3.0")
    BUILDER_CONFIG_CLASS = _Config

    def _info(self) -> datasets.DatasetInfo:
        return datasets.DatasetInfo()

    def _split_generators(self, manager: datasets.DownloadManager) -> list[datasets.SplitGenerator]:
        # With this, the `open` of this module is replaced by one that decompresses.
        manager.download_config.extract_on_the_fly = True
        (file,) = manager.download_and_extract(self.config.data_files)["train"]
        return [datasets.SplitGenerator("train", {"file": file})]

    def _generate_tables(self, file: str) -> Iterator[tuple[int, pa.Table]]:
        schema = pa.schema({"messages": _MESSAGES, self.config.text_column: pa.string()})
        rows = 0
        # Some of what decompresses has no `readline`; of `datasets` it is one byte at a time.
        with io.BufferedReader(open(file, "rb"), _BUFFER_BYTES) as opened:
            while lines := bytearray(opened.read(_BATCH_BYTES)):
                # Grown in place: many pieces of a long line would lie in the heap, and stay there.
                while not lines.endswith(b"\n") and (more := opened.readline(_BUFFER_BYTES)):
                    lines += more
                    if len(lines) > _MOST_BYTES:
                        raise _RowError(f"after {rows} rows one is beyond 2 GiB: cut its text")
                # The parser ends the process on it; so does that of `datasets`.
                if re.match(rb"[\s[]*null\b", lines):
                    if not rows:
                        raise _RowError("its first row is null: leave it out")
                    lines = lines.replace(b"null", b"{}", 1)
                table = _parse(lines, schema)
                # Later lines have the types of those before.
                if (schema := pa.schema(map(_as_text, table.schema))) != table.schema:
                    del table
                    table = _parse(lines, schema)
                # What has a name here stays in memory while the next lines are read.
                del lines
                is_single, empty = len(table) == 1, table.schema.empty_table()
                rows += len(table)
                yield 0, table
                del table
                if is_single:
                    # The writer keeps up to a thousand single rows until it is given a table.
                    yield 0, empty


def _parse(lines: bytearray, schema: pa.Schema) -> pa.Table:
    read = ReadOptions(block_size=len(lines))
    # Its own pool would keep what was freed.
    pool = pa.system_memory_pool()
    table = read_json(pa.BufferReader(lines), read, ParseOptions(explicit_schema=schema), pool)
    table = table.select([n for n in table.column_names if n in (*schema.names, *_OTHERS)])
    # A list that begins with null may have its values at wrong places.
    table.validate()
    return table


def _as_text(field: pa.Field) -> pa.Field:
    """Make points in time, which the parser sees in texts of dates, text at any depth."""
    kind = field.type
    if pa.types.is_timestamp(kind):
        kind = pa.string()
    elif pa.types.is_list(kind):
        kind = pa.list_(_as_text(kind.value_field))
    elif pa.types.is_struct(kind):
        kind = pa.struct([*map(_as_text, kind)])
    return field.with_type(kind)


def read_json_lines(data_files: str, split: str, text_column: str) -> datasets.Dataset:
    """Read a file of documents or conversations; what `JsonLines` cannot, as `datasets` does."""
    lean = JsonLines(data_files=data_files, text_column=text_column)
    try:
        lean.download_and_prepare()
    except DatasetGenerationError as error:
        if isinstance(error.__cause__, _RowError):
            raise
    else:
        rows = lean.as_dataset(split)
        nothing = {n for n in ("messages", text_column) if rows.data[n].null_count == len(rows)}
        names = [name for name in rows.column_names if name not in nothing]
        if {text_column, "messages"} & {*names} or {"prompt", "completion"} <= {*names}:
            return rows.select_columns(names)
    return datasets.load_dataset("json", data_files=data_files, split=split)
