"""The published chat templates of five families, and what each makes of a conversation.

`FORMS` is `TEMPLATES` in Python, for references that render without Jinja: pieces of text, and a
message's number in place of its content.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

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


def _qwen(roles: Sequence[str]) -> list[str | int]:
    own = f"<|im_start|>system\n{_QWEN_SYSTEM}<|im_end|>\n"
    pieces: list[str | int] = [] if roles[0] == "system" else [own]
    for number, role in enumerate(roles):
        pieces += [f"<|im_start|>{role}\n", number, "<|im_end|>\n"]
    return pieces


def _llama(roles: Sequence[str]) -> list[str | int]:
    pieces: list[str | int] = ["<|begin_of_text|>"]
    for number, role in enumerate(roles):
        pieces += [f"<|start_header_id|>{role}<|end_header_id|>\n\n", number, "<|eot_id|>"]
    return pieces


def _mistral(roles: Sequence[str]) -> list[str | int]:
    pieces: list[str | int] = ["<s>"]
    for number, role in enumerate(roles):
        pieces += ["[INST] ", number, " [/INST]"] if role == "user" else [number, "</s>"]
    return pieces


def _deepseek(roles: Sequence[str]) -> list[str | int]:
    begin = {"user": "User: ", "assistant": "Assistant: ", "system": ""}
    pieces: list[str | int] = ["<\uff5cbegin\u2581of\u2581sentence\uff5c>"]
    for number, role in enumerate(roles):
        end = TURN_ENDS["deepseek-math-7b"] if role == "assistant" else "\n\n"
        pieces += [begin[role], number, end]
    return pieces


def _zephyr(roles: Sequence[str]) -> list[str | int]:
    pieces: list[str | int] = []
    for number, role in enumerate(roles):
        pieces += [f"<|{role}|>\n", number, "</s>\n"]
    return pieces


FORMS: dict[str, Callable[[Sequence[str]], list[str | int]]] = {
    "qwen2.5": _qwen,
    "llama-3-8b": _llama,
    "mistral-7b-v0.1": _mistral,
    "deepseek-math-7b": _deepseek,
    "tinyllama": _zephyr,
}
TRIMS = ("llama-3-8b",)
