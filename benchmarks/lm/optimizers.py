"""The optimizers that can be compared, by name."""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.lm import UsageError


@dataclass(frozen=True)
class Entry:
    """Where an optimizer comes from and how it is built.

    Args:
        module, name: what to import.
        package: what to install to have it.
        family: "lion" or "adamw", which sets the default learning rate and weight decay.
        options: keyword arguments besides the learning rate and weight decay.
        accepts: which of a run's own options can be passed on.
        fp32_options: further ones for fp32 weights.
        device_types: where it runs; empty for everywhere.
    """

    module: str
    name: str
    package: str
    family: str = "lion"
    options: dict[str, Any] = field(default_factory=dict)
    accepts: tuple[str, ...] = ()
    fp32_options: dict[str, Any] = field(default_factory=dict)
    device_types: tuple[str, ...] = ()


_OURS = ("master_weight_bits", "stochastic_rounding", "offload_state")
REGISTRY = {
    "lion": Entry("lowbit_optim", "Lion", "lowbit-optim", accepts=_OURS),
    "lion8bit": Entry("lowbit_optim", "Lion8bit", "lowbit-optim", accepts=_OURS),
    "torch.AdamW": Entry("torch.optim", "AdamW", "torch", "adamw", {"betas": (0.9, 0.95), "fused": True}),
    "lion_pytorch.Lion": Entry("lion_pytorch", "Lion", "lion-pytorch"),
    "bnb.Lion": Entry("bitsandbytes.optim", "Lion", "bitsandbytes"),
    "bnb.Lion8bit": Entry("bitsandbytes.optim", "Lion8bit", "bitsandbytes"),
    "flashoptim.FlashLion": Entry(
        "flashoptim",
        "FlashLion",
        "flashoptim",
        accepts=("master_weight_bits",),
        fp32_options={"master_weight_bits": None},  # it refuses its own default there
        device_types=("cuda",),
    ),
    "torchao.AdamW8bit": Entry("torchao.optim", "AdamW8bit", "torchao", "adamw", {"betas": (0.9, 0.95)}),
}

# Larger models want smaller steps.
_ADAMW_LR = {"tiny": 5e-3, "30m": 1e-3, "words": 1e-3, "124m": 6e-4, "1b": 3e-4, "8b": 1.5e-4}
_ADAMW_WEIGHT_DECAY = 0.1
# Every step of Lion is as large as Adam's largest: lr is divided, and the product lr * weight_decay kept.
_LION_RATIO = 5


def find(name: str, device: torch.device) -> type[torch.optim.Optimizer]:
    """The class behind `name`, a key of `REGISTRY`.

    Raises:
        UsageError: there is no such name, it is not installed, or it does not run on `device`.
    """
    if name not in REGISTRY:
        raise UsageError(f"no optimizer is named {name!r}; choose from {', '.join(REGISTRY)}")
    entry = REGISTRY[name]
    if entry.device_types and device.type not in entry.device_types:
        raise UsageError(f"{name} runs on {' and '.join(entry.device_types)} only, not on {device.type}; leave it out")
    try:
        return getattr(importlib.import_module(entry.module), entry.name)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{name} cannot be imported ({error}); try: pip install --upgrade {entry.package}") from error


def default_lr(name: str, model_size: str) -> float:
    """Learning rate for a model of that size, a key of `CONFIGS`."""
    lr = _ADAMW_LR[model_size]
    return lr / _LION_RATIO if REGISTRY[name].family == "lion" else lr


def default_weight_decay(name: str) -> float:
    return _ADAMW_WEIGHT_DECAY * (_LION_RATIO if REGISTRY[name].family == "lion" else 1)


def check_accepts(name: str, options: dict[str, Any]) -> None:
    """Raises UsageError if the optimizer `name` has no such options."""
    for option in options:
        if option not in REGISTRY[name].accepts:
            having = ", ".join(other for other, entry in REGISTRY.items() if option in entry.accepts)
            raise UsageError(f"{name} has no {option}; {having} do")


def build(
    name: str, model: nn.Module, lr: float, weight_decay: float, options: dict[str, Any] | None = None
) -> torch.optim.Optimizer:
    """The optimizer `name` over `model`, with further `options`; matrices decay, vectors (norms) do not.

    Raises:
        UsageError: as `find` and `check_accepts`.
    """
    options = options or {}
    check_accepts(name, options)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer_class = find(name, parameters[0].device)
    entry = REGISTRY[name]
    fp32 = all(p.dtype == torch.float32 for p in parameters)
    return optimizer_class(groups, lr=lr, **entry.options, **(entry.fp32_options if fp32 else {}), **options)


def bytes_per_parameter(optimizer: torch.optim.Optimizer) -> float:
    """Bytes of memory that the optimizer's state takes for each parameter; shared memory counts once.

    Of sharded parameters, what this process holds of both.
    """
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in plain_tensors(list(optimizer.state.values()))
    }
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    held = sum((p.to_local() if hasattr(p, "to_local") else p).numel() for p in parameters)
    return sum(storages.values()) / held


def plain_tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in nested containers, a tensor subclass or an object as the tensors it is made of."""
    if hasattr(value, "__tensor_flatten__"):
        names, _ = value.__tensor_flatten__()
        value = [getattr(value, name) for name in names]
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from plain_tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from plain_tensors(item)
    elif hasattr(value, "__dict__"):  # FlashOptim keeps its state in objects that are no tensors
        yield from plain_tensors(vars(value))
