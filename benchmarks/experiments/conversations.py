r"""Guided fine-tuning on conversations beside plain one: equal students, conversations and order.

    python -m benchmarks.experiments.conversations --output_dir runs/conversations
    python -m benchmarks.experiments.conversations --output_dir runs/conversations --worlds gsm8k \
        --problems gsm8k_train.jsonl --texts math_train.jsonl --tokenizers TINYLLAMA GPT2

Run in the repository's root, with OMP_NUM_THREADS=1. A question is the user's turn, its solution
the assistant's, and the student is trained on that alone. World `demo` has the problems, students,
teacher and tokenizers of `make demo`; `gsm8k` has GSM8K's, real tokenizers, and models that are
made first. Each has two cases: `spoilt`, where a share of the solutions is wrong, and `neutral`.
Runs are made, resumed and shown as those of `methods`, and `cpt` is plain fine-tuning here: there
are `results.json` and `results.md` for each case, and in `spoilt` what both models say of what is
spoilt, `spoilt.json`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from abc import abstractmethod
from collections.abc import Sequence
from itertools import chain, zip_longest
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.experiments.method_worlds import DemoWorld, World, write_corpus
from benchmarks.experiments.methods import BEST, METHODS, do, write
from benchmarks.experiments.text_worlds import BoolArray, make_model
from vocagnolm.chat.formats import Conversation
from vocagnolm.demo import world as demo_world
from vocagnolm.demo.worker import train
from vocagnolm.evaluation.engines.chat import Chat
from vocagnolm.evaluation.engines.hf_engine import HFEngine
from vocagnolm.readers import Reader, student_reader

RUNS = {
    **dict.fromkeys(("student", "teacher"), ""),
    "cpt": METHODS["cpt"],
    "max": METHODS["vocagnolm-stored"],
    "share": f"--aggregation=share {METHODS['vocagnolm-stored']}",
    "best": f"{BEST} {METHODS['vocagnolm-stored']}",
}
DEMO_STEPS = 400
SPOILT_SHARE, SPOILT_FILE = 0.4, "spoilt.json"
# As the demo's teacher has read problems; it ends no answer.
_QUESTIONS = (
    "{{ eos_token }}{% for m in messages %}{{ 'Q: ' if m.role == 'user' else '\nA: ' }}"
    "{{ m.content }}{% endfor %}{% if add_generation_prompt %}{{ '\nA:' }}{% endif %}"
)
_ANSWER_TOKENS = 48  # of the demo: more than any right answer has
_TOLD = 200  # conversations in which both models are asked for what is spoilt


class Talk(NamedTuple):
    """A question and its answer, and which characters of the answer are spoilt, if any."""

    question: str
    answer: str
    is_spoilt: BoolArray | None = None

    @property
    def conversation(self) -> Conversation:
        """As models read it."""
        text = f"{self.question}\n{self.answer}"
        return Conversation(text, ("user", "assistant"), (len(self.question), len(text)))


class TalkWorld(World):
    """Conversations instead of pages, with a share of spoilt answers; in the neutral case none."""

    per_seed = frozenset({"base"})  # needs that are others for each seed
    held_out: list[Talk]

    def __init__(self, root: Path, share: float):
        super().__init__(root / ("spoilt" if share else "neutral"))
        self.share = share

    @property
    def form(self) -> str:
        """The teacher's chat template; the student's is the plain form."""
        return "plain"

    @abstractmethod
    def talks(self, seed: int) -> list[Talk]:
        """What students are trained on."""

    def place(self, name: str, seed: int) -> Path:  # noqa: D102
        root = self.root if name in ("pages", "losses") else self.root.parent
        return root / "needs" / (f"{name}-{seed}" if name in self.per_seed else name)

    def make_pages(self, path: Path, seed: int) -> None:
        """The students' conversations."""
        write_talks(path, self.talks(seed))

    def make_clean(self, path: Path, _: int) -> None:
        """What is read at the end of each run."""
        write_talks(path, self.held_out)

    def make_losses(self, path: Path, seed: int) -> None:
        """The teacher's losses, in its own template."""
        self.score("teacher", path, seed, f"--teacher_chat_template={self.form}")

    def load(self, model: Path) -> tuple[PreTrainedModel, Reader]:
        """Load a student or the teacher, and its way to read conversations."""
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        form = self.form if model == self.need("teacher", 0) else "plain"
        longest = loaded.config.max_position_embeddings
        return loaded, student_reader(AutoTokenizer.from_pretrained(model), longest, form)

    def judge(self, model: Path) -> dict[str, float]:  # noqa: D102
        return judge_answers(*self.load(model), self.held_out)

    def tell(self, seed: int) -> None:
        """Write nats per character of what is spoilt, and of the rest, before the training.

        Guidance can leave out what is spoilt if the teacher is further below the student elsewhere.
        """
        if (path := self.seed_dir(seed) / SPOILT_FILE).exists():
            return
        talks, found = self.talks(seed)[:_TOLD], {}
        models = {"student": self.student(seed), "teacher": self.need("teacher", seed)}
        for name, model in models.items():
            sums = np.zeros((2, 2))
            reads = read_answers(*self.load(model), talks)
            for (question, _, is_spoilt), (nats_N, _, spans) in zip(talks, reads, strict=True):
                for nats, (a, b) in zip(nats_N.tolist(), spans - len(question) - 1, strict=True):
                    row = is_spoilt is not None and is_spoilt[a:b].any()
                    sums[int(row)] += nats, b - a
            found[name] = dict(zip(("kept", "spoilt"), sums[:, 0] / sums[:, 1], strict=True))
        path.write_text(json.dumps(found) + "\n")


