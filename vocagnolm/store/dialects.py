"""Ways to ask a server for the log-probabilities of a prompt's tokens, and to read its answer.

Every dialect asks for one new token, which is left out: some servers take none for "as many as fit"
(llama-cpp-python), others refuse none.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from vocagnolm.io import JsonObject

Prompt = str | list[int]


@dataclass(frozen=True)
class PromptTokens:
    """N tokens of a prompt as a server tells them, the start token first.

    A loss is NaN where there is none, as for the first token. `ids` or `texts` are empty where the
    server does not tell them; an id of -1 and a text of None are those of a token left out.
    """

    losses: Sequence[float]
    ids: Sequence[int] = ()
    texts: Sequence[str | None] = ()


class Dialect(Protocol):
    """A kind of server, by the form of its requests."""

    name: str
    path: str

    def request(self, model: str, prompt: Prompt) -> JsonObject:
        """Make the body of a request."""
        ...

    def read(self, answer: JsonObject, prompt: Prompt) -> PromptTokens:
        """Read the answer; any error of Python's where it has another form."""
        ...


class VLLMDialect:
    """Completions of vLLM with `prompt_logprobs`.

    `choices[0].prompt_logprobs` has null for the first token, and for each other one an object of
    {id: {logprob, rank, decoded_token}}: the prompt's token first, then as many of the likeliest as
    were asked for. See vllm/entrypoints/openai/completion/protocol.py.
    """

    name, path = "vllm", "/v1/completions"

    def request(self, model: str, prompt: Prompt) -> JsonObject:
        """Ask for the log-probability of the prompt's own tokens only."""
        return _completion(model, prompt) | {"prompt_logprobs": 0}

    def read(self, answer: JsonObject, prompt: Prompt) -> PromptTokens:
        """Read ids, texts and losses."""
        rows = answer["choices"][0]["prompt_logprobs"]
        ids, texts, losses = [-1], [None], [math.nan]
        for row in rows[1:]:
            token, about = next(iter(row.items()))
            ids.append(int(token))
            texts.append(about.get("decoded_token"))
            losses.append(_loss(about["logprob"]))
        return PromptTokens(losses, ids, texts if all(t is not None for t in texts[1:]) else ())


class SGLangDialect:
    """SGLang's own `/generate` with `return_logprob` from `logprob_start_len` 0.

    `meta_info.input_token_logprobs` has [logprob, id, text] of every token, null for the first
    log-probability, and for a text that was not asked for by `return_text_in_logprobs`. See
    sglang/srt/managers/io_struct.py.
    """

    name, path = "sglang", "/generate"

    def request(self, model: str, prompt: Prompt) -> JsonObject:
        """Ask for the log-probability of the prompt's tokens; this server has one model only."""
        is_text = isinstance(prompt, str)
        return {
            ("text" if is_text else "input_ids"): prompt,
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": 0,
            "return_text_in_logprobs": is_text,
        }

    def read(self, answer: JsonObject, prompt: Prompt) -> PromptTokens:
        """Read ids, texts and losses."""
        losses, ids, texts = zip(*answer["meta_info"]["input_token_logprobs"], strict=True)
        return PromptTokens(
            [math.nan, *map(_loss, losses[1:])],
            list(map(int, ids)),
            texts if isinstance(prompt, str) else (),
        )


class OpenAIDialect:
    """OpenAI's completions with `echo` and `logprobs`, as older servers have them.

    `choices[0].logprobs` has `tokens` and `token_logprobs` of the prompt and of what follows it,
    null for the first one. llama-cpp-python leaves a BOS token out of both, but not out of
    `usage.prompt_tokens` (Llama._create_completion).
    """

    name, path = "openai", "/v1/completions"

    def request(self, model: str, prompt: Prompt) -> JsonObject:
        """Ask for the prompt's tokens and their log-probabilities."""
        return _completion(model, prompt) | {"echo": True, "logprobs": 0}

    def read(self, answer: JsonObject, prompt: Prompt) -> PromptTokens:
        """Read texts and losses; a start token that was left out is None."""
        told = answer["choices"][0]["logprobs"]
        texts, losses = list(told["tokens"]), list(map(_loss, told["token_logprobs"]))
        usage = answer["usage"]
        if len(texts) != len(losses):
            raise ValueError(f"{len(texts)} tokens and {len(losses)} losses")
        if len(texts) - usage["completion_tokens"] == usage["prompt_tokens"] - 1:
            texts, losses = [None, *texts], [math.nan, *losses]
        prompt_tokens = usage["prompt_tokens"]
        return PromptTokens(losses[:prompt_tokens], texts=texts[:prompt_tokens])

    def request_first(self, model: str, start: str, vocabulary: int) -> JsonObject:
        """Ask for all tokens that may follow a start token, as llama-cpp-python hides the first."""
        return _completion(model, start) | {"logprobs": vocabulary}

    def read_first(self, answer: JsonObject) -> dict[str, float]:
        """Read the losses of first tokens, by their texts; raises as `read` does."""
        followers = answer["choices"][0]["logprobs"]["top_logprobs"][0]
        # Parts of characters share a text, nothing or U+FFFD, which has the loss of any of them.
        whole = {text: value for text, value in followers.items() if text.strip("\ufffd")}
        return {text: _loss(value) for text, value in whole.items()}


# In the order in which they are tried: the first two tell ids, which are checked exactly.
DIALECTS: Mapping[str, Dialect] = {
    dialect.name: dialect for dialect in (VLLMDialect(), SGLangDialect(), OpenAIDialect())
}


def _completion(model: str, prompt: Prompt) -> JsonObject:
    return {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0.0}


def _loss(logprob: float | None) -> float:
    return math.nan if logprob is None else -float(logprob)
