"""`vocagnolm score` from the command line to the store it leaves."""

from __future__ import annotations

import itertools
import json
import shutil
import threading
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY, Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from architectures import build
from kills import Killed, kill_at
from processors import pretend
from store_world import (
    ABOUT,
    CONTEXT,
    DOCUMENTS,
    FakeScorer,
    arguments,
    contents,
    error,
    make_job,
)
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from vocagnolm import __main__
from vocagnolm.conventions import NonFiniteLoss
from vocagnolm.corpus import load_corpus
from vocagnolm.cutting import EMPTY
from vocagnolm.data import align_corpus
from vocagnolm.models.load import ModelSource
from vocagnolm.readers import student_reader, teacher_reader
from vocagnolm.shell.io import read_json, write_json
from vocagnolm.spans import encode, encode_rendered
from vocagnolm.store import format as store_format
from vocagnolm.store import scoring, windows
from vocagnolm.store.format import (
    MANIFEST_FILE,
    LossDtype,
    Store,
    find_faults,
    read_manifest,
    shard_name,
    shard_paths,
)
from vocagnolm.store.read import StoredReader
from vocagnolm.store.scoring import ScoringJob
from vocagnolm.store.windows import Window

# What it does


def test_score_stores_every_document_when_it_is_run(
    scored: Path, texts: list[str], teacher: Path, teacher_tokenizer: PreTrainedTokenizerBase
) -> None:
    names = [shard_name(number) for number in range(DOCUMENTS // 4)]
    assert list(contents(scored)) == ["manifest.json", *names]
    opened = Store(scored)
    assert not find_faults(scored, opened.manifest["shards"], by_hash=True)
    long = 0
    for text in texts:
        document = opened.document(text)
        assert document is not None
        encoding = encode(teacher_tokenizer, text)
        assert document.length == len(text)
        assert np.array_equal(document.spans, encoding.spans)
        assert len(document.losses) == len(encoding.ids)
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
        document = opened.document(text)
        assert document is not None
        np.testing.assert_allclose(document.losses, expected, rtol=1e-3, atol=1e-4)  # float16
        checked += 1
    assert checked > 5


def test_store_is_the_same_when_scored_again(
    scored: Path, teacher: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert __main__.main(arguments(teacher, corpus, tmp_path)) == 0
    assert contents(tmp_path) == contents(scored)
    capsys.readouterr()
    assert __main__.main(arguments(teacher, corpus, tmp_path, "--batch_tokens", "1")) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert contents(tmp_path) == contents(scored)


def test_interrupted_store_goes_on_with_compiled_layers(
    scored: Path, teacher: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Path(shutil.copytree(scored, tmp_path / "S"))
    shard_paths(store)[0].unlink()
    compiled: Any = Mock()
    monkeypatch.setattr(windows, "compile_model", compiled)
    for option in ([], ["--torch_compile", "true"]):
        assert not compiled.called
        assert __main__.main(arguments(teacher, corpus, store, *option)) == 0
        assert contents(store) == contents(scored)
        shard_paths(store)[0].unlink()
    compiled.assert_called_once_with(ANY, "inductor")


@pytest.mark.parametrize(
    ("kind", "dtype", "attention"),
    [
        ("llama", "bfloat16", "torch_varlen"),
        ("llama", "float32", "sdpa"),
        ("Lfm2", "bfloat16", "sdpa"),  # convolutions reach from window to window
    ],
)
def test_windows_are_packed_on_a_gpu_when_they_stay_apart(
    kind: str, dtype: str, attention: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: Any = {"layer_types": ["conv", "full_attention"]} if kind == "Lfm2" else {}
    build(kind, **options).save_pretrained(tmp_path)
    gpu = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    monkeypatch.setattr(scoring, "PartialState", lambda: gpu)
    monkeypatch.setattr(PreTrainedModel, "to", lambda model, _: model)
    source = ModelSource(str(tmp_path), "teacher")
    given = Namespace(attn_implementation=None, quantization=None)
    model = scoring._load(source, source.config(), dtype, given)
    assert model.config._attn_implementation == attention


def test_next_shard_is_read_while_one_is_scored() -> None:
    """It is made in order, and each before the one before it is given back."""
    made: list[int] = []
    third = threading.Event()

    def make(key: int) -> int:
        made.append(key)
        if key == 2:
            third.set()
        return 10 * key

    found = []
    for value in scoring._one_ahead(make, range(4)):
        if value == 10:
            assert third.wait(60)
        found.append(value)
    assert found == [0, 10, 20, 30]
    assert made == [0, 1, 2, 3]
    assert not list(scoring._one_ahead(make, []))


def test_shards_of_another_job_are_not_read(
    texts: list[str],
    teacher_tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While the first is scored, when the second is read already, it writes the third."""
    whole, job = (make_job(tmp_path / name, texts[:8], teacher_tokenizer) for name in "WS")
    for each in (whole, job):
        store_format.begin_store(each.directory, ABOUT)
    scoring.score_corpus(whole, FakeScorer(), ABOUT)
    shards, reads, read = list(job.shards), [], ScoringJob.read

    class Slow(FakeScorer):
        def losses(self, *args: Any) -> Any:
            name = shard_name(shards[2])
            shutil.copy(whole.directory / name, job.directory / name)
            return super().losses(*args)

    monkeypatch.setattr(ScoringJob, "read", lambda job, n: reads.append(n) or read(job, n))
    monkeypatch.setattr(ScoringJob, "missing_shards", lambda job: shards)
    scoring.score_corpus(job, Slow(), ABOUT)
    assert reads == shards[:2] + shards[3:]
    assert contents(job.directory) == contents(whole.directory)


def test_unreadable_document_has_no_tokens(
    teacher_tokenizer: PreTrainedTokenizerBase,
    student_tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is stored all the same: training skips it with a reason, and --verify does not miss it."""
    original = scoring.encode_batch

    def some(tokenizer: Any, texts: list[str]) -> Any:
        if "bad" in texts:
            raise ValueError("offsets are out of order")
        return original(tokenizer, texts)

    monkeypatch.setattr(scoring, "encode_batch", some)
    job = make_job(tmp_path, ["first", "bad", "last"], teacher_tokenizer)
    scoring.score_corpus(job, FakeScorer(), ABOUT)
    opened = Store(tmp_path)
    for text in ("first", "last"):
        document = opened.document(text)
        assert document is not None
        assert len(document.losses)
    student = student_reader(student_tokenizer, 64)
    segments = align_corpus(job.corpus, student, StoredReader([opened]))
    assert len(segments.rows) == 2
    assert segments.skipped == [(1, EMPTY)]


def test_conversation_has_a_loss_for_each_token_and_none_for_the_first(
    teacher_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    turns = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    path = tmp_path / "conversations.jsonl"
    path.write_text(json.dumps({"messages": turns}) + "\n")
    job = make_job(tmp_path / "S", ["x"], teacher_tokenizer)
    reader = teacher_reader(teacher_tokenizer, CONTEXT, "plain")
    job = replace(job, corpus=load_corpus(str(path)), reader=reader)
    job.directory.mkdir()
    scoring.score_corpus(job, FakeScorer(), ABOUT)
    (text,) = job.documents(0)
    document = Store(job.directory).document(text)
    assert document is not None
    assert len(document.losses) == len(encode_rendered(teacher_tokenizer, [text])[0].ids)
    assert document.losses[0] == 0
    assert document.losses[1:].all()


def test_conversations_that_the_template_refuses_are_reported_before_scoring(
    teacher: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: Any
) -> None:
    template = tmp_path / "strict.jinja"
    template.write_text(
        "{% for m in messages %}{% if m.role == 'system' %}"
        "{{ raise_exception('no system role') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    turns = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    refused = [{"role": "system", "content": "Add."}, *turns]
    for talks, status in (([turns, refused], 0), ([refused], 2)):
        path = tmp_path / f"{len(talks)}.jsonl"
        path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
        template_option = f"--teacher_chat_template={template}"
        argv = arguments(teacher, path, tmp_path / f"S{len(talks)}", template_option)
        assert __main__.main(argv) == status
    assert "no system role" in caplog.text
    assert "no system role" in capsys.readouterr().err
    assert read_manifest(tmp_path / "S2")["documents"] == 1
    assert not read_manifest(tmp_path / "S1")


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
    loss_dtype: LossDtype,
    advice: str,
) -> None:
    texts = ["first", "second", "the bad ∑", "last"]
    bad = int(encode(teacher_tokenizer, texts[2]).ids[-1])
    job = make_job(tmp_path, texts, teacher_tokenizer, loss_dtype)
    with pytest.raises(NonFiniteLoss, match=f"'the bad ∑': use {advice}"):
        scoring.score_corpus(job, FakeScorer({bad: loss}), ABOUT)
    assert "shard-00001.arrow" not in contents(tmp_path)
    scoring.score_corpus(job, FakeScorer(), ABOUT)
    assert Store(tmp_path).manifest["documents"] == 4


def test_jobs_in_one_directory_begin_at_different_shards(
    teacher_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    job = make_job(tmp_path, ["a", "b", "c", "d", "e", "f", "g", "h"], teacher_tokenizer)
    scoring.score_shard(job, 1, FakeScorer())
    orders = [tuple(job.missing_shards()) for _ in range(200)]
    assert set(orders) == {(0, 2, 3), (2, 3, 0), (3, 0, 2)}


# What a directory holds


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The shards that are scored."""
    found: list[int] = []
    original = scoring.score_shard

    def watched(job: Any, shard: int, *rest: Any) -> None:
        found.append(shard)
        original(job, shard, *rest)

    monkeypatch.setattr(scoring, "score_shard", watched)
    return found


def test_deleted_shards_are_scored_again(
    scored: Path,
    teacher: Path,
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    again: list[int],
) -> None:
    path = tmp_path / "S"
    shutil.copytree(scored, path)
    flipped, cut, gone = (path / shard_name(number) for number in (1, 3, 5))
    data = bytearray(flipped.read_bytes())
    data[len(data) // 2] ^= 4
    flipped.write_bytes(data)
    cut.write_bytes(cut.read_bytes()[:-100])
    gone.unlink()
    capsys.readouterr()
    assert __main__.main(["score", "--verify", str(path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{flipped} ")
    assert "checksum" in lines[0]
    assert lines[1].startswith(f"{cut} has ")
    assert lines[2] == f"{gone} is missing"
    assert "3 of 9 shards" in lines[3]
    # Bad shards must not get new checksums.
    cut.unlink()
    complained = error(arguments(teacher, corpus, path), capsys)
    assert "shard-00001.arrow damaged" in complained
    assert again == []
    flipped.unlink()
    assert __main__.main(arguments(teacher, corpus, path)) == 0
    assert sorted(again) == [1, 3, 5]
    assert contents(path) == contents(scored)
    assert __main__.main(["score", "--verify", str(path)]) == 0


@pytest.mark.parametrize("begins", ["new", "finished without two shards"])
def test_store_is_the_same_when_scoring_was_killed_at_any_point(
    teacher_tokenizer: PreTrainedTokenizerBase, tmp_path: Path, begins: str, again: list[int]
) -> None:
    """Exhaustive: before and after every operation on the directory, until none is left."""
    texts = ["a", "b", "c 😀", "d", "e", "f"]

    def finish(directory: Path) -> None:
        job = make_job(directory, texts, teacher_tokenizer)
        if scoring.begin(job, ABOUT):
            scoring.score_corpus(job, FakeScorer(), ABOUT)

    whole = tmp_path / "whole"
    whole.mkdir()
    finish(whole)
    expected = contents(whole)
    for step in itertools.count(2):
        directory = tmp_path / str(step)
        directory.mkdir()
        if begins != "new":
            shutil.copytree(whole, directory, dirs_exist_ok=True)
            for number in (0, 2):
                (directory / shard_name(number)).unlink()
        with pytest.MonkeyPatch.context() as patch:
            operations = kill_at(patch, step // 2, before=step % 2 == 0)
            try:
                finish(directory)
            except Killed:
                pass
            else:
                assert len(operations) < step // 2
                break
        written = {path.name for path in directory.glob("*.arrow")}
        for name in written:  # whole, or not there
            assert (directory / name).read_bytes() == expected[name]
        if len(written) < len(texts) // 2:
            with pytest.raises(ValueError, match=r"finished|damaged"):
                Store(directory)
        again.clear()
        finish(directory)
        assert not {shard_name(number) for number in again} & written
        assert contents(directory) == expected
        assert not list(directory.glob(".shard-*"))
    assert step > 20


def test_store_of_version_0_1_is_continued(
    scored: Path, teacher: Path, corpus: Path, tmp_path: Path, again: list[int]
) -> None:
    """Its manifest says more about special tokens and about a server."""
    path = tmp_path / "S"
    shutil.copytree(scored, path)
    (path / shard_name(2)).unlink()
    manifest = read_json(path / MANIFEST_FILE)
    manifest["special_tokens"]["behind"] = None
    manifest["probe_losses"] = [1.0]
    write_json(path / MANIFEST_FILE, manifest)
    assert __main__.main(arguments(teacher, corpus, path)) == 0
    assert again == [2]
    assert contents(path) == contents(scored)


def test_store_goes_on_in_its_precision_when_another_processor_scores_it(
    teacher: Path,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    path, argv = tmp_path / "S", arguments(teacher, corpus, tmp_path / "S")
    pretend(monkeypatch, "AMX")
    assert __main__.main(argv) == 0
    assert "with AMX" in caplog.text
    assert Store(path).manifest["dtype"] == "bfloat16"
    whole = contents(path)
    (path / shard_name(1)).unlink()
    pretend(monkeypatch, None)
    complained = error([*argv, "--dtype", "float32"], capsys)
    assert "dtype was bfloat16, now float32" in complained
    assert __main__.main(argv) == 0
    assert "as it began" in caplog.text
    assert contents(path) == whole


@pytest.mark.parametrize("revision", ["0a1b2c", "unknown", None])
def test_teacher_is_known_by_its_revision(
    revision: str | None, tmp_path: Path, teacher_tokenizer: PreTrainedTokenizerBase
) -> None:
    """A directory may be moved; without a revision only its name tells teachers apart."""
    job = make_job(tmp_path, ["x"], teacher_tokenizer)
    settings = ABOUT | {"dataset": "pages", "teacher_revision": revision}
    assert scoring.begin(job, settings)
    assert scoring.begin(job, settings | {"dataset": "copies"})
    moved = settings | {"teacher": "copies/T"}
    if revision == "0a1b2c":
        assert scoring.begin(job, moved)
    else:
        with pytest.raises(ValueError, match=r"output_dir.*teacher was T"):
            scoring.begin(job, moved)


def test_progress_counts_the_tokens_of_all_documents(
    teacher: Path, corpus: Path, scored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The total is extrapolated from the shards so far, and exact with the last one."""
    totals, counts = [], []

    class Watched(scoring.tqdm):
        def update(self, tokens: int) -> None:
            super().update(tokens)
            totals.append(self.total)
            counts.append(self.n)

    monkeypatch.setattr(scoring, "tqdm", Watched)
    assert __main__.main(arguments(teacher, corpus, tmp_path / "S", "--batch_tokens", "64")) == 0
    tokens = Store(scored).manifest["tokens"]
    assert totals[-1] == counts[-1] == tokens
    assert all(tokens / 3 < total < tokens * 3 for total in totals)


def test_score_stops_where_no_document_has_losses(
    teacher_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    class Silent(FakeScorer):
        def losses(self, windows: list[Window], report: Any = None) -> list[Any]:
            found = zip(windows, super().losses(windows), strict=True)
            return [row if window.document == 8 else "no answer" for window, row in found]

    eight, nine = (
        replace(make_job(tmp_path, ["x"] * count, teacher_tokenizer), shard_documents=count)
        for count in (8, 9)
    )
    with pytest.raises(ValueError, match=r"shard 0 .*no answer"):
        scoring.score_shard(eight, 0, Silent())
    assert not contents(tmp_path)
    scoring.score_shard(nine, 0, Silent())
    assert not nine.missing_shards()


@pytest.mark.parametrize(
    ("limit", "expected"), [(256, (256, 64)), (2048, (2048, 512)), (131_072, (4096, 512))]
)
def test_windows_overlap_by_a_quarter_of_the_context_and_at_most_512_tokens(
    limit: int, expected: tuple[int, int]
) -> None:
    options: Any = Namespace(context=None, min_context=None, server=None)
    config: Any = LlamaConfig(max_position_embeddings=limit)
    assert scoring._context_of(config, options) == expected
