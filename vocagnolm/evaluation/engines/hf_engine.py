"""Completions from a model of `transformers`, without needless work.

The tokens that all prompts share are read once, and every batch gets their keys and values. No step
copies them. A batch pauses when half of its rows are finished, and the others continue later in a
full batch.
"""

import copy
import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Cache,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    PreTrainedModel,
    __version__,
)
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList

from vocagnolm.evaluation.engines.generation import Chat, Completion, Engine, Row
from vocagnolm.evaluation.tasks.tasks import Sampling, uniform
from vocagnolm.models.load import context_length
from vocagnolm.shell.extras import unsupported
from vocagnolm.token_loss import require_finite

logger = logging.getLogger(__name__)
# These models take no position ids, but are right with padding on the left, because they count
# positions by the mask.
_POSITIONS_FROM_MASK = {"bloom", "mpt"}
# These rotations are computed for any position, beyond the context, too.
_WITHOUT_BOUND = {"default", "linear", "llama3", "yarn"}
# This many rows read their prompts at once, padded to the longest.
_READ_TOGETHER = 8
# The buffers of keys and values grow by this many tokens at a time.
_SPARE = 128


class GrowingLayer(DynamicLayer):
    """A layer's keys and values in buffers with spare room. `DynamicLayer` copies all each step.

    It begins with the first `length` of those of a prefix that all rows share.
    """

    def __init__(self, prefix: Any, length: int):
        super().__init__()  # type: ignore[no-untyped-call]
        self._length = length
        # Keys and values [rows, heads, places, width], at first [1, heads, prefix, width].
        self._buffers = [prefix.keys[:, :, :length], prefix.values[:, :, :length]]

    def get_seq_length(self) -> int:
        """Return the number of tokens."""
        return self._length

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Add the keys and values of new tokens, and return those of all tokens."""
        begin = self._length
        length = begin + key_states.shape[2]
        if self._buffers[0].shape[2] < length:
            self.widen(len(key_states), length)
        self._length = length
        keys, values = self._buffers
        keys[:, :, begin:length] = key_states
        values[:, :, begin:length] = value_states
        self.keys = keys[:, :, :length]
        self.values = values[:, :, :length]
        return self.keys, self.values

    def widen(self, n_rows: int, length: int) -> None:
        """Make room for rows of at least `length` tokens, which `update` or a `part` fills."""
        for index, buffer in enumerate(self._buffers):
            # Attention multiplies masked places by 0. If the memory held NaN, it would stay NaN, so
            # new places are zeros.
            wider = buffer.new_zeros(n_rows, buffer.shape[1], length + _SPARE, buffer.shape[3])
            wider[:, :, : self._length] = buffer[:, :, : self._length]
            self._buffers[index] = wider
        self._length = length

    def part(self, rows: slice, length: int) -> "GrowingLayer":
        """Return some rows, up to `length` tokens. What is added to them is added here, too."""
        part = copy.copy(self)
        part._length = length
        # Slices share the memory of the buffers.
        part._buffers = [buffer[rows] for buffer in self._buffers]
        return part


class HFEngine(Engine):
    """Completes prompts with a causal language model of `transformers`, on the model's device.

    If a batch does not fit into memory, it is halved, and so is every later batch.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        batch_size: int,
        chat: Chat | None = None,
    ):
        self._model: Any = model.eval()  # type: ignore[no-untyped-call]
        _check_servable(model)
        _check_finite(model)
        super().__init__(tokenizer, context_length(model.config), model.generation_config, chat)
        self.batch_size = batch_size

    def _run(self, rows: list[Row]) -> Iterator[list[Completion]]:
        # The longest rows come first, so running out of memory shows at once.
        fresh = sorted(rows, key=lambda row: -len(row))
        n_shared, prefix = self._read_prefix(rows)
        begun: list[Row] = []
        while fresh or begun:
            size = self.batch_size
            # Rows that have begun continue when they fill a batch, or are the last ones.
            taken = 0 if len(begun) >= size else min(size, len(fresh))
            batch = fresh[:taken] + begun[: size - taken]
            fresh, begun = fresh[taken:], begun[size - taken :]
            try:
                self._advance(batch, n_shared, prefix)
            except torch.OutOfMemoryError:
                # The rows keep the tokens that were written before the error.
                if len(batch) == 1:
                    raise
                self.batch_size = len(batch) // 2
                message = "out of memory with %d rows: continuing with batches of %d"
                logger.warning(message, len(batch), self.batch_size)
            completions = []
            for row in batch:
                if row.is_finished:
                    completions.append(row.completion())
                else:
                    begun.append(row)
            if completions:
                yield completions

    @torch.inference_mode()
    def _read_prefix(self, rows: list[Row]) -> tuple[int, list[Any]]:
        """Read the tokens with which all prompts begin into a cache, but never a whole prompt."""
        cache = DynamicCache(config=self._model.config)
        # A row that is nearly done may wait for one that has just begun.
        places = max(len(row) + row.room for row in rows) + max(row.room for row in rows)
        n_shared = 0
        if _can_pad_inside(self._model, places):
            prompts = [row.prompt[:-1] for row in rows]
            # What the first and the last in order share, all between them share, too.
            first, last = min(prompts), max(prompts)
            while n_shared < len(first) and first[n_shared] == last[n_shared]:
                n_shared += 1
        # Without such tokens, one is read for the shapes of its keys and values.
        _read(self._model, rows[0].prompt[: max(n_shared, 1)], cache)
        return n_shared, cache.layers

    @torch.inference_mode()
    def _advance(self, batch: list[Row], n_shared: int, prefix: list[Any]) -> None:
        """Continue rows until half of them are finished."""
        # Read a few rows of similar length at a time, with little padding. All of them continue
        # together.
        batch.sort(key=lambda row: -len(row))
        width = len(batch[0])
        growing = [GrowingLayer(layer, n_shared) for layer in prefix]
        for layer in growing:
            layer.widen(len(batch), width)
        for first in range(0, len(batch), _READ_TOGETHER):
            rows = slice(first, first + _READ_TOGETHER)
            before = n_shared + width - len(batch[first])
            parts = [layer.part(rows, before) for layer in growing]
            self._generate(batch[rows], n_shared, parts, width, steps=1)
        if not _half_finished(batch):
            width, steps = max(map(len, batch)), max(row.room for row in batch)
            self._generate(batch, n_shared, growing, width, steps)

    def _generate(
        self, batch: list[Row], n_shared: int, layers: Sequence[Any], width: int, steps: int
    ) -> None:
        """Read what is not in the cache, and write until half of the rows are finished.

        Rows are padded to `width` tokens and get at most `steps` more.
        """
        device = self._model.device
        # A row is [shared prefix][padding][own tokens], the padding masked. Positions follow the
        # mask, so that a row's tokens have the positions that they have alone:
        #
        #     ids        S S S S S . . a b c        mask       1 1 1 1 1 0 0 1 1 1
        #                S S S S S d e f g h                   1 1 1 1 1 1 1 1 1 1
        #     positions  0 1 2 3 4     5 6 7
        input_ids = []
        mask = []
        for row in batch:
            padding = [0] * (width - len(row))
            ids = row.prompt + row.new
            input_ids.append(ids[:n_shared] + padding + ids[n_shared:])
            mask.append([1] * n_shared + padding + [1] * (len(row) - n_shared))
        rope = self._model.config.get_text_config().to_dict().get("rope_parameters") or {}
        if rope.get("rope_type") not in _WITHOUT_BOUND:
            # A position beyond the context is an error, or changes the rotation of other rows.
            # Finished rows are carried along, and need positions for what they write.
            steps = min(steps, self.context - width)
        if steps < 1:
            return

        def append(ids: Tensor, scores: object, **options: object) -> Tensor:
            for row, token in zip(batch, ids[:, -1].tolist(), strict=True):
                if not row.is_finished:
                    row.append(token)
            return torch.full((len(batch),), _half_finished(batch), device=device)

        def draw(ids: Tensor, logits_BV: Tensor) -> Tensor:
            # Take the largest score, as in greedy decoding.
            sampling = batch[0].sampling
            if sampling is None:
                return logits_BV
            numbers = [uniform(row.seed, len(row.new)) for row in batch]
            tokens_B = draw_tokens(logits_BV, torch.tensor(numbers, device=device), sampling)
            return torch.zeros_like(logits_BV).scatter_(1, tokens_B[:, None], 1.0)

        # `generate` fills the gaps of a config from the model's, which may sample.
        model_config = self._model.generation_config
        self._model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
        try:
            self._model.generate(
                input_ids=torch.tensor(input_ids, device=device),
                attention_mask=torch.tensor(mask, device=device),
                do_sample=False,
                max_new_tokens=steps,
                logits_processor=LogitsProcessorList([draw]),
                stopping_criteria=StoppingCriteriaList([append]),
                **{cache_argument(): Cache(list(layers))},
            )
        finally:
            self._model.generation_config = model_config


