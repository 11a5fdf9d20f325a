"""Peak extra memory and time of the teacher's token losses, beside those of its full logits.

    python benchmarks/token_loss_memory.py --tokens 4096 --vocabulary 152064

The claim: less than a tenth of the float32 logits. Every way runs in a process of its own, with a
model of random weights and one layer, so that the head is what is measured.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

WAYS = ("token losses", "full logits")


def resident_bytes(field: str) -> int:
    """Return this process's memory: `VmRSS` is what it holds, `VmHWM` the most it has held."""
    status = Path("/proc/self/status")
    if not status.exists():  # not Linux: only the maximum is known, in bytes on macOS
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Not ru_maxrss: Linux lets a process inherit it from the one that started it.
    lines = (line.split() for line in status.read_text().splitlines())
    return next(int(line[1]) * 1024 for line in lines if line[0] == field + ":")


def measure(way: str, tokens: int, vocabulary: int, hidden: int, device: str) -> dict[str, float]:
    """Return `extra_bytes` and `seconds` of scoring `tokens` tokens, in rows of at most 2,048."""
    import torch
    from torch.nn import functional as F
    from transformers import LlamaConfig, LlamaForCausalLM

    from vocagnolm.token_loss import add_token_losses

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    model: Any = add_token_losses(LlamaForCausalLM(config).to(device).eval())
    ids = torch.randint(vocabulary, (tokens // min(tokens, 2048), min(tokens, 2048)), device=device)

    def run(ids: Any) -> Any:
        if way == "token losses":
            return model(input_ids=ids, labels=ids, token_losses=True)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")

    with torch.no_grad():
        run(ids[:1, :16])  # what is allocated once, for any number of tokens
        before = torch.cuda.memory_allocated() if device == "cuda" else resident_bytes("VmRSS")
        start_s = time.perf_counter()
        run(ids)[0].sum().item()
        seconds = time.perf_counter() - start_s
        peak = torch.cuda.max_memory_allocated() if device == "cuda" else resident_bytes("VmHWM")
    return {"extra_bytes": peak - before, "seconds": seconds}


def main() -> None:
    """Print one line for each way, or with `--way` one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=152_064)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--way", choices=WAYS)
    args = parser.parse_args()
    if args.way:
        result = measure(args.way, args.tokens, args.vocabulary, args.hidden, args.device)
        sys.stdout.write(json.dumps(result) + "\n")
        return
    logits_bytes = args.tokens * args.vocabulary * 4
    sys.stdout.write(
        f"{args.tokens:,} tokens, {args.vocabulary:,} words, hidden {args.hidden}, float32, "
        f"{args.device}; the logits alone are {logits_bytes / 2**20:,.0f} MiB\n"
        f"{'':14}{'extra memory':>14}{'of the logits':>15}{'time':>9}\n"
    )
    for way in WAYS:
        command = [sys.executable, __file__, *sys.argv[1:], "--way", way]
        result = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        sys.stdout.write(
            f"{way:14}{result['extra_bytes'] / 2**20:10,.0f} MiB"
            f"{result['extra_bytes'] / logits_bytes:15.1%}{result['seconds']:7.1f} s\n"
        )


if __name__ == "__main__":
    main()
