"""One row: what is in memory at the peak of a training step, and how long the step takes."""

import gc
import importlib
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from benchmarks.lm import UsageError, optimizers
from benchmarks.lm.model import CONFIGS, GPT

_WARM_UP_STEPS = 3
_RELEASES = {
    "lowbit-optim": ("lowbit_optim", "gradient_release"),
    "flashoptim": ("flashoptim", "enable_gradient_release"),
}
_STEPS_IN_BACKWARD_ALONE = {"flashoptim"}  # their step() then does nothing, with a warning


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Args:
        model: a key of ``CONFIGS``.
        optimizer: a key of the optimizers' registry.
        options: keyword arguments besides the registry's.
        gradient_release: whether parameters are stepped inside backward.
        batch_size, seq_len: of the tokens.
        device: "cpu", "cuda", "cuda:1", ...
        layers: cuts the model's depth.
        timed_steps: besides those that are measured for memory.
    """

    model: str
    optimizer: str
    device: str
    options: dict[str, Any] = field(default_factory=dict)
    gradient_release: bool = False
    batch_size: int = 1
    seq_len: int = 2048
    layers: int | None = None
    timed_steps: int = 12


@dataclass
class Moment:
    """A stretch of a step, from one gradient's arrival to the next: its peak, and the gradients there at its start."""

    phase: str
    peak: int
    gradients: int


def measure_memory(case: Case) -> dict[str, Any]:
    """Train for a few steps.

    Returns:
        ``weights``, ``state``, ``gradients``, ``activations``, ``temporary``: bytes on the device when most is
        allocated. ``activations`` is all else during forward and backward, ``temporary`` all else during the step.
        ``peak``: their sum; ``reserved``: what the caching allocator had taken by then. ``phase``: when that is.
        ``parameters``: a count. ``state_in_all``: bytes of state, wherever it is.
        ``iteration_ms``, ``step_ms``: medians of whole iterations and of ``optimizer.step()`` in them.
        On CPUs, which count no allocations, ``peak`` and what follows from it are None.
    """
    device = torch.device(case.device)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    meter = CudaMeter(device) if device.type == "cuda" else NoMeter()
    model = _make_model(case, device)
    optimizer, steps = _make_optimizer(case, model)
    train = _Training(model, optimizer, steps, _tokens(case, device))
    for _ in range(_WARM_UP_STEPS):
        train.iterate()
    result = _measure_split(train, meter)
    result |= _measure_time(train, device, case.timed_steps)
    result["state_in_all"] = round(optimizers.bytes_per_parameter(optimizer) * result["parameters"])
    return result


class _Training:
    def __init__(self, model: GPT, optimizer: Optimizer, steps: bool, tokens: Tensor) -> None:
        self.model, self.optimizer, self.tokens = model, optimizer, tokens
        self.steps = steps

    def backward(self) -> None:
        self.model.loss(self.tokens[:, :-1], self.tokens[:, 1:]).backward()

    def step(self) -> None:
        if self.steps:
            self.optimizer.step()

    def iterate(self) -> None:
        self.backward()
        self.step()
        if self.steps:
            self.optimizer.zero_grad()


def _make_model(case: Case, device: torch.device) -> GPT:
    torch.manual_seed(0)
    config = CONFIGS[case.model]
    config = replace(config, layers=case.layers or config.layers)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model = GPT(config)
    finally:
        torch.set_default_dtype(default)
    model.checkpoint_activations = True
    return model


def _make_optimizer(case: Case, model: GPT) -> tuple[Optimizer, bool]:
    """And whether its ``step`` is to be called."""
    cls = optimizers.find(case.optimizer, next(model.parameters()).device)
    entry = optimizers.REGISTRY[case.optimizer]
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = cls(groups, lr=1e-5, **{**entry.options, **case.options})
    if case.gradient_release:
        if entry.package not in _RELEASES:
            raise UsageError(f"{case.optimizer} has no gradient release; leave it out")
        module, name = _RELEASES[entry.package]
        getattr(importlib.import_module(module), name)(model, optimizer)
    return optimizer, not (case.gradient_release and entry.package in _STEPS_IN_BACKWARD_ALONE)


