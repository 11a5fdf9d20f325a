"""Completions from a model of `transformers`, without its usual waste.

The tokens that all prompts share are read once; their keys and values are handed to every batch,
where no step copies them. A batch ends when half of its rows are finished, and the others resume
later, in a full batch again.
"""

import copy
import inspect
import logging
from collections.abc import Iterator, Sequence
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

from vocagnolm.evaluation.engines.generation import Chat, Completion, Engine, Row, shared_length
from vocagnolm.evaluation.sampling import Sampling
from vocagnolm.extras import check_transformers, unsupported
from vocagnolm.models.load import context_length

logger = logging.getLogger(__name__)
# These models take no position ids, and are right all the same with padding on the left: they
# count positions by the mask.
_POSITIONS_FROM_MASK = {"bloom", "mpt"}
# These rotations are computed for any position, whatever the context.
_WITHOUT_BOUND = {"default", "linear", "llama3", "yarn"}
# So many rows read their prompts at once, padded to the longest.
_READ_TOGETHER = 8
# The buffers of keys and values grow by this many tokens at once.
_SPARE = 128


class GrowingLayer(DynamicLayer):
    """A layer's keys and values in buffers with room; `DynamicLayer` copies all of them each step.

    It begins with those of a prefix that all rows share, which it reads from another layer.
    """

    def __init__(self, prefix: DynamicLayer):
        super().__init__()  # type: ignore[no-untyped-call]
        self._length = prefix.get_seq_length()
        # Keys and values [rows, heads, places, width], at first [1, heads, prefix, width]. The
        # list is empty while there is no prefix.
        self._buffers = []
        for states in (prefix.keys, prefix.values):
            if states is not None:
                self._buffers.append(states)

    def get_seq_length(self) -> int:
        """Count the tokens."""
        return self._length

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Add the keys and values of new tokens, and return those of all tokens."""
        begin = self._length
        length = begin + key_states.shape[2]
        if not self._buffers:
            self._buffers = [key_states[:, :, :0], value_states[:, :, :0]]
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
        """Make room for rows of `length` tokens and more, which `update` or a `part` fills."""
        for index, buffer in enumerate(self._buffers):
            # Attention multiplies masked places by 0, which leaves NaN where the memory holds it:
            # so new places are zeros.
            wider = buffer.new_zeros(n_rows, buffer.shape[1], length + _SPARE, buffer.shape[3])
            wider[:, :, : self._length] = buffer[:, :, : self._length]
            self._buffers[index] = wider
        self._length = length

    def part(self, rows: slice, length: int) -> "GrowingLayer":
        """Return some rows, up to `length` tokens; what is added to them is added here, too."""
        part = copy.copy(self)
        part._length = length
        # Slices share the memory of the buffers.
        part._buffers = [buffer[rows] for buffer in self._buffers]
        return part


class HFEngine(Engine):
    """Completes prompts with a causal language model of `transformers`, on the model's device.

    The batch size is halved for good when a batch does not fit into memory.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        batch_size: int,
        chat: Chat | None = None,
    ):
        check_transformers()
        self._model: Any = model.eval()  # type: ignore[no-untyped-call]
        _check_servable(model)
        super().__init__(tokenizer, context_length(model.config), model.generation_config, chat)
        self.batch_size = batch_size

    def _run(self, rows: list[Row]) -> Iterator[list[Completion]]:
        # The longest rows come first, so that running out of memory shows at once.
        fresh = sorted(rows, key=lambda row: -len(row))
        n_shared, prefix = self._read_prefix(rows)
        begun: list[Row] = []
        while fresh or begun:
            size = self.batch_size
            # Rows that have begun go on when they fill a batch, or the rest of the last one.
            taken = 0 if len(begun) >= size else min(size, len(fresh))
            batch = fresh[:taken] + begun[: size - taken]
            fresh, begun = fresh[taken:], begun[size - taken :]
            try:
                self._advance(batch, n_shared, prefix)
            except torch.OutOfMemoryError:
                # The rows keep the tokens that were written before it.
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
        """Read the tokens that all prompts begin with into a cache, but never a whole prompt."""
        cache = DynamicCache(config=self._model.config)
        # A row that is nearly done may wait for one that has just begun.
        places = max(len(row) + row.room for row in rows) + max(row.room for row in rows)
        shared = shared_length([row.prompt[:-1] for row in rows])
        n_shared = shared if _can_pad_inside(self._model, places) else 0
        if n_shared:
            _read(self._model, rows[0].prompt[:n_shared], cache)
        return n_shared, cache.layers

    @torch.inference_mode()
    def _advance(self, batch: list[Row], n_shared: int, prefix: list[Any]) -> None:
        """Continue rows until half of them are finished."""
        if not n_shared:
            layers: list[Any] = []
            for layer in prefix:
                # A layer with a window of attention drops tokens, which buffers do not.
                is_plain = type(layer) is DynamicLayer
                layers.append(GrowingLayer(layer) if is_plain else copy.deepcopy(layer))
            self._generate(batch, 0, layers)
            return
        # A few rows of like length are read at a time, with little padding; all continue together.
        batch.sort(key=lambda row: -len(row))
        width = len(batch[0])
        growing = [GrowingLayer(layer) for layer in prefix]
        for layer in growing:
            layer.widen(len(batch), width)
        for first in range(0, len(batch), _READ_TOGETHER):
            rows = slice(first, first + _READ_TOGETHER)
            before = n_shared + width - len(batch[first])
            parts = [layer.part(rows, before) for layer in growing]
            self._generate(batch[rows], n_shared, parts, width, max_steps=1)
        if not _half_finished(batch):
            self._generate(batch, n_shared, growing)

    def _generate(
        self,
        batch: list[Row],
        n_shared: int,
        layers: Sequence[Any],
        width: int = 0,
        max_steps: int = 0,
    ) -> None:
        """Read what is not in the cache, and write until half of the rows are finished.

        Rows are padded to `width` tokens, and get `max_steps` more; 0 stands for as many as needed.
        """
        device = self._model.device
        # A row is [shared prefix][padding][own tokens], the padding masked. Positions follow the
        # mask, so that a row's tokens have the positions that they have alone:
        #
        #     ids        S S S S S . . a b c        mask       1 1 1 1 1 0 0 1 1 1
        #                S S S S S d e f g h                   1 1 1 1 1 1 1 1 1 1
        #     positions  0 1 2 3 4     5 6 7
        width = width or max(len(row) for row in batch)
        input_ids = []
        mask = []
        for row in batch:
            padding = [0] * (width - len(row))
            ids = row.prompt + row.new
            input_ids.append(ids[:n_shared] + padding + ids[n_shared:])
            mask.append([1] * n_shared + padding + [1] * (len(row) - n_shared))
        steps = max_steps or max(row.room for row in batch)
        rope = self._model.config.get_text_config().to_dict().get("rope_parameters") or {}
        if rope.get("rope_type") not in _WITHOUT_BOUND:
            # A position past the context is an error, or changes the rotation of other rows.
            # Finished rows are carried along, and must find a position for what they write.
            steps = min(steps, self.context - width)
        if steps < 1:
            return

        def append(ids: Tensor, scores: object, **options: object) -> Tensor:
            for row, token in zip(batch, ids[:, -1].tolist(), strict=True):
                if not row.is_finished:
                    row.append(token)
            return torch.full((len(batch),), _half_finished(batch), device=device)

        def draw(ids: Tensor, logits_BV: Tensor) -> Tensor:
            # The largest of the scores is taken, as in greedy decoding.
            sampling = batch[0].sampling
            if sampling is None:
                return logits_BV
            numbers_B = torch.tensor([row.next_uniform() for row in batch], device=device)
            tokens_B = draw_tokens(logits_BV, numbers_B, sampling)
            return torch.zeros_like(logits_BV).scatter_(1, tokens_B[:, None], 1.0)

        # `generate` fills in what a config leaves out from that of the model, which may sample.
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
    """Draw a token for each row [B] by one number in [0, 1) each, which no other row changes."""
    probabilities_BV = torch.softmax(logits_BV.float() / sampling.temperature, dim=-1)
    sorted_BV, tokens_BV = probabilities_BV.sort(dim=-1, descending=True, stable=True)
    # A token is kept if the more probable ones do not reach top_p.
    before_BV = sorted_BV.cumsum(dim=-1) - sorted_BV
    kept_BV = before_BV < sampling.top_p
    cumulative_BV = (sorted_BV * kept_BV).cumsum(dim=-1)
    # The numbers are shares of what is kept. Each falls into the part of one token.
    targets_B1 = numbers_B[:, None].to(cumulative_BV) * cumulative_BV[:, -1:]
    places_B1 = torch.searchsorted(cumulative_BV, targets_B1, right=True)
    # Rounding may put a number at the very end.
    places_B1 = places_B1.minimum(kept_BV.sum(dim=-1, keepdim=True) - 1)
    return tokens_BV.gather(1, places_B1)[:, 0]


