"""`vocagnolm score` from the command line to the store it leaves, kills, and what it refuses."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from accelerate import PartialState
from score_worker import Processes, kill
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from vocagnolm import cli
from vocagnolm.cli import score
from vocagnolm.conventions import NonFiniteLoss
from vocagnolm.data import align_corpus
from vocagnolm.run import main as train
from vocagnolm.spans import encode
from vocagnolm.store import job as scoring_job
from vocagnolm.store import scoring, store
from vocagnolm.store.job import ScoringJob
from vocagnolm.store.reader import StoredReader
from vocagnolm.store.store import Store
from vocagnolm.store.windows import Window
from vocagnolm.tokenizers import student_reader, teacher_reader

CONTEXT, MIN_CONTEXT = 48, 8
KILLS = int(os.environ.get("VOCAGNOLM_KILLS", "4"))  # 50 take half a minute
DOCUMENTS = 36


@pytest.fixture(scope="module")
def teacher(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_llama: Callable[..., Any],
    teacher_tokenizer: PreTrainedTokenizerBase,
) -> Path:
    """A tiny teacher; read-only by agreement."""
    path = tmp_path_factory.mktemp("models") / "teacher"
    tiny_llama(len(teacher_tokenizer), initializer_range=0.3).save_pretrained(path)
    teacher_tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def texts(training_texts: list[str]) -> list[str]:
    """Documents of one character up to several contexts, and one of them twice."""
    rng = random.Random(0)
    found = [" ".join(rng.sample(training_texts, rng.choice([1, 1, 2, 6]))) for _ in range(33)]
    return [*found, "x", "😀", found[0]]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "pages.jsonl", texts)


def write_corpus(path: Path, texts: list[Any]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def arguments(teacher: Path, corpus: Path, path: Path, *more: str) -> list[str]:
    sizes = ["--context", str(CONTEXT), "--min_context", str(MIN_CONTEXT)]
    options = [*sizes, "--shard_documents", "4", "--batch_tokens", "256"]
    where = ["--teacher", str(teacher), "--dataset", str(corpus), "--output_dir", str(path)]
    return ["score", *where, *options, *more]


@pytest.fixture(scope="module")
def scored(teacher: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished store of the corpus; read-only by agreement."""
    path = tmp_path_factory.mktemp("scored") / "S"
    assert cli.main(arguments(teacher, corpus, path)) == 0
    return path


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


def refusal(argv: list[str], capsys: pytest.CaptureFixture[str], status: int = 2) -> str:
    """The one line that the command prints when it refuses."""
    capsys.readouterr()
    assert cli.main(argv) == status
    printed, complained = capsys.readouterr()
    assert printed == ""
    assert complained.startswith("vocagnolm score: error: ")
    assert complained.count("\n") == 1
    return complained


# What it does


