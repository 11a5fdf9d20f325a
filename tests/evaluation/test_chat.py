"""Zero-shot in a model's chat template: prompts, ends, verdicts, and the mark on every output."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer
from transformers import PreTrainedTokenizerBase as Tokenizer

from vocagnolm.chat.formats import Conversation
from vocagnolm.chat.render import Rendered
from vocagnolm.evaluation.engines.generation import Chat
from vocagnolm.evaluation.tasks.benchmarks import BENCHMARKS, INSTRUCTION
from vocagnolm.readers import template_of

# With its own start token, today's date, and white space before the end of a turn.
TEMPLATE = (
    "{{ bos_token }}{% if not date_string is defined %}{{ strftime_now('%d') }}{% endif %}"
    "{{ date_string }} {% for m in messages %}[{{ m.role }}] {{ m.content }} {{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def test_prompt_is_the_users_turn_with_the_instruction(student_tokenizer: Tokenizer) -> None:
    chat, benchmark = Chat(student_tokenizer, TEMPLATE), BENCHMARKS["gsm8k"].in_chat()
    asked = chat.prompt(benchmark.template.replace("{question}", "1 + 1?"))
    eos = student_tokenizer.eos_token
    turn = f"[user] 1 + 1?\n{INSTRUCTION} {eos}[assistant]"
    assert asked == f"{student_tokenizer.bos_token}26 Jul 2024 {turn}"
    assert chat.end_ids == {student_tokenizer.eos_token_id}
    assert (benchmark.shots, benchmark.prompt_set, benchmark.stops) == (0, None, ())


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
