"""Training from stores of teacher losses equals training with the teacher online."""

from __future__ import annotations

import copy
import json
import math
import re
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from built_trainer import build as build_trainer
from real_data import real_data
from references import full_losses
from store_world import (
    Place,
    Tensors,
    assert_equal,
    in_memory,
    random_store,
    save_model,
    scored_store,
    write_corpus,
    write_store,
)
from tokenizer_stubs import tokens_between
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from world import MAX_LENGTH, TEACHER_CONTEXT, make_models, make_segments, make_trainer

from vocagnolm.conventions import IGNORED_LABEL
from vocagnolm.data import Segments, align_corpus
from vocagnolm.guidance import reduce_teachers
from vocagnolm.method import Method
from vocagnolm.objective import StoredTeacher
from vocagnolm.packing import Blocks
from vocagnolm.readers import student_reader, teacher_reader
from vocagnolm.run import main
from vocagnolm.store.format import Store
from vocagnolm.store.read import StoredReader

Tokenizers = dict[str, PreTrainedTokenizerFast]
LOSS_TOLERANCE = 1e-5


def in_float16(store: Store, texts: list[str], directory: Path) -> Store:
    """The same store with its losses rounded."""
    stored = [(text, store.document(text)) for text in dict.fromkeys(texts)]
    documents = [(text, document) for text, document in stored if document]
    context = store.manifest["context"]
    return write_store(directory, documents, context=context, loss_dtype="float16")


def selected(trainer: Any) -> torch.Tensor:
    """Which label tokens of all blocks, in order, are trained on."""
    chosen = []
    with torch.no_grad():
        for number in range(len(trainer.train_dataset)):
            batch = trainer.data_collator([trainer.train_dataset[number]])
            losses = trainer._student_losses(trainer.model, batch)
            is_label = batch["labels"] != IGNORED_LABEL
            teacher = trainer.token_objective.teacher_losses(batch)
            weights = trainer.token_objective.select(losses, batch, teacher).weight_BS
            chosen.append(weights[is_label] > 0)
    return torch.cat(chosen)


# The trainer, on tiny models in float64


@dataclass(frozen=True)
class World:
    """A pair of models, a corpus of which the longer documents are cut, and its segments."""

    texts: list[str]
    student: Any
    teacher: Any
    tokenizers: tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase]
    segments: Segments

    def rows(self, reader: StoredReader) -> datasets.Dataset:
        """The segments with the losses of stores."""
        student = student_reader(self.tokenizers[0], MAX_LENGTH)
        return align_corpus(in_memory(self.texts), student, reader).rows

    def trainer(self, out: Path, *stores: Store, options: Any = None, **training: Any) -> Any:
        """Make a trainer from stores, or online; by "first", a document needs only one store."""
        teacher = copy.deepcopy(self.teacher)
        if stores:
            teacher = StoredTeacher(len(stores))
        blocks = Blocks(self.segments.rows, MAX_LENGTH, TEACHER_CONTEXT)
        if stores:
            first = (options or {}).get("method", Method()).teacher_reduction == "first"
            reader = StoredReader(stores, first=first, plain=first)
            blocks = Blocks(self.rows(reader), MAX_LENGTH, reader.limits())
        student = copy.deepcopy(self.student)
        return make_trainer(out, blocks, student, teacher, options=options, **training)


@pytest.fixture(scope="module")
def world(
    training_texts: list[str],
    student_tokenizer: PreTrainedTokenizerBase,
    teacher_tokenizer: PreTrainedTokenizerBase,
    tiny_llama: Callable[..., Any],
) -> World:
    long = ["\n\n".join(training_texts[first : first + 3]) for first in range(40, 60, 3)]
    texts = [*training_texts[:40], *long]
    tokenizers = student_tokenizer, teacher_tokenizer
    pair = make_models(tiny_llama, *tokenizers)
    world = World(texts, *pair, tokenizers, make_segments(texts, *tokenizers))
    assert len(world.segments.rows) > len(texts), "no document is cut"
    return world


@pytest.fixture(scope="module")
def whole(world: World) -> World:
    """The same models, and the documents that both read whole."""
    cut = Counter(world.segments.rows["document"][:])
    texts = [text for number, text in enumerate(world.texts) if cut[number] == 1]
    return replace(world, texts=texts, segments=make_segments(texts, *world.tokenizers))


