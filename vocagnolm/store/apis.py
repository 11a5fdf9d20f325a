"""How servers are asked for the losses of a prompt's tokens: requests and answers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from vocagnolm.shell.io import JsonObject

Prompt = list[int] | str
# An answer has the logprobs of N tokens, or None, and their ids or texts. The start token is the
# first.
Answer = tuple[list[float | None], list[int | str | None]]


class Api(NamedTuple):
    """How one kind of server is asked for the losses of a prompt's tokens."""

    name: str
    path: str
    request: Callable[[str, Prompt], JsonObject]
    read: Callable[[JsonObject], Answer]
    takes_ids: bool = True


def completion(model: str, prompt: Prompt, **options: object) -> JsonObject:
    """Ask for a completion of a prompt."""
    # Ask for one new token and ignore it, because llama-cpp-python reads 0 as "as many as fit".
    return {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0.0, **options}


def _read_vllm(answer: JsonObject) -> Answer:
    # The list has null for the first token, and {id: {logprob, rank, decoded_token}} for each
    # other: first the prompt's token, then as many of the likeliest as were asked for. See
    # vllm/entrypoints/openai/completion/protocol.py.
    rows = answer["choices"][0]["prompt_logprobs"][1:]
    logprobs: list[float | None] = [None]
    tokens: list[int | str | None] = [None]
    for row in rows:
        token, description = next(iter(row.items()))
        logprobs.append(description["logprob"])
        tokens.append(int(token))
    return logprobs, tokens


def _request_sglang(model: str, prompt: Prompt) -> JsonObject:
    # This server has only one model.
    return {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": 0,
    }


def _read_sglang(answer: JsonObject) -> Answer:
    # [logprob, id, text] of every token; see sglang/srt/managers/io_struct.py.
    rows = answer["meta_info"]["input_token_logprobs"][1:]
    logprobs: list[float | None] = [None]
    tokens: list[int | str | None] = [None]
    for logprob, token, *_ in rows:
        logprobs.append(logprob)
        tokens.append(int(token))
    return logprobs, tokens


def _read_echo(answer: JsonObject) -> Answer:
    # The lists have the prompt's tokens and then the new one, like OpenAI's completions. Some
    # servers return ids next to the texts of tokens.
    usage = answer["usage"]
    part, new_tokens = answer["choices"][0]["logprobs"], usage["completion_tokens"]
    # Together returns the prompt's tokens in a separate list.
    if answer.get("prompt"):
        part, new_tokens = answer["prompt"][0]["logprobs"], 0
    logprobs, tokens = part["token_logprobs"], part.get("token_ids") or part["tokens"]
    if len(tokens) != len(logprobs):
        raise ValueError(f"{len(tokens)} tokens and {len(logprobs)} losses")
    # llama-cpp-python may leave the start token out of the lists although `prompt_tokens` counts
    # it, and the first token in them has null; see its Llama._create_completion.
    if len(tokens) - new_tokens == usage["prompt_tokens"] - 1:
        tokens = [None] + tokens
        logprobs = [None] + logprobs
    return logprobs[: usage["prompt_tokens"]], tokens[: usage["prompt_tokens"]]


# APIs are tried in this order. Those that take ids come first, because ids are compared exactly.
# The one that echoes the prompt is their last, because its answers usually name tokens by text.
APIS = (
    Api("vllm", "/v1/completions", partial(completion, prompt_logprobs=0), _read_vllm),
    Api("sglang", "/generate", _request_sglang, _read_sglang),
    Api("echo", "/v1/completions", partial(completion, echo=True, logprobs=1), _read_echo),
    Api(
        "llama.cpp",
        "/v1/completions",
        partial(completion, echo=True, logprobs=0),
        _read_echo,
        takes_ids=False,
    ),
)
