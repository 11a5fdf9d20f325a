"""Files that a run, an evaluation, a store and an audit leave, edited by hand."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from vocagnolm import cli
from vocagnolm.host.manifest import sealed

# Instead of a value, or of the whole file; the last one takes it away.
VALUES = (None, [], [1], "x", 10**30, {}, {"a": 1}, True, -1, float("inf"), KeyError)
COMPARE = "compare {}/run --output_dir {}/out"
# What reads each file. Those with a checksum get a right one after the edit.
READERS = {
    "run/run.json": (COMPARE, "export {}/run --output_dir {}/out"),
    "run/trainer_state.json": (COMPARE, f"{COMPARE} --figure 5 --metric eval_loss"),
    "run/manifest.json": ("export {}/run --output_dir {}/out",),
    "run/evaluation/results.json": (COMPARE,),
    "store/manifest.json": ("score --verify {}/store",),
    "audit/audit.json": ("compare {}/audit --figure 3 --output_dir {}/out",),
}


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory,
    tokenizer_dirs: dict[str, Path],
    tiny_llama: Callable[..., Any],
    training_texts: list[str],
) -> Path:
    root = tmp_path_factory.mktemp("edited")
    for role, family in (("student", "metaspace"), ("teacher", "nfc_digits")):
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_dirs[family])
        tokenizer.save_pretrained(root / role)
        tiny_llama(len(tokenizer), max_position_embeddings=2048).save_pretrained(root / role)
    lines = (json.dumps({"text": text}) + "\n" for text in training_texts[:40])
    (root / "pages.jsonl").write_text("".join(lines))
    models = "--student {}/student --teacher {}/teacher --dataset {}/pages.jsonl"
    sizes = "--max_length 64 --global_batch_tokens 128 --max_steps 2 --eval_fraction 0.1"
    for line in (
        f"train {models} {sizes} --use_cpu true --report_to none --output_dir {{}}/run",
        "evaluate --model {}/run --benchmarks demo --limit 2",
        "score --teacher {}/teacher --dataset {}/pages.jsonl --context 128 --output_dir {}/store",
        f"audit {models} --sequence_length 64 --chunks 2 4 --output_dir {{}}/audit",
    ):
        assert cli.main(line.replace("{}", str(root)).split()) == 0
    return root


def places(content: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Keys that lead to every value; of a list to its first one."""
    yield at
    inside = [*enumerate(content)][:1] if isinstance(content, list) else []
    for key, value in content.items() if isinstance(content, dict) else inside:
        yield from places(value, (*at, key))


def edited(content: Any, at: tuple[Any, ...], value: object) -> Any:
    if not at:
        return {} if value is KeyError else value
    inside = content = copy.deepcopy(content)
    for key in at[:-1]:
        inside = inside[key]
    if value is KeyError:
        del inside[at[-1]]
    else:
        inside[at[-1]] = value
    return content


@pytest.mark.stress("states, settings and results: edited by hand", "one line, or the work is done")
@pytest.mark.slow
@pytest.mark.processes
def test_edited_file_ends_in_no_traceback(
    finished: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    record_property: Callable[[str, object], None],
) -> None:
    rng = random.Random(int(os.environ.get("VOCAGNOLM_SEED", "0")))
    times = 2 * int(os.environ.get("VOCAGNOLM_DAMAGES", "6"))
    record_property("times", times)
    root = Path(shutil.copytree(finished, tmp_path / "world"))
    whole = {name: (finished / name).read_bytes() for name in READERS}
    refused = 0
    for number in range(times):
        name = list(READERS)[number % len(READERS)]
        content = json.loads(whole[name])
        at, value = rng.choice([*places(content)]), rng.choice(VALUES)
        changed = edited(content, at, value)
        is_sealed = isinstance(changed, dict) and "sha256" in content
        (root / name).write_text(json.dumps(sealed(changed) if is_sealed else changed))
        line = rng.choice(READERS[name]).replace("{}", str(root))
        capsys.readouterr()
        shutil.rmtree(root / "out", ignore_errors=True)
        status, said = cli.main(line.split()), capsys.readouterr().err
        assert status in (0, 1, 2), (name, at, value)
        assert said.count(": error: ") == (status == 2), (name, at, value, said)
        (root / name).write_bytes(whole[name])
        refused += status != 0
    assert 0 < refused < times
