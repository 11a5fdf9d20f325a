"""From the options of `vocagnolm score` to a finished store."""

from argparse import Namespace

import datasets
import torch
from accelerate import PartialState
from transformers import PreTrainedConfig

from vocagnolm.chat.columns import is_conversations
from vocagnolm.cli import corpora_of, one_or_all, resolve_dtype, say
from vocagnolm.corpus import joined, load_corpus
from vocagnolm.dist import connect, decided_by_one, in_agreement
from vocagnolm.host.manifest import MANIFEST_FILE
from vocagnolm.host.options import refuse_idle
from vocagnolm.io import check_writable, versions
from vocagnolm.models.source import ModelSource, context_length, revision_of
from vocagnolm.readers import Reader, teacher_reader
from vocagnolm.store import store
from vocagnolm.store.dialects import DIALECTS
from vocagnolm.store.job import PACKAGES, ScoringJob, begin, check_corpus, check_plan, score_corpus
from vocagnolm.store.served import ServedScorer
from vocagnolm.store.served_text import LEAST_CONTEXT, ServedReader
from vocagnolm.store.server import Server
from vocagnolm.store.windows import HFScorer, Scorer
from vocagnolm.texts.tokenizers import tokenizer_sha256

# Defaults: context before the first scored token, where there is room for it, and the most that a
# teacher reads at once, as activations of more are large.
_MIN_CONTEXT = 512
_LONGEST_CONTEXT = 4096


def load_corpora(options: object) -> datasets.Dataset:
    """Load the corpora of `corpora_of`, one behind the other."""
    sources = corpora_of(options)
    loaded = [load_corpus(name, **given) for name, given in sources]
    if len({*map(is_conversations, loaded)}) > 1:
        raise ValueError("--dataset: a store is of documents or of conversations: score them apart")
    return joined(loaded, [name for name, _ in sources])


def source_of(options: Namespace) -> ModelSource:
    """Return the teacher of a command line that names one."""
    revision, attention = options.teacher_revision, options.attn_implementation
    return ModelSource(options.teacher, "teacher", revision, attention, options.trust_remote_code)


def score(options: Namespace) -> None:
    """Score a corpus, or what is left of it; a ValueError is raised in all processes."""
    state = connect()
    dtype = resolve_dtype(options.dtype, state.device)
    with in_agreement():
        config = source_of(options).config() if options.teacher else None
        reader = load_reader(options, config) if config else None
        context = reader.limit if reader else options.context or 0
        if reader is None and context < LEAST_CONTEXT:
            raise ValueError(
                "--context is required without --teacher: the most of a request, at least "
                f"{LEAST_CONTEXT} tokens"
            )
        min_context = _min_context(options, context)
        corpus = load_corpora(options)
        sizes = (min_context, options.shard_documents)
        job = ScoringJob(options.output_dir, corpus, reader, *sizes, options.loss_dtype)
        served = _find_server(options, reader, context, min_context) if options.server else None
        _check_turns(options, job, served)
        plan = _plan(options, config, job, dtype) | (served.about if served else {})
    # The first process looks for all, as it also repairs.
    if decided_by_one(lambda: _prepare(job, plan, options.repair)):
        return
    with in_agreement():
        scorer = served or _load_scorer(options, job, dtype, state)
    decided_by_one(lambda: begin(job.directory, plan))
    score_corpus(job, scorer, plan | {"versions": versions(PACKAGES)}, state)
    if state.is_main_process:
        made = store.manifest_of(job.directory)
        more = f", documents without losses: {made['unscored']:,}" if made["unscored"] else ""
        say(f"{job.directory}: {made['tokens']:,} tokens{more}")


def _check_turns(
    options: Namespace, job: ScoringJob, served: ServedScorer | ServedReader | None
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


def load_reader(options: Namespace, config: PreTrainedConfig) -> Reader:
    """Load the teacher's tokenizer, with the context that the options leave it."""
    tokenizer = source_of(options).checked_tokenizer(config, "teacher", options.teacher_tokenizer)
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


def _min_context(options: Namespace, context: int) -> int:
    least = options.min_context or min(_MIN_CONTEXT, context // 4)
    # A window has a start token, and has to score a token of its own.
    if least > context - 2:
        raise ValueError(
            f"--min_context {least} leaves no room in a context of {context}: lower it to at most "
            f"{context - 2}"
        )
    return least


def _plan(
    options: Namespace, config: PreTrainedConfig | None, job: ScoringJob, dtype: str
) -> dict[str, object]:
    """Describe all that decides the content of a store."""
    reader = job.reader
    if reader is None:
        # A server knows how it reads.
        read: dict[str, object] = {
            "teacher": options.served_model,
            "tokenizer_sha256": "unknown",
            "segmentation": "windows of whole documents, by their text",
        }
    else:
        read = {
            "teacher": options.teacher,
            "teacher_revision": revision_of(options.teacher or "", config),
            "tokenizer_sha256": tokenizer_sha256(reader.tokenizer),
            "special_tokens": {"before": reader.start, "behind": None},
            **(job.template.as_json() if job.template else {}),
            "segmentation": "windows of whole documents",
        }
    return read | {
        "context": reader.limit if reader else options.context,
        "min_context": job.min_context,
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
    options: Namespace, reader: Reader | None, context: int, min_context: int
) -> ServedScorer | ServedReader:
    """Find how to ask the server."""
    model = Server(options.server, options.concurrency), options.served_model
    served: ServedScorer | ServedReader
    served = ServedScorer(*model, reader) if reader else ServedReader(*model, context, min_context)
    served.find_form([DIALECTS[options.dialect]] if options.dialect else DIALECTS.values())
    return served


def _load_scorer(options: Namespace, job: ScoringJob, dtype: str, state: PartialState) -> Scorer:
    """Load the teacher, ready to score, on this process's device."""
    source, reader = source_of(options), job.reader
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
