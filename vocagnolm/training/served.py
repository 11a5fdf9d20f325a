"""A run whose teacher is behind a server: its requests, and how the run ends without it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import datasets
import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from transformers import PreTrainedConfig, PreTrainedTokenizerBase, TrainerCallback

from vocagnolm.chat.render import Template
from vocagnolm.conventions import SharedError, TeacherAway
from vocagnolm.data import Segments
from vocagnolm.fields import one_for_each
from vocagnolm.packing import Blocks
from vocagnolm.readers import Reader, teacher_reader
from vocagnolm.shell.dist import rank0
from vocagnolm.shell.io import check_writable, versions
from vocagnolm.store.format import read_manifest
from vocagnolm.store.growing import LOSS_DTYPE, GrowingStore, open_for_growth
from vocagnolm.store.late import WINDOWS, Late, LateReader
from vocagnolm.store.plan import check_plan, context_of, describe_reading
from vocagnolm.store.scoring import PACKAGES
from vocagnolm.store.served import ServedScorer, answer_files
from vocagnolm.texts import is_conversations
from vocagnolm.training.options import GuidanceOptions
from vocagnolm.training.preemption import Preemption
from vocagnolm.training.run_directory import claim, release
from vocagnolm.training.sampler import share_of
from vocagnolm.training.settings import Job

_Batches = TypeVar("_Batches")
# Requests of a process at a time, as in `vocagnolm score`.
_CONCURRENCY = 16
# Documents are requested this many optimizer steps before they are read.
_STEPS_AHEAD = 2


@dataclass(frozen=True)
class Server:
    """The server of a teacher: its name, the reader of its documents, and who asks it."""

    teacher: str
    reader: Reader
    min_context: int
    scorer: ServedScorer

    @classmethod
    def of(
        cls,
        teacher: str,
        config: PreTrainedConfig,
        tokenizer: PreTrainedTokenizerBase,
        options: GuidanceOptions,
    ) -> "Server":
        """Prepare to ask the server that the options name. Nothing is asked yet."""
        assert options.teacher_server
        assert options.served_model
        context, min_context = context_of(config, is_served=True)
        (template,) = one_for_each(
            "teacher_chat_template", options.teacher_chat_template, 1, "teachers"
        )
        reader = teacher_reader(tokenizer, context, template)
        scorer = ServedScorer(
            options.teacher_server,
            options.served_model,
            reader,
            _CONCURRENCY,
            option="--teacher_server",
        )
        # A run that is started from another directory has the same store.
        place = Path(teacher)
        name = str(place.resolve()) if place.exists() else teacher
        return cls(name, reader, min_context, scorer)

    def guide(self) -> LateReader:
        """Return how the teacher's tokens are mapped."""
        about = self.scorer.about
        return LateReader(
            self.reader, f"{about['served_model']} at {about['server']}, asked during the run"
        )

    def find(self, directory: Path) -> None:
        """Connect by whichever API the server has, and check the store of its answers.

        Raises:
            ValueError: the server gives no losses, or the store is another one.
        """
        self.scorer.adopt(rank0(self.scorer.find_api))

        def look() -> None:
            check_writable(directory, "--served_losses")
            # Whether the corpus has conversations is known when it is read.
            check_plan(directory, self.plan(None), "--served_losses")
            self.scorer.check_model(directory, "--served_losses")

        rank0(look)

    def plan(self, template: Template | None) -> dict[str, object]:
        """Return what determines the content of the store of answers."""
        return {
            "teacher": self.teacher,
            **describe_reading(self.reader, template, self.min_context),
            **self.scorer.about,
            "quantization": None,
            "loss_dtype": LOSS_DTYPE,
            # Shards have documents as they arrive, and not those of a range of a corpus.
            "shard_documents": None,
        }


def late_losses(
    server: Server, blocks: Blocks, segments: Segments, texts: datasets.Dataset, *, is_plain: bool
) -> Late:
    """Return where packed sequences get their losses from."""
    template = server.reader.template if is_conversations(texts) else None
    if template and not server.scorer.api.takes_ids:
        raise ValueError("--teacher_server: conversations need one that accepts token ids")
    documents = np.asarray(segments.rows.with_format("numpy")["document"][:])
    return Late(
        blocks,
        texts,
        documents,
        server.scorer,
        server.reader,
        server.min_context,
        template,
        is_plain,
    )


class KeepAnswers(TrainerCallback):
    """At an epoch's end, lets every process read the answers that others got during it."""

    def __init__(self, late: Late, accelerator: Accelerator):
        self._late, self._accelerator = late, accelerator

    def on_epoch_end(self, *_: object, **__: object) -> None:
        """Write this process's answers, and wait until all have done so."""
        self._late.keep()
        self._accelerator.wait_for_everyone()


@contextmanager
def asking(
    late: Late, server: Server, job: Job, accelerator: Accelerator, preemption: Preemption
) -> Iterator[KeepAnswers]:
    """Ask the server inside, and keep its answers in a store, which is complete afterwards.

    Yields the callback that the trainer needs meanwhile.

    Raises:
        ValueError: the directory has another store, or another run writes to it.
    """
    args, directory = job.args, job.served_losses
    plan = server.plan(late.template)

    def begin() -> None:
        check_plan(directory, plan, "--served_losses")
        # A plan for documents does not mention a template.
        if late.template is None and "chat_template" in read_manifest(directory):
            raise ValueError(
                f"--served_losses {directory} holds losses of conversations, and the corpus is of "
                "documents: give another directory"
            )
        claim(directory, "--served_losses")
        open_for_growth(directory, plan | {"versions": versions(PACKAGES)})

    rank0(begin)
    process, processes = accelerator.process_index, accelerator.num_processes
    rows, steps = args.train_batch_size, args.gradient_accumulation_steps
    share = partial(share_of, rows=rows, process=process, processes=processes)
    store = GrowingStore(directory, process, processes)
    late.open(store, _STEPS_AHEAD * rows * steps, share, lambda: preemption.is_asked)
    try:
        yield KeepAnswers(late, accelerator)
        late.close()
        # Rank 0 lists what all have written. After an error it does not wait for the others, and
        # whoever opens the store next lists the rest.
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            # All documents of the run are complete.
            for path in answer_files(directory / WINDOWS):
                path.unlink(missing_ok=True)
    finally:
        late.close()
        if accelerator.is_main_process:
            open_for_growth(directory, plan | {"versions": versions(PACKAGES)})
            release(directory)


def fetch_together(
    fetch: Callable[[], _Batches],
    accelerator: Accelerator,
    save_progress: Callable[[], str | None],
) -> _Batches:
    """Fetch batches that need answers. If a process lacks one, all save and end alike.

    Raises:
        TeacherAway: the server does not answer.
        SharedError: it has no losses for a document, or does not know the model any more.
    """
    fault: ValueError | None = None
    try:
        batches = fetch()
    except ValueError as error:
        fault = error
    is_faulty = torch.full((), fault is not None, dtype=torch.long, device=accelerator.device)
    if not accelerator.reduce(is_faulty, "sum").item():
        return batches
    faults: list[Any] = gather_object([fault])
    first = next(one for one in faults if one is not None)
    # Saving is collective, and all processes get here together.
    checkpoint = save_progress()
    state = f"the last step is saved in {checkpoint}" if checkpoint else "no step was made yet"
    kind = TeacherAway if isinstance(first, TeacherAway) else SharedError
    raise kind(f"{first}; {state}") from fault
