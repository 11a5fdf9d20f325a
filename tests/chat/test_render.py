"""Contents found in rendered text, and templates that cannot be followed."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest
from chat_templates import chat_tokenizer, turns

from vocagnolm.chat.formats import Conversation, conversation
from vocagnolm.chat.render import DATE, Rendered, Template, check_date
from vocagnolm.fields import OptionError
from vocagnolm.readers import template_of

TOKENS = (("bos_token", "<s>"), ("eos_token", "</s>"))


def template(source: str) -> Template:
    return Template(source, TOKENS, "student")


LOOP = "{% for m in messages %}"
ONE = "<{{ m.content }}>{% endfor %}"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (f"{LOOP}<{{{{ m.content | replace('a', 'b') }}}}>{{% endfor %}}", "changes a message"),
        (f"{LOOP}<{{{{ m.content | tojson }}}}>{{% endfor %}}", "changes a message"),
        (f"{LOOP}{{{{ m.content | length }}}}{ONE}", "changes a message"),
        (f"{LOOP}{{% if m.role == 'user' %}}<{{{{ m.content }}}}>{{% endif %}}{{% endfor %}}",
         "every message once"),
        (f"{LOOP}{{{{ m.content }}}}{ONE}", "every message once"),
        ("{% for m in messages | reverse %}" + ONE, "every message once"),
        ("{{ raise_exception('no way') }}", "refuses it: no way"),
        ("{{ messages + 1 }}", "refuses it: can only concatenate"),
    ],
)  # fmt: skip
def test_template_that_cannot_be_followed_has_a_reason(source: str, reason: str) -> None:
    found = template(source).render(turns("a", 'say "b"'))
    assert reason in str(found)


def test_date_is_fixed_or_the_template_rejected() -> None:
    dated = "{% if date_string is defined %}{{ date_string }}{% endif %}" + LOOP + ONE
    found = template(dated).render(turns("a", "b"))
    assert isinstance(found, Rendered)
    assert found.text == "26 Jul 2024<a><b>"
    assert str(datetime.now().year) not in found.text
    with pytest.raises(ValueError, match="writes today's date"):
        check_date("{{ strftime_now('%Y') }}" + LOOP + ONE, "--student_chat_template")
    check_date(dated + "{{ strftime_now }}", "--student_chat_template")


def test_template_is_kept_as_json() -> None:
    own = template_of(chat_tokenizer("llama-3-8b"), "teacher")
    assert own is not None
    assert Template.of_json(own.as_json()) == own


def test_names_tools_and_options_are_shown_as_the_tokenizer_does() -> None:
    tokenizer = chat_tokenizer("tinyllama")
    form = "{% for m in messages %}<{{ m.name | default('-') }}: {{ m.content }}>{% endfor %}"
    tokenizer.chat_template = "{{ tools | tojson if thinks }}{{ eos_token ~ date_string }}" + form
    messages = [
        {"role": "user", "content": "<Ann: q>", "name": "Ann"},
        {"role": "assistant", "content": "a"},
    ]
    own, tools = template_of(tokenizer, "student"), [{"type": "function"}]
    assert own is not None
    given = {"eos_token": "<E>", "date_string": "today"}
    for options in ({"thinks": True}, {"thinks": False, **given}):
        asked = conversation(messages, {"tools": tools, **options})
        assert isinstance(asked, Conversation)
        found = own.render(asked)
        assert isinstance(found, Rendered)
        known = {"date_string": DATE, **options}
        expected = tokenizer.apply_chat_template(messages, tools, tokenize=False, **known)
        assert found.text == expected
        shown = [found.text[first:last] for first, last in found.places]
        assert shown == ["<Ann: q>", "a"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("plain", "<s>User: q\n\nAssistant: a</s>"),
        ("chatml", "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"),
        ("own.jinja", "<q><a>"),
    ],
)
def test_given_template_is_built_in_or_a_file(given: str, expected: str, tmp_path: Path) -> None:
    tokenizer = chat_tokenizer("tinyllama")
    (tmp_path / "own.jinja").write_text(LOOP + ONE)
    path = str(tmp_path / given) if given.endswith("jinja") else given
    found = template_of(tokenizer, "student", path)
    assert found is not None
    rendered = found.render(turns("q", "a"))
    assert isinstance(rendered, Rendered)
    assert rendered.text == expected


def test_missing_template_is_none_and_a_wrong_name_an_error() -> None:
    tokenizer = chat_tokenizer("tinyllama")
    tokenizer.chat_template = None
    assert template_of(tokenizer, "student") is None
    with pytest.raises(OptionError, match=r"^teacher_chat_template plian"):
        template_of(tokenizer, "teacher", "plian")
