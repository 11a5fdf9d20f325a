"""The published chat templates of five families, and what each makes of a conversation.

`FORMS` is `TEMPLATES` in Python, for references that render without Jinja: pieces of text, and a
message's number in place of its content.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial

from families import tiny_tokenizers
from fuzz import FUZZ_PIECES
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from vocagnolm.chat.formats import Conversation, conversation

# Contents that look like the templates around them.
LURES = ("User: ", "\n\nAssistant: ", "<|im_end|>\n", "[/INST]", "\ue0000\ue001", "\u2002\u2003")
CONTENTS = st.lists(st.sampled_from([*FUZZ_PIECES, *LURES]), max_size=6).map("".join)
_QWEN_SYSTEM = "You are a careful helper."

TEMPLATES = {
    # ChatML, with a system prompt of its own where none is given.
    "qwen2.5": (
        "{%- if messages[0].role != 'system' -%}"
        f"{{{{- '<|im_start|>system\\n{_QWEN_SYSTEM}<|im_end|>\\n' -}}}}{{%- endif -%}}"
        "{%- for message in messages -%}{{- '<|im_start|>' + message.role + '\\n' + "
        "message.content + '<|im_end|>\\n' -}}{%- endfor -%}"
    ),
    "llama-3-8b": (
        "{%- for message in messages -%}{%- if loop.first -%}{{- bos_token -}}{%- endif -%}"
        "{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + "
        "message.content | trim + '<|eot_id|>' -}}{%- endfor -%}"
    ),
    # Turns must alternate, and there is no system prompt.
    "mistral-7b-v0.1": (
        "{{- bos_token -}}{%- for message in messages -%}"
        "{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}"
        "{{- raise_exception('Roles must alternate user/assistant/...') -}}{%- endif -%}"
        "{%- if message.role == 'user' -%}{{- '[INST] ' + message.content + ' [/INST]' -}}"
        "{%- else -%}{{- message.content + eos_token -}}{%- endif -%}{%- endfor -%}"
    ),
    "deepseek-math-7b": (
        "{{- bos_token -}}{%- for message in messages -%}"
        "{%- if message.role == 'user' -%}{{- 'User: ' + message.content + '\\n\\n' -}}"
        "{%- elif message.role == 'assistant' -%}"
        "{{- 'Assistant: ' + message.content + eos_token -}}"
        "{%- else -%}{{- message.content + '\\n\\n' -}}{%- endif -%}{%- endfor -%}"
    ),
    # Zephyr's form.
    "tinyllama": (
        "{%- for message in messages -%}"
        "{{- '<|' + message.role + '|>\\n' + message.content + eos_token + '\\n' -}}{%- endfor -%}"
    ),
}
# The text that ends an answer.
TURN_ENDS = {
    "qwen2.5": "<|im_end|>",
    "llama-3-8b": "<|eot_id|>",
    "mistral-7b-v0.1": "</s>",
    "deepseek-math-7b": "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "tinyllama": "</s>",
}


# For each family: a tiny tokenizer in place of its own, its named special tokens, and others.
_TOKENIZERS = {
    "qwen2.5": ("nfc_digits", {"eos_token": "<|im_end|>"}, ["<|im_start|>"]),
    "llama-3-8b": (
        "byte_level",
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
        ["<|start_header_id|>", "<|end_header_id|>"],
    ),
    "mistral-7b-v0.1": ("metaspace", {}, []),
    "deepseek-math-7b": (
        "byte_level",
        {
            "bos_token": "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
            "eos_token": TURN_ENDS["deepseek-math-7b"],
        },
        [],
    ),
    "tinyllama": ("prepend", {}, []),
}


def chat_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """A tiny tokenizer with the special tokens and the template of a family."""
    family, named, others = _TOKENIZERS[name]
    tokenizer = copy.deepcopy(tiny_tokenizers()[family])
    tokenizer.add_special_tokens({**named, "additional_special_tokens": others})
    tokenizer.chat_template = TEMPLATES[name]
    return tokenizer


def turns(*contents: str, system: bool = False) -> Conversation:
    """A conversation in which user and assistant take turns."""
    roles = ["system"] * system + ["user", "assistant"] * len(contents)
    pairs = zip(roles, contents, strict=False)
    found = conversation([{"role": role, "content": content} for role, content in pairs])
    assert isinstance(found, Conversation)
    return found


def _each(form: str) -> dict[str, str]:
    return {role: form.format(role) for role in ("system", "user", "assistant")}


# What begins a conversation, and what stands before and after a message of each role.
_BOS, _EOS = _TOKENIZERS["deepseek-math-7b"][1].values()
_FORMS: dict[str, tuple[str, dict[str, str], dict[str, str]]] = {
    "qwen2.5": ("", _each("<|im_start|>{}\n"), _each("<|im_end|>\n")),
    "llama-3-8b": (
        "<|begin_of_text|>",
        _each("<|start_header_id|>{}<|end_header_id|>\n\n"),
        _each("<|eot_id|>"),
    ),
    "mistral-7b-v0.1": ("<s>", {"user": "[INST] "}, {"user": " [/INST]", "assistant": "</s>"}),
    "deepseek-math-7b": (
        _BOS,
        {"user": "User: ", "assistant": "Assistant: "},
        {"user": "\n\n", "assistant": _EOS, "system": "\n\n"},
    ),
    "tinyllama": ("", _each("<|{}|>\n"), _each("</s>\n")),
}


def _form(name: str, roles: Sequence[str]) -> list[str | int]:
    begin, before, after = _FORMS[name]
    if name == "qwen2.5" and roles[0] != "system":
        begin = f"<|im_start|>system\n{_QWEN_SYSTEM}<|im_end|>\n"
    pieces: list[str | int] = [begin]
    for number, role in enumerate(roles):
        pieces += [before.get(role, ""), number, after[role]]
    return [piece for piece in pieces if piece != ""]


FORMS: dict[str, Callable[[Sequence[str]], list[str | int]]] = {
    name: partial(_form, name) for name in _FORMS
}
TRIMS = ("llama-3-8b",)
