"""A newcomer's first hour: run what the pages tell one to type.

    python3 tests/project/first_hour.py                         # in a new environment
    python3 tests/project/first_hour.py --torch torch==2.13.0   # with this PyTorch in it
    python3 tests/project/first_hour.py --constraint FILE       # with the versions of a file

It clones the last commit and makes an environment with README's own install line: the newest
versions that the bounds allow, without constraints and extras. In `runs/demo`, as the quickstart
says, it runs all commands of README, the landing page and the quickstart. Of every other page, it
runs those in the first block of commands, and those whose output the page shows. It also runs
README's example and the notebook. Where a page shows what a command prints, it compares the words.
A command that is neither run nor listed as left out is an error, and so is any file in the clone
that git would see. It needs nothing but Python.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Their commands need what the quickstart's have made.
AFTER_QUICKSTART = ("docs/quickstart.md", "README.md", "docs/evaluation.md")
WHOLE_PAGES = ("README.md", "docs/index.md", "docs/quickstart.md")
PROGRAMS = "vocagnolm python accelerate pip make export sbatch cd ln git".split()

# Documents that README's example is run on.
EXAMPLE_DOCUMENTS = 500
# Where the demo writes models and texts, and where the pages tell one to go.
DEMO = Path("runs/demo")
# Replacements for placeholders and for names on the hub, as there may be no network.
STAND_INS = {
    "S": "student",
    "T": "teacher",
    "HuggingFaceTB/SmolLM2-135M": "student",
    "Qwen/Qwen2.5-0.5B": "teacher",
}
# Options to add to commands that begin so: few steps, a context that the stand-ins have, and items
# that need no network.
_SHORT = "--max_length 256 --global_batch_tokens 1024 --max_steps 5 --use_cpu"
_OWN_PAIR = f"--student student --dataset pages.jsonl {_SHORT}"
_PAPER = "paper/table1/vocagnolm__qwen2.5-math-instruct"
_FEW_ITEMS = "--benchmarks demo --limit 8"
ADDED = {
    "vocagnolm demo": "--seeds 0 --max_steps 60",
    "vocagnolm train --config demo --student student": "--max_steps 50",
    "vocagnolm train --student S": _SHORT,
    "vocagnolm train --student HuggingFaceTB/SmolLM2-135M": _SHORT,
    "vocagnolm weights --student": "--max_length 256",
    "vocagnolm rank --student student": "--dataset_split train[:100]",
    "vocagnolm evaluate --model runs/guided --benchmarks demo": "--limit 40",
    "vocagnolm evaluate --model runs/plain --benchmarks demo": "--limit 40",
    "vocagnolm evaluate --model runs/smollm2-accept": _FEW_ITEMS,
    "vocagnolm evaluate --model runs/smollm2-plain": _FEW_ITEMS,
    f"vocagnolm train --config {_PAPER} --dry_run": (f"--teacher teacher {_OWN_PAIR}"),
    f"vocagnolm prepare --config {_PAPER}": (f"--teacher teacher {_OWN_PAIR}"),
}
# Why commands that begin so are not run.
_GPUS = "it needs GPUs"
LEFT_OUT = {
    "pip install": "it has made the environment",
    "make demo": ".ci/run runs it",
    "make test": ".ci/run runs it",
    "make test-gpu": _GPUS,
    f"vocagnolm train --config {_PAPER} --accelerate_config": _GPUS,
    "sbatch": "it needs Slurm",
    "vocagnolm demo --seeds 0 1 2 3": "it takes six minutes, and the demo is run already",
    "vocagnolm evaluate --model runs/paper/table1/cpt": "it is of a run on GPUs",
    "vocagnolm compare runs/paper/table1/cpt": "it is of runs on GPUs",
    "vocagnolm compare --wandb": "it needs an account",
    "vocagnolm train --config demo --student student --teacher teacher --dataset pages.jsonl "
    "--report_to wandb": "it needs the extra wandb",
    "vocagnolm evaluate --model runs/tracked --report_to wandb": "the same",
    "vocagnolm train --teacher T --dataset pages.jsonl --use_peft": "it needs the extra peft",
    "vocagnolm export runs/adapters": "the same",
    "export": "the environment has it, or there is no /data",
    "vocagnolm rank --student student --teacher_losses stores/problems": "it needs a corpus",
    "vocagnolm train --teacher T --dataset weighted.jsonl": "the same",
    "vocagnolm train --config demo --student student --teacher teacher --dataset pages.jsonl "
    "--bf16 true --dry_run": "processors differ in it",
    "vocagnolm inspect --text": "the page shows what the whole demo's models think",
    "vocagnolm inspect --dataset pages.jsonl --document 0": "the same",
    f"cd {DEMO}": "all but the demo is typed there",
}
# Pages whose numbers are the same on every machine.
EXACT_PAGES = ("docs/audit.md",)


class FaultError(Exception):
    """A page promises something that does not hold."""


@dataclass(frozen=True)
class Command:
    """A command that a page tells one to type, and what the page shows of its output."""

    page: str
    line: int
    text: str
    shown: str = ""
    # How many commands of its block, this one last, print what is shown.
    of_block: int = 1

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


def code_blocks(page: str) -> list[tuple[str, int, str]]:
    """Return language, number of the first line, and text of each code block of a page."""
    blocks = []
    opening = None
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    for index, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if opening is None:
            opening = index
            continue
        text = "\n".join(lines[opening + 1 : index])
        blocks.append((lines[opening].removeprefix("```"), opening + 2, text))
        opening = None
    return blocks


def commands_of(page: str) -> list[Command]:
    """Take the commands out of a page's code blocks, or of the first and those with output."""
    blocks = code_blocks(page)
    commands: list[Command] = []
    for index, (language, first_line, text) in enumerate(blocks):
        typed = [] if language else typed_lines(text, first_line)
        if not typed:
            continue
        following, line, shown = blocks[index + 1] if index + 1 < len(blocks) else ("", 0, "")
        # Only two fences and an empty line are between commands and their output.
        is_shown = following == "text" and line == first_line + len(text.splitlines()) + 3
        if commands and not is_shown and page not in WHOLE_PAGES:
            continue
        for line, words in typed:
            commands.append(Command(page, line, shlex.join(words)))
        # Several commands together may print what is shown.
        if is_shown:
            commands[-1] = replace(commands[-1], shown=shown, of_block=len(typed))
    return commands


