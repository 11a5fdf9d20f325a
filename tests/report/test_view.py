"""The guidance view against brute force, and the command that makes it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import methods_world
import pytest
import torch
from tokenizer_stubs import tokens_between
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from world import MAX_LENGTH, Tokenizers, World, make_segments, write_pages

from vocagnolm.collator import PackedCollator
from vocagnolm.conventions import IGNORED_LABEL
from vocagnolm.guidance import TokenGuidance
from vocagnolm.packing import as_block
from vocagnolm.readers import student_reader, teacher_reader
from vocagnolm.report import inspect
from vocagnolm.report.view import TextView, view_tokens
from vocagnolm.spans import encode
from vocagnolm.tokenizer import load_tokenizer


def views_of(
    texts: list[str], tokenizers: Tokenizers
) -> list[tuple[TextView, TokenGuidance, torch.Tensor]]:
    """All segments of some texts, with random losses and weights of the corpus.

    Each teacher's second token is unscored.
    """
    rows = make_segments(texts, *tokenizers).rows
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
        batch["weights"] = 4 * torch.rand(shape, generator=generator)
        document, start = segment["document"], segment["start"]
        text = texts[document][start : segment["end"]]
        tokens = view_tokens(segment, text, tokenizers[0], batch, guidance)
        view = TextView(text, document, start, tuple(tokens))
        views.append((view, guidance, batch["weights"]))
    return views


def view_of(text: str, tokenizers: Tokenizers) -> TextView:
    ((view, *_),) = views_of([text], tokenizers)
    return view


def shown(view: TextView) -> str:
    return "".join(token.text for token in view.tokens if token.start < token.end)


def test_view_equals_brute_force(training_texts: list[str], tokenizers: Tokenizers) -> None:
    texts = [text[:60] for text in training_texts[:12]] + ["9", training_texts[1] * 3]
    seen = views_of(texts, tokenizers)
    assert len(seen) > len(texts), "no text was cut"
    for view, guidance, corpus_BS in seen:
        text, start = texts[view.document], view.start
        teacher_tokens = tokens_between(tokenizers[1], text, start, start + len(view.text))
        for place, token in enumerate(view.tokens):
            pieces = []
            for teacher_place, (first, end) in enumerate(teacher_tokens.spans.tolist(), 1):
                if first < token.end and end > token.start:
                    loss = guidance.teacher_loss_BT[0, teacher_place].item()
                    # The teacher's second token was not scored.
                    pieces.append((view.text[first:end], math.nan if teacher_place == 2 else loss))
            assert repr(list(token.pieces)) == repr(pieces)
            weight = guidance.weight_BS[0, place]
            assert token.weight == weight * corpus_BS[0, place]
            if token.status in ("kept", "dropped"):
                assert (token.status == "kept") == (weight >= 0.5)
                assert token.teacher_loss_nats == guidance.teacher_loss_BS[0, place].item()
            if token.status != "unlabelled":
                assert token.student_loss_nats == guidance.student_loss_BS[0, place].item()


def test_view_shows_every_character_once(
    fuzz_texts: Callable[..., list[str]], tokenizers: Tokenizers
) -> None:
    texts = [text for text in fuzz_texts(60, seed=5) if text.strip()]
    found: dict[int, str] = {}
    for view, *_ in views_of(texts, tokenizers):
        assert shown(view) == view.text
        found[view.document] = found.get(view.document, "") + view.text
    assert found == {number: texts[number] for number in found}
    assert len(found) > 45


def test_special_tokens_are_named_and_have_a_status(tokenizers: Tokenizers) -> None:
    view = view_of("The answer", tokenizers)
    first, last = view.tokens[0], view.tokens[-1]
    assert (first.text, first.status, first.student_loss_nats) == ("<s>", "unlabelled", None)
    assert (last.text, last.status, last.teacher_loss_nats) == ("</s>", "unmapped", None)
    assert (last.start, last.end) == (10, 10)


def test_tokens_share_a_character(tokenizers: Tokenizers) -> None:
    view = view_of("a 🧮!", tokenizers)
    sharing = [token for token in view.tokens if view.text[token.start : token.end] == "🧮"]
    assert [token.text for token in sharing] == ["🧮", "", "", ""]
    assert all("🧮" in token.pieces[0][0] for token in sharing)


def test_mark_without_a_space_is_a_token_of_its_own(tokenizers: Tokenizers) -> None:
    _, mark, number, *_ = view_of("数 a", tokenizers).tokens
    assert (mark.text, mark.is_special, mark.student_loss_nats is None) == ("▁", True, False)
    assert (number.text, number.start, number.end) == ("数", 0, 1)
    assert mark.pieces == number.pieces != ()


@pytest.mark.parametrize("method", ["rho1 entropy", "several mean"])
def test_measure_chooses_what_the_trainer_chooses(
    training_texts: list[str],
    tokenizers: Tokenizers,
    tiny_llama: Callable[..., Any],
    tmp_path: Path,
    method: str,
) -> None:
    methods = methods_world.make_world(tiny_llama, tokenizers, training_texts[:20])
    trainer = methods.trainer(tmp_path, method)
    batch = trainer.data_collator([trainer.train_dataset[number] for number in range(4)])
    expected = trainer.token_guidance(batch)
    found = inspect.measure(trainer.model.train(False), trainer.token_objective, batch)
    assert all(map(torch.equal, found, expected))
    assert 0 < found.weight_BS.sum() < found.valid_BS.sum()


# The command.


def options(world: World, *given: str) -> list[str]:
    return ["--student", str(world.student), "--teacher", str(world.teacher), *given]


def look(world: World, *given: str) -> tuple[TextView, ...]:
    return inspect.build_view(inspect._parse(options(world, *given))).texts


def test_command_shows_losses_of_the_models(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "Anna has 12 apples.\nThe sum of the solutions is 2025."
    out = tmp_path / "new"
    assert inspect.main(options(world, "--text", text, "--output_dir", str(out))) == 0
    assert "kept" in capsys.readouterr().out
    assert (out / "guidance.html").exists()
    (view,) = look(world, "--text", text)
    assert shown(view) == text
    pieces = {id(piece): piece for token in view.tokens for piece in token.pieces}
    student_losses = [token.student_loss_nats for token in view.tokens[1:-1]]
    teacher_losses = [loss for _, loss in pieces.values()]
    # Losses of both models, from their logits.
    for model_dir, make_reader, found in (
        (world.student, student_reader, student_losses),
        (world.teacher, teacher_reader, teacher_losses),
    ):
        model = AutoModelForCausalLM.from_pretrained(model_dir)
        tokenizer = load_tokenizer(str(model_dir), "student")
        ids = [make_reader(tokenizer, 128).start, *encode(tokenizer, text).ids.tolist()]
        logits = model(torch.tensor([ids])).logits[0, :-1]
        losses = F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none").tolist()
        assert found == pytest.approx(losses, abs=1e-4)
    mapped = [token for token in view.tokens if token.status in ("kept", "dropped")]
    by_excess = sorted(mapped, key=lambda token: token.excess_nats or 0.0)
    dropped = len(mapped) - math.ceil(0.4 * len(mapped))
    assert [token.status for token in by_excess[:dropped]] == ["dropped"] * dropped
    assert {token.status for token in by_excess[dropped:]} == {"kept"}
    for token in mapped:
        assert token.teacher_loss_nats == max(loss for _, loss in token.pieces)


def test_command_obeys_settings_when_they_are_given(world: World) -> None:
    given = ("--top_k", "0.2", "--aggregation", "mean", "--unmapped", "exclude")
    (text,) = look(world, "--text", "The answer is 12.", *given)
    mapped = [token for token in text.tokens if token.teacher_loss_nats is not None]
    assert sum(t.status == "kept" for t in mapped) == math.ceil(0.2 * len(mapped))
    for token in mapped:
        losses = [loss for _, loss in token.pieces]
        assert token.teacher_loss_nats == pytest.approx(sum(losses) / len(losses), abs=1e-5)
    assert not text.tokens[-1].weight


def test_command_rounds_the_teacher_alone(world: World) -> None:
    losses = []
    for dtype in ("float32", "bfloat16"):
        (view,) = look(world, "--text", "The answer is 12.", "--dtype", dtype)
        losses.append([(t.student_loss_nats, t.teacher_loss_nats) for t in view.tokens[1:-1]])
    exact, rounded = losses
    assert [student for student, _ in exact] == [student for student, _ in rounded]
    assert exact != rounded


def test_command_shows_the_documents_asked_for(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_pages(tmp_path / "pages.jsonl", ["one", "", "three", "four"])
    dataset = ("--dataset", str(tmp_path / "pages.jsonl"))
    (first,) = look(world, *dataset)
    assert (first.document, first.text) == (0, "one")
    several = look(world, *dataset, "--document", "3", "1", "2")
    assert [(view.document, view.text) for view in several] == [(3, "four"), (2, "three")]
    assert "document 1 cannot be shown" in caplog.text
    # An option with its default value counts as left out.
    assert look(world, "--text", "one", "--document", "0", "--train_on", "completions")


def test_command_stops_when_losses_are_not_finite(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(world.teacher)
    torch.nn.init.constant_(model.model.embed_tokens.weight, math.nan)
    model.save_pretrained(tmp_path)
    teacher = ("--teacher", str(tmp_path), "--teacher_tokenizer", str(world.teacher))
    assert inspect.main(options(world, "--text", "x", *teacher)) == 3
    assert "NaN or infinite" in capsys.readouterr().err
