"""All steps from texts to the blocks that a trainer takes, in one call.

Enters: a dataset and tokenizers. Leaves: `packing.Blocks`. Knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence

import datasets
from transformers import PreTrainedTokenizerBase

from vocagnolm.chat.columns import is_conversations
from vocagnolm.chat.reading import TRAIN_ON, TrainOn
from vocagnolm.corpus import only_text
from vocagnolm.data import align_corpus
from vocagnolm.host.options import checked, listed
from vocagnolm.packing import Blocks
from vocagnolm.readers import Teachers, student_reader, teacher_reader


@checked
def prepare_dataset(
    dataset: datasets.Dataset,
    student_tokenizer: PreTrainedTokenizerBase,
    teacher_tokenizer: PreTrainedTokenizerBase | Sequence[PreTrainedTokenizerBase] | None = None,
    *,
    max_length: int = 2048,
    teacher_context: int = 4096,
    text_column: str | None = None,
    train_on: TrainOn | None = None,
    num_proc: int | None = None,
) -> Blocks:
    """Align and pack documents: the `train_dataset` or `eval_dataset` of a `VocAgnoTrainer`.

    Columns `messages`, or `prompt` and `completion`, hold conversations, of which the answers are
    trained on, or all (`train_on="all"`), in the chat template of each tokenizer.

    A block has up to `max_length` tokens of the student and `teacher_context` of the, or each,
    teacher, within the contexts of their models. Without a teacher it is for training on all
    tokens. Aligned documents are cached as `datasets.map` caches.

    Raises:
        ValueError: the column is not there, or no document of it can be used.
    """
    corpus = only_text(dataset, text_column, "the dataset")
    if train_on and not is_conversations(corpus):
        raise ValueError("train_on has no effect where the dataset holds documents: leave it out")
    tokenizers = listed(teacher_tokenizer or [])
    teachers = tuple(teacher_reader(each, teacher_context) for each in tokenizers)
    reader = student_reader(student_tokenizer, max_length)
    aligned = align_corpus(
        *(corpus, reader, Teachers(teachers) if teachers else None),
        num_proc=num_proc,
        train_on=train_on or TRAIN_ON[0],
    )
    if not len(aligned.rows):
        raise ValueError(
            f"no usable document among {len(corpus):,}: {aligned.skipped[:1] or 'there is none'}"
        )
    return Blocks(aligned.rows, max_length, [teacher_context] * max(len(teachers), 1))
