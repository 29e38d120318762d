"""Int8 mixed-precision training written from its description, in float64; it imports nothing of the package."""

import torch
from torch import Tensor


def quantized(x: Tensor) -> Tensor:
    """What rows of ``x`` are after quantisation to 255 levels between minus and plus their largest absolute value."""
    x = x.double()
    scale = x.abs().amax(1, keepdim=True) / 127
    return torch.where(scale == 0, 0, (x / scale).round()) * scale


def linear(
    x: Tensor, weight: Tensor, grad: Tensor, *, output: bool, grad_input: bool, grad_weight: bool
) -> list[Tensor]:
    """Output and the gradients of input and weight, each product's operands quantised along what is summed over.

    ``x`` is ``(tokens, in)``, ``weight`` ``(out, in)``, ``grad``, of the output, ``(tokens, out)``; all float64.
    """

    def product(a: Tensor, b: Tensor, in_int8: bool) -> Tensor:
        return quantized(a) @ quantized(b).T if in_int8 else a.double() @ b.double().T

    return [
        product(x, weight, output),
        product(grad, weight.T, grad_input),
        product(grad.T, x.T, grad_weight),
    ]


def snr_db(signal: Tensor, exact: Tensor) -> float:
    """Signal-to-noise ratio in decibels of an approximation of ``exact``."""
    exact = exact.double()
    return 20 * torch.log10(exact.norm() / (signal.double() - exact).norm()).item()
