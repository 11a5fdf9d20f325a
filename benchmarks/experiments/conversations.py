r"""Compare guided and plain fine-tuning, with equal students, conversations and order.

    python -m benchmarks.experiments.conversations --output_dir runs/conversations
    python -m benchmarks.experiments.conversations --output_dir runs/gsm8k \
        --problems gsm8k_train.jsonl --texts math_train.jsonl --tokenizers TINYLLAMA GPT2

Run in the repository's root, with OMP_NUM_THREADS=1. A question is the user's turn, and its
solution the assistant's. The student is trained only on solutions. Problems, students, teacher and
tokenizers are those of `make demo`, or GSM8K's problems, real tokenizers and models that are made
first. In the case `spoilt`, 40 % of the solutions are wrong, in `neutral` none. Runs are made,
resumed and shown as in `methods`, with `results.json` and `results.md` for each case. Here, `cpt`
is plain fine-tuning.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from abc import abstractmethod
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.experiments.ceiling import first_line, packing_noise
from benchmarks.experiments.methods import METHODS, collect, do, write
from benchmarks.experiments.worlds import DemoWorld, World, make_model, write_corpus
from vocagnolm.chat.formats import Conversation
from vocagnolm.demo import world as demo_world
from vocagnolm.demo.run import train
from vocagnolm.evaluation.engines.generation import Chat
from vocagnolm.evaluation.engines.hf_engine import HFEngine
from vocagnolm.readers import Reader, student_reader

STORED = METHODS["vocagnolm-stored"]
RUNS = {
    **dict.fromkeys(("student", "teacher"), ""),
    "cpt": METHODS["cpt"],
    "max": STORED,
    "share": f"--aggregation=share {STORED}",
    "accept": f"--selection=accept {STORED}",
}
CASES = {"spoilt": 0.4, "neutral": 0.0}
# The demo's teacher has read problems in this form, without ends of answers.
_QUESTIONS = (
    "{{ eos_token }}{% for m in messages %}{{ 'Q: ' if m.role == 'user' else '\nA: ' }}"
    "{{ m.content }}{% endfor %}{% if add_generation_prompt %}{{ '\nA:' }}{% endif %}"
)
_ANSWER_TOKENS = 48  # more than any right answer has
_TALK_TOKENS = 40  # fewer than the average conversation has
Talk = tuple[str, str]  # a question, and its answer


class TalkWorld(World):
    """Conversations instead of pages; a share of them has wrong solutions."""

    form = "plain"  # the teacher's chat template; `plain` is the student's
    held_out: list[Talk]
    per_seed = frozenset({"base"})  # needs that differ between seeds

    def __init__(self, root: Path, share: float):
        super().__init__(root)
        self.share = share

    def place(self, name: str, seed: int) -> Path:  # noqa: D102
        # Students, and everything else that both cases share, are next to the cases.
        root = self.root if name in ("pages", "losses") else self.root.parent
        return root / "needs" / (f"{name}-{seed}" if name in self.per_seed else name)

    @abstractmethod
    def talks(self, seed: int) -> list[Talk]:
        """Return the conversations that students are trained on."""

    def make_pages(self, path: Path, seed: int) -> None:
        """Write the students' conversations."""
        write_talks(path, self.talks(seed))

    def make_clean(self, path: Path, _: int) -> None:
        """Write the conversations that are evaluated at the end of each run."""
        write_talks(path, self.held_out)

    def make_losses(self, path: Path, seed: int) -> None:
        """Store the teacher's losses, with its own template."""
        self.score("teacher", path, seed, f"--teacher_chat_template={self.form}")

    def load(self, model: Path) -> tuple[Any, Reader]:
        """Load a student or the teacher, and its reader of conversations."""
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        form = self.form if model == self.need("teacher", 0) else "plain"
        tokenizer = AutoTokenizer.from_pretrained(model)
        return loaded, student_reader(tokenizer, loaded.config.max_position_embeddings, form)

    def judge(self, model: Path) -> dict[str, float]:  # noqa: D102
        return judge_answers(*self.load(model), self.held_out)


