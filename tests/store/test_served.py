"""`vocagnolm score --server`: the same store from a teacher behind HTTP, whatever it does."""

from __future__ import annotations

import logging
import os
import random
import re
import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from score_world import (
    CONTEXT,
    MIN_CONTEXT,
    arguments,
    contents,
    refusal,
    served_arguments,
    without_tokenizer,
    write_corpus,
)
from served_teacher import FAULTS, MODEL, ServedTeacher, at_random, served
from tokenizers.pre_tokenizers import Metaspace
from transformers import PreTrainedTokenizerBase

from vocagnolm import cli
from vocagnolm.cli import Exit
from vocagnolm.readers import start_id, teacher_reader
from vocagnolm.spans import encode
from vocagnolm.store import server as polite
from vocagnolm.store.dialects import DIALECTS, PromptTokens
from vocagnolm.store.served import Form, ServedScorer, UnaskableError
from vocagnolm.store.store import Store
from vocagnolm.store.windows import Window
from vocagnolm.texts.tokenizers import load_tokenizer

Command = Callable[..., list[str]]


@pytest.fixture
def command(server: ServedTeacher, teacher: Path, corpus: Path, tmp_path: Path) -> Command:
    """The command line that scores a corpus, or texts, by the server into a directory."""

    def build(*more: str, texts: list[str] | None = None, to: str = "S") -> list[str]:
        given = corpus if texts is None else write_corpus(tmp_path / "texts.jsonl", texts)
        return served_arguments(server, teacher, given, tmp_path / to, *more)

    return build


