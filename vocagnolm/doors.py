"""The two doors: messages name command-line options, or arguments in Python.

Code raises errors that name options, such as `--top_k`. At the entry points of Python, they are
rewritten to name arguments, such as `top_k`. Names of TRL and transformers are understood at both.
No torch.
"""

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])
# A context variable, so that a thread that trains from Python does not get the words of a command
# in another thread.
_is_shell = ContextVar("is_shell", default=False)

_NO_SAMPLING = "no answers are sampled here: leave it out"
DTYPE_OPTIONS = "--teacher_dtype; the student is float32, and computes in 16 bits with --bf16"
# What users of TRL and transformers type for an option that has another meaning here. Names with
# the same meaning are aliases of the fields in `vocagnolm.training.options`.
OTHER_NAMES = {
    "dtype": DTYPE_OPTIONS,
    "torch_dtype": DTYPE_OPTIONS,
    "use_flash_attention_2": "--attn_implementation flash_attention_2",
    "load_in_4bit": "--teacher_quantization nf4",
    "load_in_8bit": "--teacher_quantization int8",
    "dataset_test_split": "--eval_fraction or --eval_dataset",
    "evaluation_strategy": "--eval_strategy",
    "use_uld_loss": "--method uld",
    "beta": "--method kld with --kld_direction",
    "lmbda": _NO_SAMPLING,
    "temperature": _NO_SAMPLING,
    "formatting_func": "documents are a column, text, and conversations are messages: leave it out",
    "accelerate_config": "it is for the command lines of train, evaluate and score",
    "num_processes": "it goes with --accelerate_config",
}
# Their names for what happens anyway. They are accepted, with a warning.
_ALWAYS_PACKED = "documents are always packed, and kept apart"
_ANSWERS_ONLY = "of conversations the answers are trained on, unless --train_on all"
ALWAYS_ON = {
    "do_train": "this command trains",
    "do_eval": "--eval_fraction or --eval_dataset evaluates",
    "overwrite_output_dir": "a run that ended early resumes in its --output_dir",
    "packing": _ALWAYS_PACKED,
    "eval_packing": _ALWAYS_PACKED,
    "padding_free": _ALWAYS_PACKED,
    "assistant_only_loss": _ANSWERS_ONLY,
    "completion_only_loss": _ANSWERS_ONLY,
}
# Options whose Python arguments have another name, or take something else.
_IN_PYTHON = {
    "student": "model",
    "teacher_losses": "teacher",
    "student_tokenizer": "processing_class",
    "dataset": "train_dataset",
    "dataset_split": "train_dataset",
    "dataset_config": "train_dataset",
    "dataset_weights": "the weights of its Blocks",
    "eval_fraction": "eval_dataset",
    "text_column": "text_column of prepare_dataset",
    "use_peft": "peft_config",
    "lora_target_modules": "target_modules of peft_config",
    "lora_modules_to_save": "modules_to_save of peft_config",
    "lora_r": "peft_config",
    "lora_alpha": "peft_config",
    "lora_dropout": "peft_config",
    "accelerate_config": "accelerate launch with a config_file",
}
# Arguments of the trainer that are not in its config. The two that are left out belong to neither.
_TRAINER_ARGUMENTS = {"teacher", "eval_dataset", *_IN_PYTHON} - {"accelerate_config", "text_column"}


def near(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean X?)" for the known name that is most like one, or nothing.

    >>> near("--teachr", ["--teacher", "--student"])
    ' (did you mean --teacher?)'
    """
    names = list(known)
    # Whoever types the beginning of a name means that name, even if another is closer by letters.
    completions = [completion for completion in names if completion.startswith(name)]
    nearest = completions or difflib.get_close_matches(name, names, 1)
    return f" (did you mean {nearest[0]}?)" if nearest else ""


@contextmanager
def shell_door() -> Iterator[None]:
    """Keep command-line words in messages of the code inside."""
    token = _is_shell.set(True)
    try:
        yield
    finally:
        _is_shell.reset(token)


def python_door(work: _Function) -> _Function:
    """Rewrite a function's errors for Python, unless a command calls it."""

    @wraps(work)
    def through(*args: Any, **options: Any) -> Any:
        try:
            return work(*args, **options)
        except (ValueError, ImportError) as error:
            # Only the words change. The error keeps its class, traceback and cause.
            if not _is_shell.get() and error.args:
                error.args = (worded(str(error)), *error.args[1:])
            raise

    return through  # type: ignore[return-value]


def worded(message: str) -> str:
    """Return a message in the words of the door that the user came through.

    >>> worded("--top_k must be in (0, 1], got 1.4; see --teacher_losses")
    'top_k must be in (0, 1], got 1.4; see teacher'
    """
    if _is_shell.get():
        return message
    # In Python, two options may be one argument, which must not be named twice. So pairs are
    # replaced before single names.
    message = message.replace("--teacher or --teacher_losses", "--teacher")
    message = message.replace("--eval_fraction or --eval_dataset", "--eval_dataset")
    message = re.sub(r"--text_column ('[^']*')", r"column \1", message)
    # A switch with its value becomes an assignment: `--bf16 true` is bf16=True.
    message = re.sub(r"--(\w+) (true|false)\b", lambda x: f"{x[1]}={x[2].title()}", message)
    return re.sub(r"--(\w+)", lambda x: _IN_PYTHON.get(x[1], x[1]), message)


def how_to_go_on() -> str:
    """Say how to resume a run, at the door that started it."""
    return "the same command" if _is_shell.get() else "train(resume_from_checkpoint=True)"


def own_arguments(
    owner: str,
    options: Mapping[str, Any],
    known_names: Collection[str],
    aliases: Mapping[str, str],
    warn: Callable[[str], object],
) -> dict[str, Any]:
    """Return the arguments of a constructor under their own names.

    An alias is replaced by its name. An argument for what happens anyway is dropped, with a
    warning.

    Raises:
        TypeError: an argument has another name here, or does not exist. The message says which.
    """
    arguments: dict[str, Any] = {}
    # Try the most helpful answer first: an argument here, one without effect, one with another
    # name, one of the trainer, and at last a misspelling.
    for name, value in options.items():
        own_name = aliases.get(name, name)
        if own_name in known_names:
            if own_name in arguments:
                raise TypeError(f"{owner}: {own_name} is given twice, in two spellings")
            arguments[own_name] = value
        elif name in ALWAYS_ON:
            warn(f"{name} has no effect: {worded(ALWAYS_ON[name])}")
        elif name in OTHER_NAMES:
            answer = worded(OTHER_NAMES[name])
            if OTHER_NAMES[name].startswith("--"):
                answer = f"here it is {answer}"
            raise TypeError(f"{owner} has no argument {name}: {answer}")
        elif own_name in _TRAINER_ARGUMENTS:
            argument = worded(f"--{own_name}")
            raise TypeError(f"{owner} has no argument {name}: give {argument} to VocAgnoTrainer")
        elif own_name in _IN_PYTHON:
            raise TypeError(f"{owner} has no argument {name}: give {_IN_PYTHON[own_name]}")
        else:
            raise TypeError(f"{owner} has no argument {name}{near(name, known_names)}")
    return arguments
