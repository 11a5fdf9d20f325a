"""Decoding rules, the engine of transformers against plain generation, drawn outputs, and chats."""

from __future__ import annotations

import copy
import logging
import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers import PreTrainedTokenizerFast as Tokenizer
from transformers.cache_utils import DynamicLayer

from vocagnolm.chat.formats import Conversation
from vocagnolm.chat.render import Rendered
from vocagnolm.conventions import NonFiniteLoss
from vocagnolm.evaluation.engines.generation import Chat, Engine, Row, cut
from vocagnolm.evaluation.engines.hf_engine import GrowingLayer, HFEngine, draw_tokens
from vocagnolm.evaluation.tasks.benchmarks import BENCHMARKS, INSTRUCTION
from vocagnolm.evaluation.tasks.tasks import Sampling, seed_of, uniform
from vocagnolm.models.load import NO_LIMIT
from vocagnolm.readers import template_of

Tokenizers = dict[str, Tokenizer]
FAMILIES = ("metaspace", "prepend", "byte_level", "nfc_digits", "trimmed", "unigram")
SHARED_TEXT = "Ben has 15 apples and buys 12 more apples.\nThe answer is 27.\n\n\n"
STOPS = ("\n\nQuestion:", "\n\nProblem:")
NEW_TOKENS = 24


def test_cut_ends_before_the_earliest_stop() -> None:
    assert cut("The\n\nQuestion: 2\n\nProblem: 3", STOPS) == "The"
    assert cut("The\n\nProblem: 3\n\nQuestion: 2", STOPS) == "The"


def engine_of(tokenizer: Any, context: int = NO_LIMIT) -> Engine:
    """An engine without end tokens."""
    engine = Engine(tokenizer, context, GenerationConfig(), None)
    engine.eos_ids = frozenset()
    return engine


def test_prompt_does_not_end_with_the_token_that_ends_a_text(
    tokenizers_by_family: Tokenizers,
) -> None:
    tokenizer: Any = copy.deepcopy(tokenizers_by_family["byte_level"])
    ending = tokenizer.eos_token
    expected = tokenizer(SHARED_TEXT)["input_ids"]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"$A {ending}", special_tokens=[(ending, tokenizer.eos_token_id)]
    )
    assert tokenizer(SHARED_TEXT)["input_ids"] == [*expected, tokenizer.eos_token_id]
    prompts = []

    class Reading(Engine):
        def _run(self, rows: Any) -> Any:
            prompts.extend(row.prompt for row in rows)
            return iter(())

    engine = Reading(tokenizer, NO_LIMIT, GenerationConfig(), None)
    list(engine.generate([SHARED_TEXT], STOPS, NEW_TOKENS))
    assert prompts == [expected]


# Stop strings in a stream of tokens


def first_stop(engine: Engine, stops: Sequence[str], ids: list[int]) -> int | None:
    """Count tokens until the text contains a stop string, decoding all of them every time."""
    for n in range(1, len(ids) + 1):
        if any(stop in engine.decode(ids[:n]) for stop in stops):
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
    engine = engine_of(tokenizer)

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
    for name, ids in cases.items():
        expected = first_stop(engine, ["\n\n"], ids)
        assert watched(engine, ["\n\n"], ids) == expected, name
        assert (expected is None) == (name == "unreadable")


def test_generated_tokens_decode_a_few_tokens_a_step(tokenizers_by_family: Tokenizers) -> None:
    tokenizer = tokenizers_by_family["metaspace"]
    ids = tokenizer("Ben has 12 数学 apples 😀.\n" * 100, add_special_tokens=False)["input_ids"]
    assert len(ids) > 1000
    engine, decoded = engine_of(tokenizer), []

    def decode(part: Sequence[int], decode: Any = engine.decode) -> Any:
        decoded.append(len(part))
        return decode(part)

    engine.decode = decode  # type: ignore[method-assign]
    assert watched(engine, STOPS, ids) is None
    assert max(decoded) <= 40
    assert sum(decoded) <= 40 * len(ids)


# The engine against plain generation


def prompts_of(count: int) -> list[str]:
    """Prompts with a long shared beginning and ends of many lengths."""
    rng = random.Random(0)
    words = ("apples", "12", "Ben", "数学", "x + y", "\n", "$\\frac{1}{2}$", "the", "😀")
    ends = (" ".join(rng.choices(words, k=rng.randint(0, 14))) for _ in range(count))
    return [f"{SHARED_TEXT}Question: {end}\nAnswer:" for end in ends]


Expected = list[tuple[str, int, int, str]]


