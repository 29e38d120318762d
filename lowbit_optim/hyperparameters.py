"""The numbers that a group is stepped with: learning rate, weight decay, betas, and the count of steps.

Each may be a number of the host's or a tensor on a device, which is used where it is: a step waits for no device.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def as_scalar(value: float | Tensor, device: torch.device) -> Tensor:
    """0-D float32. A value of the host stays there: a kernel takes it as an argument."""
    if not isinstance(value, Tensor):
        return torch.tensor(value, dtype=torch.float32, device="cpu")
    return on_device(value.detach().reshape(()).float(), device)


def host_value(value: float | Tensor) -> float | Tensor:
    """A float wherever reading it waits for no device, since products of floats are formed in fp64."""
    if not isinstance(value, Tensor) or value.device.type != "cpu" or torch.compiler.is_compiling():
        return value
    return value.item()


def decay_of_step(group: Mapping[str, Any]) -> float | Tensor:
    """The share of itself that a weight loses in this step: never NaN, and 0 where lr is."""
    lr, weight_decay = host_value(group["lr"]), group["weight_decay"]
    if not group["decouple_lr"]:
        return lr * weight_decay
    initial_lr = host_value(group["initial_lr"])
    if isinstance(lr, Tensor) or isinstance(initial_lr, Tensor):
        lr, initial_lr = torch.as_tensor(lr), torch.as_tensor(initial_lr)
        return torch.where(lr == 0, 0.0, weight_decay * (lr / initial_lr))
    if lr == 0.0:
        return 0.0
    if initial_lr == 0.0:
        raise ValueError(
            f"decouple_lr scales weight decay by lr / initial_lr, and initial_lr is 0 while lr is {lr}. Give the "
            "optimizer its full learning rate (a warm-up belongs in a scheduler), or set group['initial_lr']."
        )
    return weight_decay * (lr / initial_lr)


def on_device(value: Tensor, device: torch.device) -> Tensor:
    return value if value.device == device or value.device.type == "cpu" else value.to(device)


def kernel_scalars(scalars: tuple[float | Tensor, ...], device: torch.device) -> tuple[float | Tensor, ...]:
    """As the fused kernel takes them: lr and decay both floats, or both 0-D float32 on a device; the others floats."""
    lr, decay, *others = (host_value(value) for value in scalars)
    if isinstance(lr, Tensor) or isinstance(decay, Tensor):
        lr, decay = (torch.as_tensor(value, dtype=torch.float32, device=device).reshape(()) for value in (lr, decay))
    else:
        lr, decay = float(lr), float(decay)
    return lr, decay, *(float(value) for value in others)


def check_lr(group: Mapping[str, Any]) -> None:
    lr = host_value(group["lr"])
    if is_capturing() and not (isinstance(lr, Tensor) and lr.device == group["step"].device):
        raise RuntimeError(
            "a CUDA graph would use this step's learning rate and rounding noise in every replay: give the learning "
            "rate as a tensor on the device, and run one step with it before this one is captured"
        )
    if not isinstance(lr, Tensor) and not math.isfinite(lr):
        raise ValueError(f"lr is {lr} in this step; it must be finite. Look at what set it: a scheduler, or by hand")


def advance_step(group: dict[str, Any], found_inf: Tensor | None) -> bool:
    """Count a step if it moves weights, and say whether it does: DCP creates state with a hidden step at lr 0.

    A learning rate on a device is not waited for, nor is ``found_inf``; the count is then the device's, and the answer
    True.
    """
    lr = host_value(group["lr"])
    moves = [] if found_inf is None else [found_inf.reshape(()) == 0]
    if isinstance(lr, Tensor):
        moves.insert(0, lr.detach().reshape(()) != 0)
    elif lr == 0.0:
        return False
    if not moves:
        group["step"] = group["step"] + 1
        return True
    device = moves[0].device
    if group["step"].device != device:
        group["step"] = group["step"].to(device)
    # in place, so that a captured graph goes on counting
    group["step"].add_(functools.reduce(torch.logical_and, [each.to(device) for each in moves]))
    return True


def is_capturing() -> bool:
    if torch.compiler.is_compiling() or not torch.cuda.is_initialized():
        return False
    return torch.cuda.is_current_stream_capturing()


def step_as_tensor(group: dict[str, Any]) -> None:
    if not isinstance(group.get("step"), Tensor):
        group["step"] = torch.tensor(group.get("step", 0), dtype=torch.int64, device="cpu")
