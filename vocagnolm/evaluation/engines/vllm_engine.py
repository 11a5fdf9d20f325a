"""Completions from vLLM, which made the published numbers. An optional package.

The rules of `generation.py` become sampling parameters. The token ids that it returns are decoded
and cut here.
"""

from collections.abc import Iterator
from functools import partial

import torch
from transformers import GenerationConfig, PreTrainedConfig
from transformers import PreTrainedTokenizerBase as Tokenizer

from vocagnolm.evaluation.engines.generation import Chat, Completion, Engine, Row
from vocagnolm.fields import OptionError
from vocagnolm.models.load import ModelSource, context_length
from vocagnolm.shell.dist import launched_processes

# The engine uses this much of a model's context, or room for a prompt of this length and an answer,
# if that is more. vLLM reserves memory for one such text.
_CONTEXT = 8192
_PROMPT = 4096
# Enough prompts to keep the engine busy, and few enough that answers are written early.
_GROUP = 512


def longest_context(config: PreTrainedConfig, new_tokens: int) -> int:
    """Return how much of a model's context the engine uses for such answers."""
    return min(context_length(config), max(_CONTEXT, _PROMPT + new_tokens))


class VLLMEngine(Engine):
    """Completes prompts with vLLM."""

    def __init__(
        self, source: ModelSource, tokenizer: Tokenizer, dtype: str, context: int, chat: Chat | None
    ):
        if launched_processes() > 1:
            raise OptionError("engine", "vllm uses all GPUs by itself: start it with python")
        import vllm

        config, name, revision = source.config(), source.name, source.revision
        try:
            ending = GenerationConfig.from_pretrained(name, revision=revision or "main")
        except OSError:
            # The model has no saved one: `transformers` makes it from the configuration.
            ending = GenerationConfig.from_model_config(config)
        super().__init__(tokenizer, context, ending, chat)
        # A stop id that the model does not have would be an error, and a tokenizer may have more.
        vocab_size = config.get_text_config().vocab_size
        self._stop_ids = sorted(id for id in self.eos_ids if id < vocab_size)
        self._llm = vllm.LLM(
            model=name,
            tokenizer=tokenizer.name_or_path or name,
            revision=revision,
            tokenizer_revision=revision,
            trust_remote_code=source.trust_remote_code,
            dtype=dtype,
            # The harness uses all GPUs, and so does this engine if they can share the heads evenly.
            tensor_parallel_size=tensor_parallel_size(config, torch.cuda.device_count()),
            seed=0,
            max_model_len=context,
            enable_prefix_caching=True,
            # The model's own configuration may ask for sampling, but vLLM's defaults do not.
            generation_config="vllm",
        )

    def _run(self, rows: list[Row]) -> Iterator[list[Completion]]:
        from vllm import SamplingParams

        ending = {"stop": list(rows[0].stops), "stop_token_ids": self._stop_ids}
        drawn = rows[0].sampling
        temperature, top_p = (drawn.temperature, drawn.top_p) if drawn else (0.0, 1.0)
        sampling = partial(SamplingParams, temperature=temperature, top_p=top_p, **ending)
        for first in range(0, len(rows), _GROUP):
            group = rows[first : first + _GROUP]
            prompts = [{"prompt_token_ids": row.prompt} for row in group]
            # Each output has its own generator and seed.
            params = [sampling(max_tokens=row.room, seed=row.seed) for row in group]
            # Outputs come in the order of the prompts, although the engine mixes them.
            outputs = self._llm.generate(prompts, params, use_tqdm=False)
            for row, output in zip(group, outputs, strict=True):
                row.new = list(output.outputs[0].token_ids)
            yield [row.completion() for row in group]


def tensor_parallel_size(config: PreTrainedConfig, gpus: int) -> int:
    """Return over how many of the GPUs, evenly used, vLLM can spread a model's attention heads.

    A head is on one GPU. Groups of keys are spread in the same way, or repeated if there are more
    GPUs.
    """
    text_config = config.get_text_config()
    heads = getattr(text_config, "num_attention_heads", None) or 1
    groups = getattr(text_config, "num_key_value_heads", None) or heads
    for size in range(gpus, 1, -1):
        # Such a number divides the GPUs and the heads, and it divides the groups of keys or is a
        # multiple of them.
        if gpus % size == heads % size == 0 and 0 in (groups % size, size % groups):
            return size
    return 1
