"""Pairs evaluations by different evaluators item by item, by their questions.

Such evaluations differ in more than their model. All differences are listed: prompts, decoding,
verdicts, and items that only one of them has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from vocagnolm.evaluation.accuracy import accuracy
from vocagnolm.evaluation.tasks.benchmarks import BENCHMARKS
from vocagnolm.evaluation.tasks.tasks import read_records
from vocagnolm.report.foreign import (
    NOT_RECORDED,
    ForeignItem,
    ForeignTask,
    find_foreign,
    one_spaced,
    read_foreign,
    windows,
)
from vocagnolm.report.paper import Row
from vocagnolm.report.runs import Run, heading
from vocagnolm.report.statistics import (
    PAIRING,
    RESAMPLES,
    holm,
    mcnemar_p,
    percentile_interval,
    resampled_differences,
)


class Matched(NamedTuple):
    """Items of two evaluations that ask the same question."""

    # The indices of each pair in the first evaluation and in the other.
    pairs: list[tuple[int, int]]
    # Items of either evaluation that were left out, because several ask the same.
    repeated: tuple[int, int]


def read_foreign_run(label: str, path: Path) -> Run:
    """Read an evaluation of lm-eval or lighteval. Each metric after each filter is a column."""
    evaluation = read_foreign(find_foreign(path))
    mark = f"asked and graded by {evaluation.evaluator}, not as the paper was"
    scores = []
    counts = {}
    conditions = {}
    notes = []
    for task in evaluation.tasks:
        for verdict, is_right in task.verdicts.items():
            column = _column(task, verdict)
            correct, n = sum(is_right), len(is_right)
            numbers = accuracy(correct, n)
            low, high = numbers["interval"]
            row = {"run": label, "column": column, "value": numbers["exact"]}
            row |= {"rounded": numbers["rounded"], "low": low, "high": high}
            scores.append(row | {"marked": [evaluation.evaluator]})
            counts[column] = n, correct
            conditions[column] = {**task.protocol, "verdict": verdict}
        for note in task.notes:
            notes.append(f"{note} ({heading(task.name)})")
    return Run(
        label=label,
        directory=path,
        model=f"{evaluation.model}, revision {evaluation.revision}",
        grader=evaluation.evaluator,
        prompts=evaluation.evaluator,
        scores=scores,
        counts=counts,
        conditions=conditions,
        samples=1,
        sampling="",
        notes=[mark, *notes],
        foreign_tasks=evaluation.tasks,
    )


def _column(task: ForeignTask, verdict: str) -> str:
    """Name a column. A task with one verdict is one column, like our benchmarks."""
    if len(task.verdicts) == 1:
        return task.name
    metrics = {name.partition(", ")[0] for name in task.verdicts}
    _, _, name_of_filter = verdict.partition(", ")
    return f"{task.name} ({name_of_filter if len(metrics) == 1 else verdict})"


def _tasks(run: Run) -> Sequence[ForeignTask]:
    """Return the tasks of an evaluation, ours or another evaluator's."""
    if run.foreign_tasks:
        return run.foreign_tasks
    return [_own_task(run, name) for name in run.conditions]


def _own_task(run: Run, name: str) -> ForeignTask:
    """Describe one of our own benchmarks as a task."""
    conditions = run.conditions[name]
    # This compares the items with the results next to them.
    right_of = run.items(name)
    items = []
    verdicts = []
    for record in read_records(run.directory / f"{name}.jsonl").values():
        question = one_spaced(record.get("question", ""))
        items.append(ForeignItem(question, "", str(record["gold"]), record["prompt_sha256"]))
        verdicts.append(right_of[record["idx"]][0] == 1)
    benchmark = BENCHMARKS.get(name)
    if conditions["prompts"] is None:
        shots = "0"
    else:
        shots = str(benchmark.shots) if benchmark else NOT_RECORDED
    is_chat = conditions["protocol"] == "chat"
    stops = conditions.get("stops")
    if benchmark and not is_chat:
        stops = benchmark.stops
    protocol = {
        "evaluator": "vocagnolm",
        "task": f"{name}, version {conditions['version of the benchmark']}",
        "few-shot examples": shots,
        "chat template": "yes" if is_chat else "no",
        "system prompt": "none",
        "decoding": f"sampled, {run.sampling}" if run.sampling else "greedy",
        "most new tokens": str(conditions.get("max_new_tokens", NOT_RECORDED)),
        "stops": ", ".join(map(repr, stops)) if stops else "none",
    }
    # An item with several outputs is neither right nor wrong.
    is_single = run.samples == 1
    return ForeignTask(name, items, {run.grader: verdicts} if is_single else {}, protocol)


