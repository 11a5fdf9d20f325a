"""Zero-shot in a model's chat template: prompts, ends, verdicts, and the mark on every output."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from huggingface_hub import ModelCard
from inline_grader import graded_inline
from transformers import AutoTokenizer
from transformers import PreTrainedTokenizerBase as Tokenizer

from vocagnolm.chat.formats import Conversation
from vocagnolm.chat.render import Rendered
from vocagnolm.evaluation import evaluate as evaluate_math
from vocagnolm.evaluation import runner
from vocagnolm.evaluation.engines.generation import Chat
from vocagnolm.evaluation.tasks.benchmarks import BENCHMARKS, INSTRUCTION
from vocagnolm.readers import template_of

# With its own start token, today's date, and white space before the end of a turn.
TEMPLATE = (
    "{{ bos_token }}{% if not date_string is defined %}{{ strftime_now('%d') }}{% endif %}"
    "{{ date_string }} {% for m in messages %}[{{ m.role }}] {{ m.content }} {{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
ITEMS = [{"question": f"Ben has {n} + 1 hens?", "answer": f"So #### {n + 1}"} for n in range(5)]


@pytest.fixture
def argv(
    tiny_llama: Callable[..., Any],
    student_tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[list[str]]:
    """A command line that asks a model without a template five questions of GSM8K."""
    model = tmp_path / "model"
    tiny_llama(len(student_tokenizer), initializer_range=0.5).save_pretrained(model)
    student_tokenizer.save_pretrained(model)
    (tmp_path / "data" / "gsm8k").mkdir(parents=True)
    lines = (json.dumps(item) + "\n" for item in ITEMS)
    (tmp_path / "data" / "gsm8k" / "test.jsonl").write_text("".join(lines))
    few = dataclasses.replace(BENCHMARKS["gsm8k"], item_count=len(ITEMS))
    monkeypatch.setattr(evaluate_math, "BENCHMARKS", MappingProxyType({**BENCHMARKS, "gsm8k": few}))
    options = ["--model", str(model), "--benchmarks", "gsm8k", "--batch_size", "4"]
    with graded_inline(runner):
        yield [*options, "--data_dir", str(tmp_path / "data")]


@pytest.fixture
def chat_argv(argv: list[str], tmp_path: Path) -> list[str]:
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "model")
    return [*argv, "--chat"]


def test_prompt_is_the_users_turn_with_the_instruction(student_tokenizer: Tokenizer) -> None:
    chat, benchmark = Chat(student_tokenizer, TEMPLATE), BENCHMARKS["gsm8k"].in_chat()
    asked = chat.prompt(benchmark.template.replace("{question}", "1 + 1?"))
    eos = student_tokenizer.eos_token
    turn = f"[user] 1 + 1?\n{INSTRUCTION} {eos}[assistant]"
    assert asked == f"{student_tokenizer.bos_token}26 Jul 2024 {turn}"
    assert chat.end_ids == {student_tokenizer.eos_token_id}
    assert (benchmark.shots, benchmark.prompt_set, benchmark.stops) == (0, None, ())


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("hello", "question"),
        ("{% if false %}x{% endif %}", "question"),
        ("{{ raise_exception('system first') }}", "system first"),
        ("{% for m in messages %}", "template: "),
    ],
)
def test_template_that_cannot_ask_is_told(
    template: str, message: str, student_tokenizer: Tokenizer
) -> None:
    with pytest.raises(ValueError, match=f"chat .*{message}"):
        Chat(student_tokenizer, template)


@pytest.mark.parametrize("name", ["plain", "chatml"])
def test_built_in_templates_ask_as_they_are_trained(
    name: str, student_tokenizer: Tokenizer
) -> None:
    template = template_of(student_tokenizer, "student", name)
    assert template is not None
    asked = Chat(student_tokenizer, template.source).prompt("1 + 1?")
    found = template.render(Conversation("1 + 1?\n2", ("user", "assistant"), (6, 8)))
    assert isinstance(found, Rendered)
    assert found.text[: found.places[1, 0]].rstrip(" ") == asked


@pytest.mark.parametrize(
    ("behind", "ends"), [("<|turn|>\n", ["<|turn|>"]), ("\n\nUser:", []), ("", [])]
)
def test_turn_ends_with_the_templates_special_token(
    tokenizer_dirs: dict[str, Path], behind: str, ends: list[str]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dirs["nfc_digits"])
    tokenizer.add_tokens(["<|turn|>"], special_tokens=True)
    source = "{% for m in messages %}{{ m.content }}" + behind + "{% endfor %}"
    source += "{% if add_generation_prompt %}<|turn|>{% endif %}"
    assert Chat(tokenizer, source).end_ids == set(tokenizer.convert_tokens_to_ids(ends))


def test_every_output_is_marked_and_resumes(
    chat_argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "model" / "evaluation-chat"
    assert evaluate_math.main(chat_argv) == 0
    mark = "protocol: zero-shot chat, not the paper's few-shot"
    said = capsys.readouterr().out
    results = json.loads((out / "results.json").read_text())
    column = results["benchmarks"]["gsm8k"]
    assert "chat" in column["marked"]
    assert results["settings"]["protocol"]["name"] == "zero-shot chat"
    for text in (said, (out / "row.md").read_text()):
        assert mark in text
        assert f"{column['rounded']:.1f}*" in text
    # Interrupted and asked again, it verifies the items by their prompts.
    lines = (out / "gsm8k.jsonl").read_text().splitlines(keepends=True)
    assert all('"protocol": "zero-shot chat"' in line for line in lines)
    (out / "gsm8k.jsonl").unlink()
    (out / "gsm8k.part0.jsonl").write_text("".join(lines[:3]))
    assert evaluate_math.main(chat_argv) == 0
    assert (out / "gsm8k.jsonl").read_text().splitlines(keepends=True) == lines


def test_card_has_the_papers_protocol(
    argv: list[str], chat_argv: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "model" / "README.md"
    tags = "tags: [vocagnolm, 'arxiv:2503.19123']"
    ModelCard(f"---\n{tags}\n---\nA student.\n\n## Evaluation\n\nold\n\n## Mine\n").save(path)
    (tmp_path / "gsm8k.md").write_text("Question: 1 + 1?\nAnswer: The answer is 2.")
    few_shot = [*argv, "--prompts_dir", str(tmp_path)]
    drawn = [*few_shot, "--temperature", "0.7"]
    for given in (few_shot, few_shot, chat_argv, drawn):
        assert evaluate_math.main(given) == 0
    card = ModelCard.load(path)
    assert "| GSM8K |" in card.text
    assert "zero-shot" not in card.text
    assert "sampled" not in card.text
    heads = [line for line in card.text.splitlines() if line.startswith("## ")]
    assert heads == ["## Evaluation", "## Mine"]
    assert "old" not in card.text
    assert card.text.startswith("A student.")
    # Results that go elsewhere leave the card as it is.
    before = path.read_text()
    elsewhere = [*few_shot, "--limit", "1", "--output_dir", str(tmp_path / "elsewhere")]
    assert evaluate_math.main(elsewhere) == 0
    assert path.read_text() == before
    # The card of somebody else's model does not change.
    theirs = "---\ntags: [theirs]\n---\nA model.\n"
    path.write_text(theirs)
    assert evaluate_math.main(few_shot) == 0
    assert path.read_text() == theirs


def test_chat_needs_a_template(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate_math.main([*argv, "--chat"]) == 2
    assert "--chat needs a chat template" in capsys.readouterr().err
