"""Reads the items that other evaluators write: lm-evaluation-harness and lighteval.

`lm_eval --log_samples` writes `results_DATE.json` and `samples_TASK_DATE.jsonl` into a model's
directory. `lighteval --save-details` writes `results/MODEL/results_DATE.json` and
`details/MODEL/DATE/details_TASK|SHOTS_DATE.parquet`. This module knows nothing about runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from vocagnolm.evaluation.tasks.tasks import numbered_lines, text_sha256
from vocagnolm.shell.io import JsonObject, json_or_empty, read_json

NOT_RECORDED = "not recorded"
# The date is at the end of a file's name. Both libraries write it without colons.
_DATE = r"(?P<date>\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d(?:\.\d+)?)"
_SAMPLES = re.compile(rf"samples_(?P<task>.+)_{_DATE}\.jsonl")
_DETAILS = re.compile(rf"details_(?P<task>.+)_{_DATE}\.parquet")
_RESULTS = re.compile(rf".+_{_DATE}\.json")
# The names of a dataset's fields for a question, and for what it is about.
_QUESTION_FIELDS = ("question", "Question", "problem", "Problem", "query", "input", "prompt")
_SUBJECT_FIELDS = ("body", "Body", "passage", "context")
# Every line of lm-eval's samples has these fields. Older ones lack the last two.
_SAMPLE_FIELDS = ("doc_id", "doc", "arguments", "doc_hash", "prompt_hash", "filter", "metrics")
# This many consecutive words are looked up in texts that may contain a question.
_WINDOW_WORDS = 3
# Engines use these names for the limit of new tokens.
_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "num_samples")


@dataclass(frozen=True)
class ForeignItem:
    """What one item asked."""

    # The question, with single spaces between words, or "" if it is unknown.
    question: str
    # The hash of the dataset's row, if it is recorded.
    document: str
    # The right answer in its evaluator's spelling.
    gold: str
    # The hash of the whole prompt, or "" if it is not recorded.
    prompt_sha256: str


@dataclass(frozen=True)
class ForeignTask:
    """The items of one task, and how they were asked and graded."""

    name: str
    items: Sequence[ForeignItem]
    # For each metric, after each filter: whether each item is right, in order.
    verdicts: Mapping[str, Sequence[bool]]
    # One text for each setting that another evaluation may have differently.
    protocol: Mapping[str, str]
    # What a reader must know.
    notes: Sequence[str] = ()

    @cached_property
    def places_by_words(self) -> dict[tuple[str, ...], set[int]]:
        """The indices of the items whose text has three given words in a row."""
        places: dict[tuple[str, ...], set[int]] = {}
        for place, item in enumerate(self.items):
            for window in windows(item.question):
                places.setdefault(window, set()).add(place)
        return places


@dataclass(frozen=True)
class ForeignEvaluation:
    """The newest files of every task that a model was asked."""

    # The name and version, such as "lm-eval 0.4.13".
    evaluator: str
    model: str
    revision: str
    tasks: Sequence[ForeignTask]


def one_spaced(text: str) -> str:
    r"""Put one space between words.

    >>> one_spaced(" How many\n\tapples? ")
    'How many apples?'
    """
    return " ".join(text.split())


def windows(text: str) -> Iterator[tuple[str, ...]]:
    """Return all runs of three words in a text."""
    words = text.split()
    for start in range(len(words) - _WINDOW_WORDS + 1):
        yield tuple(words[start : start + _WINDOW_WORDS])


def find_foreign(path: Path) -> list[Path]:
    """Find the files with a model's items, in an evaluation's directory or below it.

    Results of lm-eval stand for the items with the same date. If there are no files, nothing is
    returned.

    Raises:
        ValueError: there are several models, or only results without items.
    """
    results_name = _RESULTS.fullmatch(path.name)
    if path.is_file() and results_name:
        return sorted(path.parent.glob(f"samples_*_{results_name['date']}.jsonl"))
    files_of: dict[Path, list[Path]] = {}
    for file in [*path.glob("samples_*.jsonl"), *path.glob("*/samples_*.jsonl")]:
        if _SAMPLES.fullmatch(file.name):
            files_of.setdefault(file.parent, []).append(file)
    for file in path.rglob("details_*.parquet"):
        if _DETAILS.fullmatch(file.name):
            # The directory for a date is in the model's.
            files_of.setdefault(file.absolute().parent.parent, []).append(file)
    if len(files_of) > 1:
        raise ValueError(
            f"{path} holds evaluations of {len(files_of)} models: give one, such as {max(files_of)}"
        )
    for files in files_of.values():
        return sorted(files)
    _check_has_items(path)
    return []


def _check_has_items(path: Path) -> None:
    """Reject results that do not say which items are right."""
    for file in [*path.glob("results_*.json"), *path.glob("*/results_*.json")]:
        results = json_or_empty(file)
        if "lm_eval_version" in results:
            raise ValueError(f"{path}: results without items: run lm_eval with --log_samples")
        if "config_tasks" in results:
            raise ValueError(
                f"{path}: results without items: run lighteval with --save-details, and give "
                "the directory of its --output-dir"
            )


def read_foreign(files: Sequence[Path]) -> ForeignEvaluation:
    """Read a model's items, the newest ones of each task."""
    is_lighteval = files[0].suffix == ".parquet"
    pattern = _DETAILS if is_lighteval else _SAMPLES
    # {task: files by date}
    dates_of: dict[str, dict[str, Path]] = {}
    for file in files:
        match = pattern.fullmatch(file.name)
        assert match
        dates_of.setdefault(match["task"], {})[match["date"]] = file
    tasks = []
    evaluators = []
    models = []
    for task, dates in dates_of.items():
        # Dates sort like their texts.
        newest = max(dates)
        read = _read_lighteval if is_lighteval else _read_lm_eval
        evaluation = read(task, newest, dates[newest])
        notes = []
        if len(dates) > 1:
            notes.append(f"the newest of {len(dates)}, of {newest}")
        for part in evaluation.tasks:
            tasks.append(replace(part, notes=[*notes, *part.notes]))
        evaluators.append(evaluation.evaluator)
        models.append((evaluation.model, evaluation.revision))
    if len(set(models)) > 1:
        names = " and ".join(f"{name}, revision {revision}" for name, revision in set(models))
        raise ValueError(
            f"{files[0].parent}: the tasks are of several models: {names}: give the results of one "
            "date, as results_DATE.json of lm-eval or the directory of a DATE of lighteval"
        )
    if not any(task.verdicts for task in tasks):
        notes = [note for task in tasks for note in task.notes]
        raise ValueError(f"{files[0].parent}: no metric says which items are right: {notes[0]}")
    model, revision = models[0]
    return ForeignEvaluation(", ".join(dict.fromkeys(evaluators)), model, revision, tasks)


