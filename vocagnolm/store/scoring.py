"""From the options of `vocagnolm score` to a finished store, in any number of processes.

Every process has the same job and its own scorer, and scores every n-th missing shard.
"""

from __future__ import annotations

import logging
import random
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import datasets
import numpy as np
import torch
from accelerate import PartialState
from tqdm.auto import tqdm
from transformers import PreTrainedConfig, PreTrainedModel

from vocagnolm.attention import TORCH_VARLEN, takes_segments, why_not_varlen
from vocagnolm.chat.render import Template
from vocagnolm.conventions import IntArray, NonFiniteLoss
from vocagnolm.corpus import load_corpus
from vocagnolm.fields import OptionError, corpora_of
from vocagnolm.models.load import ModelSource, choose_dtype, context_length, revision_of
from vocagnolm.models.probes import check_packing
from vocagnolm.readers import Reader, TeacherReaders, each_alone, teacher_reader
from vocagnolm.record import Record, check_output_directory, differences
from vocagnolm.shell.dist import connect, rank0
from vocagnolm.shell.io import JsonObject, count_reasons, print_main, versions
from vocagnolm.spans import Encoding, encode_batch, encode_rendered
from vocagnolm.store import format as store
from vocagnolm.store.server import ServerScorer
from vocagnolm.store.windows import HFScorer, Window, windows
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
_Key = TypeVar("_Key")
_Made = TypeVar("_Made")


class Plan(NamedTuple):
    """What is to be scored: documents, by their indices in the corpus, and their first shard."""

    first_shard: int
    documents: range | IntArray


@dataclass(frozen=True)
class ScoringJob:
    """The part of a scoring job that every process knows.

    `min_context` tokens come before those that a further window of a document scores.
    `shard_documents` counts documents of the corpus, usable or not. `first_shard` is above 0 if a
    store grows, and then the corpus is what the store lacks.
    """

    directory: Path
    corpus: datasets.Dataset
    reader: Reader
    min_context: int
    shard_documents: int
    loss_dtype: store.LossDtype
    first_shard: int = 0

    @property
    def shards(self) -> range:
        """The numbers of the shards. The last one may be smaller."""
        count = -(-len(self.corpus) // self.shard_documents)
        return range(self.first_shard, self.first_shard + count)

    @property
    def template(self) -> Template | None:
        """How the teacher reads conversations, if the corpus has them."""
        return self.reader.template if is_conversations(self.corpus) else None

    def documents(self, shard: int) -> Iterator[str]:
        """Read the usable documents of a shard."""
        # A shard is a fixed range of the corpus, usable documents or not, so all processes agree on
        # it without communication.
        first = (shard - self.first_shard) * self.shard_documents
        indices = range(len(self.corpus))[first : first + self.shard_documents]
        for _, text in read_texts(self.corpus, indices, self.template):
            yield text

    def encode(self, texts: list[str]) -> list[Encoding]:
        """Encode documents. One that the tokenizer cannot read gets no tokens."""
        encode = encode_rendered if self.template else encode_batch
        nothing = Encoding(np.empty(0, np.int32), np.empty((0, 2), np.int64))
        return each_alone(
            partial(encode, self.reader.tokenizer), texts, lambda text, error: nothing
        )

    def read(self, shard: int) -> tuple[list[str], list[Encoding]]:
        """Read and encode the usable documents of a shard."""
        texts = list(self.documents(shard))
        return texts, self.encode(texts)

    def windows(self, encodings: Sequence[Encoding]) -> list[Window]:
        """Cut encoded documents into windows."""
        all_windows: list[Window] = []
        for number, encoding in enumerate(encodings):
            ids = encoding.ids.tolist()
            # A rendered conversation has its own start token. A document gets one.
            if not self.template:
                ids.insert(0, self.reader.start)
            all_windows += windows(number, ids, self.reader.limit, self.min_context)
        return all_windows

    def is_written(self, shard: int) -> bool:
        """Test whether a shard is there, which another job may have written."""
        return (self.directory / store.shard_name(shard)).exists()

    def missing_shards(self) -> list[int]:
        """List the shards that are not written yet, beginning at a random one.

        Jobs that share the directory thus score different shards, until one meets those that
        another has written.
        """
        missing = []
        for shard in self.shards:
            if not self.is_written(shard):
                missing.append(shard)
        start = random.randrange(len(missing)) if missing else 0
        return missing[start:] + missing[:start]

    def fits(self, written: Iterable[Path]) -> bool:
        """Test whether each of these shards has the documents that this job would write to it."""
        for path in written:
            shard = store.shard_number(path.name)
            if shard not in self.shards or not store.has_documents(path, self.documents(shard)):
                return False
        return True

    def beyond(self, shards: Sequence[JsonObject]) -> Plan:
        """Plan further shards, for the documents that are in none of these."""
        documents = read_texts(self.corpus, range(len(self.corpus)), self.template)
        keyed = ((index, store.document_key(text)) for index, text in documents)
        usable = np.fromiter(keyed, [("index", np.int64), ("key", store.KEY)])
        tables = []
        for entry in shards:
            tables.append(store.read_shard(self.directory / entry["file"]))
        is_new = np.isin(usable["key"], store.read_keys(tables), invert=True)
        return Plan(store.shard_number(shards[-1]["file"]) + 1, usable["index"][is_new])

    def part(self, plan: Plan) -> ScoringJob:
        """Return the job of a plan."""
        documents = self.corpus.select(plan.documents)
        return replace(self, corpus=documents, first_shard=plan.first_shard)


# -- From options to a finished store ----------------------------------------------------------


class Prepared(NamedTuple):
    """What a job needs before any weights are loaded."""

    options: Namespace
    source: ModelSource
    config: PreTrainedConfig
    job: ScoringJob
    server: ServerScorer | None


def score(options: Namespace) -> None:
    """Score a corpus, or what is left of it."""
    run(prepare(options))


def prepare(options: Namespace) -> Prepared:
    """Read the corpus and all of the teacher but its weights, and check the server."""
    check_output_directory(options.output_dir, store.MANIFEST_FILE, options.dataset)
    source = ModelSource(
        options.teacher,
        options.role,
        options.teacher_revision,
        options.attn_implementation,
        options.trust_remote_code,
    )
    config = source.config()
    job = _load_job(options, source, config)
    server = None
    if options.server:
        server = ServerScorer(
            options.server, options.served_model, options.api, job.reader, options.concurrency
        )
        server.check()
    return Prepared(options, source, config, job, server)


def run(prepared: Prepared) -> None:
    """Score what a store lacks."""
    options, source, config, job, server = prepared
    # Before this, all processes met the same errors, and each ended by itself. After they are
    # connected, one that failed alone would leave the others waiting.
    state = connect()
    begun = rank0(lambda: store.read_manifest(job.directory)).get("dtype")
    # Processes on different kinds of machines need one answer.
    dtype, why = rank0(lambda: choose_dtype(options.dtype, state.device, begun))
    # A job that would give other losses than those that are stored is rejected.
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
        "versions": versions(_PACKAGES),
    }
    # This is before the weights are loaded, which takes the longest.
    plan = rank0(lambda: begin(job, settings))
    if not plan:
        print_main(f"{job.directory} is finished: nothing to do")
        return
    scorer: Scorer
    if server:
        scorer = server
    else:
        if state.is_main_process:
            logger.info("%s computes in %s (%s)", options.teacher, dtype, why)
        # Compiled or not is no setting of the store: it changes losses by rounding, as batches do.
        backend = "inductor" if options.torch_compile else None
        scorer = HFScorer(_load(source, config, dtype, options), options.batch_tokens, backend)
    while plan:
        score_corpus(job.part(plan), scorer, settings)
        # Another job may have written shards of another corpus at the same time, some of them in
        # the places of this one's.
        plan = rank0(lambda: begin(job, settings))
    manifest = store.manifest_of(job.directory)
    line = f"{job.directory}: {manifest['tokens']:,} tokens"
    if manifest["unscored"]:
        line += f", documents without losses: {manifest['unscored']:,}"
    print_main(line)