def draw_tokens(logits_BV: Tensor, numbers_B: Tensor, sampling: Sampling) -> Tensor:
    """Draw a token for each row [B], by one number in [0, 1) that no other row affects."""
    probabilities_BV = torch.softmax(logits_BV.float() / sampling.temperature, dim=-1)
    sorted_BV, tokens_BV = probabilities_BV.sort(dim=-1, descending=True, stable=True)
    # A token is kept if the more probable tokens together do not reach top_p.
    before_BV = sorted_BV.cumsum(dim=-1) - sorted_BV
    kept_BV = before_BV < sampling.top_p
    cumulative_BV = (sorted_BV * kept_BV).cumsum(dim=-1)
    # The numbers are shares of the kept mass, and each falls into the part of one token.
    targets_B1 = numbers_B[:, None].to(cumulative_BV) * cumulative_BV[:, -1:]
    places_B1 = torch.searchsorted(cumulative_BV, targets_B1, right=True)
    # Rounding may put a number at the very end.
    places_B1 = places_B1.minimum(kept_BV.sum(dim=-1, keepdim=True) - 1)
    return tokens_BV.gather(1, places_B1)[:, 0]


def _half_finished(batch: list[Row]) -> bool:
    return 2 * sum(row.is_finished for row in batch) >= len(batch)


