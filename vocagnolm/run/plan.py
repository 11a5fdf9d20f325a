"""The plan of a run: what it reads, makes and takes. Printed first; alone with `--dry_run`."""

import shutil
import sys
import textwrap
from functools import partial

import numpy as np

from vocagnolm.alignment import align_spans
from vocagnolm.data import Segments
from vocagnolm.models.sharding import devices_of_a_machine
from vocagnolm.run import memory
from vocagnolm.run.documents import Corpus, Documents, skip_reasons
from vocagnolm.run.estimates import describe_time, disk_uses, steps_of
from vocagnolm.run.job import Job
from vocagnolm.run.pair import Pair
from vocagnolm.spans import encode
from vocagnolm.texts.column import TEXT

# Devices of the machines that a plan made by one process alone is for.
_USUAL_MACHINE = 8
# Tokens of the example of a dry run.
_SHOWN = 16
# Columns before the content of a line.
_INDENT = 11
_GIB = 2**30


def fitted(text: str) -> str:
    """Break lines that are wider than the terminal, below their second word; else leave them."""
    if not sys.stdout.isatty():
        return text
    width, below = shutil.get_terminal_size().columns, " " * _INDENT
    wrap = partial(textwrap.fill, width=width, subsequent_indent=below, break_on_hyphens=False)
    return "\n".join(map(wrap, text.splitlines()))


def describe_run(job: Job, pair: Pair, documents: Documents, done: int = 0) -> str:
    """Describe a run in lines that begin with a word each; shapes are counted, nothing loaded.

    Of its steps, so many are done.
    """
    student, run = pair.student_sizes, job.run
    lines = [f"student    {job.model.student}: {student.parameters:,} parameters"]
    if student.trained < student.parameters:
        lines[0] += f", {student.trained:,} of them trained"
    for teacher, sizes in zip(pair.teachers, pair.teacher_sizes, strict=True):
        lines.append(f"teacher    {teacher.source.name}: {sizes.parameters:,} parameters, frozen")
    if pair.teachers and (run.dry_run or devices_of_a_machine() > 1):
        lines.append(_describe_shardings(pair))
    if pair.guide:
        lines += [f"teacher    {stored}" for stored in pair.guide.describe()]
    settings = ", ".join(f"{name} {value}" for name, value in job.method.in_effect().items())
    lines.append(f"guidance   {settings}")
    lines += describe_documents(documents, pair)
    lines += [
        f"batch      {run.batch_arithmetic(job.pack.max_length)}",
        f"steps      {_steps(job, documents)}, learning rate {run.learning_rate:g}",
        *describe_mixture(job, documents),
        describe_memory(device_memory(job, pair)),
        f"output     {run.output_dir}",
        *(f"disk       about {use}" for use in disk_uses(job, pair, documents)),
        *describe_time(job, pair, documents, done),
    ]
    return "\n".join(lines)


def describe_documents(documents: Documents, pair: Pair) -> list[str]:
    """Count what was aligned and packed, and what was left out and why."""
    segments, blocks = documents.segments, documents.blocks
    student, teacher = segments.total("student_tokens"), segments.total("teacher_tokens")
    lines = [_describe_corpus(each, named=len(blocks.parts) > 1) for each in documents.corpora]
    each_of = ", ".join(f"{count:,} of {name}" for name, count in blocks.parts.items() if name)
    lines.append(
        f"blocks     {len(blocks):,} of {blocks.max_length} tokens, {blocks.fill_fraction:.1%} full"
    )
    if each_of:
        lines[-1] += f": {each_of}"
    if pair.guide is not None:
        lines.append(
            f"alignment  {teacher:,} teacher tokens ({teacher / student:.3f} per student token), "
            f"{segments.mapped_text_fraction:.2%} of the text tokens mapped"
        )
    lines += _describe_turns(segments)
    lines += _describe_skipped(segments, "skipped")
    return lines + (_describe_skipped(documents.held_out, "held out") if documents.held_out else [])


def _describe_corpus(corpus: Corpus, *, named: bool) -> str:
    segments = corpus.segments
    count = len(np.unique(segments.rows.with_format("numpy")["document"][:]))
    name = f"{corpus.name}: " if named else ""
    first_of = "" if corpus.is_whole else "of the first ones, "
    return (
        f"corpus     {name}{first_of}{count:,} documents, {len(segments.rows):,} segments, "
        f"{segments.total('student_tokens'):,} student tokens"
    )