def _half_finished(batch: list[Row]) -> bool:
    return 2 * sum(row.is_finished for row in batch) >= len(batch)


def cache_argument() -> str:
    """Return the name of the argument that takes a cache, of `generate` and of every model.

    It differs between versions of transformers, and its type does not. An ImportError where no
    argument is of that type.
    """
    parameters = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    for name, parameter in parameters.items():
        if Cache.__name__ in str(parameter.annotation):
            return name
    raise unsupported("gives models no Cache")


def _read(model: PreTrainedModel, ids: list[int], cache: Cache) -> None:
    """Add the keys and values of a text to a cache."""
    input_ids = torch.tensor([ids], device=model.device)
    # The body alone: logits of all these tokens are worth nothing, and large.
    model.base_model(input_ids=input_ids, use_cache=True, **{cache_argument(): cache})


@torch.inference_mode()
def _fills_cache(model: PreTrainedModel) -> bool:
    """Test whether a model puts the keys and values of a token into a cache that it is given."""
    cache = DynamicCache(config=model.config)
    try:
        _read(model, [0], cache)
    except TypeError:  # it has no such argument
        return False
    return cache.get_seq_length() == 1


def _check_servable(model: PreTrainedModel) -> None:
    parameters = inspect.signature(model.forward).parameters
    kinds = {type(layer) for layer in DynamicCache(config=model.config).layers}
    name = type(model).__name__
    if getattr(model, "_is_stateful", False) or kinds - {DynamicLayer, DynamicSlidingWindowLayer}:
        fault = "keeps more than the keys and values of its tokens"
    elif "position_ids" not in parameters and model.config.model_type not in _POSITIONS_FROM_MASK:
        fault = "takes no position ids: padding would move its tokens"
    elif not _fills_cache(model):
        fault = f"fills no cache that transformers {__version__} gives it as {cache_argument()}"
    else:
        return
    raise ValueError(f"{name} {fault}: use --engine vllm")


def _can_pad_inside(model: PreTrainedModel, places: int) -> bool:
    # Padding may not stand between a shared prefix and a row's own tokens where distances are
    # counted in places, padding included: ALiBi as in MPT, and windows of attention that a batch
    # of this many places outgrows. For those, padding in front of everything is right.
    config = model.config.get_text_config()
    layers = DynamicCache(config=config).layers
    windows = [x.sliding_window for x in layers if isinstance(x, DynamicSlidingWindowLayer)]
    if "local" in config.to_dict().get("attention_layers", ()):
        windows.append(config.window_size)
    return config.model_type != "mpt" and places <= min(windows, default=places)