def _split_verdicts(
    values_of: Mapping[str, Sequence[object]],
) -> tuple[dict[str, list[bool]], list[str]]:
    """Separate metrics that say for each item whether it is right from the names of the others."""
    verdicts = {}
    other_metrics = []
    for name, values in values_of.items():
        # Python treats 1.0 and True as 1.
        if all(isinstance(value, int | float) and value in (0, 1) for value in values):
            verdicts[name] = [value == 1 for value in values]
        else:
            other_metrics.append(name)
    return verdicts, other_metrics


def _notes(other_metrics: Sequence[str], partial: str) -> list[str]:
    notes = [partial] if partial else []
    if other_metrics:
        notes.append(f"left out, as no item is right or wrong by it: {', '.join(other_metrics)}")
    return notes


def _check_mean(place: Path, name: str, verdicts: Sequence[bool], mean: object) -> None:
    """Reject items that do not belong to the results next to them."""
    accuracy = sum(verdicts) / len(verdicts)
    if isinstance(mean, int | float) and abs(accuracy - mean) > 1e-6:
        raise ValueError(
            f"{place}: {name} is {accuracy:.4f} over its items, and {mean:.4f} in the results of "
            "that date: evaluate again"
        )


def _decoding(settings: Mapping[str, Any]) -> str:
    """Say how tokens are chosen, according to the settings of `generate`.

    >>> _decoding({"do_sample": False, "temperature": 1.0}), _decoding({"temperature": 0.6})
    ('greedy', 'sampled, temperature 0.6')
    """
    temperature = settings.get("temperature")
    is_sampled = settings.get("do_sample", bool(temperature))
    if not is_sampled or temperature == 0:
        return "greedy"
    texts = ["sampled"]
    for name in _SAMPLING:
        if settings.get(name) is not None:
            texts.append(f"{name} {settings[name]}")
    return ", ".join(texts)


def _limit(settings: Mapping[str, Any]) -> str | None:
    for name in _LIMITS:
        if settings.get(name) is not None:
            return str(settings[name])
    return None


def _quoted(stops: object) -> str:
    if isinstance(stops, str):
        stops = [stops]
    return ", ".join(map(repr, stops)) if isinstance(stops, list | tuple) and stops else "none"


# -- lm-evaluation-harness -------------------------------------------------------------------------