def plain(
    model: Any, tokenizer: Any, prompts: Sequence[str]
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
            max_new_tokens=min(NEW_TOKENS, context - len(ids)),
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
        reason = "length" if len(new) == NEW_TOKENS else "context"
        return text.strip(), n_prompt, len(new), "eos" if new[-1] in ends else reason

    return lambda stops: [end(*row, stops) for row in rows]


def completions_of(engine: Engine, prompts: Sequence[str], stops: Sequence[str]) -> Expected:
    """Return what an engine gives, in the order of the prompts; check that each comes once."""
    groups = list(engine.generate(prompts, stops, NEW_TOKENS))
    assert all(groups)
    found = sorted((c for group in groups for c in group), key=lambda c: c.index)
    assert [c.index for c in found] == list(range(len(prompts)))
    return [(c.text, c.n_prompt_tokens, c.n_new_tokens, c.finish_reason) for c in found]


def stops_from(free: Expected, seed: int, count: int = 3) -> list[str]:
    """Pieces of what a model writes, so that some of its completions stop."""
    rng, long = random.Random(seed), [text for text, *_ in free if len(text) > 20]
    starts = [(text, rng.randrange(8, len(text) - 4)) for text in rng.sample(long, count)]
    return [text[start : start + rng.randint(2, 9)] for text, start in starts]


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


SLOW = pytest.mark.slow


# Not the unigram family: its training gives another vocabulary in every process.
@pytest.mark.parametrize(
    "family",
    [pytest.param("metaspace", marks=SLOW), "byte_level", pytest.param("nfc_digits", marks=SLOW)],
)
def test_completions_equal_plain_generation(
    family: str, tokenizers_by_family: Tokenizers, lively_llama: Callable[..., Any]
) -> None:
    tokenizer, prompts = tokenizers_by_family[family], prompts_of(18)
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    # The longest prompts reach the end of the context before the limit.
    longest = max(map(len, ids))
    model = lively_llama(tokenizer, max_position_embeddings=longest + NEW_TOKENS - 8)
    # A token that the model writes after some of the prompts, but not at once.
    first = torch.tensor(ids[:1])
    written = model.generate(first, max_new_tokens=15, do_sample=False, eos_token_id=None)
    model.generation_config.eos_token_id = [int(written[0, -1])]
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
FACTORS = {"rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
LONGROPE = {"rope_type": "longrope", **FACTORS}
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


DECODER = {"decoder_layers": 1, "is_decoder": True, "is_encoder_decoder": False}
REJECTED = [
    (transformers.MambaConfig(hidden_size=32, num_hidden_layers=1), "keeps more than"),
    (small("Qwen3Next", num_experts=2), "keeps more than"),
    (old("OpenAIGPT"), "fills no cache"),
    (transformers.BartConfig(d_model=32, **DECODER), "position ids"),
]


def test_engine_rejects_what_it_would_answer_wrongly(tokenizer: Tokenizer, model: Any) -> None:
    for config, message in REJECTED:
        config.vocab_size = 500
        with pytest.raises(ValueError, match=message):
            HFEngine(AutoModelForCausalLM.from_config(config), tokenizer, 4)
    prompts = ["a", "1 + 2 = 3 and so on", "1 + 2 = 3"]
    longest = max(len(tokenizer(prompt)["input_ids"]) for prompt in prompts)
    with pytest.raises(NotImplementedError):  # the prompts fit
        engine_of(tokenizer, context=longest + 1).generate(prompts, STOPS, NEW_TOKENS)
    with pytest.raises(ValueError, match=rf"1 of 3 prompts .* {longest} tokens"):
        engine_of(tokenizer, context=longest).generate(prompts, STOPS, NEW_TOKENS)
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = torch.nan
    with pytest.raises(NonFiniteLoss, match="NaN or infinite"):
        HFEngine(model, tokenizer, 4)


def test_engine_is_greedy(tokenizer: Tokenizer, model: Any) -> None:
    prompts = prompts_of(6)
    expected = plain(model, tokenizer, prompts)(STOPS)
    written = tokenizer(expected[0][0])["input_ids"]
    own = {"do_sample": True, "temperature": 5.0, "num_beams": 4, "repetition_penalty": 1.3}
    own |= {"min_new_tokens": 30, "max_new_tokens": 3, "suppress_tokens": written}
    model.generation_config = GenerationConfig(**own, num_return_sequences=2)
    kept = model.generation_config
    model.config.use_cache = False  # as gradient checkpointing leaves it
    assert completions_of(HFEngine(model, tokenizer, 4), prompts, STOPS) == expected
    assert model.generation_config is kept


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


def shapes_of(model: Any) -> list[tuple[int, int]]:
    """The shapes of a model's next forward passes, the logits of which must be for one token."""
    shapes: list[tuple[int, int]] = []

    def record(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        assert torch.is_inference_mode_enabled()
        assert not module.training
        shapes.append(tuple(kwargs["input_ids"].shape))

    def check_logits(module: Any, args: tuple[torch.Tensor]) -> None:
        assert args[0].shape[1] == 1

    model.model.register_forward_pre_hook(record, with_kwargs=True)
    model.lm_head.register_forward_pre_hook(check_logits)
    return shapes


def test_shared_prefix_is_read_once_and_rows_of_like_length_together(
    tokenizer: Tokenizer, model: Any
) -> None:
    prompts = prompts_of(20)
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    lengths = sorted(map(len, ids), reverse=True)
    engine, shapes = HFEngine(model.train(), tokenizer, 20), shapes_of(model)
    completions_of(engine, prompts, ())
    (batch, shared), *rest = shapes
    assert batch == 1
    assert len({tuple(row[:shared]) for row in ids}) == 1
    assert len({tuple(row[: shared + 1]) for row in ids}) > 1
    widest = [(8, lengths[0]), (8, lengths[8]), (4, lengths[16])]
    assert rest == [(n, width - shared) for n, width in widest] + [(20, 1)] * (NEW_TOKENS - 1)


def test_rows_decoded_are_few(
    tokenizer: Tokenizer, model: Any, slow: Callable[..., Expected]
) -> None:
    stops = stops_from(slow(32, ()), 0, count=12)
    engine, shapes = HFEngine(model, tokenizer, 8), shapes_of(model)
    found = completions_of(engine, prompts_of(32), stops)
    assert {reason for *_, reason in found} == {"stop", "length"}
    wanted = sum(n_new for _, _, n_new, _ in found)
    assert wanted <= sum(batch for batch, _ in shapes[1:]) < 1.6 * wanted
    assert max(batch for batch, _ in shapes) == 8


# Memory


@pytest.mark.parametrize("after", [0, 1, 17])
def test_nothing_is_lost_when_batches_of_four_rows_run_out_of_memory(
    after: int,
    tokenizer: Tokenizer,
    model: Any,
    slow: Callable[..., Expected],
    caplog: pytest.LogCaptureFixture,
) -> None:
    passes = iter(range(10**9))

    def check(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if len(kwargs["input_ids"]) > 3 and next(passes) >= after:
            raise torch.OutOfMemoryError("fake")

    model.model.register_forward_pre_hook(check, with_kwargs=True)
    stops = stops_from(slow(20, ()), 1)
    engine = HFEngine(model, tokenizer, 64)
    with caplog.at_level(logging.WARNING):
        assert completions_of(engine, prompts_of(20), stops) == slow(20, stops)
    assert engine.batch_size == 2
    assert len(caplog.records) == 3


# Drawn outputs: tokens against loops, and every output by its seed alone


def test_seeds_are_those_of_earlier_versions() -> None:
    """Otherwise a resumed evaluation would mix outputs of two rules."""
    assert seed_of("aime24", 3, 1) == 840059799
    assert uniform(840059799, 5) == 0.0004904476070635155


def drawn_token(logits: Sequence[float], number: float, sampling: Sampling) -> int:
    """Walk down the tokens from the likeliest to the one that reaches a number's share."""
    weights = [math.exp((x - max(logits)) / sampling.temperature) for x in logits]
    order = sorted(range(len(logits)), key=lambda token: (-weights[token], token))
    kept: list[int] = []
    while sum(weights[token] for token in kept) < sampling.top_p * sum(weights):
        if len(kept) == len(order):
            break
        kept.append(order[len(kept)])
    target = number * sum(weights[token] for token in kept)
    walked = 0.0
    for token in kept:
        walked += weights[token]
        if target < walked:
            return token
    return kept[-1]


@pytest.mark.parametrize(
    "sampling", [Sampling(1, 1.0), Sampling(1, 0.6, 0.95), Sampling(1, 2, 0.3)]
)
def test_tokens_equal_a_walk_over_sorted_probabilities(sampling: Sampling) -> None:
    rng = random.Random(0)
    logits = [[rng.gauss(0, 2) for _ in range(30)] for _ in range(400)]
    numbers = [rng.random() for _ in logits]
    found = draw_tokens(torch.tensor(logits), torch.tensor(numbers), sampling)
    pairs = zip(logits, numbers, strict=True)
    assert found.tolist() == [drawn_token(row, number, sampling) for row, number in pairs]


@pytest.mark.parametrize("number", [0.0, 1 - 2**-48])
@pytest.mark.parametrize("top_p", [1e-9, 0.5, 1.0])
def test_token_is_one_that_is_kept_at_the_ends(number: float, top_p: float) -> None:
    logits = torch.tensor([[0.0, 9.0, -float("inf"), -90.0]])
    (token,) = draw_tokens(logits, torch.tensor([number]), Sampling(1, 1.0, top_p)).tolist()
    assert token == 1 or (token in (0, 3) and top_p == 1.0 and number > 0.5)


PROMPTS = [f"Ben has {n} apples.\nThe answer is {'so ' * (n % 5)}" for n in range(9)]
SEEDS = [seed_of("gsm8k", n, 0) for n in range(9)]
SAMPLING = Sampling(1, 0.8, 0.95)


@torch.no_grad()
def slow_text(model: Any, tokenizer: Tokenizer, place: int) -> str:
    """Draw each token alone, from the logits of the whole text so far, by the seed's number."""
    ids = tokenizer(PROMPTS[place])["input_ids"]
    new: list[int] = []
    for step in range(NEW_TOKENS):
        logits = model(torch.tensor([ids + new])).logits[0, -1].tolist()
        new.append(drawn_token(logits, uniform(SEEDS[place], step), SAMPLING))
    return str(tokenizer.decode(new, clean_up_tokenization_spaces=False)).strip()


def test_outputs_equal_drawing_token_by_token_in_any_batch(
    tokenizer: Tokenizer, lively_llama: Callable[..., Any]
) -> None:
    # The next token is nearly as uncertain as that of a real model.
    model = lively_llama(tokenizer, initializer_range=0.2)
    slow = {place: slow_text(model, tokenizer, place) for place in range(9)}
    assert len(set(slow.values())) == 9
    # Some rows stop, so that others resume in other batches.
    stop = slow[4][6:10]
    # The last is what a resumed evaluation still asks, in another order.
    for batch_size, places in ((1, range(9)), (4, range(9)), (16, range(9)), (4, [7, 2, 5])):
        prompts = [PROMPTS[place] for place in places]
        seeds = [SEEDS[place] for place in places]
        engine = HFEngine(model, tokenizer, batch_size)
        found = {}
        for group in engine.generate(prompts, [stop], NEW_TOKENS, SAMPLING, seeds):
            for completion in group:
                found[places[completion.index]] = completion.text
        assert found == {place: slow[place].split(stop)[0].strip() for place in places}


# Chats

# With its own start token, today's date, and white space before the end of a turn.
TEMPLATE = (
    "{{ bos_token }}{% if not date_string is defined %}{{ strftime_now('%d') }}{% endif %}"
    "{{ date_string }} {% for m in messages %}[{{ m.role }}] {{ m.content }} {{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def test_prompt_is_the_users_turn_with_the_instruction(student_tokenizer: Any) -> None:
    chat, benchmark = Chat(student_tokenizer, TEMPLATE), BENCHMARKS["gsm8k"].in_chat()
    asked = chat.prompt(benchmark.template.replace("{question}", "1 + 1?"))
    eos = student_tokenizer.eos_token
    turn = f"[user] 1 + 1?\n{INSTRUCTION} {eos}[assistant]"
    assert asked == f"{student_tokenizer.bos_token}26 Jul 2024 {turn}"
    assert chat.end_ids == {student_tokenizer.eos_token_id}
    assert (benchmark.shots, benchmark.prompt_set, benchmark.stops) == (0, None, ())


@pytest.mark.parametrize("name", ["plain", "chatml"])
def test_built_in_templates_ask_as_they_are_trained(
    name: str, student_tokenizer: Tokenizer
) -> None:
    template = template_of(student_tokenizer, "student", name)
    assert template is not None
    asked = Chat(student_tokenizer, template.source).prompt("1 + 1?")
    found = template.render(Conversation("1 + 1?\n2", ("user", "assistant"), (6, 8)))
    assert isinstance(found, Rendered)
    assert found.text[: found.places[1, 0]].rstrip(" ") == asked


@pytest.mark.parametrize(
    ("behind", "ends"), [("<|turn|>\n", ["<|turn|>"]), ("\n\nUser:", []), ("", [])]
)
def test_turn_ends_with_the_templates_special_token(
    tokenizer_dirs: dict[str, Path], behind: str, ends: list[str]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dirs["nfc_digits"])
    tokenizer.add_tokens(["<|turn|>"], special_tokens=True)
    source = "{% for m in messages %}{{ m.content }}" + behind + "{% endfor %}"
    source += "{% if add_generation_prompt %}<|turn|>{% endif %}"
    assert Chat(tokenizer, source).end_ids == set(tokenizer.convert_tokens_to_ids(ends))