@pytest.fixture
def refused(command: Command, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The one line in which that command refuses."""
    return lambda *more, **given: refusal(command(*more, **given), capsys)


@pytest.fixture
def few(texts: list[str]) -> list[str]:
    """Some of the documents that are scored here."""
    return [*texts[:7], *texts[-3:]]


# Its kinds, and the dialect that is found.
KINDS = {
    "vllm": ({"dialects": ("vllm", "openai")}, "vllm, ids"),
    "sglang": ({"dialects": ("sglang",)}, "sglang, ids"),
    "openai": ({"dialects": ("openai",)}, "openai, ids"),
    "text": ({"dialects": ("openai",), "takes_ids": False}, "openai, text"),
    "adds start": (
        {"dialects": ("openai",), "takes_ids": False, "adds_start": True},
        "openai, text",
    ),
    "hides start": (
        {"dialects": ("openai",), "takes_ids": False, "hides_start": True},
        "openai, text",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_served_store_is_the_local_one(
    server: ServedTeacher,
    command: Command,
    scored: Path,
    few: list[str],
    tmp_path: Path,
    kind: str,
) -> None:
    abilities, dialect = KINDS[kind]
    vars(server).update(abilities)
    assert cli.main(command(texts=few)) == 0
    mine, local = Store(tmp_path / "S"), Store(scored)
    about = mine.manifest
    assert (about["engine"], about["dialect"]) == ("served", dialect)
    assert about["served_model"] == MODEL
    unscored = 0
    for text in few:
        (found,), (expected,) = mine.segments(text) or [], local.segments(text) or []
        if kind == "hides start" and not len(found.losses):
            unscored += 1
            continue
        assert np.array_equal(found.spans, expected.spans)
        np.testing.assert_allclose(found.losses, expected.losses, rtol=2e-3, atol=1e-4)
    assert unscored <= 2
    assert server.busiest <= 16


def test_estimate_counts_windows_and_their_tokens(
    server: ServedTeacher, command: Command, few: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    argv = command(texts=few)
    argv[argv.index("--shard_documents") + 1] = "100"
    caplog.set_level(logging.INFO)
    assert cli.main(argv) == 0
    prompts = [body["prompt"] for body in server.bodies][1:]  # one is a probe
    assert len(prompts) > len(few)
    tokens = f"about {sum(map(len, prompts)):,} tokens, about {len(prompts)} requests"
    assert f"{len(few)} documents, {tokens}, 16 at once" in caplog.text


# What it refuses

REFUSED = {
    "--server localhost:8000": "is no address: give http://HOST:PORT",
    "--server http://me:secret@localhost:8000": "give it as VOCAGNOLM_API_KEY instead",
    "--server http://localhost:seven": "is no address: give http://HOST:PORT",
    "--concurrency 0": "--concurrency must be at least 1",
    "--batch_tokens 5": "--batch_tokens has no effect with --server",
    "--engine vllm": "--engine has no effect with --server",
    "--dialect tgi": "invalid choice: 'tgi'",
    "--dialect sglang": "sglang: --server http://",
    "--served_model other": "no such model: other",
    "--context 128": "exceeds the teacher's context of 127",
}


@pytest.mark.parametrize("options", REFUSED)
def test_served_score_refuses_in_one_line(
    server: ServedTeacher, refused: Callable[..., str], tmp_path: Path, options: str
) -> None:
    server.dialects = ("openai",)
    complained = refused(*options.split())
    assert REFUSED[options] in complained
    assert "secret" not in complained
    assert not (tmp_path / "S").exists()


@pytest.mark.parametrize("context", [[], ["--context", "7"]])
def test_context_is_required_without_a_tokenizer(
    command: Command, capsys: pytest.CaptureFixture[str], context: list[str]
) -> None:
    argv = without_tokenizer(command())
    at = argv.index("--context")
    argv[at : at + 2] = context
    assert "--context is required without --teacher" in refusal(argv, capsys)


def test_server_without_losses_is_refused(
    server: ServedTeacher, refused: Callable[..., str]
) -> None:
    server.dialects = ()
    complained = refused()
    assert "gives no losses of a prompt (vllm: " in complained
    assert "serve the teacher with vLLM (prompt_logprobs), SGLang" in complained


@pytest.mark.parametrize("key", ["sk-hidden", "sk-hidden\r", "sk-hidden "])
def test_refused_key_is_not_told(
    server: ServedTeacher,
    refused: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    key: str,
) -> None:
    monkeypatch.setenv("VOCAGNOLM_API_KEY", key)
    server.plan = lambda number: "refused key"
    complained = refused()
    assert "hidden" not in complained
    said = "401 Unauthorized" if key.isprintable() and " " not in key else "set it again"
    assert said in complained


def test_losses_of_the_next_tokens_are_refused(
    server: ServedTeacher, refused: Callable[..., str]
) -> None:
    server.dialects, server.takes_ids, server.is_late = ("openai",), False, True
    assert "gives no losses of a prompt" in refused()


def test_window_that_ends_within_a_character_is_refused(
    teacher_tokenizer: PreTrainedTokenizerBase,
) -> None:
    reader = teacher_reader(teacher_tokenizer, CONTEXT)
    asked = ServedScorer(polite.Server("http://localhost", 1), MODEL, reader)
    asked.form = Form(DIALECTS["openai"], "<s>")
    for text, cut, is_whole in (
        ("a \U00010348", 0, True),
        ("a \U00010348", 1, False),
        ("a \ufffd", 0, True),
    ):
        ids = encode(teacher_tokenizer, text).ids.tolist()
        window = Window(0, [reader.start, *ids[: len(ids) - cut]], 1)
        told = PromptTokens([1.0] * len(window.ids), texts=[None] * len(window.ids))
        with nullcontext() if is_whole else pytest.raises(UnaskableError, match="within a char"):
            asked._checked(window, told)


def test_redirect_never_carries_the_key(
    server: ServedTeacher,
    command: Command,
    few: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VOCAGNOLM_API_KEY", "sk-hidden")
    argv = command("--dialect", "openai", texts=few)
    server.plan = lambda number: "elsewhere" if number == 5 else None
    complained = refusal(argv, capsys)
    assert "sends to http://elsewhere.invalid/, which is not followed" in complained
    server.plan = lambda number: None
    assert cli.main(argv) == 0
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer sk-hidden"}
    written = b"".join(path.read_bytes() for path in (tmp_path / "S").iterdir())
    told = "".join([complained, caplog.text, *capsys.readouterr()])
    assert b"hidden" not in written
    assert "hidden" not in told
    assert "second" in told


def test_server_that_is_gone_is_said(
    server: ServedTeacher, command: Command, refused: Callable[..., str], few: list[str]
) -> None:
    server.plan = lambda number: "kill" if number > 5 else None
    complained = refused(texts=few)
    assert "has failed 9 times, at last with " in complained
    assert "give the same command again to continue" in complained
    server.plan = lambda number: None
    assert cli.main(command(texts=few)) == 0


def test_concurrency_bounds_the_requests(
    server: ServedTeacher, command: Command, few: list[str]
) -> None:
    assert cli.main(command("--concurrency", "2", texts=few)) == 0
    assert server.busiest == 2


def test_interrupt_keeps_finished_shards(
    server: ServedTeacher, command: Command, scored: Path, tmp_path: Path
) -> None:
    argv = command()

    def interrupt(number: int) -> None:
        if number == 20:
            os.kill(os.getpid(), signal.SIGINT)

    server.plan = interrupt
    # A job in the background is started without one.
    given = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert cli.main(argv) == Exit.INTERRUPTED
    finally:
        signal.signal(signal.SIGINT, given)
    kept = {path.name for path in tmp_path.glob("S/shard-*.arrow")}
    assert 0 < len(kept) < len(list(scored.glob("shard-*.arrow")))
    before = len(server.bodies)
    assert cli.main(argv) == 0
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    assert set(prompts[:before]) - set(prompts[before:])  # asked for once
    Store(tmp_path / "S").check()


@pytest.mark.slow
def test_thousand_documents_survive_a_fifth_of_faults(
    server: ServedTeacher, command: Command, teacher: Path, tmp_path: Path
) -> None:
    rng = random.Random(0)
    texts = [f"{number} {rng.randrange(10**6)} apples" for number in range(1000)]
    for path in ("good", "bad"):
        argv = command(texts=texts, to=path)
        argv[argv.index("--shard_documents") + 1] = "100"
        assert cli.main(argv) == 0
        server.plan = at_random(0.2, seed=1)
    assert sum(server.failed[fault] for fault in FAULTS) > 200
    assert contents(tmp_path / "bad") == contents(tmp_path / "good")
    opened = Store(tmp_path / "bad")
    assert (opened.manifest["documents"], opened.manifest["unscored"]) == (1000, 0)
    assert cli.main(arguments(teacher, tmp_path / "texts.jsonl", tmp_path / "local")) == 0
    local = Store(tmp_path / "local")
    for text in texts:
        (mine,), (expected,) = opened.segments(text) or [], local.segments(text) or []
        assert np.array_equal(mine.spans, expected.spans)
        np.testing.assert_allclose(mine.losses, expected.losses, rtol=2e-3, atol=1e-4)


def possible_losses(
    server: ServedTeacher, tokenizer: PreTrainedTokenizerBase, text: str
) -> dict[tuple[int, int], list[float]]:
    """The losses of each token of a text in all requests that give it enough context, by span."""
    found: dict[tuple[int, int], list[float]] = {}
    lead = str(tokenizer.decode([server.start]))
    for body in server.bodies:
        prompt = str(body.get("prompt", body.get("text"))).removeprefix(lead)
        encoded, ids = encode(tokenizer, prompt), server.ids(body.get("prompt", body.get("text")))
        if not text.count(prompt) or len(ids) > CONTEXT or len(ids) != len(encoded.ids) + 1:
            continue
        values = [-float(value or 0) for value in server.logprobs(ids)[1:]]
        for begin in (match.start() for match in re.finditer(f"(?={re.escape(prompt)})", text)):
            least = MIN_CONTEXT if begin else 0
            for (start, end), value in [
                *zip((encoded.spans + begin).tolist(), values, strict=True)
            ][least:]:
                found.setdefault((start, end), []).append(value)
    return found


@pytest.mark.parametrize("kind", ["vllm", "sglang", "adds start", "separator"])
def test_tokens_are_found_without_a_tokenizer(
    server: ServedTeacher,
    command: Command,
    scored: Path,
    teacher_tokenizer: PreTrainedTokenizerBase,
    few: list[str],
    tmp_path: Path,
    kind: str,
) -> None:
    abilities = {**KINDS, "separator": KINDS["hides start"]}[kind][0]
    vars(server).update({**abilities, "adds_start": kind != "separator"})
    assert cli.main(without_tokenizer(command(texts=few))) == 0
    mine, local, whole, cut = Store(tmp_path / "S"), Store(scored), 0, 0
    assert (mine.manifest["teacher"], mine.manifest["context"]) == (MODEL, CONTEXT)
    for text in few:
        (found,), (expected,) = mine.segments(text) or [], local.segments(text) or []
        if not len(found.losses):
            continue
        assert np.array_equal(found.spans, expected.spans)
        if len(found.losses) < CONTEXT:
            whole += 1
            np.testing.assert_allclose(found.losses, expected.losses, rtol=2e-3, atol=1e-4)
            continue
        cut += 1
        possible = possible_losses(server, teacher_tokenizer, text)
        for span, loss in zip(found.spans.tolist(), found.losses.tolist(), strict=True):
            assert min(abs(loss - one) for one in possible[tuple(span)]) < 2e-3 * loss + 1e-4
    assert whole >= 3
    assert cut >= 3


@pytest.mark.parametrize("puts_space", [True, False])
def test_text_has_the_space_that_is_not_put(
    tokenizer_dirs: dict[str, Path],
    tiny_llama: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    puts_space: bool,
) -> None:
    """A server that puts none, as llama.cpp can be told, reads windows from within a word, too."""
    monkeypatch.setattr(polite, "WAITS_S", (0.0,))
    tokenizer = load_tokenizer(str(tokenizer_dirs["metaspace"]), "teacher")
    model = tiny_llama(len(tokenizer), initializer_range=0.3)
    for directory in (model, tokenizer):
        directory.save_pretrained(tmp_path / "T")
    short, long = "the first cat", "incomprehensibilities of 12 cats " * 9
    corpus = write_corpus(tmp_path / "pages.jsonl", [short, long])
    theirs = load_tokenizer(str(tmp_path / "T"), "teacher")
    if not puts_space:
        theirs.backend_tokenizer.pre_tokenizer = Metaspace(prepend_scheme="never")
        theirs.backend_tokenizer.normalizer = None
    with served(model, theirs, start_id(tokenizer, "teacher")) as server:
        server.dialects, server.takes_ids, server.hides_start = ("openai",), False, True
        assert cli.main(served_arguments(server, tmp_path / "T", corpus, tmp_path / "S")) == 0
    assert cli.main(arguments(tmp_path / "T", corpus, tmp_path / "local")) == 0
    mine, local = Store(tmp_path / "S"), Store(tmp_path / "local")
    for text in [short] if puts_space else [short, long]:
        (found,), (expected,) = mine.segments(text) or [], local.segments(text) or []
        np.testing.assert_allclose(found.losses, expected.losses, rtol=2e-3, atol=1e-4)


# Faults


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_change_no_byte_of_a_store(
    server: ServedTeacher, command: Command, tmp_path: Path, fault: str
) -> None:
    tiny = ["one text", "another one", "and a third", "x"]
    for path in ("good", "bad"):
        assert cli.main(command(texts=tiny, to=path)) == 0
        server.plan = lambda number: None if number % 3 else fault
    assert server.failed[fault] >= 2
    assert contents(tmp_path / "bad") == contents(tmp_path / "good")


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "openai"])
def test_document_without_an_answer_is_listed(
    server: ServedTeacher,
    command: Command,
    tmp_path: Path,
    dialect: str,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server.dialects = (dialect,)
    server.lies_about = "the wrong one"
    assert cli.main(command(texts=["first", "the wrong one", "last"])) == 0
    (line,) = [line for line in caplog.messages if "kept without losses" in line]
    assert "'the wrong one' ..., the server does not answer with its losses" in line
    opened = Store(tmp_path / "S")
    counts = [len((opened.segments(text) or [])[0].losses) for text in ("first", "the wrong one")]
    assert counts[0] > 0 == counts[1]
    assert "tokens, documents without losses: 1\n" in capsys.readouterr().out
    assert opened.manifest["unscored"] == opened.manifest["shards"][0]["unscored"] == 1


def test_retry_after_is_waited_for(
    server: ServedTeacher, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []

    async def note(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(polite.asyncio, "sleep", note)
    monkeypatch.setattr(polite, "WAITS_S", (1.0, 2.0, 4.0))
    server.retry_after = "3"
    server.plan = lambda number: "busy" if number in (2, 3, 4) else None
    assert cli.main(command(texts=["a text"])) == 0
    assert waited[:2] == [3.0, 3.0]
    assert 3 <= waited[2] <= 4
    monkeypatch.setattr(polite.time, "time", lambda: 1_000_000_000.0)
    assert polite._retry_after_s("Sun, 09 Sep 2001 01:46:47 GMT") == 7.0
    assert polite._retry_after_s("soon") == 0.0
    server.retry_after = "1e999"
    server.plan = lambda number: "busy" if number == len(server.bodies) == asked + 1 else None
    asked = len(server.bodies)
    assert cli.main(command(texts=["a text"], to="T")) == 0
    assert waited[3:] == [600.0]
