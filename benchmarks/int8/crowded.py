"""Matmuls while another kernel holds some multiprocessors, as those of NCCL do."""

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.language.extra import cuda as device_functions

from benchmarks.int8.matmuls import Operands, Shape
from lowbit_optim.int8_training import matmul

_HELD_MS = 60
_REPEATS = 10


@triton.jit
def _wait(nanoseconds):  # type: ignore[no-untyped-def]
    end = device_functions.globaltimer() + nanoseconds
    while device_functions.globaltimer() < end:
        pass


def compare(shapes: list[Shape], held: list[int], device: torch.device) -> Iterator[dict[str, Any]]:
    """A row a shape and matmul: milliseconds alone, and how many times that with so many multiprocessors ``held``.

    Each of these runs 1024 threads of the other kernel, which leave room for one program of an int8 matmul at most.
    """
    side = torch.cuda.Stream(device)
    for shape in shapes:
        x = Operands(shape, device)
        for name, (call, setting) in _contenders(x).items():
            with setting:
                alone = _milliseconds(call, 0, side)
                slower = {f"× with {count} held": _milliseconds(call, count, side) / alone for count in held}
            yield {"m, n, k": shape, "matmul": name, "ms": alone, **slower}


def _contenders(x: Operands) -> dict[str, tuple[Callable[[], Tensor], contextlib.AbstractContextManager[Any]]]:
    ours = partial(matmul.scaled_matmul, x.a_int8, x.b_int8, torch.bfloat16)
    return {
        "cuBLAS bf16": (lambda: x.a @ x.b.t(), contextlib.nullcontext()),
        "ours, from tile to tile": (ours, mock.patch.object(matmul, "has_collectives", return_value=False)),
        "ours, one program a tile": (ours, mock.patch.object(matmul, "has_collectives", return_value=True)),
    }


def _milliseconds(call: Callable[[], Tensor], held: int, side: torch.cuda.Stream) -> float:
    """Median of one call, with calls queued one after the other."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    if held:
        with torch.cuda.stream(side):
            _wait[(held,)](_HELD_MS * 1_000_000, num_warps=32)
        time.sleep(0.002)  # it has begun
    events = [torch.cuda.Event(enable_timing=True) for _ in range(_REPEATS + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    events[-1].synchronize()
    if held and side.query():
        raise RuntimeError(f"the calls took longer than the {_HELD_MS} ms for which multiprocessors were held")
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events))
