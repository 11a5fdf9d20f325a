"""What is on disk after a kill, a full disk, or under other settings."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from locks import locked_elsewhere

from vocagnolm.evaluation.records import RunDirectory, read_lines, to_line
from vocagnolm.host.manifest import unsealed

SETTINGS: dict[str, Any] = {
    "model": {"name": "runs/student", "revision": "sha256:aa"},
    "engine": "hf",
    "dtype": "float32",
    "limit": None,
    "benchmarks": {
        "gsm8k": {"version": 1, "data_sha256": "d", "prompts_sha256": "p", "max_new_tokens": 9}
    },
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """The settings with another value at a path such as "model.revision"."""
    settings: dict[str, Any] = json.loads(json.dumps(SETTINGS))
    *parents, name = path.split(".")
    place = settings
    for parent in parents:
        place = place[parent]
    place[name] = value
    return settings


def append(directory: RunDirectory, benchmark: str, process: int, *indices: int) -> None:
    with directory.appending(benchmark, process) as file:
        for idx in indices:
            file.write(to_line({"idx": idx, "by": process}))


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    """With settings and two items of gsm8k."""
    directory = RunDirectory(tmp_path / "evaluation")
    directory.write_settings(SETTINGS)
    append(directory, "gsm8k", 0, 4, 1)
    return directory


# Items


def test_finished_is_empty_when_there_is_no_directory(tmp_path: Path) -> None:
    assert RunDirectory(tmp_path / "none").finished("gsm8k") == {}


@pytest.mark.parametrize("torn", [b'{"idx": 7, "by', b'{"idx": 7}', b"\xe2\x82", b"\x00\x00"])
def test_torn_last_line_is_ignored_and_cut_off(directory: RunDirectory, torn: bytes) -> None:
    path = directory.path / "gsm8k.part0.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    assert list(directory.finished("gsm8k")) == [4, 1]
    append(directory, "gsm8k", 0, 7)
    assert list(directory.finished("gsm8k")) == [4, 1, 7]
    assert path.read_bytes() == whole + to_line({"idx": 7, "by": 0}).encode()


def test_file_is_emptied(directory: RunDirectory) -> None:
    (directory.path / "gsm8k.part3.jsonl").write_bytes(b'{"idx"')
    append(directory, "gsm8k", 3)
    assert (directory.path / "gsm8k.part3.jsonl").read_bytes() == b""


@pytest.mark.processes
def test_directory_is_refused_at_once_while_another_works(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "new")
    with locked_elsewhere(directory.path):
        with pytest.raises(ValueError, match="is written to by another run"), directory.lock():
            pass
        assert {path.name for path in directory.path.iterdir()} == {".lock"}
    with directory.lock():
        pass
    assert list(directory.path.iterdir()) == []


@pytest.mark.parametrize("line", [b"{", b"3", b'{"by": 0}', b'{"idx": "4"}', b"\xff", b"[" * 9**5])
def test_damaged_line_is_named(directory: RunDirectory, line: bytes) -> None:
    path = directory.path / "gsm8k.part0.jsonl"
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + line + b"\n" + second)
    with pytest.raises(ValueError, match=r"gsm8k\.part0\.jsonl, line 2: expected .*: delete the"):
        directory.finished("gsm8k")


@pytest.fixture
def whole(directory: RunDirectory) -> dict[int, dict[str, Any]]:
    """Two finished items of gsm8k, as they are read where nothing is damaged."""
    with directory.appending("gsm8k", 0) as file:
        file.truncate(0)
        for idx in (0, 1):
            text = {"raw_output": 'so 7 \ud83d "x"', "prediction": "7", "math_verify": None}
            record = {"benchmark": "gsm8k", "idx": idx, "prompt_sha256": "ab", "correct": True}
            file.write(to_line(record | text))
    directory.complete("gsm8k", [0, 1])
    return directory.finished("gsm8k")


def flipped(data: bytes) -> Iterator[bytes]:
    for at, byte in enumerate(data):
        yield data[:at] + bytes([byte ^ 1 << at % 8]) + data[at + 1 :]


@pytest.mark.stress(
    "evaluations: every bit of an items file flipped", "refused in one line, or no item changed"
)
def test_flipped_bit_changes_no_record(
    directory: RunDirectory, whole: dict[int, Any], record_property: Callable[[str, object], None]
) -> None:
    path = directory.path / "gsm8k.jsonl"
    said, read = [], []
    for damaged in flipped(path.read_bytes()):
        path.write_bytes(damaged)
        try:
            read.append(directory.finished("gsm8k"))
        except ValueError as error:
            said.append(str(error))
    record_property("times", len(said) + len(read))
    assert all("gsm8k.jsonl, line " in text for text in said)
    # Blanks between fields, the key of the checksum, and the end of the last line, whose item is
    # asked again.
    assert len(read) < 0.05 * len(said)
    for records in read:
        for idx, record in records.items():
            assert {name: record.get(name) for name in whole[idx]} == whole[idx]


def test_truncated_file_loses_whole_records_only(
    directory: RunDirectory, whole: dict[int, Any]
) -> None:
    path = directory.path / "gsm8k.jsonl"
    data = path.read_bytes()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        assert directory.finished("gsm8k") == {k: whole[k] for k in range(data[:size].count(b"\n"))}


def test_repeated_lines_count_once(directory: RunDirectory, whole: dict[int, Any]) -> None:
    path = directory.path / "gsm8k.jsonl"
    path.write_bytes(path.read_bytes() * 2)
    assert directory.finished("gsm8k") == whole
    with path.open("a") as file:
        file.write(to_line(whole[1] | {"correct": False}))
    with pytest.raises(ValueError, match=r"line 5: expected one record of item 1, found another"):
        directory.finished("gsm8k")


def test_file_of_another_benchmark_is_refused(
    directory: RunDirectory, whole: dict[int, Any]
) -> None:
    (directory.path / "gsm8k.jsonl").rename(directory.path / "svamp.jsonl")
    with pytest.raises(ValueError, match="expected an item of svamp, found one of gsm8k: delete"):
        directory.finished("svamp")


def test_lines_without_a_checksum_are_read(directory: RunDirectory, whole: dict[int, Any]) -> None:
    # As earlier versions wrote them; they are written again with one.
    path = directory.path / "gsm8k.jsonl"
    sealed = path.read_bytes()
    path.write_text("".join(json.dumps(record) + "\n" for record in whole.values()))
    assert directory.finished("gsm8k") == whole
    directory.complete("gsm8k", [0, 1])
    assert path.read_bytes() == sealed


def test_flipped_settings_are_refused(directory: RunDirectory, whole: dict[int, Any]) -> None:
    path = directory.path / "settings.json"
    said = []
    for damaged in flipped(path.read_bytes()):
        path.write_bytes(damaged)
        try:
            directory.check_settings(SETTINGS)
        except ValueError as error:
            said.append(str(error))
        else:
            assert unsealed(json.loads(damaged)) == SETTINGS  # blanks
    assert all("give another --output_dir" in text for text in said)
    assert len(said) > 0.8 * len(damaged)


def test_finished_reads_all_parts_when_several_processes_wrote(directory: RunDirectory) -> None:
    append(directory, "gsm8k", 11, 3)
    append(directory, "gsm8k", 2, 0)
    append(directory, "gsm_hard", 0, 9)
    assert sorted(directory.finished("gsm8k")) == [0, 1, 3, 4]
    assert sorted(directory.finished("gsm_hard")) == [9]


def test_complete_sorts_and_removes_parts(
    directory: RunDirectory,
) -> None:
    append(directory, "gsm8k", 1, 3, 0)
    directory.complete("gsm8k", [0, 1, 3, 4])
    lines = (directory.path / "gsm8k.jsonl").read_text().splitlines()
    assert [json.loads(line)["idx"] for line in lines] == [0, 1, 3, 4]
    assert {path.name for path in directory.path.iterdir()} == {"gsm8k.jsonl", "settings.json"}


def test_complete_refuses_when_an_item_is_missing(directory: RunDirectory) -> None:
    with pytest.raises(ValueError, match=r"expected 3 items of gsm8k, found 2: give an --output_"):
        directory.complete("gsm8k", [1, 2, 4])
    assert list(directory.finished("gsm8k")) == [4, 1]


def test_complete_ends_the_same(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    append(directory, "gsm8k", 1, 0)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            directory.complete("gsm8k", [0, 1, 4])
    killed = (directory.path / "gsm8k.jsonl").read_bytes()
    assert (directory.path / "gsm8k.part1.jsonl").exists()
    assert sorted(directory.finished("gsm8k")) == [0, 1, 4]
    directory.complete("gsm8k", [0, 1, 4])
    assert (directory.path / "gsm8k.jsonl").read_bytes() == killed
    assert not list(directory.path.glob("*.part*"))


@pytest.mark.parametrize("name", ["settings.json", "gsm8k.jsonl"])
def test_file_stays_whole_when_writing_fails(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    directory.complete("gsm8k", [1, 4])
    before = (directory.path / name).read_bytes()

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    write = {
        "settings.json": lambda: directory.write_settings(changed("limit", 3)),
        "gsm8k.jsonl": lambda: directory.complete("gsm8k", [4]),
    }
    with pytest.raises(OSError, match="No space"):
        write[name]()
    assert (directory.path / name).read_bytes() == before


@pytest.mark.parametrize(
    "text", ["naïve 数学 😀", "\ud83d", "a\udc80b", "\x00\x1b\x7f", "\u2028\r\n"]
)
def test_text_survives_when_it_is_no_valid_unicode(tmp_path: Path, text: str) -> None:
    line = to_line({"idx": 0, "raw_output": text})
    assert line.isascii()
    assert line.count("\n") == 1
    directory = RunDirectory(tmp_path)
    with directory.appending("demo", 0) as file:
        file.write(line)
    directory.complete("demo", [0])
    assert directory.finished("demo")[0]["raw_output"] == text


def test_lines_are_numbered_from_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"x\.jsonl, line 1: expected a JSON object, found b'\[\]"):
        list(read_lines(tmp_path / "x.jsonl", [b"[]"], dict))


# Settings


def test_settings_are_accepted_when_nothing_differs(directory: RunDirectory) -> None:
    directory.check_settings(SETTINGS)
    directory.check_settings({**SETTINGS, "benchmarks": {}})


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("model.revision", "sha256:bb", "model was sha256:aa, now sha256:bb"),
        ("engine", "vllm", "engine was hf, now vllm"),
        ("dtype", "bfloat16", "dtype was float32, now bfloat16"),
        ("limit", 8, "limit was None, now 8"),
        ("engine", None, "engine was hf, now None"),
        ("more", True, "more was None, now True"),
        ("benchmarks.gsm8k.version", 2, "gsm8k version was 1, now 2"),
        ("benchmarks.gsm8k.data_sha256", "e", "gsm8k data_sha256 was d, now e"),
        ("benchmarks.gsm8k.prompts_sha256", None, "gsm8k prompts_sha256 was p, now None"),
        ("benchmarks.gsm8k.max_new_tokens", 8, "gsm8k max_new_tokens was 9, now 8"),
    ],
)
def test_settings_are_refused_by_name_when_one_differs(
    directory: RunDirectory, path: str, value: Any, said: str
) -> None:
    with pytest.raises(ValueError, match=r"another evaluation \(.*\): give another --out") as error:
        directory.check_settings(changed(path, value))
    assert f"({said})" in str(error.value)


@pytest.mark.parametrize("path", ["model", "benchmarks", "benchmarks.gsm8k"])
def test_settings_of_another_shape_are_refused(directory: RunDirectory, path: str) -> None:
    (directory.path / "settings.json").write_text(json.dumps(changed(path, ["x"])))
    with pytest.raises(ValueError, match=r"settings\.json: expected `\w+` to be dict, found list"):
        directory.check_settings(SETTINGS)


def test_settings_are_all_named_when_several_differ(directory: RunDirectory) -> None:
    settings = changed("dtype", "float16") | {"engine": "vllm"}
    with pytest.raises(ValueError, match=r"\(dtype was .*; engine was .*\)"):
        directory.check_settings(settings)


def test_model_may_be_moved(directory: RunDirectory) -> None:
    directory.check_settings(changed("model.name", "/elsewhere/student"))


def test_model_name_binds(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.write_settings(changed("model.revision", "unknown"))
    append(directory, "gsm8k", 0, 1)
    other = changed("model.revision", "unknown")
    other["model"]["name"] = "org/other"
    with pytest.raises(ValueError, match="org/other"):
        directory.check_settings(other)


def test_another_benchmark_joins(directory: RunDirectory) -> None:
    other = {**SETTINGS, "benchmarks": {"math": {"version": 3}}}
    directory.check_settings(other)
    directory.write_settings(other)
    append(directory, "math", 0, 0)
    directory.check_settings(SETTINGS)
    with pytest.raises(ValueError, match="math version was 3, now 4"):
        directory.check_settings({**SETTINGS, "benchmarks": {"math": {"version": 4}}})
    with pytest.raises(ValueError, match="gsm8k version was 1, now 2"):
        directory.check_settings(changed("benchmarks.gsm8k.version", 2))
    with pytest.raises(ValueError, match="dtype"):
        directory.check_settings({**other, "dtype": "float16"})


@pytest.mark.parametrize("content", [None, b"", b'{"idx": 3'])
def test_settings_bind_nobody_when_there_is_no_item(tmp_path: Path, content: bytes | None) -> None:
    directory = RunDirectory(tmp_path)
    directory.write_settings(SETTINGS)
    if content is not None:
        (tmp_path / "gsm8k.part0.jsonl").write_bytes(content)
    (tmp_path / "notes.jsonl").write_text("not ours\n")
    directory.check_settings(changed("dtype", "float16"))
    directory.write_settings(changed("benchmarks", {"math": {"version": 1}}))
    assert list(json.loads((tmp_path / "settings.json").read_text())["benchmarks"]) == ["math"]


def test_items_are_refused_when_their_settings_are_gone(directory: RunDirectory) -> None:
    (directory.path / "settings.json").unlink()
    with pytest.raises(ValueError, match=r"expected settings\.json beside the items.*: give anoth"):
        directory.check_settings(SETTINGS)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"benchmarks": 3}'])
def test_settings_file_is_named_when_it_is_damaged(directory: RunDirectory, content: str) -> None:
    (directory.path / "settings.json").write_text(content)
    with pytest.raises(ValueError, match=r"settings\.json"):
        directory.check_settings(SETTINGS)


def test_directory_is_refused_when_it_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file is a file, not a directory"):
        RunDirectory(tmp_path / "file").check_settings(SETTINGS)