def _load(
    source: ModelSource, config: PreTrainedConfig, dtype: str, options: Namespace
) -> PreTrainedModel:
    """Load the teacher on this process's device, with attention that needs no padding if it can."""
    device = PartialState().device
    may_pack = device.type == "cuda" and dtype != "float32" and not options.attn_implementation
    if may_pack and why_not_varlen(source.skeleton(config), trains=False) is None:
        source = replace(source, attn_implementation=TORCH_VARLEN)
    model = source.load(getattr(torch, dtype), options.quantization, device)
    # Quantized weights were placed when they were loaded.
    if not options.quantization:
        model.to(device)
    if may_pack and takes_segments(model):
        # A model that carries a state from window to window reads each in a row of its own.
        try:
            check_packing(model)
        except ValueError:
            model.set_attn_implementation("sdpa")
    return model


def _load_job(options: Namespace, source: ModelSource, config: PreTrainedConfig) -> ScoringJob:
    """Load the teacher's tokenizer, with the context that the options allow, and the corpus."""
    tokenizer = source.checked_tokenizer(config, options.role, options.teacher_tokenizer)
    context, min_context = _context_of(config, options)
    reader = teacher_reader(tokenizer, context, options.teacher_chat_template, options.role)
    corpora = []
    for name, corpus_options in corpora_of(options):
        part = load_corpus(name, **corpus_options)
        corpora.append(part)
        # Log which files a name stood for, because a directory may have others, too.
        if part.info.description:
            logger.info("%s: %s", name, part.info.description)
    corpus = joined(corpora, "dataset")
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
    # A corpus without a usable document is reported here, before any weights are loaded.
    reasons = list(reasons_in(corpus, job.template))
    if len(reasons) == len(corpus):
        raise OptionError(
            "dataset",
            f"has no usable document: {len(corpus):,} read, all of them skipped "
            f"({count_reasons(reasons)}); give another one, or another --text_column",
        )
    if reasons:
        logger.warning("skipped: %s", count_reasons(reasons))
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


