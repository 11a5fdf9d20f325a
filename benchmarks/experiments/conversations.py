"""Guided fine-tuning on conversations beside plain one: equal students, conversations and order.

    python -m benchmarks.experiments.conversations --output_dir runs/conversations

Run in the repository's root, with OMP_NUM_THREADS=1. Problems, students, teacher and tokenizers are
those of `make demo`: a question is the user's turn, its solution the assistant's, and the student
is trained on that alone, in another template than the teacher's. In the case `spoilt` 40 % of the
solutions are wrong, in `neutral` none. Runs are made, resumed and shown as those of `methods`, and
`cpt` is plain fine-tuning here: there are `results.json` and `results.md` for each case.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from random import Random

import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.experiments.methods import METHODS, do, write
from benchmarks.experiments.worlds import DemoWorld
from vocagnolm.chat.formats import Conversation
from vocagnolm.demo import world as demo_world
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
# As the demo's teacher has read problems; it ends no answer.
_QUESTIONS = (
    "{{ eos_token }}{% for m in messages %}{{ 'Q: ' if m.role == 'user' else '\nA: ' }}"
    "{{ m.content }}{% endfor %}{% if add_generation_prompt %}{{ '\nA:' }}{% endif %}"
)
_ANSWER_TOKENS = 48  # more than any right answer has
_TALK_TOKENS = 40  # fewer than a conversation has on average
Talk = tuple[str, str]  # a question, and its answer


class TalkWorld(DemoWorld):
    """The demo's problems as conversations, a share of them with wrong solutions."""

    def __init__(self, root: Path, share: float):
        super().__init__(root)
        self.share = share
        self.options = (*DemoWorld.options, "--student_chat_template=plain")
        self.held_out = [_talk(item) for item in demo_world.held_out_problems()]

    def place(self, name: str, seed: int) -> Path:  # noqa: D102
        # Students, and all that is the same for both cases, are beside the runs of either.
        root = self.root if name in ("pages", "losses") else self.root.parent
        is_shared = name in ("teacher", "clean", "form")
        return root / "needs" / (name if is_shared else f"{name}-{seed}")

    def make_form(self, path: Path, _: int) -> None:
        """The teacher's chat template, as in the demo's pages; the student's is the plain form."""
        path.write_text(_QUESTIONS)

    def make_pages(self, path: Path, seed: int) -> None:
        """The students' conversations."""
        rng, excluded = Random(f"talks {seed}"), demo_world.held_out_questions()
        talks = []
        for _ in range(self.steps * self.step_tokens // _TALK_TOKENS):
            item = demo_world.problem(rng, excluded)
            if rng.random() < self.share:
                item = demo_world.corrupt(rng, item)
            talks.append(_talk(item))
        write_talks(path, talks)

    def make_clean(self, path: Path, _: int) -> None:
        """What is read at the end of each run."""
        write_talks(path, self.held_out)

    def make_losses(self, path: Path, seed: int) -> None:
        """The teacher's losses, in its own template."""
        form = self.need("form", seed)
        self.score("teacher", path, seed, f"--teacher_chat_template={form}")

    def judge(self, model: Path) -> dict[str, float]:
        """Let a model answer: the final number must be right. Then read it the right answers."""
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        form = str(self.need("form", 0)) if model == self.need("teacher", 0) else "plain"
        tokenizer = AutoTokenizer.from_pretrained(model)
        reader = student_reader(tokenizer, loaded.config.max_position_embeddings, form)
        assert reader.template
        chat = Chat(tokenizer, reader.template.source)
        engine = HFEngine(loaded, tokenizer, len(self.held_out), chat)
        prompts = [chat.prompt(question) for question, _ in self.held_out]
        right = 0
        for found in chain.from_iterable(engine.generate(prompts, ("\n",), _ANSWER_TOKENS)):
            both = (found.text, self.held_out[found.index][1])
            said, expected = (text.partition("####")[2].strip() for text in both)
            right += said == expected
        return {"accuracy": right / len(prompts), **judge_answers(loaded, reader, self.held_out)}


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
    """Measure a model on answers, their ends included.

    Returns:
        nats per character, of tokens with digits per digit, and the share of likeliest tokens.
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


def main(argv: Sequence[str] | None = None) -> None:
    """Do the runs, and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output_dir", type=Path, required=True, help="gets both cases")
    parser.add_argument("--seeds", type=int, nargs="+", default=range(5))
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=tuple(RUNS))
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    root: Path = arguments.output_dir.resolve()
    worlds = [TalkWorld(root / case, share) for case, share in CASES.items()]
    # Seed by seed, so that what is interrupted has whole seeds.
    for seed in arguments.seeds:
        for world in worlds:
            for name in arguments.runs:
                do(world, name, RUNS[name], seed)
                write(world, RUNS)
    for world in worlds:
        sys.stdout.write(f"{world.root}\n\n{write(world, RUNS)}\n")


if __name__ == "__main__":
    main()
