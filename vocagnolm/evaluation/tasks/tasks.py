"""The items of a benchmark, from a file, the hub or the package, and how they are asked."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from vocagnolm.evaluation.records import numbered_lines
from vocagnolm.evaluation.tasks.benchmarks import HARNESS, Benchmark, Item, RawRow
from vocagnolm.shell.io import JsonObject

_HERE = Path(__file__).parent
_HARNESS_DATA = (
    "https://raw.githubusercontent.com/ZubinGou/math-evaluation-harness/"
    "db77bc6bb2a17c90ed2d63e88ebd8c40a82858c5/data"
)
# Hashes of the files in the harness's prompts/cot/.
_HARNESS_SHA256 = {
    "gsm8k": "f7b267f942be471e4ea8013cdba4c4df3cad1f969774c073e9165c568043a7b8",
    "minerva_math": "6637ad6e3ece303c059196bebdc3607ab9f617f4a57f73ac44afeb7f4320c829",
    "mathqa": "ba599b1fda1932b423e368b6a43643a10763cec1753dcdaca51375fdcd33c0cb",
    "mmlu_stem": "c5e61e1f80bbf4b08d60db5abaa55dcdc1a211093ce33e2a591ae9647bf8907a",
}


@dataclass(frozen=True)
class Sampling:
    """How the outputs of an item are drawn. Greedy decoding, the paper's, draws nothing.

    Every output has its own seed, from benchmark, item and number. It does not depend on what else
    is asked, so an evaluation that is resumed, split or batched differently draws the same numbers.
    """

    samples: int
    # Logits are divided by it. It is above 0.
    temperature: float
    # Tokens are drawn from the most probable ones that together have this probability.
    top_p: float = 1.0

    def mark(self) -> str:
        """Say why an accuracy cannot be compared with the paper's."""
        outputs = "1 output" if self.samples == 1 else f"{self.samples} outputs"
        how = f"temperature {self.temperature:g}, top_p {self.top_p:g}"
        return f"sampled: {outputs} per item ({how}), not the paper's greedy decoding"


@dataclass(frozen=True)
class Task:
    """A benchmark as one evaluation asks it."""

    benchmark: Benchmark
    # The items to ask, sorted by `idx`.
    items: Sequence[Item]
    # The whole prompt of each item, by `idx`.
    prompts: Mapping[int, str]
    # The origin of the items, from `load_items`.
    data: JsonObject
    # The origin of the worked examples, from `load_prompt_set`; None without examples.
    prompt_set: JsonObject | None
    # None means greedy decoding, which gives one output per item.
    sampling: Sampling | None = None

    def outputs(self) -> list[tuple[Item, int]]:
        """List all requested outputs: each item with its sample numbers."""
        samples = self.sampling.samples if self.sampling else 1
        return list(product(self.items, range(samples)))

    def settings(self) -> JsonObject:
        """Return the settings that two items must share to belong together."""
        benchmark = self.benchmark
        settings = {
            "version": benchmark.version,
            "data_sha256": self.data["digest"],
            "prompts_sha256": self.prompt_set["sha256"] if self.prompt_set else None,
            "max_new_tokens": benchmark.max_new_tokens,
        }
        # The version of a built-in benchmark stands for these. A user's file has no version.
        if benchmark.directory:
            settings["stops"] = list(benchmark.stops)
            settings["answer_kind"] = benchmark.answer_kind
        return settings

    def marks(self) -> dict[str, str]:
        """Return why the accuracy is not comparable with published ones: {word: sentence}."""
        marks = {}
        if self.benchmark.protocol:
            marks["chat"] = f"protocol: {self.benchmark.protocol}, not the paper's few-shot"
        if self.sampling:
            marks["sampled"] = self.sampling.mark()
        item_count = self.benchmark.item_count
        if len(self.items) < item_count:
            marks["partial"] = f"partial: {len(self.items)} of {item_count} items"
        if self.prompt_set and self.prompt_set["origin"] != "harness":
            marks["other_prompts"] = f"prompts: {self.prompt_set['origin']}, not the harness's"
        if not (self.data["verified"] or self.benchmark.directory):
            marks["other_data"] = f"data: {self.data['origin']} is not verified"
            if self.benchmark.items_sha256:
                marks["other_data"] += " to be the harness's"
        return marks


def load_tasks(
    benchmarks: Iterable[Benchmark],
    data_dir: Path | None,
    prompts_dir: Path | None,
    limit: int | None,
    render: Callable[[str], str] | None = None,
    sampling: Sampling | None = None,
) -> list[Task]:
    """Read benchmarks, or their first `limit` items; `render` applies a chat template."""
    tasks = []
    for benchmark in benchmarks:
        items, data = load_items(benchmark, data_dir)
        # A user's own benchmark need not say how many items it has.
        benchmark = replace(benchmark, item_count=len(items))
        examples = ""
        prompt_set = None
        if benchmark.prompt_set:
            examples, prompt_set = load_prompt_set(benchmark.prompt_set, prompts_dir)
        # `load_items` returns the digest of all items, so a part of them is still known to be the
        # harness's.
        items = items[:limit]
        prompts = {}
        for item in items:
            prompt = build_prompt(benchmark, examples, item.question)
            prompts[item.idx] = render(prompt) if render else prompt
        tasks.append(Task(benchmark, items, prompts, data, prompt_set, sampling))
    return tasks