def write_talks(path: Path, talks: Sequence[Talk]) -> None:
    """Write conversations as a directory that `--dataset` reads."""
    path.mkdir()
    rows = (json.dumps({"messages": talk.conversation.messages}) + "\n" for talk in talks)
    (path / "talks.jsonl").write_text("".join(rows))


class DemoTalks(TalkWorld, DemoWorld):
    """Problems of `make demo`, some with wrong solutions."""

    per_seed = frozenset({"base", "pages", "losses"})
    talk_tokens = 40  # fewer than they have on average

    def __init__(self, root: Path, share: float, steps: int):
        super().__init__(root, share)
        self.talk_count = steps * self.step_tokens // self.talk_tokens
        batch = f"--global_batch_tokens={self.step_tokens}"
        self.options = (f"--max_steps={steps}", batch, "--student_chat_template=plain")
        items = demo_world.held_out_problems()
        self.held_out = [Talk(item.question, _solution(item)) for item in items]

    @property
    def form(self) -> str:  # noqa: D102
        return str(self.need("form", 0))

    def make_form(self, path: Path, _: int) -> None:
        """The template of the demo's pages."""
        path.write_text(_QUESTIONS)

    def talks(self, seed: int) -> list[Talk]:  # noqa: D102
        rng, excluded = Random(f"talks {seed}"), demo_world.held_out_questions()
        found = []
        for _ in range(self.talk_count):
            item = demo_world.problem(rng, excluded)
            talk = Talk(item.question, _solution(item))
            if rng.random() < self.share:
                answer = _solution(demo_world.corrupt(rng, item))
                differs = (a != b for a, b in zip_longest(answer, talk.answer))
                talk = Talk(item.question, answer, np.logical_or.accumulate([*differs]))
            found.append(talk)
        return found

    def judge(self, model: Path) -> dict[str, float]:
        """Let a model answer, too; the final number must be right."""
        loaded, reader = self.load(model)
        assert reader.template
        chat = Chat(reader.tokenizer, reader.template.source)
        engine = HFEngine(loaded, reader.tokenizer, len(self.held_out), chat)
        prompts = [chat.prompt(talk.question) for talk in self.held_out]
        right = 0
        for found in chain.from_iterable(engine.generate(prompts, ("\n",), _ANSWER_TOKENS)):
            both = (found.text, self.held_out[found.index].answer)
            said, expected = (text.partition("####")[2].strip() for text in both)
            right += said == expected
        judged = judge_answers(loaded, reader, self.held_out)
        return {"accuracy": right / len(prompts), **judged}


def _solution(item: demo_world.Problem) -> str:
    return demo_world.render(item)[1].strip()


# -- GSM8K ---------------------------------------------------------------------------------------


