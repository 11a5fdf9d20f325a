"""Names of other libraries that the package overrides, calls or reads, and that may change.

Public functions that we call as documented are left out. The lists have private names, methods that
we override, attributes that we read with a default (which would hide a new name), and arguments and
files that we know by name. A version that lacks one fails here.

All unit tests were run with these versions; every run of CI takes those of constraints.txt:

    Python   torch    transformers   accelerate   datasets   peft
    3.10     2.11.0   5.5.4          1.13.0       5.2.0      0.18.0    the lowest
    3.11     2.13.0   5.5.4          1.13.0       5.2.0      0.18.0
    3.11     2.13.0   5.23.0         1.15.0       5.2.0      0.21.2
    3.11     2.13.0   5.24.0         1.15.0       5.2.0      0.21.2    slow tests and processes, too
    3.12     2.14.1   5.24.0         1.15.0       5.2.0      0.21.2    the newest
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import datasets
import peft
import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig
from torch.distributed.run import get_args_parser
from torch.nn.attention import varlen
from torch.utils import _pytree
from transformers import Cache, DynamicCache, LlamaConfig, LlamaForCausalLM, Trainer
from transformers import TrainingArguments as Arguments
from transformers.cache_utils import DynamicLayer
from transformers.integrations import integration_utils
from transformers.trainer_callback import CallbackHandler, TrainerCallback

from vocagnolm import cli
from vocagnolm.evaluation.engines.hf_engine import GrowingLayer, cache_argument
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

# Methods that ours override, by class.
OVERRIDDEN: list[tuple[type, type, str]] = [
    (
        VocAgnoTrainer,
        Trainer,
        "_determine_best_metric _get_output_dir _get_train_sampler _prepare_inputs "
        "_save_checkpoint call_model_init compute_loss get_batch_samples log prediction_step "
        "store_flos train",
    ),
    (Preemption, TrainerCallback, "on_epoch_end"),
    (StepGuard, TrainerCallback, "on_pre_optimizer_step"),
    (RunLog, TrainerCallback, "on_train_begin on_log"),
    (Throughput, TrainerCallback, "on_train_begin on_step_begin"),
    (GrowingLayer, DynamicLayer, "get_seq_length update"),
    (cli._Help, argparse.RawDescriptionHelpFormatter, "_format_action_invocation"),
]

# Attributes that we read or set; of an instance where the class lacks them.
READ: list[tuple[Callable[[], Any], str]] = [
    (lambda: Trainer, "_get_train_sampler add_callback pop_callback remove_callback"),
    (lambda: Trainer, "compute_loss_context_manager save_model save_state"),
    (lambda: CallbackHandler([], None, None, None, None), "eval_dataloader"),
    (lambda: Arguments, "_VALID_DICT_FIELDS train_batch_size world_size n_gpu device"),
    (lambda: Arguments, "accelerator_config data_seed eval_on_start liger_kernel_config"),
    (lambda: Arguments, "dataloader_pin_memory logging_nan_inf_filter ddp_timeout use_cpu"),
    (lambda: integration_utils, "rewrite_logs get_reporting_integration_callbacks"),
    (lambda: argparse.ArgumentParser(), "_option_string_actions _actions"),
    (lambda: argparse.HelpFormatter("prog"), "_format_args"),
    (lambda: _pytree, "tree_map_only"),
    (lambda: torch.cpu, "_is_amx_tile_supported _is_avx512_bf16_supported"),
    (lambda: torch.backends.cpu, "get_cpu_capability"),
    (lambda: CONFIG, "_attn_implementation max_position_embeddings rope_parameters"),
    (lambda: CONFIG, "num_attention_heads num_key_value_heads head_dim attention_dropout"),
    (lambda: transformers.MistralConfig(), "sliding_window"),
    (lambda: transformers.Qwen2Config(), "use_sliding_window"),
    (lambda: transformers.Gemma2Config(), "attn_logit_softcapping"),
    (lambda: transformers.Llama4TextConfig(), "attention_chunk_size"),
    (lambda: transformers.GPT2Config(), "attn_pdrop"),
    (lambda: transformers.GPTNeoConfig(), "attention_layers window_size"),
    (lambda: transformers.MambaForCausalLM, "_is_stateful"),
    (lambda: LlamaForCausalLM, "_no_split_modules _supports_attention_backend base_model"),
    (lambda: LlamaForCausalLM, "_supports_flash_attn _supports_sdpa"),
    (lambda: transformers.PreTrainedTokenizerFast, "backend_tokenizer"),
    (lambda: DynamicCache(config=transformers.MistralConfig()).layers[0], "sliding_window"),
    (lambda: DynamicCache(config=CONFIG).layers[0], "keys values"),
    (lambda: datasets.Dataset.from_dict({"text": ["a"]}), "_fingerprint _indices data info"),
    (lambda: Accelerator(), "is_fsdp2 scaler reduce num_processes state"),
    (lambda: FullyShardedDataParallelPlugin, "mixed_precision_policy set_state_dict_type"),
    (lambda: ParallelismConfig(), "tp_size cp_size sp_size"),
    (lambda: launch_command_parser().parse_args(["x.py"]), "config_file"),
    # Accelerate passes it on to torchrun.
    (lambda: get_args_parser().parse_args(["x.py"]), "signals_to_handle"),
    (lambda: peft.PeftModel, "get_base_model create_or_update_model_card"),
    (lambda: peft.LoraModel, "merge_and_unload"),
]

# Arguments that we pass by name or look for, although the documentation does not promise them.
TAKEN: list[tuple[Callable[..., Any], str]] = [
    (LlamaForCausalLM.forward, "input_ids position_ids attention_mask labels use_cache"),
    (LlamaForCausalLM.generate, "inputs stopping_criteria"),
    (Cache.__init__, "layers"),
    (DynamicCache.__init__, "config"),
    (datasets.Dataset.__init__, "arrow_table info indices_table fingerprint"),
    (datasets.Dataset.map, "new_fingerprint"),
    (varlen.varlen_attn, "query key value cu_seq_q cu_seq_k max_q max_k scale window_size"),
    (Trainer.save_model, "output_dir _internal_call"),
    (peft.get_peft_model, "model peft_config"),
]


def parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


def each(table: list[tuple[Any, str]]) -> list[tuple[Any, str]]:
    return [(owner, name) for owner, names in table for name in names.split()]


@pytest.mark.parametrize(("ours", "theirs", "names"), OVERRIDDEN)
def test_overridden_method_takes_what_its_library_gives(
    ours: type, theirs: type, names: str
) -> None:
    for name in names.split():
        assert hasattr(theirs, name), f"{theirs.__name__} has no {name} any more"
        own, given = parameters(getattr(ours, name)), parameters(getattr(theirs, name))
        kinds = {parameter.kind for parameter in own.values()}
        takes_any = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds
        takes_names = inspect.Parameter.VAR_KEYWORD in kinds
        for parameter in given.values():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            assert takes_any or takes_names or parameter.name in own, f"{name}: {parameter}"


@pytest.mark.parametrize(("owner", "name"), each(READ))
def test_attribute_is_there(owner: Callable[[], Any], name: str) -> None:
    found = owner()
    declared = getattr(found, "__dataclass_fields__", {})
    assert hasattr(found, name) or name in declared, f"{found} has no {name} any more"


@pytest.mark.parametrize(("function", "name"), each(TAKEN))
def test_argument_is_there(function: Callable[..., Any], name: str) -> None:
    assert name in parameters(function), f"{function.__qualname__} takes no {name} any more"


def test_cache_argument_is_that_of_a_model() -> None:
    assert cache_argument() in parameters(LlamaForCausalLM.forward)


def test_fields_of_training_arguments_are_found_in_their_source() -> None:
    """`vocagnolm train` knows their names before it imports transformers."""
    known = {each.name for each in fields(Arguments)}
    assert known <= {*parser.trainer_fields()}


def test_settings_that_must_not_change_are_fields_of_some_version() -> None:
    known = {each.name for each in fields(Arguments)}
    assert _ONE_VALUE.keys() <= known


def test_every_private_name_of_a_library_is_listed() -> None:
    """A name with an underscore that the package does not define belongs to a library."""
    own, used = set[str](), dict[str, str]()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                own.add(node.id if isinstance(node, ast.Name) else node.attr)
            elif isinstance(node, ast.Attribute) and re.match("_[a-z]", node.attr):
                used[node.attr] = f"{path.name}:{node.lineno}"
    listed = {name for *_, names in (*OVERRIDDEN, *READ, *TAKEN) for name in names.split()}
    # Documented despite their underscore.
    listed |= {"_exit", "_replace"}
    assert {name: place for name, place in used.items() if name not in own | listed} == {}
