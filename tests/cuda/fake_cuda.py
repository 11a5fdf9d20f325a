"""A CUDA device that computes nothing, on the CPU build of PyTorch, and a watch on what runs there.

Tensors on it are fake: they have a shape, a dtype and a device, and no values. Everything else is
real: the trainer, autograd, autocast, the optimizer, the order of operations. So a run on it proves

    devices   no operation mixes the CPU and the GPU; tensors are made where they are used
    waits     where the host waits for the device, and how often
    memory    every storage that is alive, and so the peak, rounded as CUDA's allocator does

and cannot prove what kernels compute, how fast they are, what NCCL does, what DDP's reducer does
(it reads memory), the workspaces of libraries, or waits inside a kernel's own code. Those are for
`make test-gpu`.

    install()                   # in a process of its own, before its first backward pass
    with Watch() as watch:
        torch.ones(3, device="cuda").sum().item()
    watch.waits                 # {Seen("", "item", "__main__.<module>:3"): 1}
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import importlib
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, wraps
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

HERE = Path(__file__).parent
aten = torch.ops.aten

# -- The device ----------------------------------------------------------------------------------


class Stream:
    """The only stream."""

    device, device_index, stream_id, device_type = torch.device("cuda", 0), 0, 0, 2

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def synchronize(self) -> None:
        _waits("synchronize")

    def is_capturing(self) -> bool:
        return False

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def wait_stream(self, other: Any) -> None:
        pass

    wait_event = wait_stream


class Event(Stream):
    """An event that has happened already."""

    def record(self, stream: Any = None) -> None:
        pass


def install() -> None:
    """Give this process the device, and `torch.cuda` the answers that training asks for."""
    ctypes.CDLL(str(_compiled())).install()
    only = Stream()
    torch.Stream, torch.Event = Stream, Event  # type: ignore[misc]
    answers: dict[str, Callable[..., Any]] = {
        **dict.fromkeys(("is_available", "is_initialized", "is_bf16_supported"), _always(True)),
        **dict.fromkeys(("set_device", "empty_cache", "manual_seed_all"), _always(None)),
        "device_count": _always(1),
        "current_device": _always(0),
        "current_stream": _always(only),
        "stream": lambda _: contextlib.nullcontext(),
        "get_device_name": _always("NVIDIA H100 80GB HBM3"),
        # PyTorch 2.11 built for CUDA asks the driver.
        "is_current_stream_capturing": _always(False),
        "synchronize": lambda *_: _waits("synchronize"),
        "Stream": Stream,
        "Event": Event,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    accelerator: Any = torch.accelerator
    accelerator.is_available = _always(True)
    accelerator.current_accelerator = _always(torch.device("cuda"))
    accelerator.current_stream = _always(only)
    # Keep fake tensors from asking the driver.
    fake_tensor.init_gpu_context = _always(None)
    torch._C._ensureCUDADeviceGuardSet = _always(None)
    FakeTensorMode.avoid_device_init = property(_always(True))  # type: ignore[assignment]
    # These are in C++ and would look at memory.
    tensor: Any = Tensor
    tensor.record_stream = _always(None)
    tensor.pin_memory, tensor.is_pinned = _pinned, lambda tensor: hasattr(tensor, "pinned")
    fake: Any = FakeTensor
    fake.tolist = _tolist
    torch.nn.functional.scaled_dot_product_attention = _attention


def _always(answer: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: answer


def _compiled() -> Path:
    """Compile the device, once for each version of PyTorch."""
    source, torch_home = HERE / "nullcuda.cpp", Path(torch.__file__).parent
    key = hashlib.sha256(source.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library = Path(tempfile.gettempdir(), f"nullcuda-{os.getuid()}-{key}.so")
    if not library.exists():
        aside = library.with_suffix(f".{os.getpid()}")
        flags = ["-shared", "-fPIC", "-std=c++20", f"-I{torch_home}/include", f"-L{torch_home}/lib"]
        command = ["g++", *flags, str(source), "-lc10", "-ltorch_cpu", "-o", str(aside)]
        subprocess.run(command, check=True)
        aside.replace(library)  # atomic, as other processes may compile it, too
    return library


def _pinned(tensor: Any, *_: Any) -> Any:
    tensor.pinned = True
    return tensor


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Choose a kernel as CUDA does: flash attention, or the memory-efficient one for a mask."""
    dtype = query.dtype
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
    query, key, value = (rows.to(dtype) for rows in (query, key, value))
    if attn_mask is None and dtype.itemsize == 2:
        attend = aten._scaled_dot_product_flash_attention
        return attend(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    bias = None
    if attn_mask is not None:
        # The kernel adds a mask of numbers, which each call makes from the booleans.
        bias = torch.zeros_like(attn_mask, dtype=dtype)
        bias.masked_fill_(attn_mask.logical_not(), -torch.inf)
        bias = bias.expand(*query.shape[:3], key.shape[2])
    attend = aten._scaled_dot_product_efficient_attention
    return attend(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]


# -- The watch -----------------------------------------------------------------------------------


class Seen(NamedTuple):
    """What happened where: a part of the step, an operation, and the lines that led to it."""

    phase: str
    what: str
    where: str


class Watch(TorchDispatchMode):
    """Makes tensors fake inside of `with`, and records what happens to those on the device.

    Attributes:
        waits: what the host waits for: values, sizes that depend on values, copies that block.
        copies, mixed, cpu: copies that do not block, operations on tensors of both host and
            device, and operations that make a tensor on the host.
        now, peaks: bytes of all storages on the device, and the most in each phase.
        phase: the part of the step that records belong to.
        values: what the host reads, by dtype and shape; zeros by default.
    """

    active: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=False)
        self.phase, self.now = "", 0
        self.values: dict[tuple[torch.dtype, tuple[int, ...]], Any] = {}
        self._sizes: dict[int, int] = {}
        self.clear()

    def clear(self) -> None:
        """Forget what was seen, except the storages that are alive."""
        self.waits, self.copies = Counter[Seen](), Counter[Seen]()
        self.mixed, self.cpu = Counter[Seen](), Counter[Seen]()
        self.peaks = {self.phase: self.now}

    def __enter__(self) -> Watch:
        Watch.active = self
        self.fake.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.fake.__exit__(*error)
        Watch.active = None

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Name the phase of what follows."""
        before, self.phase = self.phase, phase
        self._count(0)
        yield
        self.phase = before
        self._count(0)

    def fakes(self, values: Any) -> Any:
        """Turn the real tensors in a structure into fake ones on the same device."""
        return tree_map_only(
            Tensor, lambda real: self.fake.from_tensor(real, static_shapes=True), values
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # its local tensors come back here
        kwargs = kwargs or {}
        read = tensors_of((args, list(kwargs.values())))
        made = self._make(func, args, kwargs, read)
        out = tensors_of((made,))
        kinds = {tensor.device.type for tensor in (*read, *out)}
        if kinds == {"cpu"} and out:
            self.record(self.cpu, name_of(func))
        elif kinds == {"cpu", "cuda"} and "copy" not in func.__name__:
            self.record(self.mixed, name_of(func))
        elif kinds == {"cpu", "cuda"}:
            is_in = out[0].is_cuda
            # CUDA copies pageable memory to a buffer of its own first.
            blocks = not kwargs.get("non_blocking", args[-1] is True)
            blocks = blocks or (is_in and not any(tensor.is_pinned() for tensor in read))
            way = "to the device" if is_in else "to the host"
            self.record(self.waits if blocks else self.copies, f"copy {way}")
        for tensor in out:
            self.see(tensor)
        return made

    def _make(self, func: Any, args: Any, kwargs: Any, read: list[Tensor]) -> Any:
        """Compute fake results; make up what depends on values."""
        if _has_mask(func, args):
            self.record(self.waits, "boolean mask")
            if func is aten.index.Tensor:
                args = (args[0], [place for mask in args[1] for place in _places(mask)])
        try:
            return func(*args, **kwargs)
        except fake_tensor.DataDependentOutputException:
            if any(tensor.is_cuda for tensor in read):
                self.record(self.waits, "item")
            return func is not aten.equal.default and self.value(read[0].dtype)
        except fake_tensor.DynamicOutputShapeException:
            self.record(self.waits, name_of(func))
            if func is not aten.nonzero.default:
                raise
            return read[0].new_empty(read[0].numel(), read[0].dim(), dtype=torch.int64)

    def record(self, seen: Counter[Seen], what: str) -> None:
        """Count what happens now, with the place in the code."""
        seen[Seen(self.phase, what, _caller())] += 1

    def value(self, dtype: torch.dtype, shape: tuple[int, ...] = ()) -> Any:
        """Make up what the host reads of a tensor, as nested lists."""
        nested: Any = False if dtype == torch.bool else 0.0 if dtype.is_floating_point else 0
        for length in reversed(shape):
            nested = [nested] * length
        return self.values.get((dtype, shape), nested)

    def see(self, tensor: Tensor) -> None:
        """Count a storage on the device until it is gone."""
        if not tensor.is_cuda:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = -(-storage.nbytes() // 512) * 512
        self._count(self._sizes[key])
        weakref.finalize(storage, self._gone, key)

    def forget(self, tensor: Tensor) -> None:
        """Stop counting a storage whose memory was freed."""
        self._gone(tensor.untyped_storage()._cdata)

    def _gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)

    def _count(self, size: int) -> None:
        self.now += size
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), self.now)


def name_of(func: Any) -> str:
    return str(func.__name__).partition(".")[0]


def tensors_of(values: Any) -> list[Tensor]:
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_of(value)
    return found


_PUTS = (aten.index_put.default, aten.index_put_.default)


def _has_mask(func: Any, args: Any) -> bool:
    """Test for indexing by a mask, whose places the host must count first."""
    if func is not aten.index.Tensor and func not in _PUTS:
        return False
    masks = [x for x in args[1] if x is not None and x.dtype in (torch.bool, torch.uint8)]
    is_fill = func in _PUTS and args[2].numel() == 1  # PyTorch fills without counting
    return not is_fill and any(mask.is_cuda for mask in masks)


def _places(index: Tensor | None) -> list[Tensor | None]:
    """Turn a mask into as many places as it may have, by dimension."""
    if index is None or index.dtype not in (torch.bool, torch.uint8):
        return [index]
    return [index.new_zeros(index.numel(), dtype=torch.int64)] * index.dim()


def _tolist(tensor: Any) -> Any:
    watch = Watch.active
    if tensor.is_cuda:
        watch.record(watch.waits, "tolist")
    return watch.value(tensor.dtype, tuple(tensor.shape))


def _waits(what: str) -> None:
    if Watch.active is not None:
        Watch.active.record(Watch.active.waits, what)


def _caller() -> str:
    """Return the innermost calls outside of PyTorch."""
    frame, calls = sys._getframe(1), []
    while frame is not None and len(calls) < 4:
        module = frame.f_globals.get("__name__", "")
        if module != __name__ and module.partition(".")[0] not in ("torch", "contextlib"):
            calls.append(f"{module}.{frame.f_code.co_name}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(calls)


# -- Processes -----------------------------------------------------------------------------------


def outside(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function compute with real tensors, as it reads their values."""

    @wraps(function)
    def real(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return real


def start() -> None:
    """Install the device and import what a run needs, in a process that others are forked from."""
    fake_run = importlib.import_module("fake_run")
    install()  # after TorchDynamo, which lists the functions of torch.cuda
    fake_run.take_out_probes()
    gc.collect()
    gc.freeze()  # forks share the memory of what is imported


def in_fork(path: str, name: str, args: tuple[Any, ...], keep: bool) -> Any:
    """Call a function of a file in a copy of this process; calls with `keep` share one."""
    process, pipe = _kept() if keep else _forked()
    pipe.send((path, name, args))
    error, result = pipe.recv()
    if not keep:
        process.kill()
    if error is not None:
        raise RuntimeError(error)
    return result


def _forked() -> tuple[BaseProcess, Connection]:
    """Fork a process that answers calls.

    Nothing waits for its exit, and no thread of this process serves it: a fork beside threads may
    inherit a lock that no thread frees.
    """
    here, there = Pipe()
    process = get_context("fork").Process(target=_answer, args=(there,), daemon=True)
    process.start()
    there.close()  # so that the end of the process ends `here.recv`
    return process, here


_kept = cache(_forked)


def _answer(pipe: Connection) -> None:
    while True:
        path, name, args = pipe.recv()
        try:
            pipe.send((None, runpy.run_path(path)[name](*args)))
        except Exception:  # noqa: BLE001 - it is raised in the process that called
            pipe.send((traceback.format_exc(), None))


def stop() -> None:
    """End the processes."""
    for process in multiprocessing.active_children():
        process.kill()
