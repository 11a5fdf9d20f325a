"""Score windows with vLLM, an optional package: log-probabilities of a prompt's tokens."""

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vocagnolm.models.source import ModelSource, tensor_parallel_size
from vocagnolm.store.store import LossArray
from vocagnolm.store.windows import Window


class VLLMScorer:
    """Computes losses of windows, of at most `context` tokens, from vLLM's prompt_logprobs."""

    def __init__(self, source: ModelSource, context: int, dtype: str):
        try:
            self._vllm: Any = importlib.import_module("vllm")
        except ImportError as error:
            raise ValueError(
                f"--engine vllm cannot be imported ({error}): install it with `pip install vllm`, "
                "or use --engine hf"
            ) from error
        self._llm = self._vllm.LLM(
            model=source.name,
            revision=source.revision,
            trust_remote_code=source.trust_remote_code,
            skip_tokenizer_init=True,
            dtype=dtype,
            tensor_parallel_size=tensor_parallel_size(source.config(), torch.cuda.device_count()),
            # It generates one token, which nobody needs.
            max_model_len=context + 1,
            # A cached prompt has no log-probabilities.
            enable_prefix_caching=False,
        )

    def losses(self, windows: Sequence[Window]) -> list[LossArray]:
        """Return the losses of the scored tokens of each window, in nats."""
        params = self._vllm.SamplingParams(
            temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False
        )
        outputs = self._llm.generate(
            [{"prompt_token_ids": window.ids} for window in windows], params, use_tqdm=False
        )
        return [
            _losses(window, output.prompt_logprobs)
            for window, output in zip(windows, outputs, strict=True)
        ]


def _losses(window: Window, logprobs: Sequence[Any]) -> LossArray:
    scored = zip(window.ids[-window.scored :], logprobs[-window.scored :], strict=True)
    return np.array([-here[token].logprob for token, here in scored], np.float32)