def _read_lm_eval(task: str, date: str, path: Path) -> ForeignEvaluation:
    """Read the samples of a task, and the results with the same date."""
    # `--output_path NAME.json` gives the results another name.
    results_files = sorted(path.parent.glob(f"*_{date}.json"))
    if not results_files:
        raise ValueError(f"{path}: results_{date}.json is not in the same directory")
    results = read_json(results_files[0])
    records = _samples(path)
    items: dict[int, ForeignItem] = {}
    # {name of the verdict: {doc_id: value}}
    values: dict[str, dict[int, object]] = {}
    for place, record in records:
        number = record["doc_id"]
        items[number] = ForeignItem(
            question=_question(record["doc"]),
            document=record["doc_hash"],
            gold=one_spaced(str(record.get("target", ""))),
            prompt_sha256=record["prompt_hash"],
        )
        for metric in record["metrics"]:
            name = _verdict_name(metric, record["filter"])
            if number in values.setdefault(name, {}):
                raise ValueError(f"{place}: doc_id {number} comes twice with {name}")
            values[name][number] = record.get(metric)
    for name, by_number in values.items():
        if by_number.keys() != items.keys():
            missing = len(items) - len(by_number)
            raise ValueError(f"{path}: {name} is missing in {missing} of {len(items)} items")
    ordered = {name: [by[number] for number in items] for name, by in values.items()}
    verdicts, other_metrics = _split_verdicts(ordered)
    means = results.get("results", {}).get(task, {})
    for key, mean in means.items():
        metric, _, name_of_filter = key.partition(",")
        name = _verdict_name(metric, name_of_filter)
        if name in verdicts:
            _check_mean(path, name, verdicts[name], mean)
    total = results.get("n-samples", {}).get(task, {}).get("original", 0)
    partial = f"partial: {len(items)} of {total} items" if len(items) < total else ""
    config = results.get("config", {})
    return ForeignEvaluation(
        evaluator=f"lm-eval {results.get('lm_eval_version', '')}".strip(),
        model=str(results.get("model_name") or config.get("model")),
        revision=config.get("model_sha") or "unknown",
        tasks=[
            ForeignTask(
                task,
                list(items.values()),
                verdicts,
                _lm_eval_protocol(task, results, records[0][1]),
                _notes(other_metrics, partial),
            )
        ],
    )


def _samples(path: Path) -> list[tuple[str, JsonObject]]:
    """Read the lines of a samples file, each with its file and line number."""
    records = []
    for number, record in numbered_lines(path.read_bytes(), str(path)):
        missing = [name for name in _SAMPLE_FIELDS if name not in record]
        if missing:
            raise ValueError(
                f"{path}:{number}: expected a sample of lm-eval 0.4.13, but {', '.join(missing)} "
                "is missing: evaluate with a newer version"
            )
        records.append((f"{path}:{number}", record))
    if not records:
        raise ValueError(f"{path} holds no samples")
    return records


def _verdict_name(metric: str, name_of_filter: str) -> str:
    # If a task has no filter of its own, lm-eval calls it "none".
    return metric if name_of_filter in ("none", "") else f"{metric}, {name_of_filter}"


def _question(row: object) -> str:
    """Return the question of a dataset's row, with what it is about, or "".

    >>> _question({"body": "Two apples, and one.", "question": "How many?", "answer": "3"})
    'Two apples, and one. How many?'
    """
    if not isinstance(row, dict):
        return ""
    texts = [row.get(name) for name in _QUESTION_FIELDS]
    questions = [text for text in texts if isinstance(text, str) and text.strip()]
    if not questions:
        return ""
    subjects = [row[name] for name in _SUBJECT_FIELDS if isinstance(row.get(name), str)]
    return one_spaced(" ".join([*subjects, questions[0]]))


def _lm_eval_protocol(task: str, results: JsonObject, record: JsonObject) -> dict[str, str]:
    """Say how a task was asked, from its results and its first sample."""
    config = results.get("configs", {}).get(task, {})
    request = record["arguments"].get("gen_args_0", {}).get("arg_1")
    if isinstance(request, dict):
        repeats = config.get("repeats", 1)
        request = request | ({"num_samples": repeats} if repeats > 1 else {})
        decoding = _decoding(request)
        limit = _limit(request) or "the default of lm-eval"
        stops = _quoted(request.get("until"))
    else:
        decoding, limit, stops = "none: the likelihood of given answers", "none", "none"
    chat = "yes" if results.get("chat_template") else "no"
    if chat == "yes" and results.get("fewshot_as_multiturn"):
        chat = "yes, examples as turns"
    return {
        "evaluator": f"lm-eval {results.get('lm_eval_version', '')}".strip(),
        "task": f"{task}, version {results.get('versions', {}).get(task)}",
        "few-shot examples": str(results.get("n-shot", {}).get(task, NOT_RECORDED)),
        "chat template": chat,
        "system prompt": one_spaced(results.get("system_instruction") or "none"),
        "decoding": decoding,
        "most new tokens": limit,
        "stops": stops,
    }