def describe_mixture(job: Job, documents: Documents) -> list[str]:
    """Tell how often each of several corpora is going to be read, and in which shares."""
    steps, parts = steps_of(job, documents), documents.blocks.parts
    if len(parts) == 1:
        return []
    seen = (steps or 0) * (job.run.global_batch_tokens // job.pack.max_length)
    scales = [each.scale for each in documents.corpora]
    sizes = [count * scale for count, scale in zip(parts.values(), scales, strict=True)]
    weights = documents.blocks.weights or sizes
    shares = [weight / sum(weights) for weight in weights]
    told = []
    for name, share, size in zip(parts, shares, sizes, strict=True):
        times = f", read {seen * share / size:.3g} times" if steps else ""
        told.append(f"{name} {share:.1%}{times}")
    return [f"mixture    {'; '.join(told)}"]


def _describe_skipped(segments: Segments, label: str) -> list[str]:
    if not segments.skipped:
        return []
    return [f"{label:10} {len(segments.skipped):,} documents ({skip_reasons(segments)})"]


def _describe_turns(segments: Segments) -> list[str]:
    """Count what templates and contexts leave out of conversations."""
    lines = []
    if left_out := segments.total("left_out_messages"):
        short = np.count_nonzero(segments.rows.with_format("numpy")["left_out_messages"][:])
        lines.append(f"shortened  {short:,} conversations, by their last {left_out:,} messages")
    if trimmed := segments.total("trimmed_characters"):
        lines.append(f"trimmed    {trimmed:,} characters of white space, by chat templates")
    return lines


def _steps(job: Job, documents: Documents) -> str:
    steps = steps_of(job, documents)
    if steps is None:
        return "known when the whole corpus is read"
    if documents.is_whole or job.run.max_steps > 0:
        return f"{steps:,}"
    read, total = sum(len(each.texts) for each in documents.corpora), documents.total
    return f"about {steps:,} (extrapolated from {read:,} of {total:,} documents)"


def describe_memory(parts: dict[str, float]) -> str:
    """Describe bytes by part as a line in GiB."""
    shown = ", ".join(f"{name} {size / _GIB:.2f}" for name, size in parts.items())
    return f"memory     about {sum(parts.values()) / _GIB:.2f} GiB per device: {shown}"


def device_memory(job: Job, pair: Pair) -> dict[str, float]:
    """Estimate the bytes of a device by part, at its fullest."""
    tokens = (job.run.per_device_train_batch_size or 1) * job.pack.max_length
    parts = memory.student_memory(pair.student_sizes, memory.student_layout(job.run), tokens)
    is_sharded = job.load.teacher_sharding == "node"
    return parts | _teachers_memory(pair, _devices_per_machine() if is_sharded else 1)


def _teachers_memory(pair: Pair, devices: int) -> dict[str, float]:
    """Estimate the bytes of a device by part, with the teachers spread over so many devices."""
    width, total = _width(pair), dict[str, float]()
    for sizes in pair.teacher_sizes:
        parts = memory.teacher_memory(sizes, width, pair.load.teacher_quantization, devices)
        total = {name: total.get(name, 0.0) + size for name, size in parts.items()}
    return total


def _width(pair: Pair) -> int:
    return 4 if pair.teacher_dtype == "float32" else 2


def _devices_per_machine() -> int:
    """Return the processes of this machine; one alone plans for machines as they usually are."""
    return devices_of_a_machine() if devices_of_a_machine() > 1 else _USUAL_MACHINE


def _describe_shardings(pair: Pair) -> str:
    several = _devices_per_machine()
    whole, shard = (sum(_teachers_memory(pair, n).values()) / _GIB for n in (1, several))
    return (
        f"sharding   --teacher_sharding {pair.load.teacher_sharding}; the teacher takes per "
        f"device {whole:.2f} GiB with none, {shard:.2f} GiB with node ({several} devices a machine)"
    )


def show_example(pair: Pair, documents: Documents) -> str:
    """Show the first segment's first tokens, aligned; nothing without a co-resident teacher."""
    if not (pair.guide and pair.guide.readers):
        return ""
    corpus = documents.corpora[0]
    row = corpus.segments.rows[0]
    text = corpus.texts[row["document"]][TEXT][row["start"] : row["end"]]
    readers = pair.student_reader, pair.guide.readers[0]
    ours, theirs = (encode(reader.tokenizer, text).spans for reader in readers)
    lines = [f"{'student token':24} teacher tokens"]
    for (start, end), (first, last) in zip(ours[:_SHOWN], align_spans(ours, theirs), strict=False):
        # An unmapped token has the range (-1, -1), of which nothing is left.
        pieces = " ".join(repr(text[a:b]) for a, b in theirs[max(first, 0) : max(last, 0)])
        lines.append(f"{text[start:end]!r:24} {pieces or '(unmapped)'}")
    return "\n".join(lines)
