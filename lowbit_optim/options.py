"""Checks of a parameter group's options. Each error names the option, what came, what is allowed and what to do."""

import difflib
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.utils._triton import has_triton_package

MIN_BLOCK_SIZE = 16  # also of a row: with fewer elements a scale costs more than the codes save
_WHOLE_OPTIMIZER_OPTIONS = {"seed", "fused", "offload_state"}
# Options of other optimizers, which torch.optim would keep in a group and ignore. Other unknown keys are metadata.
_FOREIGN_OPTIONS = {
    "amsgrad",
    "block_wise",
    "capturable",
    "differentiable",
    "eps",
    "foreach",
    "is_paged",
    "max_unorm",
    "min_8bit_size",
    "momentum",
    "nesterov",
    "optim_bits",
    "percentile_clipping",
    "learning_rate",
    "wd",
}


def check_group_keys(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """What a group may set. The groups of a live optimizer carry its defaults, and may be passed on to a new one."""
    misplaced = sorted(key for key in _WHOLE_OPTIMIZER_OPTIONS & set(group) if group[key] != defaults[key])
    if misplaced:
        raise ValueError(f"{misplaced[0]} holds for the whole optimizer: pass it to the constructor, not in a group")
    foreign = sorted(_FOREIGN_OPTIONS & set(group))
    if foreign:
        raise ValueError(
            f"{foreign[0]}={group[foreign[0]]!r} in a parameter group is not an option of this optimizer. To keep a "
            "group's momentum in 32 bits use quantize=False; for small tensors, min_quantized_numel."
        )
    for key in set(group) - set(defaults):
        meant = difflib.get_close_matches(key, defaults, n=1, cutoff=0.85)
        if meant:
            raise ValueError(f"{key}={group[key]!r} in a parameter group: did you mean {meant[0]}?")


def check_options(options: Mapping[str, Any]) -> None:
    """Every option of a group, the optimizer's defaults included."""
    lr, betas = options["lr"], options["betas"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"lr is a tensor of shape {tuple(lr.shape)}; it must be a float or a tensor of one element")
    if not isinstance(lr, Tensor) or lr.device.type == "cpu":
        _check_range("lr", lr, "a finite number of at least 0", lambda x: 0 <= x < math.inf)
    if not (isinstance(betas, (tuple, list)) and len(betas) == 2):
        raise ValueError(f"betas={betas!r}; it must be two numbers in [0, 1), for example (0.9, 0.99)")
    for i, beta in enumerate(betas):
        _check_range(f"betas[{i}]", beta, "in [0, 1)", lambda x: 0 <= x < 1)
    _check_range("weight_decay", options["weight_decay"], "a finite number of at least 0", lambda x: 0 <= x < math.inf)
    _check_int("block_size", options["block_size"], MIN_BLOCK_SIZE)
    _check_int("min_quantized_numel", options["min_quantized_numel"], 0)
    _check_int("seed", options["seed"], None)
    for name in ("quantize", "stochastic_rounding", "decouple_lr", "maximize", "offload_state"):
        if not isinstance(options[name], bool):
            raise TypeError(f"{name}={options[name]!r}; it must be True or False")
    if options["master_weight_bits"] not in (None, 24, 32):
        raise ValueError(f"master_weight_bits={options['master_weight_bits']!r}; it must be None, 24 or 32")
    _check_fused(options["fused"])


def _check_fused(fused: Any) -> None:
    if fused not in (None, True, False):
        raise TypeError(f"fused={fused!r}; it must be None, True or False")
    if fused and not has_triton_package():
        raise RuntimeError(
            "fused=True needs Triton, which cannot be imported here: install it, or leave fused=None, which steps the "
            "parameters one by one with the same results"
        )


def _check_range(name: str, value: Any, allowed: str, is_allowed: Callable[[float], bool]) -> None:
    is_number = isinstance(value, numbers.Real) or (isinstance(value, Tensor) and value.numel() == 1)
    if isinstance(value, bool) or not is_number:
        raise TypeError(f"{name}={value!r} is {type(value).__name__}; it must be a number, {allowed}")
    if not is_allowed(float(value)):
        raise ValueError(f"{name}={value!r}; it must be {allowed}")


def _check_int(name: str, value: Any, minimum: int | None) -> None:
    allowed = "an integer" if minimum is None else f"an integer of at least {minimum}"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name}={value!r} is {type(value).__name__}; it must be {allowed}")
    if minimum is not None and value < minimum:
        hint = "; to keep momentum in 32 bits use quantize=False" if name == "block_size" else ""
        raise ValueError(f"{name}={value!r}; it must be {allowed}{hint}")
