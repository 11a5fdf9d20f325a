"""One student of the demo: pretrained, trained further by each method, and judged."""

import os
import sys
import time
import traceback
from argparse import Namespace
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from vocagnolm.cli import quiet_logs
from vocagnolm.conventions import IGNORED_LABEL
from vocagnolm.demo import world
from vocagnolm.demo.methods import RECIPE, TEACHER, flags_of, tokens_of
from vocagnolm.evaluation.engines.hf_engine import HFEngine
from vocagnolm.evaluation.extraction import extract
from vocagnolm.evaluation.tasks.benchmarks import BENCHMARKS
from vocagnolm.run.parser import parse
from vocagnolm.run.train import train as run_job
from vocagnolm.shell.io import ASSETS, print_main, share_weights
from vocagnolm.spans import encode
from vocagnolm.tokenizer import start_id

# It is one of the package's assets, made by benchmarks/make_demo_teacher.py.
STUDENT_TOKENIZER = "demo_student"
# In a seed's directory: the student that all methods begin with, pages and conversations.
BASE, PAGES, CONVERSATIONS = "base", "pages.jsonl", "talks.jsonl"
_CONVERSATION_COUNT = 1500
# On average, texts and pages have more tokens than this. So dividing a run's tokens by it gives
# enough texts that none is read twice.
GENERAL_TOKENS = 48
PAGE_TOKENS = 46
# The first pretraining is on noise, prose and questions without answers.
BASE_OPTIONS = ("--max_steps=150", "--global_batch_tokens=1024", "--per_device_train_batch_size=8")


def run_seed(arguments: Namespace, seed: int) -> dict[str, dict[str, float]]:
    """Make a student, train it further by each method, and judge the results.

    Raises:
        RuntimeError: a run failed. The message names it, and the log has the traceback.
    """
    # A model of this size is faster with one thread than with two.
    torch.set_num_threads(1)
    directory = arguments.output_dir / f"seed{seed}"
    directory.mkdir()
    # Everything that the runs print goes to a file. Redirect the descriptors, because replacing
    # sys.stdout would miss output of libraries written in C.
    screen = os.fdopen(os.dup(1), "w")
    with (directory / "train.log").open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    results = {}
    stage = "the first pretraining"
    try:
        pages = directory / PAGES
        # All methods read the same number of tokens.
        flags = flags_of(arguments.methods[0], seed, arguments.max_steps)
        page_count = tokens_of(flags) // PAGE_TOKENS
        make_base(directory, seed)
        world.write_jsonl(pages, world.corpus(page_count, seed, arguments.wrong_share))
        for method in arguments.methods:
            stage = method
            flags = flags_of(method, seed, arguments.max_steps)
            started = time.perf_counter()
            train(directory / BASE, pages, directory / method, *flags)
            seconds = time.perf_counter() - started
            # Judge the saved model, not the one in memory.
            metrics = judge(directory / method)
            values = ", ".join(f"{metric} {value:.3f}" for metric, value in metrics.items())
            print_main(f"seed {seed}  {method:9}  {values}", screen)
            results[method] = metrics | {"seconds": seconds}
        if seed == arguments.seeds[0]:
            leave_for_the_docs(directory, seed)
    # The demo prints the error's message. Only the log gets the traceback.
    except Exception as error:
        traceback.print_exc()
        log = directory / "train.log"
        raise RuntimeError(f"seed {seed}, {stage}: {error} (log: {log})") from error
    finally:
        sys.stdout.flush()
        os.dup2(screen.fileno(), 1)
    return results


def make_base(directory: Path, seed: int) -> None:
    """Pretrain a student on noise, prose and questions."""
    untrained = directory / "untrained"
    texts = directory / "general.jsonl"
    torch.manual_seed(seed)
    LlamaForCausalLM(student_config()).save_pretrained(untrained)
    AutoTokenizer.from_pretrained(ASSETS / STUDENT_TOKENIZER).save_pretrained(untrained)
    share_weights(untrained)
    flags = ["--method=cpt", f"--seed={seed}", *BASE_OPTIONS]
    text_count = tokens_of(flags) // GENERAL_TOKENS
    world.write_jsonl(texts, world.general_corpus(text_count, seed))
    train(untrained, texts, directory / BASE, *flags)


