"""Decoding rules and the engine of transformers, against plain generation one by one."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers import PreTrainedTokenizerFast as Tokenizer
from transformers.cache_utils import DynamicLayer

from vocagnolm.conventions import NonFiniteLoss
from vocagnolm.evaluation.engines.generation import Engine, Row, cut
from vocagnolm.evaluation.engines.hf_engine import GrowingLayer, HFEngine
from vocagnolm.models.load import NO_LIMIT

Tokenizers = dict[str, Tokenizer]
FAMILIES = ("metaspace", "prepend", "byte_level", "nfc_digits", "trimmed", "unigram")
SHARED_TEXT = "Ben has 15 apples and buys 12 more apples.\nThe answer is 27.\n\n\n"
STOPS = ("\n\nQuestion:", "\n\nProblem:")
NEW_TOKENS = 24


# The rules


def test_cut_ends_before_the_earliest_stop() -> None:
    assert cut("The\n\nQuestion: 2\n\nProblem: 3", STOPS) == "The"
    assert cut("The\n\nProblem: 3\n\nQuestion: 2", STOPS) == "The"
    assert cut(" 42 \n", ["x"]) == "42"


@pytest.mark.parametrize(
    ("of_model", "of_tokenizer", "expected"),
    [(None, None, set()), (None, 2, {2}), (3, 2, {2, 3}), ([3, 4], 4, {3, 4}), ([0], 2, {0, 2})],
)
def test_end_of_text_ids_are_those_of_both(
    of_model: Any, of_tokenizer: int | None, expected: set[int]
) -> None:
    tokenizer: Any = SimpleNamespace(eos_token_id=of_tokenizer)
    engine = Engine(tokenizer, NO_LIMIT, GenerationConfig(eos_token_id=of_model), None)
    assert engine.eos_ids == expected


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
}


def engine_of(tokenizer: Any, context: int = NO_LIMIT) -> Engine:
    """An engine without end tokens."""
    engine = Engine(tokenizer, context, GenerationConfig(), None)
    engine.eos_ids = frozenset()
    return engine


def test_prompts_that_leave_no_room_are_rejected(tokenizer: Tokenizer) -> None:
    prompts = ["a", "1 + 2 = 3 and so on", "1 + 2 = 3"]
    longest = max(len(tokenizer(prompt)["input_ids"]) for prompt in prompts)
    with pytest.raises(NotImplementedError):  # the prompts fit
        engine_of(tokenizer, context=longest + 1).generate(prompts, STOPS, NEW_TOKENS)
    with pytest.raises(ValueError, match=rf"1 of 3 prompts .* {longest} tokens"):
        engine_of(tokenizer, context=longest).generate(prompts, STOPS, NEW_TOKENS)


# Stop strings in a stream of tokens


def first_stop(engine: Engine, stops: Sequence[str], ids: list[int]) -> int | None:
    """Count tokens until the text contains a stop string, decoding all of them every time."""
    for n in range(1, len(ids) + 1):
        text = engine.decode(ids[:n])
        if any(stop in text for stop in stops):
            return n
    return None


def watched(engine: Engine, stops: Sequence[str], ids: list[int]) -> int | None:
    """Count the same from the stream."""
    row = Row(0, [], engine, stops, len(ids) + 1)
    for n, token in enumerate(ids, 1):
        row.append(token)
        if row.is_finished:
            return n
    return None


def streams(tokenizer: Any, rng: random.Random, count: int) -> Iterator[list[int]]:
    """Ids of any kind, of bytes only, of text, and of text in which characters are broken."""
    # The order of a vocabulary is not fixed.
    vocabulary = dict(sorted(tokenizer.get_vocab().items()))
    short = [id_ for token, id_ in vocabulary.items() if len(token) == 1 or token.startswith("<0x")]
    text = "Ben: 12 数学 and 日本語.\n\nQuestion: 😀😀 \n\n\nProblem: naïve é\n\n"
    for _ in range(count):
        yield rng.choices(list(vocabulary.values()), k=90)
        yield rng.choices(short, k=90)
        written = tokenizer(text * 3, add_special_tokens=False)["input_ids"]
        yield written
        for _ in range(6):
            written.insert(rng.randrange(len(written)), rng.choice(short))
        yield written


@pytest.mark.parametrize("family", FAMILIES)
def test_stop_is_found_at_its_last_token(family: str, tokenizers_by_family: Tokenizers) -> None:
    tokenizer, rng = tokenizers_by_family[family], random.Random(family)
    engine, found = engine_of(tokenizer), []
    for ids in streams(tokenizer, rng, 15):
        text = engine.decode(ids)
        at = [rng.randrange(len(text)) for _ in range(2)]
        stops = ["\n\nQuestion:", *(text[i : i + rng.randint(1, 9)] for i in at)]
        for chosen in (stops, stops[1:2], stops[:1], stops[2:]):
            expected = first_stop(engine, chosen, ids)
            assert watched(engine, chosen, ids) == expected, (chosen, ids)
            found.append(expected)
    assert sum(n is not None and n > 45 for n in found) > 10  # past where the anchor moves
    assert None in found


@pytest.mark.parametrize("lead", range(1, 24))
def test_stop_is_found_among_broken_bytes(lead: int, tokenizers_by_family: Tokenizers) -> None:
    tokenizer = tokenizers_by_family["metaspace"]

    def ids_of(text: str) -> list[int]:
        return [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in text.encode()]

    letters = tokenizer("a b" * lead, add_special_tokens=False)["input_ids"]
    mixed, half = ids_of("ab漢cd字" * 3), ids_of("漢")[:1]
    silent = [tokenizer.bos_token_id] * 20
    cases = {
        "whole": [*letters, *mixed, *ids_of("\n\n")],
        "unreadable": [*letters, *half, *mixed, *ids_of("\n\n"), *mixed],
        "readable again": [*letters, *half, *letters, *mixed, *ids_of("\n\n")],
        "interrupted": [*letters, *mixed, *ids_of("\n"), *silent, *ids_of("\n")],
    }
    engine = engine_of(tokenizer)
    expected = {name: first_stop(engine, ["\n\n"], ids) for name, ids in cases.items()}
    assert {name: watched(engine, ["\n\n"], ids) for name, ids in cases.items()} == expected
    assert [name for name, n in expected.items() if n is None] == ["unreadable"]


def test_generated_tokens_decode_a_few_tokens_a_step(tokenizers_by_family: Tokenizers) -> None:
    tokenizer = tokenizers_by_family["metaspace"]
    decoded = []

    class Counting:
        eos_token_id = None

        def decode(self, ids: Sequence[int], **options: Any) -> Any:
            decoded.append(len(ids))
            return tokenizer.decode(ids, **options)

    ids = tokenizer("Ben has 12 数学 apples 😀.\n" * 100, add_special_tokens=False)["input_ids"]
    assert watched(engine_of(Counting()), STOPS, ids) is None
    assert len(ids) > 1000
    assert max(decoded) <= 40
    assert sum(decoded) <= 40 * len(ids)


# The engine against plain generation


def prompts_of(count: int, seed: int = 0, shared: str = SHARED_TEXT) -> list[str]:
    """Prompts with a long shared beginning and ends of many lengths."""
    rng = random.Random(seed)
    words = ("apples", "12", "Ben", "数学", "x + y", "\n", "$\\frac{1}{2}$", "the", "😀")
    ends = (" ".join(rng.choices(words, k=rng.randint(0, 14))) for _ in range(count))
    return [f"{shared}Question: {end}\nAnswer:" for end in ends]


Expected = list[tuple[str, int, int, str]]


def plain(
    model: Any, tokenizer: Any, prompts: Sequence[str], max_new_tokens: int = NEW_TOKENS
) -> Callable[[Sequence[str]], Expected]:
    """Generate the slow way, every whole prompt alone; return a function of the stop strings.

    It returns text, prompt tokens, new tokens and finish reason of each prompt.
    """
    context = getattr(model.config, "max_position_embeddings", None) or 10**9
    own = model.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])} - {None}
    kept, model.generation_config = model.generation_config, GenerationConfig()
    rows = []
    for prompt in prompts:
        ids = tokenizer(prompt)["input_ids"]
        inputs = torch.tensor([ids])
        settings = GenerationConfig(
            max_new_tokens=min(max_new_tokens, context - len(ids)),
            do_sample=False,
            eos_token_id=sorted(ends) or None,
            pad_token_id=0,
        )
        mask = torch.ones_like(inputs)
        output = model.generate(inputs, attention_mask=mask, generation_config=settings)
        rows.append((len(ids), output[0, len(ids) :].tolist()))
    model.generation_config = kept

    def end(n_prompt: int, new: list[int], stops: Sequence[str]) -> tuple[str, int, int, str]:
        for n in range(1, len(new) + 1):
            text = tokenizer.decode(
                new[:n], skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            if any(stop in text for stop in stops):
                before = min((text.split(stop)[0] for stop in stops), key=len)
                return before.strip(), n_prompt, n, "stop"
        reason = "length" if len(new) == max_new_tokens else "context"
        return text.strip(), n_prompt, len(new), "eos" if new[-1] in ends else reason

    return lambda stops: [end(*row, stops) for row in rows]


def completions_of(
    engine: HFEngine, prompts: Sequence[str], stops: Sequence[str], max_new_tokens: int = NEW_TOKENS
) -> Expected:
    """Return what an engine gives, in the order of the prompts; check that each comes once."""
    groups = list(engine.generate(prompts, stops, max_new_tokens))
    assert all(groups)
    found = sorted((c for group in groups for c in group), key=lambda c: c.index)
    assert [c.index for c in found] == list(range(len(prompts)))
    return [(c.text, c.n_prompt_tokens, c.n_new_tokens, c.finish_reason) for c in found]


def stops_from(free: Expected, seed: int, count: int = 3) -> list[str]:
    """Pieces of what a model writes, so that some of its completions stop."""
    rng, long = random.Random(seed), [text for text, *_ in free if len(text) > 20]
    starts = [(text, rng.randrange(8, len(text) - 4)) for text in rng.sample(long, count)]
    return [text[start : start + rng.randint(2, 9)] for text, start in starts]


def frequent_token(model: Any, tokenizer: Any, prompts: Sequence[str]) -> int:
    """A token that a model writes after some of the prompts, but not at once."""
    ids = torch.tensor([tokenizer(prompts[0])["input_ids"]])
    written = model.generate(ids, max_new_tokens=15, do_sample=False, eos_token_id=None)
    return int(written[0, -1])


@pytest.fixture(scope="session")
def lively_llama(tiny_llama: Callable[..., Any]) -> Callable[..., Any]:
    """A tiny Llama whose weights are large enough for completions that differ."""

    def build(tokenizer: Any, **config: Any) -> Any:
        settings = {"initializer_range": 0.5, "max_position_embeddings": 160, **config}
        return tiny_llama(len(tokenizer), bos_token_id=None, eos_token_id=None, **settings)

    return build


@pytest.fixture
def tokenizer(tokenizers_by_family: Tokenizers) -> Tokenizer:
    return tokenizers_by_family["byte_level"]


@pytest.fixture
def model(tokenizer: Tokenizer, lively_llama: Callable[..., Any]) -> Any:
    return lively_llama(tokenizer)


@pytest.fixture(scope="module")
def slow(
    tokenizers_by_family: Tokenizers, lively_llama: Callable[..., Any]
) -> Callable[[int, Sequence[str]], Expected]:
    """`slow(count, stops)`: what a model writes after `count` prompts, one at a time."""
    tokenizer = tokenizers_by_family["byte_level"]
    ends = plain(lively_llama(tokenizer), tokenizer, prompts_of(32))
    return lambda count, stops: ends(stops)[:count]


# Not the unigram family: its training gives another vocabulary in every process.
@pytest.mark.parametrize(
    "family",
    [
        pytest.param("metaspace", marks=pytest.mark.slow),
        "byte_level",
        pytest.param("nfc_digits", marks=pytest.mark.slow),
    ],
)
def test_completions_equal_plain_generation(
    family: str, tokenizers_by_family: Tokenizers, lively_llama: Callable[..., Any]
) -> None:
    tokenizer = tokenizers_by_family[family]
    prompts = prompts_of(18)
    longest = max(len(tokenizer(prompt)["input_ids"]) for prompt in prompts)
    # The longest prompts reach the end of the context before the limit.
    model = lively_llama(tokenizer, max_position_embeddings=longest + NEW_TOKENS - 8)
    model.generation_config.eos_token_id = [frequent_token(model, tokenizer, prompts)]
    slow = plain(model, tokenizer, prompts)
    reasons = set()
    for stops in ([], stops_from(slow(()), 0), stops_from(slow(()), 1)):
        expected = slow(stops)
        reasons |= {reason for *_, reason in expected}
        for batch_size in (4, 16):
            engine = HFEngine(model, tokenizer, batch_size)
            assert completions_of(engine, prompts, stops) == expected
    assert reasons == {"stop", "eos", "length", "context"}


def small(kind: str, **settings: Any) -> Any:
    """The configuration of a tiny model, under the names that most architectures use."""
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "initializer_range": 0.5,
        "max_position_embeddings": 160,
    }
    return getattr(transformers, f"{kind}Config")(**{**sizes, **settings})


def old(kind: str, **settings: Any) -> Any:
    """The same under the names of older architectures."""
    sizes = {"initializer_range": 0.5, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 160}
    return getattr(transformers, f"{kind}Config")(**{**sizes, **settings})


LOCAL = [[["global", "local"], 1]]
SERVED = {
    "mistral_at_its_window": small("Mistral", sliding_window=160),
    "mistral_past_its_window": small("Mistral", sliding_window=24),
    "gemma3": small("Gemma3Text", sliding_window=24, head_dim=8),
    "dynamic_rope": small("Llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0}),
    "longrope": small("Phi3", pad_token_id=0, rope_parameters=LONGROPE),
    "gpt2": old("GPT2"),
    "gpt_neo": small("GPTNeo", num_layers=2, num_heads=4, attention_types=LOCAL, window_size=24),
    "bloom": old("Bloom", hidden_size=32),
    "mpt": transformers.MptConfig(d_model=32, n_layers=2, n_heads=4, initializer_range=0.5),
}


@pytest.mark.parametrize("name", SERVED)
def test_completions_equal_plain_generation_when_positions_work_differently(
    name: str, tokenizers_by_family: Tokenizers
) -> None:
    tokenizer, config = tokenizers_by_family["nfc_digits"], SERVED[name]
    prompts = prompts_of(6)
    # Rows reach the end of the context one by one, while the rest of their batch goes on.
    context = max(len(tokenizer(prompt)["input_ids"]) for prompt in prompts) + 12
    if hasattr(config, "max_position_embeddings"):
        config.max_position_embeddings = context
    if name == "longrope":  # a context in which the rotation changes
        config.rope_parameters["original_max_position_embeddings"] = context
    if name == "mistral_at_its_window":
        config.sliding_window = context
    config.vocab_size, config.eos_token_id, config.bos_token_id = len(tokenizer), None, None
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    slow = plain(model, tokenizer, prompts)
    stops = stops_from(slow(()), 0, count=2)
    expected = slow(stops)
    for batch_size in (4, 16):
        assert completions_of(HFEngine(model, tokenizer, batch_size), prompts, stops) == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (transformers.MambaConfig(hidden_size=32, num_hidden_layers=1), "keeps more than the keys"),
        (small("Qwen3Next", num_experts=2), "keeps more than the keys"),
        (old("OpenAIGPT"), "fills no cache"),
        (
            transformers.BartConfig(
                d_model=32, decoder_layers=1, is_decoder=True, is_encoder_decoder=False
            ),
            "takes no position ids",
        ),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_engine_rejects_a_model(
    config: Any, message: str, tokenizers_by_family: Tokenizers
) -> None:
    config.vocab_size = 500
    with pytest.raises(ValueError, match=message):
        HFEngine(AutoModelForCausalLM.from_config(config), tokenizers_by_family["nfc_digits"], 4)


def test_engine_rejects_a_model_that_computes_nan(tokenizer: Tokenizer, model: Any) -> None:
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.get_input_embeddings().weight[0] = torch.nan
    with pytest.raises(NonFiniteLoss, match="computes NaN or infinite numbers"):
        HFEngine(broken, tokenizer, 4)


def test_engine_is_greedy(tokenizer: Tokenizer, model: Any) -> None:
    prompts = prompts_of(6)
    expected = plain(model, tokenizer, prompts)(STOPS)
    written = tokenizer(expected[0][0])["input_ids"]
    own = GenerationConfig(
        do_sample=True,
        temperature=5.0,
        top_p=0.9,
        top_k=3,
        num_beams=4,
        repetition_penalty=1.3,
        no_repeat_ngram_size=2,
        min_new_tokens=30,
        max_new_tokens=3,
        suppress_tokens=written,
        forced_eos_token_id=5,
        num_return_sequences=2,
    )
    model.generation_config = own
    model.config.use_cache = False  # as gradient checkpointing leaves it
    assert completions_of(HFEngine(model, tokenizer, 4), prompts, STOPS) == expected
    assert model.generation_config is own


@pytest.mark.parametrize("ends", [[], [""], ["", ""], ["", " and", " and 7"]])
def test_engine_completes_each_prompt(ends: list[str], tokenizer: Tokenizer, model: Any) -> None:
    """Also where one is another's beginning."""
    prompts = [f"Ben has 12 apples{end}" for end in ends]
    expected = plain(model, tokenizer, prompts)(STOPS)
    assert completions_of(HFEngine(model, tokenizer, 4), prompts, STOPS) == expected


