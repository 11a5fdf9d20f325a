"""Read the documents of a corpus: local files, directories of them, or a dataset of the hub.

Input: a path or a hub name. Output: a `datasets.Dataset` with one column, `text`; conversations
have the columns of `vocagnolm.chat.formats` beside it. Knows no tokenizer.
"""

from collections.abc import Sequence

import datasets

from vocagnolm.chat.columns import as_conversations, is_conversations
from vocagnolm.chat.formats import find_format
from vocagnolm.texts.column import TEXT
from vocagnolm.texts.files import local_path, read_files, read_hub


def load_corpus(
    dataset: str,
    *,
    split: str = "train",
    text_column: str | None = None,
    config_name: str | None = None,
    option: str = "--dataset",
) -> datasets.Dataset:
    """Load the documents of `dataset`, in a stable order, as a dataset with one column, `text`.

    Conversations, which are known by their columns, have more. A `text_column` that is given holds
    documents, whatever columns there are beside it.

    `dataset` is a file (`.jsonl`, `.json`, `.parquet`, `.txt`; each may be compressed), a directory
    that holds such files at any depth, or the name of a dataset on the hub. Every `.txt` file is
    one document. Values are not checked here: a document that is empty or not text is skipped, with
    its reason, when it is aligned. What cannot be read is a ValueError that names `option`.
    """
    path = local_path(dataset, option)
    if path is None:
        corpus = read_hub(dataset, option, name=config_name or None, split=split)
        return only_text(corpus, text_column, dataset)
    if config_name or split != "train":
        raise ValueError(f"{option} {path}: files have no configuration, and one split, train")
    names, corpora = [], []
    for file, raw in read_files(path, option):
        names.append(file.name)
        corpora.append(only_text(raw, text_column, str(file)))
    if len({is_conversations(corpus) for corpus in corpora}) > 1:
        raise ValueError(
            f"{option} {path}: holds conversations and documents: give one directory for each"
        )
    return joined(corpora, names, f"{option} {path}")


def joined(
    corpora: Sequence[datasets.Dataset], names: Sequence[str], shown: str = "--dataset"
) -> datasets.Dataset:
    """Concatenate corpora, if their texts have one type; of a mix with conversations, the texts."""
    if len({is_conversations(corpus) for corpus in corpora}) > 1:
        corpora = [corpus.select_columns([TEXT]) for corpus in corpora]
    types = {str(corpus.features[TEXT]): name for corpus, name in zip(corpora, names, strict=True)}
    if len(types) > 1:
        found = ", ".join(f"{kind} in {name}" for kind, name in types.items())
        raise ValueError(f"{shown}: the texts have several types ({found}): make them text")
    return datasets.concatenate_datasets(list(corpora))


def load_sample(
    dataset: str,
    count: int,
    *,
    split: str = "train",
    text_column: str | None = None,
    config_name: str | None = None,
) -> tuple[datasets.Dataset, int | None]:
    """Load about the first `count` documents, without downloading a corpus of terabytes.

    Returns them as `load_corpus` does, with the count of all, None if it is not known.
    """
    option = "--dataset"
    if local_path(dataset, option):
        corpus = load_corpus(dataset, split=split, text_column=text_column, config_name=config_name)
        return corpus.select(range(min(count, len(corpus)))), len(corpus)
    stream = read_hub(dataset, option, name=config_name or None, split=split, streaming=True)
    corpus = datasets.Dataset.from_list(list(stream.take(count)))
    info = (stream.info.splits or {}).get(split)
    corpus = only_text(corpus, text_column, dataset)
    return corpus, info.num_examples if info else None


def only_text(corpus: datasets.Dataset, text_column: str | None, shown: str) -> datasets.Dataset:
    """Keep the column of documents, or read those of conversations; `shown` names it in errors."""
    format = find_format(corpus.column_names, text_column, shown)
    if format != "text":
        return as_conversations(corpus, format)
    text_column = text_column or TEXT
    corpus = corpus.select_columns([text_column])
    return corpus if text_column == TEXT else corpus.rename_column(text_column, TEXT)
