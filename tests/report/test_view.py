"""The guidance view against brute force, and the command that makes it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pytest
import torch
from tokenizer_stubs import tokens_between
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase
from world import MAX_LENGTH, TEACHER_CONTEXT

from vocagnolm.collator import PackedCollator
from vocagnolm.conventions import IGNORED_LABEL
from vocagnolm.data import align_corpus
from vocagnolm.guidance import TokenGuidance
from vocagnolm.packing import as_block
from vocagnolm.readers import Reader, student_reader, teacher_reader
from vocagnolm.report import inspect
from vocagnolm.report.view import TextView, view_tokens
from vocagnolm.spans import encode
from vocagnolm.tokenizer import load_tokenizer


@pytest.fixture
def readers(
    student_tokenizer: PreTrainedTokenizerBase, teacher_tokenizer: PreTrainedTokenizerBase
) -> tuple[Reader, Reader]:
    return (
        student_reader(student_tokenizer, MAX_LENGTH),
        teacher_reader(teacher_tokenizer, TEACHER_CONTEXT),
    )


class Seen(NamedTuple):
    """A segment's view, and the losses and weights that it was made from."""

    view: TextView
    guidance: TokenGuidance


def views_of(texts: list[str], readers: tuple[Reader, Reader]) -> list[Seen]:
    """All segments of some texts, with random losses; each teacher's second token is unscored."""
    rows = align_corpus(datasets.Dataset.from_dict({"text": texts}), *readers).rows
    arrays = rows.with_format("numpy")
    generator = torch.Generator().manual_seed(0)
    views = []
    for place, segment in enumerate(rows):
        batch = PackedCollator(MAX_LENGTH)([as_block(place, arrays[place : place + 1])])
        shape = batch["labels"].shape
        teacher_tokens = sum(batch["teacher_widths"])
        batch["teacher_labels"][0, 2:3] = IGNORED_LABEL
        guidance = TokenGuidance(
            student_loss_BS=torch.rand(shape, generator=generator),
            teacher_loss_BS=torch.rand(shape, generator=generator),
            valid_BS=batch["labels"] != IGNORED_LABEL,
            mapped_BS=batch["teacher_ranges"].reshape(1, -1, shape[1], 2)[:, 0, :, 0] >= 0,
            weight_BS=torch.rand(shape, generator=generator),
            teacher_loss_BT=torch.rand(1, teacher_tokens, generator=generator),
        )
        document, start = segment["document"], segment["start"]
        text = texts[document][start : segment["end"]]
        tokens = view_tokens(segment, text, readers[0].tokenizer, batch, guidance)
        views.append(Seen(TextView(text, document, start, tuple(tokens)), guidance))
    return views


def view_of(text: str, readers: tuple[Reader, Reader]) -> TextView:
    ((view, _),) = views_of([text], readers)
    return view


def shown(view: Any) -> str:
    return "".join(token.text for token in view.tokens if token.start < token.end)


def test_view_equals_brute_force(training_texts: list[str], readers: tuple[Reader, Reader]) -> None:
    texts = [text[:60] for text in training_texts[:12]] + ["9", training_texts[1] * 3]
    seen = views_of(texts, readers)
    assert len(seen) > len(texts), "no text was cut"
    for view, guidance in seen:
        text, start = texts[view.document], view.start
        teacher_tokens = tokens_between(readers[1].tokenizer, text, start, start + len(view.text))
        for place, token in enumerate(view.tokens):
            pieces = []
            for teacher_place, (first, end) in enumerate(teacher_tokens.spans.tolist(), 1):
                if first < token.end and end > token.start:
                    loss = guidance.teacher_loss_BT[0, teacher_place].item()
                    # The teacher's second token was not scored.
                    pieces.append((view.text[first:end], math.nan if teacher_place == 2 else loss))
            assert repr(list(token.pieces)) == repr(pieces)
            assert token.weight == guidance.weight_BS[0, place]
            if token.status in ("kept", "dropped"):
                assert (token.status == "kept") == (token.weight >= 0.5)
                assert token.teacher_loss_nats == guidance.teacher_loss_BS[0, place].item()
            if token.status != "unlabelled":
                assert token.student_loss_nats == guidance.student_loss_BS[0, place].item()


def test_view_shows_every_character_once(
    fuzz_texts: Callable[..., list[str]], readers: tuple[Reader, Reader]
) -> None:
    texts = [text for text in fuzz_texts(60, seed=5) if text.strip()]
    found = dict.fromkeys(range(len(texts)), "")
    for view, _ in views_of(texts, readers):
        assert shown(view) == view.text
        found[view.document] += view.text
    read = {number: text for number, text in found.items() if text}
    assert read == {number: texts[number] for number in read}
    assert len(read) > 45


def test_special_tokens_are_named_and_have_a_status(readers: tuple[Reader, Reader]) -> None:
    view = view_of("The answer", readers)
    first, last = view.tokens[0], view.tokens[-1]
    assert (first.text, first.status, first.student_loss_nats) == ("<s>", "unlabelled", None)
    assert (last.text, last.status, last.teacher_loss_nats) == ("</s>", "unmapped", None)
    assert (last.start, last.end) == (10, 10)


def test_tokens_share_a_character(readers: tuple[Reader, Reader]) -> None:
    view = view_of("a 🧮!", readers)
    sharing = [token for token in view.tokens if view.text[token.start : token.end] == "🧮"]
    assert [token.text for token in sharing] == ["🧮", "", "", ""]
    assert all("🧮" in token.pieces[0][0] for token in sharing)


def test_mark_without_a_space_is_a_token_of_its_own(readers: tuple[Reader, Reader]) -> None:
    view = view_of("数 a", readers)
    _, mark, number, *_ = view.tokens
    assert (mark.text, mark.is_special, mark.student_loss_nats is None) == ("▁", True, False)
    assert (number.text, number.start, number.end) == ("数", 0, 1)
    assert mark.pieces == number.pieces != ()
    assert shown(view) == "数 a"


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
    (view,) = look(models, "--text", text)
    assert shown(view) == text
    pieces = {id(piece): piece for token in view.tokens for piece in token.pieces}
    student_losses = [token.student_loss_nats for token in view.tokens[1:-1]]
    teacher_losses = [loss for _, loss in pieces.values()]
    # Losses of both models, from their logits.
    for role, make_reader, found in (
        ("student", student_reader, student_losses),
        ("teacher", teacher_reader, teacher_losses),
    ):
        model = AutoModelForCausalLM.from_pretrained(models[role])
        tokenizer = load_tokenizer(models[role], role)
        ids = [make_reader(tokenizer, 128).start, *encode(tokenizer, text).ids.tolist()]
        logits = model(torch.tensor([ids])).logits[0, :-1]
        losses = F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none").tolist()
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
        ("--text_column body", "--text x"),
        ("--teacher_chat_template plain", "--text x"),
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
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pages.jsonl").write_text('{"text": "one"}\n' * 4)
    assert inspect.main(options(models, *source.split(), *option.split())) == 2
    assert f"error: {option.split()[0]} " in capsys.readouterr().err


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