class DemoTalks(TalkWorld, DemoWorld):
    """The demo's problems, which the teacher reads as on the demo's pages."""

    per_seed = frozenset({"base", "pages", "losses"})

    def __init__(self, root: Path, share: float):
        super().__init__(root, share)
        self.options = (*DemoWorld.options, "--student_chat_template=plain")
        self.held_out = [_talk(item) for item in demo_world.held_out_problems()]
        self.form = str(self.need("form", 0))

    def make_form(self, path: Path, _: int) -> None:
        """Write the teacher's chat template."""
        path.write_text(_QUESTIONS)

    def talks(self, seed: int) -> list[Talk]:  # noqa: D102
        rng, excluded = Random(f"talks {seed}"), demo_world.held_out_questions()
        talks = []
        for _ in range(self.steps * self.step_tokens // _TALK_TOKENS):
            item = demo_world.problem(rng, excluded)
            if rng.random() < self.share:
                item = demo_world.corrupt(rng, item)
            talks.append(_talk(item))
        return talks

    def judge(self, model: Path) -> dict[str, float]:
        """Measure how often a model's final number is right, and its loss on the right answers."""
        loaded, reader = self.load(model)
        assert reader.template
        chat = Chat(reader.tokenizer, reader.template.source)
        engine = HFEngine(loaded, reader.tokenizer, len(self.held_out), chat)
        prompts = [chat.prompt(question) for question, _ in self.held_out]
        right = 0
        for found in chain.from_iterable(engine.generate(prompts, ("\n",), _ANSWER_TOKENS)):
            both = (found.text, self.held_out[found.index][1])
            said, expected = (text.partition("####")[2].strip() for text in both)
            right += said == expected
        return {"accuracy": right / len(prompts), **judge_answers(loaded, reader, self.held_out)}


class ProblemTalks(TalkWorld):
    """GSM8K's problems, and students with little pretraining.

    A problem is held out, or is for the students, or for the teacher, which reads it unchanged.
    Files are .jsonl with the field `text`. A problem has the question, a line break and the
    solution.
    """

    options = (
        *("--max_length=512", "--global_batch_tokens=512", "--per_device_train_batch_size=1"),
        *("--max_steps=120", "--student_chat_template=plain"),
    )
    first_steps, teacher_steps = 100, 400
    held_out_problems, page_problems = 100, 900
    longest = 600  # characters of a problem, so that several fit in a sequence

    def __init__(
        self, root: Path, share: float, problems: Path, texts: Path, tokenizers: Sequence[Path]
    ):
        super().__init__(root, share)
        self.texts, self.tokenizers = texts, tokenizers
        found = [text for text in read_texts(problems) if len(text) <= self.longest]
        Random("problems").shuffle(found)
        talks = [(a, b) for a, _, b in (text.partition("\n") for text in found)]
        self.held_out, talks = talks[: self.held_out_problems], talks[self.held_out_problems :]
        self._pages, self._lessons = talks[: self.page_problems], talks[self.page_problems :]

    def student(self, seed: int) -> Path:  # noqa: D102
        return self.need("base", seed)

    def talks(self, seed: int) -> list[Talk]:  # noqa: D102
        rng = Random("spoilt")
        lines = [line for _, answer in self._pages for line in answer.split("\n")[:-1]]
        numbers = re.findall(r"\d+", "\n".join(lines))
        talks = []
        for question, answer in self._pages:
            if rng.random() < self.share:
                answer = _spoilt(answer, rng, lines, numbers)
            talks.append((question, answer))
        return talks

    def make_teacher(self, path: Path, seed: int) -> None:
        """Train a model of width 96 on problems."""
        lessons = self.need("lessons", seed)
        options = ("--train_on=all", "--student_chat_template=plain")
        steps = f"--max_steps={self.teacher_steps}"
        self._pretrain(path, self.tokenizers[1], 96, lessons, 1000, steps, *options)

    def make_base(self, path: Path, seed: int) -> None:
        """Train a student of width 64 on a little text."""
        texts = self.need("texts", seed)
        steps = f"--max_steps={self.first_steps}"
        self._pretrain(path, self.tokenizers[0], 64, texts, seed, steps)

    def _pretrain(
        self, path: Path, read_with: Path, width: int, corpus: Path, seed: int, *options: str
    ) -> None:
        torch.manual_seed(seed)
        untrained = path.with_name(f"{path.name}.untrained")
        tokenizer = AutoTokenizer.from_pretrained(read_with)
        make_model(len(tokenizer), width, 2).save_pretrained(untrained)
        tokenizer.save_pretrained(untrained)
        sizes = (
            "--max_length=512",
            "--global_batch_tokens=1024",
            "--per_device_train_batch_size=2",
        )
        train(untrained, corpus, path, "--method=cpt", f"--seed={seed}", *sizes, *options)

    def make_lessons(self, path: Path, _: int) -> None:
        """Write the teacher's problems."""
        write_talks(path, self._lessons)

    def make_texts(self, path: Path, _: int) -> None:
        """Write the texts that students read first."""
        write_corpus(path, read_texts(self.texts))


def read_texts(path: Path) -> list[str]:
    """Read the documents of a .jsonl file."""
    return [json.loads(line)["text"] for line in path.open(encoding="utf-8")]


def _spoilt(answer: str, rng: Random, lines: Sequence[str], numbers: Sequence[str]) -> str:
    """Replace all numbers of an answer, or replace its steps and the numbers of its last line.

    New numbers and steps are drawn from those of the corpus, as often as they are in it.
    """

    def other_numbers(text: str) -> str:
        return re.sub(r"\d+", lambda _: rng.choice(numbers), text)

    if rng.random() < 0.5:
        return other_numbers(answer)
    *steps, last = answer.split("\n")
    return "\n".join([*(rng.choice(lines) for _ in steps), other_numbers(last)])


def _talk(item: demo_world.Problem) -> Talk:
    return item.question, demo_world.render(item)[1].strip()


def _conversation(talk: Talk) -> Conversation:
    text = "\n".join(talk)
    return Conversation(text, ("user", "assistant"), (len(talk[0]), len(text)))


def write_talks(path: Path, talks: Sequence[Talk]) -> None:
    """Write conversations as a directory that `--dataset` reads."""
    path.mkdir()
    rows = (json.dumps({"messages": _conversation(talk).messages}) + "\n" for talk in talks)
    (path / "talks.jsonl").write_text("".join(rows))


@torch.no_grad()
def judge_answers(
    model: PreTrainedModel, reader: Reader, talks: Sequence[Talk]
) -> dict[str, float]:
    """Measure a model on answers, including their ends.

    Returns:
        nats per character, nats per digit of tokens with digits, and the share of likeliest tokens.
    """
    model.eval()
    nats = number_nats = 0.0
    right = []
    conversations = [_conversation(talk) for talk in talks]
    for talk, read in zip(
        conversations, reader.read_turns(conversations, "completions"), strict=True
    ):
        assert not isinstance(read, str), read
        part = slice(*read.labelled[0].tolist())
        ids_S = torch.tensor([int(read.first), *read.values.tolist()])
        hidden_ND = model.base_model(ids_S[None]).last_hidden_state[0, part]
        head = model.get_output_embeddings()
        logits_NV, ids_N = head(hidden_ND), ids_S[1:][part]
        nats_N = F.cross_entropy(logits_NV, ids_N, reduction="none").double()
        spans = read.spans[part].tolist()
        has_digit = torch.tensor([bool(re.search(r"\d", talk.text[a:b])) for a, b in spans])
        nats += float(nats_N.sum())
        number_nats += float(nats_N[has_digit].sum())
        right.append(logits_NV.argmax(-1) == ids_N)
    answers = "".join(answer for _, answer in talks)
    return {
        "nats_per_character": nats / len(answers),
        "nats_per_digit": number_nats / len(re.findall(r"\d", answers)),
        "top1": float(torch.cat(right).double().mean()),
    }


def ceiling_line(worlds: Sequence[World]) -> str:
    """Return what plain fine-tuning gains in the first measure if no solution is wrong.

    The line is empty until two seeds of both `CASES` are finished.
    """
    spoilt, neutral = (collect(world, RUNS).get("cpt", {}) for world in worlds)
    seeds = spoilt.keys() & neutral.keys()
    if len(seeds) < 2:
        return ""
    measure = next(iter(spoilt[min(seeds)]))
    gains = [neutral[seed][measure] - spoilt[seed][measure] for seed in sorted(seeds)]
    if measure != "accuracy":
        gains = [-gain for gain in gains]  # it is a loss
    return first_line(statistics.mean(gains), packing_noise(gains), measure.replace("_", " "))


def main(argv: Sequence[str] | None = None) -> None:
    """Do the runs, and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output_dir", type=Path, required=True, help="gets both cases")
    parser.add_argument("--problems", type=Path, help=".jsonl; else those of `make demo`")
    parser.add_argument("--texts", type=Path, help=".jsonl that students read before")
    parser.add_argument("--tokenizers", type=Path, nargs=2, help="the student's, the teacher's")
    parser.add_argument("--seeds", type=int, nargs="+", default=range(5))
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=tuple(RUNS))
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    root: Path = arguments.output_dir.resolve()
    own = (arguments.problems, arguments.texts, arguments.tokenizers)
    worlds: list[TalkWorld] = []
    for case, share in CASES.items():
        if arguments.problems:
            worlds.append(ProblemTalks(root / case, share, *own))
        else:
            worlds.append(DemoTalks(root / case, share))
    # Seeds are the outer loop, so that an interrupted command has complete seeds.
    for seed in arguments.seeds:
        for world in worlds:
            for name in arguments.runs:
                do(world, name, RUNS[name], seed)
                write(world, RUNS)
    for world in worlds:
        sys.stdout.write(f"{world.root}\n\n{ceiling_line(worlds)}\n\n{write(world, RUNS)}\n")


if __name__ == "__main__":
    main()