def load_items(benchmark: Benchmark, data_dir: Path | None) -> tuple[list[Item], JsonObject]:
    """Read all items of a benchmark from `data_dir`, or download them. The demo's are built in.

    Returns them sorted by `idx`, with their origin ("demo_world", a file relative to `data_dir`, or
    the name of a download), their digest, and whether it shows that they are the harness's.
    """
    origin, rows = _read_rows(benchmark, data_dir)
    items = []
    for index, row in enumerate(rows):
        idx = index if benchmark.directory else row.get("idx", index)
        # A reader expects the harness's fields, so for any other row it may raise anything.
        try:
            items.append(benchmark.item(idx, row))
        except Exception as error:
            place = f"{origin}: item {index} of {benchmark.id}"
            raise ValueError(f"{place} cannot be read ({error!r}): it is {row!s:.200}") from error
    items.sort(key=lambda item: item.idx)
    # A record without a count takes all items, but at least one.
    count = benchmark.item_count or max(len(items), 1)
    # Records are stored by index, so two items with the same index would replace each other.
    indices = {item.idx for item in items}
    if not len(items) == len(indices) == count:
        expected = f"expected {count} items of {benchmark.id}"
        raise ValueError(f"{origin}: {expected}, found {len(items)} with {len(indices)} indices")
    digest = items_digest(items)
    verified = digest == benchmark.items_sha256
    return items, {"origin": origin, "digest": digest, "verified": verified}


def _read_rows(benchmark: Benchmark, data_dir: Path | None) -> tuple[str, Iterable[RawRow]]:
    if benchmark.file is None and benchmark.hub is None:
        content = (_HERE / f"{benchmark.id}.jsonl").read_bytes()
        return "demo_world", map(json.loads, content.splitlines())
    # A user's file is next to the YAML file that names it, whatever --data_dir is.
    folder = benchmark.directory or data_dir
    if folder is not None and benchmark.file is not None:
        path = folder / benchmark.file
        rows = [row for _, row in numbered_lines(path.read_bytes(), str(path))]
        return benchmark.file, rows
    import datasets

    if benchmark.hub is None:
        # Read the file as text. The JSON reader of `datasets` infers one type per column, which
        # fails if a column is null for the first megabytes.
        url = f"{_HARNESS_DATA}/{benchmark.file}"
        texts = datasets.load_dataset("text", data_files=url, split="train")["text"]
        return f"{HARNESS}/data/{benchmark.file}", map(json.loads, texts)
    # The columns have the names of the harness's fields. The digest of the items shows whether
    # their contents are the same, too.
    rows = []
    for config, split in benchmark.hub_parts:
        rows += datasets.load_dataset(benchmark.hub, name=config, split=split, revision="main")
    if benchmark.id == "asdiv":
        # The harness leaves out rows with several answers.
        rows = [row for row in rows if ";" not in row["answer"]]
    return f"{benchmark.hub}@main", rows


def items_digest(items: Iterable[Item]) -> str:
    """Hash index, question and gold of each item, one JSON list per line."""
    # The form of this JSON is fixed, because the benchmarks' digests were made with it.
    lines = ""
    for item in items:
        row = [item.idx, item.question, item.gold]
        lines += json.dumps(row, separators=(",", ":")) + "\n"
    return text_sha256(lines)


def load_prompt_set(name: str, prompts_dir: Path | None) -> tuple[str, JsonObject]:
    """Read worked examples, separated by two blank lines, and their origin.

    The origin is "vocagnolm" for those of the package, "harness" if the bytes of
    `prompts_dir`/`name`.md are the harness's, or "other".
    """
    path = (prompts_dir or _HERE / "prompts") / f"{name}.md"
    # Hash the bytes as they are, because an edited file is another prompt.
    data = path.read_bytes()
    sha256 = hashlib.sha256(data).hexdigest()
    origin = "vocagnolm"
    if prompts_dir:
        origin = "harness" if sha256 == _HARNESS_SHA256.get(name) else "other"
    text = data.decode().replace("\r\n", "\n")
    return text, {"name": name, "origin": origin, "sha256": sha256}


def build_prompt(benchmark: Benchmark, examples: str, question: str) -> str:
    """Join worked examples, if any, two blank lines, and the question in its template."""
    prompt = benchmark.template.replace("{question}", question)
    if not examples:
        return prompt
    return f"{examples.strip()}\n\n\n{prompt}"


def text_sha256(text: str) -> str:
    """Hash a text, such as the prompt that an item's record names by its hash."""
    return hashlib.sha256(text.encode()).hexdigest()


def seed_of(benchmark: str, idx: int, sample: int) -> int:
    """Return the seed of an output, a number of 32 bits.

    It is the same for every model and temperature.
    """
    return _hashed(f"{benchmark} {idx} {sample}", 32)


def uniform(seed: int, place: int) -> float:
    """Return the number in [0, 1) that decides an output's token at a position."""
    return _hashed(f"{seed} {place}", 48) / 2.0**48


def _hashed(text: str, bits: int) -> int:
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[: bits // 8], "big")
