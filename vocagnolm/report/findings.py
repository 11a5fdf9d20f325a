"""What a comparison of runs shows, in sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from statistics import fmean

from vocagnolm.evaluation.tasks.benchmarks import AVERAGES
from vocagnolm.report.comparison import Comparison
from vocagnolm.report.evaluations import heading
from vocagnolm.report.statistics import Pairing, mcnemar_p
from vocagnolm.report.trainings import TrainingRun, read_other_documents

# Written for the interval of a difference without any items.
UNDECIDED = "no item decides"
# The controls that a method which chooses tokens must beat, by their names in `METHODS`, and how to
# run them.
_CONTROLS = {
    "CPT": "plain pretraining (--method cpt)",
    "random tokens": "the random control (--method random)",
}
_CHOOSING = {"VocAgnoLM", "Rho-1", "chunks"}
# Without an average, a sentence has up to this many differences, one for each of the paper's
# benchmarks.
_MOST_NUMBERS = 9
# If these options are equal, losses per token are of the same tokens.
_OF_TOKENS = ("student", "student_tokenizer", "eval_fraction")


def findings(comparison: Comparison) -> list[str]:
    """Say in sentences what a comparison shows: first of answers, then of held-out losses.

    Between them are the evaluations that are missing among the answers.
    """
    settings = comparison.settings
    # The runs of a setting have the same method, so the first one stands for all.
    methods = {runs[0].method for runs in settings.values()}
    controls = [name for name, runs in settings.items() if runs[0].method in _CONTROLS]
    # Other settings are compared with the controls, or with the first setting if there are none.
    if 0 < len(controls) < len(settings):
        references = controls
    else:
        references = list(settings)[:1]
    held_out = []
    for name in settings:
        if name not in references:
            for reference in references:
                held_out += _held_out(name, reference, settings)
    # A method that chooses tokens may be ahead because it trains at all, or because it trains on
    # fewer tokens. Only the controls can tell.
    missing = [control for method, control in _CONTROLS.items() if method not in methods]
    if missing and methods & _CHOOSING:
        needed = " and ".join(missing)
        held_out.append(f"Whether the guidance helps cannot be said without {needed}.")
    # Answers come first. Held-out pages may be as wrong as the corpus, and then a lower loss on
    # them does not mean a better model.
    return _answers(comparison) + list(comparison.unfinished) + held_out


def _answers(comparison: Comparison) -> list[str]:
    """Say by how many points one model's answers are better than another's."""
    pairings_of: dict[tuple[str, str], list[Pairing]] = {}
    for pairing in comparison.pairings:
        if not pairing.not_paired:
            pairings_of.setdefault((pairing.first, pairing.other), []).append(pairing)
    sentences = []
    for (first, other), pairings in pairings_of.items():
        # An average stands for its benchmarks.
        averages = [pairing for pairing in pairings if pairing.column in AVERAGES]
        differences = []
        for pairing in averages[:1] or pairings[:_MOST_NUMBERS]:
            points, interval = difference(pairing)
            differences.append(f"{heading(pairing.column)} {points} ({interval})")
        if not averages and len(pairings) > _MOST_NUMBERS:
            differences.append(f"and {len(pairings) - _MOST_NUMBERS} more")
        sentences.append(f"{other} against {first}, in points: {'; '.join(differences)}.")
    return sentences


def _held_out(
    name: str, reference: str, settings: Mapping[str, Sequence[TrainingRun]]
) -> list[str]:
    """Compare the held-out losses of two settings, if both have them for the same student."""
    runs, reference_runs = settings[name], settings[reference]
    # A student with another vocabulary has other tokens, and its nats per token are not comparable.
    for option in _OF_TOKENS:
        if not runs[0].agrees(reference_runs[0], option):
            return []
    losses = _losses_by_seed(runs)
    reference_losses = _losses_by_seed(reference_runs)
    if not losses or not reference_losses:
        return []
    # Compare runs with common seeds, or all runs if there are none.
    common_seeds = losses.keys() & reference_losses.keys()
    if common_seeds:
        losses = {seed: losses[seed] for seed in common_seeds}
        reference_losses = {seed: reference_losses[seed] for seed in common_seeds}
    runs = [run for run in runs if run.seed in losses]
    reference_runs = [run for run in reference_runs if run.seed in reference_losses]
    if not _on_same_texts(runs, reference_runs):
        return [f"{name} and {reference} were not evaluated on the same texts."]
    # A gain is how far the loss is below the reference's. It may be negative.
    gain = fmean(reference_losses.values()) - fmean(losses.values())
    better, worse = (name, reference) if gain > 0 else (reference, name)
    if len(common_seeds) > 1:
        wins = 0
        defeats = 0
        for seed in common_seeds:
            # In a sign test, a seed without a difference counts for neither side.
            wins += losses[seed] < reference_losses[seed]
            defeats += losses[seed] > reference_losses[seed]
        share = f"{wins if gain > 0 else defeats} of {len(common_seeds)}"
        test = f"with {share} seeds, sign test p = {mcnemar_p(wins, defeats):.3f}"
    elif len(losses) == len(reference_losses) == 1:
        test = "one seed each: no test possible"
    else:
        test = "no two seeds in common: no test possible"
    if not gain:
        return [f"{name} and {reference} are level on held-out text; {test}."]
    return [f"{better} is ahead of {worse} by {abs(gain):.3f} nats on held-out text; {test}."]


def _on_same_texts(runs: Sequence[TrainingRun], reference_runs: Sequence[TrainingRun]) -> bool:
    """Test whether two settings were evaluated on texts that count as the same.

    They have equally many tokens, and were not held out from documents that have changed.
    """
    for run, other in product(runs, reference_runs):
        if run.options.get("eval_fraction") and read_other_documents(run, other):
            return False
    tokens = {run.eval_tokens for run in runs}
    return tokens == {run.eval_tokens for run in reference_runs}


def _losses_by_seed(runs: Sequence[TrainingRun]) -> dict[str, float]:
    losses = {}
    for run in runs:
        if run.eval_loss is not None:
            losses[run.seed] = run.eval_loss
    return losses


def difference(pairing: Pairing) -> tuple[str, str]:
    """Format the difference of a pairing in points, with its interval."""
    numbers = pairing.points or 0.0, pairing.low or 0.0, pairing.high or 0.0
    # Adding 0.0 turns -0.0 into 0.0.
    points, low, high = [f"{round(number, 1) + 0.0:+.1f}" for number in numbers]
    return points, f"{low} to {high}" if any(numbers) else UNDECIDED