# Work that is avoided


@pytest.mark.parametrize("n_prefix", [0, 5])
def test_growing_layer_copies_no_key_at_most_steps(n_prefix: int) -> None:
    prefix, copying = DynamicLayer(), DynamicLayer()  # type: ignore[no-untyped-call]
    prefix.update(torch.randn(1, 2, 6, 4), torch.randn(1, 2, 6, 3))
    held = [states[:, :, :n_prefix] for states in (prefix.keys, prefix.values)]
    copying.update(*(states.repeat(3, 1, 1, 1) for states in held))
    held = [prefix.keys.clone(), prefix.values.clone()]
    layer, places = GrowingLayer(prefix, n_prefix), []
    for n_new in (7, *[1] * 200):
        new = torch.randn(3, 2, n_new, 4), torch.randn(3, 2, n_new, 3)
        found, expected = layer.update(*new), copying.update(*new)
        assert all(map(torch.equal, found, expected))
        assert layer.get_mask_sizes(1) == copying.get_mask_sizes(1)
        places.append(found[0].data_ptr())
    assert len(set(places)) == 2
    # Other batches begin with the same prefix.
    assert all(map(torch.equal, held, (prefix.keys, prefix.values)))


class Calls:
    """Records shapes and positions of a model's forward passes; logits must be for one token."""

    def __init__(self, model: Any):
        self.shapes: list[tuple[int, int]] = []
        self.positions: list[torch.Tensor] = []
        model.model.register_forward_pre_hook(self._record, with_kwargs=True)
        model.lm_head.register_forward_pre_hook(self._check_logits)

    def _check_logits(self, module: Any, args: tuple[torch.Tensor]) -> None:
        assert args[0].shape[1] == 1

    def _record(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        assert torch.is_inference_mode_enabled()
        assert not module.training
        self.shapes.append(tuple(kwargs["input_ids"].shape))
        if kwargs.get("position_ids") is not None:
            self.positions.append(kwargs["position_ids"])


def test_shared_prefix_is_read_once(
    tokenizers_by_family: Tokenizers, lively_llama: Callable[..., Any]
) -> None:
    tokenizer = tokenizers_by_family["metaspace"]
    model, prompts = lively_llama(tokenizer), prompts_of(20)
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    engine = HFEngine(model.train(), tokenizer, 4)
    calls = Calls(model)
    completions_of(engine, prompts, ())
    batch, shared = calls.shapes[0]
    assert batch == 1
    assert all(row[:shared] == ids[0][:shared] for row in ids)
    assert len({tuple(row[: shared + 1]) for row in ids}) > 1 or shared == min(map(len, ids)) - 1
    assert max(width for _, width in calls.shapes[1:]) <= max(map(len, ids)) - shared
    # Padding shifts no position: every row's last own token has the position that it has alone.
    first = calls.positions[0]
    order = sorted(ids, key=len, reverse=True)
    assert first[:, -1].tolist() == [len(row) - 1 for row in order[:4]]
    assert first[-1].max() == len(order[3]) - 1
    assert not torch.is_inference_mode_enabled()


def test_rows_of_like_length_are_read_together(tokenizer: Tokenizer, model: Any) -> None:
    prompts = prompts_of(20)
    lengths = sorted((len(tokenizer(prompt)["input_ids"]) for prompt in prompts), reverse=True)
    engine = HFEngine(model, tokenizer, 20)
    calls = Calls(model)
    completions_of(engine, prompts, ())
    (_, shared), *rest = calls.shapes
    widest = [(8, lengths[0]), (8, lengths[8]), (4, lengths[16])]
    assert rest == [(n, width - shared) for n, width in widest] + [(20, 1)] * (NEW_TOKENS - 1)


def test_rows_decoded_are_few(
    tokenizer: Tokenizer, model: Any, slow: Callable[..., Expected]
) -> None:
    prompts = prompts_of(32)
    stops = stops_from(slow(32, ()), 0, count=12)
    engine = HFEngine(model, tokenizer, 8)
    calls = Calls(model)
    found = completions_of(engine, prompts, stops)
    wanted = sum(n_new for _, _, n_new, _ in found)
    assert {reason for *_, reason in found} == {"stop", "length"}
    computed = sum(batch for batch, _ in calls.shapes[1:])
    assert wanted <= computed < 1.6 * wanted
    assert max(batch for batch, _ in calls.shapes) == 8


# Memory


def limit_rows(model: Any, limit: int, after: int = 0) -> Any:
    """Make a model run out of memory above a batch size, except the first `after` times."""
    passes = iter(range(10**9))

    def check(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if len(kwargs["input_ids"]) > limit and next(passes) >= after:
            raise torch.OutOfMemoryError("fake")

    model.model.register_forward_pre_hook(check, with_kwargs=True)
    return model


@pytest.mark.parametrize("after", [0, 1, 17])
def test_nothing_is_lost(
    after: int,
    tokenizer: Tokenizer,
    model: Any,
    slow: Callable[..., Expected],
    caplog: pytest.LogCaptureFixture,
) -> None:
    prompts = prompts_of(20)
    stops = stops_from(slow(20, ()), 1)
    expected = slow(20, stops)
    engine = HFEngine(limit_rows(model, 3, after), tokenizer, 64)
    with caplog.at_level(logging.WARNING):
        assert completions_of(engine, prompts, stops) == expected
    assert engine.batch_size == 2
    assert len(caplog.records) == 3
