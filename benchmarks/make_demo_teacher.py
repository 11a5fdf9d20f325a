"""Make what the embedded world ships: its teacher, and its student's tokenizer.

    python -m benchmarks.make_demo_teacher --output_dir vocagnolm/assets

About three minutes on one CPU core. The teacher reads problems on noisy pages first and problems
alone afterwards, so that, as a mathematics model, it is good at solutions and poor at web noise.
Its last line is its accuracy on the held-out problems, after rounding to float16.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from itertools import chain
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedModel

from vocagnolm.demo import models as demo_models
from vocagnolm.demo import world as demo_world
from vocagnolm.demo.judge import Verdict, judge
from vocagnolm.demo.models import ASSETS, STUDENT_TOKENIZER, TEACHER
from vocagnolm.demo.worker import train

SEED = 1
# Stage: steps, learning rate. A step is 8 blocks of 192 tokens.
STAGES = {"pages": (800, 3e-3), "problems": (500, 2e-3)}
BLOCK_TOKENS, BLOCKS_PER_STEP = 192, 8
TEXTS = 30_000  # an epoch is never finished: no text is read twice


def make(output_dir: Path, scratch: Path) -> Verdict:
    """Train the teacher and write both directories.

    Args:
        output_dir: gets `demo_teacher/` (weights, configuration, tokenizer) and `demo_student/`
            (tokenizer).
        scratch: for the lessons and the stages.

    Returns:
        What the held-out problems say about the teacher as it is shipped.
    """
    demo_models.student_tokenizer().save_pretrained(output_dir / STUDENT_TOKENIZER)
    tokenizer = demo_models.teacher_tokenizer()
    torch.manual_seed(SEED)
    untrained = LlamaForCausalLM(demo_models.teacher_config())
    newest = scratch / "untrained"
    untrained.save_pretrained(newest)
    tokenizer.save_pretrained(newest)
    for stage, (steps, learning_rate) in STAGES.items():
        train(
            newest,
            _lessons(stage, scratch),
            scratch / stage,
            "--method=cpt",
            f"--max_length={BLOCK_TOKENS}",
            f"--global_batch_tokens={BLOCK_TOKENS * BLOCKS_PER_STEP}",
            f"--per_device_train_batch_size={BLOCKS_PER_STEP}",
            f"--max_steps={steps}",
            f"--learning_rate={learning_rate}",
            f"--seed={SEED}",
        )
        newest = scratch / stage
    model = AutoModelForCausalLM.from_pretrained(newest, dtype=torch.float16)
    model.save_pretrained(output_dir / TEACHER)
    tokenizer.save_pretrained(output_dir / TEACHER)
    return verdict(output_dir / TEACHER)


def verdict(teacher: Path, limit: int | None = None) -> Verdict:
    """Judge a saved teacher."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    return judge(model, AutoTokenizer.from_pretrained(teacher), limit)


def _lessons(stage: str, scratch: Path) -> Path:
    """Write the texts of a stage."""
    excluded = demo_world.held_out_questions()
    texts = demo_world.lessons(TEXTS, SEED, 0.0, excluded)
    if stage == "pages":
        general = demo_world.general_corpus(TEXTS // 10, SEED, excluded)
        texts = chain(demo_world.lessons(TEXTS, SEED + 1, 0.4, excluded), general)
    corpus = scratch / f"{stage}.jsonl"
    demo_world.write_jsonl(corpus, texts)
    return corpus


def main() -> None:
    """Run `make` from the command line."""
    parser = argparse.ArgumentParser(description="Make the teacher of the embedded world.")
    parser.add_argument("--output_dir", type=Path, default=ASSETS, help="Gets both directories.")
    output_dir: Path = parser.parse_args().output_dir
    torch.set_num_threads(1)  # the same sums on every machine, and faster at this size
    with tempfile.TemporaryDirectory() as scratch:
        result = make(output_dir, Path(scratch))
    sys.stdout.write(
        f"teacher accuracy {result.accuracy:.3f}, loss on solutions {result.answer_loss:.4f} nats\n"
    )


if __name__ == "__main__":
    main()