def pair_by_question(first: Run, other: Run) -> list[Row]:
    """Compare a run with the baseline, the first, on the questions that both were asked.

    Tasks with the same name are paired. A task without a namesake is paired with those that share
    questions. Returns rows as `statistics.pair` does. Each also has `other_column`, the other run's
    column, `tasks`, a heading, and `differences`: lists of a setting, the first's text and the
    other's.
    """
    rows: list[Row] = []
    first_tasks, other_tasks = _tasks(first), _tasks(other)
    first_names = {task.name for task in first_tasks}
    other_names = {task.name for task in other_tasks}
    for first_task in first_tasks:
        for other_task in other_tasks:
            has_namesake = first_task.name in other_names or other_task.name in first_names
            if first_task.name == other_task.name or not has_namesake:
                rows += _pair_tasks(first, first_task, other, other_task)
    # Two tasks that share nothing are not silently left out.
    if not rows:
        rows.append(_row(first, first_tasks[0], other, other_tasks[0]))
        rows[0]["not_paired"] = _why_no_pairs(first, first_tasks[0], other, other_tasks[0])
    tested = [row for row in rows if row["p"] is not None]
    corrected = holm([row["p"] for row in tested])
    for row, p in zip(tested, corrected, strict=True):
        row["p_holm"] = p
    return rows


def _pair_tasks(
    first: Run, first_task: ForeignTask, other: Run, other_task: ForeignTask
) -> list[Row]:
    """Compare two tasks by each verdict that both have; none if they share no question."""
    matched = match(first_task, other_task)
    if not matched.pairs:
        if first_task.name != other_task.name:
            return []
        row = _row(first, first_task, other, other_task)
        row["not_paired"] = _why_no_pairs(first, first_task, other, other_task)
        return [row]
    rows = []
    for verdict, other_verdict in _verdicts(first_task, other_task):
        row = _row(first, first_task, other, other_task)
        row["column"] = _column(first_task, verdict)
        row["other_column"] = _column(other_task, other_verdict)
        row["differences"] = _differences(first_task, other_task, matched)
        if verdict != other_verdict:
            row["differences"].append(["verdict", verdict, other_verdict])
        gains = {-1: 0, 0: 0, 1: 0}
        for place, other_place in matched.pairs:
            is_right = first_task.verdicts[verdict][place]
            other_is_right = other_task.verdicts[other_verdict][other_place]
            gains[int(other_is_right) - int(is_right)] += 1
        _measure(row, gains)
        rows.append(row)
    return rows


def _row(first: Run, first_task: ForeignTask, other: Run, other_task: ForeignTask) -> Row:
    """Begin a row, of whole tasks."""
    row: Row = dict.fromkeys(PAIRING)
    row |= {"first": first.label, "other": other.label, "differences": []}
    row |= {"column": first_task.name, "other_column": other_task.name}
    return row | {"tasks": pairing_heading(row)}


def _verdicts(first: ForeignTask, other: ForeignTask) -> list[tuple[str, str]]:
    """Choose the verdicts to compare: those with the same name, or else each with each."""
    shared = [(name, name) for name in first.verdicts if name in other.verdicts]
    if shared:
        return shared
    return [(name, other_name) for name in first.verdicts for other_name in other.verdicts]


