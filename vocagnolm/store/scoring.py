"""From the options of `vocagnolm score` to a finished store, in any number of processes.

Every process has the same job and its own scorer, and scores every n-th missing shard.
"""

import logging
import random
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import datasets
import numpy as np
import torch
from accelerate import PartialState
from tqdm.auto import tqdm
from transformers import PreTrainedConfig

from vocagnolm.chat.render import Template
from vocagnolm.conventions import NonFiniteLoss
from vocagnolm.corpus import load_corpus
from vocagnolm.fields import OptionError, corpora_of
from vocagnolm.models.load import (
    ModelSource,
    choose_dtype,
    context_length,
    revision_of,
)
from vocagnolm.readers import Reader, TeacherReaders, each_alone, teacher_reader
from vocagnolm.record import Record, check_output_directory, differences
from vocagnolm.shell.dist import connect, rank0
from vocagnolm.shell.io import (
    count_reasons,
    versions,
)
from vocagnolm.shell.printing import print_main
from vocagnolm.spans import Encoding, encode_batch, encode_rendered
from vocagnolm.store import format as store
from vocagnolm.store.server import ServerScorer, answer_files
from vocagnolm.store.windows import HFScorer, Report, Window, windows
from vocagnolm.texts import is_conversations, joined, read_texts, reasons_in
from vocagnolm.tokenizer import tokenizer_sha256

logger = logging.getLogger(__name__)

# Every manifest has the versions of these packages.
_PACKAGES = "vocagnolm torch transformers tokenizers pyarrow"
# If this many documents fail together for one reason, the settings are wrong.
_MIN_FAILURES_TO_STOP = 8
# Defaults: the context before the first scored token, if there is room, and the most tokens that a
# teacher reads at once, because more would need large activations.
_MIN_CONTEXT = 512
_LONGEST_CONTEXT = 4096

Scorer = HFScorer | ServerScorer


