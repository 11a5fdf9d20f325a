"""What scoring a corpus once costs beside guided runs that keep their teacher: an estimate.

    python benchmarks/scaling.py --configs DIR

`DIR` holds a directory with a `config.json` for the student and each teacher. Nothing is run, no
weights are read: FLOPs are counted from the configs, hours follow from an assumed share of a GPU's
peak (MFU), dollars from an assumed price. All assumptions are options, and printed.

Floating-point operations of a forward pass, per token:

    2 x matmul parameters + 2 x layers x heads x head dimension x context

The first term is a multiplication and an addition for every weight of the projections, the MLP and
the head; the embedding is a look-up. The second is Q K^T and A V, 4 x heads x head dimension for
each key in each layer, with half a context of keys on average, as attention is causal. It assumes
whole contexts: isolated documents attend to less. A training step takes three times a forward
pass, without recomputation. Overhead of communication, loading and compiling is part of the MFU.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TEACHERS = (  # with teacher tokens per student token, as measured in docs/results.md
    ("llemma-7b", 0.997),
    ("mistral-7b-v0.1", 0.994),
    ("deepseek-math-7b", 0.978),
    ("qwen2.5", 0.943),
)
RUNS = (1, 3, 6, 10)
CONFIG_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "vocab_size",
)


@dataclass(frozen=True)
class Architecture:
    """A decoder with a gated MLP (Llama, Mistral, Qwen2), as in its `config.json`."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    head_dim: int
    vocabulary: int


@dataclass(frozen=True)
class Estimate:
    """What one teacher costs over the corpus.

    Attributes:
        teacher: its directory.
        matmul_parameters: of the teacher.
        flops_per_token: of its forward pass, per teacher token.
        tokens: teacher tokens of the corpus.
        store_gb: size of the store, in 10^9 bytes.
        scoring_flops: of scoring the corpus once.
        scoring_hours, cpt_hours, online_hours: GPU hours of scoring once, of a run without a
            teacher or from a store, and of a run with the teacher at hand.
    """

    teacher: str
    matmul_parameters: int
    flops_per_token: float
    tokens: float
    store_gb: float
    scoring_flops: float
    scoring_hours: float
    cpt_hours: float
    online_hours: float


def read_architecture(directory: Path) -> Architecture:
    """The sizes in a model's `config.json`.

    Raises:
        ValueError: the config lacks a size, as those of other architectures do.
    """
    path = directory / "config.json"
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    missing = [key for key in CONFIG_KEYS if key not in config]
    if missing:
        raise ValueError(
            f"expected the sizes of a Llama-like model, found no {', '.join(missing)} in {path}: "
            "name another model"
        )
    heads = config["num_attention_heads"]
    return Architecture(
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        key_value_heads=config["num_key_value_heads"],
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocabulary=config["vocab_size"],
    )


def matmul_parameters(model: Architecture) -> int:
    """Weights that a token is multiplied with: projections, MLP and head, no embedding.

    >>> matmul_parameters(Architecture(10, 20, 2, 2, 1, 5, 100))  # 2 x (100 + 100 + 100 + 600)
    2800
    """
    query_and_output = 2 * model.hidden * model.heads * model.head_dim
    key_and_value = 2 * model.hidden * model.key_value_heads * model.head_dim
    mlp = 3 * model.hidden * model.intermediate
    return model.layers * (query_and_output + key_and_value + mlp) + model.hidden * model.vocabulary


def attention_flops(model: Architecture, context: int) -> float:
    """Of Q K^T and A V for one token, averaged over a causal context of `context` tokens.

    >>> attention_flops(Architecture(10, 20, 2, 2, 1, 5, 100), context=50)
    2000
    """
    return 2 * model.layers * model.heads * model.head_dim * context


def forward_flops(model: Architecture, context: int) -> float:
    """Of a forward pass, per token.

    >>> forward_flops(Architecture(10, 20, 2, 2, 1, 5, 100), context=50)
    7600
    """
    return 2 * matmul_parameters(model) + attention_flops(model, context)


def store_gigabytes(tokens: float, bytes_per_token: float) -> float:
    """Size of a store, in 10^9 bytes.

    >>> store_gigabytes(tokens=1e9, bytes_per_token=3.0)
    3.0
    """
    return tokens * bytes_per_token / 1e9


def gpu_hours(flops: float, peak_tflops: float, mfu: float) -> float:
    """Hours of one GPU that reaches a share `mfu` of its peak.

    >>> gpu_hours(3.6e18, peak_tflops=1000, mfu=0.5)
    2.0
    """
    return flops / (peak_tflops * 1e12 * mfu) / 3600


def online_cost(scoring: float, cpt: float, runs: int) -> float:
    """Of runs that each read the whole corpus with their teacher, in the unit of the others.

    >>> online_cost(scoring=10, cpt=5, runs=3)
    45
    """
    return runs * (scoring + cpt)


def stored_cost(scoring: float, cpt: float, runs: int) -> float:
    """Of scoring once, and runs from the store at the cost of continual pretraining (CPT).

    >>> stored_cost(scoring=10, cpt=5, runs=3)
    25
    """
    return scoring + runs * cpt