def typed_lines(block: str, first_line: int) -> list[tuple[int, list[str]]]:
    """Return number and words of each line that starts one of `PROGRAMS`, with continuations."""
    typed = []
    lines = block.splitlines()
    for index, line in enumerate(lines):
        is_continued = index > 0 and lines[index - 1].endswith("\\")
        if is_continued or line.partition(" ")[0] not in PROGRAMS:
            continue
        last = index
        while lines[last].endswith("\\"):
            last += 1
        joined = " ".join(part.removesuffix("\\") for part in lines[index : last + 1])
        typed.append((first_line + index, shlex.split(joined, comments=True)))
    return typed


def entry(table: dict[str, str], command: Command) -> str | None:
    """Return the entry with the longest beginning that fits a command."""
    begins = [begin for begin in table if f"{command.text} ".startswith(f"{begin} ")]
    return table[max(begins, key=len)] if begins else None


def as_run(command: Command) -> str:
    """Put stand-ins into a command, and add the options that keep it short."""
    words = [STAND_INS.get(word, word) for word in shlex.split(command.text)]
    return f"{shlex.join(words)} {entry(ADDED, command) or ''}".strip()


class Clone:
    """A fresh clone of the last commit, and the environment that README makes for it."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.directory = scratch / "vocagnolm"
        self.environment = {
            **{name: value for name, value in os.environ.items() if not _is_ours(name)},
            "PATH": f"{scratch / 'venv/bin'}{os.pathsep}{os.environ['PATH']}",
            "VIRTUAL_ENV": str(scratch / "venv"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "HF_DATASETS_CACHE": str(scratch / "cache"),
        }
        self.started = time.monotonic()

    def run(self, words: str | Sequence[str | Path], *, cwd: Path | None = None) -> str:
        """Run a command, in the shell if it is a string; return what it prints.

        Raises:
            FaultError: it fails.
        """
        run = subprocess.run(
            words,
            shell=isinstance(words, str),
            cwd=cwd or self.directory,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if run.returncode:
            shown = words if isinstance(words, str) else shlex.join(map(str, words))
            raise FaultError(f"{shown}\nended with status {run.returncode}:\n{run.stdout}")
        return run.stdout

    def say(self, text: str, since: float | None = None) -> None:
        """Print a line with the time since the start, and the time it took."""
        now = time.monotonic()
        took = f"{now - since:5.0f} s" if since else " " * 7
        print(f"{now - self.started:5.0f} s {took}  {text}", flush=True)

    def install(self, python: str, torch: str, constraint: str) -> None:
        """Clone, make an environment, put a PyTorch into it, and run README's install line."""
        begun = time.monotonic()
        self.run(["git", "clone", "--quiet", ROOT, self.directory], cwd=self.scratch)
        self.run([python, "-m", "venv", self.scratch / "venv"])
        if torch:
            self.run(["pip", "install", "--quiet", torch])
        lines = {c.text for page in WHOLE_PAGES for c in commands_of(page) if "pip " in c.text}
        (line,) = lines
        line += f" --constraint {Path(constraint).resolve()}" if constraint else ""
        self.run(f"{line} --quiet --disable-pip-version-check")
        versions = self.run("pip list --format=freeze --disable-pip-version-check")
        shown = re.findall(r"^(?:torch|transformers|accelerate|datasets)==.*$", versions, re.M)
        self.say(f"{line}    {' '.join(shown)}", begun)

    def type_all(self, commands: Sequence[Command]) -> None:
        """Run the commands of pages one after another.

        Raises:
            FaultError: one fails, or does not print what its page shows.
        """
        printed: list[str] = []
        for command in commands:
            if entry(LEFT_OUT, command):
                printed.append("")
                continue
            begun, line = time.monotonic(), as_run(command)
            # The demo makes the directory that all other commands are typed in.
            is_demo = command.text.startswith("vocagnolm demo")
            try:
                printed.append(self.run(line, cwd=self.directory / ("." if is_demo else DEMO)))
            except FaultError as fault:
                raise FaultError(f"{command}\n{fault}") from None
            check_shown(command, "".join(printed[-command.of_block :]))
            self.say(f"{command.page}:{command.line}: {line}", begun)

    def run_example(self) -> None:
        """Run README's Python on some hundred documents, with stand-ins for its models."""
        begun = time.monotonic()
        text = (ROOT / "README.md").read_text(encoding="utf-8")
        (code,) = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
        place = self.scratch / "example"
        for argument, role in (("model", "student"), ("teacher", "teacher")):
            shutil.copytree(self.directory / DEMO / role, place / role)
            # The context of the models that the example names.
            path = place / role / "config.json"
            config = json.loads(path.read_text(encoding="utf-8"))
            config["max_position_embeddings"] = 4096
            path.write_text(json.dumps(config), encoding="utf-8")
            code = re.sub(rf'\b{argument}="[^"]+"', f'{argument}="{role}"', code)
        pages = (self.directory / DEMO / "pages.jsonl").read_bytes().splitlines(keepends=True)
        documents = (pages * (EXAMPLE_DOCUMENTS // len(pages) + 1))[:EXAMPLE_DOCUMENTS]
        (place / "pages.jsonl").write_bytes(b"".join(documents))
        self.run(["python", "-c", code], cwd=place)
        self.say(f"README.md: its example, on {EXAMPLE_DOCUMENTS:,} documents", begun)

    def run_notebook(self) -> None:
        """Run the cells of the notebook."""
        begun = time.monotonic()
        path = ROOT / "examples/five_minutes.ipynb"
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        printed = self.run(["python", "-c", "\n".join(code)])
        self.say(f"{path.relative_to(ROOT)}: {printed.count(chr(10))} lines", begun)

    def check_clean(self) -> None:
        """Raise a FaultError if git sees files that the pages' commands leave."""
        if left := self.run(["git", "status", "--porcelain"]):
            raise FaultError(f"the pages' commands leave files in the checkout:\n{left}")


def _is_ours(name: str) -> bool:
    """Tell variables that a newcomer does not have."""
    return name.startswith(("PYTHON", "VOCAGNOLM", "PIP_", "HF_", "WANDB"))


def check_shown(command: Command, printed: str) -> None:
    """Raise a FaultError for a line of a page's output whose words a command does not print.

    Numbers differ between machines, and with a run's length. On `EXACT_PAGES` they do not.
    """

    def words_of(text: str) -> str:
        if command.page not in EXACT_PAGES:
            text = re.sub(r"[-\u2212+]?\d[\d.,:]*(?:e[-+]?\d+)?[kM%]?", "#", text)
        return f" {' '.join(text.split())} "

    found = words_of(printed)
    for line in command.shown.splitlines():
        for part in line.split("..."):
            if part.strip() and words_of(part) not in found:
                raise FaultError(f"{command}\nprints no {line.strip()!r}, but:\n{printed}")


def pages() -> Iterator[str]:
    """Name README, the quickstart and the landing page, then the others in their order."""
    yield from ("docs/quickstart.md", "README.md", "docs/index.md")
    for path in sorted((ROOT / "docs").glob("*.md")):
        if (name := f"docs/{path.name}") not in WHOLE_PAGES:
            yield name


def main() -> int:
    """Live through the hour; return the exit status."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--torch", default="", help="requirement of PyTorch, installed first")
    parser.add_argument("--constraint", default="", help="file of versions to install")
    arguments = parser.parse_args()
    all_commands = {page: commands_of(page) for page in pages()}
    every = [command for commands in all_commands.values() for command in commands]
    with tempfile.TemporaryDirectory(prefix="first-hour-") as scratch:
        clone = Clone(Path(scratch))
        try:
            clone.install(arguments.python, arguments.torch, arguments.constraint)
            # The demo makes what all other commands need.
            demo = next(command for command in every if command.text.startswith("vocagnolm demo"))
            clone.type_all([demo])
            typed = {demo.text}
            # Two lanes: pages that build on the quickstart, and those that need only the demo.
            lanes: dict[bool, list[Command]] = {True: [], False: []}
            for page, commands in all_commands.items():
                lanes[page in AFTER_QUICKSTART] += [c for c in commands if c.text not in typed]
                typed |= {command.text for command in commands}
            with ThreadPoolExecutor(2) as pool:
                works = [pool.submit(clone.type_all, lane) for lane in lanes.values()]
                works += [pool.submit(clone.run_notebook), pool.submit(clone.run_example)]
                for work in works:
                    work.result()
            clone.check_clean()
        except FaultError as fault:
            clone.say(f"FAILED: {fault}")
            return 1
        clone.say("done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
