"""From graded outputs to accuracies with intervals, rounded as the harness rounds them.

Records are lines of an item file (`evaluation.records`). A column, of a benchmark or an average, is
a dictionary:

    rounded, exact, interval    percentages; the interval is a list of two
    n, correct                  of a benchmark: its items, and the right outputs
    samples, pass_at            with several outputs per item; {"2": {rounded, exact, interval}}
    unanswered, decided_by, math_verify, finish_reasons, mean_new_tokens    see `summarize`
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from vocagnolm.evaluation.extraction import NO_LETTER
from vocagnolm.evaluation.tasks.benchmarks import AVERAGES
from vocagnolm.shell.io import JsonObject

Z_95 = 1.959963984540054


def accuracy(correct: int, n: int) -> JsonObject:
    """Return right answers among at least one as a percentage, with an interval.

    `rounded` is what the harness reports: one decimal, halves to the even digit.

    >>> accuracy(10, 32)["rounded"]
    31.2
    """
    return {"n": n, "correct": correct} | _rounded(correct / n * 100, wilson_interval(correct, n))


def _rounded(exact: float, interval: tuple[float, float]) -> JsonObject:
    # NumPy rounds halves to even, and so does the harness.
    return {"rounded": float(np.round(exact, 1)), "exact": exact, "interval": list(interval)}


def wilson_interval(correct: float, n: float) -> tuple[float, float]:
    """Return the 95 % score interval of a share, in percent (Wilson, 1927)."""
    share = correct / n
    centre = share + Z_95**2 / (2 * n)
    spread = Z_95 * math.sqrt(share * (1 - share) / n + Z_95**2 / (4 * n * n))
    scale = 100 / (1 + Z_95**2 / n)
    low, high = (centre - spread) * scale, (centre + spread) * scale
    # If no answer or every answer is right, one end is exactly 0 or 100. Floats would miss it
    # slightly.
    return low if correct else 0.0, high if correct < n else 100.0


def interval_over_items(shares: Sequence[float], samples: int) -> tuple[float, float]:
    """Return the 95 % interval of the mean of items' shares, in percent.

    Outputs of one item are alike: a hard question is hard every time. So this is Wilson's interval
    for as many independent outputs as would have the variance of these shares: at least the number
    of items, at most the number of outputs. With one output per item it is Wilson's.
    """
    n = len(shares)
    share = math.fsum(shares) / n
    variance = math.fsum((x - share) ** 2 for x in shares) / n
    if share in (0, 1):
        # If all items are alike, there is no sign of how much they vary.
        effective = float(n)
    elif variance == 0:
        effective = float(n * samples)
    else:
        effective = min(float(n * samples), n * share * (1 - share) / variance)
    return wilson_interval(share * effective, effective)


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Estimate how likely one of k outputs of an item is right, without bias (Chen et al., 2021).

    This is the share of all choices of k samples with at least one right output.

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 3, 2)
    (0.25, 0.5, 1.0)
    """
    return 1 - math.comb(samples - right, k) / math.comb(samples, k)


def sampled_accuracy(right: Sequence[int], samples: int) -> JsonObject:
    """Return avg@k of items with k samples, and pass@k for smaller k."""
    shares = [count / samples for count in right]
    avg = _share_of_items(shares, samples)
    pass_at = {}
    # Powers of two are usual. With one output, pass@1 equals avg@k.
    ks = [2**power for power in range(1, samples.bit_length()) if 2**power < samples]
    for k in [*ks, samples]:
        pass_at[str(k)] = _share_of_items([pass_at_k(samples, c, k) for c in right], samples)
    return {"n": len(right), "samples": samples, "correct": sum(right), **avg, "pass_at": pass_at}


def _share_of_items(shares: Sequence[float], samples: int) -> JsonObject:
    exact = math.fsum(shares) / len(shares) * 100
    return _rounded(exact, interval_over_items(shares, samples))


