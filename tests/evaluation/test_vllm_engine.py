"""The vLLM engine against a stand-in that has vLLM's signatures and the real model's tokens."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers import LlamaConfig as Llama

from vocagnolm.evaluation.engines.generation import Chat, Completion
from vocagnolm.evaluation.engines.hf_engine import HFEngine
from vocagnolm.evaluation.engines.vllm_engine import (
    VLLMEngine,
    longest_context,
    tensor_parallel_size,
)
from vocagnolm.evaluation.tasks.tasks import Sampling
from vocagnolm.models.load import ModelSource

NEW_TOKENS = 30
DRAWN = Sampling(2, 0.6, 0.95)
PROMPTS = [
    f"Ben has 15 apples.\n\n\nQuestion: {question}\nAnswer:"
    for question in ("12", "x + y 数学", "the the", "How many apples does Anna have?", "😀", "a\nb")
]


@dataclass
class SamplingParams:
    """The fields of vLLM's class that are used, with its defaults; any other name is an error."""

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    max_tokens: int | None = 16


@dataclass
class LLM:
    """vLLM's class, with the tokens that `transformers` chooses and vLLM's way of ending them."""

    model: str
    tokenizer: str | None = None
    trust_remote_code: bool = False
    tensor_parallel_size: int = 1
    dtype: str = "auto"
    revision: str | None = None
    tokenizer_revision: str | None = None
    seed: int | None = None
    max_model_len: int | None = None
    enable_prefix_caching: bool | None = None
    generation_config: str = "auto"
    calls: list[tuple[list[dict[str, Any]], list[SamplingParams]]] = field(default_factory=list)

    def generate(
        self,
        prompts: Sequence[dict[str, Any]],
        sampling_params: Sequence[SamplingParams],
        *,
        use_tqdm: bool = True,
    ) -> list[Any]:
        assert not use_tqdm
        self.calls.append((list(prompts), list(sampling_params)))
        model = AutoModelForCausalLM.from_pretrained(self.model)
        tokenizer = AutoTokenizer.from_pretrained(self.tokenizer)
        words = model.config.vocab_size
        # vLLM does so from 0.33 on.
        if any(end >= words for params in sampling_params for end in params.stop_token_ids or ()):
            raise ValueError(f"stop_token_ids beyond a vocabulary of {words}")
        outputs = []
        for prompt, params in zip(prompts, sampling_params, strict=True):
            ids = torch.tensor([prompt["prompt_token_ids"]])
            assert ids.shape[1] + params.max_tokens <= self.max_model_len
            written = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=params.max_tokens,
                do_sample=params.temperature > 0,
                eos_token_id=params.stop_token_ids or None,
                pad_token_id=0,
            )[0, ids.shape[1] :].tolist()
            for n in range(1, len(written) + 1):
                text = tokenizer.decode(written[:n], skip_special_tokens=True)
                if any(stop in text for stop in params.stop):
                    written = written[:n]
                    break
            outputs.append(SimpleNamespace(outputs=[SimpleNamespace(token_ids=tuple(written))]))
        return outputs


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> list[LLM]:
    """Put the stand-in in vLLM's place; return the list of LLMs that are made."""
    made: list[LLM] = []

    def make(model: str, **options: Any) -> LLM:
        made.append(LLM(model, **options))
        return made[-1]

    module = ModuleType("vllm")
    module.LLM, module.SamplingParams = make, SamplingParams  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    return made