@pytest.fixture(scope="module")
def store(whole: World, tmp_path_factory: pytest.TempPathFactory) -> Store:
    """The online teacher's losses on every document."""
    directory = tmp_path_factory.mktemp("stores") / "float32"
    reader = teacher_reader(whole.tokenizers[1], TEACHER_CONTEXT)
    return scored_store(directory, whole.texts, reader, whole.teacher)


def reduced_by(reduction: Any, weights: Sequence[float] = ()) -> Method:
    """The paper's method, with the losses of several teachers reduced."""
    return Method(teacher_reduction=reduction, teacher_weights=list(weights) or None)


def trained(trainer: Any) -> Tensors:
    trainer.train()
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "training"),
    [
        (Method(), {}),
        (
            Method("vocagnolm", 0.2, "mean", "mean"),
            {"optim": "adamw_torch", "max_grad_norm": 1.0},
        ),
        (
            Method("vocagnolm", 0.3, "sum", "exclude", "batch", "selected"),
            {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
        ),
        (Method(selection="accept"), {}),
    ],
)
def test_stored_run_gives_online_parameters_for_whole_documents(
    whole: World, store: Store, tmp_path: Path, method: Method, training: Any
) -> None:
    options = {"method": method}
    online = whole.trainer(tmp_path / "online", options=options, **training)
    stored = whole.trainer(
        tmp_path / "stored", store, options=options, dataloader_num_workers=2, **training
    )
    before = {name: p.detach().clone() for name, p in stored.model.named_parameters()}
    ours, theirs = trained(stored), trained(online)
    assert_equal(ours, theirs)
    assert not any(torch.equal(before[name], ours[name]) for name in ours)
    for ours_log, theirs_log in zip(
        stored.state.log_history, online.state.log_history, strict=True
    ):
        for name in ("teacher_loss_nats", "unmapped_fraction", "selected_loss_nats"):
            assert ours_log.get(name) == pytest.approx(theirs_log.get(name), abs=1e-6)


# Several stores


REDUCTIONS: list[tuple[Any, ...]] = [
    ("min",),
    ("mean",),
    ("max",),
    ("weighted", (1.0, 2.5, 0.1)),
    ("first",),
]


@pytest.mark.slow
def test_stores_of_some_documents_train_as_one_of_all(
    world: World, tokenizers_by_family: Tokenizers, tmp_path: Path
) -> None:
    ours, theirs = world.texts[::2], world.texts[1::2]
    math = random_store(tmp_path / "math", ours, tokenizers_by_family["nfc_digits"], seed=1)
    # Both stores have the first five texts, and the first store counts.
    code = random_store(
        tmp_path / "code", ours[:5] + theirs, tokenizers_by_family["byte_level"], seed=2
    )
    stored = [(text, math.document(text)) for text in ours]
    stored += [(text, code.document(text)) for text in theirs]
    documents = [(text, document) for text, document in stored if document]
    one = trained(world.trainer(tmp_path, write_store(tmp_path / "both", documents)))
    options = {"method": reduced_by("first")}
    assert_equal(trained(world.trainer(tmp_path, math, code, options=options)), one)


def slow_teacher(
    world: World,
    rows: list[dict[str, Any]],
    segments: Sequence[int],
    stores: list[Store],
    aggregation: str,
    combine: Any,
) -> dict[int, float]:
    """The teachers' loss of the text tokens of a block, with loops over stores and tokens."""
    aggregate = {"max": max, "mean": lambda x: sum(x) / len(x)}.get(aggregation, sum)

    def share_of(first: int, last: int, a: int, b: int) -> float:
        if aggregation != "share":
            return 1.0
        shared = range(max(first, a), min(last, b))
        return sum(1 / sharing[c] for c in shared) / (last - first)

    guides, at = {}, 0
    for segment in segments:
        row = rows[int(segment)]
        text, start, end = world.texts[row["document"]], row["start"], row["end"]
        spans = tokens_between(world.tokenizers[0], text, start, end).spans + start
        sharing = Counter(c for span in spans.tolist() for c in range(*span))
        for position, (a, b) in enumerate(spans.tolist(), at + 1):
            losses = []
            for store in stores:
                document = store.document(text)
                tokens = zip(document.spans, document.losses, strict=True) if document else ()
                covering = [
                    float(loss) * share_of(max(first, start), min(last, end), a, b)
                    for (first, last), loss in tokens
                    if max(first, start) < b and min(last, end) > a
                ]
                losses += [aggregate(covering)] if covering else []
            if losses:
                guides[position] = combine(losses)
        at += len(row["student_ids"])
    return guides


