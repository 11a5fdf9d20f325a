"""Greedy completions from vLLM, the engine behind the published numbers; an optional package.

The rules of `evaluation.engines.generation` are handed to vLLM as sampling parameters, and
its token ids are decoded and cut here, as those of every engine.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence

import torch
from transformers import (
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

from vocagnolm.evaluation.engines.generation import Completion, Decoding, end_of_text_ids
from vocagnolm.models.source import ModelSource, context_length

# Tokens. vLLM reserves room for one such text; prompts take a quarter of it.
LONGEST_CONTEXT = 8192
# Prompts: enough to keep the engine busy, few enough to be written early.
_GROUP = 512


class VLLMEngine:
    """Completes prompts with vLLM.

    Raises:
        ValueError: vLLM is not installed, or cannot load the model.
    """

    def __init__(
        self, source: ModelSource, tokenizer: PreTrainedTokenizerBase, dtype: str = "auto"
    ):
        try:
            self._vllm = importlib.import_module("vllm")
        except ImportError as error:
            raise ValueError(
                f"the engine vllm cannot be imported ({error}): install it with `pip install vllm`"
                ", or use --engine hf"
            ) from error
        config, name, revision = source.config(), source.name, source.revision
        self._tokenizer = tokenizer
        self._context = min(context_length(config), LONGEST_CONTEXT)
        self._eos_ids = end_of_text_ids(_generation_config(name, config, revision), tokenizer)
        try:
            self._llm = self._vllm.LLM(
                model=name,
                tokenizer=tokenizer.name_or_path or name,
                revision=revision,
                tokenizer_revision=revision,
                trust_remote_code=source.trust_remote_code,
                dtype=dtype,
                # As the harness does.
                tensor_parallel_size=max(1, torch.cuda.device_count()),
                seed=0,
                max_model_len=self._context,
                enable_prefix_caching=True,
                # Not the model's, which may sample.
                generation_config="vllm",
            )
        except RuntimeError as error:
            why = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            raise ValueError(f"--engine vllm cannot load {name}: {why}") from error

    def generate(
        self, prompts: Sequence[str], stops: Sequence[str], max_new_tokens: int
    ) -> Iterator[list[Completion]]:
        """Give completions as they finish, as every `Engine`."""
        decoding = Decoding(
            self._tokenizer, tuple(stops), max_new_tokens, self._context, self._eos_ids
        )
        return self._run(decoding.encode(prompts), decoding)

    def _run(self, prompt_ids: list[list[int]], decoding: Decoding) -> Iterator[list[Completion]]:
        for first in range(0, len(prompt_ids), _GROUP):
            group = prompt_ids[first : first + _GROUP]
            outputs = self._llm.generate(
                [{"prompt_token_ids": ids} for ids in group],
                [
                    self._vllm.SamplingParams(
                        n=1,
                        temperature=0.0,
                        top_p=1.0,
                        seed=0,
                        max_tokens=decoding.cap(len(ids)),
                        stop=list(decoding.stops),
                        stop_token_ids=sorted(decoding.eos_ids),
                        skip_special_tokens=True,
                    )
                    for ids in group
                ],
                use_tqdm=False,
            )
            yield [
                decoding.completion(first + offset, len(ids), list(output.outputs[0].token_ids))
                for offset, (ids, output) in enumerate(zip(group, outputs, strict=True))
            ]


def _generation_config(
    model_name: str, config: PreTrainedConfig, revision: str | None
) -> GenerationConfig:
    """Load the generation config, or make it from the configuration, as `transformers` does."""
    try:
        return GenerationConfig.from_pretrained(model_name, revision=revision or "main")
    except OSError:
        return GenerationConfig.from_model_config(config)