def break_even(scoring: float, cpt: float, online: float) -> int:
    """The fewest runs k with scoring + k cpt <= k online.

    >>> break_even(scoring=10, cpt=5, online=15), break_even(scoring=11, cpt=5, online=15)
    (1, 2)
    """
    return math.ceil(scoring / (online - cpt) - 1e-9)  # a rounding error is no further run


def estimate(args: argparse.Namespace, name: str, ratio: float) -> Estimate:
    """Everything about a teacher that makes `ratio` tokens of a student's token."""
    model = read_architecture(args.configs / name)
    student = read_architecture(args.configs / args.student)
    tokens = args.student_tokens * ratio
    flops = tokens * forward_flops(model, args.context)
    teacher_hours = gpu_hours(flops, args.peak_tflops, args.scoring_mfu)
    step_flops = 3 * args.student_tokens * forward_flops(student, args.context)
    cpt_hours = gpu_hours(step_flops, args.peak_tflops, args.training_mfu)
    return Estimate(
        teacher=name,
        matmul_parameters=matmul_parameters(model),
        flops_per_token=forward_flops(model, args.context),
        tokens=tokens,
        store_gb=store_gigabytes(tokens, args.bytes_per_token),
        scoring_flops=flops * (1 + args.reread),
        scoring_hours=teacher_hours * (1 + args.reread),
        cpt_hours=cpt_hours,
        online_hours=teacher_hours + cpt_hours,
    )


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def scoring_table(estimates: Sequence[Estimate], price: float) -> list[str]:
    """What scoring once takes."""
    header = (
        *("teacher", "matmul parameters", "GFLOP / token", "tokens", "store"),
        *("FLOP", "GPU hours", "dollars"),
    )
    rows = [
        [
            found.teacher,
            f"{found.matmul_parameters / 1e9:.3f} B",
            f"{found.flops_per_token / 1e9:.2f}",
            f"{found.tokens / 1e9:.2f} B",
            f"{found.store_gb:.1f} GB",
            f"{found.scoring_flops:.2e}",
            f"{found.scoring_hours:.0f}",
            f"{found.scoring_hours * price:,.0f}",
        ]
        for found in estimates
    ]
    return markdown(header, rows)


def runs_table(estimates: Sequence[Estimate], price: float) -> list[str]:
    """What k runs take, with the teacher at hand and from a store."""
    runs = [f"k = {k}: online, stored" for k in RUNS]
    header = ("teacher", "CPT run", "online run", "break-even", *runs)
    rows = []
    for found in estimates:
        scoring, cpt, online = found.scoring_hours, found.cpt_hours, found.online_hours
        costs = [
            f"{online_cost(online - cpt, cpt, k) * price:,.0f}, "
            f"{stored_cost(scoring, cpt, k) * price:,.0f}"
            for k in RUNS
        ]
        fewest = f"k = {break_even(scoring, cpt, online)}"
        rows.append([found.teacher, f"{cpt:.0f} h", f"{online:.0f} h", fewest, *costs])
    return markdown(header, rows)


def directory_and_ratio(text: str) -> tuple[str, float]:
    """A teacher of the command line.

    >>> directory_and_ratio("qwen2.5=0.943")
    ('qwen2.5', 0.943)
    """
    directory, ratio = text.split("=")
    return directory, float(ratio)


def parse_arguments() -> argparse.Namespace:
    """The assumptions."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--configs", type=Path, required=True, help="directory of directories with a config.json")
    add("--student", default="tinyllama", help="directory in --configs")
    add(
        "--teachers",
        nargs="+",
        type=directory_and_ratio,
        default=TEACHERS,
        metavar="DIRECTORY=RATIO",
        help="with teacher tokens per student token",
    )
    add("--student_tokens", type=float, default=15e9, help="of the corpus (OpenWebMath)")
    add("--context", type=int, default=2048, help="tokens, of student and teacher")
    add("--bytes_per_token", type=float, default=3.05, help="of the store, per teacher token")
    add("--reread", type=float, default=0.0, help="share of tokens that scoring reads twice")
    add("--peak_tflops", type=float, default=989, help="of the GPU (H100, dense bfloat16)")
    add("--scoring_mfu", type=float, default=0.6, help="share of the peak, forward")
    add("--training_mfu", type=float, default=0.4, help="share of the peak, training")
    add("--price", type=float, default=2.5, help="dollars per GPU hour")
    return parser.parse_args()


def main() -> None:
    """Print the assumptions and two tables."""
    args = parse_arguments()
    estimates = [estimate(args, name, ratio) for name, ratio in args.teachers]
    ratios = ", ".join(f"{name} {ratio}" for name, ratio in args.teachers)
    lines = [
        f"Measured: {args.bytes_per_token} bytes per teacher token; teacher tokens per student "
        f"token {ratios}.",
        f"Assumed: {args.student_tokens / 1e9:g} B student tokens of {args.student}, context "
        f"{args.context}, {args.reread:.0%} read twice, {args.peak_tflops:g} TFLOP/s peak, MFU "
        f"{args.scoring_mfu} scoring and {args.training_mfu} training, "
        f"{args.price} dollars per GPU hour.",
        "\nScoring once:\n",
        *scoring_table(estimates, args.price),
        "\nGPU hours of a run, and dollars of k runs:\n",
        *runs_table(estimates, args.price),
    ]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
