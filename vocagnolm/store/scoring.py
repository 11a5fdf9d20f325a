"""From the options of `vocagnolm score` to a finished store."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import datasets
import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from transformers import PreTrainedConfig

from vocagnolm.chat.columns import is_conversations
from vocagnolm.corpus import joined, load_corpus
from vocagnolm.host.command import corpora_of, one_or_all, refuse_idle, resolve_dtype, say
from vocagnolm.host.files import check_writable
from vocagnolm.host.manifest import MANIFEST_FILE
from vocagnolm.host.processes import connect, in_agreement
from vocagnolm.host.versions import versions
from vocagnolm.models.source import ModelSource, context_length, revision_of
from vocagnolm.readers import DOCUMENT_SEPARATOR, Reader, teacher_reader
from vocagnolm.store import codec, store
from vocagnolm.store.dialects import DIALECTS
from vocagnolm.store.job import (
    PACKAGES,
    ScoringJob,
    begin,
    check_corpus,
    check_plan,
    score_corpus,
)
from vocagnolm.store.served import ServedScorer, Start, decode_behind, find_served
from vocagnolm.store.served_text import ServedReader
from vocagnolm.store.server import Server
from vocagnolm.store.windows import HFScorer, Scorer
from vocagnolm.texts.column import TEXT
from vocagnolm.texts.tokenizers import tokenizer_sha256

# Defaults: context before the first scored token, where there is room for it, and the most that a
# teacher reads at once, as activations of more are large.
_MIN_CONTEXT = 512
_LONGEST_CONTEXT = 4096
# Of a tokenizer that only a server has; and more words than any has.
UNKNOWN, _ANY_VOCABULARY = "unknown", 10**6


def load_corpora(options: object) -> datasets.Dataset:
    """Load the corpora of `corpora_of`, one behind the other."""
    sources = corpora_of(options)
    loaded = [load_corpus(name, **given) for name, given in sources]
    if len({*map(is_conversations, loaded)}) > 1:
        raise ValueError("--dataset: a store is of documents or of conversations: score them apart")
    return joined(loaded, [name for name, _ in sources])


@dataclass(frozen=True)
class Scoring:
    """Options of `vocagnolm score`, under their names there."""

    # None with a server whose tokenizer is not at hand.
    teacher: str | None
    dataset: list[str]
    output_dir: Path
    dataset_config: str | list[str] | None = None
    dataset_split: str | list[str] = "train"
    text_column: str | list[str] = TEXT
    format: str | list[str] | None = None
    teacher_revision: str | None = None
    teacher_tokenizer: str | None = None
    teacher_chat_template: str | None = None
    context: int | None = None
    min_context: int | None = None
    shard_documents: int = 1000
    batch_tokens: int = 16384
    loss_dtype: codec.LossDtype = "float16"
    dtype: str = "auto"
    quantization: dict[str, object] | None = None
    engine: Literal["hf", "vllm"] = "hf"
    server: str | None = None
    served_model: str | None = None
    dialect: str | None = None
    concurrency: int = 16
    attn_implementation: str | None = None
    trust_remote_code: bool = False
    repair: bool = False

    @property
    def source(self) -> ModelSource:
        """The teacher."""
        revision, attention = self.teacher_revision, self.attn_implementation
        assert self.teacher
        return ModelSource(self.teacher, "teacher", revision, attention, self.trust_remote_code)


def score(options: Scoring) -> None:
    """Score a corpus, or what is left of it; a ValueError is raised in all processes."""
    state = connect()
    dtype = resolve_dtype(options.dtype, state.device)
    with in_agreement():
        config = options.source.config() if options.teacher else None
        reader = load_reader(options, config) if config else None
        context = reader.limit if reader else options.context
        if context is None:
            raise ValueError("--context is required without --teacher: the most of a request")
        min_context = _min_context(options, context)
        corpus = load_corpora(options)
        sizes = (min_context, options.shard_documents)
        job = ScoringJob(options.output_dir, corpus, reader, *sizes, options.loss_dtype)
        served = _find_server(options, reader, context, min_context) if options.server else None
        _check_turns(options, job, served)
        plan = _plan(options, config, job, dtype) | (served.about if served else {})
    # The first process looks for all, as it also repairs.
    with in_agreement():
        is_finished = [state.is_main_process and _prepare(job, plan, options.repair)]
    if all(broadcast_object_list(is_finished)):
        return
    with in_agreement():
        scorer = served or _load_scorer(options, job, dtype, state)
    with in_agreement():
        if state.is_main_process:
            begin(job.directory, plan)
    if served and state.is_main_process:
        _estimate(job, served, state.num_processes)
    score_corpus(job, scorer, plan | {"versions": versions(PACKAGES)}, state)
    if state.is_main_process:
        made = store.manifest_of(job.directory)
        more = f", documents without losses: {made['unscored']:,}" if made["unscored"] else ""
        say(f"{job.directory}: {made['tokens']:,} tokens{more}")


def _check_turns(
    options: Scoring, job: ScoringJob, served: ServedScorer | ServedReader | None
) -> None:
    """Reject a teacher that cannot be shown conversations, or an option that is for them."""
    if not is_conversations(job.corpus):
        given = {"teacher_chat_template"} if options.teacher_chat_template else set()
        refuse_idle(given, given, "where --dataset holds documents")
        return
    if isinstance(served, ServedReader) or (served and not served.takes_ids):
        raise ValueError(
            "--server: conversations need --teacher, whose tokenizer has a chat template, and a "
            "server that takes token ids, as special tokens are among theirs"
        )
    assert job.reader
    job.reader.check_template()


def load_reader(options: Scoring, config: PreTrainedConfig) -> Reader:
    """Load the teacher's tokenizer, with the context that the options leave it."""
    tokenizer = options.source.checked_tokenizer(config, "teacher", options.teacher_tokenizer)
    limit = context_length(config)
    if options.engine == "vllm" or options.server:
        # They generate one token behind every window.
        limit -= 1
    context = options.context or min(limit, _LONGEST_CONTEXT)
    if context > limit:
        raise ValueError(
            f"--context {context} exceeds the teacher's context of {limit}: lower it to that"
        )
    return teacher_reader(tokenizer, context, options.teacher_chat_template)