def _tokens(case: Case, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    vocab = CONFIGS[case.model].vocab
    return torch.randint(vocab, (case.batch_size, case.seq_len + 1), generator=generator).to(device)


# --- Memory ----------------------------------------------------------------------------------------------------------


class CudaMeter:
    """Bytes that torch's allocator has given out."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def reset(self) -> None:
        """Also gives back what earlier steps had reserved."""
        torch.cuda.synchronize(self._device)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def take_peak(self) -> int:
        """Since it was last taken. Copies and kernels of other streams count from when they are asked for."""
        peak = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak

    def reserved(self) -> int:
        return torch.cuda.memory_reserved(self._device)


class NoMeter:
    """Where allocations are not counted."""

    def reset(self) -> None:
        pass

    def allocated(self) -> int:
        return 0

    take_peak = reserved = allocated


def _measure_split(train: _Training, meter: Any) -> dict[str, Any]:
    parameters = list(train.model.parameters())
    weights = sum(p.nbytes for p in parameters)
    meter.reset()
    between_steps = meter.allocated()
    gradients = _Gradients()
    moments: list[Moment] = []
    with _on_arrival(parameters, lambda p: _note_arrival(p, gradients, moments, meter)):
        train.backward()
    moments.append(Moment("backward", meter.take_peak(), gradients.alive()))
    before = gradients.alive()
    train.step()
    moments.append(Moment("step", meter.take_peak(), before))
    reserved = meter.reserved()
    train.optimizer.zero_grad()
    result = {"parameters": sum(p.numel() for p in parameters), "weights": weights}
    if between_steps:
        state = _bytes_on(parameters[0].device, train.optimizer)
        result |= split_at_peak(moments, weights, state) | {"reserved": reserved}
    else:
        result |= {"gradients": before, "peak": None}
    return result


def _note_arrival(p: Tensor, gradients: "_Gradients", moments: list[Moment], meter: Any) -> None:
    moments.append(Moment("backward", meter.take_peak(), gradients.alive()))
    if p.grad is not None:
        gradients.add(p.grad)


def _bytes_on(device: torch.device, optimizer: Optimizer) -> int:
    tensors = optimizers.plain_tensors(list(optimizer.state.values()))
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.device == device}
    return sum(storages.values())


def split_at_peak(moments: list[Moment], weights: int, state: int) -> dict[str, Any]:
    """What the highest of them consists of."""
    highest = max(moments, key=lambda moment: moment.peak)
    rest = highest.peak - weights - state - highest.gradients
    return {
        "state": state,
        "gradients": highest.gradients,
        "activations": 0 if highest.phase == "step" else rest,
        "temporary": rest if highest.phase == "step" else 0,
        "peak": highest.peak,
        "phase": highest.phase,
    }


class _Gradients:
    """Those that have arrived and are still in memory, whoever holds them."""

    def __init__(self) -> None:
        self._storages: list[tuple[StorageWeakRef, int]] = []

    def add(self, grad: Tensor) -> None:
        self._storages.append((StorageWeakRef(grad.untyped_storage()), grad.nbytes))

    def alive(self) -> int:
        self._storages = [(ref, nbytes) for ref, nbytes in self._storages if not ref.expired()]
        return sum(nbytes for _, nbytes in self._storages)


@contextmanager
def _on_arrival(parameters: list[nn.Parameter], function: Callable[[Tensor], None]) -> Iterator[None]:
    """Ahead of all hooks that there are, which may free the gradient."""
    hooks = []
    for p in parameters:
        others = dict(p._post_accumulate_grad_hooks or {})
        hooks.append(p.register_post_accumulate_grad_hook(function))
        for key, hook in others.items():  # they are called in the order in which they came
            del p._post_accumulate_grad_hooks[key]
            p._post_accumulate_grad_hooks[key] = hook
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


# --- Time ------------------------------------------------------------------------------------------------------------


def _measure_time(train: _Training, device: torch.device, steps: int) -> dict[str, Any]:
    """With the host running ahead, as in training."""
    clock = _Clock(device)
    marks = [clock.mark()]
    for _ in range(steps):
        train.backward()
        marks.append(clock.mark())
        train.step()
        if train.steps:
            train.optimizer.zero_grad()
        marks.append(clock.mark())
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    whole = [clock.ms(a, b) for a, b in zip(marks[:-2:2], marks[2::2], strict=True)]
    step = [clock.ms(a, b) for a, b in zip(marks[1::2], marks[2::2], strict=True)]
    return {"iteration_ms": statistics.median(whole), "step_ms": statistics.median(step)}


class _Clock:
    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"

    def mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, a: Any, b: Any) -> float:
        return a.elapsed_time(b) if self._on_gpu else (b - a) * 1e3
