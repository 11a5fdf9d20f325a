"""Make what the embedded world ships: its teacher, and its student's tokenizer.

    python -m benchmarks.make_demo_teacher --output_dir vocagnolm/assets

Takes about three minutes on one CPU core. The teacher first reads problems on noisy pages, then
problems alone. Like a mathematics model, it is good at solutions and poor at web noise. The last
line is its accuracy and loss on the held-out problems, after rounding to float16.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Collection, Iterator
from itertools import chain
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from benchmarks.generated import llama_decoder
from vocagnolm.demo import world as demo_world
from vocagnolm.demo.methods import TEACHER
from vocagnolm.demo.run import STUDENT_TOKENIZER, judge, student_config, train
from vocagnolm.shell.io import ASSETS

SEED = 1
# Steps and learning rate of each stage. A step has 8 blocks of 192 tokens.
STAGES = {"pages": (800, 3e-3), "problems": (500, 2e-3)}
BLOCK_TOKENS, BLOCKS_PER_STEP = 192, 8
TOKENIZER_TEXTS = 4000
TEACHER_VOCABULARY_TOKENS = 2048
TEXTS = 30_000  # enough that no epoch ends, so no text is read twice


def make(output_dir: Path, scratch: Path) -> dict[str, float]:
    """Train the teacher, and judge the shipped model on the held-out problems.

    `output_dir` gets `demo_teacher/` (weights, configuration, tokenizer) and `demo_student/`
    (tokenizer), `scratch` the lessons and the stages.
    """
    student_tokenizer().save_pretrained(output_dir / STUDENT_TOKENIZER)
    tokenizer = teacher_tokenizer()
    torch.manual_seed(SEED)
    # About half a million parameters.
    config = LlamaConfig(
        vocab_size=TEACHER_VOCABULARY_TOKENS,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.04,
        bos_token_id=0,
        eos_token_id=0,
    )
    untrained = LlamaForCausalLM(config)
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
    return judge(output_dir / TEACHER)


def _lessons(stage: str, scratch: Path) -> Path:
    """Write the texts of a stage, and return their path."""
    excluded = demo_world.held_out_questions()
    texts = lessons(TEXTS, SEED, 0.0, excluded)
    if stage == "pages":
        general = demo_world.general_corpus(TEXTS // 10, SEED)
        texts = chain(lessons(TEXTS, SEED + 1, 0.4, excluded), general)
    corpus = scratch / f"{stage}.jsonl"
    demo_world.write_jsonl(corpus, texts)
    return corpus


def student_tokenizer() -> PreTrainedTokenizerFast:
    """Train a Metaspace BPE with byte fallback like Llama's, but with multi-digit tokens."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            # Split punctuation off, so that a number has the same token at the end of a sentence.
            pre_tokenizers.Split(Regex(r"[.?]|\n"), "isolated"),
            pre_tokenizers.Metaspace(prepend_scheme="first"),
        ]
    )
    tokenizer.decoder = llama_decoder()
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=student_config().vocab_size,
        special_tokens=special + [f"<0x{byte:02X}>" for byte in range(256)],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_tokenizer_texts(), trainer)
    # The trainer can reserve byte tokens only as special tokens, which decoding would drop.
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = state["added_tokens"][: len(special)]
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)),
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        add_bos_token=True,
    )


def teacher_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE with single digits, like Qwen2.5's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TEACHER_VOCABULARY_TOKENS,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_tokenizer_texts(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


def _tokenizer_texts() -> Iterator[str]:
    rng, excluded = random.Random("tokenizer"), demo_world.held_out_questions()
    for _ in range(TOKENIZER_TEXTS):
        yield demo_world.page(rng, 0.4, excluded)
        yield demo_world.general_text(rng, excluded=excluded)


def lessons(count: int, seed: int, page_share: float, excluded: Collection[str]) -> Iterator[str]:
    """Yield the teacher's texts: problems with right solutions, some of them on noisy pages."""
    rng = random.Random(f"lessons {seed}")
    for _ in range(count):
        if rng.random() < page_share:
            yield demo_world.page(rng, 0.0, excluded)
        else:
            yield "".join(demo_world.render(demo_world.problem(rng, excluded)))


def main() -> None:
    """Run `make` from the command line."""
    parser = argparse.ArgumentParser(description="Make the teacher of the embedded world.")
    parser.add_argument("--output_dir", type=Path, default=ASSETS, help="Gets both directories.")
    output_dir: Path = parser.parse_args().output_dir
    torch.set_num_threads(1)  # the same sums on every machine, and faster at this size
    with tempfile.TemporaryDirectory() as scratch:
        result = make(output_dir, Path(scratch))
    sys.stdout.write(
        f"teacher accuracy {result['accuracy']:.3f}, loss on solutions "
        f"{result['answer_loss']:.4f} nats\n"
    )


if __name__ == "__main__":
    main()