def _min_context(options: Scoring, context: int) -> int:
    least = options.min_context or min(_MIN_CONTEXT, context // 4)
    # A window has a start token, and has to score a token of its own.
    if least > context - 2:
        raise ValueError(
            f"--min_context {least} leaves no room in a context of {context}: lower it to at most "
            f"{context - 2}"
        )
    return least


def _plan(
    options: Scoring, config: PreTrainedConfig | None, job: ScoringJob, dtype: str
) -> dict[str, object]:
    """Describe all that decides the content of a store."""
    reader = job.reader
    if reader is None:
        # A server knows how it reads.
        read: dict[str, object] = {
            "teacher": options.served_model,
            "tokenizer_sha256": UNKNOWN,
            "segmentation": "windows of whole documents, by their text",
            "context": options.context,
            "min_context": job.min_context,
        }
    else:
        read = {
            "teacher": options.teacher,
            "teacher_revision": revision_of(options.teacher or "", config),
            "tokenizer_sha256": tokenizer_sha256(reader.tokenizer),
            "special_tokens": {"before": reader.start, "behind": None},
            **(job.template.as_json() if job.template else {}),
            "segmentation": "windows of whole documents",
            "context": reader.limit,
            "min_context": job.min_context,
        }
    return read | {
        "engine": options.engine,
        "dtype": dtype,
        "quantization": options.quantization,
        "loss_dtype": options.loss_dtype,
        "dataset": one_or_all(options.dataset),
        "dataset_documents": len(job.corpus),
        "shard_documents": options.shard_documents,
    }


def _prepare(job: ScoringJob, plan: dict[str, object], repair: bool) -> bool:
    """Look at the directory, and open a bad store again; returns True if nothing is left to do."""
    directory = job.directory
    check_writable(directory)
    directory.mkdir(parents=True, exist_ok=True)
    check_plan(directory, plan)
    if not (directory / MANIFEST_FILE).exists():
        return False
    manifest = store.manifest_of(directory)
    check_corpus(job, manifest)
    if repair and (faults := store.bad_shards(directory, manifest)):
        say(f"to be scored again: {', '.join(faults)}")
        # First, so that a kill leaves no shards without a plan.
        begin(directory, plan)
        store.reopen(directory, list(faults))
        return False
    store.tidy(directory)
    say(f"{directory} is finished: nothing to do")
    return True


def _find_server(
    options: Scoring, reader: Reader | None, context: int, min_context: int
) -> ServedScorer | ServedReader:
    """Find how to ask the server."""
    assert options.server
    assert options.served_model
    server, name = Server(options.server, options.concurrency), options.served_model
    dialects = [DIALECTS[options.dialect]] if options.dialect else DIALECTS.values()
    if reader is not None:
        tokenizer = reader.tokenizer
        spaced = decode_behind(reader, tokenizer.encode("a", add_special_tokens=False)) == " a"
        start = Start(str(tokenizer.decode([reader.start])), len(tokenizer), spaced)
        return find_served(
            server, name, dialects, start, lambda form: ServedScorer(server, name, form, reader)
        )
    start, sizes = Start(DOCUMENT_SEPARATOR, _ANY_VOCABULARY), (context, min_context)
    return find_served(
        server, name, dialects, start, lambda form: ServedReader(server, name, form, *sizes)
    )


def _estimate(job: ScoringJob, served: ServedScorer | ServedReader, processes: int) -> None:
    left = [shard for shard in range(job.shards) if not job.is_written(shard)]
    documents = len(job.corpus) * len(left) // (job.shards * processes)
    sample = job.documents(left[0]) if left else []
    if isinstance(served, ServedReader):
        served.estimate(documents, sample or [""])
    elif sample:
        served.estimate(documents, len(sample), job.windows(job.encode(sample)))


def _load_scorer(options: Scoring, job: ScoringJob, dtype: str, state: PartialState) -> Scorer:
    """Load the teacher, ready to score, on this process's device."""
    source, reader = options.source, job.reader
    assert reader is not None
    if options.engine == "vllm":
        from vocagnolm.store.vllm import VLLMScorer

        if state.num_processes > 1:
            raise ValueError("--engine vllm spreads a model over the GPUs itself: start it alone")
        return VLLMScorer(source, reader.limit, dtype)
    model = source.load(getattr(torch, dtype), options.quantization, state.device)
    # Quantized weights were placed as they were loaded.
    if not options.quantization:
        model.to(state.device)
    return HFScorer(model, options.batch_tokens)
