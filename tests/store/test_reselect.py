"""Settings compared from stores, against sets of tokens chosen one by one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from score_world import FakeScorer, refusal

from vocagnolm import cli
from vocagnolm.chat.formats import read_rows
from vocagnolm.collator import PackedCollator
from vocagnolm.data import align_corpus
from vocagnolm.guidance import aggregate_teacher_losses, select_tokens
from vocagnolm.objective import Method
from vocagnolm.packing import Blocks
from vocagnolm.readers import student_reader, teacher_reader
from vocagnolm.spans import encode_batch
from vocagnolm.store import reselect
from vocagnolm.store import reselect_main as command_line
from vocagnolm.store.difference import difference
from vocagnolm.store.job import ScoringJob, score_shard
from vocagnolm.store.reader import StoredReader
from vocagnolm.store.reselect import Candidate
from vocagnolm.store.store import Store, StoredSegment, document_key, finish_store, write_shard
from vocagnolm.texts.tokenizers import load_tokenizer, tokenizer_sha256

LENGTH, CONTEXT = 64, 96


def make_store(directory: Path, tokenizer: Any, texts: list[str], seed: int) -> Path:
    """A store with random losses."""
    rng = np.random.default_rng(seed)
    segments = [
        (document_key(text), StoredSegment(0, len(text), e.spans, rng.exponential(2, len(e.ids))))
        for text, e in zip(texts, encode_batch(tokenizer, texts), strict=True)
    ]
    directory.mkdir()
    write_shard(directory, 0, segments, "float32", "")
    sha256 = tokenizer_sha256(tokenizer)
    finish_store(directory, [0], {"teacher": "T", "context": CONTEXT, "tokenizer_sha256": sha256})
    return directory


@pytest.fixture
def world(
    tmp_path: Path, tokenizer_dirs: dict[str, Path], training_texts: list[str]
) -> dict[str, Any]:
    texts = [text[:150] for text in training_texts[:25]]
    student = load_tokenizer(str(tokenizer_dirs["metaspace"]), "student")
    teacher = load_tokenizer(str(tokenizer_dirs["nfc_digits"]), "teacher")
    corpus = tmp_path / "pages.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return {
        "corpus": corpus,
        "texts": texts,
        "student": student,
        "directory": tokenizer_dirs["metaspace"],
        "stores": [
            make_store(tmp_path / "student", student, texts, 0),
            make_store(tmp_path / "one", teacher, texts, 1),
            make_store(tmp_path / "two", teacher, texts, 2),
        ],
    }


def command(world: dict[str, Any], *options: str, teachers: int = 2) -> list[str]:
    student, *stores = map(str, world["stores"])
    return [
        *("reselect", "--student", str(world["directory"]), "--student_losses", student),
        *("--teacher_losses", *stores[:teachers], "--dataset", str(world["corpus"])),
        *("--max_length", str(LENGTH), *options),
    ]


def chosen(world: dict[str, Any], store: int, setting: Candidate) -> set[tuple[int, int]]:
    """The tokens (block, position) of a setting, block by block, with one teacher's store."""
    stores = [Store(world["stores"][0]), Store(world["stores"][store])]
    corpus = datasets.Dataset.from_dict({"text": world["texts"]})
    reader = student_reader(world["student"], LENGTH)
    tokens = set()
    alone = [align_corpus(corpus, reader, StoredReader([store])).rows for store in stores]
    everything = StoredReader([Store(path) for path in world["stores"]])
    rows = align_corpus(corpus, reader, everything).rows
    blocks = Blocks(rows, LENGTH, everything.limits())
    for block in range(len(blocks)):
        losses = []
        for part in alone:
            picked = Blocks.__new__(Blocks)
            picked.__dict__ |= blocks.__dict__ | {"_rows": part.with_format("numpy")}
            batch = PackedCollator(LENGTH, shares=True)([picked[block]])
            loss = batch["teacher_losses"]
            losses.append(
                aggregate_teacher_losses(
                    loss.nan_to_num(),
                    batch["teacher_ranges"],
                    setting.method.aggregation,
                    ~loss.isnan(),
                    batch["teacher_shares"],
                )
            )
        weight = select_tokens(
            losses[0][0],
            losses[1][0],
            batch["labels"] != -100,
            losses[1][1],
            top_k=setting.method.top_k,
            unmapped=setting.method.unmapped,
            scope="sequence",
        )
        tokens |= {(block, int(t)) for t in torch.nonzero(weight[0]).flatten()}
    return tokens


