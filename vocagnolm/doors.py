"""The two doors: messages name options in the shell, and arguments in Python.

Code raises errors in the words of the shell, `--top_k`. Where Python enters, they are put into the
words of Python, `top_k`. Names of TRL and transformers are answered alike at both. Torch-free.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])
_is_shell = ContextVar("is_shell", default=False)

DTYPE_OPTIONS = "--teacher_dtype; the student is float32, and computes in 16 bits with --bf16"
# What users of TRL and transformers type, and what they find here.
OTHER_NAMES = {
    **dict.fromkeys(("model", "model_name_or_path"), "--student"),
    "model_revision": "--student_revision",
    **dict.fromkeys(("tokenizer", "tokenizer_name_or_path"), "--student_tokenizer"),
    **dict.fromkeys(("teacher_model", "teacher_model_name_or_path"), "--teacher"),
    "teacher_model_revision": "--teacher_revision",
    "teacher_tokenizer_name_or_path": "--teacher_tokenizer",
    **dict.fromkeys(("dtype", "torch_dtype"), DTYPE_OPTIONS),
    "use_flash_attention_2": "--attn_implementation flash_attention_2",
    "use_lora": "--use_peft",
    "load_in_4bit": "--teacher_quantization nf4",
    "load_in_8bit": "--teacher_quantization int8",
    **dict.fromkeys(("dataset_name", "train_file"), "--dataset"),
    "dataset_config_name": "--dataset_config",
    "dataset_train_split": "--dataset_split",
    "dataset_test_split": "--eval_fraction or --eval_dataset",
    "validation_file": "--eval_dataset",
    "dataset_text_field": "--text_column",
    "preprocessing_num_workers": "--dataset_num_proc",
    **dict.fromkeys(("max_seq_length", "max_seq_len", "block_size"), "--max_length"),
    **dict.fromkeys(("batch_size", "per_device_batch_size"), "--per_device_train_batch_size"),
    "lr": "--learning_rate",
    **dict.fromkeys(("epochs", "num_epochs"), "--num_train_epochs"),
    "warmup_ratio": "--warmup_steps, a share if below 1",
    "evaluation_strategy": "--eval_strategy",
    "use_uld_loss": "--method uld",
    "beta": "--method kld with --kld_direction",
    **dict.fromkeys(("lmbda", "temperature"), "no answers are sampled here: leave it out"),
    "formatting_func": "documents are a column, text, and conversations are messages: leave it out",
    "accelerate_config": "it is for the command lines of train, evaluate and score",
    "num_processes": "it goes with --accelerate_config",
}
# Names there that ask for what happens anyway: they are taken, with a warning.
_PACKED = "documents are always packed, and kept apart"
_ANSWERS = "of conversations the answers are trained on, unless --train_on all"
ANYWAY = {
    "do_train": "this command trains",
    "do_eval": "--eval_fraction or --eval_dataset evaluates",
    "overwrite_output_dir": "a run that ended early resumes in its --output_dir",
    **dict.fromkeys(("packing", "eval_packing", "padding_free"), _PACKED),
    **dict.fromkeys(("assistant_only_loss", "completion_only_loss"), _ANSWERS),
}
# Options whose arguments in Python have other names, or are of something else.
_IN_PYTHON = {
    "student": "model",
    "teacher_losses": "teacher",
    "student_tokenizer": "processing_class",
    **dict.fromkeys(("dataset", "dataset_split", "dataset_config"), "train_dataset"),
    "dataset_weights": "the weights of its Blocks",
    "eval_fraction": "eval_dataset",
    "text_column": "text_column of prepare_dataset",
    "use_peft": "peft_config",
    "lora_target_modules": "target_modules of peft_config",
    "lora_modules_to_save": "modules_to_save of peft_config",
    **dict.fromkeys(("lora_r", "lora_alpha", "lora_dropout"), "peft_config"),
    "accelerate_config": "accelerate launch with a config_file",
}
# Arguments of the trainer, which are none of its config.
_OF_TRAINER = {"teacher", "eval_dataset", *_IN_PYTHON} - {"accelerate_config", "text_column"}


def near(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean X?)" for the known name that is most like one, or nothing.

    >>> near("--teachr", ["--teacher", "--student"])
    ' (did you mean --teacher?)'
    """
    known = list(known)
    # The beginning of a name is most like it.
    begun = [each for each in known if each.startswith(name)]
    nearest = begun or difflib.get_close_matches(name, known, 1)
    return f" (did you mean {nearest[0]}?)" if nearest else ""


@contextmanager
def shell_door() -> Iterator[None]:
    """Keep the words of the shell in what is done inside."""
    token = _is_shell.set(True)
    try:
        yield
    finally:
        _is_shell.reset(token)


def python_door(work: _Function) -> _Function:
    """Put what a function raises into the words of Python, unless a command calls it."""

    @wraps(work)
    def through(*args: Any, **options: Any) -> Any:
        try:
            return work(*args, **options)
        except (ValueError, ImportError) as error:
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
    message = message.replace("--teacher or --teacher_losses", "--teacher")
    message = message.replace("--eval_fraction or --eval_dataset", "--eval_dataset")
    message = re.sub(r"--text_column ('[^']*')", r"column \1", message)
    # `--bf16 true` is bf16=True.
    message = re.sub(r"--(\w+) (true|false)\b", lambda x: f"{x[1]}={x[2].title()}", message)
    return re.sub(r"--(\w+)", lambda x: _IN_PYTHON.get(x[1], x[1]), message)


def how_to_go_on() -> str:
    """Say how a run goes on, at the door that it was begun at."""
    return "the same command" if _is_shell.get() else "train(resume_from_checkpoint=True)"


def own_arguments(
    owner: str, options: Mapping[str, Any], known: Iterable[str], warn: Callable[[str], object]
) -> dict[str, Any]:
    """Return the arguments of a constructor without those that ask for what happens anyway.

    Raises:
        TypeError: an argument has another name here, or none; the message says which.
    """
    known = [*known]
    kept = {}
    for name, value in options.items():
        if name in known:
            kept[name] = value
        elif name in ANYWAY:
            warn(f"{name} has no effect: {worded(ANYWAY[name])}")
        elif name in OTHER_NAMES:
            here = OTHER_NAMES[name]
            here = f"here it is {worded(here)}" if here.startswith("--") else worded(here)
            raise TypeError(f"{owner} has no argument {name}: {here}")
        elif name in _OF_TRAINER:
            here = worded(f"--{name}")
            raise TypeError(f"{owner} has no argument {name}: give {here} to VocAgnoTrainer")
        else:
            raise TypeError(f"{owner} has no argument {name}{near(name, known)}")
    return kept
