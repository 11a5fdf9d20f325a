"""The guidance view against brute force, and the command that makes it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from samples import Sample, sample_blocks
from stored_world import random_store
from tokenizer_stubs import tokens_between
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase
from world import MAX_LENGTH, TEACHER_CONTEXT

from vocagnolm.conventions import IGNORED_LABEL
from vocagnolm.data import align_corpus
from vocagnolm.guidance import TokenGuidance
from vocagnolm.packing import Blocks
from vocagnolm.readers import (
    Reader,
    TeacherReaders,
    student_reader,
    teacher_reader,
)
from vocagnolm.report import inspect
from vocagnolm.report.view import TextView
from vocagnolm.spans import encode
from vocagnolm.store.read import StoredReader
from vocagnolm.tokenizer import load_tokenizer


@pytest.fixture
def readers(
    student_tokenizer: PreTrainedTokenizerBase, teacher_tokenizer: PreTrainedTokenizerBase
) -> tuple[Reader, Reader]:
    return (
        student_reader(student_tokenizer, MAX_LENGTH),
        teacher_reader(teacher_tokenizer, TEACHER_CONTEXT),
    )


def sample_of(texts: list[str], student: Reader, guide: Any) -> Sample:
    """All blocks of some texts."""
    corpus = datasets.Dataset.from_dict({"text": texts})
    rows = align_corpus(corpus, student, guide).rows
    limits = [guide.limit] if isinstance(guide, Reader) else guide.limits()
    blocks = Blocks(rows, MAX_LENGTH, limits)
    numbers = range(len(blocks))
    return sample_blocks(blocks, numbers, rows, corpus, student.tokenizer)


def guidance_of(sample: Sample, seed: int = 0) -> TokenGuidance:
    """Random losses and weights over the tokens of a sample."""
    generator = torch.Generator().manual_seed(seed)
    labels, ranges = sample.batch["labels"], sample.batch["teacher_ranges"]
    shape, teacher_tokens = labels.shape, sum(sample.batch["teacher_widths"])
    mapped = (ranges.reshape(len(labels), -1, shape[1], 2)[..., 0] >= 0).all(1)
    return TokenGuidance(
        student_loss_BS=torch.rand(shape, generator=generator),
        teacher_loss_BS=torch.rand(shape, generator=generator),
        valid_BS=labels != IGNORED_LABEL,
        mapped_BS=mapped,
        weight_BS=(torch.rand(shape, generator=generator) < 0.5).float(),
        teacher_loss_BT=torch.rand(len(labels), teacher_tokens, generator=generator),
    )


def views_of(sample: Sample, guidance: TokenGuidance) -> list[list[TextView]]:
    """The views, by row."""
    views = iter(sample.views(guidance))
    return [[next(views) for _ in row] for row in sample.segments]


def shown(view: Any) -> str:
    return "".join(token.text for token in view.tokens if token.start < token.end)


def test_view_equals_brute_force(training_texts: list[str], readers: tuple[Reader, Reader]) -> None:
    texts = [text[:60] for text in training_texts[:12]] + ["9", training_texts[1] * 3]
    sample = sample_of(texts, *readers)
    guidance = guidance_of(sample)
    assert max(map(len, sample.segments)) > 1
    documents = []
    for row, views in enumerate(views_of(sample, guidance)):
        at = teacher_at = 0
        for view in views:
            documents.append(view.document)
            assert view.text == texts[view.document][view.start : view.start + len(view.text)]
            text, start = texts[view.document], view.start
            found = tokens_between(readers[1].tokenizer, text, start, start + len(view.text))
            theirs = found.spans.tolist()
            for position, token in enumerate(view.tokens, at):
                behind = [
                    (view.text[a:b], guidance.teacher_loss_BT[row, place].item())
                    for place, (a, b) in enumerate(theirs, teacher_at + 1)
                    if a < token.end and b > token.start
                ]
                assert list(token.pieces) == behind
                if token.status in ("kept", "dropped"):
                    assert token.teacher_loss_nats == guidance.teacher_loss_BS[row, position].item()
                if token.status != "unlabelled":
                    assert token.student_loss_nats == guidance.student_loss_BS[row, position].item()
                assert token.weight == guidance.weight_BS[row, position]
            at, teacher_at = at + len(view.tokens), teacher_at + 1 + len(theirs)
    assert sorted(set(documents)) == list(range(len(texts)))
    assert len(documents) > len(texts), "no text was cut"


def test_view_shows_every_character_once(
    fuzz_texts: Callable[..., list[str]], readers: tuple[Reader, Reader]
) -> None:
    texts = [text for text in fuzz_texts(60, seed=5) if text.strip()]
    sample = sample_of(texts, *readers)
    found = dict.fromkeys(range(len(texts)), "")
    views = sample.views(guidance_of(sample))
    for view in sorted(views, key=lambda view: (view.document, view.start)):
        assert shown(view) == view.text
        found[view.document] += view.text
    read = {number: text for number, text in found.items() if text}
    assert read == {number: texts[number] for number in read}
    assert len(read) > 45


def test_special_tokens_are_named_and_have_a_status(readers: tuple[Reader, Reader]) -> None:
    sample = sample_of(["The answer"], *readers)
    guidance = guidance_of(sample)
    ((view,),) = views_of(sample, guidance)
    first, last = view.tokens[0], view.tokens[-1]
    assert (first.text, first.status, first.student_loss_nats) == ("<s>", "unlabelled", None)
    assert (last.text, last.status, last.teacher_loss_nats) == ("</s>", "unmapped", None)
    assert (last.start, last.end) == (10, 10)
    assert first.is_special
    assert not view.tokens[1].is_special
    # A token with half a weight is kept.
    trained = guidance._replace(weight_BS=torch.full_like(guidance.weight_BS, 0.5))
    ((view,),) = views_of(sample, trained)
    assert view.tokens[-1].weight
    assert {token.status for token in view.tokens[1:-1]} == {"kept"}


def test_tokens_share_a_character(readers: tuple[Reader, Reader]) -> None:
    sample = sample_of(["a 🧮!"], *readers)
    ((view,),) = views_of(sample, guidance_of(sample))
    sharing = [token for token in view.tokens if view.text[token.start : token.end] == "🧮"]
    assert len(sharing) == 4
    assert [token.text for token in sharing] == ["🧮", "", "", ""]
    assert all(token.pieces and "🧮" in token.pieces[0][0] for token in sharing)


def test_pieces_are_the_first_teachers(
    tokenizers_by_family: dict[str, Any], readers: tuple[Reader, Reader]
) -> None:
    other = teacher_reader(tokenizers_by_family["byte_level"], TEACHER_CONTEXT)
    texts = ["Anna has 12 apples.", "x_1 = 2025"]
    alone = sample_of(texts, *readers)
    both = sample_of(texts, readers[0], TeacherReaders((readers[1], other)))
    pieces = [
        [[text for text, _ in t.pieces] for view in row for t in view.tokens]
        for sample in (alone, both)
        for row in views_of(sample, guidance_of(sample))
    ]
    assert pieces[0] == pieces[1]
    guidance = guidance_of(both)
    (views,) = views_of(both, guidance)
    place = 1
    for view in views:
        # They follow the loss of a start token.
        losses = list({id(p): p[1] for token in view.tokens for p in token.pieces}.values())
        assert losses == guidance.teacher_loss_BT[0, place : place + len(losses)].tolist()
        place += len(losses) + 1


def test_stored_losses_have_pieces(readers: tuple[Reader, Reader], tmp_path: Path) -> None:
    """A store has no tokenizer, but the spans of its tokens."""
    text = "The answer is 12."
    stored = random_store(tmp_path / "store", [text], readers[1].tokenizer)
    views = []
    for guide in (readers[1], StoredReader([stored])):
        sample = sample_of([text], readers[0], guide)
        views += views_of(sample, guidance_of(sample))[0]
    online, offline = ([[text for text, _ in t.pieces] for t in view.tokens] for view in views)
    assert online == offline != [[] for _ in online]


def test_teacher_tokens_without_a_label_are_not_scored(readers: tuple[Reader, Reader]) -> None:
    sample = sample_of(["The answer is 12."], *readers)
    sample.batch["teacher_labels"][0, 1] = IGNORED_LABEL
    ((view,),) = views_of(sample, guidance_of(sample))
    losses = [loss for token in view.tokens for _, loss in token.pieces]
    assert math.isnan(losses[0])
    assert all(map(math.isfinite, losses[1:]))


def test_mark_without_a_space_is_a_token_of_its_own(readers: tuple[Reader, Reader]) -> None:
    sample = sample_of(["数 a"], *readers)
    ((view,),) = views_of(sample, guidance_of(sample))
    _, mark, number, *_ = view.tokens
    assert (mark.text, mark.is_special, mark.student_loss_nats is None) == ("▁", True, False)
    assert (number.text, number.start, number.end) == ("数", 0, 1)
    assert mark.pieces == number.pieces != ()
    assert shown(view) == "数 a"


def test_pieces_follow_a_document_without_a_teacher(
    readers: tuple[Reader, Reader], tmp_path: Path
) -> None:
    texts = ["Anna has 12 apples.", "x_1 = 2025"]
    stored = random_store(tmp_path / "store", texts[1:], readers[1].tokenizer)
    sample = sample_of(texts, readers[0], StoredReader([stored], plain=True))
    losses_BT = sample.batch["teacher_losses"]
    (views,) = views_of(sample, guidance_of(sample)._replace(teacher_loss_BT=losses_BT))
    document = stored.document(texts[1])
    assert document is not None
    pieces = [
        list({id(piece): piece[1] for token in view.tokens for piece in token.pieces}.values())
        for view in views
    ]
    assert pieces == [[], document.losses.tolist()]


# The command.


@pytest.fixture(scope="module")
def models(
    tiny_llama: Callable[..., Any],
    tokenizer_dirs: dict[str, Path],
    tokenizers_by_family: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, str]:
    """Directories of a student and a teacher, whose losses are far from uniform."""
    root = tmp_path_factory.mktemp("models")
    for seed, (role, family) in enumerate((("student", "metaspace"), ("teacher", "nfc_digits"))):
        tokenizer = tokenizers_by_family[family]
        model = tiny_llama(len(tokenizer), seed=seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(5)
        model.save_pretrained(root / role)
        tokenizer.save_pretrained(root / role)
    return {role: str(root / role) for role in ("student", "teacher")}


def excess(token: Any) -> float:
    return float(token.student_loss_nats - token.teacher_loss_nats)


def options(models: dict[str, str], *options: str) -> list[str]:
    return ["--student", models["student"], "--teacher", models["teacher"], *options]


def look(models: dict[str, str], *given: str) -> tuple[TextView, ...]:
    return inspect.build_view(inspect._parse(options(models, *given))).texts


def test_command_shows_losses_of_the_models(
    models: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "Anna has 12 apples.\nThe sum of the solutions is 2025."
    out = tmp_path / "new"
    assert inspect.main(options(models, "--text", text, "--output_dir", str(out))) == 0
    assert "kept" in capsys.readouterr().out
    assert (out / "guidance.html").exists()
    # A page of another program stays.
    (out / "guidance.html").rename(tmp_path / "guidance.html")
    assert inspect.main(options(models, "--text", text, "--output_dir", str(tmp_path))) == 2
    assert "which vocagnolm inspect did not write there" in capsys.readouterr().err
    (view,) = look(models, "--text", text)
    assert shown(view) == text
    # Losses of both models, from their logits.
    for role, tokens in (("student", view.tokens), ("teacher", view.tokens)):
        model = AutoModelForCausalLM.from_pretrained(models[role])
        tokenizer = load_tokenizer(models[role], role)
        reader = (student_reader if role == "student" else teacher_reader)(tokenizer, 128)
        ids = torch.tensor([[reader.start, *encode(tokenizer, text).ids.tolist()]])
        losses = F.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none").tolist()
        if role == "student":
            found = [token.student_loss_nats for token in tokens[1:-1]]
        else:
            found = list({id(p): p[1] for t in tokens for p in t.pieces}.values())
        assert found == pytest.approx(losses, abs=1e-4)
    mapped = [token for token in view.tokens if token.status in ("kept", "dropped")]
    kept = [token for token in mapped if token.status == "kept"]
    assert len(kept) == math.ceil(0.4 * len(mapped))
    worst = min(map(excess, kept))
    assert all(excess(token) <= worst for token in mapped if token.status == "dropped")
    for token in mapped:
        assert token.teacher_loss_nats == max(loss for _, loss in token.pieces)


def test_command_obeys_settings_when_they_are_given(models: dict[str, str]) -> None:
    given = ("--top_k", "0.2", "--aggregation", "mean", "--unmapped", "exclude")
    (text,) = look(models, "--text", "The answer is 12.", *given)
    mapped = [token for token in text.tokens if token.teacher_loss_nats is not None]
    assert sum(t.status == "kept" for t in mapped) == math.ceil(0.2 * len(mapped))
    for token in mapped:
        losses = [loss for _, loss in token.pieces]
        assert token.teacher_loss_nats == pytest.approx(sum(losses) / len(losses), abs=1e-5)
    assert not text.tokens[-1].weight


def test_command_shares_losses_out(models: dict[str, str]) -> None:
    (text,) = look(models, "--text", "The answer is 12.", "--aggregation", "share")
    losses = {id(piece): piece[1] for token in text.tokens for piece in token.pieces}
    shared = sum(token.teacher_loss_nats or 0.0 for token in text.tokens)
    assert shared == pytest.approx(sum(losses.values()), abs=1e-4)


def test_command_cuts_a_text(models: dict[str, str]) -> None:
    text = "one two\r\nthree " * 40
    views = look(models, "--text", text, "--max_length", "32")
    assert len(views) > 2
    assert "".join(map(shown, views)) == text
    for view in views:
        mapped = [t for t in view.tokens if t.status in ("kept", "dropped")]
        assert sum(t.status == "kept" for t in mapped) == math.ceil(0.4 * len(mapped))


def test_command_takes_no_length_that_exceeds_a_context(models: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="exceeds the student's context of 128"):
        look(models, "--text", "one", "--max_length", "256")


def test_command_rounds_the_teacher_alone(models: dict[str, str]) -> None:
    losses = []
    for dtype in ("float32", "bfloat16"):
        (view,) = look(models, "--text", "The answer is 12.", "--dtype", dtype)
        losses.append([(t.student_loss_nats, t.teacher_loss_nats) for t in view.tokens[1:-1]])
    for exact, rounded in zip(*losses, strict=True):
        assert exact[0] == rounded[0]
    assert losses[0] != losses[1]


def test_command_shows_the_documents_asked_for(
    models: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "pages.jsonl"
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in ("one", "", "three", "four")))

    def documents(*given: str) -> list[tuple[int, str]]:
        return [(t.document, t.text) for t in look(models, "--dataset", str(path), *given)]

    assert documents() == [(0, "one")]
    assert documents("--document", "3", "1", "2") == [(3, "four"), (2, "three")]
    # An option with its default value counts as left out.
    assert look(models, "--text", "one", "--document", "0", "--train_on", "completions")
    assert "document 1 cannot be shown: empty" in caplog.text


@pytest.mark.parametrize(
    ("option", "source"),
    [
        ("--document 7", "--text x"),
        ("--dataset_split test", "--text x"),
        ("--text_column body", "--text x"),
        ("--train_on all", "--text x"),
        ("--student_chat_template plain", "--text x"),
        ("--teacher_chat_template plain", "--text x"),
        ("--top_k 0.2", "--text x --selection accept"),
        ("--aggregation mean", "--text x --selection accept"),
        ("--unmapped exclude", "--text x --selection accept"),
        ("--document -1", "--dataset pages.jsonl"),
        ("--document 4", "--dataset pages.jsonl"),
        ("--max_length 0", "--text x"),
    ],
)
def test_option_is_refused_when_it_has_no_effect(
    option: str,
    source: str,
    models: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pages.jsonl").write_text('{"text": "one"}\n' * 4)
    with pytest.raises(ValueError, match=f"^(--)?{option.split()[0].strip('-')} "):
        look(models, *source.split(), *option.split())


def test_command_stops_when_losses_are_not_finite(
    models: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(models["teacher"])
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(math.nan)
    model.save_pretrained(tmp_path)
    teacher = ("--teacher", str(tmp_path), "--teacher_tokenizer", models["teacher"])
    assert inspect.main(options(models, "--text", "x", *teacher)) == 3
    assert "NaN or infinite" in capsys.readouterr().err
