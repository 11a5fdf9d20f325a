r"""Every aggregation, judged by a teacher that really has the student's tokenizer.

    python -m benchmarks.experiments.aggregations --student TOKENIZER --teachers TOKENIZER ... \
        --corpora A.jsonl B.jsonl

The same small model is trained with each tokenizer on the same text, one pass, and reads the same
held-out text. With the student's tokenizer it says of each student token what a teacher should say:
the reference. Each teacher's losses are aggregated onto the student's tokens, and compared with
that. A vocabulary is what occurs in the text, so that large ones cost no more.

Rules: those of `--aggregation`, and for comparison only `first`, the first teacher token of the
range; `start`, all of a loss where its token begins; `common`, the mean excess of the smallest
segment that begins and ends with tokens of both; `per_char`, the range's nats per character times
the token's characters; `prior`, like `share` with weights for the characters' positions in their
token, fitted to the reference on half of the held-out text. All are judged on the other half.

Prints Markdown tables, a row per teacher. The excess is that of a student, the reference's model
with another seed after a quarter of the text; `common` has nothing else, so that its correlation
with the reference's losses contains the student's. Alike: of the 40 % of tokens with the largest
excess those that are also chosen with the reference; .4 is chance. Where tokens are cut otherwise:
the excess's rank correlation, and the share of them that both choose or both leave out. Re-cut: no
other model, the reference's own losses spread over characters and summed over the teacher's tokens.
The last row is the reference with another seed: no rule can do better than that. Takes about two
minutes a tokenizer on one core.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, get_scheduler

from vocagnolm.alignment import align_spans, covered_shares
from vocagnolm.guidance import Aggregation, aggregate_teacher_losses
from vocagnolm.spans import encode_batch
from vocagnolm.texts.tokenizers import load_tokenizer
from vocagnolm.texts.tokens import Spans

Losses = npt.NDArray[np.float64]
Rows = list[list[Losses]]  # of models, then of texts: the losses of its tokens
MAX_LENGTH, BATCH, LEARNING_RATE, TOP_K = 256, 4, 3e-3, 0.4
KINDS = ("the same", "inside a longer one", "several", "crossing")
_POSITIONS = 8  # in a teacher token, the last for all further ones
_FIT_STEPS, _FIT_RATE = 300, 0.05


@dataclass(frozen=True)
class Text:
    """A held-out text as both tokenizers cut it, with the losses of their models, in nats."""

    ours: Spans
    theirs: Spans
    teacher: Losses
    reference: Losses
    student: Losses


@dataclass(frozen=True)
class Judged:
    """A rule's numbers against the reference's, over all tokens."""

    correlation: float
    correlation_of_excess: float
    bias: float
    error: float
    alike: float
    rank_correlation_where_cut_otherwise: float
    alike_where_cut_otherwise: float


# -- Models ---------------------------------------------------------------------------------------


def make_model(vocabulary: int, seed: int) -> LlamaForCausalLM:
    """An untrained model, the same for every tokenizer but for its vocabulary."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=4 * MAX_LENGTH,
        tie_word_embeddings=True,
        initializer_range=0.04,
    )
    return LlamaForCausalLM(config)