class ProblemTalks(TalkWorld):
    """Problems with solutions in words, and models with real tokenizers.

    A problem is held out, or for students, or for the teacher, which reads it as it was. Files are
    .jsonl with the field `text`: of problems the question, a line break and the solution.
    """

    first_steps, teacher_steps = 100, 400
    sizes = ("--max_length=512", "--global_batch_tokens=1024", "--per_device_train_batch_size=2")
    options = (
        *("--max_length=512", "--global_batch_tokens=512", "--per_device_train_batch_size=1"),
        *("--max_steps=120", "--student_chat_template=plain"),
    )
    width, teacher_width, layers = 64, 96, 2
    longest = 600  # characters of a problem, so that several fit in a block
    held_out_problems, page_problems = 100, 900  # twice as many as are read

    def __init__(
        self, root: Path, share: float, problems: Path, texts: list[Path], tokenizers: list[Path]
    ):
        super().__init__(root, share)
        self.texts = texts
        self.tokenizers = [AutoTokenizer.from_pretrained(path) for path in tokenizers]
        shown = [text for text in read_texts([problems]) if len(text) <= self.longest]
        Random("problems").shuffle(shown)
        talks = [Talk(a, b) for a, _, b in (text.partition("\n") for text in shown)]
        self.held_out, rest = talks[: self.held_out_problems], talks[self.held_out_problems :]
        self._pages, self._lessons = rest[: self.page_problems], rest[self.page_problems :]

    @property
    def form(self) -> str:  # noqa: D102
        return "chatml" if "<|im_start|>" in self.tokenizers[1].get_vocab() else "plain"

    def talks(self, seed: int) -> list[Talk]:  # noqa: D102
        rng = Random("spoilt")
        lines = [line for talk in self._pages for line in talk.answer.split("\n")[:-1]]
        numbers = re.findall(r"\d+", "\n".join(lines))
        return [
            spoil_talk(talk, rng, lines, numbers) if rng.random() < self.share else talk
            for talk in self._pages
        ]

    def make_teacher(self, path: Path, seed: int) -> None:
        """A model that has read problems as they were, as conversations in its template."""
        form = ("--train_on=all", f"--student_chat_template={self.form}")
        steps, lessons = f"--max_steps={self.teacher_steps}", self.need("lessons", seed)
        self._make(path, 1, self.teacher_width, lessons, steps, *form, "--seed=1000")

    def make_base(self, path: Path, seed: int) -> None:
        """A student that has read a little."""
        steps, texts = f"--max_steps={self.first_steps}", self.need("texts", seed)
        self._make(path, 0, self.width, texts, steps, f"--seed={seed}")

    def _make(self, path: Path, which: int, width: int, corpus: Path, *options: str) -> None:
        torch.manual_seed(int(options[-1].partition("=")[2]))
        untrained, tokenizer = path.with_name(f"{path.name}.untrained"), self.tokenizers[which]
        make_model(len(tokenizer), width, self.layers).save_pretrained(untrained)
        tokenizer.save_pretrained(untrained)
        train(untrained, corpus, path, "--method=cpt", *self.sizes, *options)

    def make_lessons(self, path: Path, _: int) -> None:
        """The teacher's problems."""
        write_talks(path, self._lessons)

    def make_texts(self, path: Path, _: int) -> None:
        """What students read first."""
        write_corpus(path, read_texts(self.texts))

    def student(self, seed: int) -> Path:  # noqa: D102
        return self.need("base", seed)


def read_texts(files: Sequence[Path]) -> list[str]:
    """Read the documents of files."""
    return [json.loads(line)["text"] for file in files for line in file.open(encoding="utf-8")]


def spoil_talk(talk: Talk, rng: Random, lines: Sequence[str], numbers: Sequence[str]) -> Talk:
    """Put other numbers for all of an answer, or steps of other answers for its own.

    The numbers and steps are those of the corpus, as often as they are in it; the final line has
    another number in either case.
    """
    *steps, last = talk.answer.split("\n")
    if rng.random() < 0.5:
        pieces, last = [], talk.answer
    else:
        pieces = [(f"{rng.choice(lines)}\n", True) for _ in steps]
    # Every second one is a number.
    for place, piece in enumerate(re.split(r"(\d+)", last)):
        pieces.append((rng.choice(numbers), True) if place % 2 else (piece, False))
    texts, spoilt = zip(*pieces, strict=True)
    return Talk(talk.question, "".join(texts), np.repeat(spoilt, [*map(len, texts)]))


