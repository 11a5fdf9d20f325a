"""Read the documents of a corpus: local files, directories of them, or a dataset of the hub.

Enters: a path or a hub name. Leaves: a `datasets.Dataset` with one column, `text`; conversations
have the columns of `vocagnolm.chat.formats` beside it. Knows no tokenizer.
"""

from collections.abc import Sequence
from itertools import compress

import datasets

from vocagnolm.chat.columns import as_conversations, is_conversations
from vocagnolm.chat.formats import Format, check_unmixed, find_format
from vocagnolm.texts.column import TEXT
from vocagnolm.texts.files import local_path, read_files, read_hub


def load_corpus(
    dataset: str,
    *,
    split: str = "train",
    text_column: str = TEXT,
    config_name: str | None = None,
    format: Format | None = None,
    option: str = "--dataset",
) -> datasets.Dataset:
    """Load the documents of `dataset`, in a stable order, as a dataset with one column, `text`.

    Conversations, which are known by their columns, or given as the `format`, have more columns.

    `dataset` is a file (`.jsonl`, `.json`, `.parquet`, `.txt`; each may be compressed), a directory
    that holds such files at any depth, or the name of a dataset on the hub. Every `.txt` file is
    one document. Values are not checked here: a document that is empty or not text is skipped, with
    its reason, when it is aligned. Whatever cannot be read is a ValueError of one line that says
    what to do, and names the dataset by `option`.
    """
    path = local_path(dataset, option)
    if path is None:
        corpus = read_hub(dataset, option, name=config_name or None, split=split)
        return only_text(corpus, text_column, format, dataset)
    names, corpora = [], []
    for file, raw in read_files(path, split, config_name, option, text_column):
        names.append(file.name)
        corpora.append(only_text(raw, text_column, format, str(file)))
    is_turns = [*map(is_conversations, corpora)]
    if len({*is_turns}) > 1:
        found = ", ".join(compress(names, is_turns))
        raise ValueError(
            f"{option} {path}: holds conversations ({found}) and documents: give one directory for "
            "each kind"
        )
    return joined(corpora, names, f"{option} {path}")


def joined(
    corpora: Sequence[datasets.Dataset], names: Sequence[str], shown: str = "--dataset"
) -> datasets.Dataset:
    """Put corpora one behind the other, if their columns have one type.

    Of documents and conversations only the texts are kept.
    """
    if len({*map(is_conversations, corpora)}) > 1:
        corpora = [corpus.select_columns([TEXT]) for corpus in corpora]
    try:
        return datasets.concatenate_datasets(list(corpora))
    except ValueError as error:
        kinds = zip((str(corpus.features[TEXT]) for corpus in corpora), names, strict=True)
        types = ", ".join(f"{kind} in {name}" for kind, name in dict(kinds).items())
        say = f"the texts have several types ({types}): make them text"
        raise ValueError(f"{shown}: {say}") from error


def load_sample(
    dataset: str,
    count: int,
    *,
    split: str = "train",
    text_column: str = TEXT,
    config_name: str | None = None,
    format: Format | None = None,
) -> tuple[datasets.Dataset, int | None]:
    """Load about the first `count` documents, without downloading a corpus of terabytes.

    Returns them as `load_corpus` does, with the number of all, None if it is not known.
    """
    option = "--dataset"
    if local_path(dataset, option):
        corpus = load_corpus(
            dataset, split=split, text_column=text_column, config_name=config_name, format=format
        )
        return corpus.select(range(min(count, len(corpus)))), len(corpus)
    stream = read_hub(dataset, option, name=config_name or None, split=split, streaming=True)
    corpus = datasets.Dataset.from_list(list(stream.take(count)))
    info = (stream.info.splits or {}).get(split)
    corpus = only_text(corpus, text_column, format, dataset)
    return corpus, info.num_examples if info else None


def only_text(
    corpus: datasets.Dataset, text_column: str, format: Format | None, shown: str
) -> datasets.Dataset:
    """Keep the column of documents, or read those of conversations; `shown` names it in errors."""
    names = {text_column, "messages", "prompt", "completion"} & {*corpus.column_names}
    if len(names) > 1:
        table = corpus.with_format("arrow")
        held = {name: table[name][:].is_valid().to_pylist() for name in names}
        check_unmixed(held, text_column, shown)
    format = find_format(corpus.column_names, format, text_column, shown)
    if format != "text":
        return as_conversations(corpus, format)
    corpus = corpus.select_columns([text_column])
    return corpus if text_column == TEXT else corpus.rename_column(text_column, TEXT)