@pytest.mark.slow
@pytest.mark.parametrize(
    ("aggregation", "reduction"),
    [
        *(("max", reduction) for reduction in REDUCTIONS),
        *((how, ("first",)) for how in ("mean", "sum", "share")),
        *(("accept", reduction) for reduction in (("mean",), ("first",))),
    ],
    ids=str,
)
def test_loss_of_several_stores_equals_slow_reference(
    world: World,
    tokenizers_by_family: Tokenizers,
    tmp_path: Path,
    aggregation: str,
    reduction: tuple[Any, ...],
) -> None:
    is_first = reduction[0] == "first"
    stores = []
    for n, f in enumerate(("nfc_digits", "byte_level", "prepend")):
        # By "first", each store has more documents than the one before, and none has all.
        texts = [t for i, t in enumerate(world.texts) if i % 4 <= n or not is_first]
        stores.append(random_store(tmp_path / f, texts, tokenizers_by_family[f], seed=n))
    weights = reduction[1] if len(reduction) > 1 else (1.0, 1.0, 1.0)
    combine = {"min": min, "max": max, "first": itemgetter(0)}.get(
        reduction[0], lambda x: sum(w * y for w, y in zip(weights, x, strict=True)) / sum(weights)
    )
    settings = {"top_k": 0.3, "aggregation": aggregation, "loss_divisor": "selected"}
    if accepts := aggregation == "accept":
        aggregation, settings = "share", {"selection": "accept"}
    method = replace(reduced_by(*reduction), **settings)
    trainer = world.trainer(tmp_path, *stores, options={"method": method})
    blocks = trainer.train_dataset
    rows = list(world.rows(StoredReader(stores, first=is_first, plain=is_first)))
    batch = trainer.data_collator([blocks[i] for i in range(3)])
    losses = full_losses(trainer.model, batch["input_ids"], batch["position_ids"], batch["labels"])
    chosen = torch.zeros(losses.shape)
    for row in range(3):
        guides = slow_teacher(world, rows, blocks.segments(row), stores, aggregation, combine)
        labels = (batch["labels"][row] != IGNORED_LABEL).nonzero().flatten().tolist()
        unmapped = [t for t in labels if t not in guides]  # end tokens
        excess = {t: float(losses[row, t].detach()) - guides[t] for t in labels if t in guides}
        top = sorted(excess, key=lambda t: -excess[t])[: -(-3 * len(excess) // 10)]
        chosen[row, [*unmapped, *top]] = 1.0
        for t in excess if accepts else ():
            chosen[row, t] = min(1.0, math.exp(excess[t]))
        assert batch["mapped_tokens"][row] == len(excess)
        assert batch["unmapped_tokens"][row] == len(unmapped)
    if not accepts:
        assert trainer.token_objective.divisor_tokens(batch) == chosen.sum()
    loss = trainer.compute_loss(trainer.model, batch, num_items_in_batch=torch.tensor(100))
    expected = (chosen * losses).sum() / 100
    assert abs((loss - expected).item()) < LOSS_TOLERANCE
    parameters = list(trainer.model.parameters())
    ours, theirs = (torch.autograd.grad(x, parameters) for x in (loss, expected))
    for a, b in zip(ours, theirs, strict=True):
        assert float((a - b).norm()) <= LOSS_TOLERANCE * float(b.norm())
    assert not batch["teacher_losses"].requires_grad


@pytest.mark.parametrize("reduction", ["min", "mean", "max", "first"])
def test_token_is_unmapped_when_one_teacher_has_none(reduction: Any) -> None:
    losses = torch.tensor([[1.0, 2.0, 0.0, 4.0, 0.0, 0.0]])
    mapped = torch.tensor([[True, True, False, True, False, False]])
    reduced, is_mapped = reduce_teachers(losses, mapped, 2, reduction)
    assert is_mapped.tolist() == [[True, False, False]]
    expected = {"min": 1.0, "mean": 2.5, "max": 4.0, "first": 1.0}[reduction]
    assert reduced.tolist() == [[expected, 0.0, 0.0]]


# train.py


@pytest.fixture
def error_of(place: Place, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """`error_of(**options)`: the one line with which train.py stops."""

    def run(output: Path = tmp_path / "new", **changes: str | None) -> str:
        capfd.readouterr()
        assert main.main(place.argv(output, **changes)) == 2
        stderr = capfd.readouterr().err
        assert stderr.count("\n") == 1, stderr
        return stderr.removeprefix("vocagnolm train: error: ").strip()

    return run


def test_dry_run_names_the_stored_teachers(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stores = [place.score(), place.score("store2", teacher=str(place.root / "teacher2"))]
    paths = " ".join(map(str, stores))
    assert main.main(place.argv(tmp_path / "new", teacher_losses=paths, dry_run="True")) == 0
    out = capsys.readouterr().out
    for name, store in zip(("teacher", "teacher2"), map(Store, stores), strict=True):
        tokens = f"{store.manifest['tokens']:,} tokens"
        assert f"teacher    {store.directory}: losses of {place.root / name}, {tokens}\n" in out
    assert "100.00% of the text tokens mapped" in out
    assert "parameters, frozen" not in out
    assert not (tmp_path / "new").exists()


def test_train_stops_or_skips_when_documents_are_missing(
    place: Place,
    tmp_path: Path,
    error_of: Callable[..., str],
    capfd: pytest.CaptureFixture[str],
) -> None:
    lines = (place.root / "pages.jsonl").read_text().splitlines()
    lines[3] = json.dumps({"text": json.loads(lines[3])["text"] + " "})
    pages = tmp_path / "pages.jsonl"
    pages.write_text("\n".join([*lines[:20], json.dumps({"text": "new"}), *lines[20:]]) + "\n")
    options = {"dataset": str(pages), "teacher_losses": str(place.score())}
    assert error_of(**options) == (
        f"--teacher_losses lacks 2 of 41 documents of --dataset {pages}, or has a different text "
        "of them: score this corpus, leave them out with --missing_losses skip, or train on them "
        "without a teacher with --missing_losses plain"
    )
    assert not (tmp_path / "new").exists()
    place.train(tmp_path / "run", **options, missing_losses="skip")
    reason = "not in the teacher-loss store, or another text there"
    assert f"skipped    2 documents (2 {reason})" in capfd.readouterr().out
    skipped = (tmp_path / "run" / "skipped.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in skipped] == [
        {"document": number, "reason": reason} for number in (3, 20)
    ]


def test_each_domain_has_a_teacher_and_the_rest_none(
    place: Place,
    training_texts: list[str],
    tmp_path: Path,
    error_of: Callable[..., str],
    capfd: pytest.CaptureFixture[str],
) -> None:
    write_corpus(tmp_path / "code.jsonl", [text[:120] for text in training_texts[50:60]])
    write_corpus(tmp_path / "rest.jsonl", [text[:120] for text in training_texts[60:65]])
    math, code = place.score(), tmp_path / "code"
    place.score(str(code), teacher=str(place.root / "teacher2"), dataset=f"{code}.jsonl")
    given = {"teacher_losses": f"{code} {math}", "teacher_reduction": "first"}
    # Pages that only the second store has.
    alone = place.train(tmp_path / "alone", teacher_losses=str(math))
    assert_equal(place.train(tmp_path / "both", **given), alone)
    given["dataset"] = f"{place.root / 'pages.jsonl'} {code}.jsonl"
    capfd.readouterr()
    place.train(tmp_path / "domains", **given)
    assert "100.00% of the text tokens mapped" in capfd.readouterr().out
    given["dataset"] += f" {tmp_path / 'rest.jsonl'}"
    assert "--teacher_losses lacks 5 of 5 documents" in error_of(**given)
    place.train(tmp_path / "all", **given, missing_losses="plain")
    shown = re.search(r"([\d.]+)% of the text tokens mapped", capfd.readouterr().out)
    assert shown
    assert 80 < float(shown[1]) < 99


def test_evaluation_of_stored_run_equals_online_run(
    place: Place, training_texts: list[str], tmp_path: Path
) -> None:
    write_corpus(tmp_path / "eval.jsonl", training_texts[50:60])  # in no store
    changes = {"eval_dataset": str(tmp_path / "eval.jsonl"), "eval_steps": "1"}
    runs = {"online": {}, "stored": {"teacher_losses": str(place.score())}}
    logs = []
    for name, options in runs.items():
        place.train(tmp_path / name, **changes, **options)
        state = json.loads((tmp_path / name / "trainer_state.json").read_text())
        logs.append([entry["eval_loss"] for entry in state["log_history"] if "eval_loss" in entry])
    # Documents in no store are packed without regard to a teacher, so into other blocks.
    assert logs[1] == pytest.approx(logs[0], rel=1e-6)
    assert len(set(logs[0])) == 3


def test_document_that_a_teacher_could_not_score_has_no_teacher() -> None:
    """It is stored without losses, as for a server that refused it."""

    def store(tokens: int) -> Any:
        document = SimpleNamespace(
            spans=np.zeros((tokens, 2), np.int64), losses=np.ones(tokens, np.float32)
        )
        return SimpleNamespace(document=lambda text: document)

    (tokens,), lacking = StoredReader([store(0), store(2)], first=True).read(["a text"])
    assert (len(tokens.values), lacking) == (2, {})
    assert StoredReader([store(0)], plain=True).read(["a text"])[1] == {0: None}
    assert StoredReader([store(0)]).read(["a text"])[1] == {}


def test_run_is_resumed_from_the_same_content_only(
    place: Place, tmp_path: Path, error_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Path(shutil.copytree(place.score(), tmp_path / "store"))
    whole = place.train(tmp_path / "whole", teacher_losses=str(store), save_steps="2")
    run = tmp_path / "run"
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", run / "checkpoint-2")
    shutil.copy(tmp_path / "whole" / "run.json", run)
    other = place.score("rounded", loss_dtype="float16")
    shutil.rmtree(store)
    shutil.copytree(other, store)
    error = error_of(run, teacher_losses=str(store), save_steps="2")
    assert f"{run} holds a run with other settings (the losses in --teacher_losses have " in error
    assert "(--teacher_losses was " in error_of(run, teacher_losses=str(other), save_steps="2")
    shutil.rmtree(store)
    shutil.copytree(place.score(), store)
    monkeypatch.chdir(tmp_path)
    # A scheduler may give the next start another scratch directory.
    (tmp_path / "disk2").mkdir()
    store.rename(tmp_path / "disk2" / "store")
    resumed = place.train(run, teacher_losses="disk2/store", save_steps="2")
    assert_equal(resumed, whole)


@pytest.mark.slow
def test_stored_run_equals_online_run_on_real_text(
    tiny_llama: Callable[..., Any], tmp_path: Path
) -> None:
    """Short documents of GSM8K and PlanetMath, and the tokenizers of the paper."""
    texts: list[str] = []
    for name, count in (("gsm8k_train", 12), ("planetmath", 3)):
        lines = real_data(f"data/corpora/{name}.jsonl").read_text(encoding="utf-8").splitlines()
        texts += [t for t in (json.loads(line)["text"] for line in lines) if len(t) < 900][:count]
    place = Place(tmp_path)
    for role, name in (("student", "tinyllama"), ("teacher", "qwen2.5")):
        tokenizer = real_data(f"tokenizers/{name}")
        size = json.loads((tokenizer / "config.json").read_text())["vocab_size"]
        shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
        tiny = tiny_llama(size, len(name), **shape, max_position_embeddings=512)
        with torch.no_grad():
            for parameter in tiny.parameters():
                parameter.mul_(5)  # losses far from uniform
        save_model(tmp_path / role, tokenizer, tiny)
    write_corpus(tmp_path / "pages.jsonl", texts)
    store = place.score()
    rounded = in_float16(Store(store), texts, tmp_path / "float16").directory

    def build(name: str, **changes: str) -> Any:
        shape = {"max_length": "512", "global_batch_tokens": "1024"}
        argv = place.argv(tmp_path / name, **shape, max_steps="2", **changes)
        return build_trainer(argv)

    trainers = [build("online"), *(build(s.name, teacher_losses=str(s)) for s in (store, rounded))]
    masks = [selected(trainer) for trainer in trainers]
    assert torch.equal(masks[0], masks[1])
    assert (masks[0] == masks[2]).double().mean() >= 0.999
    assert 0.4 < masks[0].double().mean() < 0.5
    online, stored = map(trained, trainers[:2])
    assert_equal(stored, online)