@pytest.mark.slow
def test_overlap_equals_that_of_sets_of_tokens(world: dict[str, Any], tmp_path: Path) -> None:
    options = ("--top_k", "0.4", "0.7", "--aggregation", "max", "mean", "--unmapped", "exclude")
    assert cli.main(command(world, *options, "--output_dir", str(tmp_path / "out"))) == 0
    result = json.loads((tmp_path / "out" / "reselect.json").read_text())
    settings = [Candidate(0, s.pop("teacher"), Method(**s)) for s in result["settings"]]
    assert len(settings) == 8
    sets = [chosen(world, 1 + (setting.teacher == "two"), setting) for setting in settings]
    for i, a in enumerate(sets):
        assert result["together"][i] == [len(a & b) for b in sets]
        assert result["overlap"][i] == pytest.approx([len(a & b) / len(a | b) for b in sets])
    assert (tmp_path / "out" / "reselect.png").stat().st_size > 1000


def test_conversations_are_chosen_from_in_their_template(
    world: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = [{"prompt": text[:20], "completion": text[20:60]} for text in world["texts"]]
    corpus = datasets.Dataset.from_dict(read_rows(turns, "prompt_completion"))
    stores = []
    teacher = load_tokenizer(str(world["directory"].parent / "nfc_digits"), "teacher")
    for number, tokenizer in enumerate((world["student"], teacher)):
        reader = teacher_reader(tokenizer, CONTEXT, "plain")
        job = ScoringJob(tmp_path / f"{number}", corpus.select(range(20)), reader, 8, 99, "float32")
        job.directory.mkdir()
        assert job.template
        score_shard(job, 0, FakeScorer())
        about = {"teacher": "T", "context": CONTEXT, **job.template.as_json()}
        sha256 = tokenizer_sha256(tokenizer)
        finish_store(job.directory, [0], about | {"tokenizer_sha256": sha256})
        stores.append(Store(job.directory))
    blocks, collator = reselect.align_stores(stores, world["student"], corpus, CONTEXT)
    assert "5 documents are not in all stores" in capsys.readouterr().err
    expected = align_corpus(corpus, student_reader(world["student"], CONTEXT, "plain"), None).rows
    expected = expected.select(range(20))
    assert sorted(map(tuple, blocks._rows.with_format(None)["student_ids"])) == sorted(
        map(tuple, expected["student_ids"])
    )
    method = Method(aggregation="max", unmapped="exclude", top_k=1.0)
    found = reselect.reselect(blocks, collator, [Candidate(1, "1", method)], len(world["student"]))
    labels = sum(np.diff(np.reshape(row, (-1, 2))).sum() for row in expected["student_labelled"])
    # All answers, but for their ends, which no teacher token covers.
    assert (found.tokens, found.together[0, 0]) == (labels, labels - 20)


def test_store_given_twice_stands_for_itself(world: dict[str, Any]) -> None:
    one, two = world["stores"][1:]
    world["stores"].insert(1, one)
    argv = command(world, teachers=3)[1:]
    found, _ = command_line.select(command_line.parse_reselect(argv))
    assert [candidate.teacher for candidate in found.candidates] == [str(one), str(one), str(two)]
    overlap = found.overlap()
    assert overlap[0, 1] == 1 > overlap[0, 2] == overlap[1, 2]


def test_tokens_gained_and_lost_add_up(world: dict[str, Any]) -> None:
    argv = command(world, "--top_k", "0.4", "0.7")[1:]
    found, table = command_line.select(command_line.parse_reselect(argv))
    own = np.diag(found.together)
    assert (found.gained.sum(1) - found.lost.sum(1) == own - own[0]).all()
    assert found.gained[0].sum() == found.lost[0].sum() == 0
    assert (found.together[0] + found.gained.sum(1) == own).all()
    assert own[1] > own[0]
    assert str(found.candidates[0]) in table


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("swapped stores", "another tokenizer than --student"),
        ("missing store", "is no finished teacher-loss store"),
        ("damaged store", "is damaged"),
        ("top_k", "top_k"),
        ("another corpus", "no document that all stores have"),
    ],
)
def test_reselect_refuses_in_one_line(
    world: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: str,
    message: str,
) -> None:
    options = ("--top_k", "1.5" if change == "top_k" else "0.5")
    if change == "swapped stores":
        world["stores"].reverse()
    if change == "missing store":
        world["stores"][1] = tmp_path / "nowhere"
    if change == "damaged store":
        shard = world["stores"][1] / "shard-00000.arrow"
        shard.write_bytes(shard.read_bytes()[:-1])
    if change == "another corpus":
        world["corpus"].write_text(json.dumps({"text": "Another text."}) + "\n")
    assert cli.main(command(world, *options)) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_own_losses_are_right_when_tokens_share_characters(
    world: dict[str, Any], tmp_path: Path
) -> None:
    """The bytes of an emoji are tokens that all cover it."""
    text = "x \u2211 \u6570\u5b66 \U0001f600\U0001f600 and e\u0301 + 1."
    student = world["student"]
    store = Store(make_store(tmp_path / "own", student, [text], 5))
    corpus = datasets.Dataset.from_dict({"text": [text]})
    rows = align_corpus(corpus, student_reader(student, LENGTH), StoredReader([store])).rows
    batch = PackedCollator(LENGTH, shares=True)([Blocks(rows, LENGTH, CONTEXT)[0]])
    losses = batch["teacher_losses"].nan_to_num()
    (segment,) = store.segments(text) or ()
    shared = (segment.spans[1:, 0] < segment.spans[:-1, 1]).sum()
    assert shared > 1
    found = reselect._own_losses(batch, losses, LENGTH)[0, 1 : len(segment.losses) + 1]
    assert found.tolist() == segment.losses.tolist()