def cache_argument() -> str:
    """Return the name of the argument that takes a cache, in `generate` and in every model.

    Versions of transformers name it differently, but its type is the same.

    Raises:
        ImportError: no argument has that type.
    """
    parameters = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    for name, parameter in parameters.items():
        if Cache.__name__ in str(parameter.annotation):
            return name
    raise unsupported("gives models no Cache")


def _read(model: PreTrainedModel, ids: list[int], cache: Cache) -> None:
    """Add the keys and values of a text to a cache."""
    input_ids = torch.tensor([ids], device=model.device)
    # Run only the body, because the logits of all these tokens are large and not needed.
    model.base_model(input_ids=input_ids, use_cache=True, **{cache_argument(): cache})


@torch.inference_mode()
def _check_servable(model: PreTrainedModel) -> None:
    """Reject a model whose tokens would not have the scores that they have alone."""
    cache = DynamicCache(config=model.config)
    kinds = {type(layer) for layer in cache.layers}
    parameters = inspect.signature(model.forward).parameters
    if getattr(model, "_is_stateful", False) or kinds - {DynamicLayer, DynamicSlidingWindowLayer}:
        fault = "keeps more than the keys and values of its tokens"
    elif "position_ids" not in parameters and model.config.model_type not in _POSITIONS_FROM_MASK:
        fault = "takes no position ids: padding would move its tokens"
    else:
        # A model without such an argument raises a TypeError.
        with suppress(TypeError):
            _read(model, [0], cache)
        if cache.get_seq_length() == 1:
            return
        fault = f"fills no cache that transformers {__version__} gives it as {cache_argument()}"
    raise ValueError(f"{type(model).__name__} {fault}: use --engine vllm")


@torch.inference_mode()
def _check_finite(model: Any) -> None:
    """Raise `NonFiniteLoss` if a model's scores are NaN. All its answers would be wrong."""
    ids = torch.arange(8, device=model.device)
    scores = model(input_ids=ids[None]).logits
    # Ids that a model never writes may have the score -inf, but not the best one.
    require_finite(model, scores.amax(-1))


def _can_pad_inside(model: PreTrainedModel, places: int) -> bool:
    # Padding may not stand between a shared prefix and a row's own tokens if distances are counted
    # in places, padding included. Examples are ALiBi as in MPT, and attention windows that are
    # shorter than this batch. For those, padding in front of everything is right.
    config = model.config.get_text_config()
    layers = DynamicCache(config=config).layers
    windows = [x.sliding_window for x in layers if isinstance(x, DynamicSlidingWindowLayer)]
    if "local" in config.to_dict().get("attention_layers", ()):
        windows.append(config.window_size)
    return config.model_type != "mpt" and places <= min(windows, default=places)
