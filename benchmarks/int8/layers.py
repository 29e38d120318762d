"""Layers forward and backward: int8 beside bf16 and torchao's int8, in eager mode and under ``torch.compile``."""

import contextlib
import copy
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.int8.timing import attempt, milliseconds, seconds_until_done
from benchmarks.lm.model import ModelConfig, SwiGLU
from lowbit_optim.int8_training import convert_int8_mixed_precision

_LENGTHS = 20
ONE_THREAD = "eager, backward in the same thread"


def _torchao(model: nn.Module, module_swap: bool) -> nn.Module:
    from torchao import quantize_
    from torchao.prototype.quantized_training import int8_mixed_precision_training

    quantize_(model, int8_mixed_precision_training(module_swap=module_swap))
    return model


def _ours(model: nn.Module) -> nn.Module:
    return convert_int8_mixed_precision(model, filter_fn=lambda module, name: True)


CONTENDERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "bf16": lambda model: model,
    "ours": _ours,
    "torchao subclass": partial(_torchao, module_swap=False),
    "torchao swap": partial(_torchao, module_swap=True),
}


def swiglu(dim: int, ff: int) -> nn.Module:
    return SwiGLU(ModelConfig(vocab=2, layers=1, dim=dim, ff=ff, heads=1, kv_heads=1, tied=False))


# --- Forward and backward --------------------------------------------------------------------------------------------


def compare(
    tokens: int, dim: int, ff: int, device: torch.device, modes: list[str], contenders: list[str]
) -> Iterator[dict[str, Any]]:
    """A row for each mode and contender, of a SwiGLU MLP: milliseconds and speed over bf16 in the same mode."""
    model = swiglu(dim, ff).to(device, torch.bfloat16)
    for mode in modes:
        first = None
        for name in contenders:
            row = attempt(partial(_measure, model, name, mode, tokens, device))
            first = first or row.get("ms")
            if first and "ms" in row:
                row["× bf16"] = first / row["ms"]
            yield {"tokens": tokens, "dim, ff": (dim, ff), "mode": mode, "linear": name, **row}


def _measure(model: nn.Module, name: str, mode: str, tokens: int, device: torch.device) -> dict[str, Any]:
    step = _step(model, name, mode)
    x, grad = _inputs(model, tokens, device)
    first = seconds_until_done(lambda: step(x, grad), device)
    return {"ms": milliseconds(lambda: step(x, grad), device), "first call s": first}


def _step(model: nn.Module, name: str, mode: str) -> Callable[[Tensor, Tensor], None]:
    """Forward and backward, with gradients that are new each time."""
    model = CONTENDERS[name](copy.deepcopy(model))
    torch.compiler.reset()
    run = torch.compile(model) if mode == "compiled" else model
    own_thread = mode != ONE_THREAD

    def step(x: Tensor, grad: Tensor) -> None:
        model.zero_grad()
        x.grad = None
        with torch.autograd.set_multithreading_enabled(own_thread):
            run(x).backward(grad)

    return step


def _inputs(model: nn.Module, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    dim = next(module.in_features for module in model.modules() if isinstance(module, nn.Linear))
    x, grad = torch.randn(2, tokens, dim, device=device).bfloat16()
    return x.clone().requires_grad_(), grad


# --- Where the time goes ---------------------------------------------------------------------------------------------


def kernels(
    tokens: int, dim: int, ff: int, device: torch.device, mode: str, name: str, rows: int = 12
) -> Iterator[dict[str, Any]]:
    """The longest kernels of a step: milliseconds and calls a step, on the device (on CPUs: of ops)."""
    model = swiglu(dim, ff).to(device, torch.bfloat16)
    step, (x, grad) = _step(model, name, mode), _inputs(model, tokens, device)
    for _ in range(3):
        step(x, grad)
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    steps = 5
    with profile(activities=activities) as result:
        for _ in range(steps):
            step(x, grad)
        if on_gpu:
            torch.cuda.synchronize(device)
    time = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    events = [event for event in result.key_averages() if not on_gpu or event.device_type.name == "CUDA"]
    events.sort(key=lambda event: -getattr(event, time))
    total = sum(getattr(event, time) for event in events) / steps / 1e3
    yield {"mode": mode, "linear": name, "kernel": "all", "ms": total}
    for event in events[:rows]:
        ms, calls = getattr(event, time) / steps / 1e3, event.count / steps
        yield {"mode": mode, "linear": name, "kernel": event.key[:60], "ms": ms, "calls": calls}


# --- Smaller layers, and lengths that change ---------------------------------------------------------------------


def crossover(
    tokens: list[int],
    features: list[tuple[int, int]],
    device: torch.device,
    modes: list[str],
    force: Callable[[], contextlib.AbstractContextManager[Any]],
) -> Iterator[dict[str, Any]]:
    """Speed of one int8 linear layer over bf16, forward and backward, where ``force()`` keeps int8 switched on."""
    times: dict[tuple[int, str], float] = {}
    for outputs, inputs in features:
        model = nn.Sequential(nn.Linear(inputs, outputs, bias=False, device=device, dtype=torch.bfloat16))
        for mode in modes:
            for name in ("bf16", "ours"):
                step = _step(model, name, mode)
                for count in tokens:
                    x = torch.randn(count, inputs, device=device).bfloat16().requires_grad_()
                    grad = torch.randn(count, outputs, device=device).bfloat16()
                    with force():
                        times[count, name] = milliseconds(partial(step, x, grad), device)
            for count in tokens:
                row = {"mode": mode, "in, out": (inputs, outputs), "tokens": count, "m·n·k": count * inputs * outputs}
                plain, int8 = times[count, "bf16"], times[count, "ours"]
                yield row | {"bf16 ms": plain, "ours ms": int8, "× bf16": plain / int8}


def lengths(longest: int, dim: int, ff: int, device: torch.device, mode: str, name: str) -> dict[str, Any]:
    """Steps of 20 different lengths in a row: times over the median, of steps scaled to one length."""
    model = swiglu(dim, ff).to(device, torch.bfloat16)
    step = _step(model, name, mode)
    milliseconds_each = []
    for i in range(_LENGTHS):
        tokens = longest - 37 * i
        inputs = _inputs(model, tokens, device)
        milliseconds_each.append(1e3 * seconds_until_done(partial(step, *inputs), device) * longest / tokens)
    median = statistics.median(milliseconds_each)
    return {
        "mode": mode,
        "linear": name,
        "median ms": median,
        "first two ms": milliseconds_each[:2],
        "slowest later × median": max(milliseconds_each[2:]) / median,
    }
