"""What a comparison of runs shows, in sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from statistics import fmean

from vocagnolm.evaluation.tasks.benchmarks import AVERAGES
from vocagnolm.report.comparison import Comparison
from vocagnolm.report.evaluations import heading
from vocagnolm.report.statistics import Pairing, sign_flip_p
from vocagnolm.report.trainings import DIGEST, TrainingRun, agree

# Written for the interval of a difference without any items.
UNDECIDED = "no item decides"
# The controls that a method which chooses tokens must beat, by their names in `METHODS`, and how to
# run them.
_CONTROLS = {
    "CPT": "plain pretraining (--method cpt)",
    "random tokens": "the random control (--method random)",
}
_CHOOSING = {"VocAgnoLM", "Rho-1", "chunks"}
# If these options are equal, losses per token are of the same tokens.
_OF_TOKENS = ("student", "student_tokenizer", "eval_fraction")


def findings(comparison: Comparison) -> list[str]:
    """Say in sentences what a comparison shows: first of answers, then of held-out losses."""
    # Answers come first. Held-out pages may be as wrong as the corpus, and then a lower loss on
    # them does not mean a better model.
    sentences = _answers(comparison.pairings)
    settings = comparison.settings
    # The runs of a setting have the same method, so the first one stands for all.
    methods = {runs[0].method for runs in settings.values()}
    controls = [name for name, runs in settings.items() if runs[0].method in _CONTROLS]
    # Other settings are compared with the controls, or with the first setting if there are none.
    if 0 < len(controls) < len(settings):
        references = controls
    else:
        references = list(settings)[:1]
    for name in settings:
        if name not in references:
            for reference in references:
                sentences += _held_out(name, reference, settings)
    # A method that chooses tokens may be ahead because it trains at all, or because it trains on
    # fewer tokens. Only the controls can tell.
    missing = [control for method, control in _CONTROLS.items() if method not in methods]
    if missing and methods & _CHOOSING:
        needed = " and ".join(missing)
        sentences.append(f"Whether the guidance helps cannot be said without {needed}.")
    return sentences


def _answers(pairings: Sequence[Pairing]) -> list[str]:
    """Say by how many points one model's answers are better than another's."""
    paired: dict[tuple[str, str], list[Pairing]] = {}
    for pairing in pairings:
        if not pairing.not_paired:
            paired.setdefault((pairing.first, pairing.other), []).append(pairing)
    sentences = []
    for (first, other), columns in paired.items():
        # An average stands for its benchmarks.
        averages = [pairing for pairing in columns if pairing.column in AVERAGES]
        differences = []
        for pairing in averages[:1] or columns:
            points, interval = difference(pairing)
            differences.append(f"{heading(pairing.column)} {points} ({interval})")
        sentences.append(f"{other} against {first}, in points: {'; '.join(differences)}.")
    return sentences


def _held_out(
    name: str, reference: str, settings: Mapping[str, Sequence[TrainingRun]]
) -> list[str]:
    """Compare the held-out losses of two settings, if both have them for the same student."""
    runs = {run.seed: run for run in settings[name] if run.eval_loss is not None}
    reference_runs = {run.seed: run for run in settings[reference] if run.eval_loss is not None}
    if not runs or not reference_runs:
        return []
    # Compare runs with common seeds, or all runs if there are none.
    common_seeds = runs.keys() & reference_runs.keys()
    if common_seeds:
        runs = {seed: runs[seed] for seed in common_seeds}
        reference_runs = {seed: reference_runs[seed] for seed in common_seeds}
    for run, other in product(runs.values(), reference_runs.values()):
        # A student with another vocabulary has other tokens, and its nats per token are not
        # comparable.
        if not all(agree(run, other, option) for option in _OF_TOKENS):
            return []
        changed = run.options.get("eval_fraction") and not agree(run, other, DIGEST)
        if changed or run.eval_tokens != other.eval_tokens:
            return [f"{name} and {reference} were not evaluated on the same texts."]
        segments = {run.eval_segments, other.eval_segments}
        if len(segments) > 1 and None not in segments:
            return [
                f"{name} and {reference} cut the held-out texts into {run.eval_segments} and "
                f"{other.eval_segments} segments, so their losses cannot be compared: give all "
                "runs a --max_length that every teacher's context holds."
            ]
    losses = {seed: run.eval_loss or 0.0 for seed, run in runs.items()}
    reference_losses = {seed: run.eval_loss or 0.0 for seed, run in reference_runs.items()}
    # A gain is how far the loss is below the reference's. It may be negative.
    gain = fmean(reference_losses.values()) - fmean(losses.values())
    better, worse = (name, reference) if gain > 0 else (reference, name)
    test = "fewer than two seeds in common: no test possible"
    if len(common_seeds) > 1:
        # In a sign test, a seed without a difference counts for neither side.
        wins = sum(losses[seed] < reference_losses[seed] for seed in common_seeds)
        defeats = sum(losses[seed] > reference_losses[seed] for seed in common_seeds)
        p = sign_flip_p({1: wins, -1: defeats})
        share = f"{wins if gain > 0 else defeats} of {len(common_seeds)}"
        test = f"with {share} seeds, sign test p = {p:.3f}"
    if not gain:
        return [f"{name} and {reference} are level on held-out text; {test}."]
    return [f"{better} is ahead of {worse} by {abs(gain):.3f} nats on held-out text; {test}."]


def difference(pairing: Pairing) -> tuple[str, str]:
    """Format the difference of a pairing in points, with its interval."""
    numbers = pairing.points or 0.0, pairing.low or 0.0, pairing.high or 0.0
    # Adding 0.0 turns -0.0 into 0.0.
    points, low, high = [f"{round(number, 1) + 0.0:+.1f}" for number in numbers]
    return points, f"{low} to {high}" if any(numbers) else UNDECIDED