def average(columns: Sequence[JsonObject]) -> JsonObject:
    """Average rounded columns, as published, and exact ones, with an interval."""
    k = len(columns)
    exact = sum(column["exact"] for column in columns) / k
    # Combine the columns' intervals one side at a time (MOVER; Zou and Donner, 2008), which is
    # right near 0 and for few items, too.
    squares_below = []
    squares_above = []
    for column in columns:
        low, high = column["interval"]
        squares_below.append((column["exact"] - low) ** 2)
        squares_above.append((high - column["exact"]) ** 2)
    below = math.sqrt(sum(squares_below)) / k
    above = math.sqrt(sum(squares_above)) / k
    # The harness averages rounded columns and prints one decimal.
    rounded = float(f"{sum(column['rounded'] for column in columns) / k:.1f}")
    return {"rounded": rounded, "exact": exact, "interval": [exact - below, exact + above]}


def averages(columns: Mapping[str, JsonObject]) -> dict[str, JsonObject]:
    """Compute every average whose benchmarks are all there, with its marks."""
    complete = {}
    for name, members in AVERAGES.items():
        # An average without a benchmark would be compared with published ones that include it.
        if columns.keys() >= set(members):
            parts = [columns[benchmark] for benchmark in members]
            complete[name] = average(parts) | {"marked": distinct("marked", parts)}
    return complete


def distinct(name: str, columns: Iterable[JsonObject]) -> list[str]:
    """Return the marks of all columns in order, each once."""
    # A dictionary keeps the order, and each mark once.
    marks: dict[str, None] = {}
    for column in columns:
        marks |= dict.fromkeys(column[name])
    return list(marks)


def summarize(records: Sequence[JsonObject]) -> JsonObject:
    """Summarize the outputs of one benchmark: verdicts, and how completions ended.

    Records with the same `idx` are outputs of one item. Every item has the same number. Without
    `idx`, each record is an item.
    """
    unanswered = 0
    # These counts are for the second opinion, which multiple choice does not get.
    judged = 0
    agreed = 0
    for record in records:
        unanswered += record["prediction"] in (None, "", NO_LETTER)
        if record["math_verify"] is not None:
            judged += 1
            agreed += record["math_verify"] == record["correct"]
    opinion = None
    if judged:
        # This accuracy is over all outputs. An opinion that did not come in time counts as wrong.
        opinion = _accuracy_of(records, "math_verify")
        opinion |= {"agreement": agreed / judged, "without_opinion": len(records) - judged}
    summary = _accuracy_of(records, "correct") | {
        "unanswered": unanswered / len(records),
        "decided_by": _count(record["decided_by"] for record in records),
        "math_verify": opinion,
    }
    # Stored outputs of another evaluator do not say how they ended.
    if all("finish_reason" in record for record in records):
        summary["finish_reasons"] = _count(record["finish_reason"] for record in records)
        new_tokens = sum(record["n_new_tokens"] for record in records)
        summary["mean_new_tokens"] = new_tokens / len(records)
    return summary


def _accuracy_of(records: Sequence[JsonObject], verdict: str) -> JsonObject:
    """Compute the accuracy by one field of the verdicts."""
    # {idx: right outputs}
    right: Counter[object] = Counter()
    for place, record in enumerate(records):
        right[record.get("idx", place)] += record[verdict] is True
    samples = len(records) // len(right)
    assert samples * len(right) == len(records)
    if samples == 1:
        return accuracy(sum(right.values()), len(right))
    return sampled_accuracy(list(right.values()), samples)


def _count(values: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(values).items()))


def one_line_summary(summary: JsonObject) -> str:
    """Format an accuracy with its interval."""
    low, high = summary["interval"]
    line = f"{summary['rounded']:.1f} (95 % interval {low:.1f} to {high:.1f})"
    samples = summary.get("samples", 1)
    if samples > 1:
        # Every output has the same weight.
        line = f"avg@{samples} {line}, pass@{samples} "
        line += f"{summary['pass_at'][str(samples)]['rounded']:.1f}"
    outputs = summary["n"] * samples
    line += f", {summary['correct']} of {outputs} right"
    # Outputs that were not graded count as wrong, although they may be right.
    ungraded = summary.get("decided_by", {}).get("crash", 0)
    if ungraded:
        line += f"; {ungraded} not graded, as the grader crashed"
    cut = summary.get("finish_reasons", {}).get("context", 0)
    if cut:
        line += f"; {cut} cut where the model's context ends"
    return line