def begin(job: ScoringJob, settings: Record) -> Plan | None:
    """Begin, continue or grow a store. Return what is to be scored, or None if nothing is left.

    Raises:
        ValueError: the store of another teacher is there, or damaged shards.
    """
    directory = job.directory
    # Another job may begin another store at the same time. One manifest stays, and is compared.
    store.begin_store(directory, settings)
    manifest = store.read_manifest(directory)
    before, now = store.teacher_of(manifest), store.teacher_of(settings)
    # A store of documents has no template, so what only the earlier one has counts, too.
    changes = differences(before, dict.fromkeys(before) | now)
    if changes:
        raise OptionError(
            "output_dir",
            f"{directory} holds another store ({'; '.join(changes)}): give another "
            "directory, or delete this one",
        )
    listed = manifest.get(store.SHARDS, [])
    files = {entry["file"] for entry in listed}
    written = store.shard_paths(directory)
    is_whole = files <= {path.name for path in written}
    # If shards are lost, checksums may be computed anew, so the old ones must first prove that the
    # others are whole. Otherwise damage would get a valid checksum.
    faults = store.find_faults(directory, listed, by_hash=not is_whole)
    damaged = [file for file in faults if (directory / file).exists()]
    if damaged:
        raise ValueError(f"{directory}: {', '.join(damaged)} damaged: delete them")
    if listed and is_whole:
        plan = job.beyond(listed)
        if job.part(plan).fits(path for path in written if path.name not in files):
            return plan if len(plan.documents) else None
    elif job.fits(written):
        # The store counts as unfinished until all shards exist, so no run trains on it.
        if listed:
            store.begin_store(directory, settings, replace=True)
        return Plan(0, range(len(job.corpus)))
    # There are shards of another corpus, or of another order. They stay as they are, and the
    # documents that they lack follow.
    store.finish_store(directory, settings)
    plan = job.beyond(store.manifest_of(directory)[store.SHARDS])
    return plan if len(plan.documents) else None


# -- Scoring -----------------------------------------------------------------------------------


def score_corpus(job: ScoringJob, scorer: Scorer, description: Mapping[str, object]) -> None:
    """Score the missing shards, and finish the store with a description of it.

    Another job may do the same at the same time. A NonFiniteLoss comes from `score_shard`.
    """
    state = PartialState()
    # One process looks for all, because another job may write a shard between two looks.
    missing = rank0(job.missing_shards)
    count = len(job.shards)
    if state.is_main_process and job.first_shard:
        logger.info("documents that the store lacks: %d", len(job.corpus))
    if state.is_main_process and len(missing) < count:
        logger.info("%d of %d shards are written already", count - len(missing), count)
    # Every process takes every n-th shard, so that all end at about the same time.
    shards = missing[state.process_index :: state.num_processes]
    with tqdm(
        desc="tokens of this process",
        unit="token",
        unit_scale=True,
        disable=not state.is_main_process,
    ) as progress:
        # Another job may have written a shard since the list was made, or since it was read.
        reads = _one_ahead(lambda shard: None if job.is_written(shard) else job.read(shard), shards)
        for number, (shard, read) in enumerate(zip(shards, reads, strict=True), 1):
            if read and not job.is_written(shard):
                score_shard(job, shard, scorer, progress, number / len(shards), read)
    # The manifest lists the shards of all processes, so wait for the slowest one.
    state.wait_for_everyone()
    rank0(lambda: store.finish_store(job.directory, description))


def _one_ahead(make: Callable[[_Key], _Made], keys: Iterable[_Key]) -> Iterator[_Made]:
    """Make something of each key, in a thread, while the caller uses what was made before."""
    with ThreadPoolExecutor(1) as worker:
        made: Future[_Made] | None = None
        for key in keys:
            before, made = made, worker.submit(make, key)
            if before is not None:
                yield before.result()
        if made is not None:
            yield made.result()


def score_shard(
    job: ScoringJob,
    shard: int,
    scorer: Scorer,
    progress: tqdm | None = None,
    share: float = 1.0,
    read: tuple[list[str], list[Encoding]] | None = None,
) -> None:
    """Score the documents of a shard, and write it.

    A document that a server cannot score is stored without tokens, like one that no tokenizer can
    read. If a loss is NaN or infinite, a NonFiniteLoss is raised and nothing is written. `share` is
    that of all shards up to this one, from which the total of the progress is extrapolated. `read`
    is what the job reads of the shard, if it did so already.
    """
    texts, encodings = read or job.read(shard)
    # Score all windows of a shard together, because more windows fill batches better.
    all_windows = job.windows(encodings)
    if progress is not None:
        tokens = sum(window.scored for window in all_windows)
        progress.total = round((progress.n + tokens) / share)
    answers = scorer.losses(all_windows, None if progress is None else progress.update)
    # The windows of a document score its tokens in order, each token once.
    rows: list[list[store.LossArray]] = [[] for _ in encodings]
    failed: dict[int, str] = {}
    # If one window has no losses, its whole document has none.
    for window, row in zip(all_windows, answers, strict=True):
        if isinstance(row, str):
            failed[window.document] = row
        else:
            rows[window.document].append(row)
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
