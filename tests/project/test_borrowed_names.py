"""Names of other libraries whose loss would go unnoticed, and all private ones that we use.

A method that overrides nothing any more is never called, and an attribute that is read with a
default has it from then on: no other test need fail. A private name that is gone raises an error in
the tests of the code that uses it. It is only listed here, so that a new one is seen.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import peft
import pytest
import transformers
from accelerate.utils import ParallelismConfig
from torch.distributed.run import get_args_parser
from transformers import LlamaConfig, LlamaForCausalLM, Trainer
from transformers import TrainingArguments as Arguments
from transformers.cache_utils import DynamicLayer
from transformers.trainer_callback import TrainerCallback

from vocagnolm import cli
from vocagnolm.evaluation.engines.hf_engine import GrowingLayer
from vocagnolm.run import parser
from vocagnolm.trainer import VocAgnoTrainer
from vocagnolm.training.config import _ONE_VALUE
from vocagnolm.training.guard import Preemption, StepGuard
from vocagnolm.training.log import RunLog
from vocagnolm.training.throughput import Throughput

PACKAGE = Path(__file__).resolve().parents[2] / "vocagnolm"
CONFIG = LlamaConfig(
    vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
)

# Methods that ours override.
OF_TRAINER = (
    "_determine_best_metric _get_output_dir _get_train_sampler _issue_warnings_after_load "
    "_save_checkpoint call_model_init compute_loss get_batch_samples hyperparameter_search log "
    "prediction_step store_flos train training_step"
)
OVERRIDDEN: list[tuple[type, type, str]] = [
    (VocAgnoTrainer, Trainer, OF_TRAINER),
    (Preemption, TrainerCallback, "on_epoch_end"),
    (StepGuard, TrainerCallback, "on_pre_optimizer_step"),
    (RunLog, TrainerCallback, "on_train_begin on_step_end on_log"),
    (Throughput, TrainerCallback, "on_train_begin on_step_begin"),
    (GrowingLayer, DynamicLayer, "get_seq_length update"),
    (cli._Help, argparse.RawDescriptionHelpFormatter, "_format_action_invocation"),
]

# Attributes that we read with a default, or set; of an instance where the class lacks them.
UNNOTICED: list[tuple[Callable[[], Any], str]] = [
    (lambda: Arguments, "_VALID_DICT_FIELDS accelerator_config train_batch_size n_gpu"),
    (lambda: CONFIG, "_attn_implementation max_position_embeddings rope_parameters"),
    (lambda: CONFIG, "num_attention_heads num_key_value_heads head_dim attention_dropout"),
    (lambda: transformers.MistralConfig(), "sliding_window"),
    (lambda: transformers.Qwen2Config(), "use_sliding_window"),
    (lambda: transformers.Gemma2Config(), "attn_logit_softcapping"),
    (lambda: transformers.Llama4TextConfig(), "attention_chunk_size"),
    (lambda: transformers.GPT2Config(), "attn_pdrop"),
    (lambda: transformers.GPTNeoConfig(), "attention_layers window_size"),
    (lambda: transformers.MambaForCausalLM, "_is_stateful"),
    (lambda: LlamaForCausalLM, "_no_split_modules"),
    (lambda: transformers.PreTrainedTokenizerFast, "backend_tokenizer"),
    (lambda: ParallelismConfig(), "tp_size cp_size sp_size"),
    # Accelerate passes it on to torchrun.
    (lambda: get_args_parser().parse_args(["x.py"]), "signals_to_handle"),
    (lambda: peft.PeftModel, "get_base_model"),
]

# Other private names: of argparse, torch and transformers.
PRIVATE = (
    "_actions _format_args _is_amx_tile_supported _is_avx512_bf16_supported _prepare_inputs "
    "_supports_attention_backend _supports_flash_attn _supports_sdpa"
)
# Documented despite their underscore.
DOCUMENTED = {"_exit", "_replace"}


@pytest.mark.parametrize(("ours", "theirs", "names"), OVERRIDDEN)
def test_overridden_method_is_there(ours: type, theirs: type, names: str) -> None:
    for name in names.split():
        assert hasattr(theirs, name), f"{theirs.__name__} has no {name} any more"
        assert getattr(ours, name) is not getattr(theirs, name), f"{ours.__name__} has no {name}"


@pytest.mark.parametrize(("owner", "names"), UNNOTICED)
def test_attribute_is_there(owner: Callable[[], Any], names: str) -> None:
    found = owner()
    declared = getattr(found, "__dataclass_fields__", {})
    for name in names.split():
        assert hasattr(found, name) or name in declared, f"{found} has no {name} any more"


def test_fields_of_training_arguments_are_found_in_their_source() -> None:
    """`vocagnolm train` knows their names before it imports transformers."""
    known = {field.name for field in fields(Arguments)}
    assert known <= {*parser.trainer_fields()}
    assert _ONE_VALUE.keys() <= known


def test_every_private_name_of_a_library_is_listed() -> None:
    """A name with an underscore that the package does not define belongs to a library."""
    own, used = set[str](), set[str]()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                own.add(node.id if isinstance(node, ast.Name) else node.attr)
            elif isinstance(node, ast.Attribute) and re.match("_[a-z]", node.attr):
                used.add(node.attr)
    listed = {*PRIVATE.split(), *DOCUMENTED}
    for *_, names in (*OVERRIDDEN, *UNNOTICED):
        listed.update(names.split())
    assert used - own <= listed
    assert {*PRIVATE.split()} <= used, "no longer used"
