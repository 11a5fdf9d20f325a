"""Measure how the token selection changes if student or teacher compute with fewer bits.

    python -m benchmarks.experiments.selection_under_precision --seeds 3

The reference is float32 for both models. It selects 40 % of the tokens of each packed sequence. The
table shows the share of these tokens that is no longer selected, over several seeds, and how much
the teacher's losses move. bf16 is real. float8, int8 and 4 bits are simulated on the CPU: numbers
are rounded as in the kernels, but the hardware that multiplies and adds is another. One pair is the
demo's student, pretrained here with `seed`, and its teacher. The other pair is two random Llamas.
Their losses carry no information and are close to each other, so small errors change the selection.
Pairs as deep as the paper's differ more than the demo's, because rounding adds up over layers.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.models import llama, make_trainer, prepare
from vocagnolm import PackedCollator, prepare_dataset
from vocagnolm.conventions import IGNORED_LABEL
from vocagnolm.demo import world as demo_world
from vocagnolm.demo.methods import TEACHER
from vocagnolm.demo.run import BASE, STUDENT_TOKENIZER, make_base
from vocagnolm.shell.io import ASSETS

LENGTH, TEACHER_CONTEXT, ROWS = 256, 512, 4
NF4_BLOCK = 64
OUTLIER = 6.0  # LLM.int8() leaves columns beyond it in 16 bits
# The values of 4-bit NormalFloat (QLoRA, arXiv 2305.14314, appendix E).
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


class Way(NamedTuple):
    """The precision of a pair."""

    teacher: Callable[[Any], Any] = lambda model: model
    student_bf16: bool = False


def by_row(x: Tensor, largest: float, to: Callable[[Tensor], Tensor]) -> Tensor:
    """Scale each row to the maximum `largest`, round it by `to`, and scale it back."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / largest
    return to(x / scale) * scale


def float8(x: Tensor) -> Tensor:
    """Round rows to 8-bit floats."""
    limit = torch.finfo(torch.float8_e4m3fn).max
    return by_row(x.float(), limit, lambda y: y.to(torch.float8_e4m3fn).float())


