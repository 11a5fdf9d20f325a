"""The plan of a run, a line for each thing that it reads, makes and takes."""

import math
from pathlib import Path

import numpy as np

from vocagnolm.alignment import align_spans
from vocagnolm.data import Segments
from vocagnolm.models.sharding import devices_of_a_machine
from vocagnolm.run.checkpoints import step_of
from vocagnolm.run.documents import Corpus, Documents, epoch_steps, skip_reasons
from vocagnolm.run.job import Job, Models
from vocagnolm.run.memory import student_layout, student_memory, teacher_memory
from vocagnolm.spans import encode
from vocagnolm.texts.column import TEXT

# Devices of the machines that a plan made by one process alone is for.
_USUAL_MACHINE = 8
_EXAMPLE_TOKENS = 6
_GIB = 2**30


def plan(job: Job, models: Models, documents: Documents, checkpoint: str | None = None) -> str:
    """Describe a run in lines that begin with a word each; nothing is loaded for it."""
    student, run = models.student.sizes, job.run
    lines = [f"student    {job.model.student}: {student.parameters:,} parameters"]
    if student.trained < student.parameters:
        lines[0] += f", {student.trained:,} of them trained"
    for teacher in models.teachers:
        size = f"{teacher.sizes.parameters:,} parameters, frozen, {models.teacher_dtype}"
        lines += [f"teacher    {teacher.source.name}: {size}"]
    if models.guide:
        lines += [f"teacher    {stored}" for stored in models.guide.describe()]
    settings = ", ".join(f"{name} {value}" for name, value in job.method.in_effect().items())
    lines.append(f"method     {settings.removeprefix('method ')}")
    lines += describe_documents(documents, models)
    lines += _mixture(job, documents)
    lines += [
        f"batch      {run.batch_arithmetic(job.pack.max_length)}",
        f"steps      {_steps(job, documents, checkpoint)}",
        f"memory     {describe_memory(device_memory(job, models))}",
        f"output     {run.output_dir}",
    ]
    return "\n".join(lines)


def describe_documents(documents: Documents, models: Models) -> list[str]:
    """Count what was aligned and packed, and what was left out and why."""
    segments, blocks = documents.segments, documents.blocks
    lines = [_corpus(each) for each in documents.corpora]
    lines += _left_out(segments, "skipped")
    if models.guide is not None:
        student, teacher = segments.total("student_tokens"), segments.total("teacher_tokens")
        lines.append(
            f"aligned    {teacher:,} teacher tokens ({teacher / student:.3f} per student token), "
            f"{segments.mapped_text_fraction:.2%} of the text tokens mapped"
        )
        lines += _example(documents, models)
    lines.append(
        f"packed     {len(blocks):,} sequences of {blocks.max_length} tokens, "
        f"{blocks.fill_fraction:.1%} full"
    )
    if documents.eval_blocks is not None:
        lines.append(f"evaluated  {len(documents.eval_blocks):,} sequences")
    return lines


def _corpus(corpus: Corpus) -> str:
    segments = corpus.segments
    count = len(np.unique(segments.rows.with_format("numpy")["document"][:]))
    sample = "" if corpus.total == len(corpus.texts) else "of the first ones, "
    return (
        f"corpus     {Path(corpus.name).name}: {sample}{count:,} documents, "
        f"{len(segments.rows):,} segments, {segments.total('student_tokens'):,} student tokens"
    )


def _left_out(segments: Segments, label: str) -> list[str]:
    """Count what contexts and templates leave out."""
    lines = []
    if segments.skipped:
        lines.append(f"{label:10} {len(segments.skipped):,} documents ({skip_reasons(segments)})")
    if messages := segments.total("left_out_messages"):
        lines.append(f"shortened  conversations, by their last {messages:,} messages in all")
    if trimmed := segments.total("trimmed_characters"):
        lines.append(f"trimmed    {trimmed:,} characters of white space, by chat templates")
    return lines


def _example(documents: Documents, models: Models) -> list[str]:
    """Show the first tokens of the first segment, aligned, if a teacher has a tokenizer."""
    if not (models.guide and models.guide.readers):
        return []
    row = documents.segments.rows[0]
    text = documents.texts[row["document"]][TEXT][row["start"] : row["end"]]
    tokenizers = models.reader.tokenizer, models.guide.readers[0].tokenizer
    ours, theirs = (encode(tokenizer, text).spans for tokenizer in tokenizers)
    shown = []
    for (start, end), (first, last) in zip(ours, align_spans(ours, theirs), strict=True):
        # An unmapped token has the range (-1, -1), of which nothing is left.
        pieces = " ".join(repr(text[a:b]) for a, b in theirs[max(first, 0) : max(last, 0)])
        shown.append(f"{text[start:end]!r} -> {pieces or 'unmapped'}")
    return [f"example    {' | '.join(shown[:_EXAMPLE_TOKENS])}"]


def _mixture(job: Job, documents: Documents) -> list[str]:
    """Describe in which shares several corpora are read, and how often each is."""
    parts, corpora = documents.blocks.parts, documents.corpora
    if len(parts) == 1:
        return []
    sizes = [
        count * (each.total or len(each.texts)) / len(each.texts)
        for count, each in zip(parts.values(), corpora, strict=True)
    ]
    weights = documents.blocks.weights or sizes
    steps = steps_of(job, documents) or 0
    read = steps * (job.run.global_batch_tokens // job.pack.max_length)
    shown = []
    for name, size, weight in zip(parts, sizes, weights, strict=True):
        share = weight / sum(weights)
        shown.append(f"{name} {share:.1%} (read {read * share / size:.3g} times)")
    return [f"mixture    {', '.join(shown)}"]


def steps_of(job: Job, documents: Documents) -> int | None:
    """Return the optimizer steps of a run; None if nobody knows how large its corpus is."""
    if job.run.max_steps > 0:
        return job.run.max_steps
    of_epoch = epoch_steps(job, documents)
    return None if of_epoch is None else math.ceil(job.run.num_train_epochs * of_epoch)


def _steps(job: Job, documents: Documents, checkpoint: str | None) -> str:
    steps = steps_of(job, documents)
    if steps is None:
        return "known when the whole corpus is read"
    shown = f"{steps:,}, {steps * job.run.global_batch_tokens:,} tokens"
    if not documents.is_whole and job.run.max_steps <= 0:
        read = sum(len(each.texts) for each in documents.corpora)
        total = sum(each.total or 0 for each in documents.corpora)
        shown = f"about {shown} (from {read:,} of {total:,} documents)"
    return f"{shown}; {step_of(checkpoint):,} done, from {checkpoint}" if checkpoint else shown


def describe_memory(parts: dict[str, float]) -> str:
    """Describe bytes by part in GiB."""
    shown = ", ".join(f"{name} {size / _GIB:.2f}" for name, size in parts.items())
    return f"about {sum(parts.values()) / _GIB:.2f} GiB a device: {shown}"


def device_memory(job: Job, models: Models) -> dict[str, float]:
    """Estimate the bytes of a device by part, at its fullest."""
    tokens = (job.run.per_device_train_batch_size or 1) * job.pack.max_length
    parts = student_memory(models.student.sizes, student_layout(job.run), tokens)
    width = 4 if models.teacher_dtype == "float32" else 2
    devices = 1
    if job.load.teacher_sharding == "node":
        devices = devices_of_a_machine() if devices_of_a_machine() > 1 else _USUAL_MACHINE
    for teacher in models.teachers:
        quantization = job.load.teacher_quantization
        for name, size in teacher_memory(teacher.sizes, width, quantization, devices).items():
            parts[name] = parts.get(name, 0.0) + size
    return parts
