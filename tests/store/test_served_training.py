"""`vocagnolm train --teacher_server`: a run from a server equals one from a finished store."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launch import run_jobs
from safetensors.torch import load_file
from served_teacher import MODEL, ServedTeacher, served
from stored_place import Place, assert_equal, write_pages
from stored_world import in_memory, write_store
from transformers import AutoModelForCausalLM, AutoTokenizer

from vocagnolm import VocAgnoConfig, VocAgnoTrainer
from vocagnolm.cli import Exit
from vocagnolm.conventions import TeacherAway
from vocagnolm.data import align_corpus
from vocagnolm.packing import Blocks
from vocagnolm.readers import student_reader, teacher_reader
from vocagnolm.run import main
from vocagnolm.run.parser import parse
from vocagnolm.spans import encode
from vocagnolm.store import growing
from vocagnolm.store import served as serving
from vocagnolm.store.format import Store, StoredDocument, document_key, find_faults
from vocagnolm.store.growing import GrowingStore, open_for_growth
from vocagnolm.store.late import Late, LateReader
from vocagnolm.store.read import StoredReader
from vocagnolm.store.served import ServedScorer
from vocagnolm.tokenizer import start_id
from vocagnolm.training.assembly import assemble


@pytest.fixture(scope="module")
def teacher(place: Place) -> tuple[Any, Any, dict[Any, Any]]:
    """The teacher's model and tokenizer, and its answers, which all servers share."""
    path = place.root / "teacher"
    return AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path), {}