def float8_linear(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    """Return a layer with float8 weights and activations, float32 sums and the input's dtype."""
    weight = float8(layer.weight)
    return lambda x: F.linear(float8(x), weight, _float(layer.bias)).to(x.dtype)


def int8_linear(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    """Return an LLM.int8() layer: 8-bit weights and activations, but outlier columns in 16 bits."""
    original, weight = layer.weight.float(), by_row(layer.weight.float(), 127.0, torch.round)

    def forward(x: Tensor) -> Tensor:
        is_outlier = x.abs().amax(tuple(range(x.dim() - 1))) > OUTLIER
        inner = by_row(x.float().masked_fill(is_outlier, 0.0), 127.0, torch.round)
        outer = F.linear(x.float()[..., is_outlier], original[:, is_outlier])
        return (F.linear(inner, weight, _float(layer.bias)) + outer).to(x.dtype)

    return forward


def nf4_linear(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    """Return a layer with 4-bit weights in blocks of 64; activations and products are unchanged."""
    levels = torch.tensor(NF4)
    blocks = layer.weight.float().reshape(-1, NF4_BLOCK)
    nearest = by_row(blocks, 1.0, lambda y: levels[(y[..., None] - levels).abs().argmin(-1)])
    weight = nearest.reshape(layer.weight.shape).to(layer.weight.dtype)
    return lambda x: F.linear(x, weight, layer.bias)


def _float(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.float()


def bf16(model: Any) -> Any:
    """Convert a model to bfloat16, as teachers are loaded on a GPU."""
    return model.bfloat16()


def simulated(linear: Callable[[nn.Linear], Callable[[Tensor], Tensor]]) -> Callable[[Any], Any]:
    """Return a function that makes a model bfloat16 and simulates its layers, except the head."""

    def change(model: Any) -> Any:
        model = bf16(model)
        for layer in model.base_model.modules():
            if isinstance(layer, nn.Linear):
                layer.forward = linear(layer)
        return model

    return change


WAYS = {
    "teacher bf16": Way(bf16),
    "student bf16 (autocast)": Way(student_bf16=True),
    "teacher and student bf16": Way(bf16, student_bf16=True),
    "teacher int8, simulated": Way(simulated(int8_linear)),
    "teacher fp8, simulated": Way(simulated(float8_linear)),
    "teacher nf4, simulated": Way(simulated(nf4_linear)),
}


def select(student: Any, teacher: Any, batches: list[Any], way: Way) -> tuple[Tensor, Tensor]:
    """Return the teacher's losses of all tokens, and which tokens are selected (Eq. 1 to 4)."""
    student, teacher = copy.deepcopy(student), way.teacher(copy.deepcopy(teacher))
    losses, selected = [], []
    with tempfile.TemporaryDirectory() as scratch:
        options: dict[str, Any] = {"on_cpu": True, "bf16": way.student_bf16}
        trainer = prepare(make_trainer(student, teacher, LENGTH, scratch, **options))
        for batch in batches:
            found = trainer.token_guidance(batch)
            losses.append(found.teacher_loss_BT[batch["teacher_labels"] != IGNORED_LABEL])
            selected.append(found.weight_BS.flatten() > 0)
    return torch.cat(losses), torch.cat(selected)


def make_batches(seed: int, pages: int) -> list[Any]:
    """Make batches of pages of the embedded world that no student of the demo has read."""
    texts = demo_world.corpus(pages, 1000 + seed, 0.4)
    blocks = prepare_dataset(
        datasets.Dataset.from_dict({"text": list(texts)}),
        *(AutoTokenizer.from_pretrained(ASSETS / name) for name in (STUDENT_TOKENIZER, TEACHER)),
        max_length=LENGTH,
        teacher_context=TEACHER_CONTEXT,
    )
    collate, starts = PackedCollator(LENGTH), range(0, len(blocks) - ROWS + 1, ROWS)
    return [collate([blocks[i] for i in range(at, at + ROWS)]) for at in starts]


def demo_pair(seed: int, directory: Path) -> tuple[Any, Any]:
    """Make the demo's student after its first pretraining; return it with the demo's teacher."""
    own = directory / f"seed{seed}"
    own.mkdir()
    with redirect_stdout(sys.stderr):
        make_base(own, seed)
    load = AutoModelForCausalLM.from_pretrained
    return tuple(load(path, dtype=torch.float32) for path in (own / BASE, ASSETS / TEACHER))


def random_pair(seed: int, _: Path) -> tuple[Any, Any]:
    """Make untrained Llamas of 4 and 8 layers."""
    torch.manual_seed(seed)
    options = {"num_key_value_heads": 4, "initializer_range": 0.08, "max_position_embeddings": 2048}
    return llama(1024, 128, 4, 8, **options), llama(2048, 256, 8, 8, **options)


PAIRS = {"demo": demo_pair, "random": random_pair}


def measure(seeds: int, pages: int, scratch: Path) -> list[str]:
    """Return the lines of the table."""
    changed: dict[tuple[str, str], list[float]] = {}
    moved: dict[tuple[str, str], list[float]] = {}
    tokens = 0
    for seed in range(seeds):
        batches = make_batches(seed, pages)
        for pair, make in PAIRS.items():
            models = make(seed, scratch)
            loss, is_selected = select(*models, batches, Way())
            tokens = int(is_selected.sum())
            for name, way in WAYS.items():
                its_loss, its_selected = select(*models, batches, way)
                lost = float((is_selected & ~its_selected).sum() / tokens)
                changed.setdefault((pair, name), []).append(100 * lost)
                rms = float((its_loss - loss).square().mean().sqrt())
                moved.setdefault((pair, name), []).append(rms)
            sys.stderr.write(f"seed {seed}, {pair}: done\n")
    heads = [f"{pair}: {what}" for pair in PAIRS for what in ("changed, %", "L_T moves, nats")]
    lines = [f"{seeds} seeds, about {tokens:,} selected tokens each; mean (least - most).\n"]
    lines += [f"| | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    for name in WAYS:
        cells = []
        for pair in PAIRS:
            values = changed[pair, name]
            spread = f"{min(values):.2f} - {max(values):.2f}"
            cells.append(f"{statistics.mean(values):.2f} ({spread})")
            cells.append(f"{statistics.mean(moved[pair, name]):.1e}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--pages", type=int, default=400, help="Texts of a seed.")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        lines = measure(arguments.seeds, arguments.pages, Path(scratch))
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