@dataclass(frozen=True)
class ScoringJob:
    """The part of a scoring job that every process knows.

    `min_context` tokens come before those that a further window of a document scores.
    `shard_documents` counts documents of the corpus, usable or not.
    """

    directory: Path
    corpus: datasets.Dataset
    reader: Reader
    min_context: int
    shard_documents: int
    loss_dtype: store.LossDtype

    @property
    def shards(self) -> int:
        """The number of shards. The last one may be smaller."""
        return -(-len(self.corpus) // self.shard_documents)

    @property
    def template(self) -> Template | None:
        """How the teacher reads conversations, if the corpus has them."""
        return self.reader.template if is_conversations(self.corpus) else None

    def documents(self, shard: int) -> Iterator[str]:
        """Read the usable documents of a shard."""
        # A shard is a fixed range of the corpus, usable documents or not, so all processes agree on
        # it without communication.
        first = shard * self.shard_documents
        last = first + self.documents_of(shard)
        for _, text in read_texts(self.corpus, range(first, last), self.template):
            yield text

    def documents_of(self, shard: int) -> int:
        """Return the number of documents in a shard, usable or not."""
        return min(self.shard_documents, len(self.corpus) - shard * self.shard_documents)

    def encode(self, texts: list[str]) -> list[Encoding]:
        """Encode documents. One that the tokenizer cannot read gets no tokens."""
        encode = encode_rendered if self.template else encode_batch
        nothing = Encoding(np.empty(0, np.int32), np.empty((0, 2), np.int64))
        return each_alone(
            partial(encode, self.reader.tokenizer), texts, lambda text, error: nothing
        )

    def missing_shards(self) -> list[int]:
        """List the shards that are not written yet. One of another corpus is a ValueError."""
        missing = []
        for shard in range(self.shards):
            if not store.is_written(self.directory, shard, self.documents(shard)):
                missing.append(shard)
        return missing

    def shards_to_score(self) -> list[int]:
        """List the missing shards, beginning at a random one.

        Jobs that share the directory thus score different shards, until one meets those that
        another has written.
        """
        missing = self.missing_shards()
        start = random.randrange(len(missing)) if missing else 0
        return missing[start:] + missing[:start]


def load_corpora(options: Namespace) -> datasets.Dataset:
    """Load the corpora of `corpora_of`, concatenated."""
    corpora = []
    for name, corpus_options in corpora_of(options):
        corpus = load_corpus(name, **corpus_options)
        corpora.append(corpus)
        # The log says which files a name stood for, because a directory may have others, too.
        if corpus.info.description:
            logger.info("%s: %s", name, corpus.info.description)
    return joined(corpora, "dataset")


# -- From options to a finished store ----------------------------------------------------------


def score(options: Namespace) -> None:
    """Score a corpus, or what is left of it."""
    check_output_directory(options.output_dir, store.MANIFEST_FILE, options.dataset)
    source = source_of(options)
    config = source.config()
    job = _load_job(options, source, config)
    server = None
    if options.server:
        server = ServerScorer(options.server, options.served_model, job.reader, options.concurrency)
        server.find_api(options.api)
    # Up to here, all processes meet the same errors, and each ends by itself. After they are
    # connected, one that failed alone would leave the others waiting.
    state = connect()
    begun = rank0(lambda: store.read_manifest(job.directory)).get("dtype")
    # Processes on different kinds of machines need one answer.
    dtype, why = rank0(lambda: choose_dtype(options.dtype, state.device, begun))
    # These settings determine a store's content. A job with other settings is rejected.
    settings = {
        "teacher": options.teacher,
        "teacher_revision": revision_of(options.teacher, config),
        "tokenizer_sha256": tokenizer_sha256(job.reader.tokenizer),
        "special_tokens": {"before": job.reader.start},
        **(job.template.as_json() if job.template else {}),
        "segmentation": "windows of whole documents",
        "context": job.reader.limit,
        "min_context": job.min_context,
        "engine": "hf",
        "dtype": dtype,
        "quantization": options.quantization,
        "loss_dtype": options.loss_dtype,
        "dataset": options.dataset if len(options.dataset) > 1 else options.dataset[0],
        "dataset_documents": len(job.corpus),
        "shard_documents": options.shard_documents,
        **(server.about if server else {}),
    }
    # Check the directory before the weights are loaded, which takes the longest.
    if rank0(lambda: _is_finished(job, settings)):
        return
    scorer: Scorer
    if server:
        scorer = server
    else:
        if state.is_main_process:
            logger.info("%s computes in %s (%s)", options.teacher, dtype, why)
        model = source.load(getattr(torch, dtype), options.quantization, state.device)
        # Quantized weights were placed when they were loaded.
        if not options.quantization:
            model.to(state.device)
        scorer = HFScorer(model, options.batch_tokens)
    rank0(lambda: store.begin_store(job.directory, settings))
    # Another job may have claimed the directory for another store while this one loaded its model.
    # Its manifest was kept, and is compared with these settings.
    rank0(lambda: check_settings(job.directory, settings))
    score_corpus(job, scorer, settings | {"versions": versions(_PACKAGES)}, state)
    if state.is_main_process:
        manifest = store.manifest_of(job.directory)
        line = f"{job.directory}: {manifest['tokens']:,} tokens"
        if manifest["unscored"]:
            line += f", documents without losses: {manifest['unscored']:,}"
        print_main(line)


def source_of(options: Namespace) -> ModelSource:
    """Return where the teacher comes from."""
    revision, attention = options.teacher_revision, options.attn_implementation
    return ModelSource(
        options.teacher, options.role, revision, attention, options.trust_remote_code
    )


def check_model(options: Namespace) -> None:
    """Reject a teacher that cannot be loaded, and a directory with another teacher's store.

    This does not load the teacher's weights.
    """
    source = source_of(options)
    config = source.config()
    source.checked_tokenizer(config, "teacher", options.teacher_tokenizer)
    revision = revision_of(options.teacher, config)
    check_settings(options.output_dir, {"teacher": options.teacher, "teacher_revision": revision})


def _load_job(options: Namespace, source: ModelSource, config: PreTrainedConfig) -> ScoringJob:
    """Load the teacher's tokenizer, with the context that the options allow, and the corpus."""
    tokenizer = source.checked_tokenizer(config, "teacher", options.teacher_tokenizer)
    context, min_context = _context_of(config, options)
    reader = teacher_reader(tokenizer, context, options.teacher_chat_template)
    corpus = load_corpora(options)
    if is_conversations(corpus):
        TeacherReaders([reader]).check_templates()
    job = ScoringJob(
        directory=options.output_dir,
        corpus=corpus,
        reader=reader,
        min_context=min_context,
        shard_documents=options.shard_documents,
        loss_dtype=options.loss_dtype,
    )
    # A corpus without any usable document is found here, before any weights are loaded.
    skip_reasons = count_reasons(reasons_in(corpus))
    if next(read_texts(corpus, range(len(corpus)), job.template), None) is None:
        reason = skip_reasons or "the teacher's chat template renders no conversation"
        raise OptionError(
            "dataset",
            f"has no usable document: {len(corpus):,} read, all of them skipped "
            f"({reason}); give another one, or another --text_column",
        )
    if skip_reasons:
        logger.warning("skipped: %s", skip_reasons)
    return job


def _context_of(config: PreTrainedConfig, options: Namespace) -> tuple[int, int]:
    """Return the most tokens of a window, and the least context before those that it scores."""
    # A server generates one token after every window, which needs room in the context, too.
    limit = context_length(config) - bool(options.server)
    context = options.context or min(limit, _LONGEST_CONTEXT)
    if context > limit:
        raise OptionError(
            "context", f"{context} exceeds the teacher's context of {limit}: lower it to that"
        )
    min_context = options.min_context or min(_MIN_CONTEXT, context // 4)
    # A window has a start token, and must score at least one token.
    if min_context > context - 2:
        raise OptionError(
            "min_context",
            f"{min_context} leaves no room in a context of {context}: lower it to "
            f"at most {context - 2}",
        )
    return context, min_context


def check_settings(directory: Path, settings: Record) -> None:
    """Raise a ValueError if a directory, which need not exist, has a store with other settings."""
    manifest = store.read_manifest(directory)
    if not manifest:
        return
    # Stores of version 0.1 also say that no token comes behind a document.
    manifest.get("special_tokens", {}).pop("behind", None)
    # A corpus is identified by its texts, and a teacher by its revision if it has one. Their names,
    # and a server's address, do not matter.
    ignored = {"dataset", "server"}
    # A teacher without a known revision, such as one behind a server, is identified by its name.
    if settings.get("teacher_revision") not in (None, "unknown"):
        ignored.add("teacher")
    compared = {name: settings[name] for name in settings.keys() - ignored}
    changes = differences(manifest, compared)
    if changes:
        raise OptionError(
            "output_dir",
            f"{directory} holds another store ({'; '.join(changes)}): give another "
            "directory, or delete this one",
        )


def _is_finished(job: ScoringJob, settings: Record) -> bool:
    """Test whether nothing is left to do. A store without a shard is unfinished.

    Raises:
        ValueError: another store, or damaged shards.
    """
    directory = job.directory
    check_settings(directory, settings)
    manifest = store.read_manifest(directory)
    # An unfinished store needs only its missing shards, which `score_corpus` finds.
    if store.SHARDS not in manifest:
        return False
    if not job.missing_shards():
        print_main(f"{directory} is finished: nothing to do")
        return True
    # From here on, a finished store has lost shards. Finishing it again computes new checksums of
    # all shards, so the old ones must first prove that the others are whole. Otherwise damage would
    # get a valid checksum.
    present_shards = []
    for entry in manifest[store.SHARDS]:
        if (directory / entry["file"]).exists():
            present_shards.append(entry)
    faults = store.find_faults(directory, present_shards, by_hash=True)
    if faults:
        raise ValueError(f"{directory}: {', '.join(faults)} damaged: delete them, too")
    # The store counts as unfinished until the shards exist again, and nobody trains on it.
    store.begin_store(directory, settings, replace=True)
    return False


# -- Scoring -----------------------------------------------------------------------------------


def score_corpus(
    job: ScoringJob, scorer: Scorer, description: Mapping[str, object], state: PartialState
) -> None:
    """Score the missing shards, and finish the store with a description of it.

    Another job may do the same at the same time. If existing shards are of another corpus, a
    ValueError is raised. A NonFiniteLoss comes from `score_shard`.
    """
    # One process looks for all, because another job may write a shard between two looks.
    missing = rank0(job.shards_to_score)
    if state.is_main_process and len(missing) < job.shards:
        logger.info("%d of %d shards are written already", job.shards - len(missing), job.shards)
    # Every process takes every n-th shard, so that all end at about the same time.
    shards = missing[state.process_index :: state.num_processes]
    documents = sum(job.documents_of(shard) for shard in shards)
    with Progress(documents, disable=not state.is_main_process) as progress:
        for shard in shards:
            # Another job may have written the shard since the list was made.
            if not (job.directory / store.shard_name(shard)).exists():
                score_shard(job, shard, scorer, progress)
    # The manifest lists the shards of all processes, so wait for the slowest one.
    state.wait_for_everyone()
    rank0(lambda: store.finish_store(job.directory, description))


class Progress(tqdm):  # type: ignore[misc]
    """A progress bar of the tokens that a process scores, with their rate and the time left.

    The total is extrapolated from the documents that were encoded so far.
    """

    def __init__(self, documents: int, *, disable: bool):
        super().__init__(
            desc="tokens of this process", unit="token", unit_scale=True, disable=disable
        )
        self._documents = documents
        self._encoded_documents = 0
        self._encoded_tokens = 0

    def expect(self, documents: int, encodings: Sequence[Encoding]) -> None:
        """Count a shard before it is scored: its documents, and those with tokens."""
        self._encoded_documents += documents
        self._encoded_tokens += sum(len(encoding.ids) for encoding in encodings)
        share = self._encoded_documents / self._documents
        self.total = round(self._encoded_tokens / share)


def score_shard(
    job: ScoringJob, shard: int, scorer: Scorer, progress: Progress | None = None
) -> None:
    """Score the documents of a shard, and write it.

    A document that a server cannot score is stored without tokens, like one that no tokenizer can
    read. If a loss is NaN or infinite, a NonFiniteLoss is raised and nothing is written.
    """
    texts = list(job.documents(shard))
    encodings = job.encode(texts)
    if progress is not None:
        progress.expect(job.documents_of(shard), encodings)
    path = job.directory / store.shard_name(shard)
    # Score all windows of a shard together, because more windows fill batches better.
    report = None if progress is None else progress.update
    rows, failed = _score_windows(job, scorer, encodings, path, report)
    documents = []
    for number, (text, encoding) in enumerate(zip(texts, encodings, strict=True)):
        # Nothing predicts the start token of a conversation, for which 0 is written.
        unpredicted = min(len(encoding.ids), 1) if job.template else 0
        losses = np.concatenate([np.zeros(unpredicted, np.float32)] + rows[number])
        spans = encoding.spans
        if number in failed:
            logger.warning("kept without losses: %r ..., %s", text[:60], failed[number])
            spans, losses = spans[:0], losses[:0]
        where = f"in the document that begins {text[:60]!r}"
        # After an error, nothing of the shard is written, so the same command tries it again.
        if not np.isfinite(losses).all():
            raise NonFiniteLoss(f"losses are NaN or infinite {where}: use --dtype float32")
        # A float16 holds no more than 65,504, so a larger loss would be stored as infinite.
        largest = losses.max(initial=0.0)
        if largest > np.finfo(job.loss_dtype).max:
            raise NonFiniteLoss(f"a loss of {largest:g} nats {where}: use --loss_dtype float32")
        document = store.StoredDocument(len(text), spans, losses)
        documents.append((store.document_key(text), document))
    if len(failed) == len(texts) >= _MIN_FAILURES_TO_STOP:
        raise ValueError(f"no document of shard {shard} could be scored: {failed[0]}")
    store.write_shard(job.directory, shard, documents, job.loss_dtype)
    # Keep a server's answers until the shard has them, so that a kill in between costs nothing.
    for answer_file in answer_files(path):
        answer_file.unlink(missing_ok=True)


def _score_windows(
    job: ScoringJob,
    scorer: Scorer,
    encodings: Sequence[Encoding],
    shard: Path,
    report: Report | None,
) -> tuple[list[list[store.LossArray]], dict[int, str]]:
    """Score documents in windows. Returns each one's losses, and why some cannot be scored."""
    all_windows: list[Window] = []
    for number, encoding in enumerate(encodings):
        ids = encoding.ids.tolist()
        # A rendered conversation has its own start token. A document gets one.
        if not job.template:
            ids.insert(0, job.reader.start)
        all_windows += windows(number, ids, job.reader.limit, job.min_context)
    # The windows of a document score its tokens in order, each token once.
    rows: list[list[store.LossArray]] = [[] for _ in encodings]
    failed: dict[int, str] = {}
    answers: Sequence[store.LossArray | str]
    # A server's answers are also written to a file next to the shard, because each may cost money
    # or minutes.
    if isinstance(scorer, ServerScorer):
        answers = scorer.losses(all_windows, shard, report)
    else:
        answers = scorer.losses(all_windows, report)
    # If one window has no losses, its whole document has none.
    for window, row in zip(all_windows, answers, strict=True):
        if isinstance(row, str):
            failed[window.document] = row
        else:
            rows[window.document].append(row)
    return rows, failed
