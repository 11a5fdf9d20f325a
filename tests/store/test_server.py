"""`vocagnolm score --server`: the same store from a teacher behind HTTP, whatever it does."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from store_world import CONTEXT, contents, error, server_arguments, write_corpus
from teacher_server import FAULTS, MODEL, TeacherServer
from transformers import PreTrainedTokenizerBase

from vocagnolm import __main__
from vocagnolm.cli import Exit
from vocagnolm.readers import Reader, teacher_reader
from vocagnolm.store.format import Store

Command = Callable[..., list[str]]


@pytest.fixture
def command(server: TeacherServer, teacher: Path, corpus: Path, tmp_path: Path) -> Command:
    """A command line that scores a corpus, or texts, with the server into a directory."""

    def build(*more: str, texts: list[str] | None = None, to: str = "S") -> list[str]:
        given = corpus if texts is None else write_corpus(tmp_path / "texts.jsonl", texts)
        return server_arguments(server, teacher, given, tmp_path / to, *more)

    return build


@pytest.fixture
def rejected(command: Command, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The one line with which that command fails."""
    return lambda *more, **given: error(command(*more, **given), capsys)


@pytest.fixture
def few(texts: list[str]) -> list[str]:
    """A few of the documents."""
    return [*texts[:7], *texts[-3:]]


@pytest.fixture
def reader(teacher_tokenizer: PreTrainedTokenizerBase) -> Reader:
    return teacher_reader(teacher_tokenizer, CONTEXT)


@pytest.mark.parametrize("answers", ["vllm", "sglang", "echo", "echo ids", "echo together"])
def test_store_of_a_server_is_the_local_one(
    server: TeacherServer,
    command: Command,
    scored: Path,
    few: list[str],
    tmp_path: Path,
    answers: str,
) -> None:
    api, _, server.echoes = answers.partition(" ")
    server.apis = (api,)
    assert __main__.main(command("--api", api, texts=few)) == 0
    mine, local = Store(tmp_path / "S"), Store(scored)
    about = mine.manifest
    assert (about["engine"], about["api"], about["served_model"]) == ("served", api, MODEL)
    for text in few:
        ours, theirs = mine.document(text), local.document(text)
        assert ours is not None
        assert theirs is not None
        assert np.array_equal(ours.spans, theirs.spans)
        np.testing.assert_allclose(ours.losses, theirs.losses, rtol=2e-3, atol=1e-4)
    assert server.busiest <= 16


# What ends the command

WRONG = {
    "--server localhost:8000": "http://HOST:PORT",
    "--server http://me:secret@localhost:8000": "VOCAGNOLM_API_KEY",
    "--api sglang": "answers 404",
    "--served_model other": "no such model: other",
    "--context 128": "--context 128",
}


@pytest.mark.parametrize("options", WRONG)
def test_wrong_option_of_a_server_is_one_line(
    server: TeacherServer, rejected: Callable[..., str], tmp_path: Path, options: str
) -> None:
    server.apis = ("vllm",)
    complained = rejected(*options.split())
    assert WRONG[options] in complained
    assert "secret" not in complained
    assert not (tmp_path / "S").exists()


def test_server_without_losses_is_rejected(
    server: TeacherServer, rejected: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.plan = lambda number: "lie"
    assert "no losses" in rejected()
    server.plan = lambda number: None
    monkeypatch.setattr(server, "logprobs", lambda ids: [None, *[-1.0] * (len(ids) - 1)])
    assert "are the same" in rejected()


def test_server_with_a_shorter_context_than_the_windows_is_rejected(
    server: TeacherServer, command: Command, rejected: Callable[..., str], few: list[str]
) -> None:
    server.context = 120
    assert "lower --context" in rejected("--context", "120", texts=few)
    assert __main__.main(command("--context", "119", texts=few)) == 0


def test_key_is_sent_to_the_server_alone(
    server: TeacherServer,
    command: Command,
    few: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VOCAGNOLM_API_KEY", "sk-hidden\r")
    argv = command("--api", "vllm", texts=few)
    server.plan = lambda number: "rejected key"
    complained = error(argv, capsys)
    assert "401 Unauthorized" in complained
    server.plan = lambda number: "elsewhere" if number == 5 else None
    complained += error(argv, capsys)
    assert "answers 307" in complained
    server.plan = lambda number: None
    assert __main__.main(argv) == 0
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer sk-hidden"}
    written = b"".join(path.read_bytes() for path in (tmp_path / "S").iterdir())
    assert b"hidden" not in written
    assert "hidden" not in "".join([complained, caplog.text, *capsys.readouterr()])


def test_server_that_is_gone_ends_the_command(
    server: TeacherServer, command: Command, rejected: Callable[..., str], few: list[str]
) -> None:
    server.plan = lambda number: "kill" if number > 5 else None
    assert "does not answer" in rejected(texts=few)
    server.plan = lambda number: None
    assert __main__.main(command(texts=few)) == 0


def test_interrupt_keeps_finished_shards(
    server: TeacherServer, command: Command, scored: Path, tmp_path: Path
) -> None:
    argv = command()

    def interrupt(number: int) -> None:
        if number == 20:
            os.kill(os.getpid(), signal.SIGINT)

    server.plan = interrupt
    # A background job is started without a handler.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert __main__.main(argv) == Exit.INTERRUPTED
    finally:
        signal.signal(signal.SIGINT, before)
    kept = {path.name for path in tmp_path.glob("S/shard-*.arrow")}
    assert 0 < len(kept) < len(list(scored.glob("shard-*.arrow")))


# Faults


def test_concurrency_bounds_the_requests(
    server: TeacherServer, command: Command, few: list[str]
) -> None:
    assert __main__.main(command("--concurrency", "2", texts=few)) == 0
    assert server.busiest <= 2


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_change_no_byte_of_a_store(
    server: TeacherServer, command: Command, tmp_path: Path, fault: str
) -> None:
    tiny = ["one text", "another one", "and a third", "x"]
    for path in ("good", "bad"):
        assert __main__.main(command(texts=tiny, to=path)) == 0
        server.plan = lambda number: None if number % 3 else fault
    assert server.failed[fault] >= 2
    assert contents(tmp_path / "bad") == contents(tmp_path / "good")


@pytest.mark.parametrize(
    ("api", "fault"),
    [("vllm", "lie"), ("echo", "lie"), ("vllm", "too large")],
)
def test_document_without_an_answer_is_listed(
    server: TeacherServer,
    command: Command,
    tmp_path: Path,
    api: str,
    fault: str,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server.apis = (api,)
    server.spoils = "the wrong one", fault
    assert __main__.main(command("--api", api, texts=["first", "the wrong one", "last"])) == 0
    (line,) = [line for line in caplog.messages if "kept without losses" in line]
    assert "'the wrong one'" in line
    opened = Store(tmp_path / "S")
    first, wrong = opened.document("first"), opened.document("the wrong one")
    assert first is not None
    assert wrong is not None
    assert len(first.losses) > 0 == len(wrong.losses)
    assert opened.manifest["unscored"] == opened.manifest["shards"][0]["unscored"] == 1
    assert "documents without losses: 1\n" in capsys.readouterr().out
