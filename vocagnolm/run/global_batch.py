"""Split of a global batch into processes, sequences and accumulation steps."""

# Of the paper's optimizer step (Section 4.3).
_PAPER_TOKENS = 2**21
# Sequences per device; with a 7B teacher in bf16 this fits 80 GB.
_MAX_DERIVED_BATCH = 8


def split_global_batch(
    global_batch_tokens: int | None,
    max_length: int,
    world_size: int,
    batch_size: int | None = None,
    accumulation: int | None = None,
) -> tuple[int, int]:
    """Return sequences per device and accumulation steps that make exactly the global batch.

    By default it is the paper's, unless both are given; the batch size is the largest one up to 8
    that divides.

    Raises:
        ValueError: they cannot make it; the message is the arithmetic.

    >>> split_global_batch(2**21, 2048, world_size=32)
    (8, 4)
    >>> split_global_batch(2**21, 2048, world_size=1, batch_size=16)
    (16, 64)
    >>> split_global_batch(None, 2048, world_size=1, batch_size=3, accumulation=2)
    (3, 2)
    """
    if global_batch_tokens is None and batch_size and accumulation:
        return batch_size, accumulation
    global_batch_tokens = global_batch_tokens or _PAPER_TOKENS
    sequences, rest = divmod(global_batch_tokens, max_length)
    if rest:
        raise ValueError(
            f"--global_batch_tokens {global_batch_tokens} is not a multiple of --max_length "
            f"{max_length}: {global_batch_tokens} / {max_length} = "
            f"{global_batch_tokens / max_length:.2f} sequences"
        )
    per_device, rest = divmod(sequences, world_size)
    if batch_size is None and accumulation is None and not rest:
        batch_size = max(n for n in range(1, _MAX_DERIVED_BATCH + 1) if per_device % n == 0)
    if batch_size is None:
        batch_size = max(sequences // (world_size * (accumulation or 1)), 1)
    if accumulation is None:
        accumulation = max(sequences // (world_size * batch_size), 1)
    if world_size * batch_size * accumulation != sequences:
        raise ValueError(
            f"{world_size} processes x {batch_size} sequences x {accumulation} accumulation steps "
            f"x {max_length} tokens = {world_size * batch_size * accumulation * max_length:,} "
            f"tokens, not --global_batch_tokens {global_batch_tokens:,} ({sequences} sequences): "
            "change --global_batch_tokens, --per_device_train_batch_size or the number of processes"
            ", or give --per_device_train_batch_size with --gradient_accumulation_steps alone"
        )
    return batch_size, accumulation
