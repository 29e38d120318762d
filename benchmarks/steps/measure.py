"""Timing the step of one optimizer over one set of parameters, in a process of its own."""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile

from benchmarks.lm import optimizers
from benchmarks.steps import shapes

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

_WARM_UP_STEPS = 3
_TIMED_STEPS = 20
_PROFILED_STEPS = 3
_BACK_TO_BACK_SECONDS = 1.0
_COPIED_BYTES = {"cuda": 1 << 31, "cpu": 1 << 26}
_LINK_BYTES = 1 << 29
_CACHE_BYTES = 1 << 28  # more than the last-level cache of any GPU there is


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Args:
        shape_set: a key of ``SHAPE_SETS``.
        scale: what its dimensions are divided by.
        optimizer: a key of the optimizers' registry.
        options: keyword arguments besides the registry's.
        dtype: of weights and gradients, a key of ``DTYPES``.
        rounding: stochastic rounding on or off; None where there is none to switch.
        device: "cpu", "cuda", "cuda:1", ...
        fresh_grads: gradients at new addresses in every step.
    """

    shape_set: str
    optimizer: str
    dtype: str
    device: str
    scale: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    rounding: bool | None = None
    fresh_grads: bool = False


# --- Processes -------------------------------------------------------------------------------------------------------


def run_isolated(function: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """``function(*args)`` in a new process: nothing is compiled yet, all memory is free, and a crash ends only that.

    Returns:
        What it returned, or ``{"error": one line}``.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    try:
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            return pool.submit(_call, function, args).result()
    except BrokenProcessPool:
        return {"error": "the process crashed; what it said is above"}


def _call(function: Callable[..., dict[str, Any]], args: Iterable[Any]) -> dict[str, Any]:
    """Errors become text here, since not every exception survives the way to another process."""
    try:
        return function(*args)
    except Exception as error:
        first_line = next(iter(str(error).splitlines()), "no message")
        return {"error": f"{type(error).__name__}: {first_line}"}


# --- What is measured ------------------------------------------------------------------------------------------------


def measure_device(device_name: str) -> dict[str, Any]:
    """Name of the device, bytes a second, read plus written, of a copy from its memory to its memory, and of the link
    to pinned host memory, both ways at once; None on CPUs."""
    device = _use(device_name)
    source = torch.randn(_COPIED_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    times = _time(lambda: target.copy_(source), device)
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {os.cpu_count()} cores",
        "copy_bytes_per_s": 2 * source.nbytes / statistics.median(seconds for seconds, _ in times[_WARM_UP_STEPS:]),
        "link_bytes_per_s": _link_bytes_per_s(device) if device.type == "cuda" else None,
    }