# -- Judging -------------------------------------------------------------------------------------

Read = tuple[torch.Tensor, torch.Tensor, npt.NDArray[np.int64]]


@torch.no_grad()
def read_answers(model: PreTrainedModel, reader: Reader, talks: Sequence[Talk]) -> list[Read]:
    """Read answers, their ends included: nats, which tokens are the likeliest, and spans."""
    found = []
    for read in reader.read_turns([talk.conversation for talk in talks], "completions"):
        assert not isinstance(read, str), read
        part = slice(*read.labelled[0].tolist())
        ids_S = torch.tensor([int(read.first), *read.values.tolist()])
        hidden_ND = model.base_model(ids_S[None]).last_hidden_state[0, part]
        head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        logits_NV, ids_N = head(hidden_ND), ids_S[1:][part]
        nats_N = F.cross_entropy(logits_NV, ids_N, reduction="none").double()
        found.append((nats_N, logits_NV.argmax(-1) == ids_N, read.spans[part]))
    return found


def judge_answers(
    model: PreTrainedModel, reader: Reader, talks: Sequence[Talk]
) -> dict[str, float]:
    """Measure a model on answers: nats per character, of numbers per digit, likeliest tokens."""
    reads = read_answers(model.eval(), reader, talks)  # type: ignore[no-untyped-call]
    number_nats = 0.0
    for talk, (nats_N, _, spans) in zip(talks, reads, strict=True):
        text = talk.conversation.text
        has_digit = [bool(re.search(r"\d", text[a:b])) for a, b in spans.tolist()]
        number_nats += float(nats_N[torch.tensor(has_digit)].sum())
    answers = "".join(talk.answer for talk in talks)
    return {
        "nats_per_character": float(sum(nats_N.sum() for nats_N, _, _ in reads)) / len(answers),
        "nats_per_digit": number_nats / len(re.findall(r"\d", answers)),
        "top1": float(torch.cat([right_N for _, right_N, _ in reads]).double().mean()),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Do the runs, and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--output_dir", type=Path, required=True, help="gets a directory for each world")
    add("--worlds", nargs="+", choices=("demo", "gsm8k"), default=("demo", "gsm8k"))
    add("--problems", type=Path, help="gsm8k: .jsonl file of questions and solutions")
    add("--texts", type=Path, nargs="+", help="gsm8k: .jsonl files that students read first")
    add("--tokenizers", type=Path, nargs=2, help="gsm8k: directories, the student's and teacher's")
    add("--demo_steps", type=int, default=DEMO_STEPS, help="demo: of every run")
    add("--seeds", type=int, nargs="+", default=range(5))
    add("--runs", nargs="+", choices=RUNS, default=tuple(RUNS))
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    root: Path = arguments.output_dir.resolve()
    worlds: list[TalkWorld] = []
    if "demo" in arguments.worlds:
        steps = arguments.demo_steps
        demo = root / ("demo" if steps == DEMO_STEPS else f"demo-{steps}")
        worlds += [DemoTalks(demo, share, steps) for share in (SPOILT_SHARE, 0.0)]
    given = (arguments.problems, arguments.texts, arguments.tokenizers)
    if "gsm8k" in arguments.worlds and None in given:
        sys.stdout.write("gsm8k skipped: it needs --problems, --texts and --tokenizers\n")
    elif "gsm8k" in arguments.worlds:
        worlds += [ProblemTalks(root / "gsm8k", share, *given) for share in (SPOILT_SHARE, 0.0)]
    # Seed by seed, so that what is interrupted has whole seeds.
    for seed in arguments.seeds:
        for world in worlds:
            for name in arguments.runs:
                do(world, name, RUNS[name], seed)
                write(world, RUNS)
    for world in worlds:
        if world.share:
            world.tell(arguments.seeds[0])
        sys.stdout.write(f"{world.root}\n\n{write(world, RUNS)}\n")


if __name__ == "__main__":
    main()