# -- lighteval -------------------------------------------------------------------------------------


def _read_lighteval(task: str, date: str, path: Path) -> ForeignEvaluation:
    """Read the details of a task, and the results with the same date if they exist."""
    import pyarrow
    from pyarrow import parquet

    try:
        rows = parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is not a complete Parquet file: get a new copy") from error
    if not rows or not {"doc", "metric", "model_response"} <= rows[0].keys():
        columns = ", ".join(rows[0]) if rows else "no rows"
        raise ValueError(
            f"{path}: expected doc, metric and model_response, as lighteval 0.11 to 0.13 write "
            f"them, found {columns}: evaluate with a newer version"
        )
    items = []
    values: dict[str, list[object]] = {name: [] for name in rows[0]["metric"]}
    for row in rows:
        doc = row["doc"]
        prompt = row["model_response"].get("input")
        golds = doc["gold_index"] if isinstance(doc["gold_index"], list) else [doc["gold_index"]]
        items.append(
            ForeignItem(
                # The dataset's row is not recorded, so the question comes from its template here.
                question=one_spaced(doc["query"]),
                document="",
                gold=one_spaced(" ".join(doc["choices"][index] for index in golds)),
                prompt_sha256=text_sha256(prompt) if isinstance(prompt, str) else "",
            )
        )
        for name, value in row["metric"].items():
            values[name].append(value)
    verdicts, other_metrics = _split_verdicts(values)
    results = _lighteval_results(path, date)
    means = results.get("results", {}).get(task, {})
    for name, verdict in verdicts.items():
        _check_mean(path, name, verdict, means.get(name))
    config = results.get("config_general", {}).get("model_config", {})
    task_config = results.get("config_tasks", {}).get(task, {})
    # The number of all items is not recorded, but their limit is.
    limit = results.get("config_general", {}).get("max_samples")
    partial = f"partial: at most {limit} items were asked" if limit else ""
    # A task's name may begin with that of a suite, and ends with the number of examples.
    *names, shots = task.split("|")
    protocol = {
        "evaluator": "lighteval",
        "task": f"{names[-1]}, version {task_config.get('version', NOT_RECORDED)}",
        "few-shot examples": shots,
        **_lighteval_protocol(rows[0]["doc"], config),
    }
    return ForeignEvaluation(
        evaluator="lighteval",
        model=str(config.get("model_name") or path.parent.parent.name),
        revision=str(config.get("revision") or "unknown"),
        tasks=[ForeignTask(names[-1], items, verdicts, protocol, _notes(other_metrics, partial))],
    )


def _lighteval_results(path: Path, date: str) -> JsonObject:
    """Read the results that belong to a details file, or {} if only the details were kept."""
    # OUT/details/MODEL/DATE/details_..., where MODEL may be several directories.
    model = path.absolute().parent.parent
    for place in model.parents:
        if place.name == "details":
            results = place.parent / "results" / model.relative_to(place) / f"results_{date}.json"
            return read_json(results) if results.is_file() else {}
    return {}


def _lighteval_protocol(doc: JsonObject, config: JsonObject) -> dict[str, str]:
    """Say how a task was asked, from its first item and the model's settings."""
    if "GENERATIVE" not in (doc.get("sampling_methods") or []):
        decoding, limit, stops = "none: the likelihood of given answers", "none", "none"
    else:
        generation = dict(config.get("generation_parameters") or {})
        if (doc.get("num_samples") or 1) > 1:
            generation["num_samples"] = doc["num_samples"]
        decoding = _decoding(generation) if config else NOT_RECORDED
        limit = _limit(generation) or str(doc.get("generation_size") or NOT_RECORDED)
        stops = _quoted(doc.get("stop_sequences"))
    # The tokenizer decides, unless this overrides it.
    has_template = config.get("override_chat_template")
    if has_template is None:
        chat = NOT_RECORDED
    else:
        chat = "yes" if has_template else "no"
    return {
        "chat template": chat,
        "system prompt": one_spaced(config.get("system_prompt") or "none"),
        "decoding": decoding,
        "most new tokens": limit,
        "stops": stops,
    }