def test_score_stores_every_document_when_it_is_run(
    scored: Path, texts: list[str], teacher: Path, teacher_tokenizer: PreTrainedTokenizerBase
) -> None:
    names = [store.shard_name(number) for number in range(DOCUMENTS // 4)]
    assert list(contents(scored)) == ["manifest.json", *names]
    opened = Store(scored)
    opened.check()
    long = 0
    for text in texts:
        (segment,) = opened.segments(text) or []
        encoding = encode(teacher_tokenizer, text)
        assert (segment.start, segment.end) == (0, len(text))
        assert np.array_equal(segment.spans, encoding.spans)
        assert len(segment.losses) == len(encoding.ids)
        long += len(encoding.ids) >= CONTEXT
    assert long > 5
    manifest = opened.manifest
    assert manifest["documents"] == sum(
        len(set(texts[first : first + 4])) for first in range(0, len(texts), 4)
    )
    assert manifest["tokens"] == sum(len(encode(teacher_tokenizer, text).ids) for text in texts)
    assert manifest["teacher"] == str(teacher)
    assert manifest["dtype"] == "float32"
    assert manifest["special_tokens"]["before"] == teacher_tokenizer.get_vocab()["<|endoftext|>"]
    assert set(manifest["versions"]) >= {"vocagnolm", "torch", "transformers", "tokenizers"}


def test_losses_are_those_of_one_forward_pass(
    scored: Path, texts: list[str], teacher: Path, teacher_tokenizer: PreTrainedTokenizerBase
) -> None:
    model, opened, checked = AutoModelForCausalLM.from_pretrained(teacher), Store(scored), 0
    start = teacher_reader(teacher_tokenizer, CONTEXT).start
    for text in texts:
        ids = torch.tensor([start, *encode(teacher_tokenizer, text).ids.tolist()])
        if len(ids) > CONTEXT:
            continue
        with torch.no_grad():
            logits = model(ids[None]).logits[0]
        expected = F.cross_entropy(logits[:-1], ids[1:], reduction="none")
        (segment,) = opened.segments(text) or []
        np.testing.assert_allclose(segment.losses, expected, rtol=1e-3, atol=1e-4)  # float16
        checked += 1
    assert checked > 5


def test_store_is_the_same_when_scored_again(
    scored: Path, teacher: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments(teacher, corpus, tmp_path)) == 0
    assert contents(tmp_path) == contents(scored)
    shutil.copy(scored / "manifest.json", tmp_path / "plan.json")  # killed while it tidied
    (tmp_path / ".manifest.json.0123.tmp").touch()
    capsys.readouterr()
    assert cli.main(arguments(teacher, corpus, tmp_path, "--batch_tokens", "1")) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert contents(tmp_path) == contents(scored)


@pytest.mark.parametrize("loss_dtype", ["float16", "float32"])
def test_losses_do_not_depend_on_batches(
    teacher: Path, corpus: Path, texts: list[str], tmp_path: Path, loss_dtype: str
) -> None:
    found = []
    for tokens in ("1", "4096"):
        path = tmp_path / tokens
        more = ["--batch_tokens", tokens, "--loss_dtype", loss_dtype]
        assert cli.main(arguments(teacher, corpus, path, *more)) == 0
        opened = Store(path)
        found.append(np.concatenate([opened.segments(text)[0].losses for text in texts]))  # type: ignore[index]
    np.testing.assert_allclose(*found, rtol=2e-3 if loss_dtype == "float16" else 1e-4, atol=1e-5)


def test_score_leaves_out_documents_that_are_no_text(teacher: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "pages.parquet"
    values = [b"good", b"\xff\xfe", None, b"", b" \n ", b"x", b"good", b"\xc3\xa9" * 300]
    column = pa.array(values, pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": column}), corpus)
    assert cli.main(arguments(teacher, corpus, tmp_path / "S")) == 0
    opened = Store(tmp_path / "S")
    for text in ("good", "x", "é" * 300):
        (segment,) = opened.segments(text) or []
        assert len(segment.losses)
    assert opened.manifest["segments"] == 4  # "good" twice
    assert cli.main(["score", "--verify", str(tmp_path / "S"), "--dataset", str(corpus)]) == 0


def test_unreadable_document_has_no_tokens(
    teacher_tokenizer: PreTrainedTokenizerBase,
    student_tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is there all the same: training skips it with a reason, and --verify does not miss it."""
    original = scoring_job.encode_batch

    def some(tokenizer: Any, texts: list[str]) -> Any:
        if "bad" in texts:
            raise ValueError("offsets are out of order")
        return original(tokenizer, texts)

    monkeypatch.setattr(scoring_job, "encode_batch", some)
    job = make_job(tmp_path, ["first", "bad", "last"], teacher_tokenizer)
    scoring_job.score_corpus(job, FakeScorer(), {"context": CONTEXT}, PartialState())
    opened = Store(tmp_path)
    for text in ("first", "last"):
        (segment,) = opened.segments(text) or []
        assert len(segment.losses)
    student = student_reader(student_tokenizer, 64)
    segments = align_corpus(job.corpus, student, StoredReader([opened]))
    assert len(segments.rows) == 2
    assert segments.skipped == [(1, "a tokenizer finds no token in it")]


class FakeScorer:
    """Losses made up of the ids; a token in `bad` has a loss that no store holds."""

    def __init__(self, bad: dict[int, float] | None = None):
        self.bad = bad or {}
        self.windows: list[Window] = []

    def losses(self, windows: list[Window]) -> list[Any]:
        self.windows += windows
        return [
            np.array(
                [self.bad.get(token, token % 97 / 16) for token in window.ids[-window.scored :]],
                np.float32,
            )
            for window in windows
        ]


def make_job(
    directory: Path,
    texts: list[str],
    tokenizer: PreTrainedTokenizerBase,
    loss_dtype: store.LossDtype = "float16",
) -> ScoringJob:
    corpus = datasets.Dataset.from_dict({"text": texts})
    return ScoringJob(
        directory, corpus, teacher_reader(tokenizer, CONTEXT), MIN_CONTEXT, 2, loss_dtype
    )


@pytest.mark.parametrize(
    ("loss", "loss_dtype", "advice"),
    [
        (float("nan"), "float16", "--dtype float32"),
        (float("inf"), "float32", "--dtype float32"),
        (70_000.0, "float16", "--loss_dtype float32"),
    ],
)
def test_no_shard_is_written_when_losses_are_nonfinite(
    teacher_tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    loss: float,
    loss_dtype: store.LossDtype,
    advice: str,
) -> None:
    texts = ["first", "second", "the bad ∑", "last"]
    bad = int(encode(teacher_tokenizer, texts[2]).ids[-1])
    job = make_job(tmp_path, texts, teacher_tokenizer, loss_dtype)
    with pytest.raises(NonFiniteLoss, match=f"'the bad ∑': use {advice}"):
        scoring_job.score_corpus(job, FakeScorer({bad: loss}), {}, PartialState())
    assert list(contents(tmp_path)) == ["shard-00000.arrow", "shard-00000.arrow.entry.json"]
    scoring_job.score_corpus(job, FakeScorer(), {}, PartialState())
    Store(tmp_path).check()


def test_broken_teacher_stops_score_with_status_3(
    teacher: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(teacher)
    with torch.no_grad():
        model.lm_head.weight[5] = float("nan")
    model.save_pretrained(tmp_path / "broken")
    for file in teacher.glob("*token*"):
        shutil.copy(file, tmp_path / "broken")
    argv = arguments(tmp_path / "broken", corpus, tmp_path / "S")
    assert "NaN or infinite" in refusal(argv, capsys, status=3)
    assert not contents(tmp_path / "S")


# Progress


def test_progress_tells_speed_and_time_left(
    teacher_tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    texts = [f"{number:02}" for number in range(20)]
    job = make_job(tmp_path, texts, teacher_tokenizer)
    per_shard = len(encode(teacher_tokenizer, "00").ids) * 2
    for shard in range(4):
        scoring_job.score_shard(job, shard, FakeScorer())
    clock = [1000.0]
    monkeypatch.setattr(scoring_job.time, "monotonic", lambda: clock[0])

    class SlowScorer(FakeScorer):
        def losses(self, windows: list[Window]) -> list[Any]:
            clock[0] += 20.0
            return super().losses(windows)

    with caplog.at_level(logging.INFO, logger="vocagnolm"):
        scoring_job.score_corpus(job, SlowScorer(), {}, PartialState())
    rate = f"{per_shard / 20:,.0f} tokens per second"
    assert caplog.messages == [
        "4 of 10 shards are written already",
        f"2 of 6 shards, {rate}, 0:01:20 left",
        f"4 of 6 shards, {rate}, 0:00:40 left",
        f"6 of 6 shards, {rate}, 0:00:00 left",
    ]


# Verify and repair


def test_verify_names_bad_shards_and_repair_mends_them(
    scored: Path,
    teacher: Path,
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "S"
    shutil.copytree(scored, path)
    flipped, cut, gone = (path / store.shard_name(number) for number in (1, 3, 5))
    data = bytearray(flipped.read_bytes())
    data[len(data) // 2] ^= 4
    flipped.write_bytes(data)
    cut.write_bytes(cut.read_bytes()[:-100])
    gone.unlink()
    capsys.readouterr()
    assert cli.main(["score", "--verify", str(path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{flipped} does not match its checksum"
    assert lines[1].startswith(f"{cut} has ")
    assert lines[2] == f"{gone} is missing"
    assert "3 of 9 shards are bad" in lines[3]
    assert "--repair" in lines[3]
    again: list[int] = []
    original = scoring_job.score_shard

    def watched(job: Any, shard: int, scorer: Any) -> int:
        again.append(shard)
        return original(job, shard, scorer)

    monkeypatch.setattr(scoring_job, "score_shard", watched)
    assert cli.main(arguments(teacher, corpus, path)) == 0  # only with --repair
    assert again == []
    assert cli.main(arguments(teacher, corpus, path, "--repair")) == 0
    assert again == [1, 3, 5]
    assert contents(path) == contents(scored)
    assert cli.main(["score", "--verify", str(path)]) == 0
    assert cli.main(arguments(teacher, corpus, path, "--repair")) == 0
    assert again == [1, 3, 5]


def test_verify_counts_missing_documents(
    scored: Path, corpus: Path, texts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["score", "--verify", str(scored), "--dataset", str(corpus)]) == 0
    assert "all good" in capsys.readouterr().out
    changed = [texts[0], texts[1] + " ", "", "new", *texts[2:]]
    other = write_corpus(tmp_path / "other.jsonl", changed)
    assert cli.main(["score", "--verify", str(scored), "--dataset", str(other)]) == 1
    printed = capsys.readouterr().out
    assert "2 documents of" in printed
    assert "(numbers from 0: 1, 3)" in printed
    assert "score this corpus into another directory" in printed


def test_verify_says_so_when_there_is_no_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "no finished teacher-loss store" in refusal(["score", "--verify", str(tmp_path)], capsys)
    (tmp_path / "manifest.json").write_text("{")
    assert "is damaged" in refusal(["score", "--verify", str(tmp_path)], capsys)


# What it refuses


def test_score_says_what_differs_in_another_store(
    scored: Path,
    teacher: Path,
    corpus: Path,
    texts: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    finished, unfinished = tmp_path / "finished", tmp_path / "unfinished"
    own = write_corpus(tmp_path / "pages.jsonl", texts)
    assert cli.main(arguments(teacher, own, finished)) == 0
    shutil.copytree(finished, unfinished)
    manifest = json.loads((finished / "manifest.json").read_bytes())
    (unfinished / "manifest.json").rename(unfinished / "plan.json")
    (unfinished / store.shard_name(4)).unlink()
    another = shutil.copytree(teacher, tmp_path / "another")
    config = json.loads((another / "config.json").read_text())
    (another / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    for path in (finished, unfinished):
        before = contents(path)
        for argv, named in (
            (arguments(teacher, own, path, "--context", "40"), "context was 48, now 40"),
            (arguments(teacher, own, path, "--min_context", "9"), "min_context was 8, now 9"),
            (arguments(teacher, own, path, "--dtype", "float16"), "dtype was float32, now float16"),
            (arguments(teacher, own, path, "--loss_dtype", "float32"), "loss_dtype was float16"),
            (arguments(teacher, own, path, "--shard_documents", "5"), "shard_documents was 4"),
            (arguments(another, own, path), "teacher_revision was sha256:"),
        ):
            complained = refusal(argv, capsys)
            assert named in complained
            assert "give another directory" in complained
        assert contents(path) == before
    assert cli.main(arguments(teacher, corpus, finished)) == 0  # the same texts elsewhere
    write_corpus(own, [*texts[:-1], "another last document"])  # as many, under the same name
    assert manifest["dataset_documents"] == len(texts)
    complained = refusal(arguments(teacher, own, finished), capsys)
    assert "1 of 9 shards are made of other documents" in complained
    complained = refusal(arguments(teacher, own, unfinished), capsys)
    assert "shard-00008.arrow is made of other documents" in complained


def test_score_refuses_shards_of_unknown_origin(
    scored: Path, teacher: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(scored, tmp_path / "S")
    (tmp_path / "S" / "manifest.json").unlink()
    complained = refusal(arguments(teacher, corpus, tmp_path / "S"), capsys)
    assert "neither plan.json nor manifest.json" in complained


def test_context_leaves_room_for_vllms_token(teacher: Path) -> None:
    words = ["--teacher", str(teacher), "--dataset", "D", "--output_dir", "S", "--engine", "vllm"]
    options = score.options_of(score.parse_score(words))
    config = options.source.config()
    reader = scoring.load_reader(options, config)
    assert reader.limit == config.max_position_embeddings - 1


BAD_ARGUMENTS = {
    "--context 9999": "--context 9999 exceeds the teacher's context of 128: lower it",
    "--min_context 47": "leaves no room in a context of 48: lower it to at most 46",
    "--context 2 --min_context 1": "leaves no room in a context of 2",
    "--context 0": "--context must be at least 1",
    "--shard_documents 0": "--shard_documents must be at least 1",
    "--batch_tokens x": "--batch_tokens: invalid int value: 'x'",
    "--quantization {": "--quantization: { is not JSON",
    "--quantization [1]": "--quantization: [1] is not a JSON object",
    "--quantization {}": "--quantization: {} is not a JSON object of settings",
    '--quantization {"quant_method":"nothing"}': "--teacher",
    '--quantization {"load_in_4bit":true,"quant_method":"bitsandbytes"}': "--teacher",
    "--dtype int8": "--dtype: invalid choice: 'int8'",
    "--engine vllm --batch_tokens 5": "--batch_tokens has no effect with --engine vllm",
    "--engine vllm": "pip install vllm",
    "--unknown 1": "unrecognized arguments: --unknown",
    "--teacher_tok x": "unrecognized arguments",
    "--teacher nowhere": "--teacher nowhere",
    "--dataset ./nowhere.jsonl": "--dataset ./nowhere.jsonl: no such file",
    "--text_column body": "--text_column 'body' is not a column",
    "--attn_implementation nothing": "--teacher",
}


@pytest.mark.parametrize("options", BAD_ARGUMENTS)
def test_score_refuses_wrong_arguments_in_one_line(
    teacher: Path,
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: str,
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    argv = arguments(teacher, corpus, tmp_path / "S")
    if options.startswith("--engine vllm"):
        del argv[argv.index("--batch_tokens") :]
    assert BAD_ARGUMENTS[options] in refusal([*argv, *options.split()], capsys)
    assert not list(tmp_path.glob("S/*")), "it may be given again with other options"


@pytest.mark.parametrize("missing", ["--teacher", "--dataset", "--output_dir"])
def test_score_names_a_required_option_that_is_missing(
    teacher: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], missing: str
) -> None:
    argv = arguments(teacher, corpus, tmp_path)
    at = argv.index(missing)
    assert f"{missing} is required" in refusal(argv[:at] + argv[at + 2 :], capsys)


@pytest.mark.parametrize("useless", ["--repair", "--text_column x", "--context 5"])
def test_score_refuses_options_without_effect_when_it_verifies(
    scored: Path, capsys: pytest.CaptureFixture[str], useless: str
) -> None:
    name = useless.split()[0]
    argv = ["score", "--verify", str(scored), *useless.split()]
    assert f"{name} has no effect with --verify" in refusal(argv, capsys)


@pytest.mark.parametrize("inside", [False, True])
def test_score_refuses_an_output_directory_in_a_file(
    teacher: Path,
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    inside: bool,
) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "S" if inside else tmp_path / "file"
    assert f"--output_dir {path}: {tmp_path / 'file'} is a file" in refusal(
        arguments(teacher, corpus, path), capsys
    )


def test_score_refuses_a_directory_that_is_not_writable(
    teacher: Path,
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    assert "cannot be written" in refusal(arguments(teacher, corpus, tmp_path), capsys)


@pytest.mark.parametrize(
    ("texts", "why"),
    [([], "holds no documents"), (["", " ", None], "3 read, all of them empty or not text")],
)
def test_score_refuses_when_no_document_is_usable(
    teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], texts: list[Any], why: str
) -> None:
    corpus = write_corpus(tmp_path / "pages.jsonl", texts)
    assert why in refusal(arguments(teacher, corpus, tmp_path / "S"), capsys)


def test_score_refuses_a_parquet_corpus_without_rows(
    teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "pages.parquet")
    argv = arguments(teacher, tmp_path / "pages.parquet", tmp_path / "S")
    assert refusal(argv, capsys)


# Training is refused


@pytest.mark.parametrize("case", ["flipped", "truncated", "deleted", "manifest", "text", "corpus"])
def test_training_stops_when_the_store_does_not_fit(
    scored: Path,
    corpus: Path,
    texts: list[str],
    tmp_path: Path,
    tiny_llama: Callable[..., Any],
    student_tokenizer: PreTrainedTokenizerBase,
    capsys: pytest.CaptureFixture[str],
    case: str,
) -> None:
    tiny_llama(len(student_tokenizer)).save_pretrained(tmp_path / "student")
    student_tokenizer.save_pretrained(tmp_path / "student")
    path = tmp_path / "S"
    shutil.copytree(scored, path)
    shard = path / store.shard_name(2)
    data = shard.read_bytes()
    named = shard.name
    if case == "flipped":
        shard.write_bytes(data[:700] + bytes([data[700] ^ 1]) + data[701:])
    elif case == "truncated":
        shard.write_bytes(data[:-8])
    elif case == "deleted":
        shard.unlink()
    elif case == "manifest":
        manifest = (path / "manifest.json").read_text()
        (path / "manifest.json").write_text(manifest.replace('"context": 48', '"context": 49'))
        named = "manifest.json is damaged"
    elif case == "text":
        corpus = write_corpus(tmp_path / "pages.jsonl", [*texts[:-1], texts[-1] + "."])
        named = "lacks 1 of 36 documents"
    else:
        corpus = write_corpus(tmp_path / "pages.jsonl", [text + "!" for text in texts])
        named = "lacks 36 of 36 documents"
    argv = ["--student", str(tmp_path / "student"), "--teacher_losses", str(path)]
    argv += ["--dataset", str(corpus), "--output_dir", str(tmp_path / "out"), "--max_steps", "1"]
    argv += ["--max_length", "64", "--global_batch_tokens", "64", "--use_cpu", "true"]
    capsys.readouterr()
    assert train.main(argv) == 2
    complained = capsys.readouterr().err
    assert complained.count("\n") == 1
    assert named in complained


# Real processes


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    started = Processes()
    yield started
    started.stop()


def lines_of(path: Path) -> list[list[str]]:
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def score_with_kills(
    processes: Processes, argv: list[str], path: Path, log: Path, scored: Path, kills: int
) -> list[list[int]]:
    """Kill both processes of a job at random moments, one after the other, and start it again.

    Returns:
        The exit statuses of each job, the last of which is left alone.
    """
    rng = random.Random(kills)
    statuses = []
    for _ in range(kills):
        began = len(lines_of(scored))
        job = processes.start_two(argv, log, scored)
        if rng.random() < 0.15:  # anywhere in the start
            time.sleep(rng.uniform(0, 1))
        else:  # after some lines, or at the end
            deadline, wanted = time.monotonic() + 20, began + rng.randint(0, 4)
            while time.monotonic() < deadline and len(lines_of(scored)) < wanted:
                time.sleep(0.001)
                if (path / "manifest.json").exists():
                    break
            time.sleep(rng.uniform(0, 0.06))
        rng.shuffle(job)
        kill(job[0])
        time.sleep(rng.choice([0, 0, rng.uniform(0, 0.1)]))
        kill(job[1])
        statuses.append([processes.wait(process) for process in job])
    job = processes.start_two(argv, log, scored)
    statuses.append([processes.wait(process) for process in job])
    return statuses


def check_scored_once(scored: Path, shards: int) -> None:
    """No shard is begun again once it is written, and a process loses the last one at most."""
    lines, written = lines_of(scored), set()
    for what, _, shard in lines:
        assert what == "end" or shard not in written, f"shard {shard} was scored twice"
        if what == "end":
            written.add(shard)
    assert len(written) <= shards
    begun = Counter(process for what, process, _ in lines if what == "begin")
    ended = Counter(process for what, process, _ in lines if what == "end")
    assert all(begun[process] - ended[process] <= 1 for process in begun)


def test_store_is_the_same_after_many_kills(
    processes: Processes, scored: Path, teacher: Path, corpus: Path, tmp_path: Path
) -> None:
    path, log, lines = tmp_path / "S", tmp_path / "log", tmp_path / "scored"
    argv = arguments(teacher, corpus, path)[1:]
    statuses = score_with_kills(processes, argv, path, log, lines, kills=KILLS)
    assert statuses[-1] == [0, 0], log.read_text()
    assert sum(-9 in job for job in statuses) >= KILLS * 3 // 4, statuses
    check_scored_once(lines, DOCUMENTS // 4)
    assert contents(path) == contents(scored)


def test_store_is_the_same_when_two_jobs_write(
    processes: Processes, scored: Path, teacher: Path, corpus: Path, tmp_path: Path
) -> None:
    path, log = tmp_path / "S", tmp_path / "log"
    argv = arguments(teacher, corpus, path)[1:]
    jobs = [processes.start(argv, log, tmp_path / "scored") for _ in range(2)]
    assert [processes.wait(job) for job in jobs] == [0, 0], log.read_text()
    assert contents(path) == contents(scored)


def test_one_of_two_differing_jobs_is_refused(
    processes: Processes, scored: Path, teacher: Path, corpus: Path, tmp_path: Path
) -> None:
    path, log = tmp_path / "S", tmp_path / "log"
    settings: list[list[str]] = [[], ["--loss_dtype", "float32"]]
    jobs = [
        processes.start(arguments(teacher, corpus, path, *more)[1:], log, tmp_path / "scored")
        for more in settings
    ]
    assert sorted(processes.wait(job) for job in jobs) == [0, 2], log.read_text()
    assert "holds another store (loss_dtype was" in log.read_text()
    Store(path).check()


def test_two_processes_stop_with_one_line(
    processes: Processes, scored: Path, teacher: Path, corpus: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    argv = arguments(teacher, corpus, scored, "--min_context", "9")[1:]
    job = processes.start_two(argv, log, tmp_path / "scored")
    assert [processes.wait(process) for process in job] == [2, 2], log.read_text()
    assert log.read_text().count("holds another store") == 1
    assert "Traceback" not in log.read_text()
