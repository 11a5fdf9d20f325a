"""Greedy completions from vLLM, the engine behind the published numbers; an optional package.

The rules of `generation.py` become sampling parameters; its token ids are decoded and cut here.
"""

import importlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedConfig
from transformers import PreTrainedTokenizerBase as Tokenizer

from vocagnolm.evaluation.engines.chat import Chat
from vocagnolm.evaluation.engines.generation import Completion, Decoding, Engine
from vocagnolm.models.source import ModelSource, context_length, tensor_parallel_size

# Tokens. vLLM reserves room for one such text; prompts take a quarter of it.
_LONGEST_CONTEXT = 8192
# Prompts: enough to keep the engine busy, few enough to be written early.
_GROUP = 512


def import_vllm() -> Any:
    """Import vLLM, which is optional and has no types; a ValueError where it is missing."""
    try:
        return importlib.import_module("vllm")
    except ImportError as error:
        remedy = "install it with `pip install vllm`, or use --engine hf"
        raise ValueError(f"vllm cannot be imported ({error}): {remedy}") from error


def longest_context(config: PreTrainedConfig) -> int:
    """Return the most tokens of a model's context that the engine takes."""
    return min(context_length(config), _LONGEST_CONTEXT)


class VLLMEngine(Engine):
    """Completes prompts with vLLM; a ValueError where it is missing or cannot load the model."""

    def __init__(
        self,
        source: ModelSource,
        tokenizer: Tokenizer,
        dtype: str = "auto",
        chat: Chat | None = None,
    ):
        self._vllm = import_vllm()
        config, name, revision = source.config(), source.name, source.revision
        context = longest_context(config)
        try:
            ending = GenerationConfig.from_pretrained(name, revision=revision or "main")
        except OSError:
            # None is saved: `transformers` makes it from the configuration.
            ending = GenerationConfig.from_model_config(config)
        super().__init__(tokenizer, ending, context, chat)
        try:
            self._llm = self._vllm.LLM(
                model=name,
                tokenizer=tokenizer.name_or_path or name,
                revision=revision,
                tokenizer_revision=revision,
                trust_remote_code=source.trust_remote_code,
                dtype=dtype,
                # As the harness does, but for heads that all GPUs cannot share.
                tensor_parallel_size=tensor_parallel_size(config, torch.cuda.device_count()),
                seed=0,
                max_model_len=context,
                enable_prefix_caching=True,
                # Not the model's, which may sample.
                generation_config="vllm",
            )
        except RuntimeError as error:
            why = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            raise ValueError(f"--engine vllm cannot load {name}: {why}") from error

    def _complete(
        self, prompt_ids: list[list[int]], decoding: Decoding
    ) -> Iterator[list[Completion]]:
        sampling = {
            "n": 1,
            "temperature": 0.0,
            "top_p": 1.0,
            "seed": 0,
            "stop": list(decoding.stops),
            "stop_token_ids": sorted(decoding.eos_ids),
            "skip_special_tokens": True,
        }
        make = self._vllm.SamplingParams
        for first in range(0, len(prompt_ids), _GROUP):
            group = prompt_ids[first : first + _GROUP]
            prompts = [{"prompt_token_ids": ids} for ids in group]
            params = [make(max_tokens=decoding.cap(len(ids)), **sampling) for ids in group]
            outputs = self._llm.generate(prompts, params, use_tqdm=False)
            yield [
                decoding.completion(index, len(ids), list(output.outputs[0].token_ids))
                for index, (ids, output) in enumerate(zip(group, outputs, strict=True), first)
            ]