def train_and_read(
    tokenizer: Any, train: Sequence[str], held_out: Sequence[str], seed: int
) -> tuple[list[Spans], Rows]:
    """Train a model on texts; the spans of the held-out ones, and their losses.

    Losses are of the model after a quarter of its steps, and at the end.
    """
    both = encode_batch(tokenizer, [*train, *held_out])
    known, flat = np.unique(np.concatenate([one.ids for one in both]), return_inverse=True)
    ids = np.split(flat + 1, np.cumsum([len(one.ids) for one in both])[:-1])  # 0 begins a text
    stream = np.concatenate([part for one in ids[: len(train)] for part in ([0], one)])
    blocks = stream[: len(stream) // MAX_LENGTH * MAX_LENGTH].reshape(-1, MAX_LENGTH)
    blocks = np.random.default_rng(seed).permutation(blocks)
    model = make_model(len(known) + 1, seed)
    steps = max(1, len(blocks) // BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, betas=(0.9, 0.95))
    rate = get_scheduler("cosine", optimizer, steps // 20, steps)
    read = [one.tolist() for one in ids[len(train) :]]
    losses = []
    for step in range(1, steps + 1):
        batch_BS = torch.from_numpy(blocks[(step - 1) * BATCH : step * BATCH])
        model(input_ids=batch_BS, labels=batch_BS).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        optimizer.zero_grad()
        if step == -(-steps // 4):
            losses.append(read_losses(model, read))
    losses.append(read_losses(model, read))
    return [one.spans for one in both[len(train) :]], losses


@torch.no_grad()
def read_losses(model: LlamaForCausalLM, texts: Sequence[Sequence[int]]) -> list[Losses]:
    """The losses of the tokens of each text."""
    found = []
    for ids in texts:
        ids_1S = torch.tensor([[0, *ids]])
        logits_SV = model(input_ids=ids_1S).logits[0, :-1]
        nats_S = F.cross_entropy(logits_SV, ids_1S[0, 1:], reduction="none")
        found.append(nats_S.double().numpy())
    return found


# -- Rules ----------------------------------------------------------------------------------------


def aggregate(text: Text, rule: Aggregation) -> Losses:
    """The teacher's losses of a text by a rule of `--aggregation`."""
    ranges = align_spans(text.ours, text.theirs)
    shares = covered_shares(text.ours, text.theirs, ranges)
    losses_1T, ranges_1S2, shares_1S3 = (
        torch.from_numpy(array)[None] for array in (text.teacher, ranges, shares)
    )
    loss_1S, _ = aggregate_teacher_losses(losses_1T, ranges_1S2, rule, shares_BS3=shares_1S3)
    return loss_1S[0].double().numpy()


def first(text: Text) -> Losses:
    """The loss of the first teacher token of the range."""
    losses: Losses = text.teacher[align_spans(text.ours, text.theirs)[:, 0]]
    return losses


def start(text: Text) -> Losses:
    """The losses of the teacher tokens that begin in the student token."""
    begun = np.append(0.0, np.cumsum(text.teacher))
    here, behind = (np.searchsorted(text.theirs[:, 0], text.ours[:, edge]) for edge in (0, 1))
    losses: Losses = begun[behind] - begun[here]
    return losses


def per_char(text: Text) -> Losses:
    """The nats per character of the range, times the student token's characters."""
    low, high = align_spans(text.ours, text.theirs).T
    characters = text.theirs[high - 1, 1] - text.theirs[low, 0]
    total = np.append(0.0, np.cumsum(text.teacher))
    density: Losses = (total[high] - total[low]) / characters
    return density * (text.ours[:, 1] - text.ours[:, 0])


def common(text: Text) -> Losses:
    """The student's loss less the mean excess of the segment that both tokenizers cut alike."""
    edges = np.intersect1d(text.ours[:, 0], text.theirs[:, 0])
    ours, theirs = (
        np.searchsorted(edges, spans[:, 0], side="right") for spans in (text.ours, text.theirs)
    )
    nats = np.bincount(ours, text.student, len(edges) + 1)
    nats -= np.bincount(theirs, text.teacher, len(edges) + 1)
    return text.student - (nats / np.maximum(np.bincount(ours, minlength=len(edges) + 1), 1))[ours]


def fit_prior(texts: Sequence[Text]) -> Callable[[Text], Losses]:
    """A share by characters that weigh by their position in the teacher token, as fits best."""
    logit_P = torch.zeros(_POSITIONS, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([logit_P], _FIT_RATE)
    characters = [_characters(text) for text in texts]
    target = torch.from_numpy(np.concatenate([text.reference for text in texts]))
    for _ in range(_FIT_STEPS):
        found = torch.cat([_weighted(logit_P, *parts) for parts in characters])
        loss = F.mse_loss(found, target)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    weights_P = logit_P.detach()
    return lambda text: _weighted(weights_P, *_characters(text)).numpy()


def _characters(text: Text) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """Of each character: its student token, teacher token, position in that; losses and counts."""
    at = np.arange(min(text.ours[-1, 1], text.theirs[-1, 1]))
    ours, theirs = (
        np.searchsorted(spans[:, 1], at, side="right") for spans in (text.ours, text.theirs)
    )
    position = np.minimum(at - text.theirs[theirs, 0], _POSITIONS - 1)
    tensors = map(torch.from_numpy, (ours, theirs, position))
    return (*tensors, torch.from_numpy(text.teacher), len(text.ours))  # type: ignore[return-value]


def _weighted(
    logit_P: Tensor, ours: Tensor, theirs: Tensor, position: Tensor, losses: Tensor, count: int
) -> Tensor:
    weight = logit_P.exp()[position]
    whole = torch.zeros_like(losses).index_add(0, theirs, weight)
    nats = weight / whole[theirs] * losses[theirs]
    return torch.zeros(count, dtype=torch.float64).index_add(0, ours, nats)


def rules(fitting: Sequence[Text]) -> dict[str, Callable[[Text], Losses]]:
    """All rules by name."""
    ours = {name: lambda text, name=name: aggregate(text, name) for name in get_args(Aggregation)}
    others = {"first": first, "start": start, "common": common, "per_char": per_char}
    return {**ours, **others, "prior": fit_prior(fitting)}


# -- Judging --------------------------------------------------------------------------------------


def judge(texts: Sequence[Text], rule: Callable[[Text], Losses]) -> Judged:
    """Compare a rule's numbers with the reference's, over all tokens of texts."""
    found, reference, student = (
        np.concatenate(parts)
        for parts in (
            [rule(text) for text in texts],
            [text.reference for text in texts],
            [text.student for text in texts],
        )
    )
    is_other = np.concatenate([_kinds(text) for text in texts]) > 0
    is_other |= not is_other.any()
    excess = student - found, student - reference
    count = round(TOP_K * len(found))
    ranks = [np.argsort(np.argsort(-one)) for one in excess]
    chosen = [rank < count for rank in ranks]
    others = [np.argsort(np.argsort(one[is_other])) for one in excess]
    return Judged(
        correlation=_correlation(found, reference),
        correlation_of_excess=_correlation(*excess),
        bias=float((found - reference).mean()),
        error=float((found - reference).std()),
        alike=float((chosen[0] & chosen[1]).sum() / count),
        rank_correlation_where_cut_otherwise=_correlation(*others),
        alike_where_cut_otherwise=float((chosen[0] == chosen[1])[is_other].mean()),
    )


def _correlation(x: npt.NDArray[Any], y: npt.NDArray[Any]) -> float:
    return float(np.asarray(np.corrcoef(x, y))[0, 1])


def recut(text: Text) -> Text:
    """The reference's own losses as the teacher's tokens would have them: nothing but the cuts."""
    swapped = Text(text.theirs, text.ours, text.reference, text.reference, text.student)
    return Text(text.ours, text.theirs, aggregate(swapped, "share"), text.reference, text.student)


def kinds(texts: Sequence[Text]) -> dict[str, float]:
    """How the student's tokens lie among the teacher's, as shares."""
    counts = np.bincount(np.concatenate([_kinds(text) for text in texts]), minlength=len(KINDS))
    return dict(zip(KINDS, (counts / counts.sum()).tolist(), strict=True))


def _kinds(text: Text) -> npt.NDArray[np.int64]:
    """The number in `KINDS` of each student token."""
    low, high = align_spans(text.ours, text.theirs).T
    is_whole = text.theirs[low, 0] == text.ours[:, 0]
    is_whole &= text.theirs[high - 1, 1] == text.ours[:, 1]
    numbers: npt.NDArray[np.int64] = np.where(high - low == 1, 0, 2) + ~is_whole
    return numbers


def report(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """Markdown tables by measure, teacher and column.

    >>> print(report({"bias": {"gpt2": {"max": 0.5, "share": -0.25}}}))
    | bias | max | share |
    |---|---|---|
    | gpt2 | 0.50 | -0.25 |
    """
    tables = []
    for measure, teachers in found.items():
        columns = list(next(iter(teachers.values())))
        lines = [f"| {' | '.join([measure, *columns])} |", "|---" * (len(columns) + 1) + "|"]
        for teacher, row in teachers.items():
            cells = (f"{row[column]:.2f}" if column in row else "" for column in columns)
            lines.append(f"| {' | '.join([teacher, *cells])} |")
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def read_texts(corpora: Sequence[Path], train: int, held_out: int, cut: int) -> list[list[str]]:
    """Documents of `train` characters in all, and the beginnings of others."""
    lines = [line for file in corpora for line in file.open(encoding="utf-8")]
    texts = list(dict.fromkeys(json.loads(line)["text"] for line in lines))
    Random("aggregations").shuffle(texts)
    ends = np.cumsum([len(text) for text in texts[held_out:]])
    count = int(np.searchsorted(ends, train)) + 1
    return [texts[held_out:][:count], [text[:cut] for text in texts[:held_out]]]


def measure(
    student: Path, teachers: Sequence[Path], train: Sequence[str], held_out: Sequence[str]
) -> dict[str, dict[str, dict[str, float]]]:
    """All measures of all teachers, and of the reference with another seed."""
    tokenizer = load_tokenizer(str(student), "student")
    ours, (_, reference) = train_and_read(tokenizer, train, held_out, seed=0)
    _, (base, again) = train_and_read(tokenizer, train, held_out, seed=1)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for path in (*teachers, student):
        if path == student:
            name, theirs, losses = "the student's, another seed", ours, again
        else:
            other = load_tokenizer(str(path), "teacher")
            theirs, (_, losses) = train_and_read(other, train, held_out, seed=0)
            name = path.name
        texts = [Text(*parts) for parts in zip(ours, theirs, losses, reference, base, strict=True)]
        fitting, judged = texts[::2], texts[1::2]
        characters = sum(map(len, held_out))
        nats = {"teacher": losses, "reference": reference, "student": base}
        rows = {f"nats per character: {who}": np.concatenate(x).sum() for who, x in nats.items()}
        quality = {who: float(total) / characters for who, total in rows.items()}
        found.setdefault("student tokens", {})[name] = kinds(judged) | quality
        for rule, apply in rules(fitting).items():
            for measured, value in vars(judge(judged, apply)).items():
                found.setdefault(measured.replace("_", " "), {}).setdefault(name, {})[rule] = value
        again_cut = [recut(text) for text in judged]
        for rule, apply in rules([recut(text) for text in fitting]).items():
            value = judge(again_cut, apply).correlation_of_excess
            found.setdefault("re-cut: correlation of excess", {}).setdefault(name, {})[rule] = value
        sys.stderr.write(f"{name}\n")
    return found


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--student", type=Path, required=True, help="directory of a tokenizer")
    add("--teachers", type=Path, nargs="+", required=True, help="directories of tokenizers")
    add("--corpora", type=Path, nargs="+", required=True, help=".jsonl files with a field text")
    add("--characters", type=int, default=1_500_000, help="of the text that is trained on")
    add("--held_out", type=int, default=400, help="documents")
    add("--held_out_characters", type=int, default=500, help="at most, of each")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    train, held_out = read_texts(
        arguments.corpora,
        arguments.characters,
        arguments.held_out,
        arguments.held_out_characters,
    )
    found = measure(arguments.student, arguments.teachers, train, held_out)
    sys.stdout.write(report(found) + "\n")


if __name__ == "__main__":
    main()