def leave_for_the_docs(directory: Path, seed: int) -> None:
    """Link a seed's student, pages and conversations, and the teacher, where the docs use them."""
    conversations = world.conversations(_CONVERSATION_COUNT, seed)
    world.write_rows(directory / CONVERSATIONS, conversations)
    links = {"student": Path(directory.name, BASE), "teacher": ASSETS / TEACHER}
    for name in (PAGES, CONVERSATIONS):
        links[name] = Path(directory.name, name)
    for name, target in links.items():
        link = directory.with_name(name)
        # An earlier demo may have left one.
        link.unlink(missing_ok=True)
        link.symlink_to(target)


def student_config() -> LlamaConfig:
    """Configure one wide layer, which learned the most arithmetic per second on a CPU core."""
    return LlamaConfig(
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.04,
        bos_token_id=1,
        eos_token_id=2,
    )


def train(model: Path, corpus: Path, output_dir: Path, *options: str) -> None:
    """Run `vocagnolm train` with the demo's recipe in this process. Errors are raised."""
    quiet_logs()
    paths = (f"--student={model}", f"--dataset={corpus}", f"--output_dir={output_dir}")
    # Several runs share the terminal.
    quiet = "--disable_tqdm=true"
    status = run_job(parse([f"--config={RECIPE}", quiet, *paths, *options]))
    if status:
        raise RuntimeError(f"vocagnolm train ended with status {int(status)}")


@torch.no_grad()
def judge(directory: Path, limit: int | None = None) -> dict[str, float]:
    """Let a model answer `limit` held-out problems, and compute losses of their solutions.

    The accuracy is the share of problems whose greedy answer ends with the right number. Losses are
    nats per token, of problems with their right solutions and of the solutions alone.
    """
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    problems = world.held_out_problems()[:limit]
    benchmark = BENCHMARKS["demo"]
    prompts = []
    rows = []
    answer_starts = []
    for problem in problems:
        prompt, solution = world.render(problem)
        prompts.append(prompt)
        encoding = encode(tokenizer, prompt + solution)
        rows.append([start_id(tokenizer, "student"), *encoding.ids.tolist()])
        # The token in which the solution begins belongs to the solution. So the prompt has the
        # tokens that end within it, and the start token.
        prompt_tokens = int((encoding.spans[:, 1] <= len(prompt)).sum())
        answer_starts.append(1 + prompt_tokens)
    engine = HFEngine(model, tokenizer, batch_size=len(prompts))
    right = 0
    for group in engine.generate(prompts, benchmark.stops, benchmark.max_new_tokens):
        for completion in group:
            answer = extract(benchmark.answer_kind, completion.text)
            right += answer == str(problems[completion.index].answer)
    width = max(len(row) for row in rows)
    labels_BS = torch.tensor([row + [IGNORED_LABEL] * (width - len(row)) for row in rows])
    logits_BSV = model(input_ids=labels_BS.clamp(min=0)).logits
    # labels   start  Q  :  ...  A  :  5  +  7  padding
    # losses          .  .  ...  .  .  .  .  .               is_text
    #                                  .  .  .               is_answer: from answer_starts on
    loss_BS = F.cross_entropy(logits_BSV[:, :-1].mT, labels_BS[:, 1:], reduction="none")
    is_text_BS = labels_BS[:, 1:] != IGNORED_LABEL
    is_answer_BS = torch.arange(1, width) >= torch.tensor(answer_starts)[:, None]
    return {
        "accuracy": right / len(prompts),
        "clean_loss": float(loss_BS[is_text_BS].mean()),
        "answer_loss": float(loss_BS[is_text_BS & is_answer_BS].mean()),
    }
