"""Models of the embedded world: their shapes, their places in the package, and how good one is."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, PreTrainedModel, PreTrainedTokenizerBase

from vocagnolm.conventions import IGNORED_LABEL
from vocagnolm.demo import world
from vocagnolm.evaluation.engines.hf_engine import HFEngine
from vocagnolm.evaluation.extraction import extract
from vocagnolm.evaluation.tasks.tasks import load_tasks
from vocagnolm.readers import start_id
from vocagnolm.spans import encode

# Among the package's assets; benchmarks/make_demo_teacher.py makes them.
TEACHER, STUDENT_TOKENIZER = "demo_teacher", "demo_student"
STUDENT_VOCABULARY_TOKENS = 1024


def student_config() -> LlamaConfig:
    """One wide layer: the shape that learned the most arithmetic per second of a CPU core."""
    return llama_config(STUDENT_VOCABULARY_TOKENS, 128, 384, layers=1, start=1, end=2)


def llama_config(
    vocabulary_tokens: int, hidden: int, inner: int, *, layers: int, start: int, end: int
) -> LlamaConfig:
    """Make the configuration of a small model."""
    return LlamaConfig(
        vocab_size=vocabulary_tokens,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.04,
        bos_token_id=start,
        eos_token_id=end,
    )


@dataclass(frozen=True)
class Quality:
    """Quality of a model on the held-out problems.

    The accuracy is the share whose greedy answer ends in the right number; losses are nats per
    token, of problems with their right solutions and of the solutions alone.
    """

    accuracy: float
    clean_loss: float
    answer_loss: float


@torch.no_grad()
def judge(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, limit: int | None = None
) -> Quality:
    """Let a model answer the first `limit` held-out problems, and read it their right solutions."""
    model.eval()  # type: ignore[no-untyped-call]
    (task,) = load_tasks(["demo"], data_dir=None, prompts_dir=None, limit=limit)
    prompts = [task.prompts[item.idx] for item in task.items]
    engine = HFEngine(model, tokenizer, batch_size=len(prompts))
    right = 0
    for group in engine.generate(prompts, task.benchmark.stops, task.benchmark.max_new_tokens):
        for completion in group:
            answer = extract(task.benchmark.answer_kind, completion.text)
            right += answer == task.items[completion.index].gold
    rows, answer_starts = [], []
    for problem in world.held_out_problems()[:limit]:
        prompt, solution = world.render(problem)
        encoding = encode(tokenizer, prompt + solution)
        rows.append([start_id(tokenizer, "student"), *encoding.ids.tolist()])
        # The token that the solution begins in counts to it.
        answer_starts.append(1 + int((encoding.spans[:, 1] <= len(prompt)).sum()))
    width = max(map(len, rows))
    labels_BS = torch.tensor([row + [IGNORED_LABEL] * (width - len(row)) for row in rows])
    logits_BSV = model(input_ids=labels_BS.clamp(min=0)).logits
    # labels   start  Q  :  ...  A  :  5  +  7  padding
    # losses          .  .  ...  .  .  .  .  .               is_text
    #                                  .  .  .               is_answer: from answer_starts on
    loss_BS = F.cross_entropy(logits_BSV[:, :-1].mT, labels_BS[:, 1:], reduction="none")
    is_text_BS = labels_BS[:, 1:] != IGNORED_LABEL
    is_answer_BS = torch.arange(1, width) >= torch.tensor(answer_starts)[:, None]
    losses = (float(loss_BS[chosen].mean()) for chosen in (is_text_BS, is_text_BS & is_answer_BS))
    return Quality(right / len(prompts), *losses)
