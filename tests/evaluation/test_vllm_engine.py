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
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    MambaConfig,
)

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
PROMPTS = [
    f"Ben has 15 apples.\n\n\nQuestion: {question}\nAnswer:"
    for question in ("12", "x + y 数学", "the the", "How many apples does Anna have?", "😀", "a\nb")
]


@dataclass
class SamplingParams:
    """The fields of vLLM's class that are used, with its defaults; any other name is an error."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    max_tokens: int | None = 16
    skip_special_tokens: bool = True


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


def completions_of(engine: HFEngine | VLLMEngine, stops: Sequence[str]) -> list[Completion]:
    groups = list(engine.generate(PROMPTS, stops, NEW_TOKENS))
    return sorted((c for group in groups for c in group), key=lambda c: c.index)


def test_both_engines_give_the_same_completions(saved: tuple[Any, Any], vllm: list[LLM]) -> None:
    model, tokenizer = saved
    hf, other = HFEngine(model, tokenizer, 4), engine_of(saved)
    free = completions_of(hf, ())
    assert completions_of(other, ()) == free
    stops = [free[0].text[8:11], free[3].text[5:9]]
    expected = completions_of(hf, stops)
    assert completions_of(other, stops) == expected
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
    engines = (
        HFEngine(model, tokenizer, 4, chat),
        engine_of(saved, chat=chat),
    )
    hf, other = ([c for g in engine.generate(prompts, (), 9) for c in g] for engine in engines)
    assert sorted(hf, key=lambda c: c.index) == other
    assert other[0].finish_reason == "eos"
    ((asked, params),) = vllm[0].calls
    assert [prompt["prompt_token_ids"] for prompt in asked] == ids
    assert all(end in each.stop_token_ids for each in params)


def test_vllm_is_started_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="uses all GPUs by itself: start it with python"):
        VLLMEngine(ModelSource("org/model", "model"), AutoTokenizer, "auto", 9, None)


def test_vllm_is_greedy_within_the_context(
    saved: tuple[Any, Any], vllm: list[LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    # 4 heads, which 6 GPUs cannot share.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 6)
    model, tokenizer = saved
    name, context = tokenizer.name_or_path, model.config.max_position_embeddings
    completions_of(engine_of(saved, "float32"), ["\n\nQuestion:"])
    expected = LLM(
        model=name,
        tokenizer=name,
        trust_remote_code=False,
        dtype="float32",
        tensor_parallel_size=2,
        seed=0,
        max_model_len=context,
        enable_prefix_caching=True,
        generation_config="vllm",
        calls=vllm[0].calls,
    )
    assert vllm == [expected]
    # The context that the engine reserves and that settings record.
    long = LlamaConfig(max_position_embeddings=131_072)
    assert longest_context(long, 2048) == 8192
    assert longest_context(long, 32_768) == 36_864
    assert longest_context(LlamaConfig(max_position_embeddings=2048), 32_768) == 2048
    prompts, params = vllm[0].calls[0]
    ids = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    assert prompts == [{"prompt_token_ids": row} for row in ids]
    ends = sorted({*model.generation_config.eos_token_id, tokenizer.eos_token_id})
    assert params == [
        SamplingParams(
            temperature=0,
            seed=0,
            stop=["\n\nQuestion:"],
            stop_token_ids=ends,
            max_tokens=min(NEW_TOKENS, context - len(row)),
        )
        for row in ids
    ]


def test_vllm_draws_with_a_seed_for_each_output(saved: tuple[Any, Any], vllm: list[LLM]) -> None:
    engine = engine_of(saved, "float32")
    groups = engine.generate(["a", "b b", "a"], (), 3, Sampling(2, 0.6, 0.95), [7, 8, 9])
    completions = [completion for group in groups for completion in group]
    assert [completion.index for completion in completions] == [0, 1, 2]
    drawn = [(params.temperature, params.top_p, params.seed) for params in vllm[0].calls[0][1]]
    assert drawn == [(0.6, 0.95, 7), (0.6, 0.95, 8), (0.6, 0.95, 9)]


def test_vllm_is_not_told_of_ends_beyond_the_vocabulary(
    saved: tuple[Any, Any], vllm: list[LLM]
) -> None:
    model, tokenizer = saved
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    assert tokenizer.eos_token_id == model.config.vocab_size
    list(engine_of(saved).generate(["a"], (), 3))
    assert vllm[0].calls[0][1][0].stop_token_ids == model.generation_config.eos_token_id


def test_vllm_ends_texts_as_transformers_does(saved: tuple[Any, Any], vllm: list[LLM]) -> None:
    model, tokenizer = saved
    (Path(tokenizer.name_or_path) / "generation_config.json").unlink()
    list(engine_of(saved).generate(["a"], (), 3))
    assert tokenizer.eos_token_id is not None
    expected = sorted({model.config.eos_token_id, tokenizer.eos_token_id})
    assert vllm[0].calls[0][1][0].stop_token_ids == expected


@pytest.mark.parametrize(
    ("heads", "groups", "gpus", "expected"),
    [
        (28, 4, 8, 4),  # Qwen2.5-Math-7B: 7 of 8 would leave one idle
        (32, 8, 8, 8),
        (32, 4, 8, 8),  # groups are repeated
        (24, 8, 6, 2),  # 3 and 6 cannot share 8 groups
        (28, 4, 0, 1),
        (28, 4, 1, 1),
    ],
)
def test_gpus_share_heads_evenly(heads: int, groups: int, gpus: int, expected: int) -> None:
    config = LlamaConfig(
        num_attention_heads=heads, num_key_value_heads=groups, hidden_size=8 * heads
    )
    assert tensor_parallel_size(config, gpus) == expected


def test_one_gpu_holds_a_model_without_heads() -> None:
    assert tensor_parallel_size(MambaConfig(), 8) == 1