@pytest.fixture
def server(
    teacher: tuple[Any, Any, dict[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> Iterator[ServedTeacher]:
    """The teacher behind a server; requests are repeated for two seconds."""
    monkeypatch.setattr(serving, "WAITS_S", (0.1,) * 20)
    model, tokenizer, known = teacher
    with served(model, tokenizer, start_id(tokenizer, "teacher"), known=known) as found:
        yield found


@pytest.fixture(scope="module")
def pages(place: Place, training_texts: list[str]) -> Path:
    """Short documents, some that are cut, one that has windows, and one twice."""
    long = [" ".join(training_texts[first : first + 4]) for first in range(40, 56, 4)]
    longest = " ".join(training_texts)[:4000]
    short = [text[:120] for text in training_texts[:24]]
    path = place.root / "mixed.jsonl"
    write_pages(path, [*short, *long, longest, short[0]])
    return path


@pytest.fixture(scope="module")
def stored(
    place: Place, pages: Path, teacher: tuple[Any, Any, dict[Any, Any]]
) -> Callable[..., Path]:
    """A finished store from the same teacher behind a server."""

    def score(dataset: Path = pages, **more: str) -> Path:
        model, tokenizer, known = teacher
        with served(model, tokenizer, start_id(tokenizer, "teacher"), known=known) as found:
            options = {"server": found.url, "served_model": MODEL, "dataset": str(dataset), **more}
            return place.score(f"store-{dataset.stem}", min_context="31", **options)

    return score


def asked_of(place: Place, server: ServedTeacher) -> dict[str, str]:
    """The options of a run whose teacher is behind that server."""
    teacher = str(place.root / "teacher")
    return {"teacher": teacher, "teacher_server": server.url, "served_model": MODEL}


def prompts(server: ServedTeacher) -> list[tuple[int, ...]]:
    """The answered prompts of documents, without the probe, which comes first."""
    found = [tuple(body["prompt"]) for body in server.answered]
    return [prompt for prompt in found if prompt != found[0]]


@pytest.mark.parametrize(
    "trouble",
    [
        "none",
        pytest.param("killed", marks=pytest.mark.slow),
        pytest.param("paused", marks=pytest.mark.slow),
    ],
)
def test_served_run_equals_stored_run(
    place: Place,
    pages: Path,
    stored: Callable[..., Path],
    server: ServedTeacher,
    teacher: tuple[Any, Any, dict[Any, Any]],
    tmp_path: Path,
    trouble: str,
) -> None:
    options = {"dataset": str(pages), "max_steps": "9", "aggregation": "share"}
    expected = place.train(tmp_path / "stored", **options, teacher_losses=str(stored()))
    back, port = threading.Event(), server.server_port
    others: list[Any] = []

    def restart() -> None:
        server.shutdown()
        server.server_close()
        model, tokenizer, known = teacher
        start = start_id(tokenizer, "teacher")
        again = served(model, tokenizer, start, known=known, port=port)
        others.extend([again, again.__enter__()])

    def plan(number: int) -> str | None:
        if number < 12 or trouble == "none":
            return None
        if trouble == "paused":
            if number == 12:
                threading.Timer(1.0, back.set).start()
            back.wait()
            return None
        # Open connections outlive a server that no longer listens.
        if number == 12:
            threading.Timer(0.5, restart).start()
        return "kill"

    server.plan = plan
    found = place.train(tmp_path / "served", **options, **asked_of(place, server))
    assert_equal(found, expected)
    if trouble == "killed":
        again, other = others
        assert len(prompts(server)) < 12
        assert other.answered
        again.__exit__(None, None, None)
    # What is left is a store that a run can read.
    kept, whole = Store(tmp_path / "served" / "served_losses"), Store(stored())
    texts = [json.loads(line)["text"] for line in pages.read_text().splitlines()]
    for text in texts:
        mine, own = kept.document(text), whole.document(text)
        assert mine is not None
        assert own is not None
        assert np.array_equal(mine.losses, own.losses)
        assert np.array_equal(mine.spans, own.spans)


def test_run_whose_server_stays_away_ends_after_a_checkpoint(
    place: Place,
    pages: Path,
    stored: Callable[..., Path],
    server: ServedTeacher,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(serving, "WAITS_S", (0.0,) * 3)
    options = {"dataset": str(pages), "max_steps": "9", "eval_fraction": "0.1", "eval_steps": "9"}
    options["logging_steps"] = "1"
    expected = place.train(tmp_path / "stored", **options, teacher_losses=str(stored()))
    options |= asked_of(place, server)
    run = tmp_path / "run"
    log = run / "log.jsonl"
    # The server is away as soon as a step has been made.
    server.plan = lambda number: "kill" if log.exists() and log.stat().st_size else None
    capfd.readouterr()
    assert main.main(place.argv(run, **options)) == Exit.STOPPED
    complained = capfd.readouterr().err.splitlines()[-1]
    assert complained.startswith("vocagnolm train: error: --teacher_server http://")
    (checkpoint,) = run.glob("checkpoint-*")
    assert complained.endswith(f"; the last step is saved in {checkpoint}")
    assert 0 < int(checkpoint.name.partition("-")[2]) < 9
    server.plan = lambda number: None
    assert_equal(place.train(run, **options), expected)
    asked = prompts(server)
    assert len(asked) == len(set(asked)), "something was asked twice"
    # Another run with the answers of the first one has nothing to ask.
    answers = str(run / "served_losses")
    other = place.train(tmp_path / "other", **options, served_losses=answers, learning_rate="2e-2")
    assert prompts(server) == asked
    assert any(not np.array_equal(other[name], expected[name]) for name in expected)


def test_held_out_documents_are_not_asked_for(
    place: Place, pages: Path, server: ServedTeacher, tmp_path: Path
) -> None:
    options = {"dataset": str(pages), "eval_fraction": "0.5", "max_steps": "-1"}
    place.train(tmp_path / "run", **options, **asked_of(place, server))
    kept = Store(tmp_path / "run" / "served_losses")
    texts = {json.loads(line)["text"] for line in pages.read_text().splitlines()}
    assert 0 < kept.manifest["documents"] < 0.7 * len(texts)
    asked = len(server.bodies)
    argv = place.argv(tmp_path / "plan", **options, **asked_of(place, server), dry_run="True")
    held_out = assemble(parse(argv)).eval_dataset
    for block in held_out:
        for losses in block["teacher_losses"]:
            assert np.isnan(losses).all()
    assert len(server.bodies) == asked


@pytest.mark.slow
def test_served_run_of_conversations_equals_stored_run(
    place: Place,
    training_texts: list[str],
    stored: Callable[..., Path],
    server: ServedTeacher,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    turns = [
        [{"role": "user", "content": a[:60]}, {"role": "assistant", "content": b[:90]}]
        for a, b in zip(training_texts[:24], training_texts[24:48], strict=True)
    ]
    path = place.root / "turns.jsonl"
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns))
    store = stored(path, teacher_chat_template="chatml")
    options = {"dataset": str(path), "student_chat_template": "chatml", "max_steps": "4"}
    expected = place.train(tmp_path / "stored", **options, teacher_losses=str(store))
    options["teacher_chat_template"] = "chatml"
    found = place.train(tmp_path / "served", **options, **asked_of(place, server))
    assert_equal(found, expected)
    # Documents do not go into a store of conversations.
    answers = tmp_path / "served" / "served_losses"
    argv = place.argv(tmp_path / "new", served_losses=str(answers), **asked_of(place, server))
    capfd.readouterr()
    assert main.main(argv) == Exit.WRONG
    assert f"--served_losses {answers} holds losses of conversations" in capfd.readouterr().err


def test_document_without_losses_ends_the_run_or_is_read_without_a_teacher(
    place: Place,
    training_texts: list[str],
    server: ServedTeacher,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    refused = training_texts[30][:120]
    server.lies_about = refused[-20:]
    options = {"max_steps": "-1", "global_batch_tokens": "256", **asked_of(place, server)}
    run = tmp_path / "run"
    assert main.main(place.argv(run, **options)) == Exit.WRONG
    complained = capfd.readouterr().err
    assert f"no losses for the document that begins {refused[:60]!r}" in complained
    assert "--missing_losses plain; " in complained
    assert complained.count("\n") == 1
    # The run goes on from where it was. Now it keeps the refusal, and asks no more.
    server.bodies.clear()
    place.train(run, **options, missing_losses="plain")
    ids = encode(server.tokenizer, refused).ids.tolist()
    assert ids in [body["prompt"][1:] for body in server.bodies]
    server.bodies.clear()
    again = place.argv(tmp_path / "again", **options, missing_losses="plain")
    assert main.main([*again, f"--served_losses={run / 'served_losses'}"]) == 0
    assert ids not in [body["prompt"][1:] for body in server.bodies]
    assert Store(run / "served_losses").manifest["unscored"] == 1


def test_same_command_goes_on_after_the_server_was_mended(
    place: Place, training_texts: list[str], server: ServedTeacher, tmp_path: Path
) -> None:
    server.lies_about = training_texts[30][100:120]
    options = {"max_steps": "-1", "global_batch_tokens": "256", **asked_of(place, server)}
    run = tmp_path / "run"
    assert main.main(place.argv(run, **options)) == Exit.WRONG
    server.lies_about = None
    place.train(run, **options)
    assert Store(run / "served_losses").manifest["unscored"] == 0


WRONG = {
    "served_model=other": "no such model: other",
    "served_model=": "--teacher_server needs --served_model",
    "teacher_server=localhost:8000": "--teacher_server must be http://HOST:PORT",
    "teacher_server=": "--served_model has no effect without --teacher_server",
    "missing_losses=skip": "--missing_losses skip must know before training",
    "dataloader_num_workers=2": "--dataloader_num_workers 2 is not supported with --teacher_server",
    "method=kld": "compares distributions, which a store of losses does not hold",
    "teacher=A B": "--teacher_server needs one --teacher, for its tokenizer, got 2",
    "served_losses=STORE": "--served_losses STORE holds another store (",
}


@pytest.mark.parametrize("option", WRONG)
def test_wrong_option_of_a_server_is_one_line(
    place: Place,
    stored: Callable[..., Path],
    server: ServedTeacher,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    option: str,
) -> None:
    name, _, value = option.partition("=")
    where = str(stored()) if "STORE" in option else ""
    value = value.replace("STORE", where)
    value = value.replace("A B", f"{place.root / 'teacher'} {place.root / 'teacher2'}")
    # The other APIs do not name a model.
    server.apis = ("vllm",)
    changes: dict[str, Any] = asked_of(place, server) | {name: value or None}
    capfd.readouterr()
    assert main.main(place.argv(tmp_path / "new", **changes)) == 2
    complained = capfd.readouterr().err
    assert WRONG[option].replace("STORE", where) in complained
    assert complained.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_plan_asks_nothing_and_names_the_server(
    place: Place, server: ServedTeacher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {**asked_of(place, server), "dry_run": "True", "teacher_dtype": "float32"}
    assert main.main(place.argv(tmp_path / "new", **options)) == 0
    printed, warned = capsys.readouterr()
    assert f"teacher    {MODEL} at {server.url}, asked during the run\n" in printed
    assert "100.00% of the text tokens mapped" in printed
    assert "--teacher_dtype has no effect with --teacher_server" in printed + warned
    assert not server.bodies


@pytest.mark.slow
@pytest.mark.processes
def test_two_processes_ask_for_what_they_read(
    place: Place, stored: Callable[..., Path], server: ServedTeacher, tmp_path: Path
) -> None:
    pages = place.root / "pages.jsonl"
    options = {"dataset": str(pages), "max_steps": "-1", "num_train_epochs": "3"}
    runs = {"stored": {"teacher_losses": str(stored(pages))}, "served": asked_of(place, server)}
    jobs = []
    for name, more in runs.items():
        jobs.append({"argv": place.argv(tmp_path / name, **options, **more), "fsdp": False})
    run_jobs(tmp_path, jobs)
    found = [load_file(tmp_path / name / "model.safetensors") for name in runs]
    assert_equal(*found)
    # No document is cut here, so that none is needed by both processes in one epoch.
    asked = prompts(server)
    assert len(asked) == len(set(asked)) > 30
    assert Store(tmp_path / "served" / "served_losses").manifest["documents"] == len(asked)


# In Python


def test_trainer_in_python_has_the_same_server(
    place: Place,
    pages: Path,
    stored: Callable[..., Path],
    server: ServedTeacher,
    tmp_path: Path,
) -> None:
    texts = [{"text": json.loads(line)["text"]} for line in pages.read_text().splitlines()]

    def trainer(name: str, teacher: Path, data: Any = texts, **settings: Any) -> VocAgnoTrainer:
        args = VocAgnoConfig(
            output_dir=str(tmp_path / name),
            max_length=128,
            global_batch_tokens=512,
            max_steps=2,
            use_cpu=True,
            **settings,
        )
        student = str(place.root / "student")
        return VocAgnoTrainer(student, args, teacher=str(teacher), train_dataset=data)

    asked = {"teacher_server": server.url, "served_model": MODEL}
    ours = trainer("served", place.root / "teacher", **asked)
    theirs = trainer("stored", stored())
    with pytest.raises(ValueError, match="available only during training"):
        ours.train_dataset[0]
    for each in (ours, theirs):
        each.train()
    assert_equal(dict(ours.model.named_parameters()), dict(theirs.model.named_parameters()))
    with pytest.raises(ValueError, match="teacher_server and teacher cannot be combined"):
        trainer("both", stored(), **asked)
    with pytest.raises(
        ValueError, match="train_dataset is packed, and teacher_server needs documents"
    ):
        trainer("packed", place.root / "teacher", ours.train_dataset, **asked)


# What is asked ahead, and what is kept


def opened(
    place: Place,
    pages: Path,
    server: ServedTeacher,
    store: Path,
    *,
    is_plain: bool = False,
    stops: bool = False,
) -> tuple[Late, Blocks, Callable[[int], set[str]]]:
    """Sequences whose losses come from a server, and the texts in each."""
    texts = [json.loads(line)["text"] for line in pages.read_text().splitlines()]
    corpus = in_memory(texts)
    tokenizers = [
        AutoTokenizer.from_pretrained(place.root / role) for role in ("student", "teacher")
    ]
    reader = teacher_reader(tokenizers[1], 127)
    segments = align_corpus(corpus, student_reader(tokenizers[0], 128), LateReader(reader, "there"))
    blocks = Blocks(segments.rows, 128, [127])
    documents = np.array(segments.rows["document"][:])
    scorer = ServedScorer(server.url, MODEL, reader, 16)
    late = Late(blocks, corpus, documents, scorer, reader, 31, None, is_plain=is_plain)
    blocks.late = late
    open_for_growth(store, {"teacher": "T"})
    late.open(GrowingStore(store), 2, lambda blocks: blocks[::2], lambda: stops)
    return late, blocks, lambda one: {texts[documents[row]] for row in blocks.segments(one)}


def test_documents_of_the_next_sequences_are_asked_for_and_no_others(
    place: Place, server: ServedTeacher, tmp_path: Path
) -> None:
    late, blocks, texts_in = opened(place, place.root / "pages.jsonl", server, tmp_path / "S")
    late.expect([7, 2, 9, 4, 0, 11, 3, 5])
    # This process has the order [7, 9, 0, 3]; two sequences are asked for ahead of the one read.
    for number, block in enumerate([7, 9, 0, 3]):
        filled = blocks[block]
        sent = [7, 9, 0, 3][: number + 3]
        needed = set().union(*map(texts_in, sent))
        assert {document_key(text) for text in needed} >= set(late._waiting)
        for text in needed:
            key = document_key(text)
            assert key in late._waiting or late._store.document(text) is not None
        for losses in filled["teacher_losses"]:
            assert np.isnan(losses[0])
            assert not np.isnan(losses[1:]).any()
    late.close()
    late.close()
    assert "teacher's server" not in [thread.name for thread in threading.enumerate()]


def test_signal_ends_the_wait_for_a_server(
    place: Place, pages: Path, server: ServedTeacher, tmp_path: Path
) -> None:
    late, blocks, _ = opened(place, pages, server, tmp_path / "S", stops=True)
    is_back = threading.Event()
    server.plan = lambda number: None if is_back.wait(30) else "kill"
    with pytest.raises(TeacherAway, match="stopped by a signal while"):
        blocks[0]
    late.close()
    is_back.set()


def test_windows_of_a_document_that_is_not_whole_are_kept(
    place: Place,
    server: ServedTeacher,
    training_texts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serving, "WAITS_S", ())
    pages = tmp_path / "page.jsonl"
    write_pages(pages, [" ".join(training_texts)[:4000]])
    server.plan = lambda number: None if number % 3 else "kill"
    for _ in range(9):
        late, blocks, _ = opened(place, pages, server, tmp_path / "S")
        try:
            assert not np.isnan(blocks[0]["teacher_losses"][0][1:]).any()
            break
        except TeacherAway:
            continue
        finally:
            late.close()
    asked = [tuple(body["prompt"]) for body in server.answered]
    assert server.failed["kill"] > 3
    assert len(asked) == len(set(asked)) > 10


def test_sequence_without_losses_is_one_without_a_teacher(
    place: Place, server: ServedTeacher, training_texts: list[str], tmp_path: Path
) -> None:
    text, pages = training_texts[0], tmp_path / "page.jsonl"
    write_pages(pages, [text])
    server.lies_about = text[-20:]
    late, blocks, _ = opened(place, pages, server, tmp_path / "S", is_plain=True)
    student = student_reader(AutoTokenizer.from_pretrained(place.root / "student"), 128)
    empty = StoredReader([write_store(tmp_path / "empty", [])], plain=True)
    (expected,) = Blocks(align_corpus(in_memory([text]), student, empty).rows, 128, [127])
    (found,) = blocks
    late.close()
    assert found.keys() == expected.keys()
    for name in expected.keys() - {"block"}:
        for mine, own in zip(found[name], expected[name], strict=True):
            np.testing.assert_array_equal(mine, own, err_msg=name)


def test_request_that_failed_ahead_is_sent_again_when_it_is_needed(
    place: Place,
    server: ServedTeacher,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serving, "WAITS_S", ())
    late, blocks, texts_in = opened(place, place.root / "pages.jsonl", server, tmp_path / "S")
    now = [encode(server.tokenizer, text).ids.tolist()[:9] for text in texts_in(7)]
    server.plan = lambda number: None if server.bodies[-1]["prompt"][1:10] in now else "kill"
    late.expect([7, 2, 9, 4])
    assert len(blocks[7]["teacher_losses"]) == len(blocks.segments(7))
    for future in late._waiting.values():
        with pytest.raises(TeacherAway, match="has failed 1 times"):
            future.result(10)
    assert late._waiting
    server.plan = lambda number: None
    assert len(blocks[9]["teacher_losses"]) == len(blocks.segments(9))
    server.plan = lambda number: "kill"
    with pytest.raises(TeacherAway, match="has failed 1 times"):
        blocks[0]
    late.close()


def a_document(length: int, value: float) -> StoredDocument:
    spans = np.stack([np.arange(length), np.arange(1, length + 1)], 1)
    return StoredDocument(length, spans, np.full(length, value, np.float32))


def test_answers_of_a_killed_process_are_kept_up_to_a_cut_one(tmp_path: Path) -> None:
    about = {"teacher": "T"}
    open_for_growth(tmp_path, about)
    one, other = GrowingStore(tmp_path, 0, 2), GrowingStore(tmp_path, 1, 2)
    texts = ["a", "bc", "def", "ghij", "klmno"]
    for number, text in enumerate(texts[:3]):
        one.add(document_key(text), a_document(len(text), number + 0.1))
    one.refresh()
    other.add(document_key("ghij"), a_document(4, 3.1))
    other.add(document_key("klmno"), a_document(5, 4.1))
    # Neither is closed, and the last document of one was being written.
    (left,) = tmp_path.glob(".growing-*")
    left.write_bytes(left.read_bytes()[:-40])
    assert other.document("klmno") is not None
    assert other.document("bc") is None
    other_again = GrowingStore(tmp_path)
    open_for_growth(tmp_path, about)
    assert not list(tmp_path.glob(".growing-*"))
    for opened in (GrowingStore(tmp_path), Store(tmp_path)):
        for number, text in enumerate(texts[:4]):
            document = opened.document(text)
            assert document is not None
            assert document.losses.tolist() == [np.float32(number + 0.1)] * len(text)
            assert document.spans.tolist() == a_document(len(text), 0).spans.tolist()
        assert opened.document("klmno") is None
    assert Store(tmp_path).manifest["documents"] == 4
    # What is written after an opening is read with the next refresh.
    assert other_again.document("ghij") is None
    other_again.refresh()
    assert other_again.document("ghij") is not None


def test_processes_write_shards_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growing, "_SHARD_DOCUMENTS", 2)
    open_for_growth(tmp_path, {"teacher": "T"})
    stores = [GrowingStore(tmp_path, process, 3) for process in range(3)]
    assert len({growing._next_number(tmp_path, process, 3) for process in range(3)}) == 3
    for number in range(10):
        text = "x" * (number + 1)
        stores[number % 3].add(document_key(text), a_document(len(text), number))
    for store in stores:
        store.close()
    for store in stores:
        store.refresh()
    for number in range(10):
        for store in stores:
            document = store.document("x" * (number + 1))
            assert document is not None
            assert document.losses[0] == number
    open_for_growth(tmp_path, {"teacher": "T"})
    assert Store(tmp_path).manifest["documents"] == 10


def test_damage_is_not_signed_when_a_store_grows(tmp_path: Path) -> None:
    open_for_growth(tmp_path, {"teacher": "T"})
    store = GrowingStore(tmp_path)
    store.add(document_key("abc"), a_document(3, 1.0))
    store.close()
    open_for_growth(tmp_path, {"teacher": "T"})
    (shard,) = tmp_path.glob("shard-*")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    open_for_growth(tmp_path, {"teacher": "T"})
    shards = Store(tmp_path).manifest["shards"]
    assert find_faults(tmp_path, shards, by_hash=True)