def _measure(row: Row, gains: Mapping[int, int]) -> None:
    """Fill in the numbers of a pairing. An item is 1, 0 or -1: the other minus the first."""
    count = sum(gains.values())
    only_first, only_other = gains[-1], gains[1]
    row |= {"items": count, "only_first": only_first, "only_other": only_other}
    row["points"] = (only_other - only_first) / count * 100
    row["p"] = mcnemar_p(only_first, only_other)
    # Each pair of columns has its own seed, so its interval depends on no other pair.
    seed = [0, *row["column"].encode(), 0, *row["other_column"].encode()]
    sample = resampled_differences(gains, RESAMPLES, seed)
    row["low"], row["high"] = percentile_interval(sample)


def _why_no_pairs(first: Run, first_task: ForeignTask, other: Run, other_task: ForeignTask) -> str:
    for run, task in ((first, first_task), (other, other_task)):
        if run.samples > 1:
            return f"{run.label} has {run.samples} outputs per item"
        if not any(item.question or item.document for item in task.items):
            remedy = "" if run.foreign_tasks else ": evaluate it again with this version"
            return f"the items of {run.label} do not record their questions{remedy}"
    return "no question in common"


# -- What differs ----------------------------------------------------------------------------------


def _differences(first: ForeignTask, other: ForeignTask, matched: Matched) -> list[list[str]]:
    """List how the ways of asking two tasks differ: a setting, and its text on each side."""
    rows = []
    evaluators = [task.protocol["evaluator"].split()[0] for task in (first, other)]
    is_same_evaluator = evaluators[0] == evaluators[1]
    for name, text in first.protocol.items():
        # The versions of two evaluators are unrelated.
        if other.protocol[name] != text and (name != "task" or is_same_evaluator):
            rows.append([name, text, other.protocol[name]])
    prompts = []
    golds = 0
    for first_place, other_place in matched.pairs:
        first_item, other_item = first.items[first_place], other.items[other_place]
        if first_item.prompt_sha256 and other_item.prompt_sha256:
            prompts.append(first_item.prompt_sha256 != other_item.prompt_sha256)
        golds += first_item.gold != other_item.gold
    if matched.pairs and not prompts:
        rows.append(["prompts", NOT_RECORDED, NOT_RECORDED])
    elif any(prompts):
        rows.append(["prompts", "", f"others in {sum(prompts)} of {len(prompts)} items"])
    # Two evaluators, or two tasks, may spell a right answer differently.
    if golds and is_same_evaluator and first.protocol["task"] == other.protocol["task"]:
        count = len(matched.pairs)
        rows.append(["right answers", "", f"others in {golds} of {count} items"])
    sides = []
    for task, repeated in zip((first, other), matched.repeated, strict=True):
        unpaired = len(task.items) - len(matched.pairs)
        text = f"{len(task.items)}, {unpaired} not paired"
        sides.append(f"{text} ({repeated} of a repeated question)" if repeated else text)
    if len(matched.pairs) < max(len(first.items), len(other.items)):
        rows.append(["items", *sides])
    return rows


def difference_rows(pairings: Sequence[Row]) -> list[list[str]]:
    """Return rows of differences: run, benchmarks, setting, the first's text, the run's."""
    # {(run, setting, text, other text): benchmarks}, because many tasks differ in the same way.
    benchmarks: dict[tuple[str, str, str, str], list[str]] = {}
    for row in pairings:
        for name, text, other_text in row.get("differences", []):
            key = (row["other"], name, text, other_text)
            benchmarks.setdefault(key, []).append(row["tasks"])
    rows = []
    for (run, name, text, other_text), names in benchmarks.items():
        names = list(dict.fromkeys(names))
        shown = ", ".join(names) if len(names) < 4 else f"{names[0]} and {len(names) - 1} others"
        rows.append([run, shown, name, text or "-", other_text])
    return rows


def pairing_heading(row: Row) -> str:
    """Return the heading of a pairing: a benchmark, or one of each run if their names differ."""
    first: str = row["column"]
    other: str = row.get("other_column") or first
    return heading(first) if first == other else f"{heading(first)} / {heading(other)}"


# -- Questions -------------------------------------------------------------------------------------


