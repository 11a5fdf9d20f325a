"""What options need of packages, processes and devices, checked before models are loaded."""

from accelerate.utils import parse_flag_from_env
from transformers import Trainer
from transformers.training_args import OptimizerNames

from vocagnolm.extras import is_installed, require
from vocagnolm.models.quantization import QUANTIZATIONS, check_quantizer, quantization
from vocagnolm.models.sharding import devices_of_a_machine
from vocagnolm.training.config import VocAgnoConfig
from vocagnolm.training.settings import Job


def check_launch(job: Job) -> None:
    """Raise a ValueError for options that these processes and devices cannot meet."""
    args = job.args
    _check_packages(args)
    # A layer's weights are gathered for its own forward pass. What reads the output head from
    # outside would find a shard.
    if args.teacher_sharding == "node":
        if args.teacher_quantization or args.distance:
            raise ValueError(
                "--teacher_sharding goes neither with --teacher_quantization nor with --method kld "
                "or uld, which need the teacher's whole output head: leave it out"
            )
        if devices_of_a_machine() < 2 and not args.dry_run:
            raise ValueError("--teacher_sharding node needs several processes on a machine")
    # On a GPU such attention computes in 16 bits only, which would otherwise come out in the first
    # step, after the alignment.
    attention = args.attn_implementation or ""
    is_wide = not args.is_mixed or args.teacher_dtype == "float32"
    if args.device.type == "cuda" and is_wide and ("flash" in attention or "varlen" in attention):
        raise ValueError(
            f"--attn_implementation {attention} computes in 16 bits on a GPU: use --bf16 true "
            "without --teacher_dtype float32, or --attn_implementation sdpa"
        )
    # FSDP may be set up by the arguments or by the launcher, which uses the environment.
    plugin = args.fsdp_config if isinstance(args.fsdp_config, dict) else {}
    recomputes = parse_flag_from_env("FSDP_ACTIVATION_CHECKPOINTING")
    if job.model.use_peft and (recomputes or plugin.get("activation_checkpointing")):
        raise ValueError(
            "fsdp_activation_checkpointing does not go with --use_peft, because PEFT would save no "
            "adapters: set it to false and use --activation_checkpointing"
        )


def _check_packages(args: VocAgnoConfig) -> None:
    """Raise a ValueError for options whose packages, which are loaded late, are not installed."""
    # A plan may be made on a smaller machine than the job will run on.
    is_planned = args.dry_run and args.teacher_quantization in QUANTIZATIONS
    if args.teacher_quantization and not is_planned:
        option = f"--teacher_quantization {args.teacher_quantization}"
        if args.teacher_quantization == "fp8":
            require("torchao", option)
        check_quantizer(quantization(args.teacher_quantization), option)
    # The kernels of the hub replace the package.
    if args.attn_implementation == "flash_attention_2" and not is_installed("kernels"):
        require("flash_attn", "--attn_implementation flash_attention_2")
    if args.dry_run:
        return
    try:
        Trainer.get_optimizer_cls_and_kwargs(args)
    except ImportError as error:
        raise ValueError(f"--optim {OptimizerNames(args.optim).value}: {error}") from error
    except ValueError:
        # Some optimizers need the model, or more settings: Trainer says so.
        return
