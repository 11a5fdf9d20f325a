"""Greedy completions from vLLM, the engine behind the published numbers; an optional package.

The rules of `generation.py` become sampling parameters; its token ids are decoded and cut here.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from transformers import GenerationConfig, PreTrainedConfig
from transformers import PreTrainedTokenizerBase as Tokenizer

from vocagnolm.evaluation.engines.generation import Chat, Completion, Decoding, Row, end_of_text_ids
from vocagnolm.models.load import ModelSource, context_length, tensor_parallel_size

# Tokens. vLLM reserves room for one such text; prompts take a quarter of it.
_LONGEST_CONTEXT = 8192
# Prompts: enough to keep the engine busy, few enough to be written early.
_GROUP = 512


def longest_context(config: PreTrainedConfig) -> int:
    """Return the most tokens of a model's context that the engine takes."""
    return min(context_length(config), _LONGEST_CONTEXT)


class VLLMEngine:
    """Completes prompts with vLLM."""

    def __init__(
        self, source: ModelSource, tokenizer: Tokenizer, dtype: str, chat: Chat | None = None
    ):
        import vllm

        config, name, revision = source.config(), source.name, source.revision
        try:
            ending = GenerationConfig.from_pretrained(name, revision=revision or "main")
        except OSError:
            # None is saved: `transformers` makes it from the configuration.
            ending = GenerationConfig.from_model_config(config)
        self._rules = partial(
            Decoding,
            tokenizer,
            context=longest_context(config),
            eos_ids=end_of_text_ids(ending, tokenizer, chat),
            add_special_tokens=chat is None,
        )
        self._llm = vllm.LLM(
            model=name,
            tokenizer=tokenizer.name_or_path or name,
            revision=revision,
            tokenizer_revision=revision,
            trust_remote_code=source.trust_remote_code,
            dtype=dtype,
            # As the harness does, except for heads that all GPUs cannot share.
            tensor_parallel_size=tensor_parallel_size(config, torch.cuda.device_count()),
            seed=0,
            max_model_len=longest_context(config),
            enable_prefix_caching=True,
            # Not the model's, which may sample.
            generation_config="vllm",
        )

    def generate(
        self, prompts: Sequence[str], stops: Sequence[str], max_new_tokens: int
    ) -> Iterator[list[Completion]]:
        """Give groups of completions as `HFEngine.generate` does."""
        decoding = self._rules(stops=tuple(stops), max_new_tokens=max_new_tokens)
        return self._run(decoding.rows(prompts), decoding)

    def _run(self, rows: list[Row], decoding: Decoding) -> Iterator[list[Completion]]:
        from vllm import SamplingParams

        sampling = {
            "n": 1,
            "temperature": 0.0,
            "top_p": 1.0,
            "seed": 0,
            "stop": list(decoding.stops),
            "stop_token_ids": sorted(decoding.eos_ids),
            "skip_special_tokens": True,
        }
        for first in range(0, len(rows), _GROUP):
            group = rows[first : first + _GROUP]
            prompts = [{"prompt_token_ids": row.prompt} for row in group]
            params = [SamplingParams(max_tokens=row.room, **sampling) for row in group]
            outputs = self._llm.generate(prompts, params, use_tqdm=False)
            for row, output in zip(group, outputs, strict=True):
                row.new = list(output.outputs[0].token_ids)
            yield [row.completion() for row in group]