# Two stores of one corpus


def test_difference_is_that_of_all_losses(world: dict[str, Any]) -> None:
    one, other = map(Store, world["stores"][1:])
    found = difference(one, other)
    x, y = (
        np.concatenate([(s.segments(text) or [])[0].losses for text in set(world["texts"])])
        for s in (one, other)
    )
    assert found.tokens == len(x)
    assert found.correlation == pytest.approx(np.corrcoef(x, y)[0, 1])
    assert found.mean_nats == pytest.approx(np.abs(x - y).mean())
    assert found.largest_nats == pytest.approx(np.abs(x - y).max())
    assert (found.documents, found.not_alike) == (len(set(world["texts"])), 0)
    assert difference(one, one).correlation == pytest.approx(1)


def test_difference_leaves_out_documents_cut_otherwise(
    world: dict[str, Any], tmp_path: Path
) -> None:
    (one, other), cut = map(Store, world["stores"][1:]), []
    texts = list(dict.fromkeys(world["texts"]))
    for text in texts:
        (segment,) = other.segments(text) or []
        spans = segment.spans.copy()
        spans[-1, 0] -= text == texts[0]
        cut.append((document_key(text), replace(segment, spans=spans)))
    (tmp_path / "cut").mkdir()
    write_shard(tmp_path / "cut", 0, cut, "float32", "")
    about = {"teacher": "T", "context": CONTEXT}
    finish_store(
        tmp_path / "cut", [0], about | {"tokenizer_sha256": one.manifest["tokenizer_sha256"]}
    )
    found = difference(one, Store(tmp_path / "cut"))
    (left_out,) = one.segments(texts[0]) or []
    assert (found.documents, found.not_alike) == (len(texts), 1)
    assert found.tokens == difference(one, other).tokens - len(left_out.losses)


def test_compare_tells_what_a_student_selects_otherwise(
    world: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    own, one, other = map(str, world["stores"])
    argv = ["score", "--compare", one, other]
    more = ["--student", str(world["directory"]), "--student_losses", own, "--top_k", "0.3"]
    assert cli.main(argv) == 0
    told = capsys.readouterr().out.splitlines()
    assert len(told) == 3
    assert cli.main([*argv, *more, "--dataset", str(world["corpus"])]) == 0
    assert capsys.readouterr().out.splitlines()[:3] == told
    arguments = command(world, "--top_k", "0.3", "--max_length", "2048")[1:]
    selections, _ = command_line.select(command_line.parse_reselect(arguments))
    both, chosen = selections.together[0, 1], selections.together[0, 0]
    assert 0 < both < chosen
    assert cli.main([*argv, *more, "--dataset", str(world["corpus"])]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"chosen otherwise {1 - both / chosen:.2%} of the {chosen:,} tokens")


def test_compare_refuses_what_is_no_pair(
    world: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    own, one, other = map(str, world["stores"])
    fewer = make_store(tmp_path / "fewer", world["student"], world["texts"][:5], 3)
    missing = len(set(world["texts"])) - len(set(world["texts"][:5]))
    for argv, named in (
        ([one, own], "different tokenizers: compare what they select with vocagnolm reselect"),
        ([own, str(fewer)], f"different corpora: {missing:,} documents are in one of them only"),
        ([one, other, "--student", "M"], "--student_losses is required with --compare"),
        ([one, other, "--top_k", "0.2"], "--top_k has no effect with --compare"),
        ([one, str(tmp_path)], "no finished teacher-loss store"),
    ):
        assert named in refusal(["score", "--compare", *argv], capsys)
