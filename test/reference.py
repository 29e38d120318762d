"""The references that every optimizer test is held to, written from the paper; nothing of the package is imported."""

import torch
from torch import Tensor


def lion_reference(
    p: Tensor, g: Tensor, m: Tensor, lr: float, beta1: float, beta2: float, weight_decay: float
) -> tuple[Tensor, Tensor]:
    """One step of Lion, algorithm 2 of Chen et al. 2023 (arXiv:2302.06675), in the dtype of its inputs.

    ``p`` (weights), ``g`` (gradient) and ``m`` (momentum) have one shape and one dtype, float32 or float64, and stay as
    they are. Returns the new weights and the new momentum.
    """
    update = (beta1 * m + (1 - beta1) * g).sign()
    new_p = p - lr * (update + weight_decay * p)
    new_m = beta2 * m + (1 - beta2) * g
    return new_p, new_m


def ulp(x: Tensor, dtype: torch.dtype) -> Tensor:
    """float64: the distance of neighbours in ``dtype`` around each element of ``x``, were its exponents unlimited."""
    significant, smallest = {torch.bfloat16: (8, -126), torch.float16: (11, -14)}[dtype]
    _, exponent = torch.frexp(x.double())
    exponent = (exponent - 1).clamp(min=smallest)
    exponent = exponent.to(torch.int64) - (significant - 1)
    return ((exponent + 1023) << 52).view(torch.float64)  # by its bits, since a GPU's powers of 2 may be rounded


def nearest_weight(x: Tensor, dtype: torch.dtype) -> Tensor:
    """float64: ``x`` rounded to the nearest of ``dtype``, ties away from zero, were its exponents unlimited."""
    distance = ulp(x, dtype)
    return torch.copysign((x.double().abs() / distance + 0.5).floor() * distance, x.double())