@pytest.fixture
def saved(
    tokenizer_dirs: dict[str, Path], tiny_llama: Callable[..., Any], tmp_path: Path
) -> tuple[Any, Any]:
    """A model and its tokenizer, saved in one directory with a generation config that samples."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dirs["metaspace"])
    lengths = sorted(len(tokenizer(prompt)["input_ids"]) for prompt in PROMPTS)
    context = lengths[3] + NEW_TOKENS  # too little for the longest prompts
    model = tiny_llama(len(tokenizer), initializer_range=0.5, max_position_embeddings=context)
    ids = torch.tensor([tokenizer(PROMPTS[1])["input_ids"]])
    ends = int(model.generate(ids, max_new_tokens=9, do_sample=False, eos_token_id=None)[0, -1])
    model.generation_config = GenerationConfig(do_sample=True, temperature=0.7, eos_token_id=[ends])
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return model, AutoTokenizer.from_pretrained(tmp_path)


def engine_of(saved: tuple[Any, Any], dtype: str = "auto", chat: Chat | None = None) -> VLLMEngine:
    model, tokenizer = saved
    source = ModelSource(tokenizer.name_or_path, "model")
    return VLLMEngine(source, tokenizer, dtype, longest_context(model.config, NEW_TOKENS), chat)


def completions_of(engine: Any, prompts: Sequence[str], *how: Any) -> list[Completion]:
    completions = [c for group in engine.generate(prompts, *how) for c in group]
    return sorted(completions, key=lambda completion: completion.index)


def test_both_engines_give_the_same_completions(saved: tuple[Any, Any], vllm: list[LLM]) -> None:
    model, tokenizer = saved
    hf, other = HFEngine(model, tokenizer, 4), engine_of(saved)
    free = completions_of(hf, PROMPTS, (), NEW_TOKENS)
    assert completions_of(other, PROMPTS, (), NEW_TOKENS) == free
    stops = [free[0].text[8:11], free[3].text[5:9]]
    expected = completions_of(hf, PROMPTS, stops, NEW_TOKENS)
    assert completions_of(other, PROMPTS, stops, NEW_TOKENS) == expected
    reasons = {c.finish_reason for c in [*free, *expected]}
    assert reasons == {"stop", "eos", "length", "context"}


def test_both_engines_ask_a_chat_alike(saved: tuple[Any, Any], vllm: list[LLM]) -> None:
    model, tokenizer = saved
    # This tokenizer puts a start token before a text, as the template does.
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    chat = Chat(tokenizer, "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}")
    prompts = [chat.prompt(question) for question in ("12", "the the", "x + y")]
    ids = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts]
    written = model.generate(torch.tensor([ids[0]]), max_new_tokens=9, do_sample=False)[0].tolist()
    end = written[len(ids[0]) + 4]
    object.__setattr__(chat, "end_ids", frozenset({end}))
    found = completions_of(engine_of(saved, chat=chat), prompts, (), 9)
    assert found == completions_of(HFEngine(model, tokenizer, 4, chat), prompts, (), 9)
    assert found[0].finish_reason == "eos"
    ((asked, params),) = vllm[0].calls
    assert [prompt["prompt_token_ids"] for prompt in asked] == ids
    assert all(end in each.stop_token_ids for each in params)


def test_vllm_is_started_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="all GPUs"):
        VLLMEngine(ModelSource("org/model", "model"), AutoTokenizer, "auto", 9, None)


def test_vllm_is_greedy_within_the_context(
    saved: tuple[Any, Any], vllm: list[LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    # 4 heads, which 6 GPUs cannot share.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 6)
    model, tokenizer = saved
    completions_of(engine_of(saved, "float32"), PROMPTS, ["\n\nQuestion:"], NEW_TOKENS)
    (made,) = vllm
    assert (made.dtype, made.tensor_parallel_size, made.seed) == ("float32", 2, 0)
    context = model.config.max_position_embeddings
    assert (made.max_model_len, made.generation_config) == (context, "vllm")
    ((_, params),) = made.calls
    ends = sorted({*model.generation_config.eos_token_id, tokenizer.eos_token_id})
    for prompt, found in zip(PROMPTS, params, strict=True):
        room = min(NEW_TOKENS, context - len(tokenizer(prompt)["input_ids"]))
        stop = ["\n\nQuestion:"]
        assert found == SamplingParams(0.0, 1.0, 0, stop, ends, room)


def test_vllm_draws_with_a_seed_for_each_output(saved: tuple[Any, Any], vllm: list[LLM]) -> None:
    found = completions_of(engine_of(saved), ["a", "b b", "a"], (), 3, DRAWN, [7, 8, 9])
    assert [completion.index for completion in found] == [0, 1, 2]
    drawn = [(params.temperature, params.top_p, params.seed) for params in vllm[0].calls[0][1]]
    assert drawn == [(0.6, 0.95, 7), (0.6, 0.95, 8), (0.6, 0.95, 9)]


def test_vllm_ends_texts_as_transformers_does(saved: tuple[Any, Any], vllm: list[LLM]) -> None:
    model, tokenizer = saved
    (Path(tokenizer.name_or_path) / "generation_config.json").unlink()
    completions_of(engine_of(saved), ["a"], (), 3)
    ends = vllm[0].calls[0][1][0].stop_token_ids
    assert ends == sorted({model.config.eos_token_id, tokenizer.eos_token_id})
    # It is not told of an end beyond the vocabulary.
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    assert tokenizer.eos_token_id == model.config.vocab_size
    completions_of(engine_of(saved), ["a"], (), 3)
    assert vllm[1].calls[0][1][0].stop_token_ids == [model.config.eos_token_id]


# The context that the engine reserves and that settings record.
@pytest.mark.parametrize(
    ("of_model", "new_tokens", "expected"),
    [(131_072, 2048, 8192), (131_072, 32_768, 36_864), (2048, 32_768, 2048)],
)
def test_context_has_room_for_an_answer(of_model: int, new_tokens: int, expected: int) -> None:
    config = Llama(max_position_embeddings=of_model)
    assert longest_context(config, new_tokens) == expected


@pytest.mark.parametrize(
    ("heads", "groups", "gpus", "expected"),
    [
        (28, 4, 8, 4),  # Qwen2.5-Math-7B: 7 of 8 would leave one idle
        (32, 8, 8, 8),
        (32, 4, 8, 8),  # groups are repeated
        (24, 8, 6, 2),  # 3 and 6 cannot share 8 groups
        (28, 4, 0, 1),
        (None, None, 8, 1),  # a model without heads
    ],
)
def test_gpus_share_heads_evenly(heads: Any, groups: Any, gpus: int, expected: int) -> None:
    config: Any = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=groups)
    config.get_text_config = lambda: config
    assert tensor_parallel_size(config, gpus) == expected