def _link_bytes_per_s(device: torch.device) -> float:
    """Of one direction while both are in use, as they are where state comes and goes."""
    on_device = [torch.zeros(_LINK_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
    on_host = [torch.zeros(_LINK_BYTES, dtype=torch.uint8).pin_memory() for _ in range(2)]
    upload, download = torch.cuda.Stream(), torch.cuda.Stream()

    def both() -> None:
        for stream in (upload, download):
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(upload):
            on_device[0].copy_(on_host[0], non_blocking=True)
        with torch.cuda.stream(download):
            on_host[1].copy_(on_device[1], non_blocking=True)
        for stream in (upload, download):
            torch.cuda.current_stream().wait_stream(stream)

    return _LINK_BYTES / statistics.median(seconds for seconds, _ in _time(both, device)[_WARM_UP_STEPS:])


def measure_step(case: Case) -> dict[str, Any]:
    """Everything about one row but what compares it with others.

    Returns:
        ``tensors``, ``parameters``: counts.
        ``first_step_s``: with whatever is imported and compiled for it.
        ``step_ms``: between events before and after a step, the host running ahead as it does behind a backward;
        ``step_ms_quartiles``.
        ``back_to_back_ms``: a step of many with no waiting between them; None with fresh gradients.
        ``idle_step_ms``: from a call on an idle device until that is done. None on CPUs, like what follows.
        ``host_ms``, ``host_us_per_tensor``: of that, until the call returns.
        ``gpu_busy_ms``, ``kernels``: sum and number of kernels; the sum has copies and fills too.
        ``temporary_bytes``: peak of what a step allocates and frees.
        ``state_bytes_per_parameter``, ``moved_bytes``: see :func:`moved_bytes`.
    """
    device = _use(case.device)
    with _empty_compile_caches():
        parameters = _make_parameters(case, device)
        optimizer = _build(case, parameters, device)
        start = time.perf_counter()
        optimizer.step()
        _synchronize(device)
        result = {
            "tensors": len(parameters),
            "parameters": sum(p.numel() for p in parameters),
            "first_step_s": time.perf_counter() - start,
        }
        result |= _measure_warm(case, optimizer, parameters, device)
    return result


def _measure_warm(case: Case, optimizer: Optimizer, parameters: list[Tensor], device: torch.device) -> dict[str, Any]:
    prepare = (lambda: _renew_gradients(parameters)) if case.fresh_grads else _nothing
    times = _time(optimizer.step, device, prepare)[_WARM_UP_STEPS:]
    step_s = statistics.median(seconds for seconds, _ in times)
    result: dict[str, Any] = {
        "step_ms": 1e3 * step_s,
        "step_ms_quartiles": [1e3 * q for q in statistics.quantiles((seconds for seconds, _ in times), n=4)[::2]],
        "back_to_back_ms": None if case.fresh_grads else 1e3 * _back_to_back(optimizer, device, step_s),
        "state_bytes_per_parameter": optimizers.bytes_per_parameter(optimizer),
        "moved_bytes": moved_bytes(optimizer),
    }
    if device.type == "cuda":
        times = _time(optimizer.step, device, prepare, run_ahead=False)[_WARM_UP_STEPS:]
        result["idle_step_ms"] = 1e3 * statistics.median(seconds for seconds, _ in times)
        host_ms = 1e3 * statistics.median(host for _, host in times)
        result |= {"host_ms": host_ms, "host_us_per_tensor": 1e3 * host_ms / len(parameters)}
        result |= {"temporary_bytes": _temporary_bytes(optimizer, device, prepare)}
        result |= _profile(optimizer, device, prepare)
    return result


def moved_bytes(optimizer: Optimizer) -> int:
    """The fewest bytes a step can read and write: weights and state both ways, gradients one way."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = round(optimizers.bytes_per_parameter(optimizer) * sum(p.numel() for p in parameters))
    return 2 * sum(p.nbytes for p in parameters) + sum(p.grad.nbytes for p in parameters) + 2 * state


# --- Set-up ----------------------------------------------------------------------------------------------------------


def _use(device_name: str) -> torch.device:
    device = torch.device(device_name)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)  # torch 2.11 sets a device by its index alone
        torch.cuda.set_device(device)
    return device


@contextmanager
def _empty_compile_caches() -> Any:
    """So that the first step compiles all that a new user's would."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
            os.environ[name] = str(Path(folder) / name.lower())
        yield


def _make_parameters(case: Case, device: torch.device) -> list[Tensor]:
    torch.manual_seed(0)
    options = {"dtype": DTYPES[case.dtype], "device": device}
    all_shapes = shapes.scaled(shapes.SHAPE_SETS[case.shape_set](), case.scale)
    parameters = [torch.empty(shape, **options).normal_(std=0.02).requires_grad_() for shape in all_shapes]
    _renew_gradients(parameters)
    return parameters


def _renew_gradients(parameters: list[Tensor]) -> None:
    """Each allocated before the one it replaces is freed, and so at another address."""
    for p in parameters:
        p.grad = torch.empty_like(p, requires_grad=False).normal_(std=1e-3)


def _build(case: Case, parameters: list[Tensor], device: torch.device) -> Optimizer:
    optimizer_class = optimizers.find(case.optimizer, device)
    options = {"lr": 1e-4, "weight_decay": 0.1, **optimizers.REGISTRY[case.optimizer].options, **case.options}
    return optimizer_class(parameters, **options)


# --- Clocks ----------------------------------------------------------------------------------------------------------


def _nothing() -> None:
    pass


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _time(
    function: Callable[[], Any],
    device: torch.device,
    prepare: Callable[[], Any] = _nothing,
    run_ahead: bool = True,
) -> list[tuple[float, float]]:
    """Seconds on the device and until the call returns; the first few are warm-up. ``prepare`` is untimed.

    As in training, the host may run ahead of the device, as far as it is fast enough. Else each call begins with the
    device idle.
    """
    evict = _cache_eviction(device)

    def prepare_all() -> None:
        prepare()
        evict()
        if not run_ahead:
            _synchronize(device)

    time_all = _time_on_gpu if device.type == "cuda" else _time_on_cpu
    return time_all(function, prepare_all, _WARM_UP_STEPS + _TIMED_STEPS)


def _time_on_gpu(function: Callable[[], Any], prepare: Callable[[], Any], repeats: int) -> list[tuple[float, float]]:
    events, host = [], []
    torch.cuda.synchronize()
    for _ in range(repeats):
        prepare()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        start = time.perf_counter()
        function()
        host.append(time.perf_counter() - start)
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize()
    return [(begin.elapsed_time(end) / 1e3, seconds) for (begin, end), seconds in zip(events, host, strict=True)]


def _time_on_cpu(function: Callable[[], Any], prepare: Callable[[], Any], repeats: int) -> list[tuple[float, float]]:
    times = []
    for _ in range(repeats):
        prepare()
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return [(seconds, seconds) for seconds in times]


def _cache_eviction(device: torch.device) -> Callable[[], Any]:
    """In training, activations go through the cache between two steps. Read, since written lines would have to be
    written back during the step that is timed."""
    if device.type != "cuda":
        return _nothing
    return torch.zeros(_CACHE_BYTES // 4, device=device).sum


def _back_to_back(optimizer: Optimizer, device: torch.device, step_s: float) -> float:
    steps = min(200, max(5, int(_BACK_TO_BACK_SECONDS / step_s)))
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(steps):
        optimizer.step()
    _synchronize(device)
    return (time.perf_counter() - start) / steps


def _temporary_bytes(optimizer: Optimizer, device: torch.device, prepare: Callable[[], Any]) -> int:
    prepare()
    _synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    optimizer.step()
    _synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _profile(optimizer: Optimizer, device: torch.device, prepare: Callable[[], Any]) -> dict[str, Any]:
    evict = _cache_eviction(device)
    profiles = []
    for _ in range(_PROFILED_STEPS):
        prepare()
        evict()
        _synchronize(device)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            optimizer.step()
            _synchronize(device)
        profiles.append(read_trace(_trace_events(profiler)))
    return sorted(profiles, key=lambda each: each["gpu_busy_ms"])[_PROFILED_STEPS // 2]


def _trace_events(profiler: profile) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]


def read_trace(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Sums over what ran on the GPU; ranges that a program named (``gpu_user_annotation``) span the same time again."""
    on_gpu = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    return {
        "gpu_busy_ms": sum(event["dur"] for event in on_gpu) / 1e3,
        "kernels": sum(event["cat"] == "kernel" for event in on_gpu),
    }
