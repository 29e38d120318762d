"""Median times of calls, on a GPU or a CPU."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

_WARM_UPS = 3
_CPU_REPEATS = 5
_GPU_MILLISECONDS = 50  # of repeats


def milliseconds(call: Callable[[], Any], device: torch.device) -> float:
    """Of one call: on a GPU until the device is done, with calls queued one after the other and its cache emptied."""
    if device.type == "cuda":
        from triton.testing import do_bench

        return do_bench(call, warmup=25, rep=_GPU_MILLISECONDS, return_mode="median")
    for _ in range(_WARM_UPS):
        call()
    return 1e3 * statistics.median(_seconds(call) for _ in range(_CPU_REPEATS))


def seconds_until_done(call: Callable[[], Any], device: torch.device) -> float:
    """Of one call, host and device."""

    def call_and_wait() -> None:
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return _seconds(call_and_wait)


def _seconds(call: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def attempt(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What ``measure`` returns, or ``{"error": one line}``: one contender that cannot run ends only itself."""
    try:
        return measure()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"[:200]}