def match(first: ForeignTask, other: ForeignTask) -> Matched:
    """Pair items that ask the same question: from one row of a dataset, or with the same text.

    Finally, look for questions inside the text of another evaluator that records them in a
    template. A question that occurs twice on either side is left out.
    """
    pairs: list[tuple[int, int]] = []
    left_first = list(range(len(first.items)))
    left_other = list(range(len(other.items)))
    # The two sides of items whose question another item has, too.
    repeated: tuple[set[int], set[int]] = set(), set()
    keys: list[Callable[[ForeignItem], str]] = [
        lambda item: item.document,
        lambda item: item.question,
    ]
    for key in keys:
        first_places = _places(first.items, left_first, key)
        other_places = _places(other.items, left_other, key)
        for text, places in first_places.items():
            same_places = other_places.get(text, [])
            if len(places) == len(same_places) == 1:
                pairs.append((places[0], same_places[0]))
            elif same_places:
                repeated[0].update(places)
                repeated[1].update(same_places)
        paired_first = {place for place, _ in pairs}
        paired_other = {place for _, place in pairs}
        left_first = [place for place in left_first if place not in paired_first]
        left_other = [place for place in left_other if place not in paired_other]
    # An item whose question occurs twice must not be found in a third one.
    left_first = [place for place in left_first if place not in repeated[0]]
    left_other = [place for place in left_other if place not in repeated[1]]
    pairs += _held(first, left_first, other, left_other)
    return Matched(sorted(pairs), (len(repeated[0]), len(repeated[1])))


def _places(
    items: Sequence[ForeignItem], left: Sequence[int], key: Callable[[ForeignItem], str]
) -> dict[str, list[int]]:
    """Return the indices of items by their text, without those that have none."""
    places: dict[str, list[int]] = {}
    for place in left:
        text = key(items[place])
        if text:
            places.setdefault(text, []).append(place)
    return places


def _held(
    first: ForeignTask,
    left_first: Sequence[int],
    other: ForeignTask,
    left_other: Sequence[int],
) -> list[tuple[int, int]]:
    """Pair questions with the texts that contain them in one and the same template."""
    # {(which side is longer, the text before the question, the word after it): pairs}
    templates: dict[tuple[str, str, str], list[tuple[int, int]]] = {}
    for other_place, first_place, before, after in _holders(other, left_other, first, left_first):
        pairs = templates.setdefault(("first", before, after), [])
        pairs.append((first_place, other_place))
    for first_place, other_place, before, after in _holders(first, left_first, other, left_other):
        pairs = templates.setdefault(("other", before, after), [])
        pairs.append((first_place, other_place))
    if not templates:
        return []
    # A short question may be the beginning of another one. A task's template is the one that most
    # items share.
    pairs = max(templates.values(), key=len)
    first_counts = Counter(place for place, _ in pairs)
    other_counts = Counter(place for _, place in pairs)
    unique = []
    for first_place, other_place in pairs:
        if first_counts[first_place] == other_counts[other_place] == 1:
            unique.append((first_place, other_place))
    return unique


def _holders(
    short: ForeignTask,
    left_short: Sequence[int],
    long: ForeignTask,
    left_long: Sequence[int],
) -> Iterator[tuple[int, int, str, str]]:
    """Find the texts that contain a question: both indices, the text before, the word after."""
    open_places = set(left_long)
    for place in left_short:
        question = short.items[place].question
        for long_place in sorted(_candidates(question, long) & open_places):
            # Spaces keep words whole.
            text = f" {long.items[long_place].question} "
            before, match, after = text.partition(f" {question} ")
            if match and (before or after):
                yield place, long_place, before.strip(), after.split(" ", 1)[0]


def _candidates(question: str, task: ForeignTask) -> set[int]:
    """Return the indices of a few items that include all which contain a question."""
    fewest: set[int] | None = None
    # Many questions begin in the same way, so look for the words that occur in the fewest texts.
    for window in windows(question):
        places = task.places_by_words.get(window, set())
        if fewest is None or len(places) < len(fewest):
            fewest = places
        if not places:
            break
    return fewest or set()
